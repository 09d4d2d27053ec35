"""Small GGUF files as llama.cpp's converter writes them: a Llama with a byte-level tokenizer, and drafters."""

from pathlib import Path

import gguf
import numpy as np
import torch
from tiny_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
}  # fmt: skip
_DRAFT_NAMES = {  # spelled out independently of the package, after conversion/qwen.py and gguf-py's tensor_mapping.py
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "hidden_norm": "enc.output_norm",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "embed_tokens": "token_embd",
    "candidate_selector.hidden_projection": "selector_hidden",
    "markov_head.markov_w": "markov_w",
    "layers.": "blk.",
    **_NAMES,
}
MASK = "tokenizer.ggml.mask_token_id"
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


def write_header(path: Path, arch: str, keys: dict) -> Path:
    """Write a file with metadata, and embeddings as its only tensor."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", torch.zeros(8, 8).numpy())
    write(writer)
    return path


def draft_keys(config: dict, arch: str = "dflash") -> dict:
    """Return the metadata that converters write of a published config: llama.cpp's, or for other names a fork's."""
    section = config.get("dflash_config") or {}
    given = {**config, **section}
    names = {
        "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
        "attention.value_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta", "logit_scale": "output_multiplier", "embedding_scale": "input_embedding_scale",
        "attention.value_scale": "attention_value_scale", "attention.causal": "is_causal", "block_size": "block_size",
        **{key: key for key in ("final_logit_softcapping", "conv_kernel_size", "conv_group_size", "selector_rank")},
        **{key: key for key in ("selector_top_k", "sample_from_anchor")},
    }  # fmt: skip
    keys = {f"{arch}.{theirs}": given[ours] for theirs, ours in names.items() if given.get(ours) is not None}
    if given.get("use_sliding_window"):
        keys[f"{arch}.attention.sliding_window"] = given["sliding_window"]
        keys[f"{arch}.attention.sliding_window_pattern"] = [k == "sliding_attention" for k in given["layer_types"]]
    taps = given["target_layer_ids"]
    if arch == "dflash":
        return keys | {"dflash.target_layers": [tap + 1 for tap in taps], MASK: given["mask_token_id"]}
    keys[f"{arch}.dflash.block_size"] = keys.pop(f"{arch}.block_size")
    own = {"n_target_layers": len(taps), "target_layer_ids": taps, "mask_token_id": given["mask_token_id"]}
    return keys | {f"{arch}.vocab_size": given["vocab_size"]} | {f"{arch}.dflash.{key}": own[key] for key in own}


def draft_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return published tensors under llama.cpp's names."""
    out = {}
    for name, tensor in tensors.items():
        for ours, theirs in (_DRAFT_NAMES | {"norm.weight": "output_norm.weight"}).items():
            is_whole = ours not in ("norm.weight", "hidden_norm") or name.startswith(ours)
            name = name.replace(ours, theirs) if is_whole else name
        out[name] = tensor
    return out


def write_draft(
    path: Path, keys: dict, tensors: dict[str, torch.Tensor], quantization=gguf.GGMLQuantizationType.F32,
    arch: str = "dflash", tokens: int = 101,
) -> Path:  # fmt: skip
    """Write a drafter's file; ``keys`` that are None are left out. Matrices are stored in ``quantization``."""
    writer, types = gguf.GGUFWriter(path, arch), gguf.GGUFValueType
    if arch == "dflash":
        writer.add_token_list([f"t{index}" for index in range(tokens)])
    for key, value in ((key, value) for key, value in keys.items() if value is not None):
        writer.add_key_value(key, value, types.UINT32 if type(value) is int else types.get_type(value))
    for name, tensor in tensors.items():
        is_matrix = tensor.dim() > 1 and name.endswith(".weight") and tensor.shape[-1] % 32 == 0
        if name == "d2t":
            writer.add_tensor(name, tensor.numpy())
            continue
        kind = quantization if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    write(writer)
    return path


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama(
    path: Path, quantization=gguf.GGMLQuantizationType.F32, *, rare: int | None = None, rope: dict | None = None,
    keys: dict | None = None, extra: dict | None = None, width: int = 96, config: dict | None = None,
) -> LlamaForCausalLM:  # fmt: skip
    """Write a random Llama, and return the model.

    It hardly ever writes the token ``rare``. ``rope`` scales its RoPE, ``keys`` are more of the metadata, ``extra``
    more tensors, ``width`` what it says of its MLPs (they have 96), ``config`` more of the config. ``quantization`` may
    be a function of the names of tensors.
    """
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0} | (rope or {})
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0, bos_token_id=0, tie_word_embeddings=False,
        initializer_range=0.3, rope_parameters=rope, **(config or {}),
    )).eval()  # fmt: skip
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor)
    if rare is not None:
        model.lm_head.weight.data *= 2  # the others are far above it
        model.lm_head.weight.data[rare] = 0
    writer, config = gguf.GGUFWriter(path, "llama"), model.config
    if rope["rope_type"] == "llama3":  # as conversion/llama.py
        plain = 10000.0 ** -(torch.arange(8) / 8)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    elif rope["rope_type"] != "default":  # as conversion/base.py
        writer.add_string("llama.rope.scaling.type", rope["rope_type"])
        writer.add_float32("llama.rope.scaling.factor", rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_uint32("llama.rope.scaling.original_context_length", rope["original_max_position_embeddings"])
    for key, value in (keys or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_name("tiny")
    writer.add_block_count(4)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(width)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(97)
    add_tokenizer(writer)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    for name, weight in model.state_dict().items():
        if heads := {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]):  # llama.cpp pairs neighbors in its RoPE
            weight = weight.view(heads, 2, 8, -1).transpose(1, 2).reshape(weight.shape)
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        data, kind = weight.numpy(), quantization(name) if callable(quantization) else quantization
        if weight.dim() == 2 and weight.shape[1] % 32 == 0 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    write(writer)
    return model


def write_qwen35(path: Path) -> Path:
    """Write a random Qwen3.5 of a recurrent layer and one with attention.

    Each block of ``ssm_out`` (Q4_K) has the columns of two value heads, which transformers has in another order.
    """
    keys = {
        "block_count": 2, "context_length": 256, "embedding_length": 256, "feed_forward_length": 256,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
        "attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.recurrent_layers": [True, False], "rope.freq_base": 10000.0, "rope.dimension_count": 16,
        "rope.dimension_sections": [3, 3, 2, 0],
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 2, "ssm.time_step_rank": 4,
        "ssm.inner_size": 512,
    }  # fmt: skip
    mlp = {"ffn_gate": (256, 256), "ffn_up": (256, 256), "ffn_down": (256, 256)}
    layers = (
        {"attn_qkv": (1024, 256), "attn_gate": (512, 256), "ssm_alpha": (4, 256), "ssm_beta": (4, 256),
         "ssm_out": (256, 512), "ssm_conv1d": (1024, 4), "ssm_norm": (128,), **mlp},
        {"attn_q": (512, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
         "attn_q_norm": (64,), "attn_k_norm": (64,), **mlp},
    )  # fmt: skip
    shapes = {"token_embd": (97, 256), "output": (97, 256), "output_norm": (256,)}
    for i, layer in enumerate(layers):
        own = {**layer, "attn_norm": (256,), "post_attention_norm": (256,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    writer, random = gguf.GGUFWriter(path, "qwen35"), np.random.default_rng(0)
    for key, value in keys.items():
        writer.add_key_value(f"qwen35.{key}", value, gguf.GGUFValueType.get_type(value))
    add_tokenizer(writer)
    writer.add_tensor("blk.0.ssm_a", -random.random(4, np.float32))
    writer.add_tensor("blk.0.ssm_dt.bias", random.random(4, np.float32))
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType.Q8_0
        if name.endswith(("ssm_out", "attn_gate")):
            made, kind = random.integers(0, 256, (shape[0], shape[1] // 256, 144), np.uint8), kind.Q4_K
            made[..., :4] = np.array([3e-4, 22e-4], np.float16).view(np.uint8)  # scale, and half of the codes' range
            made = made.reshape(shape[0], -1)
        elif len(shape) == 1 or "conv" in name:
            made, kind = 1 + random.normal(0, 0.1, shape).astype(np.float32), kind.F32
        else:
            made = gguf.quants.quantize(random.normal(0, 0.1, shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", made, raw_dtype=kind)
    write(writer)
    return path

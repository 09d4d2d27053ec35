"""The layout of GGUF drafters: keys and tensors of llama.cpp's ``dflash`` and of its forks.

Read in llama.cpp, build 11434: conversion/qwen.py writes them, src/models/dflash.cpp and common/speculative.cpp run
them. The forks (architecture ``dflash-draft`` and others) count taps from 0, and name four tensors differently.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..drafter.config import DFLASH2_KEYS, DSPARK_ARCHITECTURE, FULL, KEYS, SLIDING, layers_from
from ..terminal import listed, named, printable, shortened
from .gguf import PLAIN, BlocksOfFile, GgufFile, shortest

LLAMA_CPP = "dflash"
MASK, TOKENS = "tokenizer.ggml.mask_token_id", "tokenizer.ggml.tokens"
# fmt: off
GGUF_KEYS = {  # keys of the published layout -> those of a file, after its architecture
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length", "block_size": "block_size",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    "hidden_act": "hidden_activation", "is_causal": "attention.causal", "sample_from_anchor": "sample_from_anchor",
    "attention_value_scale": "attention.value_scale", "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale", "final_logit_softcapping": "final_logit_softcapping",
    **{key: key for key in DFLASH2_KEYS},
}
_TENSORS = {  # names of published checkpoints -> those of a file
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight", "d2t": "d2t",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight", "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight", "confidence_head.proj.bias": "conf_proj.bias",
}
_LAYER_TENSORS = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight", "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight", "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
# fmt: on
_FORK_TENSORS = {f"dflash{mark}{ours}": ours for mark in "._" for ours in ("fc.weight", "hidden_norm.weight")}
_REFUSED = {  # parts of tensors' names, and what they are
    "attn_gate": "gated attention", ".domino.": "a Domino head", ".dspark.": "a fork's DSpark head",
    "post_attention_norm": "a norm after attention", "post_ffw_norm": "a norm after the MLP",
    "layer_output_scale": "scaled layers", "rope_freqs": "RoPE with frequencies of its own (as llama3)",
}  # fmt: skip
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
_IGNORED = (
    *("has_confidence_head", "n_target_features", "n_target_layers", "rope.scaling.finetuned", "target_hidden"),
    "vocab_size",
)


def tensor_names(layers: int) -> dict[str, str]:
    """Return the name in a file of each tensor of a published checkpoint with so many layers."""
    return _TENSORS | {
        f"layers.{index}.{ours}": f"blk.{index}.{theirs}"
        for index in range(layers) for ours, theirs in _LAYER_TENSORS.items()
    }  # fmt: skip


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the published form of a drafter's metadata.

    Raises:
        ValueError: this is no drafter, a key is missing, or one asks for what is not implemented.
    """
    try:
        return _read_config(file)
    except ValueError as error:
        raise ValueError(f"{printable(file.path)}: {error}") from None


def _read_config(file: GgufFile) -> dict[str, Any]:
    arch, shapes = file.architecture, file.shapes
    if not file.is_draft:
        raise ValueError(f"a model of architecture {named(arch)}, not a DFlash drafter: give it as target")
    # 1. The keys that say the same in both layouts. Forks put some of them under dflash
    given = {
        key.removeprefix(f"{arch}.").removeprefix("dflash."): value
        for key, value in file.metadata.items() if key.startswith(f"{arch}.")
    }  # fmt: skip
    if "logit_softcap" in given:  # of forks
        given["final_logit_softcapping"] = given.pop("logit_softcap")
    out: dict[str, Any] = {}
    for name, key in GGUF_KEYS.items():
        if key in given:
            out[name] = KEYS[name].check(f"{arch}.{key}", given.pop(key))
        elif name in _REQUIRED:
            raise ValueError(f"{arch}.{key} is missing")
    head_dim = KEYS["head_dim"].check("head_dim", out.get("head_dim", out["hidden_size"] // out["num_attention_heads"]))
    # 2. What this package has one value for
    neutral = {
        "attention.value_length": head_dim, "rope.dimension_count": head_dim, "hyper_connection.count": 0,
        "attention.scale": shortest(head_dim**-0.5), "domino.enabled": 0,
        "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0, "rope.scaling.yarn_ext_factor": 1.0,
    }  # fmt: skip
    for key, value in neutral.items():
        if (stated := given.pop(key, value)) != value:
            raise ValueError(f"{arch}.{key} = {shortened(stated)} is not supported: it must be {value}")
    sections = given.pop("rope.dimension_sections", [1])  # of drafters for M-RoPE: texts have the first one only
    if not isinstance(sections, list) or any(sections[1:]):
        raise ValueError(f"{arch}.rope.dimension_sections = {shortened(sections)} is not supported: only one is")
    # 3. Taps and mask
    name, first = (
        ("target_layers", 1) if "target_layers" in given or arch == LLAMA_CPP else ("dflash.target_layer_ids", 0)
    )
    taps, mask = given.pop(name.removeprefix("dflash."), None), given.pop("mask_token_id", file.metadata.get(MASK))
    if taps is None or mask is None:
        raise ValueError(f"{MASK if mask is None else f'{arch}.{name}'} is missing")
    taps = [tap - first for tap in layers_from(first)(f"{arch}.{name} (counted from {first})", taps)]
    # 4. What the tensors say: the kind of drafter, vocabularies, sinks
    tokens, out["attention_sink_bias"] = file.metadata.get(TOKENS), "blk.0.attn_sinks.weight" in shapes
    out["vocab_size"] = len(tokens) if isinstance(tokens, list) else given.get("vocab_size")
    out["architectures"] = ["DFlash2DraftModel" if "selector_hidden.weight" in shapes else "DFlashDraftModel"]
    if "markov_w1.weight" in shapes:
        out |= {"architectures": [DSPARK_ARCHITECTURE], "markov_rank": shapes["markov_w1.weight"][-1]}
    else:
        out.pop("sample_from_anchor", None)  # llama.cpp does not read it then
    if "d2t" in shapes:
        out["draft_vocab_size"] = shapes["d2t"][0]
    # 5. Windows and RoPE
    out |= _read_windows(arch, given, out["num_hidden_layers"]) | {"rope_scaling": _read_rope(given)}
    if out.get("layer_types") and "is_causal" not in out:
        what = f"{arch}.attention.causal is missing: no layer is causal, as in llama.cpp"
        warnings.warn(f"{printable(file.path)}: {what}; layers with windows may have been trained so", stacklevel=2)
    if unknown := sorted(f"{arch}.{key}" for key in given if key not in _IGNORED):
        warnings.warn(f"{printable(file.path)}: unknown keys are ignored: {listed(unknown)}", stacklevel=2)
    out.setdefault("is_causal", False)
    return out | {"model_type": "qwen3", "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps}}


def _read_windows(arch: str, given: dict[str, Any], layers: int) -> dict[str, Any]:
    name = f"{arch}.attention.sliding_window"
    window, pattern = given.pop("attention.sliding_window", 0), given.pop("attention.sliding_window_pattern", None)
    if pattern is None and window and arch == LLAMA_CPP:
        raise ValueError(f"{name}_pattern is missing, and {name} is {shortened(window)}: which layers have it?")
    if pattern is not None and not (isinstance(pattern, list) and [*map(type, pattern)] == [bool] * layers):
        raise ValueError(f"{name}_pattern must be {layers} booleans, got {shortened(pattern)}")
    if any(pattern or ()) and not window:
        raise ValueError(f"{name} is missing, and {name}_pattern names layers with one")
    kinds = [SLIDING if sliding else FULL for sliding in pattern or ()]
    stated = {"layer_types": kinds, "use_sliding_window": True} if SLIDING in kinds else {}
    return stated | {"sliding_window": window or None}


def _read_rope(given: dict[str, Any]) -> dict[str, Any] | None:
    names = {"type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings"}
    names |= {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    out = {"rope_type": "linear", "factor": given.pop("rope.scale_linear", 1.0)}  # what llama.cpp takes for missing
    out |= {ours: given.pop(key) for name, ours in names.items() if (key := f"rope.scaling.{name}") in given}
    return None if out["rope_type"] == "none" or (out["rope_type"], out["factor"]) == ("linear", 1) else out


def gguf_tensors(file: GgufFile, layers: int) -> dict[str, Tensor | BlocksOfFile]:
    """Return a drafter's tensors under their published names. Quantized ones are not read yet.

    Raises:
        ValueError: a tensor is unknown, not implemented, there twice, or cannot be read.
    """
    where, is_fork = printable(file.path), file.architecture != LLAMA_CPP
    names = {theirs: ours for ours, theirs in tensor_names(layers).items()}
    if is_fork:
        norms = {f"blk.{i}.post_attention_norm.weight": names[f"blk.{i}.ffn_norm.weight"] for i in range(layers)}
        names |= _FORK_TENSORS | norms
    # 1. Every tensor has one place
    places: dict[str, str] = {}
    for theirs in file.shapes:
        if what := next((what for part, what in _REFUSED.items() if part in theirs and theirs not in names), ""):
            raise ValueError(f"{where}: tensor {named(theirs)} is not supported: {what} is not implemented")
        if (other := places.setdefault(names.get(theirs, theirs), theirs)) != theirs:
            raise ValueError(f"{where}: tensors {named(other)} and {named(theirs)} are the same one")
    if unknown := file.shapes.keys() - names.keys():
        raise ValueError(f"{where}: unknown tensors: {listed(sorted(unknown))}")
    # 2. Read them, and undo what differs
    out: dict[str, Any] = {}
    for ours, theirs in places.items():
        is_plain = file.kind(theirs) in PLAIN or len(file.shapes[theirs]) == 1
        out[ours] = file.tensor(theirs) if is_plain else BlocksOfFile(file, theirs)
    if "d2t" in out and not is_fork:
        out["d2t"] = out["d2t"] - torch.arange(len(out["d2t"]))  # the target's ids there, differences here
    if "embed_tokens.weight" in out:  # llama.cpp predicts with it then
        out.setdefault("lm_head.weight", out["embed_tokens.weight"])
    return out

"""Scaled-down configs of every kind of published drafter, and random checkpoints of them."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash import DraftConfig, Drafter

FULL, SLIDING = "full_attention", "sliding_attention"
HIDDEN, VOCAB = 64, 101
KNOWN = torch.tensor([2, 3, 5, 8, 13, 21, 34, 55, 89])  # what reduced vocabularies hold
OFFSETS = KNOWN - torch.arange(len(KNOWN))


def config_dict(**changes) -> dict:
    """Return a small published ``config.json``. ``changes`` replace keys, and None removes one."""
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16, "dtype": "float32", "head_dim": 16,
        "dflash_config": {"mask_token_id": 100, "target_layer_ids": [1, 9, 17, 25, 33]}, "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": 88, "layer_types": [FULL, FULL, FULL],
        "max_position_embeddings": 4096, "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "num_target_layers": 36, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "use_cache": True, "vocab_size": VOCAB,
    } | changes  # fmt: skip
    return copy.deepcopy({key: value for key, value in config.items() if value is not None})


def sliding(kinds: str, window: int) -> dict:
    """Return the keys for layers of these kinds; ``"sf"`` is a sliding layer, then a full one."""
    return {
        "layer_types": [SLIDING if kind == "s" else FULL for kind in kinds],
        "num_hidden_layers": len(kinds),
        "use_sliding_window": True,
        "sliding_window": window,
    }


def _taps(*ids: int, **more) -> dict:
    return {"mask_token_id": 100, "target_layer_ids": list(ids), **more}


YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# fmt: off
VARIANTS: dict[str, dict] = {
    "Qwen3-4B": config_dict(),
    "Qwen3.5-27B-September": config_dict(
        **sliding("sssf", 24), rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e7}),
    "Qwen3.6-27B": config_dict(
        **sliding("ssf", 7), num_target_layers=64, dflash_config=_taps(1, 16, 31, 46, 61, block_size=16),
        block_size=None),
    "Qwen3.5-122B": config_dict(
        **sliding("ssf", 40), dflash_config=_taps(1, 5, 9, 13, 17, 21, 25, 29, block_size=16), block_size=4),
    "gpt-oss-20b": config_dict(
        block_size=8, hidden_size=72, num_attention_heads=6, head_dim=16, attention_bias=True, num_target_layers=24,
        dflash_config=_taps(1, 6, 11, 16, 21), rope_theta=150000.0,
        rope_scaling=YARN | {"original_max_position_embeddings": 128}),
    "Kimi-K2.5": config_dict(num_target_layers=61, dflash_config=_taps(1, 12, 24, 35, 47, 58)),
    "Gemma4-31B": config_dict(
        **sliding("sf", 12), head_dim=8, num_attention_heads=8, num_key_value_heads=1, final_logit_softcapping=30.0,
        dflash_config=_taps(1, 9, 17, 25, 33, 35, input_embedding_scale=8.0)),
    "Llama-3.1-8B": config_dict(
        block_size=10, rope_theta=None,
        rope_parameters=LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 32}),
    "linear-rope": config_dict(rope_scaling={"type": "linear", "factor": 4.0}),
    "is_causal-false-with-window": config_dict(
        **sliding("ss", 6), is_causal=False,
        dflash_config=_taps(1, 9, output_multiplier=0.196, final_logit_softcapping=20)),
    "is_causal-true-with-window": config_dict(**sliding("sf", 6), is_causal=True),
    "dflash_config.causal-false": config_dict(**sliding("sf", 9), dflash_config=_taps(1, 9, 17, causal=False)),
    "dflash_config.causal-true": config_dict(**sliding("sf", 9), dflash_config=_taps(1, 9, 17, causal=True)),
    "one-layer": config_dict(layer_types=None, num_hidden_layers=1, dflash_config={"mask_token_id": 100}),
}
# fmt: on


def dflash2_dict(section: dict | None = None, **changes) -> dict:
    """Return a small published ``config.json`` of a DFlash 2 drafter, ``section`` added to its ``dflash_config``."""
    conv = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5}
    return config_dict(**{
        "architectures": ["DFlash2DraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlash2DraftModel"},
        "dflash_config": _taps(1, 9, **conv | (section or {})),
    } | changes)  # fmt: skip


DFLASH2_VARIANTS: dict[str, dict] = {
    "DFlash2": dflash2_dict(**sliding("ss", 12), is_causal=False),
    "DFlash2-causal": dflash2_dict({"conv_kernel_size": 3, "conv_group_size": 8}, **sliding("sf", 7)),
    "DFlash2-scaled": dflash2_dict(
        {"output_multiplier": 0.196, "final_logit_softcapping": 20, "input_embedding_scale": 2.0},
        **sliding("ff", 4),
        is_causal=True,
    ),
    "DFlash2-wide-kernel": dflash2_dict(
        {"conv_kernel_size": 4, "conv_group_size": 1, "selector_rank": 3, "selector_top_k": 97}, block_size=4
    ),
}


def dspark_dict(**changes) -> dict:
    """Return a small ``config.json`` of a DSpark drafter, as DeepSpec writes it: every key at the top level."""
    head = {"markov_rank": 8, "markov_head_type": "vanilla"}
    head |= {"enable_confidence_head": True, "confidence_head_with_markov": True, "num_anchors": 16}
    taps = {"dflash_config": None, "mask_token_id": 100, "target_layer_ids": [1, 9]}
    return config_dict(
        **{"architectures": ["Qwen3DSparkModel"], "auto_map": None, "block_size": 7} | taps | head | changes
    )


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a published checkpoint, spelled out independently of the package."""
    hidden, width, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head_dim, config.num_kv_heads * head_dim
    shapes = {"fc.weight": (hidden, len(config.target_layer_ids) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(config.num_hidden_layers):
        layer, attention = f"layers.{i}", f"layers.{i}.self_attn"
        outputs = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": hidden}
        for name, size in outputs.items():
            shapes[f"{attention}.{name}.weight"] = (size, query if name == "o_proj" else hidden)
            if config.attention_bias:
                shapes[f"{attention}.{name}.bias"] = (size,)
        shapes |= {f"{attention}.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
        if config.attention_sinks:
            shapes[f"{attention}.attention_sink_bias"] = (config.num_attention_heads,)
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.mlp.{name}.weight": (width, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, width)
        if config.dflash2 is not None:
            taps, groups = config.dflash2.conv_kernel_size, hidden // config.dflash2.conv_group_size
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{layer}.{name}.base_kernel"] = (2, taps, hidden)
                shapes[f"{layer}.{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    if config.dflash2 is not None:
        rank = config.dflash2.selector_rank
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = (config.vocab_size, rank)
    if config.markov_rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, config.markov_rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size or config.vocab_size, config.markov_rank)
    return shapes


def random_tensors(config: DraftConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return weights to which every part of the model contributes: unit gain, norms and biases far from neutral."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("codebook") or "markov_w" in name:
            values = values * 2 / shape[1] ** 0.25  # pair scores of about the size of the logits
        elif len(shape) == 2:
            values = values / shape[1] ** 0.5
        elif name.endswith("norm.weight"):
            values = 1 + values / 4
        tensors[name] = values * (2 if "_norm" in name and "self_attn" in name else 1)
    return tensors


def save_checkpoint(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def own(*shape: int, seed: int = 7) -> torch.Tensor:
    """Return a part of a drafter's own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reduced() -> dict[str, torch.Tensor]:
    """Return a head for the tokens of ``KNOWN``."""
    return {"lm_head.weight": own(len(KNOWN), HIDDEN) / 8, "d2t": OFFSETS}


def save_drafter(folder: Path, config: dict, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Save random weights for ``config``, and ``tensors`` beside or in place of them."""
    return save_checkpoint(folder, config, random_tensors(DraftConfig.from_config(config)) | (tensors or {}))


def random_drafter(config: dict | None = None, seed: int = 0, dtype: torch.dtype = torch.float32) -> Drafter:
    parsed = DraftConfig.from_config(config or config_dict())
    drafter = Drafter(parsed)
    drafter.load_state_dict(random_tensors(parsed, seed))
    return drafter.to(dtype)

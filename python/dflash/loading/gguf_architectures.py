"""GGUF architectures: a row each in `ARCHITECTURES`, which says how transformers has their keys and tensors.

After llama.cpp's converter (conversion/*.py) and what its models read (src/models/*.cpp), build 11434.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..terminal import listed, named, printable
from .gguf import GgufFile, shortest

_STOPS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


@dataclass(frozen=True)
class Keys:
    """The keys of a file's architecture. One that nobody reads is refused."""

    file: GgufFile
    read: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; of a list with a value per layer, the one that all layers have."""
        name = f"{self.file.architecture}.{key}"
        self.read.add(name)
        value = self.file.metadata.get(name, default)
        return value[0] if isinstance(value, list) and len(set(value)) == 1 else value

    def peek(self, key: str) -> Any:
        """Return a value as it is, which does not count as read."""
        return self.file.metadata.get(f"{self.file.architecture}.{key}")

    def need(self, key: str) -> Any:
        """Return a value that must be there."""
        if (value := self.get(key)) is None:
            raise ValueError(f"{printable(self.file.path)} has no key {self.file.architecture}.{key}: it is incomplete")
        return value

    def unread(self) -> list[str]:
        prefix = f"{self.file.architecture}."
        return sorted(key for key in self.file.metadata if key.startswith(prefix) and key not in self.read)

    def refuse(self, key: str, what: str) -> ValueError:
        """Return the error for a key whose value no model of transformers has."""
        where = f"{printable(self.file.path)}: {self.file.architecture}.{key}"
        return ValueError(f"{where} must be {what}, got {named(str(self.peek(key)))}")


class Architecture(NamedTuple):
    """A model type of transformers for an architecture.

    Attributes:
        model_type: of its config.
        needs: a key, or the end of a tensor's name, that a file of this type has. The first row that fits counts.
        fixed: values of the config that no file states.
        same: keys that must have one value, if they are there.
        rope: parameters of RoPE that no file states.
        rest: what depends on several keys.
        rows: the order of the file's rows in the model, given config and number, by the end of a tensor's name.
        values: what makes the file's values the model's, by the end of a tensor's name. Such tensors cannot be packed.
        columns: the order of the file's columns in the model.
    """

    model_type: str
    needs: str = ""
    fixed: Mapping[str, Any] = {}
    same: Mapping[str, Any] = {}
    rope: Mapping[str, Any] = {}
    rest: Callable[[Keys, dict[str, Any]], dict[str, Any]] | None = None
    rows: Mapping[str, Callable[[Any, int], Tensor]] = {}
    values: Mapping[str, Callable[..., Tensor]] = {}
    columns: Mapping[str, Callable[[Any, int], Tensor]] = {}

    @property
    def is_latent(self) -> bool:
        """True for latent attention (MLA), whose heads have other sizes."""
        return "attn_k_b.weight" in self.values


# Names in the config by key: the first that the config of a model type has.
_COMMON: dict[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers",), "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",), "feed_forward_length": ("intermediate_size", "ffn_hidden_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    "attention.clamp_kqv": ("clip_qkv",), "attention.sliding_window": ("sliding_window",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",), "attention.kv_lora_rank": ("kv_lora_rank",),
    "attn_logit_softcapping": ("attn_logit_softcapping",), "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.scale": ("attention_multiplier",), "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",), "logit_scale": ("logit_scale", "logits_scaling"),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "use_parallel_residual": ("use_parallel_residual",), "shortconv.l_cache": ("conv_L_cache",),
    "expert_count": ("n_routed_experts", "num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "expert_shared_count": ("n_shared_experts",), "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",), "leading_dense_block_count": ("first_k_dense_replace",),
    "expert_weights_scale": ("routed_scaling_factor",), "expert_weights_norm": ("norm_topk_prob",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",), "ssm.state_size": ("linear_key_head_dim",),
    "ssm.group_count": ("linear_num_key_heads",), "ssm.time_step_rank": ("linear_num_value_heads",),
}  # fmt: skip
_UNUSED = ("vocab_size", "pooling_type", "rope.scaling.finetuned")
# Names in configs that say whether the file has a tensor whose name ends so.
_FLAGS = {
    **dict.fromkeys(("attention_bias", "qkv_bias", "use_bias", "use_qkv_bias"), "attn_q.bias"),
    "attention_out_bias": "attn_output.bias", "mlp_bias": "ffn_up.bias", "use_qk_norm": "attn_q_norm.weight",
    "conv_bias": "shortconv.in_proj.bias",
}  # fmt: skip
_COUNTS = ("expert_count", "expert_used_count")  # 0 if there are none


def find_architecture(file: GgufFile) -> Architecture:
    """Return the row of a file's architecture. Raises ValueError if there is none."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model" or file.architecture == "clip":
        hint = ": merge it into its model with llama-export-lora" if kind == "adapter" else ""
        raise ValueError(f"{printable(file.path)} is not a model but of type {named(str(kind))}{hint}")
    for row in ARCHITECTURES.get(file.architecture, ()):
        has_key = f"{file.architecture}.{row.needs}" in file.metadata
        if has_key or any(name.endswith(row.needs) for name in file.shapes):
            return row
    raise ValueError(
        f"{printable(file.path)}: architecture {named(file.architecture)} is not read from GGUF files here; these are: "
        f"{listed(sorted(ARCHITECTURES))}. Take the model's safetensors"
    )


def read_config(file: GgufFile) -> Any:
    """Return the config of a file's model, of transformers' class.

    Raises:
        ValueError: the architecture, a key or a value is none that transformers has.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    row, keys = find_architecture(file), Keys(file)
    cls = CONFIG_MAPPING[row.model_type]
    default = cls()
    known = default.to_dict() | default.attribute_map
    # 1. Keys that are names of the config, and those that must have one value
    layers = keys.need("block_count") - keys.get("nextn_predict_layers", 0)
    if "token_embd.weight" not in file.shapes:
        raise ValueError(f"{printable(file.path)} has no tensor token_embd.weight: it is incomplete")
    config: dict[str, Any] = {"vocab_size": file.shapes["token_embd.weight"][0], **row.fixed}
    absent = [key for key in _COUNTS if keys.peek(key) == 0]
    for key in (row.needs, *_UNUSED, *absent):
        keys.get(key)
    is_mixture = not known.keys().isdisjoint(_COMMON["expert_count"])
    for key, names in _COMMON.items():
        name = next((name for name in names if name in known), None)
        if name is None or key in absent or (key.startswith("expert_") and not is_mixture):
            continue
        if (value := keys.get(key)) is not None:
            config[name] = value
    for key, expected in row.same.items():
        if keys.get(key, expected) != expected:
            raise keys.refuse(key, str(expected))
    if not keys.get("attention.causal", True):
        raise keys.refuse("attention.causal", "true: a model that sees later tokens cannot be decoded")
    config["num_hidden_layers"] = layers
    flags = {name: end for name, end in _FLAGS.items() if name in known}
    config |= {name: any(tensor.endswith(end) for tensor in file.shapes) for name, end in flags.items()}
    config["tie_word_embeddings"] = "output.weight" not in file.shapes
    # 2. Heads, RoPE and windows
    heads = keys.need("attention.head_count")
    plain = keys.need("embedding_length") // (max(heads) if isinstance(heads, list) else heads)
    head_dim = keys.get("attention.key_length", plain)
    if not row.is_latent:
        if keys.get("attention.value_length", head_dim) != head_dim:
            raise keys.refuse("attention.value_length", f"{head_dim}, the keys' own")
        if head_dim != plain or "head_dim" in known:
            config["head_dim"] = head_dim
    if row.rest is not None:
        config |= row.rest(keys, config)
    config |= _windows(keys, known, layers) | _rope(keys, row, default, config, head_dim)
    # 3. Ids of special tokens
    config |= {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _IDS.items()}
    if len(stops := list(dict.fromkeys(file.metadata[key] for key in _STOPS if key in file.metadata))) > 1:
        config["eos_token_id"] = stops
    if unread := keys.unread():
        raise ValueError(
            f"{printable(file.path)}: {listed(unread)} mean nothing to transformers' {row.model_type}, and its text "
            "would be another: take the model's safetensors"
        )
    return cls(**config)


def _windows(keys: Keys, known: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the layers that have a window, where the file says which."""
    key = "attention.sliding_window_pattern"
    pattern = keys.peek(key)
    keys.get(key)
    if pattern is None or not keys.get("attention.sliding_window"):
        return {}
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if "layer_types" not in known or len(pattern) < layers:
        raise keys.refuse(key, f"one value for each of {layers} layers")
    return {"layer_types": ["sliding_attention" if has else "full_attention" for has in pattern[:layers]]}


# ---------------------------------------------------------------------------------------------- RoPE

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _rope(keys: Keys, row: Architecture, default: Any, config: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return ``rope_parameters`` as transformers says what the file's keys and tables do."""
    if (usual := getattr(default, "rope_parameters", None)) is None:
        return {}
    layered = "sliding_attention" in usual
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10000.0)}
    part = keys.get("rope.dimension_count", head_dim) / head_dim
    if not row.is_latent and (part != 1 or "partial_rotary_factor" in usual):
        if not (layered or "partial_rotary_factor" in usual or row.rope.get("partial_rotary_factor")):
            raise keys.refuse("rope.dimension_count", f"{head_dim}, all of a head")
        rope["partial_rotary_factor"] = part
    if any(sections := keys.get("rope.dimension_sections") or ()):
        if "mrope_section" not in row.rope:
            raise keys.refuse("rope.dimension_sections", "absent")
        rope["mrope_section"] = sections[:3]
    rope |= {key: value for key, value in row.rope.items() if key not in rope}
    scaled = rope | _scaling(keys, row, config, rope)
    if not layered:
        return {"rope_parameters": scaled}
    swa = keys.get("rope.freq_base_swa", 10000.0 if row.model_type.startswith("gemma") else rope["rope_theta"])
    return {"rope_parameters": {"full_attention": scaled, "sliding_attention": rope | {"rope_theta": swa}}}


_YARN = {
    "factor": "factor", "original_context_length": "original_max_position_embeddings", "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor", "attn_factor": "attention_factor",
}  # fmt: skip


def _scaling(keys: Keys, row: Architecture, config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Return what scales RoPE, as transformers says it."""
    given = {key: value for key in [*_YARN, "type"] if (value := keys.get(f"rope.scaling.{key}")) is not None}
    kind = given.pop("type", "none")
    tables = [name for name in keys.file.shapes if name.startswith("rope_f")]  # rope_freqs, rope_factors_long, short
    if (old := keys.get("rope.scale_linear")) is not None:
        kind, given["factor"] = "linear", old
    found = {_YARN[key]: value for key, value in given.items()}
    if set(tables) == {"rope_factors_long.weight", "rope_factors_short.weight"} and kind in ("longrope", "none"):
        factors = (keys.file.tensor(f"rope_factors_{name}.weight").float().tolist() for name in ("long", "short"))
        return {"rope_type": "longrope", **dict(zip(("long_factor", "short_factor"), factors, strict=True)), **found}
    if kind == "none" and not tables:
        return {}
    if tables == ["rope_freqs.weight"] and kind == "none" and row.model_type == "gemma4_text":
        turned = (keys.file.tensor(tables[0]).float() == 1).float().mean().item()  # the others turn by nothing
        return {"rope_type": "proportional", "partial_rotary_factor": turned}
    if tables == ["rope_freqs.weight"] and kind == "none" and (llama3 := _as_llama3(keys.file, row, config, rope)):
        return llama3
    if kind == "linear" and not tables:
        return {"rope_type": "linear", "factor": found.get("factor", 1.0)}
    if kind == "yarn" and not tables and "original_context_length" in given and "factor" in given:
        beta = keys.get("attention.temperature_scale")
        scale = {} if beta is None else {"llama_4_scaling_beta": beta}
        return {"rope_type": "yarn", **found, **_mscale(keys, row), **scale}
    what = listed([f"rope.scaling.type = {kind}", *given, *tables])
    raise ValueError(f"{printable(keys.file.path)}: RoPE is scaled as transformers cannot read it here ({what})")


def _mscale(keys: Keys, row: Architecture) -> dict[str, float]:
    """Return how YaRN scales attention. The file has one of two numbers, which are equal in all published models."""
    unit = 0.1 if row.is_latent else 1.0
    if not (found := keys.get("rope.scaling.yarn_log_multiplier")):
        return {}
    return dict.fromkeys(("mscale", "mscale_all_dim"), shortest(found / unit))


def _as_llama3(file: GgufFile, row: Architecture, config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Return Llama 3's scaling if that made the file's table, else nothing."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    table = file.tensor("rope_freqs.weight").float().flatten()
    exponents = torch.arange(len(table), dtype=torch.float32) / len(table)
    trial = CONFIG_MAPPING[row.model_type](**copy.deepcopy(config))
    for original in (8192, *(2**exponent for exponent in range(5, 21))):
        scale = {"rope_type": "llama3", "factor": float(table.max()), **_LLAMA3}
        scale["original_max_position_embeddings"] = original
        trial.rope_parameters = {**rope, **scale}
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](trial, torch.device("cpu"))
        ratios = rope["rope_theta"] ** -exponents / frequencies
        if ratios.shape == table.shape and torch.allclose(ratios, table, rtol=1e-3):
            return scale
    return {}


# ---------------------------------------------------------------------------------------------- tensors


def _paired(heads: str) -> Callable[[Any, int], Tensor]:
    """Return the order of rows that llama.cpp pairs as neighbors for RoPE, and transformers by halves of a head."""

    def order(config: Any, rows: int) -> Tensor:
        count = getattr(config, heads)
        return torch.arange(rows).view(count, rows // count // 2, 2).transpose(1, 2).flatten()

    return order


_PAIRED = {f"attn_{x}.{end}": _paired(f"num_{kind}_heads") for x, kind in (("q", "attention"), ("k", "key_value"))
           for end in ("weight", "bias")}  # fmt: skip
_PLUS_ONE = {"norm.weight": lambda weight, _: weight - 1}  # the file has the factor, transformers what is added to 1


def _falcon_rows(config: Any, rows: int) -> Tensor:
    """Return the order of rows [queries, keys, values], which transformers has by groups of queries."""
    heads, groups = config.num_attention_heads, config.num_kv_heads if config.new_decoder_architecture else 1
    parts = torch.arange(rows).view(heads + 2 * groups, -1).split([heads, groups, groups])
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten()


def _grouped(config: Any, rows: int) -> Tensor:
    """Return the order of value heads, or their rows: the file has them by turns of key heads, transformers by groups.

    The rows of queries and keys, if there are any, come first.
    """
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    others = 2 * keys * config.linear_key_head_dim if rows > values * config.linear_value_head_dim else 0
    order = torch.arange(others, rows).view(values // keys, keys, -1).transpose(0, 1).flatten()
    return torch.cat([torch.arange(others), order])


def _interleaved(config: Any, rows: int) -> Tensor:
    """Return the order of rows [queries, keys, values, gates], which a Qwen3-Next has by key heads."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    parts = torch.arange(rows).split([heads * size, heads * size, values, values])
    return torch.cat([part.view(heads, -1) for part in parts], 1).flatten()


def _kv_b(keys: Tensor, values: Tensor | None, _: Any) -> Tensor:
    """Return the up-projection of keys and values, of which the file has the keys' part transposed."""
    return keys if values is None else torch.cat([keys.mT, values], 1).flatten(0, 1)


_GATED: dict[str, Any] = {
    "values": {
        **dict.fromkeys(
            [f"{name}norm.weight" for name in ("attn_", "attention_", "_q_", "_k_", "output_", "n.e", "n.h", "head_")],
            _PLUS_ONE["norm.weight"],
        ),
        "ssm_a": lambda decay, _: (-decay).log(),
    },
}  # fmt: skip


def _recurrent(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes and places of layers with Gated DeltaNets."""
    values, layers = config["linear_num_value_heads"], config["num_hidden_layers"]
    keys.get("feed_forward_length")  # which mixtures do not have
    interval, recurrent = keys.get("full_attention_interval", 4), keys.get("attention.recurrent_layers")
    if not isinstance(recurrent, list):
        recurrent = [(layer + 1) % interval != 0 for layer in range(layers)]
    types = ["linear_attention" if is_linear else "full_attention" for is_linear in recurrent[:layers]]
    return {"linear_value_head_dim": keys.need("ssm.inner_size") // values, "layer_types": types}


def _mla(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of latent attention. Files of 2024 have the heads' own sizes, later ones the latent ones."""
    head = keys.get("attention.key_length_mla", keys.get("attention.key_length"))
    rope = keys.need("rope.dimension_count")
    sizes = {
        "qk_nope_head_dim": head - rope,
        "qk_rope_head_dim": rope,
        "q_lora_rank": keys.get("attention.q_lora_rank"),
    }
    sizes["v_head_dim"] = keys.get("attention.value_length_mla", keys.get("attention.value_length"))
    return {**sizes, "num_key_value_heads": config["num_attention_heads"]}


def _deepseek2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    has_groups = (config.get("n_group") or 1) > 1
    return {**_mla(keys, config), "topk_method": "group_limited_greedy" if has_groups else "greedy"}


def _query_scale(layers: int) -> Callable[[Keys, dict[str, Any]], dict[str, Any]]:
    """Return what gives the scale of queries, which no file states: the largest Gemma has one of its own."""

    def rest(_: Keys, config: dict[str, Any]) -> dict[str, Any]:
        is_largest = config["num_hidden_layers"] == layers
        plain = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": plain if is_largest else config["head_dim"]}

    return rest


def _gemma4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of layers with windows and of the others, which the file states by layer or for each kind."""
    counts, widths = config["num_key_value_heads"], config.get("intermediate_size")
    head, vocab = keys.need("attention.key_length_swa"), keys.file.shapes.get("per_layer_token_embd.weight", (0,))[0]
    if {keys.get("attention.value_length_swa", head), keys.get("rope.dimension_count_swa", head)} != {head}:
        raise keys.refuse("rope.dimension_count_swa", f"{head}, all of a head")
    own = keys.peek("attention.sliding_window_pattern")[: -config.get("num_kv_shared_layers", 0) or None]
    full = [f"blk.{i}.attn_v.weight" for i, has_window in enumerate(own) if not has_window]
    found = {
        "head_dim": head,
        "global_head_dim": config["head_dim"],
        "enable_moe_block": "num_experts" in config,
        "use_double_wide_mlp": isinstance(widths, list),
        "vocab_size_per_layer_input": vocab or config["vocab_size"],
        "attention_k_eq_v": any(name not in keys.file.shapes for name in full),
    }
    if isinstance(widths, list):
        found["intermediate_size"] = widths[0]
    if isinstance(counts, list):
        pattern = keys.get("attention.sliding_window_pattern")
        found["num_global_key_value_heads"] = counts[pattern.index(False)]
        found["num_key_value_heads"] = counts[pattern.index(True)]
    return found


def _phi3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    original = keys.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {"original_max_position_embeddings": original, "sliding_window": config.get("sliding_window") or None}


def _falcon(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    heads, groups = config["num_attention_heads"], config["num_kv_heads"]
    keys.get("tensor_data_layout")
    if groups == heads > 1:
        raise keys.refuse("attention.head_count_kv", "less than attention.head_count")
    norms = {"num_ln_in_parallel_attn": 2 if any("attn_norm_2" in name for name in keys.file.shapes) else 1}
    return {"new_decoder_architecture": groups > 1, "multi_query": groups == 1, **(norms if groups > 1 else {})}


def _exaone4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    layers, window = config["num_hidden_layers"], keys.get("attention.sliding_window")
    types = ["sliding_attention" if window and (layer + 1) % 4 else "full_attention" for layer in range(layers)]
    return {"sliding_window": window, "layer_types": types, "sliding_window_pattern": 4}


def _lfm2(keys: Keys, _: dict[str, Any]) -> dict[str, Any]:
    counts = keys.peek("attention.head_count_kv")
    types = ["full_attention" if count else "conv" for count in counts]
    epsilon = keys.need("attention.layer_norm_rms_epsilon")
    return {"num_key_value_heads": max(counts), "layer_types": types, "norm_eps": epsilon}


def _nemotron(keys: Keys, _: dict[str, Any]) -> dict[str, Any]:
    keys.get("attention.layer_norm_rms_epsilon")  # converters write the number under both names
    return {"norm_eps": keys.need("attention.layer_norm_epsilon")}


_LATENT = {"attn_k_b.weight": _kv_b}
_QWEN35: dict[str, Any] = {
    **_GATED, "rest": _recurrent, "rope": {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    "rows": dict.fromkeys((
        "ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight", "attn_qkv.weight", "attn_gate.weight",
        "ssm_conv1d.weight",
    ), _grouped), "columns": {"ssm_out.weight": _grouped},
}  # fmt: skip

_PLAIN = {  # those with a row that says nothing else
    **{name: name for name in ("olmoe", "qwen2", "qwen3", "glm4", "seed_oss", "starcoder2", "cohere2", "stablelm")},
    "ernie4_5": "ernie4_5", "qwen2moe": "qwen2_moe", "phi2": "phi", "command-r": "cohere",
    "hunyuan-dense": "hunyuan_v1_dense",
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[Architecture, ...]] = {
    **{name: (Architecture(kind),) for name, kind in _PLAIN.items()},
    **{name: (Architecture(name, rows=_PAIRED),) for name in ("arcee", "granite")},
    "llama": (Architecture("mixtral", "expert_count", rows=_PAIRED), Architecture("llama", rows=_PAIRED)),
    "mistral3": (
        Architecture("ministral3", "attention.temperature_scale", rows=_PAIRED),
        Architecture("mistral", fixed={"sliding_window": None}, rows=_PAIRED),
    ),
    "smollm3": (Architecture("smollm3", fixed={"use_sliding_window": False}, rows=_PAIRED),),
    "granitemoe": (
        Architecture("granitemoeshared", "expert_shared_feed_forward_length", rows=_PAIRED),
        Architecture("granitemoe", rows=_PAIRED),
    ),
    "olmo": (Architecture("olmo", same={"attention.layer_norm_epsilon": 1e-5}, rows=_PAIRED),),
    "olmo2": (Architecture("olmo3", "attention.sliding_window"), Architecture("olmo2")),
    "qwen3moe": (Architecture("qwen3_moe", fixed={"norm_topk_prob": True}),),
    "qwen3next": (Architecture(
        "qwen3_next", fixed={"norm_topk_prob": True}, **_GATED, rest=_recurrent,
        rows={"attn_qkv.weight": _interleaved},
    ),),
    "qwen35": (Architecture("qwen3_5_text", **_QWEN35),),
    "qwen35moe": (Architecture("qwen3_5_moe_text", **_QWEN35),),
    "gemma": (Architecture("gemma", values=_PLUS_ONE),),
    "gemma2": (Architecture("gemma2", rest=_query_scale(46), values=_PLUS_ONE),),
    "gemma3": (Architecture("gemma3_text", rest=_query_scale(62), values=_PLUS_ONE),),
    "gemma4": (Architecture("gemma4_text", rest=_gemma4),),
    "phi3": (Architecture("phi3", rest=_phi3),),
    "glm4moe": (Architecture("glm4_moe", same={"expert_gating_func": 2}),),
    "deepseek2": (
        Architecture(
            "deepseek_v3", "exp_probs_b.bias", fixed={"norm_topk_prob": False}, same={"expert_gating_func": 2},
            rest=_mla, values=_LATENT,
        ),
        Architecture("deepseek_v2", "expert_count", rest=_deepseek2, same={"expert_gating_func": 1}, values=_LATENT),
    ),
    "gpt-oss": (Architecture("gpt_oss", rope={"truncate": False}),),
    "falcon": (Architecture(
        "falcon", fixed={"alibi": False, "bias": False, "parallel_attn": True}, rest=_falcon,
        rows={"attn_qkv.weight": _falcon_rows},
    ),),
    "nemotron": (Architecture("nemotron", rest=_nemotron, values=_PLUS_ONE),),
    "exaone4": (Architecture("exaone4", rest=_exaone4),),
    "lfm2": (Architecture("lfm2", fixed={"block_auto_adjust_ff_dim": False}, rest=_lfm2),),
}  # fmt: skip

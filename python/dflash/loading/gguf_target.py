"""GGUF targets: weights that stay packed, and what transformers 5 leaves out, scaled RoPE and further stop tokens."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..ops import FORMATS, PackedWeight
from ..targets import PackedEmbedding, PackedExperts, PackedLinear
from ..terminal import listed, named, printable
from .gguf import GgufFile, require_gguf

_STOPS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_HARMLESS = ("type", "factor", "finetuned", "original_context_length")


@contextlib.contextmanager
def quiet_reader(reader: Callable[..., Any]) -> Iterator[None]:
    """Have transformers read GGUF files by ``reader``, and show no progress bar of its own."""
    from transformers import modeling_gguf_pytorch_utils as loading

    gguf = require_gguf()
    before = gguf.GGUFReader, loading.tqdm
    try:
        gguf.GGUFReader, loading.tqdm = reader, functools.partial(loading.tqdm, disable=True)
        yield
    finally:
        gguf.GGUFReader, loading.tqdm = before


def complete_config(config: Any, file: GgufFile) -> None:
    """Add the file's stop tokens, width of experts and scaled RoPE to the config that transformers made of it.

    Raises:
        ValueError: RoPE is scaled in a way that is not understood here.
    """
    text = config.get_text_config(decoder=True)
    width = file.metadata.get(f"{file.architecture}.expert_feed_forward_length")
    if width is not None and hasattr(text, "moe_intermediate_size"):
        text.moe_intermediate_size = width
    stops = list(dict.fromkeys(file.metadata[key] for key in _STOPS if key in file.metadata))
    if len(stops) > 1:
        text.eos_token_id = config.eos_token_id = stops
    rope = copy.deepcopy(getattr(text, "rope_parameters", None) or {})
    scaled = rope.get("full_attention", rope)  # layers with windows are not scaled
    if not rope or scaled.get("rope_type", "default") != "default":
        return
    scaled |= _scaling(file, text, scaled)
    text.rope_parameters = rope


# What transformers does to tensors of these architectures besides naming them: nothing, or it permutes rows, or it
# takes one off the weights of norms.
_PROCESSORS = {f"{name}TensorProcessor" for name in ("", "Llama", "Gemma2", "Nemotron", "Qwen2Moe")}
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight")
# Read with the config, or tables that follow from it
_UNUSED = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight")
_FORMATS = {row.blocks: row.name for row in FORMATS.values() if row.blocks}


def processor_of(file: GgufFile, config: Any) -> Any | None:
    """Return what transformers does to each tensor of a file, if its blocks can stay as they are, else None."""
    from transformers import modeling_gguf_pytorch_utils as loading

    found = loading.TENSOR_PROCESSORS.get(file.architecture, loading.TensorProcessor)
    kinds = {file.kind(name) for name, shape in file.shapes.items() if len(shape) > 1}
    is_known = found.__name__ in _PROCESSORS and kinds <= _FORMATS.keys() | {"F32", "F16", "BF16"}
    return found(config=config.to_dict()) if is_known and kinds & _FORMATS.keys() else None


def load_packed(model: nn.Module, file: GgufFile, processor: Any, dtype: torch.dtype) -> None:
    """Give an empty model the tensors of a file. Weights of linear layers stay in the file's blocks.

    The file is mapped, and each tensor packed as it is read, so that memory holds the packed weights and one tensor.

    Args:
        model: its parameters on the meta device, its buffers real.
        file: what it is loaded from.
        processor: from `processor_of`.
        dtype: of everything else.

    Raises:
        ValueError: a tensor of the file has no place in the model, or a parameter of the model none in the file.
    """
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    names = get_gguf_hf_weights_map(model, processor)
    experts: dict[str, dict[str, str]] = {}  # by their place in the model: the names of gate, up and down
    for name in file.shapes:
        is_expert = _EXPERTS.fullmatch(name)
        if (place := names.get(name.removesuffix(".weight") if is_expert else name)) is None:
            if not _UNUSED.fullmatch(name):
                raise ValueError(f"{printable(file.path)}: tensor {named(name)} has no place in {type(model).__name__}")
            continue
        path, _, key = place.rpartition(".")
        if is_expert:
            experts.setdefault(path, {})[is_expert[1]] = name
            continue
        module = model.get_submodule(path)
        if key == "weight" and type(module) in (nn.Linear, nn.Embedding) and file.kind(name) in _FORMATS:
            _check_shape(file, name, file.shapes[name], module.weight)
            weight = _packed(file, name, processor)
            made = PackedLinear(weight, module.bias) if type(module) is nn.Linear else PackedEmbedding(weight, dtype)
            model.set_submodule(path, made)
            continue
        values = processor.process(weights=file.tensor(name).float().numpy(), name=name).weights
        _check_shape(file, name, values.shape, getattr(module, key))
        module.register_parameter(key, nn.Parameter(torch.from_numpy(values).to(dtype), requires_grad=False))
    for path, parts in experts.items():
        _load_experts(model, path, file, parts, dtype)
    tie_head(model)
    if missing := sorted(name for name, parameter in model.named_parameters() if parameter.is_meta):
        raise ValueError(f"{printable(file.path)} has no tensors for {listed(missing)}: it is incomplete")


def tie_head(model: Any) -> None:
    """Have a head without weights multiply by those of the embeddings, or by their tiles."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, nn.Linear) and head.weight.is_meta and isinstance(embeddings, PackedEmbedding):
        model.set_output_embeddings(PackedLinear(embeddings.packed))
    elif isinstance(head, nn.Linear) and head.weight.is_meta:
        head.weight = embeddings.weight


def _check_shape(file: GgufFile, name: str, shape: Sequence[int], parameter: torch.Tensor) -> None:
    if tuple(shape) != tuple(parameter.shape):
        raise ValueError(
            f"{printable(file.path)}: tensor {named(name)} must be {list(parameter.shape)} as the file's keys say, got "
            f"{list(shape)}"
        )


def _load_experts(model: nn.Module, path: str, file: GgufFile, parts: dict[str, str], dtype: torch.dtype) -> None:
    """Load the experts of a layer: of each the gate's rows, then those of what it gates."""
    if len(parts) < 3:
        raise ValueError(f"{printable(file.path)}: experts need gate, up and down, and {path} has {listed(parts)}")
    gate, up, down = (file.kind(parts[part]) for part in ("gate", "up", "down"))
    if gate == up and {gate, down} <= _FORMATS.keys():
        both = np.concatenate([file.rows(parts["gate"]), file.rows(parts["up"])], 1)
        packed = [(both, parts["gate"]), (file.rows(parts["down"]), parts["down"])]
        model.set_submodule(path, PackedExperts(*(_pack(file, *each) for each in packed)))
        return
    module, dense = model.get_submodule(path), {part: file.tensor(name).to(dtype) for part, name in parts.items()}
    both = torch.cat([dense["gate"], dense["up"]], 1)
    for key, values in (("gate_up_proj", both), ("down_proj", dense["down"])):
        module.register_parameter(key, nn.Parameter(values, requires_grad=False))


def _packed(file: GgufFile, name: str, processor: Any) -> PackedWeight:
    return _pack(file, processor.process(weights=file.rows(name), name=name).weights, name)


def _pack(file: GgufFile, rows: np.ndarray, name: str) -> PackedWeight:
    """Pack the blocks ``[..., out, bytes]`` of a tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mapped file cannot be written, and is not
        blocks = torch.from_numpy(np.ascontiguousarray(rows))
    packed = PackedWeight.of_blocks(blocks, _FORMATS[file.kind(name)], file.shapes[name][-1])
    file.give_back(name)
    return packed


def _scaling(file: GgufFile, config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    """Return what scales the RoPE of a file, as transformers says it."""
    prefix = f"{file.architecture}.rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    tables = [name for name in file.shapes if name.startswith("rope_f")]  # rope_freqs, rope_factors_long, ..._short
    kind, factor = given.get("type", "none"), given.get("factor", 1.0)
    if (old := f"{file.architecture}.rope.scale_linear") in file.metadata:
        kind, factor = "linear", file.metadata[old]
    unknown = sorted(given.keys() - set(_HARMLESS))
    if kind == "none" and not tables:
        return {}
    if tables == ["rope_freqs.weight"] and kind == "none" and (found := _as_llama3(file, config, rope)):
        return found
    if kind == "linear" and not tables and not unknown:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and not tables and not unknown and "original_context_length" in given:
        original = {"original_max_position_embeddings": given["original_context_length"]}
        return {"rope_type": "yarn", "factor": factor, **original}
    what = listed([f"rope.scaling.type = {kind}", *unknown, *tables])
    raise ValueError(f"{printable(file.path)}: RoPE is scaled as transformers cannot read it here ({what})")


def _as_llama3(file: GgufFile, config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    """Return Llama 3's scaling if that made the file's table, else nothing."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    table = file.tensor("rope_freqs.weight").float().flatten()
    found, trial = {"rope_type": "llama3", "factor": float(table.max()), **_LLAMA3}, copy.deepcopy(config)
    trial.rope_parameters = {**rope, **found}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](trial, torch.device("cpu"))
    exponents = torch.arange(len(table), dtype=torch.float32) / len(table)
    ratios = rope["rope_theta"] ** -exponents / frequencies
    return found if ratios.shape == table.shape and torch.allclose(ratios, table, rtol=1e-3) else {}

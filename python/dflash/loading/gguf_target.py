"""What transformers 5 leaves out of a GGUF target: scaled RoPE, stop tokens besides the first, and the file's dtype."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..terminal import listed, printable
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
    """Add the file's stop tokens and scaled RoPE to the config that transformers made of it.

    Raises:
        ValueError: RoPE is scaled in a way that is not understood here.
    """
    text = config.get_text_config(decoder=True)
    stops = list(dict.fromkeys(file.metadata[key] for key in _STOPS if key in file.metadata))
    if len(stops) > 1:
        text.eos_token_id = config.eos_token_id = stops
    rope = copy.deepcopy(getattr(text, "rope_parameters", None) or {})
    scaled = rope.get("full_attention", rope)  # layers with windows are not scaled
    if not rope or scaled.get("rope_type", "default") != "default":
        return
    scaled |= _scaling(file, text, scaled)
    text.rope_parameters = rope


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

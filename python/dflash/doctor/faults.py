"""The usual faults of a pair's wiring, each as variants that would undo it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..drafter import FULL, SLIDING
from .wiring import Wiring

__all__ = ["FAMILIES", "Pair", "Variant", "variants"]

_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_SCALE_KEYS = ("embedding_multiplier", "scale_emb")  # what targets call their own scale
_WINDOWS = (128, 256, 512, 1024, 2048, 4096)
_MOST_MASKS = 12
_SECTIONS = ("dflash_config", "transformer_layer_config")


@dataclass(frozen=True)
class Pair:
    """What the variants are drawn from, besides the wiring.

    Attributes:
        target_keys: the target's text config, as a dictionary.
        target_layers: how many the target has; not every config has them among its keys.
        tokenizer: the target's.
        speculators: the drafter's config is in the speculators layout.
        longest: tokens of the longest recorded answer with its prompt.
        embedding_rows: of the target's table.
        dtype: of the drafter's weights.
    """

    target_keys: Mapping[str, Any]
    target_layers: int
    tokenizer: Any
    speculators: bool
    longest: int
    embedding_rows: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Variant:
    """One wiring to try.

    Attributes:
        fault: the fault that it would undo, one of `FAMILIES`.
        change: what differs, in words.
        wiring: what is tried.
        advice: what to do if it accepts more.
        config: the keys of the drafter's ``config.json`` that do it; empty if none do.
    """

    fault: str
    change: str
    wiring: Wiring
    advice: str
    config: dict[str, Any] = field(default_factory=dict)


def variants(wiring: Wiring, pair: Pair) -> list[Variant]:
    """Return every variant of a wiring, simple ones first, and none twice."""
    found: dict[tuple[Any, ...], Variant] = {}
    for family in FAMILIES.values():
        for variant in family(wiring, pair):
            found.setdefault(variant.wiring.identity, variant)
    return list(found.values())


def _patched(fault: str, change: str, patch: Mapping[str, Any], wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    """Yield the variant of a change of the config, if it is one."""
    other = wiring.patched(patch)
    if other is not None and other.config != wiring.config:
        keys = wiring.advised(patch, speculators=pair.speculators)
        yield Variant(fault, change, other, _in_words(keys), keys)


def _in_words(keys: Mapping[str, Any]) -> str:
    """Say where in ``config.json`` to write these keys."""
    sections = {name: keys[name] for name in _SECTIONS if name in keys}
    top = {key: value for key, value in keys.items() if key not in sections}
    lines = [f"write {json.dumps(top)[1:-1]}"] if top else []
    lines += [f'in its "{name}" write {json.dumps(inner)[1:-1]}' for name, inner in sections.items()]
    return f"in the drafter's config.json {', and '.join(lines)}"


def _shifted_taps(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    taps = wiring.config.target_layer_ids
    for shift in (-1, 1):
        moved = [tap + shift for tap in taps]
        if all(0 <= tap < pair.target_layers for tap in moved):
            yield from _taps("tap shift", moved, wiring, pair)


def _reordered_taps(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    taps = list(wiring.config.target_layer_ids)
    orders = [sorted(taps), taps[::-1], taps[1:] + taps[:1], taps[-1:] + taps[:-1]]
    for i, j in itertools.combinations(range(len(taps)), 2):
        swapped = taps.copy()
        swapped[i], swapped[j] = swapped[j], swapped[i]
        orders.append(swapped)
    for order in dict.fromkeys(map(tuple, orders)):
        yield from _taps("tap order", list(order), wiring, pair)


def _taps(fault: str, taps: list[int], wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    change = f"taps {taps} instead of {list(wiring.config.target_layer_ids)}"
    yield from _patched(fault, change, {"target_layer_ids": taps}, wiring, pair)


def _last_tap(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    if pair.target_layers - 1 in wiring.config.target_layer_ids and not wiring.raw_last_tap:
        yield Variant(
            "last tap norm",
            "the last tap before the target's final norm instead of after it",
            replace(wiring, raw_last_tap=True),
            "no config says this: train the drafter on the last layer's output after the final norm, as transformers' "
            "hidden_states[-1] is",
        )


def _rope_theta(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    name = "rope_scaling" if wiring.keys.get("rope_scaling") else "rope_parameters"
    settings, now = wiring.keys.get(name), wiring.config.rope.theta
    theirs = _thetas(pair.target_keys)
    for theta in dict.fromkeys((*theirs, *_THETAS)):
        whose = " as the target's" if theta in theirs else ""
        patch = {name: {**settings, "rope_theta": theta}} if settings else {"rope_theta": theta}
        yield from _patched("rope theta", f"RoPE theta {theta:g}{whose} instead of {now:g}", patch, wiring, pair)


def _thetas(keys: Mapping[str, Any]) -> list[float]:
    """Return the thetas of a target's config, which may have one per kind of layer."""
    settings = keys.get("rope_parameters") or {}
    levels = [settings, *(inner for inner in settings.values() if isinstance(inner, Mapping)), keys]
    found = [level.get(key) for level in levels for key in ("rope_theta", "rope_local_base_freq")]
    return [float(theta) for theta in found if isinstance(theta, (int, float))]


def _rope_scaling(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    rope = wiring.config.rope
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta}, "rope_scaling": None}
    if rope.type != "default":
        yield from _patched("rope scaling", f"RoPE without scaling instead of {rope.type}", plain, wiring, pair)
    theirs = {key: pair.target_keys[key] for key in _ROPE_KEYS if pair.target_keys.get(key) is not None}
    settings = theirs.get("rope_scaling") or theirs.get("rope_parameters")
    kind = settings.get("rope_type") or settings.get("type") if isinstance(settings, Mapping) else None
    if kind not in (None, "default"):
        patch = {"rope_scaling": None, **theirs}
        yield from _patched("rope scaling", f"RoPE {kind} as the target's instead of {rope.type}", patch, wiring, pair)


def _rope_layout(wiring: Wiring, _pair: Pair) -> Iterator[Variant]:
    if not wiring.is_interleaved:
        yield Variant(
            "rope layout",
            "RoPE over interleaved pairs of q and k instead of their halves",
            replace(wiring, is_interleaved=True),
            "the rows of q_proj and k_proj are stored for interleaved RoPE: reorder those of each head to the even "
            "ones, then the odd ones, and q_norm and k_norm likewise",
        )


def _mask_id(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    tokenizer, rows = pair.tokenizer, pair.embedding_rows
    named = [getattr(tokenizer, f"{kind}_token_id", None) for kind in ("mask", "pad", "unk", "bos", "eos")]
    added = sorted(getattr(tokenizer, "added_tokens_decoder", {}), reverse=True)
    likely = [i for i in added if "mask" in str(tokenizer.convert_ids_to_tokens(i)).lower()]
    size, now = len(tokenizer), wiring.config.mask_token_id
    ids = [named[0], *likely, size, *named[1:], rows - 1, size - 1, 0, *added]
    known = [i for i in dict.fromkeys(ids) if isinstance(i, int) and 0 <= i < rows]
    for i in known[:_MOST_MASKS]:
        text = tokenizer.convert_ids_to_tokens(i) if i < size else "not in the tokenizer"
        yield from _patched("mask id", f"mask id {i} ({text}) instead of {now}", {"mask_token_id": i}, wiring, pair)


def _causality(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    kinds = {False: "no layer causal", True: "every layer causal", None: "sliding layers causal and full ones not"}
    for value, change in kinds.items():
        yield from _patched("causality", change, {"is_causal": value, "causal": value}, wiring, pair)


def _window(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    config = wiring.config
    layers, widest = config.num_hidden_layers, max(config.window)
    instead = f" instead of {widest or 'none'}"
    for causal in (any(config.causal), False):
        if widest:
            how = "causal" if causal else "not causal"
            patch = {"layer_types": [FULL] * layers, "use_swa": False, "is_causal": causal}
            for variant in _patched("window", f"no window, {how},{instead}", patch, wiring, pair):
                others = f" (a window of more than {pair.longest} tokens, the longest text here, does the same)"
                yield replace(variant, advice=variant.advice + others)
    stated = [wiring.keys.get("sliding_window"), pair.target_keys.get("sliding_window")]
    sizes = [size for size in (*stated, *_WINDOWS) if isinstance(size, int) and 0 < size < pair.longest]
    types = [SLIDING if window else FULL for window in config.window] if widest else [SLIDING] * layers
    for size in dict.fromkeys(sizes):
        patch = {"layer_types": types, "sliding_window": size, "swa_window_size": size, "use_sliding_window": True}
        yield from _patched(
            "window", f"window {size}{instead}", {**patch, "is_causal": any(config.causal)}, wiring, pair
        )


def _embedding_scale(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    root, now = math.sqrt(wiring.config.hidden_size), wiring.config.input_embedding_scale
    theirs = [pair.target_keys.get(key) for key in _SCALE_KEYS]
    scales = [float(scale) for scale in theirs if isinstance(scale, (int, float)) and scale > 0]
    for scale in (1.0, *scales, root, 1 / root):
        change = f"input_embedding_scale {scale:.6g} instead of {now:.6g}"
        yield from _patched("embedding scale", change, {"input_embedding_scale": scale}, wiring, pair)


def _block_size(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    size = wiring.config.block_size
    for smaller in (size // 2, size // 4, 16, 8):
        if 1 < smaller < size:
            change = f"blocks of {smaller} instead of {size}"
            yield from _patched("block size", change, {"block_size": smaller}, wiring, pair)


def _overflow(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    if wiring.dtype is None and pair.dtype != torch.float32:
        advice = "its products pass the dtype's range: run the pair in bfloat16 or float32 (--dtype)"
        yield Variant("overflow", "the drafter in float32", replace(wiring, dtype=torch.float32), advice)


FAMILIES = {
    "tap shift": _shifted_taps,
    "tap order": _reordered_taps,
    "last tap norm": _last_tap,
    "rope theta": _rope_theta,
    "rope scaling": _rope_scaling,
    "rope layout": _rope_layout,
    "mask id": _mask_id,
    "causality": _causality,
    "window": _window,
    "embedding scale": _embedding_scale,
    "block size": _block_size,
    "overflow": _overflow,
}

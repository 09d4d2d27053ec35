"""The usual faults of a pair's wiring, each as variants that would undo it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..drafter import FULL, SLIDING
from .wiring import Wiring

__all__ = ["FAMILIES", "Pair", "Variant", "variants"]

_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_WINDOWS = (128, 256, 512, 1024, 2048, 4096)
_MOST_MASKS = 12


@dataclass(frozen=True)
class Pair:
    """What the variants are drawn from, besides the wiring.

    Attributes:
        target_keys: the target's text config, as a dictionary.
        tokenizer: the target's.
        speculators: the drafter's config is in the speculators layout.
        longest: tokens of the longest recorded answer with its prompt.
        embedding_rows: of the target's table.
        dtype: of the drafter's weights.
    """

    target_keys: Mapping[str, Any]
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
    """

    fault: str
    change: str
    wiring: Wiring
    advice: str


def variants(wiring: Wiring, pair: Pair) -> list[Variant]:
    """Return every variant of a wiring, simple ones first."""
    return [variant for family in FAMILIES.values() for variant in family(wiring, pair)]


def _patched(fault: str, change: str, patch: Mapping[str, Any], wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    """Yield the variant of a change of the config, if it is one."""
    other = wiring.patched(patch)
    if other is not None and other.config != wiring.config:
        line = wiring.line(patch, speculators=pair.speculators)
        yield Variant(fault, change, other, f"in the drafter's config.json write {line}")


def _shifted_taps(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    taps = wiring.config.target_layer_ids
    for shift in (-1, 1):
        moved = [tap + shift for tap in taps]
        if all(0 <= tap < pair.target_keys["num_hidden_layers"] for tap in moved):
            yield from _taps("tap shift", f"taps {shift:+d}", moved, wiring, pair)


def _reordered_taps(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    taps = list(wiring.config.target_layer_ids)
    orders = [sorted(taps), taps[::-1], taps[1:] + taps[:1], taps[-1:] + taps[:-1]]
    for i, j in itertools.combinations(range(len(taps)), 2):
        swapped = taps.copy()
        swapped[i], swapped[j] = swapped[j], swapped[i]
        orders.append(swapped)
    for order in dict.fromkeys(map(tuple, orders)):
        yield from _taps("tap order", f"taps {list(order)}", list(order), wiring, pair)


def _taps(fault: str, change: str, taps: list[int], wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    yield from _patched(fault, change, {"target_layer_ids": taps}, wiring, pair)


def _last_tap(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    if pair.target_keys["num_hidden_layers"] - 1 in wiring.config.target_layer_ids and not wiring.raw_last_tap:
        yield Variant(
            "last tap norm",
            "the last tap before the final norm",
            replace(wiring, raw_last_tap=True),
            "no config says this: train the drafter on the last layer's output after the final norm, as transformers' "
            "hidden_states[-1] is",
        )


def _rope_theta(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    settings = dict(wiring.keys.get("rope_scaling") or wiring.keys.get("rope_parameters") or {})
    name = "rope_scaling" if wiring.keys.get("rope_scaling") else "rope_parameters"
    theirs = (pair.target_keys.get("rope_parameters") or {}).get("rope_theta") or pair.target_keys.get("rope_theta")
    for theta in dict.fromkeys((theirs, *_THETAS)):
        if isinstance(theta, (int, float)):
            whose = ", the target's" if theta == theirs else ""
            patch = {name: {"rope_type": "default", **settings, "rope_theta": float(theta)}}
            yield from _patched("rope theta", f"RoPE theta {theta:g}{whose}", patch, wiring, pair)


def _rope_scaling(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    theta = wiring.config.rope.theta
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_scaling": None}
    if wiring.config.rope.type != "default":
        yield from _patched("rope scaling", "RoPE without scaling", plain, wiring, pair)
    theirs = {key: pair.target_keys[key] for key in _ROPE_KEYS if pair.target_keys.get(key) is not None}
    settings = theirs.get("rope_scaling") or theirs.get("rope_parameters")
    kind = settings.get("rope_type") or settings.get("type") if isinstance(settings, Mapping) else None
    if kind not in (None, "default"):
        patch = {"rope_scaling": None, **theirs}
        yield from _patched("rope scaling", f"RoPE as the target's, {kind}", patch, wiring, pair)


def _rope_layout(wiring: Wiring, _pair: Pair) -> Iterator[Variant]:
    if not wiring.is_interleaved:
        yield Variant(
            "rope layout",
            "RoPE over interleaved pairs",
            replace(wiring, is_interleaved=True),
            "the rows of q_proj and k_proj are stored for interleaved RoPE: reorder those of each head to the even "
            "ones, then the odd ones, and q_norm and k_norm likewise",
        )


def _mask_id(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    tokenizer, rows = pair.tokenizer, pair.embedding_rows
    named = [getattr(tokenizer, f"{kind}_token_id", None) for kind in ("mask", "pad", "unk", "bos", "eos")]
    added = sorted(getattr(tokenizer, "added_tokens_decoder", {}), reverse=True)
    likely = [i for i in added if "mask" in str(tokenizer.convert_ids_to_tokens(i)).lower()]
    size = len(tokenizer)
    ids = [named[0], *likely, size, *named[1:], rows - 1, size - 1, 0, *added]
    known = [i for i in dict.fromkeys(ids) if isinstance(i, int) and 0 <= i < rows]
    for i in known[:_MOST_MASKS]:
        text = tokenizer.convert_ids_to_tokens(i) if i < size else "not in the tokenizer"
        yield from _patched("mask id", f"mask {i} ({text})", {"mask_token_id": i}, wiring, pair)


def _causality(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    for value, change in ((False, "no layer causal"), (True, "every layer causal")):
        yield from _patched("causality", change, {"is_causal": value}, wiring, pair)


def _window(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    config = wiring.config
    layers, widest = config.num_hidden_layers, max(config.window)
    all_full = {"layer_types": [FULL] * layers, "use_swa": False}
    for causal in (any(config.causal), False):
        if widest:
            how = "causal" if causal else "not causal"
            patch = {**all_full, "is_causal": causal}
            yield from _patched("window", f"no window, {how}", patch, wiring, pair)
    stated = [wiring.keys.get("sliding_window"), pair.target_keys.get("sliding_window")]
    sizes = [size for size in (*stated, *_WINDOWS) if isinstance(size, int) and 0 < size < pair.longest]
    types = [SLIDING if window else FULL for window in config.window] if widest else [SLIDING] * layers
    for size in dict.fromkeys(sizes):
        patch = {"layer_types": types, "sliding_window": size, "swa_window_size": size, "use_sliding_window": True}
        patch |= {"is_causal": any(config.causal)}
        yield from _patched("window", f"window {size}", patch, wiring, pair)


def _embedding_scale(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    root = math.sqrt(wiring.config.hidden_size)
    for scale in (1.0, root, 1 / root):
        change = f"input_embedding_scale {scale:.6g}"
        yield from _patched("embedding scale", change, {"input_embedding_scale": scale}, wiring, pair)


def _block_size(wiring: Wiring, pair: Pair) -> Iterator[Variant]:
    size = wiring.config.block_size
    for smaller in (size // 2, size // 4, 16, 8):
        if 1 < smaller < size:
            yield from _patched("block size", f"blocks of {smaller}", {"block_size": smaller}, wiring, pair)


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

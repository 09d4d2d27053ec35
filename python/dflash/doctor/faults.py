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

_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_SCALE_KEYS = ("embedding_multiplier", "scale_emb")  # what targets call their own scale
_WINDOWS = (128, 256, 512, 1024, 2048, 4096)
_MOST_MASKS = 12
_SECTIONS = ("dflash_config", "transformer_layer_config")


@dataclass(frozen=True)
class Facts:
    """What is known of a pair besides its wiring, from which variants take their values."""

    target_keys: Mapping[str, Any]  # the target's text config
    target_layers: int  # which not every config has among its keys
    tokenizer: Any
    speculators: bool  # the drafter's config is in the speculators layout
    longest: int  # tokens of the longest recorded answer with its prompt
    embedding_rows: int  # of the target's table
    dtype: torch.dtype  # of the drafter's weights


@dataclass(frozen=True)
class Variant:
    """One wiring to try."""

    fault: str  # that it would undo, one of `FAMILIES`
    change: str  # in words
    wiring: Wiring
    advice: str  # what to do if it accepts more
    config: dict[str, Any] = field(default_factory=dict)  # the keys of the drafter's config.json that do it


def variants(wiring: Wiring, facts: Facts) -> list[Variant]:
    """Return every variant of a wiring, simple ones first, and none twice."""
    found: dict[tuple[Any, ...], Variant] = {}
    for family in FAMILIES.values():
        for variant in family(wiring, facts):
            found.setdefault(variant.wiring.identity, variant)
    return list(found.values())


def _patched(fault: str, change: str, patch: Mapping[str, Any], wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    """Yield the variant of a change of the config, if it is one."""
    other = wiring.patched(patch)
    if other is not None and other.config != wiring.config:
        keys = wiring.advised(patch, speculators=facts.speculators)
        yield Variant(fault, change, other, _in_words(keys), keys)


def _in_words(keys: Mapping[str, Any]) -> str:
    """Say where in ``config.json`` to write these keys."""
    sections = {name: keys[name] for name in _SECTIONS if name in keys}
    top = {key: value for key, value in keys.items() if key not in sections}
    lines = [f"write {json.dumps(top)[1:-1]}"] if top else []
    lines += [f'in its "{name}" write {json.dumps(inner)[1:-1]}' for name, inner in sections.items()]
    return f"in the drafter's config.json {', and '.join(lines)}"


def _shifted_taps(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    taps = wiring.config.target_layer_ids
    for shift in (-1, 1):
        moved = [tap + shift for tap in taps]
        if all(0 <= tap < facts.target_layers for tap in moved):
            yield from _taps("tap shift", moved, wiring, facts)


def _reordered_taps(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    taps = list(wiring.config.target_layer_ids)
    orders = [sorted(taps), taps[::-1], taps[1:] + taps[:1], taps[-1:] + taps[:-1]]
    for i, j in itertools.combinations(range(len(taps)), 2):
        swapped = taps.copy()
        swapped[i], swapped[j] = swapped[j], swapped[i]
        orders.append(swapped)
    for order in dict.fromkeys(map(tuple, orders)):
        yield from _taps("tap order", list(order), wiring, facts)


def _taps(fault: str, taps: list[int], wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    change = f"taps {taps} instead of {list(wiring.config.target_layer_ids)}"
    yield from _patched(fault, change, {"target_layer_ids": taps}, wiring, facts)


def _last_tap(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    if facts.target_layers - 1 in wiring.config.target_layer_ids and not wiring.raw_last_tap:
        yield Variant(
            "last tap norm",
            "the last tap before the target's final norm instead of after it",
            replace(wiring, raw_last_tap=True),
            "no config says this: train the drafter on the last layer's output after the final norm, as transformers' "
            "hidden_states[-1] is",
        )


def _rope_theta(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    now, theirs = wiring.config.rope.theta, _thetas(facts.target_keys)
    for theta in dict.fromkeys((*theirs, *_THETAS)):
        whose = " as the target's" if theta in theirs else ""
        change = f"RoPE theta {theta:g}{whose} instead of {now:g}"
        yield from _patched("rope theta", change, _theta_everywhere(wiring, theta), wiring, facts)


def _theta_everywhere(wiring: Wiring, theta: float) -> dict[str, Any]:
    """Return the patch of each place where the config states theta: readers differ in which of them counts."""
    patch: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if settings := wiring.keys.get(name):
            patch[name] = {**settings, "rope_theta": theta}
    if not patch or wiring.keys.get("rope_theta") is not None:
        patch["rope_theta"] = theta
    return patch


def _thetas(keys: Mapping[str, Any]) -> list[float]:
    """Return the thetas of a target's config, which may have one per kind of layer."""
    settings = keys.get("rope_parameters") or {}
    levels = [settings, *(inner for inner in settings.values() if isinstance(inner, Mapping)), keys]
    found = [level.get(key) for level in levels for key in ("rope_theta", "rope_local_base_freq")]
    return [float(theta) for theta in found if isinstance(theta, (int, float))]


def _rope_scaling(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    rope = wiring.config.rope
    if rope.type != "default":
        change = f"RoPE without scaling instead of {rope.type}"
        plain = {"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta}, "rope_scaling": None}
        yield from _patched("rope scaling", change, plain, wiring, facts)
    theirs = {key: facts.target_keys[key] for key in _ROPE_KEYS if facts.target_keys.get(key) is not None}
    settings = theirs.get("rope_scaling") or theirs.get("rope_parameters")
    if not isinstance(settings, Mapping):
        return
    kind = settings.get("rope_type") or settings.get("type")
    if kind not in (None, "default"):
        change = f"RoPE {kind} as the target's instead of {rope.type}"
        copied = settings.get("rope_theta") if wiring.keys.get("rope_theta") is not None else None
        copy = {} if copied is None else {"rope_theta": copied}  # at the top level, as in the drafter's config
        yield from _patched("rope scaling", change, {"rope_scaling": None, **copy, **theirs}, wiring, facts)


def _rope_layout(wiring: Wiring, _facts: Facts) -> Iterator[Variant]:
    if not wiring.is_interleaved:
        yield Variant(
            "rope layout",
            "RoPE over interleaved pairs of q and k instead of their halves",
            replace(wiring, is_interleaved=True),
            "the rows of q_proj and k_proj are stored for interleaved RoPE: reorder those of each head to the even "
            "ones, then the odd ones, and q_norm and k_norm likewise",
        )


def _mask_id(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    tokenizer, rows = facts.tokenizer, facts.embedding_rows
    named = [getattr(tokenizer, f"{kind}_token_id", None) for kind in ("mask", "pad", "unk", "bos", "eos")]
    added = sorted(getattr(tokenizer, "added_tokens_decoder", {}), reverse=True)
    likely = [i for i in added if "mask" in str(tokenizer.convert_ids_to_tokens(i)).lower()]
    size, now = len(tokenizer), wiring.config.mask_token_id
    ids = [named[0], *likely, size, *named[1:], rows - 1, size - 1, 0, *added]
    known = [i for i in dict.fromkeys(ids) if isinstance(i, int) and 0 <= i < rows]
    for i in known[:_MOST_MASKS]:
        text = tokenizer.convert_ids_to_tokens(i) if i < size else "not in the tokenizer"
        yield from _patched("mask id", f"mask id {i} ({text}) instead of {now}", {"mask_token_id": i}, wiring, facts)


def _causality(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    kinds = {False: "no layer causal", True: "every layer causal", None: "sliding layers causal and full ones not"}
    for value, change in kinds.items():
        yield from _patched("causality", change, {"is_causal": value, "causal": value}, wiring, facts)


def _window(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    config = wiring.config
    layers, widest = config.num_hidden_layers, max(config.window)
    instead = f" instead of {widest or 'none'}"
    for causal in (any(config.causal), False):
        if widest:
            how = "causal" if causal else "not causal"
            patch = {"layer_types": [FULL] * layers, "use_swa": False, "is_causal": causal}
            for variant in _patched("window", f"no window, {how},{instead}", patch, wiring, facts):
                others = f" (a window of more than {facts.longest} tokens, the longest text here, does the same)"
                yield replace(variant, advice=variant.advice + others)
    stated = [wiring.keys.get("sliding_window"), facts.target_keys.get("sliding_window")]
    sizes = [size for size in (*stated, *_WINDOWS) if isinstance(size, int) and 0 < size < facts.longest]
    types = [SLIDING if window else FULL for window in config.window] if widest else [SLIDING] * layers
    for size in dict.fromkeys(sizes):
        patch = {"layer_types": types, "sliding_window": size, "swa_window_size": size, "use_sliding_window": True}
        yield from _patched(
            "window", f"window {size}{instead}", {**patch, "is_causal": any(config.causal)}, wiring, facts
        )


def _embedding_scale(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    root, now = math.sqrt(wiring.config.hidden_size), wiring.config.input_embedding_scale
    theirs = [facts.target_keys.get(key) for key in _SCALE_KEYS]
    scales = [float(scale) for scale in theirs if isinstance(scale, (int, float)) and scale > 0]
    for scale in (1.0, *scales, root, 1 / root):
        change = f"input_embedding_scale {scale:.6g} instead of {now:.6g}"
        yield from _patched("embedding scale", change, {"input_embedding_scale": scale}, wiring, facts)


def _block_size(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    size = wiring.config.rows_per_pass  # what the file states; a DSpark drafter's blocks have a row more
    for smaller in (size // 2, size // 4, 16, 8):
        if 1 < smaller < size:
            change = f"block_size {smaller} instead of {size}"
            yield from _patched("block size", change, {"block_size": smaller}, wiring, facts)


def _overflow(wiring: Wiring, facts: Facts) -> Iterator[Variant]:
    if wiring.dtype is None and facts.dtype != torch.float32:
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

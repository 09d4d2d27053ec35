"""How a drafter is wired to its target, and the usual faults of that, each as variants that would undo it."""

from __future__ import annotations

import copy
import itertools
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dflash import DraftConfig, Drafter
from dflash.internals import drafter_config

_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_SCALE_KEYS = ("embedding_multiplier", "scale_emb")  # what targets call their own scale
_WINDOWS = (128, 256, 512, 1024, 2048, 4096)
_MOST_MASKS = 12
_SECTIONS = ("dflash_config", "transformer_layer_config")
# These are read in dflash_config only; at the top level other keys say the same.
_INNER_ONLY = ("causal", "swa_window_size", "use_swa")


@dataclass(frozen=True)
class Wiring:
    """A drafter's config, and three things that are fixed in this package and differ elsewhere.

    Attributes:
        keys: ``config.json`` in the published layout.
        config: what was read from it.
        raw_last_tap: the last target layer is read before the final norm instead of after it.
        is_interleaved: the rows of q and k are stored for interleaved RoPE, not for the half-split form.
        dtype: of the drafter; None for its own.
        is_speculators: the file itself is in the speculators layout.
    """

    keys: Mapping[str, Any] = field(compare=False)  # wirings that draft the same are equal whatever their keys
    config: DraftConfig
    raw_last_tap: bool = False
    is_interleaved: bool = False
    dtype: torch.dtype | None = None
    is_speculators: bool = field(default=False, compare=False)

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Wiring:
        """Return the wiring that a parsed ``config.json`` asks for, in either layout.

        Raises:
            ValueError: see `dflash.DraftConfig.from_config`.
        """
        is_theirs = drafter_config.is_speculators(keys)
        keys = drafter_config.from_speculators(keys) if is_theirs else keys
        return cls(keys, _read_quietly(keys), is_speculators=is_theirs)

    def patched(self, patch: Mapping[str, Any]) -> Wiring | None:
        """Return the wiring with other keys, at the level where each of them stands; None if they cannot be read."""
        keys = self.placed(patch)
        merged = {**self.keys, **keys}
        if "dflash_config" in keys:
            merged["dflash_config"] = {**(self.keys.get("dflash_config") or {}), **keys["dflash_config"]}
        try:
            return replace(self, keys=merged, config=_read_quietly(merged))
        except ValueError:  # such as a tap below layer 0
            return None

    def placed(self, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Return keys of ``patch`` whose values are new, at the level where they stand, or at both.

        ``dflash_config`` counts here, but other readers may take the copy at the top level.
        """
        inner = self.keys.get("dflash_config") or {}
        out: dict[str, Any] = {}
        for key, value in patch.items():
            if key in inner and inner[key] != value:
                out.setdefault("dflash_config", {})[key] = value
            is_read = key not in inner and key not in _INNER_ONLY
            if (is_read or key in self.keys) and self.keys.get(key) != value:
                out[key] = value
        return out

    def advised(self, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys to write into the drafter's ``config.json`` for `patched`."""
        keys = self.placed(patch)
        if not self.is_speculators:
            return keys
        return _as_speculators(keys, states_causality=self.keys.get("is_causal") is not None)

    def apply(self, drafter: Drafter) -> Drafter:
        """Return a drafter that is wired like this. It shares the weights where they stay what they are."""
        if self.dtype not in (None, drafter.dtype):
            drafter = copy.deepcopy(drafter).to(self.dtype)
        if self.is_interleaved:
            drafter = copy.deepcopy(drafter).reorder_interleaved_()
        return drafter.rewired(self.config)


def _read_quietly(keys: Mapping[str, Any]) -> DraftConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading the drafter has warned of unknown keys
        return DraftConfig.from_config(keys)


def _as_speculators(keys: Mapping[str, Any], *, states_causality: bool) -> dict[str, Any]:
    """Return the same keys where the speculators layout has them; its taps are counted from the embedding."""
    top = {**keys, **keys.get("dflash_config", {})}
    top.pop("dflash_config", None)
    out = {key: top.pop(key) for key in ("mask_token_id", "block_size") if key in top}
    if "target_layer_ids" in top:
        out["aux_hidden_state_layer_ids"] = [tap + 1 for tap in top.pop("target_layer_ids")]
    if "is_causal" in top or "causal" in top:
        causal, outer = top.pop("causal", None), top.pop("is_causal", None)
        causal = causal if outer is None else outer
        out["sliding_window_non_causal"] = causal is False
        if causal or states_causality:
            top["is_causal"] = causal  # full layers too, for which the layout has no word
    return {**out, "transformer_layer_config": top} if top else out


# ---------------------------------------------------------------------------------------------- variants


@dataclass(frozen=True)
class Facts:
    """Facts about a pair other than its wiring, from which variants take their values."""

    target_keys: Mapping[str, Any]  # the target's text config
    target_layers: int  # which not every config has among its keys
    tokenizer: Any
    longest: int  # tokens of the longest recorded answer with its prompt
    embedding_rows: int  # of the target's table
    dtype: torch.dtype  # of the drafter's weights


@dataclass(frozen=True)
class Variant:
    fault: str  # that it would undo, one of `FAMILIES`
    change: str  # in words
    wiring: Wiring
    advice: str  # what to do if it accepts more
    config: dict[str, Any] = field(default_factory=dict)  # the keys of the drafter's config.json that do it


def variants(wiring: Wiring, facts: Facts) -> list[Variant]:
    """Return every variant of a wiring, simple ones first, and none twice."""
    found: dict[Wiring, Variant] = {}
    for fault, family in FAMILIES.items():
        for change, other, advice in family(wiring, facts):
            keys: dict[str, Any] = {}
            if not isinstance(other, Wiring):  # a patch of the config
                keys = wiring.advised(other)
                other, advice = wiring.patched(other), _in_words(keys) + advice
                if other is None or other.config == wiring.config:
                    continue
            found.setdefault(other, Variant(fault, change, other, advice, keys))
    return list(found.values())


def _in_words(keys: Mapping[str, Any]) -> str:
    sections = {name: keys[name] for name in _SECTIONS if name in keys}
    top = {key: value for key, value in keys.items() if key not in sections}
    lines = [f"write {json.dumps(top)[1:-1]}"] if top else []
    lines += [f'in its "{name}" write {json.dumps(inner)[1:-1]}' for name, inner in sections.items()]
    return f"in the drafter's config.json {', and '.join(lines)}"


# A family yields changes in words, each with the wiring and an advice, or with a patch of the config and what to add to
# the advice to write it.
Changes = Iterator[tuple[str, Wiring | dict[str, Any], str]]


def _shifted_taps(wiring: Wiring, facts: Facts) -> Changes:
    taps = wiring.config.target_layer_ids
    for shift in (-1, 1):
        moved = [tap + shift for tap in taps]
        if all(0 <= tap < facts.target_layers for tap in moved):
            yield f"taps {moved} instead of {list(taps)}", {"target_layer_ids": moved}, ""


def _reordered_taps(wiring: Wiring, _facts: Facts) -> Changes:
    taps = list(wiring.config.target_layer_ids)
    orders = [sorted(taps), taps[::-1], taps[1:] + taps[:1], taps[-1:] + taps[:-1]]
    for a, b in itertools.combinations(taps, 2):
        orders.append([{a: b, b: a}.get(tap, tap) for tap in taps])
    for order in map(list, dict.fromkeys(map(tuple, orders))):
        yield f"taps {order} instead of {taps}", {"target_layer_ids": order}, ""


def _last_tap(wiring: Wiring, facts: Facts) -> Changes:
    if facts.target_layers - 1 in wiring.config.target_layer_ids and not wiring.raw_last_tap:
        advice = "no config says this: train the drafter on the last layer's output after the final norm, as "
        advice += "transformers' hidden_states[-1] is"
        change = "the last tap before the target's final norm instead of after it"
        yield change, replace(wiring, raw_last_tap=True), advice


def _rope_theta(wiring: Wiring, facts: Facts) -> Changes:
    # 1. The target's, which may have one per kind of layer, and the usual ones.
    given = facts.target_keys.get("rope_parameters") or {}
    levels = [given, *(inner for inner in given.values() if isinstance(inner, Mapping)), facts.target_keys]
    found = [level.get(key) for level in levels for key in ("rope_theta", "rope_local_base_freq")]
    theirs = [float(theta) for theta in found if isinstance(theta, (int, float))]
    # 2. Each written wherever the config states theta: readers differ in which place counts.
    stated = [name for name in ("rope_scaling", "rope_parameters") if wiring.keys.get(name)]
    is_top = not stated or wiring.keys.get("rope_theta") is not None
    for theta in dict.fromkeys((*theirs, *_THETAS)):
        patch: dict[str, Any] = {name: {**wiring.keys[name], "rope_theta": theta} for name in stated}
        whose = " as the target's" if theta in theirs else ""
        change = f"RoPE theta {theta:g}{whose} instead of {wiring.config.rope.theta:g}"
        yield change, patch | ({"rope_theta": theta} if is_top else {}), ""


def _rope_scaling(wiring: Wiring, facts: Facts) -> Changes:
    rope = wiring.config.rope
    if rope.type != "default":
        plain = {"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta}, "rope_scaling": None}
        yield f"RoPE without scaling instead of {rope.type}", plain, ""
    theirs = {key: facts.target_keys[key] for key in _ROPE_KEYS if facts.target_keys.get(key) is not None}
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters")
    if not isinstance(given, Mapping):
        return
    kind = given.get("rope_type") or given.get("type")
    if kind not in (None, "default"):
        copied = given.get("rope_theta") if wiring.keys.get("rope_theta") is not None else None
        copy = {} if copied is None else {"rope_theta": copied}  # at the top level, as in the drafter's config
        yield f"RoPE {kind} as the target's instead of {rope.type}", {"rope_scaling": None, **copy, **theirs}, ""


def _rope_layout(wiring: Wiring, _facts: Facts) -> Changes:
    if not wiring.is_interleaved:
        stored = "the rows of q_proj and k_proj are stored for interleaved RoPE: reorder those of each head"
        advice = f"{stored} to the even ones, then the odd ones, and q_norm and k_norm likewise"
        change = "RoPE over interleaved pairs of q and k instead of their halves"
        yield change, replace(wiring, is_interleaved=True), advice


def _mask_id(wiring: Wiring, facts: Facts) -> Changes:
    tokenizer, rows = facts.tokenizer, facts.embedding_rows
    named = [getattr(tokenizer, f"{kind}_token_id", None) for kind in ("mask", "pad", "unk", "bos", "eos")]
    added = sorted(getattr(tokenizer, "added_tokens_decoder", {}), reverse=True)
    likely = [i for i in added if "mask" in str(tokenizer.convert_ids_to_tokens(i)).lower()]
    size, now = len(tokenizer), wiring.config.mask_token_id
    ids = [named[0], *likely, size, *named[1:], rows - 1, size - 1, 0, *added]
    known = [i for i in dict.fromkeys(ids) if isinstance(i, int) and 0 <= i < rows]
    for i in known[:_MOST_MASKS]:
        text = tokenizer.convert_ids_to_tokens(i) if i < size else "not in the tokenizer"
        yield f"mask id {i} ({text}) instead of {now}", {"mask_token_id": i}, ""


def _causality(_wiring: Wiring, _facts: Facts) -> Changes:
    kinds = {False: "no layer causal", True: "every layer causal", None: "sliding layers causal and full ones not"}
    for value, change in kinds.items():
        yield change, {"is_causal": value, "causal": value}, ""


def _window(wiring: Wiring, facts: Facts) -> Changes:
    config = wiring.config
    layers, widest, is_causal = config.num_hidden_layers, max(config.window), any(config.causal)
    instead = f" instead of {widest or 'none'}"
    for causal in (is_causal, False) if widest else ():
        patch = {"layer_types": [drafter_config.FULL] * layers, "use_swa": False, "is_causal": causal}
        others = f" (a window of more than {facts.longest} tokens, the longest text here, does the same)"
        yield f"no window, {'causal' if causal else 'not causal'},{instead}", patch, others
    stated = [wiring.keys.get("sliding_window"), facts.target_keys.get("sliding_window")]
    sizes = [size for size in (*stated, *_WINDOWS) if isinstance(size, int) and 0 < size < facts.longest]
    full, sliding = drafter_config.FULL, drafter_config.SLIDING
    types = [sliding if window or not widest else full for window in config.window]
    for size in dict.fromkeys(sizes):
        patch = {"layer_types": types, "sliding_window": size, "swa_window_size": size, "use_sliding_window": True}
        others = "" if widest else f" (or leave the file, and run with drafter_window={size})"
        yield f"window {size}{instead}", {**patch, "is_causal": is_causal}, others


def _embedding_scale(wiring: Wiring, facts: Facts) -> Changes:
    root, now = math.sqrt(wiring.config.hidden_size), wiring.config.input_embedding_scale
    theirs = [facts.target_keys.get(key) for key in _SCALE_KEYS]
    scales = [float(scale) for scale in theirs if isinstance(scale, (int, float)) and scale > 0]
    for scale in (1.0, *scales, root, 1 / root):
        yield f"input_embedding_scale {scale:.6g} instead of {now:.6g}", {"input_embedding_scale": scale}, ""


def _block_size(wiring: Wiring, _facts: Facts) -> Changes:
    size = wiring.config.rows_per_pass  # what the file states; a DSpark drafter's blocks have a row more
    for smaller in (size // 2, size // 4, 16, 8):
        if 1 < smaller < size:
            yield f"block_size {smaller} instead of {size}", {"block_size": smaller}, ""


def _overflow(wiring: Wiring, facts: Facts) -> Changes:
    if wiring.dtype is None and facts.dtype != torch.float32:
        advice = "its products pass the dtype's range: run the pair in bfloat16 or float32 (--dtype)"
        yield "the drafter in float32", replace(wiring, dtype=torch.float32), advice


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

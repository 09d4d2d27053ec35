"""How a drafter is wired to its target: what its config says, and what no config can say."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..drafter import DraftConfig, Drafter, from_speculators, is_speculators

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
    """

    keys: Mapping[str, Any]
    config: DraftConfig
    raw_last_tap: bool = False
    is_interleaved: bool = False
    dtype: torch.dtype | None = None

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Wiring:
        """Return the wiring that a parsed ``config.json`` asks for, in either layout.

        Raises:
            ValueError: see `dflash.DraftConfig.from_config`.
        """
        keys = from_speculators(keys) if is_speculators(keys) else keys
        with warnings.catch_warnings(action="ignore"):
            return cls(keys, DraftConfig.from_config(keys))

    @property
    def identity(self) -> tuple[Any, ...]:
        """Values that are equal for two wirings that draft the same, whatever their keys."""
        return self.config, self.raw_last_tap, self.is_interleaved, self.dtype

    def patched(self, patch: Mapping[str, Any]) -> Wiring | None:
        """Return the wiring with other keys, at the level where each of them stands; None if they cannot be read."""
        keys = self.placed(patch)
        merged = {**self.keys, **keys}
        if "dflash_config" in keys:
            merged["dflash_config"] = {**(self.keys.get("dflash_config") or {}), **keys["dflash_config"]}
        try:
            with warnings.catch_warnings(action="ignore"):  # loading the drafter has warned of unknown keys
                return replace(self, keys=merged, config=DraftConfig.from_config(merged))
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

    def advised(self, patch: Mapping[str, Any], *, speculators: bool) -> dict[str, Any]:
        """Return the keys to write into the drafter's ``config.json`` for `patched`."""
        keys = self.placed(patch)
        return _as_speculators(keys, states_causality=self.keys.get("is_causal") is not None) if speculators else keys

    def apply(self, drafter: Drafter) -> Drafter:
        """Return a drafter that is wired like this. It shares the weights where they stay what they are."""
        if self.dtype not in (None, drafter.dtype):
            drafter = copy.deepcopy(drafter).to(self.dtype)
        if self.is_interleaved:
            drafter = _half_split(copy.deepcopy(drafter))
        return drafter.rewired(self.config)


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


@torch.no_grad()
def _half_split(drafter: Drafter) -> Drafter:
    """Reorder the rows of q and k from interleaved pairs to the two halves that rotate together."""
    size = drafter.config.head_dim
    order = torch.arange(size, dtype=torch.int64, device=drafter.device).view(-1, 2).t().flatten()
    layers: Any = drafter.layers
    for layer in layers:
        attention = layer.self_attn
        for projection, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
            for rows in (projection.weight, projection.bias):
                if rows is not None:
                    rows.copy_(rows.unflatten(0, (-1, size))[:, order].flatten(0, 1))
            norm.weight.copy_(norm.weight[order])
    return drafter

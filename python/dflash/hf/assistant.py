"""Our drafter inside transformers' own assisted generation."""

from __future__ import annotations

import os
import types
from typing import Any

import torch
from torch import Tensor, nn

from ..drafter import Drafter, check_draft_weights, load_draft, quantized_draft
from ..ops import WeightStorage
from ..options import check_weights
from ..state import KVCache
from ..targets import transformers_version

_STOPS_IN_MID_BLOCK = (5, 18)  # the first transformers whose loop around a DFlash drafter does


class _AssistantConfig(types.SimpleNamespace):
    """What transformers reads of an assistant's configuration."""

    def get_text_config(self, *_: Any, **__: Any) -> _AssistantConfig:
        return self


class _Assistant:
    """Our drafter, as transformers' DFlash candidate generator calls one; see `as_assistant`."""

    def __init__(self, draft: Drafter) -> None:
        self.draft = draft
        # transformers' cache gets no layers: we keep our own.
        self.config = _AssistantConfig(
            target_layer_ids=list(draft.config.target_layer_ids), block_size=draft.config.block_size,
            mask_token_id=draft.config.mask_token_id, num_hidden_layers=0, layer_types=[], per_layer_config=[],
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        return self.draft.device

    @property
    def dtype(self) -> torch.dtype:
        return self.draft.dtype

    @torch.no_grad()
    def __call__(
        self, noise_embeds: Tensor, context_hidden_states: Tensor, position_ids: Tensor, attention_mask: Tensor | None,
        cache: Any = None, past_key_values: Any = None,
    ) -> Any:  # fmt: skip
        """Draft a block: ``noise_embeds [1, block_size, hidden]`` are its anchor and masks as the target embeds them.

        ``context_hidden_states [1, rows, taps * hidden]`` are of the new tokens before the anchor. Our cache travels
        with ``cache``, one object per call of ``generate``; before transformers 5.24 that is ``past_key_values``.
        """
        draft, (rows, block) = self.draft, (context_hidden_states.shape[1], noise_embeds.shape[1])
        if noise_embeds.dtype != draft.dtype:
            raise ValueError(f"the drafter's dtype is {draft.dtype}, the target embeds in {noise_embeds.dtype}")
        length = position_ids[:, rows].contiguous()
        positions = position_ids[:, :rows]
        if attention_mask is not None:
            live = attention_mask[:, -(rows + block) : -block]
            positions = torch.where(live.bool(), positions, -1)  # padding is no context
        own = self._cache(past_key_values if cache is None else cache, int(length) + block)
        none = torch.zeros_like(length)
        features = draft.fuse(context_hidden_states, none + rows)
        draft.inject_(features, positions, own)
        hidden = draft(features[:, :0], none, noise_embeds, length, own) * draft.config.output_multiplier
        return types.SimpleNamespace(last_hidden_state=hidden)

    def _cache(self, holder: Any, capacity: int) -> KVCache:
        """Return the call's cache, grown to at least ``capacity`` positions."""
        old = getattr(holder, "dflash_cache", None)
        if old is None:  # a call begins
            self.draft.refresh()
        if old is not None and old.capacity >= capacity:
            return old
        cache = self.draft.new_cache(1, 2 * capacity)
        if old is not None:
            for new, held in zip(cache.buffers, old.buffers, strict=True):
                new[:, :, : old.capacity] = held
        holder.dflash_cache = cache
        return cache


def as_assistant(draft: str | os.PathLike[str] | nn.Module, *, draft_weights: WeightStorage = None) -> _Assistant:
    """Return our drafter for transformers' own assisted generation.

    Call ``model.generate(ids, assistant_model=dflash.as_assistant(draft), speculation_type="dflash")``. The loop, its
    limits (a batch of one, a dynamic cache) and its sampling are transformers'. The embeddings arrive as the target's
    own module gives them, so a target that scales them has done so. A softcap of the drafter's logits is not applied:
    that changes what is drafted when sampling, never the distribution of the text.

    transformers refuses targets with a recurrent state (Qwen3.5, Qwen3-Next, Nemotron-H, ...) before it looks at the
    drafter: "assisted generation is not supported with stateful models". Its caches cannot take a state back to where
    the rejected drafts began. `dflash.custom_generate` and `dflash.generate` can.

    Args:
        draft: what `dflash.load_draft` takes.
        draft_weights: ``"int8"`` for its layers' weights in 8 bits, on CPU, see `dflash.Generator`.

    Returns:
        An object for ``assistant_model``; calls may share it, one after another.

    Raises:
        ValueError: as `dflash.load_draft`, this is a DFlash 2 or DSpark drafter, it has its own head, embedding or
            mask embedding, or its weights cannot be stored as ``draft_weights`` says.
        TypeError: as `dflash.load_draft`.
        FileNotFoundError: as `dflash.load_draft`.
        RuntimeError: transformers is older than 5.18, whose loop continues after a stop token that is not the last of
            those a step accepts.
    """
    loaded = load_draft(draft)
    # 1. Refuse drafters that no version of transformers runs, so that nobody upgrades for them
    instead = "model.generate(..., custom_generate=dflash.custom_generate, draft=draft) drafts with it"
    if loaded.selector is not None or loaded.config.predicts_from_anchor:
        raise ValueError(
            "as_assistant takes drafters of the first generation, got a DFlash 2 or DSpark drafter: transformers' loop "
            "has no candidate selector, and drafts no token from the anchor's row. "
            f"{instead}"
        )
    if own := loaded.config.own_parts:
        raise ValueError(
            f"as_assistant: transformers embeds and predicts with the target's parts, and this drafter has its own "
            f"{', '.join(own)}. {instead}"
        )
    check_weights("draft_weights", draft_weights)
    check_draft_weights(draft_weights, loaded)
    # 2. Refuse versions that do not stop where they should
    version = transformers_version()
    if version < _STOPS_IN_MID_BLOCK:
        raise RuntimeError(
            "as_assistant needs transformers >= 5.18: the assisted generation of this version, "
            f"{'.'.join(map(str, version))}, continues after a stop token that was accepted in the middle of a block; "
            "model.generate(..., custom_generate=dflash.custom_generate, draft=draft) stops there"
        )
    return _Assistant(quantized_draft(draft_weights, loaded))

"""Prompts with pictures: run whole by the model's own passes, whose keys, values and states our caches then hold.

What a picture's tokens see, and where they stand, differs from family to family: both directions within a picture,
features of the vision tower in several layers, positions in three dimensions. The model's own ``generate`` knows. So a
copy of the model with its own attention runs such a prompt, and decoding goes on in our cache as after any prompt.

With positions in three dimensions (M-RoPE; Wang et al., "Qwen2-VL", section 2.1) a picture takes up fewer positions
than tokens, and the text after it stands before its slot. RoPE sees differences only, so all positions of the prompt
are moved until the token after it stands at its slot. Every later position then follows from the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

from .. import ops
from ..cache import KVCache, RecurrentCache
from .copies import structural_copy
from .model import cache_argument, tap_, text_config


def takes_pictures(model: PreTrainedModel) -> bool:
    """Return True if a model's configuration names a vision tower."""
    return getattr(model.config, "vision_config", None) is not None


_OURS = {"self", "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "inputs_embeds", "labels"}
_OURS |= {"use_cache", "logits_to_keep", "kwargs", "lm_kwargs", "output_attentions", "output_hidden_states"}


def picture_arguments(model: PreTrainedModel) -> list[str]:
    """Return what a model's forward takes besides ids and what is decided here."""
    return [name for name in inspect.signature(model.forward).parameters if name not in _OURS]


class PicturePrompts:
    """A copy of a model that runs prompts with pictures.

    Args:
        model: the user's.
        layer_ids: the tapped layers.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: tuple[int, ...]) -> None:
        self._model = structural_copy(model)
        self._model.generation_config = GenerationConfig(
            max_new_tokens=1, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
        )  # the first token is chosen elsewhere
        self._taps = tap_(self._model, layer_ids)

    def run(
        self, ids: Tensor, lengths: Tensor, pictures: Mapping[str, Tensor], cache: KVCache
    ) -> tuple[Tensor, list[Tensor]]:
        """Run whole prompts into an empty cache.

        Args:
            ids: ``[batch, width]`` int64, padded on the left.
            lengths: ``[batch]`` int64, tokens of each prompt.
            pictures: what the processor made of them besides ids and mask, on any device.
            cache: of these rows. Its recurrent layers have their buffers.

        Returns:
            Logits ``[batch, vocab]`` of each prompt's last token, and the taps, ``[batch, longest, hidden]`` each,
            padded on the right.
        """
        columns = torch.arange(ids.shape[1], device=ids.device)
        places = columns - (ids.shape[1] - lengths)[:, None]  # of each column's token; negative for padding
        options: dict[str, Any] = {name: tensor.to(ids.device) for name, tensor in pictures.items()}
        options["attention_mask"] = (places >= 0).long()
        options["position_ids"] = self._positions(ids, lengths, options)
        try:
            output = self._model.generate(ids, **options)
        finally:
            taps, self._taps[:] = [*self._taps], [None] * len(self._taps)
        _take(cache, getattr(output, cache_argument(self._model)), places, lengths)
        order = (columns + (ids.shape[1] - lengths)[:, None])[:, : int(lengths.max())] % ids.shape[1]
        return output.logits[0], [tap.gather(1, order[..., None].expand(-1, -1, tap.shape[2])) for tap in taps]

    def _positions(self, ids: Tensor, lengths: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the positions that ``generate`` would give the prompts, moved to end at their lengths."""
        found = self._model._prepare_position_ids_for_generation(ids, dict(options)).clone()
        sections = (getattr(text_config(self._model), "rope_parameters", None) or {}).get("mrope_section", ())
        spatial = found[-(len(sections) or 3) :] if found.dim() == 3 else found[None]  # a row before them counts tokens
        spatial += (lengths - 1 - spatial.amax((0, 2)))[:, None]
        return found


def _take(cache: KVCache, theirs: Cache, places: Tensor, lengths: Tensor) -> None:
    """Copy what a model's own cache holds of prompts whose columns stand at ``places [batch, width]``."""
    for index, layer in enumerate(theirs.layers):
        if getattr(layer, "keys", None) is not None:
            kept = places[:, -layer.keys.shape[2] :].contiguous()  # sliding layers keep the last ones
            buffers = cache.layer(index, layer.keys, layer.values)
            ops.append_kv_(layer.keys.contiguous(), layer.values.contiguous(), kept, *buffers)
    if isinstance(cache, RecurrentCache):
        for index, recurrent in cache.recurrent.items():
            context, *state = recurrent.held_values
            states = theirs.layers[index]
            context.copy_(states.conv_states[0][..., -context.shape[1] :].transpose(1, 2))
            for ours in state:
                ours.copy_(states.recurrent_states[0])
        cache.held.copy_(lengths)

"""Run the frozen target for training: tapped hidden states, embeddings and head."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from ...targets import check_target, find_layers, has_recurrent_layers, structural_twin, tapped_modules

__all__ = ["TargetFeatures"]


class TargetFeatures:
    """Features of full sequences from the frozen target, with its embeddings and head.

    Runs a structural twin of the model without gradients; the model itself is not changed. Layers after the last tap
    are skipped unless ``final`` is set.

    Args:
        target: a causal language model of transformers that the engine supports.
        layer_ids: tapped layers. The last layer's output is read after the final norm.
        final: return the final hidden states too, for distillation.

    Raises:
        UnsupportedTargetError: the engine does not support the target.
    """

    def __init__(self, target: nn.Module, layer_ids: tuple[int, ...], *, final: bool = False) -> None:
        self.model, self.final = structural_twin(check_target(target, spread=False)), final
        self.layer_ids = tuple(layer_ids)
        layers, modules = find_layers(self.model), tapped_modules(self.model, self.layer_ids)
        if not final and len(layers) - 1 not in self.layer_ids:
            del layers[max(self.layer_ids) + 1 :]
        self._is_recurrent = has_recurrent_layers(self.model)
        self._taps: dict[int, Tensor] = {}
        for layer_id, module in zip(self.layer_ids, modules, strict=True):

            def keep(_module, _args, output, taps=self._taps, layer_id=layer_id):
                taps[layer_id] = output[0] if isinstance(output, tuple) else output

            module.register_forward_hook(keep)

    @property
    def embedding_weight(self) -> Tensor:
        """The embedding matrix, ``[vocab, hidden]``."""
        return self.model.get_input_embeddings().weight

    def head(self, hidden: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to ``[..., vocab]``, without the model family's logit scaling."""
        return self.model.get_output_embeddings()(hidden)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return features and final states of right-padded sequences.

        Padding needs no mask: attention is causal, and recurrent layers run from left to right, from an empty state.

        Args:
            input_ids: ``[batch, length]`` int64.

        Returns:
            ``[batch, length, taps * hidden]``, and ``[batch, length, hidden]`` after the final norm, or None.
        """
        with contextlib.ExitStack() as stack:
            if self._is_recurrent:
                # Autocast would round the products inside a recurrence, which the target computes in float32.
                stack.enter_context(torch.autocast(input_ids.device.type, enabled=False))
            out = self.model.get_decoder()(input_ids=input_ids, use_cache=False)
        taps = torch.cat([self._taps[layer_id] for layer_id in self.layer_ids], -1)
        self._taps.clear()
        return taps, out.last_hidden_state if self.final else None

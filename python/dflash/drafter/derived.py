"""Weights that follow from other weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DerivedWeight", "forget_derived", "scale_outputs_"]


class DerivedWeight(nn.Module):
    """A tensor that follows from others, at a fixed address. It is computed again only after one of them has changed.

    Tensors that were replaced, or written to where torch counts it, have changed. torch counts neither writes through
    ``tensor.data`` or raw memory, nor any to a tensor that was made in inference mode. What follows from the latter is
    computed at every look.

    Args:
        weight: memory of the right shape.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self._seen: list[tuple[weakref.ref[Tensor], object]] = []

    @torch.no_grad()
    def follow_(self, sources: Sequence[Tensor], compute: Callable[[], Tensor]) -> None:
        """Take the value of ``compute``, which makes it from ``sources``, if one of these has changed."""
        if self._is_current(sources):
            return
        value = compute()
        if (value.dtype, value.device) != (self.weight.dtype, self.weight.device):
            self.weight = value
        # A write would look like other weights to whoever compares versions, such as the reuse of prefixes.
        elif not value.is_meta and not torch.equal(self.weight, value):
            self.weight.copy_(value)
        self._seen = [(weakref.ref(tensor), _state(tensor)) for tensor in (self.weight, *sources)]

    def forget(self) -> None:
        """Compute the tensor again at the next `follow_`."""
        self._seen = []

    def _is_current(self, sources: Sequence[Tensor]) -> bool:
        """Return True if no source was replaced or written to, and this module was not moved."""
        tensors = self.weight, *sources
        if len(tensors) != len(self._seen) or any(map(Tensor.is_inference, sources)):
            return False
        # By identity: an `id` may be that of a freed tensor, and `==` compares values.
        return all(
            ref() is tensor and state == _state(tensor)
            for (ref, state), tensor in zip(self._seen, tensors, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": []}  # a copy looks at sources of its own


def forget_derived(module: nn.Module) -> None:
    """Compute every derived weight of a module again at its next `DerivedWeight.follow_`."""
    for part in module.modules():
        if isinstance(part, DerivedWeight):
            part.forget()


def _state(tensor: Tensor) -> object:
    """Return what differs once a tensor was written to, moved or reshaped."""
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.dtype, tensor.shape, version


def scale_outputs_(drafter: nn.Module) -> None:
    """Scale a drafter's output projections that have changed, in copies: as good as scaling all values."""
    scale = drafter.config.attention_value_scale
    for attention in (layer.self_attn for layer in drafter.layers if scale != 1.0):
        weight = attention.o_proj.weight
        attention.scaled_o.follow_([weight], functools.partial(torch.mul, weight, scale))

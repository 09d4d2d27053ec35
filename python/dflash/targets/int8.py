"""Which targets can be stored as int8, and what is said of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..ops import NotFiniteError
from .quantized import is_quantized
from .support import UnsupportedTargetError, embedding_table
from .weights import name_of

if TYPE_CHECKING:
    from .fused import FusedTarget

__all__ = ["not_finite", "obstacle_of", "refuse_int8"]


def obstacle_of(model: nn.Module, fused: FusedTarget | None, reason: str) -> str:
    """Return why the weights of a target cannot be stored as int8; empty if they can. No value is read.

    Args:
        model: the user's.
        fused: its fused form.
        reason: why it has none.
    """
    device = embedding_table(model).device
    if device.type != "cpu":
        return f"it is on {device}"
    if fused is not None:
        return fused.int8_obstacle
    return "its weights are quantized already" if is_quantized(model) else reason


def refuse_int8(model: nn.Module, obstacle: str) -> None:
    """Raise UnsupportedTargetError if there is an obstacle."""
    if obstacle:
        raise UnsupportedTargetError(
            "weights='int8' needs a target on CPU whose dense layers run on the ops of this package (see fused), got "
            f"{type(model).__name__}: {obstacle}. Leave weights out"
        )


def not_finite(option: str, model: nn.Module, error: NotFiniteError) -> str:
    """Return what to say of a weight that is not finite.

    Args:
        option: that asks for the weights as int8.
        model: the target or the drafter that has the weight.
        error: what was raised.
    """
    name = name_of(model, error.weight).removesuffix(".weight")
    return f"{option}='int8' needs finite weights, got {error.value} in {name}: leave it out"

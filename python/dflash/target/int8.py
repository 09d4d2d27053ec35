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

__all__ = ["check_storable", "not_finite"]


def check_storable(model: nn.Module, fused: FusedTarget | None, reason: str) -> None:
    """Raise UnsupportedTargetError if the weights of a target cannot be stored as int8. No value is read.

    Args:
        model: the user's.
        fused: its fused form.
        reason: why it has none.
    """
    device = embedding_table(model).device
    if device.type != "cpu":
        obstacle = f"it is on {device}"
    elif fused is not None:
        obstacle = fused.int8_obstacle
    else:
        obstacle = "its weights are quantized already" if is_quantized(model) else reason
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

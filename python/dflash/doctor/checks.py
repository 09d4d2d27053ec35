"""What can be wrong with a pair whatever its wiring: weights and features that are not finite or near zero, lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..drafter import Drafter, is_speculators
from ..terminal import listed
from .replay import Replay
from .wiring import Wiring

__all__ = ["Finding", "check_features", "check_positions", "check_weights"]

_NEAR_ZERO = 1e-10  # mean square of a tap or of fused features; those of trained pairs are from 1e-4 on


@dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        fault: its name, one of a fixed set (docs/doctor.md).
        found: what was seen.
        advice: what to do, such as the line for ``config.json``.
        before, after: tokens per step as configured and without the fault; None if there is nothing to compare.
        config: the keys of the drafter's ``config.json`` to write; None if none repair it.
    """

    fault: str
    found: str
    advice: str
    before: float | None = None
    after: float | None = None
    config: dict[str, Any] | None = None


def check_weights(drafter: Drafter) -> Iterator[Finding]:
    """Find weights that are NaN or infinite."""
    broken = [name for name, weight in drafter.named_parameters() if not weight.isfinite().all()]
    if broken:
        advice = "download or convert the checkpoint again; a conversion to float16 makes infinities of large values"
        yield Finding("not finite", f"weights that are NaN or infinite: {listed(broken)}", advice)


@torch.no_grad()
def check_features(replay: Replay, wiring: Wiring) -> Iterator[Finding]:
    """Find taps and fused features that are not finite or near zero."""
    layers, every = replay.layers(wiring), [recording.states for recording in replay.recordings]
    # 1. The target's states
    for tap, layer in zip(wiring.config.target_layer_ids, layers, strict=True):
        if not all(states[layer].isfinite().all() for states in every):
            yield Finding("not finite", f"the target's layer {tap} has states that are NaN or infinite", _TARGET_DTYPE)
        elif _mean_square(states[layer].float() for states in every) < _NEAR_ZERO:
            yield Finding("near zero", f"the target's layer {tap} has states near zero", _TARGET_WEIGHTS)
    # 2. What the drafter makes of them; NaN is not below anything
    weight, scale = replay.drafter.fc.weight.float(), replay.drafter.hidden_norm.weight.float()
    contexts = (torch.cat([states[layer] for layer in layers], 1).float() for states in every)
    if _mean_square(nn.functional.linear(context, weight) * scale for context in contexts) < _NEAR_ZERO:
        advice = "fc.weight or hidden_norm.weight was not trained or not converted: look at them in the checkpoint"
        yield Finding("near zero", "the features that the drafter makes of the target's states are near zero", advice)


_TARGET_DTYPE = "run the pair in bfloat16 or float32 (--dtype)"
_TARGET_WEIGHTS = "these are not the weights of the model that the drafter was trained on"


def _mean_square(tensors: Iterable[Tensor]) -> float:
    """Return the mean square of all elements."""
    sums = [(tensor.square().sum().item(), tensor.numel()) for tensor in tensors]
    return sum(square for square, _ in sums) / sum(count for _, count in sums)


def check_positions(keys: Mapping[str, Any], longest_prompt: int, longest: int) -> Iterator[Finding]:
    """Find prompts and answers that pass the positions that the drafter's ``config.json`` states."""
    section = keys.get("transformer_layer_config", keys) if is_speculators(keys) else keys
    positions = section.get("max_position_embeddings")  # a layout's default says nothing of this drafter
    if positions is None or longest <= positions:
        return
    what = "a prompt" if longest_prompt > positions else "a prompt with its answer"
    length = longest_prompt if longest_prompt > positions else longest
    yield Finding(
        "positions",
        f"{what} has {length} tokens, the drafter's max_position_embeddings is {positions}",
        "if the drafter was trained on texts this long, max_position_embeddings in its config.json is wrong; if not, "
        "expect low acceptance there",
    )

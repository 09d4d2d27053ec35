"""What can be wrong with a pair whatever its wiring: weights and features that are not finite or near zero, lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..drafter import Drafter
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
    recording, drafter = replay.recording, replay.drafter
    inside = torch.arange(recording.ids.shape[1], device=recording.ids.device) < recording.lengths[:, None]
    context = replay.context(wiring)[inside]  # [tokens, taps * hidden]
    taps = wiring.config.target_layer_ids
    for tap, state in zip(taps, context.float().chunk(len(taps), 1), strict=True):
        if not state.isfinite().all():
            yield Finding("not finite", f"the target's layer {tap} has states that are NaN or infinite", _TARGET_DTYPE)
        elif state.square().mean() < _NEAR_ZERO:
            yield Finding("near zero", f"the target's layer {tap} has states near zero", _TARGET_WEIGHTS)
    fused = nn.functional.linear(context.float(), drafter.fc.weight.float())
    features = fused * drafter.hidden_norm.weight.float()
    if features.isfinite().all() and features.square().mean() < _NEAR_ZERO:
        advice = "fc.weight or hidden_norm.weight was not trained or not converted: look at them in the checkpoint"
        yield Finding("near zero", "the features that the drafter makes of the target's states are near zero", advice)


_TARGET_DTYPE = "run the pair in bfloat16 or float32 (--dtype)"
_TARGET_WEIGHTS = "these are not the weights of the model that the drafter was trained on"


def check_positions(wiring: Wiring, longest_prompt: int, longest: int) -> Iterator[Finding]:
    """Find prompts and answers that pass the positions that the drafter was made for."""
    positions = wiring.config.max_position_embeddings
    if positions is None or longest <= positions:
        return
    what = "a prompt" if longest_prompt > positions else "a prompt with its answer"
    length = longest_prompt if longest_prompt > positions else longest
    yield Finding(
        "positions",
        f"{what} has {length} tokens, the drafter's max_position_embeddings is {positions}",
        "if the drafter was trained on so long texts, max_position_embeddings in its config.json is wrong; if not, "
        "expect low acceptance there",
    )

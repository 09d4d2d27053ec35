"""The target's own answers to a few prompts, with the states that a drafter reads."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..targets import check_target, find_layers, structural_twin, tapped_modules

__all__ = ["RAW_LAST", "Answered", "Recording", "record"]

RAW_LAST = -1  # the last layer, before the final norm


@dataclass(frozen=True)
class Answered:
    """A prompt and the target's answer to it.

    Attributes:
        ids: of both.
        prompt_length: tokens of the prompt.
    """

    ids: list[int]
    prompt_length: int


@dataclass(frozen=True)
class Recording:
    """A sequence, and the outputs of the target's layers over it.

    Attributes:
        ids: ``[length]`` int64.
        prompt_length: tokens of the prompt.
        states: layer -> ``[length, hidden]``; `RAW_LAST` is the last before the final norm.
    """

    ids: Tensor
    prompt_length: int
    states: dict[int, Tensor]


@torch.no_grad()
def record(target: nn.Module, sequences: Sequence[Answered], layers: Collection[int]) -> list[Recording]:
    """Run the target once over each sequence. The model itself is not changed.

    Args:
        target: a causal language model of transformers that the engine supports.
        sequences: prompts with the target's answers.
        layers: whose outputs are kept; the last layer's twice, after the final norm and before it.
    """
    # 1. Hook a twin
    model: Any = structural_twin(check_target(target, spread=False))
    every = find_layers(model)
    modules: dict[int, Any] = dict(zip(layers, tapped_modules(model, tuple(layers)), strict=True))
    if len(every) - 1 in modules:
        modules[RAW_LAST] = every[-1]
    kept: dict[int, Tensor] = {}
    for layer, module in modules.items():
        module.register_forward_hook(functools.partial(_keep, kept, layer))
    # 2. Run it, sequence by sequence: padding would cost memory, and on a CPU more time than it saves
    device, recordings = model.get_input_embeddings().weight.device, []
    for one in sequences:
        ids = torch.tensor(one.ids, dtype=torch.int64, device=device)
        model.get_decoder()(input_ids=ids[None], use_cache=False)
        recordings.append(Recording(ids, one.prompt_length, dict(kept)))
    return recordings


def _keep(kept: dict[int, Tensor], layer: int, _module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
    states = output[0] if isinstance(output, tuple) else output  # [1, length, hidden]
    kept[layer] = states[0]

"""The launches of a fused step at the sizes of Qwen3-8B, as the launchers ask for them: nothing is run.

The launchers are those of the emulation, which keeps a list instead of running the kernels. Weights are memory that
nobody touches.
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from cubins import functions_of
from op_checks import Emulated, OpByOp
from torch import Tensor

from dflash import decoder
from dflash.decoder import DecoderLayer, DecoderStack

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, ROWS = 4096, 12288, 32, 8, 128, 151936, 16


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: str  # its readable name
    grid: int  # blocks
    threads: int  # per block
    shared: int  # bytes of dynamic shared memory per block
    overlaps: bool  # True if it may start before the kernel ahead has ended


def record_step(emulation: ModuleType, context: int) -> list[Launch]:
    """Return the launches of two target layers, of two drafter layers, and of what follows each: head and choice."""
    kernels, own = Emulated(emulation), decoder.ops
    decoder.ops = OpByOp(kernels)
    emulation.record(True)
    try:
        for context_rows in (0, ROWS):  # the target, then the drafter
            hidden, _ = _stack(causal=not context_rows)(_empty(1, ROWS, HIDDEN), *_state(context, context_rows))
            logits = kernels.linear(hidden, _empty(VOCAB, HIDDEN), prefetch=True)
            _choose(kernels, logits)
        recorded = emulation.recorded()
    finally:
        emulation.record(False)
        decoder.ops = own
    names = functions_of(emulation.__file__)
    return [Launch(names[offset], math.prod(grid), *rest) for offset, grid, *rest in recorded]


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _stack(causal: bool) -> DecoderStack:
    norm, head_norm, kv = _empty(HIDDEN), _empty(HEAD_DIM), KV_HEADS * HEAD_DIM
    qkvo = _empty(HEADS * HEAD_DIM, HIDDEN), _empty(kv, HIDDEN), _empty(kv, HIDDEN), _empty(HIDDEN, HEADS * HEAD_DIM)
    mlp = _empty(WIDTH, HIDDEN), _empty(WIDTH, HIDDEN), _empty(HIDDEN, WIDTH)
    layer = DecoderLayer(norm, *qkvo, norm, *mlp, q_norm=head_norm, k_norm=head_norm, causal=causal)
    return DecoderStack([layer, layer], norm, eps=1e-6, scale=HEAD_DIM**-0.5, taps=(0,))


def _state(context: int, context_rows: int) -> tuple:
    capacity = context + 64
    buffers, table = [_empty(1, KV_HEADS, capacity, HEAD_DIM)] * 2, torch.zeros(capacity, HEAD_DIM // 2)
    cache = SimpleNamespace(keys=buffers, values=buffers, rotary=(table, table), capacity=capacity, origin=None)
    lengths = torch.tensor([context])
    if not context_rows:
        return lengths, cache
    return lengths, cache, _empty(1, context_rows, HIDDEN), torch.tensor([context_rows])


def _choose(kernels: Emulated, logits: Tensor) -> None:
    one = torch.ones(1)
    kernels.select_tokens(
        logits, torch.arange(ROWS)[None], torch.tensor([1]), one * 0, torch.tensor([0]), one, one * 0, one
    )

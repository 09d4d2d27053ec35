"""Estimate a run's time, memory and disk space: ``dflash train --dry-run``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from .metrics import StepTotals, peak_memory

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["estimate"]


def estimate(trainer: Trainer, measured: int) -> dict[str, Any]:
    """Time ``measured`` steps (at least 2), restore the trainer, and return the plan. See `Trainer.plan`.

    The first step warms up and is not counted.
    """
    # 1. Time steps on the first batches
    steps = trainer.batches.epoch(0)
    step_tokens = sum(trainer.batches.tokens(group) for group in steps) / len(steps)
    seconds_per_step, tokens_per_second = _time_steps(trainer, max(2, measured))
    # 2. Extrapolate to the full run
    count = sum(p.numel() for p in trainer.drafter.parameters())
    tokens = step_tokens * trainer.steps
    return {
        "target_parameters": sum(p.numel() for p in trainer.target.parameters()),
        "draft_parameters": count,
        "device": str(trainer.device),
        "processes": trainer.accelerator.num_processes,
        "rows": len(trainer.index),
        "row_tokens": int(trainer.batches.lengths.sum()),
        "heldout_prompts": len(trainer.prompts),
        "heldout_rows": trainer.dropped,
        "steps": trainer.steps,
        "epochs": trainer.steps / len(steps),
        "tokens_per_step": round(step_tokens),
        "tokens": round(tokens),
        "measured_steps": max(2, measured) - 1,
        "seconds_per_step": seconds_per_step,
        "tokens_per_second": tokens_per_second,
        "hours": tokens / tokens_per_second / 3600,
        "memory_bytes": peak_memory(trainer.device),
        "draft_bytes": 2 * count,
        # Weights and moments in float32; Muon has one moment, AdamW two.
        "checkpoint_bytes": (8 if trainer.config.optimizer == "muon" else 12) * count,
        "checkpoints": trainer.config.keep,
    }


def _time_steps(trainer: Trainer, count: int) -> tuple[float, float]:
    """Return seconds per step and tokens per second. The trainer is restored afterwards."""
    # 1. Run the steps
    steps = trainer.batches.epoch(0)
    weights = [p.detach().to("cpu", copy=True) for p in trainer.drafter.parameters()]
    totals, stamps = StepTotals(trainer.drafter.config.block_size), []
    for number in range(count):
        trainer.place = number % len(steps)
        trainer.run_step(steps[trainer.place], totals, False)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        stamps.append((time.monotonic(), trainer.tokens))
    # 2. Put counters, optimizers and weights back
    trainer.step = trainer.place = trainer.tokens = 0
    for optimizer in trainer.optimizers:
        optimizer.state.clear()
    with torch.no_grad():
        for parameter, weight in zip(trainer.drafter.parameters(), weights, strict=True):
            parameter.copy_(weight)
    (began, before), (ended, after) = stamps[0], stamps[-1]
    return (ended - began) / (count - 1), (after - before) / (ended - began)

"""How a drafter is trained: :class:`TrainConfig`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TrainConfig"]


@dataclass(frozen=True)
class TrainConfig:
    """How to train. What is not here is in the drafter's config.

    Attributes:
        epochs: passes over the data; ``steps`` instead, where given.
        batch_tokens: tokens of a micro-batch, padding counted.
        accumulate: micro-batches a process adds up before a step.
        anchors: blocks a sequence at most.
        gamma: decay of the slots' weights; None for the published one of the block size.
        optimizer: "adamw", or "muon" (Jordan et al., 2024) for matrices and AdamW for the rest.
        learning_rate, weight_decay, clip: of the optimizer, and the norm that gradients are clipped to. Muon's updates
            are scaled to the size of AdamW's, so one rate does for both.
        warmup, constant: shares of the run: a rise from 0 and the rate held, before a cosine to 0.
        distill: share of the distance to the target's distribution in the loss.
        feature_noise: uniform noise on the features, relative to their size.
        seed: of anchors, noise, order and held-out rows.
        mixed_precision: "bf16" or "no".
        log_every, eval_every, save_every: steps between them; 0, of the last two, for only at the end.
        eval_rows, eval_tokens, eval_temperatures: held-out prompts at most, new tokens each, and how they are decoded.
        keep: checkpoints.
    """

    epochs: int = 6
    steps: int | None = None
    batch_tokens: int = 4096
    accumulate: int = 1
    anchors: int = 512
    gamma: float | None = None
    optimizer: str = "adamw"
    learning_rate: float = 6e-4
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup: float = 0.04
    constant: float = 1 / 3
    distill: float = 0.0
    feature_noise: float = 0.05
    seed: int = 0
    mixed_precision: str = "bf16"
    log_every: int = 10
    eval_every: int = 500
    save_every: int = 500
    eval_rows: int = 32
    eval_tokens: int = 128
    eval_temperatures: tuple[float, ...] = (0.0,)
    keep: int = 3

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, wanted: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

        for name in ("epochs", "batch_tokens", "accumulate", "anchors", "keep", "log_every"):
            check(name, getattr(self, name) >= 1, "at least 1")
        check("eval_tokens", self.eval_tokens >= 2, "at least 2")
        for name in ("eval_every", "save_every", "eval_rows", "weight_decay", "feature_noise"):
            check(name, getattr(self, name) >= 0, "at least 0")
        for name in ("learning_rate", "clip"):
            check(name, getattr(self, name) > 0, "above 0")
        for name in ("warmup", "constant", "distill"):
            check(name, 0 <= getattr(self, name) <= 1, "in 0 .. 1")
        check("steps", self.steps is None or self.steps >= 1, "at least 1")
        check("gamma", self.gamma is None or self.gamma > 0, "above 0")
        check("optimizer", self.optimizer in ("adamw", "muon"), '"adamw" or "muon"')
        check("mixed_precision", self.mixed_precision in ("no", "bf16"), '"no" or "bf16"')

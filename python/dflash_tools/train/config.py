"""Training settings: `TrainConfig`. Its fields are the options of ``dflash train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. A field's description is its help text on the command line.

    ``optimizer="muon"`` (Jordan et al., 2024) scales its updates to AdamW's, so the same learning rate suits both.
    """

    epochs: Annotated[int, "Passes over the data."] = 6
    steps: Annotated[int | None, "Training steps; replaces epochs."] = None
    batch_tokens: Annotated[int, "Tokens per micro-batch, padding included."] = 4096
    accumulate: Annotated[int, "Micro-batches per process and step."] = 1
    anchors: Annotated[int | None, "Blocks per row, at most; default: one per 8 tokens to learn, up to 512."] = None
    gamma: Annotated[float | None, "Decay of the slot weights within a block; default: set by the block size."] = None
    slot_weights: Annotated[str, "Weights within a block: decay, or dpace, which follow the drafter's progress."] = (
        "decay"
    )
    optimizer: Annotated[str, "adamw, or muon for matrices and AdamW for the rest."] = "adamw"
    learning_rate: Annotated[float, "Peak learning rate."] = 6e-4
    weight_decay: Annotated[float, "Weight decay of the matrices."] = 0.0
    clip: Annotated[float, "Gradient norm limit."] = 1.0
    warmup: Annotated[float, "Fraction of the run that warms up the learning rate."] = 0.04
    constant: Annotated[float, "Fraction of the run after which the learning rate decays."] = 1 / 3
    selector_weight: Annotated[float, "Weight of the selector's loss (DFlash 2)."] = 1.0
    feature_noise: Annotated[float, "Uniform noise on the features, relative to their size."] = 0.05
    seed: Annotated[int, "The same seed trains the same drafter."] = 0
    mixed_precision: Annotated[str, "bf16 or no."] = "bf16"
    log_every: Annotated[int, "Steps between lines of metrics."] = 10
    eval_every: Annotated[int, "Steps between evaluations; 0: only at the end."] = 500
    save_every: Annotated[int, "Steps between checkpoints; 0: only at the end."] = 500
    eval_rows: Annotated[int, "Held-out prompts to answer."] = 32
    eval_tokens: Annotated[int, "New tokens per held-out prompt."] = 128
    eval_temperatures: Annotated[tuple[float, ...], "Temperatures of the held-out answers, as in 0,1."] = (0.0,)
    keep: Annotated[int, "Checkpoints to keep."] = 3

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, wanted: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

        least = dict.fromkeys(("epochs", "steps", "batch_tokens", "accumulate", "anchors", "keep", "log_every"), 1)
        least |= dict.fromkeys(("eval_every", "save_every", "eval_rows", "weight_decay", "feature_noise"), 0)
        for name, low in (least | {"selector_weight": 0, "eval_tokens": 2}).items():
            check(name, (value := getattr(self, name)) is None or value >= low, f"at least {low}")
        for name in ("learning_rate", "clip", "gamma"):
            check(name, (value := getattr(self, name)) is None or value > 0, "above 0")
        for name in ("warmup", "constant"):
            check(name, 0 <= getattr(self, name) <= 1, "in 0 .. 1")
        choices = ("slot_weights", "decay", "dpace"), ("optimizer", "adamw", "muon"), ("mixed_precision", "no", "bf16")
        for name, *allowed in choices:
            check(name, getattr(self, name) in allowed, '"{}" or "{}"'.format(*allowed))
        check("gamma", self.gamma is None or self.slot_weights == "decay", "left out with slot_weights dpace")

"""Plot the pair's training curves from its metrics files."""

from __future__ import annotations

import json
from pathlib import Path


def plot(folder: Path, out: Path) -> None:
    """Plot ``folder/target/metrics.jsonl`` and ``folder/draft/metrics.jsonl`` to the PNG file ``out``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def read(name: str) -> list[dict]:
        return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]

    target, draft = read("target"), read("draft")
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for kind in target[0]["loss"]:
        left.plot([row["step"] for row in target], [row["loss"][kind] for row in target], label=kind)
    left.legend()
    left.set(title="target", xlabel="step", ylabel="cross-entropy of answers", yscale="log")
    steps = [row for row in draft if "loss" in row]
    middle.plot([row["step"] for row in steps], [row["loss"] for row in steps])
    middle.set(title="drafter", xlabel="step", ylabel="weighted cross-entropy")
    for key, label in (("acceptance_length", "T = 0"), ("acceptance_length_t1", "T = 1")):
        found = [row for row in draft if row.get(key) is not None]
        right.plot([row["step"] for row in found], [row[key] for row in found], marker=".", label=label)
    right.set(title="drafter on held-out answers", xlabel="step", ylabel="acceptance length", ylim=(1, 16))
    right.legend()
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)

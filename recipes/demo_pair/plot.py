"""Plot the pair's training curves from its metrics files."""

from __future__ import annotations

import json
from pathlib import Path

from dflash.loading import FIRST_GENERATION

_DRAFTERS = {"draft": "DFlash 2", FIRST_GENERATION: "DFlash"}


def plot(folder: Path, out: Path) -> None:
    """Plot ``metrics.jsonl`` of the target and of both drafters in ``folder`` to the PNG file ``out``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def read(name: str) -> list[dict]:
        return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]

    target = read("target")
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for kind in target[0]["loss"]:
        left.plot([row["step"] for row in target], [row["loss"][kind] for row in target], label=kind)
    left.legend()
    left.set(title="target", xlabel="step", ylabel="cross-entropy of answers", yscale="log")
    for name, kind in _DRAFTERS.items():
        rows = read(name)
        steps = [row for row in rows if "loss" in row]
        middle.plot([row["step"] for row in steps], [row["cross_entropy"] for row in steps], label=kind)
        for key, temperature, style in (("acceptance_length", 0, "-"), ("acceptance_length_t1", 1, "--")):
            found = [row for row in rows if row.get(key) is not None]
            line = {"marker": ".", "linestyle": style, "color": middle.lines[-1].get_color()}
            line["label"] = f"{kind}, T = {temperature}"
            right.plot([row["step"] for row in found], [row[key] for row in found], **line)
    middle.legend()
    middle.set(title="drafters", xlabel="step", ylabel="weighted cross-entropy", yscale="log")
    right.set(title="drafters on held-out answers", xlabel="step", ylabel="acceptance length", ylim=(1, 16))
    right.legend()
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)

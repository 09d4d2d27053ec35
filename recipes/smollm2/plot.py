"""Plot how the drafter learned, and what it reaches by category: ``python recipes/smollm2/plot.py FOLDER OUT.png``."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

SMOOTHED = 10  # lines of metrics


def main(folder: Path, out: Path) -> None:
    """Plot ``drafter/metrics.jsonl`` and ``evaluation.json`` of a run of the recipe."""
    rows = [json.loads(line) for line in (folder / "drafter" / "metrics.jsonl").read_text().splitlines()]
    files = json.loads((folder / "evaluation.json").read_text())["files"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained", width_ratios=(2, 3))
    # 1. By tokens seen
    steps = [row for row in rows if row.get("train_acceptance") is not None]
    groups = [steps[start : start + SMOOTHED] for start in range(0, len(steps), SMOOTHED)]
    means = [sum(row["train_acceptance"] for row in group) / len(group) for group in groups]
    left.plot([group[-1]["tokens"] / 1e6 for group in groups], means, label="training")
    for key, name in (("acceptance_length", "held out, T = 0"), ("acceptance_length_t0.7", "held out, T = 0.7")):
        found = [row for row in rows if row.get(key) is not None]
        if found:
            left.plot([row["tokens"] / 1e6 for row in found], [row[key] for row in found], marker=".", label=name)
    left.set(title="training", xlabel="million tokens seen", ylabel="tokens per step")
    left.legend()
    # 2. By category
    bars = {f"{Path(file).stem}: {kind}": found for file, kinds in files.items() for kind, found in kinds.items()}
    series = [("T = 0", "T=0", "tokens_per_step"), ("T = 0.7", "T=0.7", "tokens_per_step")]
    series += [("prompt lookup on the answers at T = 0", "T=0", "prompt_lookup")]
    for number, (label, way, key) in enumerate(series):
        places = [place + 0.27 * (number - 1) for place in range(len(bars))]
        right.bar(places, [found[way][key] for found in bars.values()], 0.25, label=label)
    right.set_xticks(range(len(bars)), bars, rotation=40, ha="right")
    right.set(title="held-out prompts", ylabel="tokens per step")
    right.set_ylim(1, 1.3 * right.get_ylim()[1])  # the legend is above the bars
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="y")
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

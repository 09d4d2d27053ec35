"""Plot what drafters have learned: ``python recipes/smollm2/plot_learning.py OUT.png SERVER.log NAME=FOLDER ...``.

The log is that of a server that swapped its drafter; each folder is one of ``dflash learn``, named in the legend.
"""

import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

SMOOTHED = 40  # answers


def main(out: Path, log: Path, folders: dict[str, Path]) -> None:
    """Plot the running mean of a server's answers, and the gains that the replay found."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained", width_ratios=(3, 2))
    # 1. A server's answers, one after another, and where its drafter was swapped.
    pace: list[float] = []
    for line in log.read_text().splitlines():
        if found := re.search(r"([\d.]+) tokens per step: (stop|length)", line):
            pace.append(float(found[1]))
        elif "is served now" in line:
            left.axvline(len(pace), color="black", linestyle=":")
            left.text(len(pace), 1, " another drafter", rotation=90, va="bottom", ha="right")
    means = [sum(pace[i - SMOOTHED : i]) / SMOOTHED for i in range(SMOOTHED, len(pace) + 1)]
    left.plot(range(SMOOTHED, len(pace) + 1), means)
    left.set(title=f"served answers, mean of {SMOOTHED}", xlabel="answer", ylabel="tokens per step", ylim=(1, None))
    # 2. What the replay found.
    for number, (name, folder) in enumerate(folders.items()):
        report = json.loads((folder / "reports.jsonl").read_text().splitlines()[-1])
        gains = [report[kind] for kind in ("own", "general")]
        heights = [100 * found["gain"] for found in gains]
        errors = [[100 * abs(found[end] - found["gain"]) for found in gains] for end in ("low", "high")]
        word = "adopted" if report["adopted"] else "not adopted"
        places = [place + 0.8 / len(folders) * number for place in (0, 1)]
        right.bar(places, heights, 0.75 / len(folders), yerr=errors, capsize=4, label=f"{name}: {word}")
    right.axhline(0, color="black", linewidth=0.8)
    right.set_xticks([0.4 - 0.4 / len(folders), 1.4 - 0.4 / len(folders)], ["newest own answers", "general answers"])
    right.set(title="replayed, 95 % intervals", ylabel="tokens per step, % more")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="y")
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    pairs = [argument.partition("=") for argument in sys.argv[3:]]
    main(Path(sys.argv[1]), Path(sys.argv[2]), {name: Path(folder) for name, _, folder in pairs})

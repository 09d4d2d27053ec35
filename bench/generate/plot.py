"""The plot of a table."""

from pathlib import Path

from .runners import ONE_TOKEN


def plot(path: Path, rows: list[dict], about: dict) -> None:
    """Draw a bar per runner, tokens per second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.45 * len(rows) + 1.3), layout="constrained")
    axes = figure.add_subplot()
    speeds = [row["tokens_per_second"] for row in rows]
    is_ours = [row["runner"].startswith(("dflash", ONE_TOKEN)) for row in rows]
    colors = ["tab:blue" if ours else "0.6" for ours in is_ours]
    bars = axes.barh([row["runner"] for row in rows], speeds, color=colors)
    labels = [
        f"{row['tokens_per_second']:.0f}  ({row['speedup']:.1f}x, acceptance {row['acceptance_length']:.1f})"
        for row in rows
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.set_xlim(0, 1.45 * max(speeds))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens per second, batch 1, median over prompts")
    axes.set_title(
        f"{about['machine']['processor']}, {about['threads']} threads, {about['isa']}, {about['dtype']}, "
        f"T = {about['temperature']:g}, {about['prompts']} prompts",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)

"""Reports of demo and benchmark, as text and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..generator import Generator
from ..streaming import TextDecoder

if TYPE_CHECKING:
    from rich.console import Console

    from .demo import Report

ACCEPTED, BONUS = "green", "bold underline yellow"  # without colours the bonus tokens still stand out
_BAR = 40


def print_answer(
    console: Console, tokenizer: Any, text: str, ids: Tensor, generator: Generator, arguments: dict[str, Any]
) -> None:
    """Stream one answer, each step's accepted drafts in one colour and its bonus token in another."""
    console.out()
    console.out(text, style="dim", end="" if text.endswith("\n") else "\n", highlight=False)
    decoder = TextDecoder(tokenizer, skip_special_tokens=True)
    event = None
    for event in generator.stream(ids, **arguments):
        new, accepted = event.ids[0], event.accepted[0]
        console.out(decoder.push(new[:accepted]), style=ACCEPTED, end="", highlight=False)
        console.out(decoder.push(new[accepted:]), style=BONUS, end="", highlight=False)
    console.out(decoder.finish(), style=BONUS, highlight=False)
    statistics = event.statistics
    count, steps = statistics.num_new_tokens[0], len(statistics.acceptance_lengths[0])
    console.out(f"({count} tokens: 1 from the prompt, {count - 1} in {steps} steps)", style="dim", highlight=False)


def print_demo(console: Console, report: Report, models: str) -> None:
    from rich.table import Table

    console.out()
    acceptance = "-" if report.acceptance_length is None else f"{report.acceptance_length:.2f}"
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("tokens/s", "speedup", "acceptance length"):
        table.add_column(name, justify="right")
    for name, speed, length in (
        ("transformers generate", report.transformers_tokens_per_second, "1.00"),
        ("one-token decoding", report.one_token_tokens_per_second, "1.00"),
        ("DFlash", report.tokens_per_second, acceptance),
    ):
        style = "bold" if name == "DFlash" else None
        table.add_row(name, f"{speed:.0f}", f"{speed / report.baseline_tokens_per_second:.2f}x", length, style=style)
    console.print(table)
    count = "1 prompt" if report.prompts == 1 else f"{report.prompts} prompts"
    lines = (
        f"{models}, {torch.get_num_threads()} threads, T = {report.temperature:g}",
        f"{count}, {report.new_tokens} tokens; the prompts' own forward passes are counted too",
    )
    for line in lines:
        console.out(line, style="dim", highlight=False)
    console.out("\ntokens a step", highlight=False)
    block = "█" if (console.encoding or "").lower().startswith("utf") else "#"
    most = max([*report.histogram, 1])
    for length, count in enumerate(report.histogram[1:], 1):
        console.out(f"{length:3} ", end="", highlight=False)
        console.out(block * -(-_BAR * count // most), style=ACCEPTED, end="", highlight=False)
        console.out(f" {count}" if count else "", highlight=False)
    with_what = "one-token decoding, same seed"
    if report.temperature == 0:
        with_what += ", and transformers generate"
    console.out(
        f"\nidentical output: {'yes' if report.identical else 'NO'} ({with_what})", style="bold", highlight=False
    )
    if report.answerable:
        console.out(f"right answers: {report.right} of {report.answerable}", highlight=False)


def print_benchmark(report: dict[str, Any], console: Console) -> None:
    """Print a report of :func:`benchmark` as text, 80 columns wide for up to four datasets."""
    from rich.table import Table

    header, datasets = report["header"], report["datasets"]

    def say(line: str) -> None:
        console.out(line, highlight=False)

    say(
        f"{header['machine']}, {header['threads']} threads, {header['isa']}, {header['dtype']}, "
        f"target of {header['target_parameters'] / 1e6:.1f} M parameters, torch {header['torch']}, "
        f"T = {header['temperature']:g}, block {header['block_size']}"
    )
    columns = ("tokens", "tokens/s", "one-token", "speedup", "accepted", "identical", "distinct")
    table = Table("", *columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, found in datasets.items():
        length, distinct = found["acceptance_length"], found["distinct_ngrams"]
        table.add_row(
            name,
            str(found["new_tokens"]),
            f"{found['tokens_per_second']:.1f}",
            f"{found['one_token_tokens_per_second']:.1f}",
            f"{found['speedup']:.2f}x",
            "-" if length is None else f"{length:.2f}",
            f"{found['identical']}/{found['turns']}",
            "-" if distinct is None else f"{distinct:.0%}",
        )
    console.print(table)
    say("accepted: tokens a step, bonus token counted; distinct: 8-grams that were new in their answer\n")
    if header["block_size"] > 1:
        say("share of steps that kept each drafted token (of those that kept the one before)")
        table = Table("", *datasets, box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        for position in range(header["block_size"] - 1):
            row = []
            for found in datasets.values():
                kept, given = found["acceptance_per_position"][position], found["conditional_acceptance"][position]
                row.append(f"{kept:4.0%} {'' if given is None else f'({given:.0%})':>6}")
            table.add_row(str(position + 1), *row)
        console.print(table)
    for name, found in datasets.items():
        say(f"{name}: steps of 1 .. {header['block_size']} tokens: {' '.join(map(str, found['histogram'][1:]))}")
    for name, found in datasets.items():
        if found["skipped"]:
            say(f"{name}: {found['skipped']} turns left out, longer than the model's positions")


# ---------------------------------------------------------------------------------------------- plotting


def check_plot(path: str | Path) -> None:
    """Raise ``ValueError`` now if :func:`plot` could not write ``path`` later."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot writes a .png, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot: there is no folder {str(path.parent)!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install '.[bench]'") from error


def plot(report: dict[str, Any], path: str | Path) -> None:
    """Draw a report of :func:`benchmark` as a PNG: speeds, acceptance by position, tokens a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    speed, position, steps = figure.subplots(1, 3)
    datasets, header = report["datasets"], report["header"]
    width = 0.8 / len(datasets)
    for index, (name, found) in enumerate(datasets.items()):
        pair = (found["one_token_tokens_per_second"], found["tokens_per_second"])
        speed.bar([index - 0.2, index + 0.2], pair, 0.38, color=["0.7", f"C{index}"])
        speed.annotate(f"{found['speedup']:.2f}x", (index + 0.2, pair[1]), ha="center", va="bottom")
        kept = found["acceptance_per_position"]
        mean = found["acceptance_length"]
        label = name if mean is None else f"{name}, {mean:.2f} tokens a step"
        position.plot(range(1, len(kept) + 1), kept, marker="o", label=label)
        counts = found["histogram"][1:]
        shares = [count / max(sum(counts), 1) for count in counts]
        places = [length + (index - (len(datasets) - 1) / 2) * width for length in range(1, len(shares) + 1)]
        steps.bar(places, shares, width)
    speed.set(
        xticks=range(len(datasets)), xticklabels=datasets, ylabel="tokens/s", title="one-token decoding (grey), DFlash"
    )
    rows = range(1, header["block_size"] + 1)
    position.set(
        xticks=rows[:-1],
        xlabel="drafted token",
        ylabel="share of steps that kept it",
        ylim=(0, 1.02),
        title="acceptance",
    )
    position.legend()
    steps.set(xticks=rows, xlabel="tokens a step", ylabel="share of steps", title="steps")
    figure.suptitle(
        f"{header.get('model', 'target')}, {header['machine']}, {header['dtype']}, T = {header['temperature']:g}"
    )
    figure.savefig(path, dpi=120, format="png")

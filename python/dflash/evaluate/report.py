"""Reports of demo and benchmark: as text, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..outputs import StreamEvent
from ..streaming import TextDecoder
from ..terminal import printable
from . import trees

if TYPE_CHECKING:
    from rich.console import Console

ACCEPTED, BONUS = "green", "bold underline yellow"  # bonus tokens stand out without colors too
_TREE_STYLES = {trees.ACCEPTED: f"bold {ACCEPTED}", trees.BONUS: BONUS, trees.DRAFT: "default", trees.EDGE: "dim"}
_ASCII = str.maketrans("─┬├└│━┯┝┕·", "-+|`|=+|`_")
_BAR = 40
_STORED = {"weights": "target", "draft_weights": "drafter"}


def _print_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], bold: str = "") -> None:
    """Print a table whose first column is on the left; rows that begin with ``bold`` stand out."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(*(escape(printable(column)) for column in columns), box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        style = "bold" if bold and row[0].startswith(bold) else None
        table.add_row(*(escape(printable(cell)) for cell in row), style=style)
    console.print(table)


def _fixed(number: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if number is None else f"{number:.{digits}f}{unit}"


# ---------------------------------------------------------------------------------------------- demo


def print_legend(console: Console) -> None:
    """Print on a terminal what the two colors of an answer mean."""
    if console.is_terminal:
        console.out("accepted drafts", style=ACCEPTED, end=", ", highlight=False)
        console.out("the target's own tokens", style=BONUS, highlight=False)


def print_answer(console: Console, tokenizer: Any, prompt: str, events: Iterator[StreamEvent]) -> None:
    """Print one answer as it is written: each step's accepted drafts in one color, its bonus token in another."""

    def say(text: str, style: str, end: str = "") -> None:
        text = printable(text, keep="\n\t") if console.is_terminal else text
        console.out(text, style=style, end=end, highlight=False)

    console.out()
    say(prompt, "dim", "" if prompt.endswith("\n") else "\n")
    decoder = TextDecoder(tokenizer, skip_special_tokens=True)
    event = None
    for event in events:
        new, accepted = event.ids[0], event.accepted[0]
        say(decoder.push(new[:accepted]), ACCEPTED)
        say(decoder.push(new[accepted:]), BONUS)
    say(decoder.finish(), BONUS, "\n")
    statistics = event.statistics
    count, steps = statistics.num_new_tokens[0], len(statistics.acceptance_lengths[0])
    console.out(f"({count} tokens: 1 from the prompt, {count - 1} in {steps} steps)", style="dim", highlight=False)


def print_tree(console: Console, tokenizer: Any, step: trees.TreeStep) -> None:
    """Draw one step's tree: the accepted path in one color, the bonus token in another, other drafts without."""
    from rich.text import Text

    rows, kept, encoding = len(step.ids), len(step.path) - 1, (console.encoding or "ascii").lower()

    def shown(text: str) -> str:
        if encoding.startswith("utf"):
            return text
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)

    console.out(f"\none step: a tree of {rows} rows, {kept} drafts accepted", style="dim", highlight=False)
    for line in trees.draw(step, lambda token: tokenizer.decode([token])):
        pieces = [(shown(text), _TREE_STYLES[kind]) for text, kind in line]
        wide = not console.is_terminal  # a file has lines of any length
        console.print(Text.assemble(*pieces), no_wrap=True, overflow="ellipsis", crop=not wide, soft_wrap=wide)


def print_demo(console: Console, report: dict[str, Any], models: str) -> None:
    """Print a report of `dflash.evaluate.demo.measure`; ``models`` describes the pair."""
    console.out()
    _print_speeds(console, report)
    count = "1 prompt" if report["available"] == 1 else f"{report['prompts']} of {report['available']} prompts"
    lines = (
        f"{models}, {torch.get_num_threads()} threads, T = {report['temperature']:g}",
        f"{count}, {report['new_tokens']} tokens; the prompts' own forward passes are counted too",
    )
    for line in lines:
        console.out(line, style="dim", highlight=False)
    _print_histogram(console, report["histogram"])
    compared = "one-token decoding, same seed"
    if report["temperature"] == 0:
        compared += ", and transformers generate"
    verdict = "yes" if report["identical"] else "NO"
    console.out(f"\nidentical output: {verdict} ({compared})", style="bold", highlight=False)
    if report["answerable"]:
        console.out(f"right answers: {report['right']} of {report['answerable']}", highlight=False)


def _print_speeds(console: Console, report: dict[str, Any]) -> None:
    rows = [
        ("transformers generate", report["transformers_tokens_per_second"], 1.0),
        ("one-token decoding", report["one_token_tokens_per_second"], 1.0),
        ("DFlash", report["tokens_per_second"], report["acceptance_length"]),
    ]
    if report["tree"] is not None:
        rows.append(
            (f"DFlash, tree={report['tree']}", report["tree_tokens_per_second"], report["tree_acceptance_length"])
        )
    baseline = report["baseline_tokens_per_second"]
    cells = [(name, f"{speed:.0f}", f"{speed / baseline:.2f}x", _fixed(length)) for name, speed, length in rows]
    _print_table(console, ("", "tokens/s", "speedup", "acceptance length"), cells, bold="DFlash")


def _print_histogram(console: Console, histogram: list[int]) -> None:
    console.out("\ntokens per step", highlight=False)
    block = "█" if (console.encoding or "").lower().startswith("utf") else "#"
    most = max([*histogram, 1])
    for length, count in enumerate(histogram[1:], 1):
        console.out(f"{length:3} ", end="", highlight=False)
        console.out(block * -(-_BAR * count // most), style=ACCEPTED, end="", highlight=False)
        console.out(f" {count}" if count else "", highlight=False)


# ---------------------------------------------------------------------------------------------- benchmark


def print_benchmark(report: dict[str, Any], console: Console) -> None:
    """Print a report of `dflash.evaluate.benchmark.run_benchmark`, 80 columns wide for up to four datasets."""
    header, datasets = report["header"], report["datasets"]

    def say(line: str) -> None:
        console.out(printable(line, keep="\n"), highlight=False)

    say(
        f"{header['machine']}, {header['threads']} threads, {header['isa']}, {header['dtype']}, "
        f"target of {header['target_parameters'] / 1e6:.1f} M parameters, torch {header['torch']}, "
        f"T = {header['temperature']:g}, block {header['block_size']}{', auto' if header['auto_width'] else ''}"
        + "".join(f", {header[key]} {name}" for key, name in _STORED.items() if header[key] is not None)
    )
    _print_datasets(console, datasets)
    if header["tree"] is not None:
        _print_trees(console, datasets, header["tree"])
    say("accepted: tokens per step, bonus token counted; distinct: 8-grams that were new in their answer\n")
    for name, found in datasets.items():
        _print_by_context(console, name, found["by_context"])
        if header["tree"] is not None:
            _print_by_context(console, f"{name}, tree={header['tree']}", found["tree"]["by_context"])
    if header["block_size"] > 1:
        say("share of steps that kept each drafted token (of those that kept the one before)")
        _print_positions(console, datasets, header["block_size"])
    for name, found in datasets.items():
        say(f"{name}: steps of 1 .. {header['block_size']} tokens: {' '.join(map(str, found['histogram'][1:]))}")
    for name, found in datasets.items():
        if found["skipped"]:
            say(f"{name}: {found['skipped']} turns left out, longer than the model's positions")


def _print_datasets(console: Console, datasets: Mapping[str, dict[str, Any]]) -> None:
    columns = ("", "tokens", "tokens/s", "one-token", "speedup", "accepted", "identical", "distinct")
    rows = []
    for name, found in datasets.items():
        distinct = found["distinct_ngrams"]
        rows.append(
            (
                name,
                str(found["new_tokens"]),
                _fixed(found["tokens_per_second"], 1),
                _fixed(found["one_token_tokens_per_second"], 1),
                _fixed(found["speedup"], unit="x"),
                _fixed(found["acceptance_length"]),
                f"{found['identical']}/{found['turns']}",
                "-" if distinct is None else f"{distinct:.0%}",
            )
        )
    _print_table(console, columns, rows)


def _print_trees(console: Console, datasets: Mapping[str, dict[str, Any]], tree: int | str) -> None:
    columns = (f"tree={tree}", "tokens/s", "speedup", "over chains", "accepted", "over chains", "identical")
    rows = []
    for name, chain in datasets.items():
        found = chain["tree"]
        length, before = found["acceptance_length"], chain["acceptance_length"]
        rows.append(
            (
                name,
                _fixed(found["tokens_per_second"], 1),
                _fixed(found["speedup"], unit="x"),
                _fixed(found["tokens_per_second"] / chain["tokens_per_second"], unit="x"),
                _fixed(length),
                _fixed(None if length is None or before is None else length / before, unit="x"),
                f"{found['identical']}/{chain['turns']}",
            )
        )
    _print_table(console, columns, rows)


def _print_by_context(console: Console, name: str, buckets: Sequence[dict[str, Any]]) -> None:
    columns = (f"{name}, context from", "steps", "accepted", "rows", "ms/step", "one-token", "speedup")
    rows = []
    for found in buckets:
        theirs = found["one_token_step_seconds"]
        numbers = (found["acceptance_length"], found["rows"], 1000 * found["step_seconds"])
        rows.append(
            (
                str(found["from"]),
                str(found["steps"]),
                *(_fixed(number, digits) for number, digits in zip(numbers, (2, 1, 2), strict=True)),
                _fixed(None if theirs is None else 1000 * theirs),
                _fixed(found["speedup"], unit="x"),
            )
        )
    if buckets:
        _print_table(console, columns, rows)
        console.out()


def _print_positions(console: Console, datasets: Mapping[str, dict[str, Any]], block_size: int) -> None:
    rows = []
    for position in range(block_size - 1):
        row = [str(position + 1)]
        for found in datasets.values():
            share, given = found["acceptance_per_position"][position], found["conditional_acceptance"][position]
            row.append(f"{share:4.0%} {'' if given is None else f'({given:.0%})':>6}")
        rows.append(row)
    _print_table(console, ("", *datasets), rows)


# ---------------------------------------------------------------------------------------------- picture


def check_plot(path: str | Path) -> None:
    """Raise ``ValueError`` now if `plot` could not write ``path`` later."""
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
    """Draw a report of `dflash.evaluate.benchmark.run_benchmark`: speeds, acceptance by position, steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    speed, position, steps = figure.subplots(1, 3)
    header, datasets = report["header"], report["datasets"]
    rows = range(1, header["block_size"] + 1)
    _plot_speeds(speed, datasets)
    _plot_positions(position, datasets, rows)
    _plot_steps(steps, datasets, rows)
    figure.suptitle(
        f"{header.get('model', 'target')}, {header['machine']}, {header['dtype']}, T = {header['temperature']:g}"
    )
    figure.savefig(path, dpi=120, format="png")


def _plot_speeds(axes: Any, datasets: Mapping[str, dict[str, Any]]) -> None:
    for index, found in enumerate(datasets.values()):
        drafted = [found] if found["tree"] is None else [found, found["tree"]]
        speeds = [found["one_token_tokens_per_second"], *(one["tokens_per_second"] for one in drafted)]
        width = 0.8 / len(speeds)
        places = [index + (bar - (len(speeds) - 1) / 2) * width for bar in range(len(speeds))]
        axes.bar(places, speeds, 0.95 * width, color=["0.7", f"C{index}", f"C{index}"])
        for place, speed, one in zip(places[1:], speeds[1:], drafted, strict=True):
            axes.annotate(f"{one['speedup']:.2f}x", (place, speed), ha="center", va="bottom")
    title = "one-token decoding (gray), DFlash" + (", trees" if any(one["tree"] for one in datasets.values()) else "")
    axes.set(xticks=range(len(datasets)), xticklabels=datasets, ylabel="tokens/s", title=title)


def _plot_positions(axes: Any, datasets: Mapping[str, dict[str, Any]], rows: range) -> None:
    for name, found in datasets.items():
        shares, mean = found["acceptance_per_position"], found["acceptance_length"]
        label = name if mean is None else f"{name}, {mean:.2f} tokens per step"
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    axes.set(xticks=rows[:-1], xlabel="drafted token", ylabel="share of steps that kept it", ylim=(0, 1.02))
    axes.set_title("acceptance")
    axes.legend()


def _plot_steps(axes: Any, datasets: Mapping[str, dict[str, Any]], rows: range) -> None:
    width = 0.8 / len(datasets)
    for index, found in enumerate(datasets.values()):
        counts = found["histogram"][1:]
        shares = [count / max(sum(counts), 1) for count in counts]
        offset = (index - (len(datasets) - 1) / 2) * width
        axes.bar([length + offset for length in range(1, len(shares) + 1)], shares, width)
    axes.set(xticks=rows, xlabel="tokens per step", ylabel="share of steps", title="steps")

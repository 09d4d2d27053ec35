"""Reports of demo and benchmark: as text, and as a picture."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dflash import StreamEvent
from dflash.internals import TextDecoder
from dflash.light import terminal

from .trees import ACCEPTED, BONUS, TreeStep, draw

_ASCII = str.maketrans("─┬├└│━┯┝┕·", "-+|`|=+|`_")
_BAR = 40
_STORED = {"weights": "target", "draft_weights": "drafter"}
Columns = Sequence[tuple[str, str]]  # a heading, and the format of a result's cell under it


def _print_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], bold: str = "") -> None:
    """Print a table whose first column is on the left; rows that begin with ``bold`` stand out."""
    shown = [[escape(terminal.printable(cell)) for cell in row] for row in (columns, *rows)]
    table = Table(*shown[0], box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in shown[1:]:
        table.add_row(*row, style="bold" if bold and row[0].startswith(bold) else None)
    console.print(table)


def _print_results(
    console: Console, corner: str, columns: Columns, results: Mapping[str, dict[str, Any]], bold: str = ""
) -> None:
    """Print a table with a row per result."""
    rows = [[name, *(_cell(form, found) for _, form in columns)] for name, found in results.items()]
    _print_table(console, [corner, *(heading for heading, _ in columns)], rows, bold)


def _cell(form: str, found: dict[str, Any]) -> str:
    """Return a cell; "-" for a number that is None."""
    try:
        return form.format_map(found)
    except TypeError:  # None takes no format such as .2f
        return "-"


# ---------------------------------------------------------------------------------------------- demo


def print_legend(console: Console) -> None:
    """Print on a terminal what the two colors of an answer mean."""
    if console.is_terminal:
        console.out("accepted drafts", style=ACCEPTED, end=", ", highlight=False)
        console.out("the target's own tokens", style=BONUS, highlight=False)


def print_answer(console: Console, tokenizer: Any, prompt: str, events: Iterator[StreamEvent]) -> None:
    """Print one answer as it is written: each step's accepted drafts in one color, its bonus token in another."""

    def say(text: str, style: str, end: str = "") -> None:
        text = terminal.printable(text, keep="\n\t") if console.is_terminal else text
        console.out(text, style=style, end=end, highlight=False)

    console.out()
    say(prompt, "dim", "" if prompt.endswith("\n") else "\n")
    decoder, event = TextDecoder(tokenizer, skip_special_tokens=True), None
    for event in events:
        new, accepted = event.ids[0], event.accepted[0]
        say(decoder.push(new[:accepted]), ACCEPTED)
        say(decoder.push(new[accepted:]), BONUS)
    say(decoder.finish(), BONUS, "\n")
    count, steps = event.statistics.num_new_tokens[0], len(event.statistics.acceptance_lengths[0])
    console.out(f"({count} tokens: 1 from the prompt, {count - 1} in {steps} steps)", style="dim", highlight=False)


def print_tree(console: Console, tokenizer: Any, step: TreeStep) -> None:
    """Draw one step's tree: the accepted path in one color, the bonus token in another, other drafts without."""
    rows, kept, encoding = len(step.ids), len(step.path) - 1, (console.encoding or "ascii").lower()

    def shown(text: str) -> str:
        if encoding.startswith("utf"):
            return text
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)

    console.out(f"\none step: a tree of {rows} rows, {kept} drafts accepted", style="dim", highlight=False)
    for line in draw(step, lambda token: tokenizer.decode([token])):
        pieces = [(shown(text), f"bold {style}" if style == ACCEPTED else style) for text, style in line]
        wide = not console.is_terminal  # a file has lines of any length
        console.print(Text.assemble(*pieces), no_wrap=True, overflow="ellipsis", crop=not wide, soft_wrap=wide)


_DEMO: Columns = (("tokens/s", "{speed:.0f}"), ("speedup", "{speedup:.2f}x"), ("acceptance length", "{length:.2f}"))


def print_demo(console: Console, report: dict[str, Any], models: str) -> None:
    """Print a report of `dflash_tools.measure.demo.measure`; ``models`` describes the pair."""
    say = functools.partial(console.out, highlight=False)
    # 1. Speeds
    say()
    baseline = report["baseline_tokens_per_second"]
    rows = [
        ("transformers generate", report["transformers_tokens_per_second"], 1.0),
        ("one-token decoding", report["one_token_tokens_per_second"], 1.0),
        ("DFlash", report["tokens_per_second"], report["acceptance_length"]),
    ]
    if (tree := report["tree"]) is not None:
        rows += [(f"DFlash, tree={tree}", report["tree_tokens_per_second"], report["tree_acceptance_length"])]
    results = {name: {"speed": speed, "speedup": speed / baseline, "length": length} for name, speed, length in rows}
    _print_results(console, "", _DEMO, results, bold="DFlash")
    count = "1 prompt" if report["available"] == 1 else f"{report['prompts']} of {report['available']} prompts"
    say(f"{models}, {torch.get_num_threads()} threads, T = {report['temperature']:g}", style="dim")
    say(f"{count}, {report['new_tokens']} tokens; the prompts' own forward passes are counted too", style="dim")
    # 2. Steps by their tokens
    say("\ntokens per step")
    block = "█" if (console.encoding or "").lower().startswith("utf") else "#"
    most = max([*report["histogram"], 1])
    for length, count in enumerate(report["histogram"][1:], 1):
        say(f"{length:3} ", end="")
        say(block * -(-_BAR * count // most), style=ACCEPTED, end="")
        say(f" {count}" if count else "")
    # 3. The verdict
    compared = "one-token decoding, same seed" + (
        ", and transformers generate" if "transformers" in report["compared"] else ""
    )
    verdict = "yes" if report["identical"] else "NO"
    say(f"\nidentical output: {verdict} ({compared})", style="bold")
    if report["answerable"]:
        say(f"right answers: {report['right']} of {report['answerable']}")


# ---------------------------------------------------------------------------------------------- benchmark

_CHAINS: Columns = (
    ("tokens", "{new_tokens}"), ("tokens/s", "{tokens_per_second:.1f}"),
    ("one-token", "{one_token_tokens_per_second:.1f}"), ("speedup", "{speedup:.2f}x"),
    ("accepted", "{acceptance_length:.2f}"), ("identical", "{identical}/{turns}"),
    ("distinct", "{distinct_ngrams:.0%}"),
)  # fmt: skip
_TREES: Columns = (
    ("tokens/s", "{tokens_per_second:.1f}"), ("speedup", "{speedup:.2f}x"), ("over chains", "{speed_over_chains:.2f}x"),
    ("accepted", "{acceptance_length:.2f}"), ("over chains", "{length_over_chains:.2f}x"),
    ("identical", "{identical}/{turns}"),
)  # fmt: skip
_CONTEXTS: Columns = (
    ("steps", "{steps}"), ("accepted", "{acceptance_length:.2f}"), ("rows", "{rows:.1f}"), ("ms/step", "{step_ms:.2f}"),
    ("one-token", "{one_token_step_ms:.2f}"), ("speedup", "{speedup:.2f}x"),
)  # fmt: skip


def print_benchmark(report: dict[str, Any], console: Console) -> None:
    """Print a report of `dflash_tools.measure.benchmark.run_benchmark`, 80 columns wide for up to four datasets."""
    header, datasets = report["header"], report["datasets"]

    def say(line: str) -> None:
        console.out(terminal.printable(line, keep="\n"), highlight=False)

    # 1. Each dataset's totals
    say(
        f"{header['machine']}, {header['threads']} threads, {header['isa']}, {header['dtype']}, "
        f"target of {header['target_parameters'] / 1e6:.1f} M parameters, torch {header['torch']}, "
        f"T = {header['temperature']:g}, block {header['block_size']}{', auto' if header['auto_width'] else ''}"
        + "".join(f", {header[key]} {name}" for key, name in _STORED.items() if header.get(key) is not None)
    )
    _print_results(console, "", _CHAINS, datasets)
    tree = f"tree={header['tree']}"
    if header["tree"] is not None:
        _print_results(console, tree, _TREES, {name: _tree_row(found) for name, found in datasets.items()})
    say("accepted: tokens per step, bonus token counted; distinct: 8-grams that were new in their answer\n")
    # 2. Its steps by context length
    for name, found in datasets.items():
        both = {name: found} | ({} if header["tree"] is None else {f"{name}, {tree}": found["tree"]})
        for title, result in both.items():
            if buckets := {str(bucket["from"]): bucket | _milliseconds(bucket) for bucket in result["by_context"]}:
                _print_results(console, f"{title}, context from", _CONTEXTS, buckets)
                console.out()
    # 3. Its acceptance by position
    if header["block_size"] > 1:
        say("share of steps that kept each drafted token (of those that kept the one before)")
        places = range(header["block_size"] - 1)
        rows = [[str(place + 1), *(_share(found, place) for found in datasets.values())] for place in places]
        _print_table(console, ("", *datasets), rows)
    for name, found in datasets.items():
        say(f"{name}: steps of 1 .. {header['block_size']} tokens: {' '.join(map(str, found['histogram'][1:]))}")
    for name, found in datasets.items():
        if found["skipped"]:
            say(f"{name}: {found['skipped']} turns left out, longer than the model's positions")


def _tree_row(chain: dict[str, Any]) -> dict[str, Any]:
    found = chain["tree"]
    length, before = found["acceptance_length"], chain["acceptance_length"]
    return found | {
        "turns": chain["turns"],
        "speed_over_chains": found["tokens_per_second"] / chain["tokens_per_second"],
        "length_over_chains": None if length is None or before is None else length / before,
    }


def _milliseconds(bucket: dict[str, Any]) -> dict[str, float | None]:
    seconds = {name: bucket[f"{name}_seconds"] for name in ("step", "one_token_step")}
    return {f"{name}_ms": None if found is None else 1000 * found for name, found in seconds.items()}


def _share(found: dict[str, Any], place: int) -> str:
    share, given = found["acceptance_per_position"][place], found["conditional_acceptance"][place]
    return f"{share:4.0%} {'' if given is None else f'({given:.0%})':>6}"


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
    """Draw a report of `dflash_tools.measure.benchmark.run_benchmark`: speeds, acceptance by position, steps."""
    from matplotlib.figure import Figure

    header, datasets = report["header"], report["datasets"]
    figure, rows = Figure(figsize=(13, 4), layout="constrained"), range(1, header["block_size"] + 1)
    speed, position, steps = figure.subplots(1, 3)
    for index, (name, found) in enumerate(datasets.items()):
        # 1. Speeds
        drafted = [found] if found["tree"] is None else [found, found["tree"]]
        speeds = [found["one_token_tokens_per_second"], *(one["tokens_per_second"] for one in drafted)]
        width = 0.8 / len(speeds)
        places = [index + (bar - (len(speeds) - 1) / 2) * width for bar in range(len(speeds))]
        speed.bar(places, speeds, 0.95 * width, color=["0.7", f"C{index}", f"C{index}"])
        for place, height, one in zip(places[1:], speeds[1:], drafted, strict=True):
            speed.annotate(f"{one['speedup']:.2f}x", (place, height), ha="center", va="bottom")
        # 2. Acceptance by position
        shares, mean = found["acceptance_per_position"], found["acceptance_length"]
        label = name if mean is None else f"{name}, {mean:.2f} tokens per step"
        position.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
        # 3. Steps by their tokens
        width, counts = 0.8 / len(datasets), found["histogram"][1:]
        offset = (index - (len(datasets) - 1) / 2) * width
        shares = [count / max(sum(counts), 1) for count in counts]
        steps.bar([length + offset for length in range(1, len(shares) + 1)], shares, width)
    title = "one-token decoding (gray), DFlash" + (", trees" if any(one["tree"] for one in datasets.values()) else "")
    speed.set(xticks=range(len(datasets)), xticklabels=datasets, ylabel="tokens/s", title=title)
    position.set(xticks=rows[:-1], xlabel="drafted token", ylabel="share of steps that kept it", ylim=(0, 1.02))
    position.set_title("acceptance")
    position.legend()
    steps.set(xticks=rows, xlabel="tokens per step", ylabel="share of steps", title="steps")
    name, precision = header.get("model", "target"), header["dtype"]
    figure.suptitle(f"{name}, {header['machine']}, {precision}, T = {header['temperature']:g}")
    figure.savefig(path, dpi=120, format="png")

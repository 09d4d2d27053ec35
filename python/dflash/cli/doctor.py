"""``dflash doctor``: the state of the installation, or of a pair."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..terminal import printable
from .loading import Source, load, load_tokenizer
from .options import Bos, Device, Dtype, Json, NoThinking, TrustRemoteCode

if TYPE_CHECKING:
    from ..doctor import Diagnosis

__all__ = ["doctor"]

_MAX_NEW_TOKENS = 128
_POSITIONS = (1, 2, 3, 4, 6, 8, 12)  # and the last
# docs/doctor.md has the sources.
_HEALTHY = "published drafters keep the first draft in about 80 % of the steps, and 4 to 8 tokens per step"


def doctor(
    model: Annotated[str | None, typer.Option(help="Examine a pair: its target, a folder or a hub id.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its DFlash drafter: a folder or a hub id.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="JSON lines to answer, 32 at most; default: a few of the pair's or of our own.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens of an answer at most.")] = _MAX_NEW_TOKENS,
    no_thinking: NoThinking = False,
    bos: Bos = False,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Check this installation or, with --model and --draft, say whether a pair is wired as it was trained.

    A pair answers a few prompts. Then its drafter drafts again from the same hidden states with other taps, RoPE, mask,
    causality, window, scale and block size. If one of these accepts more than the config does, the report names the
    fault, the gain and the line that repairs it.

    The exit code is 0 if nothing was found, 1 if something does not work or the pair has a fault, and 2 if the pair
    cannot be examined at all.
    """
    if model is None and draft is None:
        _refuse_alone({
            "--prompts": prompts is not None,
            "--max-new-tokens": max_new_tokens != _MAX_NEW_TOKENS,
            "--no-thinking": no_thinking,
            "--bos": bos,
            "--dtype": dtype != "auto",
            "--device": device is not None,
            "--trust-remote-code": trust_remote_code,
        })  # fmt: skip
        _examine_installation(as_json)
        return
    if model is None or draft is None:
        given, missing = ("--draft", "--model") if model is None else ("--model", "--draft")
        raise ValueError(f"{given} needs {missing} too: a pair is examined; without both, the installation is")
    if max_new_tokens < 4:
        raise ValueError(f"--max-new-tokens must be at least 4, got {max_new_tokens}")
    source = Source(model, trust_remote_code, quiet=as_json)
    encoding = {"template": {"enable_thinking": False} if no_thinking else {}, "bos": bos}
    found = _examine_pair(source, draft, prompts, max_new_tokens, (dtype, device), encoding)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        _print_diagnosis(found, Console())
    if found.findings:
        raise typer.Exit(1)


def _refuse_alone(given: dict[str, bool]) -> None:
    """Raise if an option is given that says how a pair is examined, without a pair."""
    options = [option for option, is_given in given.items() if is_given]
    if options:
        need = "needs" if len(options) == 1 else "need"
        raise ValueError(
            f"{', '.join(options)} {need} --model and --draft: without a pair, the installation is checked"
        )


# ---------------------------------------------------------------------------------------------- the installation


def _examine_installation(as_json: bool) -> None:
    from .installation import examine

    checks = examine()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(check) for check in checks]))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}
        for check in checks:
            table.add_row(marks[check.status], check.name, escape(printable(check.found)))
            if check.advice:
                table.add_row("", "", f"[bold]-> {escape(printable(check.advice))}[/]")
        Console().print(table)
    if any(check.status == "error" for check in checks):
        raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------- a pair


def _examine_pair(
    source: Source,
    draft: str,
    prompts: str | None,
    max_new_tokens: int,
    place: tuple[str, str | None],
    encoding: dict[str, Any],
) -> Diagnosis:
    """Load a pair on ``place``, a dtype and a device, and diagnose it."""
    from ..doctor import Effort, Pair, Prompts, diagnose, find_prompts
    from ..drafter import draft_folder
    from ..files import read_json
    from ..limits import MAX_JSON_BYTES
    from ..progress import bars

    # 1. Read the small files first, so that what does not fit is refused before weights are loaded
    rows, origin = find_prompts(prompts, str(source.name))
    tokenizer = load_tokenizer(source)
    if encoding["bos"] and tokenizer.chat_template is not None:
        raise ValueError("--bos is for tokenizers without a chat template, and this one has one")
    folder = draft_folder(draft)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{printable(folder)} is not a drafter's folder: config.json is missing")
    keys: Any = read_json(folder / "config.json", MAX_JSON_BYTES, unique_keys=True)
    asked = Prompts(rows, tokenizer, **encoding, origin=origin)
    asked.check_room(_check_fit(source, keys, str(folder / "config.json")))
    # 2. Load the weights, and run
    target, drafter, _ = load(source, str(folder), *place)
    with bars(["answers", "wirings"], shown=not source.quiet) as show:
        return diagnose(Pair(target, drafter, keys), asked, Effort(max_new_tokens), show)


def _check_fit(source: Source, keys: Any, name: str) -> Any:
    """Return the target without weights. Raise if it cannot be run, or the drafter of this config does not fit it."""
    from ..drafter import DraftConfig
    from ..fit import check_config
    from ..targets import check_target

    with warnings.catch_warnings(action="ignore"):  # loading the drafter warns of unknown keys
        config = DraftConfig.from_config(keys, name)
    empty = check_target(source.load_empty_target(), loaded=False)
    check_config(empty, config)
    return empty


def _print_diagnosis(found: Diagnosis, console: Console) -> None:
    console.print(
        f"acceptance [bold]{found.acceptance_length:.2f}[/] tokens per step as configured: {found.prompts} prompts, "
        f"{found.new_tokens} new tokens, greedy, blocks of {found.block_size}"
    )
    console.print(f"[dim]prompts: {escape(printable(found.prompts_from))}[/]", highlight=False, soft_wrap=True)
    _print_positions(found, console)
    for finding in found.findings:
        gain = ""
        if finding.before is not None and finding.after is not None:
            gain = f", {finding.before:.2f} -> {finding.after:.2f} tokens per step"
        console.print(
            f"[red]{finding.fault}[/]  {escape(printable(finding.found))}{gain}", highlight=False, soft_wrap=True
        )
        console.print(f"  [bold]-> {escape(printable(finding.advice))}[/]", highlight=False, soft_wrap=True)
    if not found.findings:
        _print_trials(found, console)
    for note in found.notes:
        console.print(f"[dim]{escape(printable(note))}[/]", soft_wrap=True)
    console.print(f"[dim]{found.seconds:.0f} s[/]")


def _print_positions(found: Diagnosis, console: Console) -> None:
    """Print in how many steps each draft was kept, and what healthy pairs have."""
    shares = found.acceptance_per_position
    numbers = [number for number in _POSITIONS if number < len(shares)] + [len(shares)]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("draft", *map(str, numbers))
    table.add_row("kept in", *(f"{shares[number - 1]:.0%}" for number in numbers))
    console.print(table)
    console.print(f"[dim]{_HEALTHY}[/]", soft_wrap=True)


def _print_trials(found: Diagnosis, console: Console) -> None:
    if found.trials:
        console.print(
            f"[green]no fault found[/]: {found.replayed:.2f} tokens per step at the {found.places} places where it "
            f"drafted again, and the best of {found.tried} other wirings:"
        )
        _print_lengths(found.trials, console)
    if found.encodings:
        console.print(
            f"{found.acceptance_length:.2f} tokens per step as configured, and with other ways to encode prompts:"
        )
        _print_lengths(found.encodings, console)


def _print_lengths(lengths: Mapping[str, float], console: Console) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for change, length in lengths.items():
        table.add_row(escape(printable(change)), f"{length:.2f}")
    console.print(table)

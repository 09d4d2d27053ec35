"""``dflash doctor``: the state of the installation, or of a pair."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..terminal import printable
from .loading import Source, load, load_tokenizer
from .options import Device, Dtype, Json, TrustRemoteCode

if TYPE_CHECKING:
    from ..doctor import Diagnosis

__all__ = ["doctor"]


def doctor(
    model: Annotated[str | None, typer.Option(help="Examine a pair: its target, a folder or a hub id.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its DFlash drafter: a folder or a hub id.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="JSON lines to answer; default: a few of the pair's or of our own.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens of an answer at most.")] = 128,
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
        _refuse_alone("--prompts", prompts)
        _examine_installation(as_json)
        return
    if model is None or draft is None:
        given, missing = ("--draft", "--model") if model is None else ("--model", "--draft")
        raise ValueError(f"{given} needs {missing} too: a pair is examined; without both, the installation is")
    if max_new_tokens < 4:
        raise ValueError(f"--max-new-tokens must be at least 4, got {max_new_tokens}")
    source = Source(model, trust_remote_code, quiet=as_json)
    found = _examine_pair(source, draft, prompts, max_new_tokens, (dtype, device))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        _print_diagnosis(found, Console())
    if found.findings:
        raise typer.Exit(1)


def _refuse_alone(option: str, value: str | None) -> None:
    if value is not None:
        raise ValueError(f"{option} needs --model and --draft: the installation is checked without prompts")


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
    source: Source, draft: str, prompts: str | None, max_new_tokens: int, place: tuple[str, str | None]
) -> Diagnosis:
    """Load a pair on ``place``, a dtype and a device, and diagnose it."""
    from ..doctor import Effort, Patient, diagnose, find_prompts
    from ..drafter import draft_folder
    from ..files import read_json
    from ..limits import MAX_JSON_BYTES
    from ..progress import bars

    asked = find_prompts(prompts, source.name)
    folder = draft_folder(draft)
    keys: Any = read_json(folder / "config.json", MAX_JSON_BYTES, unique_keys=True)
    tokenizer = load_tokenizer(source)
    target, drafter, _ = load(source, str(folder), *place)
    with bars(["answers", "wirings"], shown=not source.quiet) as show:
        return diagnose(Patient(target, drafter, keys, tokenizer), asked, Effort(max_new_tokens), show)


def _print_diagnosis(found: Diagnosis, console: Console) -> None:
    console.print(
        f"acceptance [bold]{found.acceptance_length:.2f}[/] tokens per step, as configured "
        f"({found.prompts} prompts, {found.new_tokens} new tokens, greedy)"
    )
    for finding in found.findings:
        gain = ""
        if finding.before is not None and finding.after is not None:
            gain = f": {finding.before:.2f} -> {finding.after:.2f} tokens per step"
        console.print(f"[red]{finding.fault}[/]  {escape(printable(finding.found))}{gain}", highlight=False)
        console.print(f"  [bold]-> {escape(printable(finding.advice))}[/]", highlight=False, soft_wrap=True)
    if not found.findings:
        closest = f"; the closest of {found.tried} other wirings" if found.trials else ""
        console.print(
            f"[green]no fault found[/]: {found.replayed:.2f} tokens per step where the drafts were replayed{closest}"
        )
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        for change, length in found.trials.items():
            table.add_row(escape(printable(change)), f"{length:.2f}")
        console.print(table)
    for note in found.notes:
        console.print(f"[dim]{escape(printable(note))}[/]")
    console.print(f"[dim]{found.seconds:.0f} s[/]")

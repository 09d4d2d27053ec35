"""``dflash doctor``: the state of the installation, or of a pair."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.light import options, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from dflash.internals import sources

    from ..doctor.diagnosis import Diagnosis

_POSITIONS = (1, 2, 3, 4, 5, 6, 8, 12)  # and the last
# docs/doctor.md has the sources.
_HEALTHY = "published drafters keep the first draft in about 80 % of the steps, and 4 to 8 tokens per step"


@options.command()
def doctor(
    context: typer.Context,
    weights: Annotated[
        str | None, typer.Argument(metavar="FILE", help="Examine the weights of a GGUF file or a folder.")
    ] = None,
    model: Annotated[str | None, "Examine a pair: its target, a folder or a hub id."] = None,
    draft: Annotated[str | None, "Its DFlash drafter: a folder, a GGUF file or a hub id; mtp: its own head."] = None,
    prompts: Annotated[
        str | None, "JSON lines to answer, 32 at most; default: a few of the pair's or of our own."
    ] = None,
    max_new_tokens: Annotated[int, "New tokens of an answer at most."] = 128,
    no_thinking: options.NoThinking = False,
    bos: options.Bos = False,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Check this installation or, with --model and --draft, say whether a pair is wired as it was trained.

    With FILE, say what its weights become on this machine's CPU, and how fast memory lets them be read; no model is
    loaded.

    A pair answers a few prompts. Then its drafter drafts again from the same hidden states with other taps, RoPE, mask,
    causality, window, scale and block size. If one of these accepts more than the config does, the report names the
    fault, the gain and the line that repairs it.

    The exit code is 0 if nothing was found, 1 if something does not work or the pair has a fault, and 2 if the pair
    cannot be examined at all.

    Example: dflash doctor --model Qwen/Qwen3-4B --draft ./draft
    """
    if weights is not None:
        if model is not None or draft is not None:
            raise ValueError("FILE is examined by itself: leave --model and --draft out")
        from dflash.internals import sources

        sources.check_dtype(dtype)
        _examine_weights(sources.Source(weights, trust_remote_code, quiet=as_json), dtype, as_json)
        return
    options.check_pair(model, draft, "a pair is examined; without both, the installation is")
    if model is None:
        source = context.get_parameter_source
        names = [str(option.name) for option in context.command.params if option.name in context.params]
        given = [name for name in names if name != "as_json" and source(name).name == "COMMANDLINE"]
        if given:
            names = f"{', '.join(map(options.option_of, given))} {'needs' if len(given) == 1 else 'need'}"
            raise ValueError(f"{names} --model and --draft: without a pair, the installation is checked")
        _examine_installation(as_json)
        return
    if draft == "none":
        raise ValueError("a pair is examined, and --draft none has no drafter: name one")
    draft = options.known_draft(model, draft)
    if max_new_tokens < 4:
        raise ValueError(f"--max-new-tokens must be at least 4, got {max_new_tokens}")
    from rich.console import Console

    from dflash import DraftConfig
    from dflash.internals import check_config, check_encoding, find_draft, gguf, read_draft_config, sources, targets

    from ..doctor.diagnosis import Pair, Prompts, diagnose, find_prompts
    from ..measure.progress import bars

    # 1. Read the small files first, so that what does not fit is refused before weights are loaded.
    source = sources.Source(model, trust_remote_code, quiet=as_json)
    rows, origin = find_prompts(prompts, str(source.name))
    tokenizer = sources.load_tokenizer(source)
    check_encoding(tokenizer, False, bos)
    empty, keys, file = targets.check_target(source.load_empty_target(), loaded=False), {}, None
    if draft != options.MTP:  # the target's own head has no config of its own
        draft = str(path := find_draft(draft))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loading the drafter warns of unknown keys
            keys, file = read_draft_config(path), gguf.read_gguf(path) if path.is_file() else None
            config = DraftConfig.from_config(keys, str(path / "config.json" if file is None else path))
        check_config(empty, config)
    asked = Prompts(rows, tokenizer, {"enable_thinking": False} if no_thinking else {}, bos=bos, origin=origin)
    asked.check_room(empty)
    # 2. Load the weights, and run.
    target, drafter, _ = options.ModelOptions(model, draft, dtype, device).load(source)
    with bars(["answers", "wirings"], shown=not as_json) as show:
        found = diagnose(Pair(target, drafter, keys, file), asked, max_new_tokens, show=show)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        _print_diagnosis(found, Console())
    if found.findings:
        raise typer.Exit(1)


def _examine_weights(source: sources.Source, dtype: str, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..doctor.weights import examine_weights

    found = examine_weights(source, dtype)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        table = Table(*("type", "tensors", "GB in the files", "becomes", "GB in memory"), box=None)
        for kind in found.kinds:
            sizes = f"{kind.stored / 1e9:.3f}", kind.becomes, f"{kind.memory / 1e9:.3f}"
            table.add_row(kind.type, str(kind.tensors), *sizes)
        Console().print(table)
        typer.echo(
            f"{found.memory / 1e9:.2f} GB in memory. A token reads {found.read / 1e9:.2f} GB: memory allows "
            f"{found.tokens_per_second:.0f} tokens per second without drafts"
        )
        if found.refused:
            typer.echo(f"it cannot be run: {terminal.printable(found.refused)}")
    if found.refused:
        raise typer.Exit(1)


def _examine_installation(as_json: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..doctor.installation import examine

    checks = examine()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(check) for check in checks]))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}
        for check in checks:
            table.add_row(marks[check.status], check.name, escape(terminal.printable(check.found)))
            if check.advice:
                table.add_row("", "", f"[bold]-> {escape(terminal.printable(check.advice))}[/]")
        Console().print(table)
    if any(check.status == "error" for check in checks):
        raise typer.Exit(1)


def _print_diagnosis(found: Diagnosis, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    def say(text: str, style: str = "") -> None:
        console.print(terminal.printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def show(rows: Iterable[Sequence[str]], left: int = 2) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, left))
        for row in rows:
            table.add_row(*(escape(terminal.printable(cell)) for cell in row))
        console.print(table)

    # 1. The pair as it is.
    mean, size = f"{found.acceptance_length:.2f} tokens per step as configured", found.block_size
    say(f"acceptance {mean}: {found.prompts} prompts, {found.new_tokens} new tokens, greedy, blocks of {size}")
    say(f"prompts: {found.prompts_from}", "dim")
    shares = found.acceptance_per_position
    numbers = [number for number in _POSITIONS if number < len(shares)] + [len(shares)]
    show([("draft", *map(str, numbers)), ("kept in", *(f"{shares[number - 1]:.0%}" for number in numbers))], 0)
    say(_HEALTHY, "dim")
    # 2. Its faults, or what was tried.
    for finding in found.findings:
        gain = ""
        if finding.before is not None and finding.after is not None:
            gain = f", {finding.before:.2f} -> {finding.after:.2f} tokens per step"
        say(f"{finding.fault}  {finding.found}{gain}", "red")
        say(f"  -> {finding.advice}", "bold")
    if found.trials and not found.findings:
        say(
            f"no fault found: {found.replayed:.2f} tokens per step at the {found.places} places where it drafted "
            f"again, and the best of {found.tried} other wirings:",
            "green",
        )
        show((change, f"{length:.2f}") for change, length in found.trials.items())
    if found.encodings and not found.findings:
        say(f"{mean}, and with other ways to encode prompts:")
        show((change, f"{length:.2f}") for change, length in found.encodings.items())
    for note in found.notes:
        say(note, "dim")
    say(f"{found.seconds:.0f} s", "dim")

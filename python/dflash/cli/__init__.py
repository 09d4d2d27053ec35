"""The ``dflash`` command. Imports everything, is imported by nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..evaluate.prompts import text_ids
from .data import export, regenerate
from .loading import load as _load
from .loading import load_tokenizer as _load_tokenizer
from .options import (
    BlockSize,
    Device,
    Draft,
    Dtype,
    Json,
    MaxNewTokens,
    MinP,
    Model,
    Seed,
    Sharpness,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
)
from .shell import run, set_debug
from .training import train

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _options(debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False) -> None:
    """Lossless speculative decoding with DFlash block-diffusion drafters."""
    set_debug(debug)


# ---------------------------------------------------------------------------------------------- generate


@app.command()
def generate(
    model: Model,
    draft: Draft,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; none or - reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without a chat template.")] = False,
    bos: Annotated[bool, typer.Option("--bos", help="Put the tokenizer's BOS token before a raw prompt.")] = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    draft_sharpness: Sharpness = "auto",
    block_size: BlockSize = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Answer or continue PROMPT with the target's own text, several tokens a step, streamed as it is written.

    A tokenizer with a chat template gets PROMPT as a user's message, unless --raw. The text goes to standard output,
    one line of statistics to standard error.
    """
    text = _prompt(prompt, file)
    tokenizer = _load_tokenizer(model, as_json)
    if raw or tokenizer.chat_template is None:
        if system is not None:
            raise ValueError("--system needs a tokenizer with a chat template, and no --raw")
        ids = text_ids(tokenizer, text, bos=bos)
    else:
        if bos:
            raise ValueError("--bos goes with --raw: the chat template has its own")
        ids = _chat_ids(tokenizer, _messages(system, text))
    arguments = _sampling(max_new_tokens, temperature, top_k, top_p, min_p, seed, stop)
    arguments["draft_sharpness"] = _sharpness(draft_sharpness)
    # A wrong number should not wait for a large target to load; the engine checks it again.
    _check_numbers(arguments)
    target, drafter, where = _load(model, draft, dtype, device, as_json)

    import torch

    import dflash

    events = dflash.stream(
        target,
        drafter,
        torch.tensor([ids], dtype=torch.int64, device=where).reshape(1, -1),
        tokenizer=tokenizer,
        skip_special_tokens=True,
        block_size=block_size,
        **arguments,
    )
    answer, last = _show(events, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(_report(answer, last)))
    else:
        typer.echo(_summary(last.statistics), err=True)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        if prompt is not None:
            raise ValueError("give the prompt as an argument or with --file, not both")
        if not file.is_file():
            raise ValueError(f"--file: there is no file {str(file)!r}")
        return file.read_text(encoding="utf-8")
    if prompt is None or prompt == "-":
        if sys.stdin.isatty() and prompt is None:
            raise ValueError("no prompt: give one as an argument, with --file, or on standard input")
        return sys.stdin.read()
    return prompt


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    out = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return out["input_ids"]


def _sampling(max_new_tokens, temperature, top_k, top_p, min_p, seed, stop) -> dict[str, Any]:
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop_strings": stop or None,
    }


def _sharpness(value: str) -> str | float:
    try:
        return value if value == "auto" else float(value)
    except ValueError as error:
        raise ValueError(f"--draft-sharpness must be a number, inf or auto, got {value!r}") from error


def _check_numbers(arguments: dict[str, Any]) -> None:
    from ..sampling import Sampling

    if arguments["max_new_tokens"] < 1:
        raise ValueError(f"max_new_tokens must be an integer of at least 1, got {arguments['max_new_tokens']}")
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "draft_sharpness")
    Sampling.create(1).set_(1, **{name: arguments[name] for name in names if arguments.get(name) is not None})


def _show(events: Iterator[Any], quiet: bool = False) -> tuple[str, Any]:
    """Print the text of a one-row stream as it comes; returns all of it and the last event."""
    pieces, event = [], None
    for event in events:
        pieces.append(event.text[0])
        if not quiet:
            typer.echo(event.text[0], nl=False)
            sys.stdout.flush()
    if not quiet:
        typer.echo()
    return "".join(pieces), event


def _summary(statistics: Any) -> str:
    return (
        f"{statistics.num_new_tokens[0]} tokens in {statistics.seconds:.2f} s, "
        f"{statistics.tokens_per_second:.1f} tokens/s, acceptance length {statistics.acceptance_length:.2f} "
        f"of {statistics.block_size}, first token after {statistics.time_to_first_token * 1000:.0f} ms"
    )


def _report(answer: str, last: Any) -> dict[str, Any]:
    statistics = last.statistics
    acceptance = statistics.acceptance_length
    return {
        "text": answer,
        "finish_reason": last.finish_reasons[0],
        "num_new_tokens": statistics.num_new_tokens[0],
        "seconds": statistics.seconds,
        "time_to_first_token": statistics.time_to_first_token,
        "tokens_per_second": statistics.tokens_per_second,
        "acceptance_length": acceptance if acceptance == acceptance else None,  # no step ran: not a number
        "histogram": statistics.histogram,
        "block_size": statistics.block_size,
    }


# ---------------------------------------------------------------------------------------------- chat


@app.command()
def chat(
    model: Model,
    draft: Draft,
    system: System = None,
    max_length: Annotated[int, typer.Option(help="Tokens of the whole conversation at most.")] = 4096,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    block_size: BlockSize = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Talk to the target: one message a line on standard input, the answers streamed.

    /reset starts anew, /exit or the end of input leaves, Ctrl-C stops an answer. Only what is new of the conversation
    is run each time.
    """
    tokenizer = _load_tokenizer(model, as_json)
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template: use dflash generate")
    arguments = _sampling(max_new_tokens, temperature, top_k, top_p, min_p, seed, None)
    _check_numbers(arguments)
    target, drafter, where = _load(model, draft, dtype, device, as_json)

    import torch

    import dflash

    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or max_length
    max_length = min(max_length, positions)
    generator = dflash.Generator(target, drafter, max_length=max_length, block_size=block_size)
    console = Console(stderr=True)
    history = [] if system is None else [{"role": "system", "content": system}]
    messages = list(history)
    while True:
        if sys.stdin.isatty():
            console.print("[bold green]>[/] ", end="")
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            messages = list(history)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        ids = torch.tensor([_chat_ids(tokenizer, messages)], device=where)
        room = max_length - ids.shape[1]
        if room < 1:
            raise ValueError(
                f"the conversation has {ids.shape[1]} tokens, --max-length is {max_length}: /reset starts anew"
            )
        arguments["max_new_tokens"] = min(max_new_tokens, room)
        answer, last = "", None
        events = generator.stream(ids, tokenizer=tokenizer, skip_special_tokens=True, **arguments)
        with contextlib.closing(events):
            try:
                for last in events:
                    answer += last.text[0]
                    if not as_json:
                        typer.echo(last.text[0], nl=False)
                        sys.stdout.flush()
            except KeyboardInterrupt:
                console.print("[dim](stopped)[/]")
        messages.append({"role": "assistant", "content": answer})
        if as_json and last is not None:
            typer.echo(json.dumps(_report(answer, last)))
        elif last is not None:
            typer.echo()
            console.print(f"[dim]{_summary(last.statistics)}[/]")


# ---------------------------------------------------------------------------------------------- train


app.command()(train)


app.command()(regenerate)
app.command()(export)


# ---------------------------------------------------------------------------------------------- demo


@app.command()
def demo(
    prompt: Annotated[str | None, typer.Option(help="Answer this instead of held-out prompts.")] = None,
    prompts: Annotated[int | None, typer.Option(help="How many held-out prompts; all by default.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    pair: Annotated[Path | None, typer.Option(hidden=True, help="Folder with target, draft, prompts.jsonl.")] = None,
    as_json: Json = False,
) -> None:
    """Answer held-out prompts with the pair that comes inside the package, and measure; no download.

    Streams a few answers, accepted drafts and bonus tokens in different colours, then compares transformers' generate,
    one-token decoding and DFlash; exit code 1 if an answer is not theirs, token for token.
    """
    arguments = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    _check_numbers(arguments)

    from ..evaluate import demo as module

    report = module.demo(
        folder=module.PAIR if pair is None else pair,
        prompt=prompt,
        prompts=prompts,
        console=None if as_json else Console(),
        **arguments,
    )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
    if not report.identical:
        raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------- benchmark


@app.command()
def benchmark(
    model: Model,
    draft: Draft,
    dataset: Annotated[
        list[str], typer.Option(help="humaneval, gsm8k, mt-bench, spec-bench or FILE.jsonl; may be repeated.")
    ],
    data: Annotated[Path | None, typer.Option(help="Folder of the datasets' files; default: from the hub.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each dataset at most.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy; no top-k, top-p or min-p beside it.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    draft_sharpness: Sharpness = "auto",
    block_size: BlockSize = None,
    padded: Annotated[
        bool, typer.Option("--padded", help="One-token decoding at the block's shapes: equal bit for bit in bf16 too.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without a chat template.")] = False,
    bos: Annotated[bool, typer.Option("--bos", help="Put the tokenizer's BOS token before a raw prompt.")] = False,
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Tell the chat template enable_thinking=False.")
    ] = False,
    turns: Annotated[str, typer.Option(help="first, or all: the whole conversation of a prompt.")] = "first",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the steps; the start takes long.")] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results; a run that was stopped goes on there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a .png.")] = None,
    as_json: Json = False,
) -> None:
    """Measure speed and acceptance on datasets of prompts, one-token decoding beside it in the same run.

    Text of a dataset becomes a user's message where the tokenizer has a chat template, with no instruction added.
    Speeds count the prompts' forward passes.
    """
    from ..evaluate import benchmark as module
    from ..evaluate import report as reporting
    from ..evaluate.datasets import SOURCES, load_prompts

    settings = module.Settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        block_size=block_size,
        draft_sharpness=_sharpness(draft_sharpness),
        padded=padded,
        raw=raw,
        bos=bos,
        thinking=False if no_thinking else None,
        turns=turns,
        compile=compile,
    )
    _check_numbers(dataclasses.asdict(settings))
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    if plot is not None:
        reporting.check_plot(plot)
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, {str(out)!r} is a file")
    datasets = {}
    for given in dataset:
        name = given if given in SOURCES else Path(given).name.split(".")[0]
        if name in datasets:
            raise ValueError(f"--dataset {given!r}: there are two called {name}")
        datasets[name] = load_prompts(given, data, limit)
    tokenizer = _load_tokenizer(model, as_json)
    module.check_settings(settings, tokenizer)
    target, drafter, _ = _load(model, draft, dtype, device, as_json)
    with module.progress_bars({name: len(prompts) for name, prompts in datasets.items()}) as advance:
        report = module.benchmark(
            target,
            drafter,
            tokenizer,
            datasets,
            settings,
            about={"model": model, "draft": draft, "command": shlex.join(["dflash", *sys.argv[1:]])},
            out=out,
            advance=advance,
        )
    if as_json:
        typer.echo(json.dumps(report))
    else:
        reporting.print_benchmark(report, Console())
    if plot is not None:
        reporting.plot(report, plot)


# ---------------------------------------------------------------------------------------------- doctor


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this installation has and what is wrong with it; exit code 1 if something does not work."""
    from .installation import examine

    checks = examine()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(check) for check in checks]))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}
        for check in checks:
            table.add_row(marks[check.status], check.name, escape(check.found))
            if check.advice:
                table.add_row("", "", f"[bold]-> {escape(check.advice)}[/]")
        Console().print(table)
    if any(check.status == "error" for check in checks):
        raise typer.Exit(1)


def main() -> None:
    """Run the command; a user's mistake ends in one line and exit code 2, a traceback only with ``--debug``."""
    run(app)


if __name__ == "__main__":
    main()

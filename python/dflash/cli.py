"""The ``dflash`` command. Imports everything, is imported by nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
_state = {"debug": False}


@app.callback()
def _options(debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False) -> None:
    """Lossless speculative decoding with DFlash block-diffusion drafters."""
    _state["debug"] = debug


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    model: Annotated[str, typer.Option(help="The target: a folder or a hub id.")],
    draft: Annotated[str, typer.Option(help="Its DFlash drafter: a folder or a hub id.")],
    max_new_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k best tokens; 0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most probable tokens up to this mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens this much less probable than the best.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.")] = None,
    draft_sharpness: Annotated[
        str, typer.Option(help="How sharply the drafter follows its own logits: a number, inf, or auto.")
    ] = "auto",
    block_size: Annotated[int | None, typer.Option(help="Tokens a step verifies; default: the drafter's.")] = None,
    bos: Annotated[bool, typer.Option("--bos", help="Put the tokenizer's BOS token before the prompt.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
) -> None:
    """Continue PROMPT with the target's own text, several tokens a step."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import dflash

    logging.disable_progress_bar()
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    try:
        sharpness = draft_sharpness if draft_sharpness == "auto" else float(draft_sharpness)
    except ValueError as error:
        raise ValueError(f"--draft-sharpness must be a number or auto, got {draft_sharpness!r}") from error
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r}: {str(error).splitlines()[0]}") from error
    # Settings and drafter first: a wrong one should not wait for a large target to load.
    tokenizer = AutoTokenizer.from_pretrained(_existing(model))
    ids = tokenizer(prompt).input_ids
    if bos:
        if tokenizer.bos_token_id is None:
            raise ValueError("--bos: this tokenizer has no BOS token")
        ids = [tokenizer.bos_token_id, *ids]
    wanted = None if dtype == "auto" else getattr(torch, dtype)
    drafter = dflash.load_draft(draft, dtype=wanted, device=device)
    try:
        target = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
    except SafetensorError as error:
        raise ValueError(f"--model {model!r}: its weights are truncated or corrupt: {error}") from error
    output = dflash.generate(
        target,
        drafter,
        torch.tensor([ids], dtype=torch.int64, device=device).reshape(1, -1),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        draft_sharpness=sharpness,
        block_size=block_size,
        return_dict_in_generate=True,
    )
    typer.echo(tokenizer.decode(output.sequences[0, len(ids) :], skip_special_tokens=True))
    statistics = output.statistics
    typer.echo(
        f"{statistics.num_new_tokens[0]} tokens in {statistics.seconds:.2f} s, "
        f"{statistics.tokens_per_second:.1f} tokens/s, acceptance length {statistics.acceptance_length:.2f} "
        f"of {statistics.block_size}, first token after {statistics.time_to_first_token * 1000:.0f} ms",
        err=True,
    )


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False) -> None:
    """Say what this installation has and what is wrong with it; exit code 1 if something does not work."""
    from .doctor import examine

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


def _existing(name: str) -> str:
    """``name`` if it can be a folder or a hub id; a path that is not there is said so before any download."""
    if Path(name).is_dir():
        return name
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"no folder {name!r}, and it is not a hub id (owner/name) either")
    return name


def main() -> None:
    """Run the command; a user's mistake ends in one line and exit code 2, a traceback only with ``--debug``."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        if _state["debug"]:
            raise
        typer.echo(f"dflash: {' '.join(str(error).split())}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

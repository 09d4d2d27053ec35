"""``dflash regenerate`` and ``dflash export``: responses to train on, and drafters in another layout."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..progress import bars
from .loading import load, load_tokenizer
from .options import Device, Draft, Dtype, Json, MaxNewTokens, MinP, TopK, TopP

__all__ = ["export", "regenerate"]


def regenerate(
    prompts: Annotated[str, typer.Argument(help="JSONL with prompt, messages, question or turns; or a hub name.")],
    model: Annotated[str, typer.Option(help="The target: a folder or a hub id; with --server, its name there.")],
    out: Annotated[Path, typer.Option(help="JSONL of responses: made, or gone on with.")],
    draft: Annotated[str | None, typer.Option(help="A drafter of the target; pays at small batches.")] = None,
    server: Annotated[str | None, typer.Option(help="Ask an OpenAI-compatible server: http://HOST:PORT/v1.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="0 is greedy; may be repeated.  [default: 0]")] = None,
    samples: Annotated[int, typer.Option(help="Responses to a prompt at each positive temperature.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed writes the same responses.")] = 0,
    max_new_tokens: MaxNewTokens = 1024,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts themselves, without a chat template.")
    ] = False,
    bos: Annotated[bool, typer.Option("--bos", help="Put the tokenizer's BOS token before a raw prompt.")] = False,
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Tell the chat template enable_thinking=False.")
    ] = False,
    skip_long: Annotated[bool, typer.Option("--skip-long", help="Leave out prompts that are too long.")] = False,
    limit: Annotated[int | None, typer.Option(help="Take the first prompts only.")] = None,
    split: Annotated[str, typer.Option(help="Of a data set of the hub.")] = "train",
    batch_size: Annotated[int, typer.Option(help="Sequences at once.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Requests to the server at once.")] = 32,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Ask the server for token ids too (vLLM).")] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Let the target answer PROMPTS, as data to train its drafter on.

    A run that was stopped goes on where it was when it is started again with the same arguments. A key for the server
    is read from OPENAI_API_KEY.
    """
    from ..train import data
    from ..train import regenerate as recipe

    settings = recipe.Settings(
        tuple(temperature or [0.0]),
        samples,
        seed,
        max_new_tokens,
        top_k or 0,
        1.0 if top_p is None else top_p,
        min_p or 0.0,
    )
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    template = {"enable_thinking": False} if no_thinking else None
    rows = data.load_prompts(prompts, split=split)[:limit]
    if server is not None:
        if draft is not None or bos:
            raise ValueError(f"--{'bos' if draft is None else 'draft'} is the server's to choose")
        writer = recipe.ServerWriter(
            server,
            model,
            raw=raw,
            template=template,
            concurrency=concurrency,
            api_key=os.environ.get("OPENAI_API_KEY"),
            token_ids=token_ids,
            skip_long=skip_long,
        )
    else:
        tokenizer = load_tokenizer(model, as_json)
        target, drafter, _ = load(model, draft, dtype, device, as_json)
        writer = recipe.LocalWriter(
            target,
            tokenizer,
            drafter,
            name=model,
            batch_size=batch_size,
            raw=raw,
            bos=bos,
            template=template,
            skip_long=skip_long,
        )
    with bars(["responses"]) as show:

        def shown(so_far: recipe.Summary, total: int) -> None:
            rate = f"{so_far.tokens_per_second:.0f} tokens/s"
            if so_far.acceptance_length:
                rate += f", acceptance length {so_far.acceptance_length:.2f}"
            show("responses", so_far.written, total, rate)

        summary = recipe.regenerate(rows, writer, out, settings, progress=shown)
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(summary), "tokens_per_second": summary.tokens_per_second}))
    else:
        typer.echo(_written(summary), err=True)


def _written(summary: Any) -> str:
    text = f"{summary.written} responses in {summary.seconds:.1f} s, {summary.tokens_per_second:.0f} tokens/s"
    text += f", {summary.truncated} cut off" if summary.truncated else ""
    text += f", {summary.skipped} left out, too long" if summary.skipped else ""
    text += f", acceptance length {summary.acceptance_length:.2f}" if summary.acceptance_length else ""
    return text + (f"; {summary.found} were there before" if summary.found else "") + f": {summary.out}"


def export(
    draft: Draft,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist, or be empty.")],
    layout: Annotated[str, typer.Option("--format", help="published or speculators.")],
    target: Annotated[str | None, typer.Option(help="The target's name, which the speculators layout carries.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")] = "auto",
    as_json: Json = False,
) -> None:
    """Write a drafter in the other checkpoint layout; either is read."""
    import torch

    from ..train.export import export

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    export(draft, out, layout, target=target, dtype=None if dtype == "auto" else getattr(torch, dtype))
    if as_json:
        typer.echo(json.dumps({"out": str(out), "format": layout}))
    else:
        typer.echo(f"{draft} was written to {out} in the {layout} layout", err=True)

"""``dflash regenerate`` and ``dflash export``: responses to train on, and drafters in another layout."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..evaluate import Journal
from ..progress import bars
from ..terminal import printable
from ..train.regenerate import LocalWriter, ServerWriter, Settings, Summary, Writer
from .loading import Source, load, load_tokenizer
from .options import Bos, Device, Draft, Dtype, Json, Limit, NoThinking, Raw, TrustRemoteCode, takes_dataclasses

__all__ = ["export", "regenerate"]


@dataclass(frozen=True)
class _Files:
    """Models and files of a run."""

    model: Annotated[str, "The target: a folder or a hub id; with --server, its name there."]
    out: Annotated[Path, "JSONL of responses; an interrupted run continues."]
    draft: Annotated[str | None, "A drafter for the target; faster in small batches."] = None
    server: Annotated[str | None, "Ask an OpenAI-compatible server: http://HOST:PORT/v1."] = None


@dataclass(frozen=True)
class _Asking:
    """Options for reading and answering the prompts."""

    raw: Raw = False
    bos: Bos = False
    no_thinking: NoThinking = False
    skip_long: Annotated[bool, "Leave out prompts that are too long."] = False
    limit: Limit = None
    split: Annotated[str, "Split of a data set of the hub."] = "train"
    batch_size: Annotated[int, "Sequences per batch."] = 64
    concurrency: Annotated[int, "Requests to the server at a time."] = 32
    token_ids: Annotated[bool, "Ask the server for token ids too (vLLM)."] = False
    dtype: Dtype = "auto"
    device: Device = None
    trust_remote_code: TrustRemoteCode = False
    as_json: Json = False

    @property
    def template(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        return {"enable_thinking": False} if self.no_thinking else {}


@takes_dataclasses(settings=("temperatures",))
def regenerate(
    prompts: Annotated[str, typer.Argument(help="JSONL with prompt, messages, question or turns; or a hub name.")],
    *,
    files: _Files,
    temperature: Annotated[list[float] | None, typer.Option(help="0 is greedy; may be repeated; default: 0.")] = None,
    settings: Settings,
    asking: _Asking,
) -> None:
    """Let the target answer PROMPTS, as training data for its drafter.

    An interrupted run continues if it is started again with the same arguments. The server's API key is read from
    OPENAI_API_KEY.
    """
    from ..train.data import load_prompts
    from ..train.regenerate import regenerate

    # 1. Check the output, and read the prompts
    Journal.check(files.out)
    settings = replace(settings, temperatures=tuple(temperature or [0.0]))
    if asking.limit is not None and asking.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {asking.limit}")
    rows = load_prompts(prompts, split=asking.split)[: asking.limit]
    # 2. Answer them
    writer = _local_writer(files, asking) if files.server is None else _server_writer(files, asking)
    with bars(["responses"]) as show:

        def shown(so_far: Summary, total: int) -> None:
            rate = f"{so_far.tokens_per_second:.0f} tokens/s"
            if so_far.acceptance_length:
                rate += f", acceptance length {so_far.acceptance_length:.2f}"
            show("responses", so_far.written, total, rate)

        summary = regenerate(rows, writer, files.out, settings, progress=shown)
    # 3. Report
    if asking.as_json:
        typer.echo(json.dumps({**asdict(summary), "tokens_per_second": summary.tokens_per_second}))
    else:
        typer.echo(_summary_text(summary), err=True)


def _server_writer(files: _Files, asking: _Asking) -> Writer:
    local = {"draft": files.draft is not None, "bos": asking.bos, "trust-remote-code": asking.trust_remote_code}
    for option in (name for name, is_given in local.items() if is_given):
        raise ValueError(f"--{option} does not go with --server: the server decides")
    return ServerWriter(
        files.server,
        files.model,
        raw=asking.raw,
        template=asking.template,
        concurrency=asking.concurrency,
        api_key=os.environ.get("OPENAI_API_KEY"),
        token_ids=asking.token_ids,
        skip_long=asking.skip_long,
    )


def _local_writer(files: _Files, asking: _Asking) -> Writer:
    source = Source(files.model, asking.trust_remote_code, quiet=asking.as_json)
    tokenizer = load_tokenizer(source)
    target, drafter, _ = load(source, files.draft, asking.dtype, asking.device)
    return LocalWriter(
        target,
        tokenizer,
        drafter,
        name=files.model,
        batch_size=asking.batch_size,
        raw=asking.raw,
        bos=asking.bos,
        template=asking.template,
        skip_long=asking.skip_long,
    )


def _summary_text(summary: Summary) -> str:
    text = f"{summary.written} responses in {summary.seconds:.1f} s, {summary.tokens_per_second:.0f} tokens/s"
    text += f", {summary.truncated} cut off" if summary.truncated else ""
    text += f", {summary.skipped} left out, too long" if summary.skipped else ""
    text += f", acceptance length {summary.acceptance_length:.2f}" if summary.acceptance_length else ""
    return text + (f"; {summary.found} were there before" if summary.found else "") + f": {summary.out}"


def export(
    draft: Draft,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist, or be empty.")],
    layout: Annotated[str, typer.Option("--format", help="published, speculators or transformers.")],
    target: Annotated[str | None, typer.Option(help="The target's name, which the speculators layout stores.")] = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Convert a drafter from the published or the speculators layout to the one given by --format."""
    import torch

    from ..train.export import export

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    with _printed_warnings():
        export(draft, out, layout, target=target, dtype=None if dtype == "auto" else getattr(torch, dtype))
    if as_json:
        typer.echo(json.dumps({"out": str(out), "format": layout}))
    else:
        typer.echo(f"{draft} was written to {out} in the {layout} layout", err=True)


@contextmanager
def _printed_warnings() -> Iterator[None]:
    """Print warnings for users in lines of their own, also before an error. Those for developers are dropped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for warning in caught:
                typer.echo(f"dflash: {printable(warning.message)}", err=True)

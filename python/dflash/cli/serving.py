"""``dflash serve``: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from ..generator import Generator
from ..targets import versions
from ..terminal import printable
from .options import ModelOptions, command, load_tokenizer, room_of

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PACKAGED_NAME = "dflash-pair"


@command(models=("tree",))
def serve(
    models: ModelOptions,
    host: Annotated[str, "Address to listen on; 0.0.0.0 for all."] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, "The model's name for clients; default: the target's."] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DFLASH_API_KEY", help="Key that clients must send; default: none.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Answers that are written at the same time.")] = 4,
    queue: Annotated[int, typer.Option(min=0, help="Answers that may wait for a row; more get status 429.")] = 64,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a prompt and its answer at most.")] = 4096,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, help="Prompt tokens per pass; conversations share whole chunks of their beginning.")
    ] = 128,
    receipts: Annotated[Path | None, "Folder for a receipt of each answer, see dflash verify; default: none."] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request, waiting included.")] = 600.0,
    grace: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds that answers may still take after SIGTERM.")
    ] = 30.0,
) -> None:
    """Serve a target and its drafter with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models.

    The same request with the same seed gets the same answer, whatever else is running. Without --model, the packaged
    pair answers. Ctrl-C or SIGTERM ends the server when the answers that are being written have ended.
    """
    # 1. Check everything that needs no model.
    if any(importlib.util.find_spec(package) is None for package in ("fastapi", "uvicorn", "prometheus_client")):
        raise ValueError("dflash serve needs FastAPI, uvicorn and prometheus-client: pip install '.[serve]'")
    from ..serve.app import Server, bind

    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        raise ValueError("--api-key must be visible ASCII characters without spaces: a header can hold no other key")
    if name is None:
        name = _PACKAGED_NAME if models.model is None else _model_name(models.model)
    models = models.resolve()
    if receipts is not None:
        _prepare_folder(receipts)
    bound = bind(host, port)
    # 2. Load the models.
    source = models.source()
    tokenizer = load_tokenizer(source)
    target, drafter, _ = models.load(source)
    from ..serve import Scheduler
    from ..serve.service import ReceiptFolder, Service

    sizes = {"max_length": room_of(target, max_length), "batch_size": rows, "prefill_chunk": prefill_chunk}
    generator = Generator(target, drafter, **sizes, **models.generator)
    # 3. Serve.
    scheduler = Scheduler(generator, max_waiting=queue)
    folder = None if receipts is None else ReceiptFolder(receipts, target, tokenizer, scheduler)
    service = Service(scheduler, tokenizer, name, versions()["dflash"], timeout, folder)
    address, found = bound.getsockname()[:2]
    if host not in _LOOPBACK and api_key is None:
        typer.echo("dflash: anyone who reaches this address can use the server: --api-key asks for a key", err=True)
    shown = f"[{address}]" if ":" in address else address
    typer.echo(f"{printable(name)} on http://{shown}:{found}/v1", err=True)
    Server(service, api_key=api_key, grace=grace).run(sockets=[bound])


def _prepare_folder(folder: Path) -> None:
    """Make the folder for receipts, if it is missing; raise ValueError unless files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK) else "it may not be written to"
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror or str(error)
    if reason:
        raise ValueError(f"--receipts needs a folder to write to, got {printable(folder)}: {reason}")


def _model_name(source: str) -> str:
    return Path(source).resolve().name if Path(source).is_dir() else source

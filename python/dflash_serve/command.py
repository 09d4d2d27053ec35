"""``dflash serve``."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from dflash.light import options, terminal

from .log import start_log

if TYPE_CHECKING:  # slow imports, and the help needs none of them
    from dflash import Generator

    from .port import Port
    from .record import AnswerRecorder
    from .scheduler import Scheduler

_LOG = logging.getLogger(__name__)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MOST_UNASKED = 32768  # tokens of a context whose target names no limit


# ---------------------------------------------------------------------------------------------- options


def read_config(path: Path) -> dict[str, Any]:
    """Return the options in a YAML file by their names, with underscores. null leaves one at its default.

    Raises:
        ValueError: it cannot be read, or is not a mapping.
    """
    import yaml  # only who has such a file needs it

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.MarkedYAMLError as error:  # its own text shows the line, which may hold a key
        where = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"--config {path} cannot be read as YAML{where}: {error.problem}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} must have a line OPTION: VALUE for each option, got {type(found).__name__}")
    return {str(name).replace("-", "_"): value for name, value in found.items() if value is not None}


def apply_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options in a file the defaults of a command.

    Raises:
        ValueError: the file cannot be read, or the command has no such option.
    """
    if path is None:
        return None
    options = {option.name: option for option in context.command.params if option.name != "config"}
    found = read_config(path)
    for name, value in found.items():
        if name not in options:
            close = difflib.get_close_matches(name, filter(None, options), 1)
            advice = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"--config {path} has {name}, which is no option of dflash serve{advice}")
        if name == "api_key" and not isinstance(value, str):
            raise ValueError(f"--config {path}: api-key must be a text: put quotes around it")
        if getattr(options[name], "multiple", False) and not isinstance(value, list):
            found[name] = [value]
    context.default_map = found
    return path


def read_keys(path: Path) -> Sequence[str]:
    """Return the keys in a file, one per line; empty lines and those with a # are left out.

    Raises:
        ValueError: it cannot be read, or has no key.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {path} cannot be read: {error}") from error
    keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file {path} must have a key per line, and has none")
    return keys


def check_keys(keys: Sequence[str]) -> None:
    """Raise ValueError for a key that a header cannot hold."""
    if not all(re.fullmatch("[!-~]+", key) for key in keys):
        raise ValueError(
            "a key (--api-key, --api-key-file) must be visible ASCII characters without spaces: a header holds no other"
        )


@dataclass(frozen=True)
class ServeOptions:
    """How the models are served: the options of ``dflash serve`` besides theirs."""

    PANELS: ClassVar = {"host": "Network", "rows": "Capacity", "chat_template": "Chats", "receipts": "Kept answers"}

    target: options.Positional = None
    host: Annotated[str, "Address to listen on; 0.0.0.0 for all."] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000
    name: Annotated[
        list[str] | None, "A name of the model for clients, may be repeated; default: the target's, without .gguf."
    ] = None
    any_name: Annotated[bool, "Answer requests for any other model too."] = False
    config: Annotated[
        Path | None,
        typer.Option(callback=apply_config, is_eager=True, help="YAML file with options, as port: 8000; others win."),
    ] = None
    api_key: Annotated[str | None, "Key that clients must send; default: none."] = None
    api_key_file: Annotated[Path | None, "File with such keys, one per line."] = None
    allow_origin: Annotated[
        list[str] | None, "Let pages of this origin (http://HOST:PORT, or * for any) use the server; may be repeated."
    ] = None
    strict: Annotated[bool, "Refuse unknown fields, more than four stop strings, and more tokens than fit."] = False
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request, waiting included.")] = 600.0
    grace: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds that answers may still take after SIGTERM.")
    ] = 30.0
    log_json: Annotated[bool, "Log records of JSON, with the ids of requests."] = False
    rows: Annotated[int, typer.Option(min=1, help="Answers that are written at the same time.")] = 4
    queue: Annotated[int, typer.Option(min=0, help="Answers that may wait for a row; more get status 429.")] = 64
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a prompt and its answer; default: as many as the target and memory allow."),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt tokens per pass; whole chunks stay cached. Default: 64 on a CPU, else 128."),
    ] = None
    cache_gb: Annotated[
        float | None,
        typer.Option(min=0, help="GB of memory for prompts that stay cached; default: a quarter of what is free."),
    ] = None
    chat_template: Annotated[Path | None, "File with a chat template instead of the tokenizer's own."] = None
    tool_form: Annotated[str | None, "How the model writes tool calls; default: as its chat template does."] = None
    reasoning_form: Annotated[
        str | None, "How the model writes its reasoning, or none; default: by its chat template."
    ] = None
    pictures: Annotated[bool, "Take pictures in chats: loads the vision tower, and needs pillow."] = False
    allow_image_urls: Annotated[
        bool, "Fetch pictures from http and https URLs too, also from hosts that only this machine reaches."
    ] = False
    receipts: Annotated[Path | None, "Folder for a receipt of each answer, see dflash verify; default: none."] = None
    learn: Annotated[
        Path | None, "Folder for answers that dflash learn makes the drafter better with; default: none are kept."
    ] = None
    learn_gb: Annotated[float, typer.Option(min=0.001, help="GB of answers in that folder; the oldest go.")] = 1.0

    @functools.cached_property
    def keys(self) -> Sequence[str]:
        """The keys that clients may send; raises ValueError for a file without any."""
        one = [] if self.api_key is None else [self.api_key]
        return one if self.api_key_file is None else [*one, *read_keys(self.api_key_file)]

    def check(self) -> None:
        """Raise ValueError for what is wrong with any models."""
        from .reasoning import REASONING_FORMS
        from .tool_calls import TOOL_FORMS

        for option, form, known in (
            ("--tool-form", self.tool_form, [*TOOL_FORMS]),
            ("--reasoning-form", self.reasoning_form, [*REASONING_FORMS, "none"]),
        ):
            if form is not None and form not in known:
                raise ValueError(f"{option} must be one of {', '.join(known)}, got {form!r}")
        if self.allow_image_urls and not self.pictures:
            raise ValueError("--allow-image-urls needs --pictures: without it no pictures are taken")
        check_keys(self.keys)
        for origin in self.allow_origin or ():
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(f"--allow-origin must be * or as http://HOST:PORT, got {origin!r}")

    def check_folders(self, models: options.ModelOptions) -> None:
        """Raise ValueError for folders that these models cannot use; makes that of receipts."""
        if self.receipts is not None:
            try:
                self.receipts.mkdir(parents=True, exist_ok=True)
                options.check_writable(self.receipts)
            except OSError as error:
                reason = "it is a file" if self.receipts.is_file() else error.strerror or error
                folder = terminal.printable(self.receipts)
                raise ValueError(f"--receipts needs a folder to write to, got {folder}: {reason}") from error
        if self.learn is not None:
            if models.draft in (None, options.MTP) or models.block_size == 1:
                raise ValueError(
                    "--learn needs a drafter with blocks of at least 2 rows, beside the target: name it with --draft"
                )
            from dflash.internals import Store

            Store(self.learn)  # raises for a folder of something else


# ---------------------------------------------------------------------------------------------- the command


@options.command(variables="DFLASH", models=("tree",))
def serve(context: typer.Context, models: options.ModelOptions, asked: ServeOptions) -> None:
    """Serve MODEL, with a drafter or without, to clients of OpenAI's, Anthropic's and Ollama's APIs.

    The same request with the same seed gets the same answer, whatever else is running. Without a model, the packaged
    pair answers. Ctrl-C or SIGTERM ends the server when the answers that are being written have ended. Each option may
    also be a variable, as DFLASH_MAX_LENGTH for --max-length, or stand in the file of --config.

    Example: dflash serve Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 --rows 8
    """
    if any(importlib.util.find_spec(package) is None for package in ("fastapi", "uvicorn", "prometheus_client")):
        raise ValueError("dflash serve needs FastAPI, uvicorn and prometheus-client: pip install '.[serve]'")
    from .port import Port

    with Port(asked.host, asked.port, asked.allow_origin or ()) as listener:
        _serve(context, models, asked, listener)


def _serve(context: typer.Context, models: options.ModelOptions, asked: ServeOptions, listener: Port) -> None:
    # 1. Check everything that needs no model.
    asked.check()
    if asked.target is not None and context.get_parameter_source("model").name != "COMMANDLINE":
        models = dataclasses.replace(models, model=None)  # that of a variable or of the file
    models = models.named(asked.target)
    shown = models.model
    template = None if asked.chat_template is None else options.read_text(asked.chat_template, "--chat-template")
    models = models.resolve()
    from dflash.internals import sources, targets

    from .adopt import Adopter
    from .app import Server
    from .pictures import PictureReader
    from .prompts import PromptReader
    from .receipts import ReceiptFolder
    from .record import AnswerRecorder
    from .service import Service

    name, *aliases = asked.name or _names(shown)
    is_packaged = shown is None
    asked.check_folders(models)
    start_log(asked.log_json)
    # 2. Load the models.
    # A target that is learned from must be dense, as where the drafter is trained; receipts have its fingerprint.
    found = models.source(is_logged=True, samples=True, needs_dense=bool(asked.learn or asked.receipts))
    source = dataclasses.replace(found, pictures=asked.pictures, keeps_blocks=not asked.learn)
    processor = source.load_processor() if asked.pictures else None
    tokenizer = sources.load_tokenizer(source)
    if template is not None:
        tokenizer.chat_template = template
    pictures = None if processor is None else PictureReader(processor, allows_urls=asked.allow_image_urls)
    reader = PromptReader(tokenizer, asked.tool_form, asked.reasoning_form, pictures)
    target, drafter, _ = models.load(source)
    drafts = models.prompt_lookup is not None if drafter is None else drafter.config.block_size > 1
    if models.block_size is None and drafts:
        models = dataclasses.replace(models, block_size="auto")
    # 3. Make the generator, and what serves it.
    recorder = None
    if asked.learn is not None:
        recorder = AnswerRecorder(asked.learn, target, drafter, max_bytes=int(asked.learn_gb * 1e9))
    scheduler = _make_scheduler(asked, models, target, drafter, recorder)
    adopter = None if recorder is None else Adopter(recorder, scheduler)
    service = Service(
        scheduler=scheduler,
        reader=reader,
        name=name,
        aliases=aliases,
        takes_any_name=asked.any_name,
        version=targets.versions()["dflash"],
        timeout=asked.timeout,
        is_strict=asked.strict,
        receipts=None if asked.receipts is None else ReceiptFolder(asked.receipts, target, tokenizer, scheduler),
        adopter=adopter,
    )
    # 4. Serve.
    _log_models(scheduler.generator, target, is_packaged and models.dtype == "auto")
    if asked.host not in _LOOPBACK and not asked.keys:
        _LOG.warning("anyone who reaches this address can use the server: --api-key asks for a key")
    bound = listener.hand_over()
    address, found = bound.getsockname()[:2]
    root = f"http://{f'[{address}]' if ':' in address else address}:{found}"
    _LOG.info("%s on %s/v1, with a page to chat on %s/", terminal.printable(name), root, root)
    server = Server(service, keys=asked.keys, grace=asked.grace, origins=asked.allow_origin or ())
    server.run(sockets=[bound])
    if adopter is not None:
        adopter.close()
        recorder.close()


def _names(model: str | None) -> list[str]:
    if model is None:
        return ["dflash-pair"]
    if not Path(model).exists():
        return [model]
    name = Path(model).resolve().name
    return list(dict.fromkeys([name.removesuffix(".gguf"), name]))


def _make_scheduler(
    asked: ServeOptions, models: options.ModelOptions, target: Any, drafter: Any, recorder: AnswerRecorder | None
) -> Scheduler:
    """Make the generator and its scheduler: the context and the cache of prompts share the memory that is free."""
    from dflash import Generator

    from .memory import bytes_per_token, free_memory
    from .scheduler import Scheduler

    free, each = free_memory(target.device), asked.rows * bytes_per_token(target, drafter, models.drafter_window)
    if recorder is not None:  # it is given the features of each token
        each += asked.rows * len(drafter.config.target_layer_ids) * drafter.config.hidden_size * target.dtype.itemsize
    room = _room(target, asked.rows, asked.max_length, free, each)
    chunk = asked.prefill_chunk or (64 if target.device.type == "cpu" else 128)
    sizes = {"max_length": room, "batch_size": asked.rows, "prefill_chunk": chunk}
    generator = Generator(target, drafter, **sizes, on_answer=recorder, **models.generator(drafter))
    cache_bytes = int(_cache_bytes(target, room * each, free) if asked.cache_gb is None else asked.cache_gb * 1e9)
    _LOG.info("cache of prompts: %.1f GB", cache_bytes / 1e9)
    return Scheduler(generator, max_waiting=asked.queue, cache_bytes=cache_bytes)


def _room(target: Any, rows: int, asked: int | None, free: int, each: int) -> int:
    """Return the tokens of a context, and log why: as asked, or the target's own as far as half the memory goes.

    A token of all rows takes ``each`` bytes.
    """
    from dflash.internals import sources, targets

    own = targets.max_positions(target)
    if asked is not None:
        room, why = sources.room_of(target, asked), "as asked" if asked <= (own or asked) else "the target has no more"
    else:
        room = min(max(2, int(free / 2 / each) // 128 * 128), own or _MOST_UNASKED)
        memory = f"what half of the free {free / 1e9:.1f} GB holds for {rows} rows (--rows, --max-length)"
        why = "the target's own" if room == own else memory
    _LOG.info("context: %d tokens, %s", room, why)
    return room


def _cache_bytes(target: Any, context: int, free: int) -> float:
    """Return a quarter of what was free, or half of what the context's bytes and copies of weights leave of it."""
    from .memory import free_memory

    copies = max(0, free - free_memory(target.device))  # on a GPU they include the context
    left = free - max(copies, context)
    return max(0.0, min(free / 4, left / 2))


def _log_models(generator: Generator, target: Any, is_pair_as_stored: bool) -> None:
    dtype = str(target.dtype).removeprefix("torch.") + (" and 8 bits" if generator.weights else "")
    modules = f", as transformers' modules: {generator.fused_reason}" if generator.fused_reason else ""
    _LOG.info("target: %s, %s on %s%s", type(target).__name__, dtype, target.device, modules)
    if target.device.type == "cpu":
        from dflash.internals import threads

        _LOG.info("threads: %s", threads.describe_threads())
    if is_pair_as_stored:
        _LOG.info("demo_pair() has float32, which may write another text by the same seed; so does --dtype float32")
    steps = f"up to {generator.block_size} tokens per step" if generator.block_size > 1 else "none, one token per step"
    _LOG.info("drafter: %s", steps)

"""Targets and tokenizers that a command line names: how they are loaded, and what is said meanwhile."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from .. import targets
from ..drafter import MTP
from ..fit import check_tree
from ..loading import Pretrained, find_known_draft, load_draft, load_mtp
from ..terminal import printable
from ..threads import fit_threads

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source(Pretrained):
    """A target and its tokenizer, as named on the command line.

    ``quiet`` shows no spinner and no bars. ``is_logged``: the log says what is loaded, and how long it took.
    ``stores_int8`` puts copies in 8 bits in the place of the target's weights. ``samples``: text from a GGUF file is
    sampled as by llama.cpp, unless a generation_config says otherwise.
    """

    quiet: bool = False
    is_logged: bool = False
    stores_int8: bool = False
    samples: bool = False


@contextlib.contextmanager
def waiting(what: str, name: str, source: Source) -> Iterator[None]:
    """On a terminal, show a spinner while ``what`` is loaded, or the hub's bars for a download, on standard error."""
    console, path, began = Console(stderr=True), Path(name), time.monotonic()
    quiet, local = source.quiet or not console.is_terminal, path.exists()
    files = path.glob("*.safetensors") if path.is_dir() else [path] if local else []
    total = sum(file.stat().st_size for file in files) / 1e9
    size = f", {total:.1f} GB" if total >= 0.05 and what != "tokenizer" else ""
    if source.is_logged:
        _LOG.info("loading the %s from %s%s", what, printable(name), size)
    with contextlib.ExitStack() as stack:
        if not quiet and local:
            stack.enter_context(console.status(f"loading the {what}{size}"))
        elif not quiet:
            console.print(f"[dim]loading the {what} from {escape(printable(name))}[/]")
        from transformers.utils import logging as bars  # a slow import

        if (quiet or local) and bars.is_progress_bar_enabled():
            bars.disable_progress_bar()  # and the hub's
            stack.callback(bars.enable_progress_bar)
        yield
    if source.is_logged and (seconds := time.monotonic() - began) >= 1:
        _LOG.info("the %s is loaded after %.0f s", what, seconds)


def load_tokenizer(source: Source) -> Any:
    """Load it; raises ValueError for a missing path, before any download."""
    name = source.name
    if source.gguf is None and not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise ValueError(f"no folder {name!r}, and it is not a hub id (owner/name) either")
    with waiting("tokenizer", name, source):
        return source.load_tokenizer()


def check_dtype(dtype: str) -> None:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")


def check_device(dtype: str, device: str | None) -> str:
    """Return the device, by default cuda if there is a GPU; raises ValueError if it or the dtype does not exist."""
    check_dtype(dtype)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r}: {str(error).splitlines()[0]}") from error
    return device


def load_target(source: Source, dtype: str, device: Any) -> Any:
    """Load it and store it as asked. Says what copies will take, and what a token reads of packed weights."""

    def say(text: str) -> None:
        if source.is_logged:
            _LOG.info("%s", text)
        elif not source.quiet:
            typer.echo(text, err=True)

    if source.stores_int8:
        empty = targets.check_target(source.load_empty_target(), loaded=False)
        modules = [module for _, module in targets.modules_of_text(empty)]
        layers = [module for module in modules if not isinstance(module, torch.nn.Embedding)]
        weights = {weight for layer in layers for weight in layer._parameters.values() if weight is not None}
        size = sum(weight.numel() for weight in weights if weight.dim() > 1)
        say(f"weights in 8 bits, at most {size / 1e9:.2f} GB, take the place of those in the files")
    fit_threads()  # before weights are packed
    with waiting("target", source.name, source):
        target = source.load_target(dtype, device)
        is_wide = dtype != "auto" or target.dtype != torch.float16 or target.device.type != "cpu"
        if not is_wide and not targets.is_quantized(target):
            text = "the target is stored as float16, which CPU kernels do not take: it runs as --dtype float32"
            typer.echo(text, err=True)
            target = target.float()
        if source.stores_int8:
            targets.store_int8_(target)
    if source.samples and source.gguf is not None and not target.generation_config.do_sample:
        found, keys = source.gguf.sampling, [key for key in source.gguf.metadata if key.startswith("general.sampling.")]
        target.generation_config.update(do_sample=found["temperature"] > 0, **found)
        values = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        how = "the keys of the file" if keys else "default"
        say(f"sampling: {values}, as llama.cpp by {how}, unless options or requests set others")
    if targets.is_packed(target) and target.device.type == "cpu":
        sizes = targets.weight_bytes_per_token(target)
        kinds = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sizes.items())
        most = memory_bytes_per_second() / sum(sizes.values())
        say(f"a token reads {kinds} of weights: memory allows {most:.0f} tokens per second without drafts")
    return target


def load_models(models: Any, source: Source) -> tuple[Any, Any, str]:
    """Load the target and the drafter of `ModelOptions`; return both with the device."""
    dtype, draft, drafter, device = models.dtype, models.draft, None, check_device(models.dtype, models.device)
    if models.tree is not None:
        check_tree(source.load_empty_target(), models.tree, None if models.block_size == 1 else draft)
    if draft is not None and draft != MTP:  # first, because it is small and fails quickly
        with waiting("drafter", draft, source):
            asked = None if dtype == "auto" else getattr(torch, dtype)
            drafter = load_draft(draft, dtype=asked, device=device, keeps_blocks=source.keeps_blocks)
    may_suggest = draft is None and models.may_lack_draft and source.is_logged
    if may_suggest and (found := find_known_draft(models.model)) is not None:
        _LOG.info("%s drafts for this model: --draft %s", found.name, "auto" if found.is_local else found.name)
    target = load_target(source, dtype, device)
    if draft == MTP:
        try:
            drafter = load_mtp(target)
        except ValueError as error:
            if not models.may_lack_draft:
                raise ValueError(f"{error} (--draft none answers without the target's own head)") from error
            text = f"the target's own head is left out, and nothing drafts: {printable(error)}"
            _LOG.warning(text) if source.is_logged else warnings.warn(text, stacklevel=2)
    elif drafter is not None and dtype == "auto":
        drafter = load_draft(drafter, dtype=target.dtype, keeps_blocks=source.keeps_blocks)
    return target, drafter, device


def memory_bytes_per_second() -> float:
    """Measure how fast memory is read: the fastest of a few reductions. Takes a tenth of a second."""
    values, fastest = torch.ones(2**25), float("inf")
    for _ in range(4):
        began = time.perf_counter()
        values.amax()
        fastest = min(fastest, time.perf_counter() - began)
    return values.nbytes / fastest


def room_of(target: Any, max_length: int) -> int:
    """Return ``max_length``, or the target's positions if these are fewer."""
    return min(max_length, targets.max_positions(target) or max_length)

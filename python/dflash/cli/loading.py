"""Load models and tokenizers by the names on the command line. A mistake is reported in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape

from ..call import check_tree
from ..drafter import load_draft
from ..evaluate import Pretrained
from ..terminal import printable


@dataclass(frozen=True)
class Source(Pretrained):
    """A target and its tokenizer, as named on the command line; ``quiet`` shows no spinner and no bars."""

    quiet: bool = False


def _existing(name: str) -> str:
    """Return ``name`` if it can be a folder or a hub id; a missing path raises before any download."""
    if Path(name).is_dir():
        return name
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"no folder {name!r}, and it is not a hub id (owner/name) either")
    return name


@contextlib.contextmanager
def _waiting(what: str, source: str, quiet: bool) -> Iterator[None]:
    """On a terminal, show a spinner while ``what`` is loaded, or the hub's bars for a download, on standard error."""
    console = Console(stderr=True)
    quiet, local = quiet or not console.is_terminal, Path(source).is_dir()
    with contextlib.ExitStack() as stack:
        if not quiet and local:
            size = sum(file.stat().st_size for file in Path(source).glob("*.safetensors")) / 1e9
            size = f", {size:.1f} GB" if size >= 0.05 and what != "tokenizer" else ""
            stack.enter_context(console.status(f"loading the {what}{size}"))
        elif not quiet:
            console.print(f"[dim]loading the {what} from {escape(printable(source))}[/]")
        from transformers.utils import logging  # a slow import

        if (quiet or local) and logging.is_progress_bar_enabled():
            logging.disable_progress_bar()  # and the hub's
            stack.callback(logging.enable_progress_bar)
        yield


def load_tokenizer(source: Source) -> Any:
    """Load the target's tokenizer."""
    with _waiting("tokenizer", _existing(source.name), source.quiet):
        return source.load_tokenizer()


def check_device(dtype: str, device: str | None) -> str:
    """Return the device, by default cuda if there is a GPU; raises ValueError if it or the dtype does not exist."""
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r}: {str(error).splitlines()[0]}") from error
    return device


def load_target(source: Source, dtype: str, device: Any) -> Any:
    """Load the target, in eval mode."""
    with _waiting("target", source.name, source.quiet):
        return source.load_target(dtype, device)


def load(
    source: Source,
    draft: str | None,
    dtype: str,
    device: str | None,
    *,
    tree: int | Literal["auto"] | None = None,
    block_size: int | Literal["auto"] | None = None,
) -> tuple[Any, Any, str]:
    """Load the target, its drafter (if one is named), and return both with the device.

    With the dtype "auto", the target keeps that of its files, and the drafter gets the target's. If the target cannot
    verify trees of ``tree`` rows, nothing is loaded.

    Raises:
        ValueError: a file is broken, or the target takes no trees.
    """
    device, drafter = check_device(dtype, device), None
    if tree is not None:
        check_tree(source.load_empty_target(), tree, None if block_size == 1 else draft)
    if draft is not None:  # first, because it is small and fails quickly
        with _waiting("drafter", draft, source.quiet):
            drafter = load_draft(draft, dtype=None if dtype == "auto" else getattr(torch, dtype), device=device)
    target = load_target(source, dtype, device)
    if drafter is not None and dtype == "auto":
        drafter = load_draft(drafter, dtype=target.dtype)
    return target, drafter, device


def room_of(target: Any, max_length: int) -> int:
    """Return ``max_length``, or the target's positions if these are fewer."""
    from ..targets import max_positions

    return min(max_length, max_positions(target) or max_length)

"""Load models and tokenizers by the names on the command line. A mistake is reported in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

__all__ = ["check_device", "existing", "load", "load_target", "load_tokenizer", "stop_token_ids"]


def existing(name: str) -> str:
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
            console.print(f"[dim]loading the {what} from {escape(source)}[/]")
        from transformers.utils import logging  # a slow import

        if (quiet or local) and logging.is_progress_bar_enabled():
            logging.disable_progress_bar()  # and the hub's
            stack.callback(logging.enable_progress_bar)
        yield


def load_tokenizer(model: str, quiet: bool = False) -> Any:
    """Load the tokenizer of a folder or a hub id."""
    with _waiting("tokenizer", existing(model), quiet):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model)


def check_device(dtype: str, device: str | None) -> str:
    """Return the device to load on. None becomes cuda if there is a GPU, else cpu.

    Raises:
        ValueError: the device or the ``dtype`` does not exist.
    """
    import torch

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r}: {str(error).splitlines()[0]}") from error
    return device


def load_target(model: str, dtype: str, device: Any, quiet: bool = False) -> Any:
    """Load the target, in eval mode."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with _waiting("target", model, quiet):
            return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
    except SafetensorError as error:
        raise ValueError(f"--model {model!r}: its weights are truncated or corrupt: {error}") from error


def stop_token_ids(model: str, config: Any) -> list[int]:
    """Return the stop tokens of a target's generation_config, else of its text ``config``."""
    from transformers import GenerationConfig

    try:
        stops = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # there is no generation_config
        stops = getattr(config, "eos_token_id", None)
    return [] if stops is None else list(stops) if isinstance(stops, list | tuple) else [stops]


def load(model: str, draft: str | None, dtype: str, device: str | None, quiet: bool = False) -> tuple[Any, Any, str]:
    """Load the target, its drafter (if one is named), and return both with the device."""
    import torch

    from ..drafter import load_draft

    device, drafter = check_device(dtype, device), None
    if draft is not None:  # first, because it is small and fails quickly
        with _waiting("drafter", draft, quiet):
            drafter = load_draft(draft, dtype=None if dtype == "auto" else getattr(torch, dtype), device=device)
    return load_target(model, dtype, device, quiet), drafter, device

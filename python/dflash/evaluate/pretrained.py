"""Load targets and tokenizers with transformers. Their own Python code runs only if the caller allows it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

__all__ = ["load_pretrained", "readable_load_errors"]


_ALLOW = "it would have your rights, so read it first, then allow it with --trust-remote-code"


def load_pretrained(
    loader: Any, name: str | os.PathLike, *, trust_remote_code: bool, advice: str = _ALLOW, **options: Any
) -> Any:
    """Call ``loader.from_pretrained(name)``. It never asks on standard input whether code may run.

    Args:
        loader: one of transformers' ``Auto`` classes.
        name: a folder or a hub id.
        trust_remote_code: run the Python code that comes with ``name``, with the rights of this process.
        advice: what to do about code that may not run.
        options: of ``from_pretrained``.

    Raises:
        ValueError: ``name`` needs code that may not run, or one of its files is broken.
        OSError: there is no such folder or hub id, or a file is missing.
    """
    with readable_load_errors(name, advice):
        return loader.from_pretrained(name, trust_remote_code=trust_remote_code, **options)


@contextlib.contextmanager
def readable_load_errors(name: str | os.PathLike, advice: str = _ALLOW) -> Iterator[None]:
    """Turn what transformers and its libraries raise for the files of ``name`` into a ``ValueError`` of one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{str(name)!r} needs Python code of its own, which dflash does not run unasked: {advice}"
        ) from error
    except SafetensorError as error:
        raise ValueError(f"{str(name)!r}: its weights are truncated or corrupt: {error}") from error
    except Exception as error:  # a broken file: tokenizers raises bare Exceptions, transformers KeyErrors and others
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ValueError(f"{str(name)!r} cannot be loaded: {reason}") from error

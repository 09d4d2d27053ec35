"""Calls that share caches run one after another, whatever thread they come from, and never inside each other.

Whatever mode of torch the thread is in, they compute in the same one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

__all__ = ["Turns", "plain_settings", "turns_taken_here"]

_Result = TypeVar("_Result")


class _Here(threading.local):
    """What this thread is in the middle of, the outermost first."""

    turns: tuple[Turns, ...] = ()


class Turns:
    """Whose turn it is to use something: one call at a time.

    Attributes:
        lock: a re-entrant lock, for what a call may do before and after its turn.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _all.add(self)

    @property
    def is_taken_here(self) -> bool:
        """True inside a turn that this thread has taken: a streamer, a processor or a hook was called from there."""
        return self in _here.turns

    def take(self, work: Callable[[], _Result]) -> _Result:
        """Return ``work()``, which nobody else runs meanwhile.

        Raises:
            RuntimeError: called from inside a turn.
        """
        self.refuse_inside()
        before = _here.turns
        # An interrupt must not leave the lock taken: no Python code stands between taking and releasing it.
        with self.lock:
            try:
                _here.turns = (*before, self)
                return work()
            finally:
                _here.turns = before

    def refuse_inside(self) -> None:
        """Raise RuntimeError inside a turn that this thread has taken."""
        if self.is_taken_here:
            raise RuntimeError(
                "this generator is in the middle of a call, which has called back (a streamer, a processor, a "
                "criterion or a hook): make a second Generator for calls from there"
            )


def turns_taken_here() -> tuple[Turns, ...]:
    """Return the turns that this thread is in the middle of, the outermost first."""
    return _here.turns


@contextlib.contextmanager
def plain_settings(device: torch.device) -> Iterator[None]:
    """Compute on ``device`` without the caller's inference mode and autocast."""
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with current, torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        yield


_here = _Here()
_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def _free_locks() -> None:
    """In a forked child, free the locks of other threads: those are gone."""
    for turns in _all:
        if not turns.is_taken_here:
            turns.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_free_locks)

"""Keeps the answers of a generator: `AnswerRecorder`."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading

import torch
from torch import nn

from dflash import Drafter
from dflash.internals import FinishedAnswer, RecordedSettings, Store, StoredAnswer

_LOG = logging.getLogger(__name__)
_WAITING = 8  # answers that may wait for the disk; more are not kept


class AnswerRecorder:
    """Keeps every answer in a folder, after it has ended, for ``Generator(on_answer=...)``.

    A thread of its own writes. Answers with pictures, grammars, Python processors or rejection sampling are left out:
    they cannot be replayed from what is kept.

    Args:
        folder: see `Store`; nothing leaves it.
        target: the generator's target.
        draft: its drafter.
        max_bytes: of all answers; the oldest go.

    Attributes:
        drafter: the number of the drafter that is served, for the records.
        dropped: answers that were not kept because the disk was too slow, or full.

    Raises:
        ValueError: the folder holds something else, or answers of another target, or another server uses it.
    """

    def __init__(self, folder: str | os.PathLike, target: nn.Module, draft: Drafter, *, max_bytes: int = 2**30) -> None:
        self.store = Store(folder, max_bytes)
        self.store.open_for(target, draft.config.target_layer_ids)
        self.drafter = self.dropped = 0
        self._used = contextlib.ExitStack()
        self._used.enter_context(self.store.used_by("server"))
        self._queue: queue.Queue[StoredAnswer] = queue.Queue(_WAITING)
        threading.Thread(target=self._write, name="dflash answers", daemon=True).start()

    def __call__(self, answer: FinishedAnswer) -> None:
        """Copy an answer, and queue it for the disk."""
        call = answer.call
        if call.pictures is not None or call.grammars or call.host_rules is not None or call.acceptance != "keyed":
            return
        if self._queue.full() or answer.features.nbytes > self.store.max_bytes:
            self.dropped += 1
            return
        self._queue.put(StoredAnswer(
            answer.ids.to("cpu", copy=True), answer.prompt_length, answer.features.to("cpu", copy=True),
            answer.top_ids.to("cpu", torch.int32), answer.top_logits.to("cpu", copy=True),
            RecordedSettings.of(call), answer.seed, call.sampling.draft_sharpness, list(answer.acceptance_lengths),
            self.drafter,
        ))  # fmt: skip

    def close(self) -> None:
        """Write what waits, and leave the folder to another server."""
        self.flush()
        self._used.close()

    def flush(self) -> None:
        """Wait until all answers so far are on the disk."""
        self._queue.join()

    def _write(self) -> None:
        failed: object = None
        while True:
            answer = self._queue.get()
            try:
                self.store.add(answer)
                failed = None
            except Exception as error:  # a full disk, a file that is in the way
                self.dropped += 1
                if (kind := (type(error), getattr(error, "errno", None))) != failed:  # said once
                    _LOG.error("answers are not kept for learning until this ends: %s", error)
                failed = kind
            finally:
                self._queue.task_done()

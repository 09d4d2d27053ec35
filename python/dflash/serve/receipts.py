"""Receipts of the server's answers: a file for each, checked with the server's own target."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

from torch import nn

from ..call import Call
from ..receipts import Fingerprints, Receipt, RecordedAnswer, RecordedSettings, Verifier, lines_of
from .completion import Choice
from .protocol import ApiError, refusing
from .scheduler import Scheduler

_NAME = re.compile(r"(chatcmpl|cmpl)-[0-9a-f]{24}")  # of a completion: no other path is opened


class ReceiptFolder:
    """Writes ``COMPLETION-INDEX.json`` for each answer to a folder that exists, and checks them. Deletes nothing.

    Reads all weights when it is made.
    """

    def __init__(self, folder: Path, target: nn.Module, tokenizer: Any, scheduler: Scheduler) -> None:
        self._folder, self._tokenizer, self._scheduler = folder, tokenizer, scheduler
        self._verifier = Verifier(target, tokenizer, prepared=scheduler.generator.engine.target)
        self.fingerprints: Fingerprints = self._verifier.fingerprints

    def check_call(self, call: Call) -> None:
        """Raise ValueError if a receipt cannot state what is asked."""
        RecordedSettings.of(call)

    def write(self, completion: str, choice: Choice, index: int, reason: str) -> None:
        """Write the receipt of an answer that has ended. If that fails, the log says so and the answer goes on."""
        call, generator = choice.call, self._scheduler.generator
        recorded = RecordedAnswer(tuple(call.prompts[0].tolist()), tuple(choice.ids), *call.sampling.seeds(1), reason)
        shapes = generator.block_size, generator.batch_size, generator.prefill_chunk
        receipt = Receipt((recorded,), RecordedSettings.of(call), self.fingerprints, *shapes, generator.weights)
        try:
            receipt.write(self._path(completion, index))
        except OSError as error:
            logging.getLogger(__name__).error("the receipt of %s was not written: %s", completion, error)

    def read(self, completion: str, index: int) -> Receipt:
        """Return the receipt of an answer; raises ApiError if there is none, or its file was changed."""
        path = self._path(completion, index)
        if not _NAME.fullmatch(completion) or not path.is_file():
            raise ApiError(
                404, f"there is no receipt of answer {index} of {completion!r}: only answers that have ended have one",
                code="no_receipt",
            )  # fmt: skip
        with refusing(None):
            return Receipt.read(path)

    def passes(self, receipt: Receipt) -> Generator[None, None, dict[str, Any]]:
        """Check a receipt, a pass of the target at a time; return what was found as JSON, with ``lines`` in words."""
        found = yield from self._verifier.passes(receipt)
        return {**found.to_json(), "lines": lines_of(found, receipt.fingerprints.dtype, self._tokenizer)}

    def _path(self, completion: str, index: int) -> Path:
        return self._folder / f"{completion}-{index}.json"

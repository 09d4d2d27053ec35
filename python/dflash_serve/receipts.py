"""Receipts of answers: written to a folder, read and checked."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dflash import Receipt
from dflash.internals import RecordedAnswer, RecordedSettings, Verifier, lines_of, picture_digests

from .requests import ApiError, refusing
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .service import Choice

_RECEIPT = re.compile(r"(chatcmpl|cmpl|msg|resp)-[0-9a-f]{24}")  # the id of a completion: no other path is opened
_LOG = logging.getLogger(__name__)


class ReceiptFolder:
    """Writes ``COMPLETION-INDEX.json`` for each answer to a folder that exists, and checks them. Deletes nothing.

    Reads all weights when it is made.
    """

    def __init__(self, folder: Path, target: nn.Module, tokenizer: Any, scheduler: Scheduler) -> None:
        self._folder, self._tokenizer, self._generator = folder, tokenizer, scheduler.generator
        self._verifier = Verifier(target, tokenizer, prepared=self._generator.engine.target)
        self.fingerprints = self._verifier.fingerprints

    def write(self, completion: str, choice: Choice, index: int, reason: str) -> None:
        """Write the receipt of an answer that has ended. If that fails, the log says so and the answer goes on."""
        call, generator = choice.call, self._generator
        recorded = RecordedAnswer(tuple(call.prompts[0].tolist()), tuple(choice.ids), *call.sampling.seeds(1), reason)
        shapes = generator.block_size, generator.batch_size, generator.prefill_chunk
        stated = RecordedSettings.of(call), self.fingerprints, *shapes, generator.weights
        receipt = Receipt((recorded,), *stated, picture_digests(call.pictures))
        try:
            receipt.write(self._path(completion, index))
        except OSError as error:
            _LOG.error("the receipt of %s was not written: %s", completion, error)

    def read(self, completion: str, index: int) -> Receipt:
        """Return the receipt of an answer; raises ApiError if there is none, or its file was changed."""
        path = self._path(completion, index)
        if not _RECEIPT.fullmatch(completion) or not path.is_file():
            message = f"there is no receipt of answer {index} of {completion!r}: only answers that have ended have one"
            raise ApiError(404, message, code="no_receipt")
        with refusing(None):
            return Receipt.read(path)

    def passes(self, receipt: Receipt) -> Generator[None, None, dict[str, Any]]:
        """Check a receipt, one pass of the target at a time; return what was found as JSON, with ``lines`` in words."""
        found = yield from self._verifier.passes(receipt)
        return {**found.to_json(), "lines": lines_of(found, receipt.fingerprints.dtype, self._tokenizer)}

    def _path(self, completion: str, index: int) -> Path:
        return self._folder / f"{completion}-{index}.json"

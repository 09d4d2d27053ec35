"""Receipts of answers: a folder that they are written to, and the routes that return and check them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from torch import nn

from dflash import Receipt
from dflash.internals import RecordedAnswer, RecordedSettings, Verifier, lines_of, picture_digests

from . import api
from .openai import error_body
from .requests import ApiError, bad_request, refusing
from .scheduler import Scheduler
from .service import Choice, Service, refusal_of

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


# ---------------------------------------------------------------------------------------------- routes

router = APIRouter()
API = api.Api("/v1/receipts", router, error_body)
Index = Annotated[int, Query(ge=0, lt=2**31, description="Of the answer in `choices`.")]


def _folder(service: Service) -> ReceiptFolder:
    if service.receipts is None:
        message = "this server writes no receipts: start it with --receipts FOLDER"
        raise ApiError(404, message, code="receipts_are_off")
    return service.receipts


@router.get("/v1/receipts/{completion}", response_model=None)
async def receipt(completion: str, service: api.Served, index: Index = 0) -> Response:
    """Return the receipt of an answer, for `dflash verify`."""
    found = await to_thread.run_sync(_folder(service).read, completion, index)
    return Response(found.to_json(), media_type="application/json")


@router.post("/v1/receipts/{completion}/verify", response_model=None)
async def verify_receipt(completion: str, request: Request, service: api.Served, index: Index = 0) -> Response:
    """Derive every token of an answer again, with the model of this server."""
    receipts = _folder(service)
    found = await to_thread.run_sync(receipts.read, completion, index)
    try:
        check = service.scheduler.run_between_steps(receipts.passes(found))
    except RuntimeError as error:
        raise refusal_of(error) from error
    try:
        is_finished = await api.unless_gone(request, asyncio.wait_for(asyncio.wrap_future(check), service.timeout))
    except asyncio.CancelledError:
        if service.is_ending:  # the scheduler has dropped it
            raise refusal_of(RuntimeError()) from None
        raise
    except asyncio.TimeoutError:
        raise ApiError(503, f"the check was not ready after {service.timeout:g} s", code="timeout") from None
    except ValueError as error:
        raise bad_request(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        raise ApiError(500, f"the receipt cannot be checked here: {error}", code="engine_error") from error
    return JSONResponse(check.result()) if is_finished else Response(status_code=api.CLIENT_GONE)

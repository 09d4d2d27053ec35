"""The log: lines for people, or records of JSON for programs, each with the id of its request."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import datetime, timezone

request_id: ContextVar[str] = ContextVar("request_id", default="")


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON. A call of the logger adds fields by ``extra={"fields": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        found = {"time": when, "level": record.levelname.lower(), "message": record.getMessage()}
        if request := request_id.get():
            found["request"] = request
        found |= getattr(record, "fields", {})
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found)


def start_log(is_json: bool) -> None:
    """Log what this package does to standard error."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for handler in logging.getLogger().handlers if is_json else ():
        handler.setFormatter(JsonFormatter())
    logging.captureWarnings(is_json)
    for house in ("dflash", "dflash_serve"):
        logging.getLogger(house).setLevel(logging.INFO)

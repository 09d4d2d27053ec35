"""Receipts: what was asked and answered, from which every token of an answer can be derived again."""

from .receipt import Fingerprints, Receipt, RecordedAnswer, RecordedSettings
from .recorder import Recorder
from .replay import Mismatch
from .verification import CheckedAnswer, Verification, Verifier, lines_of, verify

__all__ = [
    "CheckedAnswer",
    "Fingerprints",
    "Mismatch",
    "Receipt",
    "RecordedAnswer",
    "RecordedSettings",
    "Recorder",
    "Verification",
    "Verifier",
    "lines_of",
    "verify",
]

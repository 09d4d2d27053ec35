"""Receipts: what was asked and answered, from which every token of an answer can be derived again."""

from .receipt import Answer, Fingerprints, Receipt, Settings
from .recorder import Recorder, seeds_of
from .replay import Mismatch
from .verification import CheckedAnswer, Verification, Verifier, lines_of, verify

__all__ = [
    "Answer",
    "CheckedAnswer",
    "Fingerprints",
    "Mismatch",
    "Receipt",
    "Recorder",
    "Settings",
    "Verification",
    "Verifier",
    "lines_of",
    "seeds_of",
    "verify",
]

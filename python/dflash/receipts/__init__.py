"""Receipts: what was asked and answered, from which every token of an answer can be derived again."""

from .fingerprints import Fingerprints
from .mismatch import Mismatch
from .receipt import Answer, Receipt
from .recorder import Recorder
from .settings import Settings
from .verification import CheckedAnswer, Verification, verify

__all__ = [
    "Answer",
    "CheckedAnswer",
    "Fingerprints",
    "Mismatch",
    "Receipt",
    "Recorder",
    "Settings",
    "Verification",
    "verify",
]

"""Receipts: what was asked and answered, from which every token of an answer can be derived again."""

from .fingerprints import Fingerprints
from .mismatch import Mismatch
from .receipt import Answer, Receipt
from .recorder import Recorder, seeds_of
from .settings import Settings
from .verification import CheckedAnswer, Verification, Verifier, verify
from .wording import lines_of

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

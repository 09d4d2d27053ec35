"""Receipts: what was asked and answered, from which every token of an answer can be derived again."""

from .receipt import Fingerprints, Receipt, RecordedAnswer, RecordedSettings, Recorder, picture_digests
from .verification import CheckedAnswer, Mismatch, Verification, Verifier, lines_of, verify

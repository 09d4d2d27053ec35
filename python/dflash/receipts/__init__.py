"""Receipts: records of a call, from which every token of its answers can be derived again."""

from .receipt import Fingerprints, Receipt, RecordedAnswer, RecordedSettings, Recorder, picture_digests
from .verification import CheckedAnswer, Mismatch, Verification, Verifier, lines_of, verify

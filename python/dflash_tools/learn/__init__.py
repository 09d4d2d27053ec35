"""A drafter that learns from the answers of its own machine; see docs/learn.md."""

from .gate import Gain, Verdict, judge
from .learning import LearnOptions, learn
from .replay import Replayer

__all__ = [
    "Gain",
    "LearnOptions",
    "Replayer",
    "Verdict",
    "judge",
    "learn",
]

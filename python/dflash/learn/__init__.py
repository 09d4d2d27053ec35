"""A drafter that learns from the answers of its own machine; see docs/learn.md."""

from .adopt import Adopter
from .gate import Gain, Verdict, judge
from .learning import LearnOptions, learn
from .record import Recorder
from .replay import Replayer
from .store import Store, StoredAnswer

__all__ = [
    "Adopter",
    "Gain",
    "LearnOptions",
    "Recorder",
    "Replayer",
    "Store",
    "StoredAnswer",
    "Verdict",
    "judge",
    "learn",
]

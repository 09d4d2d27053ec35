"""A drafter that learns from the answers of its own machine; see docs/learn.md."""

from ..config import LearnOptions
from .gate import CandidateGains, Gain, judge
from .learning import learn
from .replay import Replayer

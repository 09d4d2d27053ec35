"""A drafter that learns from the answers of its own machine; see docs/learn.md."""

from .gate import CandidateGains, Gain, judge
from .learning import LearnOptions, learn
from .replay import Replayer

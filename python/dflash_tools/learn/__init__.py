"""A drafter that learns from the answers of its own machine; see docs/learn.md."""

from ..config import LearnOptions
from .learning import CandidateGains, Gain, Replayer, judge, learn

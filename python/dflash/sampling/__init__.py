"""How tokens are chosen: sampling parameters, logit rules, and the ways to accept a drafted block."""

from .acceptance import KeyedAcceptance, RejectionAcceptance
from .grammar import Grammar
from .matcher import Matcher, first_banned
from .rules import HostRules, LogitRules
from .sampling import Sampling, SamplingArguments, fold

__all__ = [
    "Grammar",
    "HostRules",
    "KeyedAcceptance",
    "LogitRules",
    "Matcher",
    "RejectionAcceptance",
    "Sampling",
    "SamplingArguments",
    "first_banned",
    "fold",
]

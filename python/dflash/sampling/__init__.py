"""How tokens are chosen: sampling parameters, logit rules, and the ways to accept a drafted block."""

from .acceptance import KeyedAcceptance, RejectionAcceptance
from .rules import HostRules, LogitRules
from .sampling import Sampling, SamplingArguments, fold

__all__ = [
    "HostRules",
    "KeyedAcceptance",
    "LogitRules",
    "RejectionAcceptance",
    "Sampling",
    "SamplingArguments",
    "fold",
]

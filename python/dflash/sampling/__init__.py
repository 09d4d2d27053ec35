"""How tokens are chosen: sampling parameters, logit rules, and the ways to accept a drafted block."""

from .acceptance import KeyedAcceptance, RejectionAcceptance
from .checks import integer, integer_from, is_list
from .parameters import Sampling, SamplingArguments, fold
from .rules import HostRules, LogitRules, RuleArguments, RuleSettings

__all__ = [
    "HostRules",
    "KeyedAcceptance",
    "LogitRules",
    "RejectionAcceptance",
    "RuleArguments",
    "RuleSettings",
    "Sampling",
    "SamplingArguments",
    "fold",
    "integer",
    "integer_from",
    "is_list",
]

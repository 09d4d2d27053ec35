"""How tokens are chosen: sampling parameters, logit rules, and the ways to accept a drafted block."""

from .acceptance import KeyedAcceptance, RejectionAcceptance
from .checks import integer, integer_from, is_list, real
from .parameters import Sampling, SamplingArguments, fold
from .rules import HostRules, LogitRules, LogitsProcessor, RuleArguments, RuleSettings, StoppingCriterion

__all__ = [
    "HostRules",
    "KeyedAcceptance",
    "LogitRules",
    "LogitsProcessor",
    "RejectionAcceptance",
    "RuleArguments",
    "RuleSettings",
    "Sampling",
    "SamplingArguments",
    "StoppingCriterion",
    "fold",
    "integer",
    "integer_from",
    "is_list",
    "real",
]

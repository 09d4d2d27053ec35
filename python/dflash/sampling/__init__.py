"""How tokens are chosen: sampling parameters, logit rules, and the ways to accept a drafted block."""

from .acceptance import KeyedAcceptance, RejectionAcceptance
from .checks import integer, integer_from, is_list, real
from .grammar import Grammar, resolve_grammars
from .matcher import Matcher, first_banned
from .parameters import Sampling, SamplingArguments, fold
from .rules import HostRules, LogitRules, LogitsProcessor, RuleArguments, RuleSettings, StoppingCriterion

__all__ = [
    "Grammar",
    "HostRules",
    "KeyedAcceptance",
    "LogitRules",
    "LogitsProcessor",
    "Matcher",
    "RejectionAcceptance",
    "RuleArguments",
    "RuleSettings",
    "Sampling",
    "SamplingArguments",
    "StoppingCriterion",
    "first_banned",
    "fold",
    "integer",
    "integer_from",
    "is_list",
    "real",
    "resolve_grammars",
]

"""Logit rules: penalties, bans and forced tokens."""

from .host import HostRules
from .logit_rules import RULES, LogitRules
from .rule import Rule
from .settings import LogitsProcessor, RuleArguments, RuleSettings, StoppingCriterion

__all__ = [
    "RULES",
    "HostRules",
    "LogitRules",
    "LogitsProcessor",
    "Rule",
    "RuleArguments",
    "RuleSettings",
    "StoppingCriterion",
]

"""How tokens are chosen: sampling parameters, logit rules, and the ways to accept a drafted block."""

from .parameters import Sampling, fold, integer
from .rules import HostRules, LogitRules, RuleArguments, RuleSettings

__all__ = ["HostRules", "LogitRules", "RuleArguments", "RuleSettings", "Sampling", "fold", "integer"]

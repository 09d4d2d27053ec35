"""Logit rules: penalties, bans and forced tokens."""

from .host import HostRules
from .logit_rules import RULES, LogitRules
from .rule import Rule, Settings

__all__ = ["RULES", "HostRules", "LogitRules", "Rule", "Settings"]

"""How tokens are chosen: sampling parameters, logit rules, and the ways to accept a drafted block."""

from .acceptance import RejectionAcceptance
from .sampling import HostRules, KeyedAcceptance, LogitRules, Sampling, SamplingArguments, fold

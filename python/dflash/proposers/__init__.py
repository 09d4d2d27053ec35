"""Proposers of a block of tokens: a `LookupProposer`, a `ChainProposer`, an `MtpProposer` or a `TreeProposer`."""

from .chain import ChainProposer, LinkedPredictions, Predictions, chain_widths
from .lookup import LookupProposer
from .mtp import MtpProposer
from .tree import TreeProposer

"""Proposers of a block of tokens: a `LookupProposer`, a `ChainProposer` or a `TreeProposer`."""

from .chain import ChainProposer, LinkedPredictions, Predictions, chain_widths
from .lookup import LookupProposer
from .tree import TreeProposer

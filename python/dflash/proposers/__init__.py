"""Proposers of a block of tokens: a `PaddingProposer`, a `ChainProposer` or a `TreeProposer`."""

from .chain import ChainProposer, LinkedPredictions, PaddingProposer, Predictions, chain_widths
from .tree import TreeProposer

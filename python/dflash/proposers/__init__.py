"""What drafts a block of tokens: a `PaddingProposer`, a `ChainProposer` or a `TreeProposer`."""

from .chain import ChainProposer, PaddingProposer, chain_widths
from .drafting import LinkedPredictions, Predictions
from .tree import TreeProposer

__all__ = ["ChainProposer", "LinkedPredictions", "PaddingProposer", "Predictions", "TreeProposer", "chain_widths"]

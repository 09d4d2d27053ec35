"""What drafts a block of tokens."""

from .block import Block, ChainSettings, PaddingProposer, Proposer, State, Tree, TreeSettings
from .chain import ChainProposer, chain_widths
from .samplers import MaskedDrafts
from .tree import TREE_SIZES, TreeProposer

__all__ = [
    "TREE_SIZES",
    "Block",
    "ChainProposer",
    "ChainSettings",
    "MaskedDrafts",
    "PaddingProposer",
    "Proposer",
    "State",
    "Tree",
    "TreeProposer",
    "TreeSettings",
    "chain_widths",
]

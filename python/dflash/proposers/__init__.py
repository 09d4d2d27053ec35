"""What drafts a block of tokens."""

from .block import Block, PaddingProposer, Proposer, ProposerSettings, Tree
from .chain import ChainProposer
from .sharpness import LEVELS, AutoSharpness
from .tree import TREE_SIZES, TreeProposer

__all__ = [
    "LEVELS",
    "TREE_SIZES",
    "AutoSharpness",
    "Block",
    "ChainProposer",
    "PaddingProposer",
    "Proposer",
    "ProposerSettings",
    "Tree",
    "TreeProposer",
]

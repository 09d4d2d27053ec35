"""What drafts a block of tokens."""

from .block import Block, PaddingProposer, Proposer, ProposerSettings, Tree
from .chain import ChainProposer
from .sharpness import LEVELS, AutoSharpness

__all__ = [
    "LEVELS",
    "AutoSharpness",
    "Block",
    "ChainProposer",
    "PaddingProposer",
    "Proposer",
    "ProposerSettings",
    "Tree",
]

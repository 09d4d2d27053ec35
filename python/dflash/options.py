"""The options of a generator, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from .ops import MAX_TREE_ROWS, WeightStorage
from .settings import MAX_LOGPROBS, TreeSize, checked, integer_from
from .targets import embedding_table, max_positions, ranks_in

__all__ = [
    "MAX_LOGPROBS",
    "BlockSize",
    "GeneratorOptions",
    "TreeSize",
    "check_tree_call",
    "check_weights",
    "check_width_call",
    "checked_block_size",
    "checked_tree",
    "tree_rows",
]

BlockSize = int | Literal["auto"] | None
"""Rows of a chain; "auto" to choose them as a call proceeds; None for the drafter's own."""


@dataclass(frozen=True)
class GeneratorOptions:
    """The options of `Generator`, which documents them."""

    max_length: int
    batch_size: int = 1
    block_size: BlockSize = None
    denoise_steps: int = 1
    compile: bool = False
    graph: bool | Literal["auto"] = "auto"
    fused: bool | Literal["auto"] = "auto"
    prefill_chunk: int = 512
    reuse_prefix: bool = True
    tree: TreeSize = None
    weights: WeightStorage = None
    draft_weights: WeightStorage = None

    def check(self, target: nn.Module) -> None:
        """Raise ValueError or TypeError for a value that is wrong, or that does not suit the target."""
        lowest = {"max_length": 2, "batch_size": 1, "denoise_steps": 1, "prefill_chunk": 1}
        for name, low in lowest.items():
            integer_from(low, name, getattr(self, name))
        check_tree_call(checked_tree(self.tree), self.denoise_steps)
        check_width_call(checked_block_size(self.block_size), checked_tree(self.tree))
        positions = max_positions(target)
        if positions is not None and self.max_length > positions:
            raise ValueError(f"max_length {self.max_length} is past the target's max_position_embeddings, {positions}")
        for name, value in (("graph", self.graph), ("fused", self.fused)):
            if value not in (True, False, "auto"):
                raise ValueError(f'{name} must be True, False or "auto", got {value!r}')
        check_weights("weights", self.weights)
        check_weights("draft_weights", self.draft_weights)
        for name in ("graph", "fused", "compile"):
            if getattr(self, name) is True and (count := ranks_in(target)) > 1:
                raise ValueError(f"{name}=True needs a target in one process, this one is spread over {count}")
        device = embedding_table(target).device
        if self.graph is True and device.type != "cuda":
            raise ValueError(f"graph=True needs a target on a GPU, this one is on {device}")


def check_weights(name: str, weights: object) -> None:
    """Raise ValueError unless weights can be stored so."""
    if weights not in ("int8", None):
        raise ValueError(f'{name} must be "int8" or None, got {weights!r}')


def checked_tree(tree: object) -> TreeSize:
    """Return the argument ``tree``; raise ValueError or TypeError if it is wrong."""
    return checked("tree", tree)


def checked_block_size(block_size: object) -> BlockSize:
    """Return the argument ``block_size``; raise ValueError or TypeError if it is wrong for every drafter."""
    if block_size is None:
        return None
    if isinstance(block_size, str):
        if block_size != "auto":
            raise ValueError(f'block_size must be an integer of at least 1, "auto" or None, got {block_size!r}')
        return "auto"
    return integer_from(1, "block_size", block_size)


def check_width_call(block_size: BlockSize, tree: TreeSize = None, acceptance: str = "keyed") -> None:
    """Raise ValueError if the rows of chains are to be chosen as a call proceeds, and something needs them fixed."""
    reason = ""
    if tree is not None:
        reason = f"tree={tree!r}, which verifies rows of its own number"
    elif acceptance == "rejection":
        reason = 'acceptance="rejection": its text depends on where blocks begin, and so would on the time of steps'
    if block_size == "auto" and reason:
        raise ValueError(f"block_size={block_size!r} cannot be combined with {reason}. Pass a number, or leave it out")


def tree_rows(tree: TreeSize) -> int:
    """Return the most rows of a tree of this size; 0 for chains."""
    if tree is None:
        return 0
    return MAX_TREE_ROWS if tree == "auto" else tree


def check_tree_call(
    tree: TreeSize, denoise_steps: int, acceptance: str = "keyed", draft_sharpness: float = 1.0
) -> None:
    """Raise ValueError if a call asks for trees and for what only chains can do."""
    reason = ""
    if acceptance == "rejection":
        reason = 'acceptance="rejection": a tree\'s drafts are not drawn from the drafter, and tokens would be biased'
    elif denoise_steps > 1:
        reason = f"denoise_steps={denoise_steps}: a tree grows from one pass of the drafter"
    elif draft_sharpness != 1:
        reason = f"draft_sharpness={draft_sharpness!r}: a tree holds the drafter's best tokens, and none is drawn"
    if tree is not None and reason:
        raise ValueError(f"tree={tree!r} cannot be combined with {reason}. Pass tree=None, or leave that out")

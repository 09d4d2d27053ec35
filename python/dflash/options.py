"""The options of a generator, checked once, and whether drafter, target and call fit each other. Nothing is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from .drafter import DraftConfig, Drafter
from .ops import MAX_TREE_ROWS, WeightStorage
from .settings import TreeSize, checked, integer_from
from .targets import (
    Target,
    embedding_table,
    has_recurrent_layers,
    max_positions,
    ranks_in,
    refusal_of_weights,
    text_config,
)

if TYPE_CHECKING:
    from .call import Call

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
        tree = checked("tree", self.tree)
        check_tree_call(tree, self.denoise_steps)
        check_width_call(checked_block_size(self.block_size), tree)
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


# ----------------------------------------------------------------------------------------------------------------- fit


def check_fit(target: nn.Module, draft: Drafter) -> None:
    """Raise ValueError unless ``draft`` was made for a target like ``target``; the message names both sides."""
    check_config(target, draft.config)
    embedding = embedding_table(target)
    _check_equal("device", draft.device, embedding.device)
    _check_equal("dtype", draft.dtype, embedding.dtype)
    if reason := refusal_of_weights(draft):
        raise ValueError(f"the drafter cannot be run: {reason}")


def check_config(target: nn.Module, config: DraftConfig) -> None:
    """Do what `check_fit` does with a drafter's config; ``target`` may be on the meta device."""
    theirs, embedding = text_config(target), embedding_table(target)
    _check_equal("hidden_size", config.hidden_size, theirs.hidden_size)
    if config.num_target_layers is not None:
        _check_equal("num_target_layers", config.num_target_layers, theirs.num_hidden_layers)
    if config.vocab_size is not None:
        _check_equal("vocab_size", config.vocab_size, theirs.vocab_size)
    if config.own_parts and config.vocab_size is not None:
        _check_equal("vocab_size", config.vocab_size, embedding.shape[0])
    if max(config.target_layer_ids) >= theirs.num_hidden_layers:
        raise ValueError(
            f"the drafter does not fit the target: it taps layers {list(config.target_layer_ids)}, "
            f"the target has layers 0 .. {theirs.num_hidden_layers - 1}"
        )
    if not 0 <= config.mask_token_id < embedding.shape[0]:
        raise ValueError(
            f"the drafter does not fit the target: its mask_token_id is {config.mask_token_id}, "
            f"the target embeds ids 0 .. {embedding.shape[0] - 1}"
        )


def _check_equal(what: str, drafters: object, targets: object) -> None:
    if drafters != targets:
        raise ValueError(f"the drafter does not fit the target: its {what} is {drafters}, the target's is {targets}")


def check_block_size(target: nn.Module, draft: Drafter | None, block_size: BlockSize) -> int:
    """Return the block size of a generator for the two, the largest if it is chosen; raise unless they can run."""
    if draft is not None:
        check_fit(target, draft)
    trained, size = None if draft is None else draft.config.block_size, checked_block_size(block_size)
    if size == "auto" and (trained is None or trained < 2):
        raise ValueError(
            f"block_size={size!r} needs a drafter of blocks of at least 2 tokens, got "
            f"{'draft=None' if trained is None else f'one of {trained}'}: pass a number, or leave it out"
        )
    if size is None or size == "auto":
        return trained or 1
    if trained is not None and size > trained:
        raise ValueError(f"block_size must be at most the drafter's own, {trained}, got {size}")
    return size


def check_room(call: Call, batch_size: int, max_length: int) -> None:
    """Raise ValueError unless a generator with these sizes has room for a call."""
    batch, longest = len(call.prompts), call.longest
    if batch > batch_size:
        raise ValueError(f"ids has {batch} rows, this generator was made for {batch_size}")
    if longest + call.max_new_tokens > max_length:
        raise ValueError(
            f"a prompt of {longest} tokens and {call.max_new_tokens} new tokens do not fit this generator's "
            f"max_length, {max_length}"
        )


def check_tree(target: nn.Module, tree: TreeSize, draft: object, room: TreeSize) -> None:
    """Raise ValueError if trees cannot be drafted, or not be verified by a generator with this ``room``.

    ``draft`` is the drafter, or what it will be loaded from; None for none.
    """
    if tree is None:
        return
    if draft is None:
        raise ValueError(f"tree={tree!r} needs a drafter to grow from, got draft=None or block_size=1: pass tree=None")
    if getattr(draft, "selector", None) is not None:
        raise ValueError(
            f"tree={tree!r} needs a drafter of the first generation, got a DFlash 2 or DSpark drafter: a tree joins "
            "tokens that are predicted independently, and this one scores each token by the one before. Pass tree=None"
        )
    if has_recurrent_layers(target):
        raise ValueError(
            f"tree={tree!r} needs a target whose layers are all attention, {type(target).__name__} has recurrent "
            "layers: these take chains only, pass tree=None"
        )
    if tree_rows(tree) > tree_rows(room):
        raise ValueError(
            f"tree={tree!r} takes up to {tree_rows(tree)} rows, this generator was made with tree={room!r}: make one "
            f"with tree={tree!r}"
        )


def check_tree_trial(target: Target, tree: TreeSize) -> None:
    """Raise ValueError if a tree is asked for, and the target's trial run with one did not go well."""
    if tree is not None and target.tree_obstacle:
        raise ValueError(
            f"tree={tree!r} needs a target that gives a row of a tree the logits of its path, this one takes chains "
            f"only: pass tree=None ({type(target.model).__name__} {target.tree_obstacle})"
        )

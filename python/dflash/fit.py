"""Whether a drafter fits a target; nothing is run."""

from __future__ import annotations

from torch import nn

from .call import Call
from .drafter import DraftConfig, Drafter
from .options import BlockSize, TreeSize, checked_block_size, tree_rows
from .targets import Target, embedding_table, has_recurrent_layers, refusal_of_weights, text_config

__all__ = ["check_block_size", "check_config", "check_fit", "check_room", "check_tree", "check_tree_trial"]


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
            "tokens that are predicted apart, and this one scores each token by the one before. Pass tree=None"
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

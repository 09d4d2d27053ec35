"""What a step keeps of a block, on the device: the accepted chain, or the accepted path of a tree."""

from __future__ import annotations

from torch import Tensor

from .. import ops
from ..state import Block, State

__all__ = ["emit_", "report_"]


def emit_(block: Block, choices: Tensor, limits: Tensor, state: State) -> Tensor | None:
    """Emit what was accepted of a block, advance every row, and put the features of its tokens into ``state.context``.

    Args:
        block: what was proposed.
        choices: ``[batch, rows]`` int64, the target's choices after each row of the block.
        limits: ``[batch]`` int64, the tokens that a row may hold in all.
        state: written.

    Returns:
        The accepted path of a tree, ``[batch, path_rows]`` int64; None for a chain.
    """
    counters = state.tokens, state.length, state.num_context, state.done
    if block.tree is None:  # its features are in `state.context` already
        ops.accept_prefix_(block.ids, choices, state.stop_token_ids, limits, *counters)
        return None
    path = state.tree_path
    ops.accept_path_(
        block.ids, block.tree.parents, choices, state.stop_token_ids, limits, *counters, path, state.tree_choices,
        state.block,
    )  # fmt: skip
    ops.gather_rows_(state.features(block), path, state.context)
    return path


def report_(block: Block, choices: Tensor, state: State, expected: Tensor | None = None) -> None:
    """Tell the host of a step that was committed.

    Args:
        block: what was proposed.
        choices: as for `emit_`.
        state: as `emit_` left it.
        expected: of a tree, see `Report`.
    """
    told = (choices, block.ids) if block.tree is None else (state.tree_choices, state.block)
    state.report.write_(state.length, state.done, *told, expected)

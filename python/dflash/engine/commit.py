"""What a step keeps of a block, on the device: the accepted chain, or the accepted path of a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..proposers import Block
from .state import State

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
    path = state.path(block)
    ops.accept_path_(block.ids, block.tree.parents, choices, state.stop_token_ids, limits, *counters, path)
    ops.gather_rows_(state.features(block), path, state.context)
    return path


def report_(block: Block, choices: Tensor, state: State, path: Tensor | None, expected: Tensor | None = None) -> None:
    """Tell the host of a step that was committed.

    Args:
        block: what was proposed.
        choices: as for `emit_`.
        state: as `emit_` left it.
        path: what that returned.
        expected: of a tree, see `Report`.
    """
    if path is None:
        state.report.write_(state.length, state.done, choices, block.ids)
        return
    # 1. The emitted tokens. All but the last were drafted; the last may have been, where a stop token or the limit
    # ended the walk.
    emitted, anchor = state.num_context[:, None], state.anchor
    tokens = state.tokens.gather(1, state.length[:, None] - emitted + state.offsets)
    last = path.gather(1, (emitted - 1).clamp(min=0))
    is_draft = ((block.tree.parents == last) & (block.ids == anchor)).any(1, keepdim=True)
    # 2. In the form of a chain's.
    drafts = torch.where(state.offsets < emitted + is_draft, tokens, -1)
    state.report.write_(state.length, state.done, tokens, torch.cat([anchor, drafts[:, :-1]], 1), expected)

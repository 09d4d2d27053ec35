"""Anchors and blocks of a training batch: the drafter's inputs, labels and loss weights.

A block is the anchor's token and ``block_size - 1`` masks. Its slot k > 0 predicts the token at ``anchor + k`` (DFlash
paper, section 4.2). All blocks of all sequences are made at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Blocks", "default_gamma", "make_blocks", "sample_anchors"]


def default_gamma(block_size: int) -> float:
    """Return the published decay of the slots' weights: 7, 5 and 4 for blocks of 16, 10 and 8, linear in between."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch. Sequences with fewer anchors are padded with blocks of weight 0.

    Attributes:
        anchors: ``[batch, anchors]`` int64, ascending; padding is 0 and comes last.
        ids: ``[batch, anchors, block]`` int64: the anchor's token, then mask ids.
        labels: ``[batch, anchors, block]`` int64: the token at ``anchor + k``, 0 past the end of the sequence.
        weights: ``[batch, anchors, block]`` float32: ``exp(-(k - 1) / gamma)``. 0 in slot 0, and in all slots from the
            first token that is missing or that the target did not write.
    """

    anchors: Tensor
    ids: Tensor
    labels: Tensor
    weights: Tensor


def sample_anchors(loss_mask: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draw up to ``count`` anchors per sequence, without replacement.

    A position can be an anchor if its token and the next are both supervised.

    Args:
        loss_mask: ``[batch, length]``, nonzero on the tokens that the target wrote.
        count: maximum number of anchors per sequence.
        generator: random generator on the same device; None for torch's default.

    Returns:
        ``anchors [batch, n]`` int64, ascending with padding last, and ``valid [batch, n]`` bool. ``n <= count`` is the
        largest number of anchors in any sequence, at least 1.
    """
    supervised = loss_mask.bool()
    eligible = supervised.clone()
    eligible[:, :-1] &= supervised[:, 1:]
    eligible[:, -1] = False
    count = max(1, min(count, int(eligible.sum(1).max())))
    draw = torch.rand(loss_mask.shape, generator=generator, dtype=torch.float32, device=loss_mask.device)
    chosen = torch.where(eligible, draw, -1.0).topk(count, dim=1)
    length = loss_mask.shape[1]
    anchors = torch.where(chosen.values >= 0, chosen.indices, length).sort(1).values
    valid = anchors < length
    return torch.where(valid, anchors, 0), valid


def make_blocks(
    input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, valid: Tensor, block_size: int, mask_id: int, gamma: float
) -> Blocks:
    """Build the blocks at ``anchors``. Slots past the end of a sequence get weight 0.

    Args:
        input_ids: ``[batch, length]``, padded on the right.
        loss_mask: ``[batch, length]``, 0 on padding.
        anchors: ``[batch, anchors]``, from `sample_anchors`.
        valid: ``[batch, anchors]``, from `sample_anchors`.
        block_size: slots per block, the anchor's included.
        mask_id: input token of all slots but the anchor's.
        gamma: decay of the weights, in slots.

    Returns:
        The blocks, ``[batch, anchors, block]``.
    """
    length, slot = input_ids.shape[1], torch.arange(block_size, device=input_ids.device)
    positions = anchors[..., None] + slot
    inside, index = positions < length, positions.clamp(max=length - 1).flatten(1)
    labels = input_ids.gather(1, index).view(positions.shape)
    supervised = loss_mask.bool().gather(1, index).view(positions.shape) & inside
    counted = supervised.long().cumprod(-1).bool() & valid[..., None]
    weights = torch.exp(-(slot - 1).float() / gamma) * counted * (slot > 0)
    ids = torch.where(slot == 0, labels, mask_id)
    return Blocks(anchors, ids, torch.where(inside, labels, 0), weights)

"""The loss of a batch of blocks, as a sum. The trainer divides it by the sum of the weights over all processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .data.blocks import Blocks

__all__ = ["BlockLoss", "block_loss"]

# Most logits held at once. More rows run in chunks, and the backward pass computes their logits again.
_CHUNK_ELEMENTS = 1 << 26


@dataclass
class BlockLoss:
    """Sums over a batch, to be added up over micro-batches and processes.

    Attributes:
        loss: ``sum(weight * loss)``, with its autograd graph.
        weight: sum of the weights.
        cross_entropy: weighted sum of the cross-entropy, detached.
        correct: ``[block - 1]``, correct tokens per slot, unweighted. This and all below are None unless requested.
        counted: ``[block - 1]``, tokens per slot.
        accepted: tokens that the correct prefixes of complete blocks would emit, bonus token included.
        blocks: number of complete blocks: every slot has a weight.
    """

    loss: Tensor
    weight: Tensor
    cross_entropy: Tensor
    correct: Tensor | None = None
    counted: Tensor | None = None
    accepted: Tensor | None = None
    blocks: Tensor | None = None


def block_loss(
    hidden: Tensor,
    blocks: Blocks,
    logits: Callable[[Tensor], Tensor],
    *,
    teacher: Tensor | None = None,
    distill: float = 0.0,
    statistics: bool = False,
) -> BlockLoss:
    """Return the weighted sum of cross-entropy and distillation loss over all slots with a weight.

    ``loss = sum_k w_k ((1 - distill) CE(q_k, label_k) + distill KL(p_k || q_k))``, where q is the drafter's
    distribution and p the target's at the same position.

    Args:
        hidden: ``[batch, anchors, block, hidden]``, from the drafter.
        blocks: the blocks of the same batch.
        logits: function from hidden states, the drafter's or the target's, to logits.
        teacher: ``[batch, length, hidden]``, the target's final hidden states; needed for ``distill > 0``.
        distill: weight of the distillation loss, 0 to 1.
        statistics: count correct tokens too.

    Returns:
        Sums over the batch.

    Raises:
        ValueError: ``distill`` is above 0 and there is no ``teacher``.
    """
    # 1. Pick the slots with a weight
    rows = blocks.weights.flatten().nonzero().squeeze(1)
    weights = blocks.weights.flatten()[rows]
    labels = blocks.labels.flatten()[rows]
    picked = hidden.flatten(0, 2)[rows]
    taught = _teacher_rows(teacher, blocks, rows) if distill else None
    # 2. Sum their losses, in chunks if there are too many logits
    sums = functools.partial(_loss_sums, logits, distill, statistics)
    vocab = logits(picked[:0]).shape[-1]
    size = max(1, _CHUNK_ELEMENTS // vocab)
    if len(rows) <= size:
        loss, entropy, right = sums(picked, labels, weights, taught)
    else:
        parts = []
        for i in range(0, len(rows), size):
            chunk = (value if value is None else value[i : i + size] for value in (picked, labels, weights, taught))
            parts.append(checkpoint(sums, *chunk, use_reentrant=False))
        loss, entropy = sum(part[0] for part in parts), sum(part[1] for part in parts)
        right = torch.cat([part[2] for part in parts])
    # 3. Count correct tokens
    out = BlockLoss(loss, weights.sum(), entropy)
    if statistics:
        _count(out, blocks, rows, right)
    return out


def _teacher_rows(teacher: Tensor | None, blocks: Blocks, rows: Tensor) -> Tensor:
    """Return the target's final state for each slot. The state at anchor + k - 1 predicts the token at anchor + k."""
    if teacher is None:
        raise ValueError("distill > 0 needs the target's final hidden states")
    batch, _, block = blocks.labels.shape
    slot = torch.arange(block, device=rows.device)
    before = (blocks.anchors[..., None] + slot - 1).clamp(0, teacher.shape[1] - 1)
    before = before + torch.arange(batch, device=rows.device)[:, None, None] * teacher.shape[1]
    return teacher.flatten(0, 1)[before.flatten()[rows]]


def _loss_sums(
    logits: Callable[[Tensor], Tensor],
    distill: float,
    statistics: bool,
    picked: Tensor,
    labels: Tensor,
    weights: Tensor,
    taught: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted loss, its cross-entropy, and a mask of correct rows (empty without ``statistics``)."""
    scores = logits(picked).float()
    entropy = torch.dot(F.cross_entropy(scores, labels, reduction="none"), weights)
    loss = entropy
    if taught is not None:
        with torch.no_grad():
            wanted = F.log_softmax(logits(taught).float(), -1)
        divergence = F.kl_div(F.log_softmax(scores, -1), wanted, reduction="none", log_target=True).sum(-1)
        loss = (1 - distill) * entropy + distill * torch.dot(divergence, weights)
    right = scores.detach().argmax(-1) == labels if statistics else labels.new_zeros(0)
    return loss, entropy.detach(), right


@torch.no_grad()
def _count(out: BlockLoss, blocks: Blocks, rows: Tensor, right: Tensor) -> None:
    counted = blocks.weights > 0
    correct = torch.zeros_like(counted)
    correct.view(-1)[rows] = right
    out.correct, out.counted = correct[..., 1:].sum((0, 1)), counted[..., 1:].sum((0, 1))
    complete = counted[..., 1:].all(-1)
    lengths = 1 + correct[..., 1:].long().cumprod(-1).sum(-1)
    out.accepted, out.blocks = (lengths * complete).sum(), complete.sum()

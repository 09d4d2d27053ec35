"""The loss of a batch of blocks, as a sum. The trainer divides it by the sum of the weights over all processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..drafter import CandidateSelector
from .batches import Blocks
from .model import candidate_scores

# Most logits held at once. More rows run in chunks, and the backward pass computes their logits again.
CHUNK_ELEMENTS = 1 << 26


@dataclass
class BlockLoss:
    """Sums over a batch, to be added up over micro-batches and processes. What was not requested is None.

    Attributes:
        loss: ``sum(weight * loss)``, with its autograd graph.
        weight: sum of the weights.
        cross_entropy, selector_loss: weighted sums, detached.
        correct, counted: ``[block - 1]``, correct tokens and all tokens per slot, unweighted.
        accepted: tokens that the correct prefixes of complete blocks would emit, bonus token included.
        blocks: number of complete blocks: every slot has a weight.
        found: number of labels that are among the selector's candidates.
    """

    loss: Tensor
    weight: Tensor
    cross_entropy: Tensor
    selector_loss: Tensor | None = None
    correct: Tensor | None = None
    counted: Tensor | None = None
    accepted: Tensor | None = None
    blocks: Tensor | None = None
    found: Tensor | None = None


def block_loss(
    hidden: Tensor,
    blocks: Blocks,
    logits: Callable[[Tensor], Tensor],
    *,
    teacher: Tensor | None = None,
    distill: float = 0.0,
    selector: CandidateSelector | None = None,
    selector_weight: float = 1.0,
    statistics: bool = False,
) -> BlockLoss:
    """Return the weighted sum of cross-entropy, distillation and selector loss over all slots with a weight.

    ``loss = sum_k w_k ((1 - distill) CE(q_k, label_k) + distill KL(p_k || q_k) + selector_weight CE(s_k, label_k))``,
    where q is the drafter's distribution, p the target's at the same position, and s the selector's over the
    candidates, given the token before. A label that is no candidate takes the place of the last one.

    Args:
        hidden: ``[batch, anchors, block, hidden]``, from the drafter.
        blocks: the blocks of the same batch.
        logits: function from hidden states, the drafter's or the target's, to logits.
        teacher: ``[batch, length, hidden]``, the target's final hidden states; needed for ``distill > 0``.
        distill: weight of the distillation loss, 0 to 1.
        selector: a DFlash 2 drafter's selector; None for a drafter of the first generation.
        selector_weight: weight of the selector's loss.
        statistics: count correct tokens too: those that a greedy draft has while it is correct.

    Raises:
        ValueError: ``distill`` is above 0 and there is no ``teacher``.
    """
    # 1. Pick the slots with a weight. Slot 0, which has none, holds the token before slot 1
    rows = blocks.weights.flatten().nonzero().squeeze(1)
    labels, weights = blocks.labels.flatten(), blocks.weights.flatten()[rows]
    taught = _teacher_rows(teacher, blocks, rows) if distill else None
    picked = (hidden.flatten(0, 2)[rows], labels[rows], labels[rows - 1], weights, taught)

    def sums(hidden, labels, previous, weights, taught) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return loss, cross-entropy and selector's loss of some slots; and which are correct, and candidates."""
        # 2. Compare the logits with the labels
        scores = logits(hidden).float()
        loss = entropy = torch.dot(F.cross_entropy(scores, labels, reduction="none"), weights)
        correct = found = torch.zeros_like(labels[:0], dtype=torch.bool)
        if statistics:
            correct = scores.detach().argmax(-1) == labels
        # 3. Compare them with the target's
        if taught is not None:
            with torch.no_grad():
                wanted = F.log_softmax(logits(taught).float(), -1)
            divergence = F.kl_div(F.log_softmax(scores, -1), wanted, reduction="none", log_target=True).sum(-1)
            loss = (1 - distill) * entropy + distill * torch.dot(divergence, weights)
        # 4. Compare the selector's scores of the candidates with the labels. Its choice is what is drafted
        selector_loss = torch.zeros_like(entropy)
        if selector is not None:
            candidates, found = _candidates(scores.detach(), labels, selector.top_k)
            place = (candidates == labels[:, None]).int().argmax(-1)
            pairs = candidate_scores(selector, hidden, scores, previous, candidates)
            selector_loss = torch.dot(F.cross_entropy(pairs, place, reduction="none"), weights)
            loss = loss + selector_weight * selector_loss
            correct = (pairs.detach().argmax(-1) == place) & found
        return loss, entropy.detach(), selector_loss.detach(), correct, found

    # 5. Do so in chunks if there are too many logits
    width = logits(picked[0][:0]).shape[-1]
    if selector is not None:
        width = max(width, selector.top_k * selector.successor_codebook.shape[1])
    size = max(1, CHUNK_ELEMENTS // width)
    if len(rows) <= size:
        loss, entropy, selector_loss, correct, found = sums(*picked)
    else:
        chunks = ([None if x is None else x[i : i + size] for x in picked] for i in range(0, len(rows), size))
        parts = [checkpoint(sums, *chunk, use_reentrant=False) for chunk in chunks]
        loss, entropy, selector_loss = (sum(part[i] for part in parts) for i in range(3))
        correct, found = (torch.cat([part[i] for part in parts]) for i in (3, 4))
    # 6. Count correct tokens
    out = BlockLoss(loss, weights.sum(), entropy, None if selector is None else selector_loss)
    if statistics:
        _count(out, blocks, rows, correct)
        out.found = None if selector is None else found.sum()
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


def _candidates(scores: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's best ids, the last replaced where the label is missing, ``[rows, count]``; where it is not."""
    ids = scores.topk(count).indices
    found = (ids == labels[:, None]).any(-1)
    ids[:, -1] = torch.where(found, ids[:, -1], labels)
    return ids, found


@torch.no_grad()
def _count(out: BlockLoss, blocks: Blocks, rows: Tensor, right: Tensor) -> None:
    counted = blocks.weights > 0
    correct = torch.zeros_like(counted)
    correct.view(-1)[rows] = right
    out.correct, out.counted = correct[..., 1:].sum((0, 1)), counted[..., 1:].sum((0, 1))
    complete = counted[..., 1:].all(-1)
    lengths = 1 + correct[..., 1:].long().cumprod(-1).sum(-1)
    out.accepted, out.blocks = (lengths * complete).sum(), complete.sum()

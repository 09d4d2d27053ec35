"""Test the loss of a batch of blocks against a loop over slots, in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from dflash_tools.train import model as module
from dflash_tools.train.batches import make_blocks, sample_anchors
from dflash_tools.train.model import block_loss

VOCAB, HIDDEN, BLOCK = 23, 6, 5


@pytest.fixture
def batch():
    """Return ``(hidden, blocks, head)`` for two rows. Blocks near the end reach past it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (2, 14), generator=generator)
    loss_mask = torch.ones(2, 14, dtype=torch.long)
    loss_mask[0, :3] = 0
    loss_mask[1, 9:] = 0
    anchors, valid = sample_anchors(loss_mask, 7, generator)
    blocks = make_blocks(ids, loss_mask, anchors, valid, BLOCK, 0, 3.0)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    shape = (*blocks.labels.shape, HIDDEN)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, blocks, head.requires_grad_(False)


def slow(hidden, blocks, head, drafted, is_dynamic):
    """Return loss and weight of a drafter whose logits are of the tokens ``drafted``."""
    loss, weight = 0.0, 0.0
    for row, number in torch.cartesian_prod(*map(torch.arange, blocks.labels.shape[:2])).tolist():
        slots = [slot for slot in range(BLOCK) if blocks.weights[row, number, slot]]
        ours = [dict(zip(drafted, head(hidden[row, number, slot]).softmax(-1), strict=True)) for slot in range(BLOCK)]
        labels = blocks.labels[row, number].tolist()
        right = [float(ours[slot].get(labels[slot], torch.zeros(())).detach()) for slot in range(BLOCK)]
        for slot in slots:
            share = float(blocks.weights[row, number, slot])
            if is_dynamic:
                reach = [math.prod(0.5 + 0.5 * right[k] for k in range(1, last + 1)) for last in slots if last >= slot]
                share = sum(reach)
            if labels[slot] in ours[slot]:
                loss, weight = loss - share * ours[slot][labels[slot]].log(), weight + share
    return loss, weight


@pytest.mark.parametrize(("chunk", "kept", "is_dynamic"), [
    (None, VOCAB, False), (VOCAB * 4, VOCAB, False), (None, VOCAB - 9, False), (VOCAB * 4, VOCAB, True),
    (None, VOCAB - 9, True),
])  # fmt: skip
def test_the_loss_and_its_gradient_equal_a_slow_loop(batch, chunk, kept, is_dynamic, monkeypatch):
    """With D-PACE's weights or those that decay, and with a draft vocabulary of all tokens or of the last ones."""
    hidden, blocks, head = batch
    if chunk:
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    drafted = range(VOCAB - kept, VOCAB)
    head.weight.data = head.weight.data[drafted]
    places = torch.arange(VOCAB) - drafted.start if kept < VOCAB else None
    if places is not None:
        places = places.clamp(min=-1)
    reduced = {"draft_ids": places, "is_dynamic": is_dynamic}
    out = block_loss(hidden, blocks, head, **reduced)
    (ours,) = torch.autograd.grad(out.loss, hidden)
    loss, weight = slow(hidden, blocks, head, drafted, is_dynamic)
    (theirs,) = torch.autograd.grad(loss, hidden)
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert float(out.cross_entropy) == pytest.approx(loss.item(), rel=1e-5)
    assert float(out.weight) == pytest.approx(weight, rel=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not ours[blocks.weights == 0].any()


@pytest.mark.parametrize("chunk", [1 << 26, VOCAB * 4])
def test_the_distance_to_the_targets_distribution_is_a_share_of_the_loss(batch, chunk, monkeypatch):
    hidden, blocks, head = batch
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    states = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out = block_loss(hidden, blocks, head, teacher=module.Teacher(states, head, 0.3))
    distance = (head(hidden).softmax(-1) - head(states).softmax(-1)).abs().sum(-1)
    entropy = F.cross_entropy(head(hidden).flatten(0, 2), blocks.labels.flatten(), reduction="none")
    wanted = (blocks.weights * (0.7 * entropy.view(distance.shape) + 0.3 * distance)).sum()
    (ours,), (theirs,) = (torch.autograd.grad(loss, hidden) for loss in (out.loss, wanted))
    assert out.loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert float(out.distance) == pytest.approx(float((blocks.weights * distance).sum()), rel=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [1 << 26, VOCAB * 4])
def test_right_tokens_and_accepted_lengths_equal_a_slow_loop(batch, chunk, monkeypatch):
    _, blocks, _ = batch
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    guess = blocks.labels.clone()
    wrong = torch.rand(guess.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    guess[wrong] = (guess[wrong] + 1) % VOCAB
    hidden = F.one_hot(guess, VOCAB).double()
    out = block_loss(hidden, blocks, torch.nn.Identity(), statistics=True)
    correct, counted, accepted, whole = torch.zeros(BLOCK), torch.zeros(BLOCK), 0, 0
    for row, number in torch.cartesian_prod(*map(torch.arange, blocks.anchors.shape)).tolist():
        counts = blocks.weights[row, number] > 0
        right = ~wrong[row, number]
        correct += right & counts
        counted += counts
        if counts[1:].all():
            whole += 1
            accepted += 1 + next((k for k in range(BLOCK - 1) if not right[k + 1]), BLOCK - 1)
    assert out.correct.tolist() == correct[1:].tolist()
    assert out.counted.tolist() == counted[1:].tolist()
    assert (int(out.accepted), int(out.blocks)) == (accepted, whole)
    assert 0 < whole < int((blocks.weights.sum(-1) > 0).sum()), "some blocks reach past their sequence"


def test_blocks_without_a_token_that_can_be_drafted_teach_nothing(batch):
    hidden, blocks, head = batch
    out = block_loss(hidden, blocks, head, draft_ids=torch.full((VOCAB,), -1), is_dynamic=True, statistics=True)
    assert float(out.weight) == float(out.loss) == 0
    assert not torch.autograd.grad(out.loss, hidden)[0].any()
    assert int(out.correct.sum()) == 0

"""Test the loss of a batch of blocks against a loop over slots, in float64."""

import pytest
import torch
from torch.nn import functional as F

from dflash.train import block_loss, make_blocks, sample_anchors
from dflash.train import model as module

VOCAB, HIDDEN, BLOCK = 23, 6, 5


@pytest.fixture
def batch():
    """Return ``(hidden, blocks, head, teacher)`` for two rows. Blocks near the end reach past it."""
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
    return hidden, blocks, head.requires_grad_(False), torch.randn(2, 14, HIDDEN, generator=generator).double()


def slow(hidden, blocks, head, teacher, distill):
    loss, entropy, weight = 0.0, 0.0, 0.0
    for row, number, slot in torch.cartesian_prod(*map(torch.arange, blocks.labels.shape)).tolist():
        share = float(blocks.weights[row, number, slot])
        if not share:
            continue
        ours = head(hidden[row, number, slot]).log_softmax(-1)
        one = -ours[blocks.labels[row, number, slot]]
        # The target's distribution of a token is in the row before it.
        place = int(blocks.anchors[row, number]) + slot - 1
        theirs = head(teacher[row, place]).log_softmax(-1)
        distance = (theirs.exp() * (theirs - ours)).sum()
        loss = loss + share * ((1 - distill) * one + distill * distance)
        entropy, weight = entropy + share * float(one.detach()), weight + share
    return loss, entropy, weight


@pytest.mark.parametrize("chunk", [None, VOCAB * 4])
@pytest.mark.parametrize("distill", [0.0, 0.3, 1.0])
def test_the_loss_and_its_gradient_equal_a_slow_loop(batch, distill, chunk, monkeypatch):
    hidden, blocks, head, teacher = batch
    if chunk:
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    out = block_loss(hidden, blocks, head, teacher=teacher, distill=distill)
    (ours,) = torch.autograd.grad(out.loss, hidden)
    loss, entropy, weight = slow(hidden, blocks, head, teacher, distill)
    (theirs,) = torch.autograd.grad(loss, hidden)
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert float(out.cross_entropy) == pytest.approx(entropy, rel=1e-5)
    assert float(out.weight) == pytest.approx(weight, rel=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not ours[blocks.weights == 0].any()


@pytest.mark.parametrize("chunk", [1 << 26, VOCAB * 4])
def test_right_tokens_and_accepted_lengths_equal_a_slow_loop(batch, chunk, monkeypatch):
    _, blocks, _, _ = batch
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


def test_distillation_needs_a_teacher(batch):
    hidden, blocks, head, _ = batch
    with pytest.raises(ValueError, match="needs the target's final hidden states"):
        block_loss(hidden, blocks, head, distill=0.5)

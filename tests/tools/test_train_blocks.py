"""Test anchors and blocks against slow loops."""

import math

import pytest
import torch

from dflash_tools.train.batches import default_gamma, make_blocks, sample_anchors

MASK, GAMMA = 90, 3.0


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded rows of different lengths, with gaps in the loss mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 80, (5, 31), generator=generator)
    loss_mask = (torch.rand(5, 31, generator=generator) < 0.8).long()
    for row, length in enumerate((31, 20, 7, 2, 12)):
        ids[row, length:] = 0
        loss_mask[row, length:] = 0
    loss_mask[3] = 0  # a row without an anchor
    return ids, loss_mask


def eligible(loss_mask: torch.Tensor) -> list[list[int]]:
    return [[p for p in range(len(row) - 1) if row[p] and row[p + 1]] for row in loss_mask.tolist()]


@pytest.mark.parametrize("count", [1, 4, 50])
def test_anchors_are_distinct_positions_whose_token_and_next_are_supervised(count):
    _, loss_mask = batch(0)
    anchors, valid = sample_anchors(loss_mask, count, torch.Generator().manual_seed(1))
    assert anchors.dtype == torch.int64
    for row, allowed in enumerate(eligible(loss_mask)):
        chosen = anchors[row][valid[row]].tolist()
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(allowed)
        assert len(chosen) == min(count, len(allowed))
        assert valid[row].tolist() == sorted(valid[row].tolist(), reverse=True), "padding comes last"
    again, _ = sample_anchors(loss_mask, count, torch.Generator().manual_seed(1))
    assert torch.equal(anchors, again)


def test_every_anchor_is_as_likely_as_another():
    loss_mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1]])
    generator, seen = torch.Generator().manual_seed(0), torch.zeros(7)
    for _ in range(900):
        seen[sample_anchors(loss_mask, 1, generator)[0][0, 0]] += 1
    assert seen.nonzero().flatten().tolist() == [1, 2, 5]
    assert seen[[1, 2, 5]].min() > 240


@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_blocks_equal_a_slow_loop(block_size):
    ids, loss_mask = batch(block_size)
    anchors, valid = sample_anchors(loss_mask, 9, torch.Generator().manual_seed(2))
    blocks = make_blocks(ids, loss_mask, anchors, valid, block_size, MASK, GAMMA)
    assert torch.equal(blocks.anchors, anchors)
    for row, number in torch.cartesian_prod(*map(torch.arange, anchors.shape)).tolist():
        anchor, counts = int(anchors[row, number]), bool(valid[row, number])
        assert int(blocks.ids[row, number, 0]) == int(ids[row, anchor])
        for slot in range(block_size):
            place = anchor + slot
            inside = place < ids.shape[1]
            label, weight = int(blocks.labels[row, number, slot]), float(blocks.weights[row, number, slot])
            assert label == (int(ids[row, place]) if inside else 0)
            counts = counts and inside and bool(loss_mask[row, place])
            wanted = math.exp(-(slot - 1) / GAMMA) if counts and slot else 0.0
            assert weight == pytest.approx(wanted, rel=1e-6, abs=0)
            assert slot == 0 or int(blocks.ids[row, number, slot]) == MASK
    assert blocks.weights[3].sum() == 0
    assert blocks.weights[0].sum() > 0


def test_default_gammas_are_the_published_decays():
    assert [default_gamma(size) for size in (16, 10, 8)] == pytest.approx([7, 5, 4])

"""Test rejection sampling of paths through candidates: the target's exact law."""

import math

import pytest
import torch
from test_rejection import DRAWS, SETTINGS, VOCAB, case, distance, emit, exact

from dflash import ops
from dflash.sampling import Sampling
from dflash.sampling import acceptance as rejection

COUNT, FEWER = 2, DRAWS // 4


def selector(seed):
    """Return the hidden states of two slots and both codebooks, with a row for the anchor."""
    g = torch.Generator().manual_seed(seed + 100)
    return torch.randn(1, 2, 3, generator=g), *torch.randn(2, VOCAB + 1, 3, generator=g)


def walking(draft):
    """Return a function that drafts two tokens by a walk, as the step does."""
    hidden, predecessors, successors = selector(0)

    def propose(sampling: Sampling, positions: torch.Tensor):
        batch, s = len(positions), sampling
        logits, anchor = draft.expand(batch, -1, -1).contiguous(), torch.full((batch,), VOCAB)
        sharpness = torch.full((batch,), math.inf)
        ids, values = ops.top_candidates(logits, positions, s.seeds, s.temperature, sharpness, COUNT)
        settings = positions, s.seeds, s.temperature, s.top_k, s.top_p, s.min_p, torch.ones(batch)
        parts = hidden.expand(batch, -1, -1), predecessors, successors, anchor, ids, values
        path, scores = ops.walk_candidates(*parts, *settings, rejection.DRAFT)
        return path, rejection.walk_probabilities(path, ids, scores, VOCAB)

    return propose


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_drafts_of_a_walk_through_plain_candidates_leave_the_target_s_law(settings):
    target, draft = case(0)
    tokens = emit(target, walking(draft), FEWER, **settings)
    p_value, variation = distance(tokens, exact(target, **settings))
    assert p_value > 1e-3, variation


def test_a_slot_without_a_draft_has_no_probabilities():
    path, ids = torch.tensor([[2, -1]]), torch.tensor([[[2, 0, -1], [-1, -1, -1]]])
    scores = torch.tensor([[[1.0, 0.0, -math.inf], [-math.inf] * 3]])
    q = rejection.walk_probabilities(path, ids, scores, 4)
    p = torch.softmax(torch.tensor([1.0, 0.0]), -1)
    assert torch.equal(q[0], torch.stack([torch.stack([p[1], p[0] * 0, p[0], p[0] * 0]), torch.zeros(4)]))


def test_an_infinite_score_has_all_probability():
    path, ids = torch.tensor([[1]]), torch.tensor([[[3, 1, 0]]])
    scores = torch.tensor([[[math.inf, math.inf, 2.0]]])
    assert torch.equal(rejection.walk_probabilities(path, ids, scores, 4), torch.tensor([[[0.0, 1.0, 0.0, 0.0]]]))

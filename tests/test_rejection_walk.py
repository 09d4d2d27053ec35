"""Test rejection sampling of paths through candidates: the target's exact law, and detection of planted faults."""

import math

import pytest
import torch
from test_rejection import DRAWS, VOCAB, case, distance, emit, exact

from dflash import ops
from dflash.ops import reference
from dflash.sampling import Sampling
from dflash.sampling import acceptance as rejection

COUNT, FEWER = 2, DRAWS // 4
SETTINGS = [{}, {"temperature": 0.6, "top_k": 3}, {"temperature": 1.4, "top_p": 0.85, "min_p": 0.02}]


def selector(seed):
    """Return the hidden states of two slots and both codebooks, with a row for the anchor."""
    g = torch.Generator().manual_seed(seed + 100)
    return torch.randn(1, 2, 3, generator=g), *torch.randn(2, VOCAB + 1, 3, generator=g)


def walking(draft, noisy=False, stream=rejection.DRAFT, after_anchor=False):
    """Return a function that drafts two tokens by a walk, as the step does; each argument plants a fault."""
    hidden, predecessors, successors = selector(0)

    def propose(sampling: Sampling, positions: torch.Tensor):
        batch, s = len(positions), sampling
        logits, anchor = draft.expand(batch, -1, -1).contiguous(), torch.full((batch,), VOCAB)
        sharpness = torch.full((batch,), 1.0 if noisy else math.inf)
        ids, values = ops.top_candidates(logits, positions, s.seeds, s.temperature, sharpness, COUNT)
        settings = positions, s.seeds, s.temperature, s.top_k, s.top_p, s.min_p, torch.ones(batch)
        parts = hidden.expand(batch, -1, -1), predecessors, successors, anchor, ids, values
        path, scores = ops.walk_candidates(*parts, *settings, stream)
        if after_anchor:
            first = [x.clone() for x in parts]
            first[0][:, 0] = first[0][:, 1]
            first[4][:, 0], first[5][:, 0] = ids[:, 1], values[:, 1]
            scores[:, 1] = ops.walk_candidates(*first, *settings, stream)[1][:, 0]
        return path, rejection.walk_probabilities(path, ids, scores, VOCAB)

    return propose


def best_path(draft):
    """Return a function that drafts the pair of tokens with the best sum of noisy scores."""
    hidden, predecessors, successors = selector(0)
    ids = draft.topk(COUNT, -1).indices  # [2, COUNT]

    def scores(slot, before):
        return draft[slot, ids[slot]] + (predecessors[before] * hidden[0, slot] * successors[ids[slot]]).sum(-1)

    first, second = scores(0, VOCAB), torch.stack([scores(1, before) for before in ids[0]])

    def propose(sampling: Sampling, positions: torch.Tensor):
        batch = len(positions)
        noise = reference.gumbel_noise_of(ids.expand(batch, -1, -1), sampling.seeds, positions, rejection.DRAFT)
        sums = (first + noise[:, 0])[:, :, None] + second + noise[:, 1, None]
        best = sums.flatten(1).argmax(-1)
        path = torch.stack([ids[0][best // COUNT], ids[1][best % COUNT]], 1)
        drawn = torch.stack([first.expand(batch, -1), second[best // COUNT]], 1)
        return path, rejection.walk_probabilities(path, ids.expand(batch, -1, -1), drawn, VOCAB)

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

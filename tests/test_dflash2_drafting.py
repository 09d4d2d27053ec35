"""Test what a DFlash 2 drafter's selector drafts: its paths, their noise, and what cannot be combined with it."""

import math

import pytest
import torch
from baseline import prompt
from families import make_draft

import dflash
from dflash import ops
from dflash.drafter import PairWeights
from dflash.ops import reference
from dflash.proposers import LinkedPredictions, Predictions
from dflash.sampling import RejectionAcceptance, Sampling, SamplingArguments

VOCAB, DRAFTS, RANK, TOP_K, BATCH = 23, 6, 4, 5, 3


def pairs(batch: int = BATCH, scale: float = 1.0) -> PairWeights:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, VOCAB, RANK, generator=generator)
    return PairWeights(a, torch.randn(batch, DRAFTS, RANK, generator=generator), b * scale)


def some_logits(batch: int = BATCH) -> torch.Tensor:
    return 2 * torch.randn(batch, DRAFTS, VOCAB, generator=torch.Generator().manual_seed(2))


def sampling(temperature: float, batch: int = BATCH, **more) -> Sampling:
    out = Sampling.create(batch)
    out.set_(slice(batch), SamplingArguments(temperature, seed=7, **more))
    return out


POSITIONS, ANCHOR = torch.arange(DRAFTS) + torch.tensor([[4], [90], [11]]), torch.tensor([3, 0, VOCAB - 1])


def walked(logits, weights: PairWeights, candidates, noise, factor):
    """Walk one block token by token in Python: the oracle. ``candidates`` are sets of ids, one per position."""
    path, previous = [], None
    for j, among in enumerate(candidates):
        previous = int(ANCHOR[0]) if previous is None else previous
        scores = {
            c: factor
            * float(
                logits[j, c] + (weights.predecessors[previous] * weights.queries[0, j] * weights.successors[c]).sum()
            )
            + float(noise[j, c])
            for c in among
        }
        previous = max(sorted(scores), key=lambda c: scores[c])
        path.append(previous)
    return path


@pytest.mark.parametrize("sharpness", [math.inf, 2.0, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_paths_equal_the_oracle(temperature, sharpness):
    """Candidates are those with the best noisy logits."""
    logits, weights, s = some_logits(), pairs(), sampling(temperature, draft_sharpness=sharpness)
    predictions = LinkedPredictions(logits, weights, ANCHOR, TOP_K)
    path = predictions.draw(POSITIONS, s)
    assert path.shape == (BATCH, DRAFTS)
    noise, factor = torch.zeros_like(logits[0]), 1.0
    if temperature > 0 and sharpness < math.inf:
        noise = reference.gumbel_noise(s.seeds, POSITIONS, VOCAB)[0]
        factor = sharpness / temperature
    candidates = [set(row.topk(TOP_K).indices.tolist()) for row in factor * logits[0] + noise]
    assert path[0].tolist() == walked(logits[0], weights, candidates, noise, factor)
    assert path[0].tolist() != predictions.logits[0].argmax(-1).tolist(), "the pairs should matter"


@pytest.mark.parametrize("sharpness", [math.inf, 2.0, 1.0])
def test_a_selector_without_pair_scores_draws_what_rows_on_their_own_draw(sharpness):
    s, logits = sampling(0.8, draft_sharpness=sharpness), some_logits()
    linked = LinkedPredictions(logits, pairs(scale=0.0), ANCHOR, TOP_K)
    assert torch.equal(linked.draw(POSITIONS, s), Predictions(logits).draw(POSITIONS, s))


def test_a_row_of_nan_ends_its_path_only():
    logits = some_logits()
    logits[1, 2, 5] = math.nan
    s = sampling(1.0)
    path = LinkedPredictions(logits, pairs(), ANCHOR, TOP_K).draw(POSITIONS, s)
    assert path[1, 2:].eq(-1).all()
    assert path[1, :2].ge(0).all()
    assert path[[0, 2]].ge(0).all()


def test_known_tokens_stay_and_precede_the_next():
    logits, weights, s = some_logits(), pairs(), sampling(0.0)
    predictions = LinkedPredictions(logits, weights, ANCHOR, TOP_K)
    known, drafts = torch.zeros(BATCH, DRAFTS, dtype=torch.bool), torch.zeros(BATCH, DRAFTS, dtype=torch.int64)
    known[0, 2], drafts[0, 2] = True, 17
    path = predictions.fix(known, drafts).draw(POSITIONS, s)
    candidates = [set(row.topk(TOP_K).indices.tolist()) for row in logits[0]]
    candidates[2] = {17}
    assert path[0].tolist() == walked(logits[0], weights, candidates, torch.zeros_like(logits[0]), 1.0)
    assert torch.equal(path[1:], predictions.draw(POSITIONS, s)[1:])


def test_rejection_remembers_the_distribution_given_the_draft_before():
    logits, weights, s = some_logits(), pairs(), sampling(0.7)
    acceptance = RejectionAcceptance(BATCH, DRAFTS, VOCAB)
    drafts = LinkedPredictions(logits, weights, ANCHOR, TOP_K).draw_for(acceptance, POSITIONS, s)
    q, previous = acceptance.draft_probabilities, torch.cat([ANCHOR[:, None], drafts[:, :-1]], 1)
    pair = torch.einsum("bjr,vr->bjv", weights.predecessors[previous] * weights.queries, weights.successors)
    plain = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, logits.topk(TOP_K, -1).indices, True)
    expected = torch.where(plain, (logits + pair) / 0.7, -math.inf).softmax(-1)
    torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-6)
    assert q.gather(-1, drafts[..., None]).gt(0).all()


def watched(generator: dflash.Generator) -> list[torch.Tensor]:
    """Return a list that gets the drafts ``[batch, drafts]`` of every step from now on."""
    propose, drafted = generator.engine.proposer.propose, []

    def watch(state):
        block = propose(state)
        drafted.append(block.ids[:, 1:].clone())
        return block

    generator.engine.proposer.propose = watch
    return drafted


BANS = [
    {"denoise_steps": 3},
    {"temperature": 1.0, "seed": 5, "draft_sharpness": 1.0},
    {"temperature": 1.0, "seed": 5, "draft_sharpness": math.inf},
    {"temperature": 1.0, "seed": 5, "acceptance": "rejection"},
]


@pytest.mark.parametrize("more", [{}, *BANS], ids=str)
def test_banned_tokens_leave_their_places_to_other_candidates(target, more, monkeypatch):
    generator = dflash.Generator(target, make_draft(target, "DFlash2"), max_length=60)
    p, drafted = prompt(21), watched(generator)
    generator.generate(p[None], max_new_tokens=12, **more)
    banned = torch.cat(drafted).unique().tolist()
    drafted.clear()
    taken, top = [], ops.top_candidates
    monkeypatch.setattr(ops, "top_candidates", lambda *a: taken.append((out := top(*a))[0]) or out)
    generator.generate(p[None], max_new_tokens=12, suppress_tokens=banned, **more)
    again, candidates = (set(torch.cat([x.flatten() for x in ids]).tolist()) for ids in (drafted, taken))
    assert len(banned) > 5
    assert not again & {-1, *banned}
    # A known token of `denoise_steps` is its position's only candidate, the others' ids are -1.
    assert not candidates & ({*banned} if "denoise_steps" in more else {-1, *banned})


def test_a_tree_holds_the_best_prefixes_by_the_selectors_probabilities(target):
    """A token's probability is that of a softmax in which pairs move candidates. All prefixes are spelled out."""
    generator = dflash.Generator(target, make_draft(target, "DFlash2"), max_length=60, tree=20, block_size=4)
    seen, predict, propose = [], generator.engine.tree.predict, generator.engine.tree.propose
    generator.engine.tree.predict = lambda *a: seen.append(predict(*a)) or seen[-1]
    generator.engine.tree.propose = lambda state: seen.append(propose(state)) or seen[-1]
    generator.generate(prompt(21)[None], max_new_tokens=8)
    for predictions, block in zip(seen[::2], seen[1::2], strict=True):
        weights, prefixes = predictions.pairs, {(int(block.ids[0, 0]),): 0.0}
        for j, logits in enumerate(predictions.logits[0]):
            ids = logits.topk(5).indices
            for path in [path for path in prefixes if len(path) == j + 1]:
                moved, query = logits.clone(), weights.predecessors[path[-1]] * weights.queries[0, j]
                moved[ids] += weights.successors[ids] @ query
                for token, score in zip(ids.tolist(), moved.log_softmax(-1)[ids].tolist(), strict=True):
                    prefixes[(*path, token)] = prefixes[path] + score
        parents, drafted = block.tree.parents[0].tolist(), []
        for token, parent in zip(block.ids[0].tolist(), parents, strict=True):
            drafted.append((*(drafted[parent] if parent >= 0 else ()), token))
        assert drafted == sorted(prefixes, key=lambda path: (-prefixes[path], len(path)))[:20]

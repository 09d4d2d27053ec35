import itertools
import math

import pytest
import scipy.stats
import torch
from test_select_tokens import draw_case as draw_rows
from test_select_tokens import parameters

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

INFINITY = math.inf


def eighths(g, *shape, high=16):
    """Multiples of 1/8: their sums of products are exact, and so have one order."""
    return torch.randint(-high, high + 1, shape, generator=g) / 8


def draw_case(seed, slots=4, count=5, codes=40, rank=8, batch=6):
    """The arguments of a walk whose scores are exact in float32: candidates with holes, parameters of every kind."""
    g = torch.Generator().manual_seed(seed)
    _, positions, seeds, temperature, top_k, top_p, min_p, _ = draw_rows(0, 10, batch, max(slots, 1))
    ids = torch.rand(batch, slots, codes, generator=g).argsort(-1)[..., :count].contiguous()
    logits = eighths(g, *ids.shape)
    hole = torch.rand(ids.shape, generator=g) < 0.1
    ids, logits = torch.where(hole, -1, ids), torch.where(hole, -INFINITY, logits)
    sharpness = torch.tensor([INFINITY, 2.0, 1.0, 0.0, math.nan])[torch.randint(5, (batch,), generator=g)]
    return [
        eighths(g, batch, slots, rank), eighths(g, codes, rank, high=4), eighths(g, codes, rank, high=4),
        torch.randint(codes, (batch,), generator=g), ids, logits, positions[:, :slots].contiguous(), seeds, temperature,
        top_k, top_p, min_p, sharpness,
    ]  # fmt: skip


def in_dtype(case, dtype):
    return [x.to(dtype) for x in case[:3]] + case[3:]


def assert_equal(have, want):
    for ours, theirs in zip(have, want, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("slots", "count", "rank"), [(1, 1, 1), (4, 5, 8), (3, 33, 20), (2, 128, 40), (15, 16, 7)])
def test_kernel_equals_twin(slots, count, rank, dtype, kernels):
    for seed in range(4):
        case = in_dtype(draw_case(seed, slots, count, 150, rank), dtype)
        want = reference.walk_candidates(*case, seed % 2)
        assert_equal(kernels.walk_candidates(*case, seed % 2), want)
        assert (want[0] >= 0).any()


def test_scores_are_as_exact_as_float32(dtype, implementation):
    """At the published rank, with hidden states and codebooks that do not add up exactly."""
    g = torch.Generator().manual_seed(0)
    case = draw_case(1, 6, 16, 500, 256)
    case[:3] = [
        torch.randn(x.shape, generator=g).to(dtype) * scale for x, scale in zip(case, (1, 0.2, 0.2), strict=False)
    ]
    case[8] = torch.zeros(6)
    path, scores = implementation.walk_candidates(*case)
    exact = reference.walk_candidates(*(x.double() for x in case[:3]), *case[3:])
    assert torch.equal(path, exact[0])
    assert torch.allclose(scores, exact[1], rtol=1e-5, atol=1e-5)
    assert exact[1].isfinite().any()


def test_each_slot_takes_the_token_that_select_tokens_takes_of_the_candidates(kernels):
    """With the scores laid out over the whole vocabulary: noise of token ids, filters and ties are the same."""
    for seed in range(8):
        case = draw_case(seed, 3, 9)
        hidden, predecessors, successors, previous, ids, logits, positions, *settings = case
        path, _ = kernels.walk_candidates(*case)
        for slot in range(3):
            own = ids[:, slot]
            product = predecessors[previous.clamp(min=0)] * hidden[:, slot]
            score = logits[:, slot] + (product[:, None] * successors[own.clamp(min=0)]).sum(-1)
            spread = torch.full((6, 41), -INFINITY).scatter_(-1, own.where(own >= 0, 40), score)[:, None, :40]
            want = ops.select_tokens(spread.contiguous(), positions[:, slot, None].contiguous(), *settings)[:, 0]
            want = torch.where((own >= 0).any(-1) & (previous >= 0), want, -1)
            assert torch.equal(path[:, slot], want)
            previous = want


def test_a_greedy_path_is_the_reference_package_s(reference_package, kernels):
    config = type("Config", (), {"vocab_size": 90, "hidden_size": 24})()
    config.dflash_config = {"selector_rank": 8, "selector_top_k": 5}
    torch.manual_seed(0)
    selector = reference_package.CandidateSelector(config)
    hidden, logits, anchor = torch.randn(3, 7, 24), torch.randn(3, 7, 90), torch.tensor([3, 80, 41])
    with torch.no_grad():
        want = selector.select(hidden, logits, anchor, 0.0)[0]
        projected = selector.hidden_projection(hidden)
    positions = torch.arange(7).repeat(3, 1)
    seeds, temperature, *rest = parameters(3, 0, 0.0)
    ids, values = kernels.top_candidates(logits, positions, seeds, temperature, rest[-1], 5)
    codebooks = selector.predecessor_codebook.weight.detach(), selector.successor_codebook.weight.detach()
    settings = positions, seeds, temperature, *rest
    path, _ = kernels.walk_candidates(projected, *codebooks, anchor, ids, values, *settings)
    assert torch.equal(path, want)
    alone = kernels.walk_candidates(projected * 0, *codebooks, anchor, ids, values, *settings)[0]
    assert not torch.equal(alone, want)  # the codebooks matter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_codebooks_of_zeros_noisy_candidates_give_what_select_tokens_gives(temperature, kernels):
    g = torch.Generator().manual_seed(3)
    logits, positions, seeds = torch.randn(9, 5, 300, generator=g) * 3, torch.arange(45).view(9, 5), torch.arange(9)
    settings = parameters(9, seeds, temperature, sharpness=torch.tensor([INFINITY, 2.0, 1.0]).repeat(3))
    ids, values = kernels.top_candidates(logits, positions, *settings[:2], settings[-1], 6)
    zeros = torch.zeros(300, 4)
    path, _ = kernels.walk_candidates(torch.randn(9, 5, 4), zeros, zeros, seeds, ids, values, positions, *settings)
    assert torch.equal(path, ops.select_tokens(logits, positions, *settings))


def test_plain_paths_follow_the_selector_s_markov_chain(kernels, request):
    """At sharpness 1: every path of two tokens is as frequent as the product of its softmaxes."""
    batch = 2000 if "emulated" in request.node.name else 40000
    g = torch.Generator().manual_seed(5)
    hidden, codebooks = torch.randn(1, 2, 3, generator=g), torch.randn(2, 6, 3, generator=g) * 0.8
    logits = torch.randn(1, 2, 6, generator=g)
    one = parameters(1, 0, 0.8)
    plain = torch.full((1,), INFINITY)
    ids, values = ops.top_candidates(logits, torch.zeros(1, 2, dtype=torch.int64), *one[:2], plain, 4)

    # 1. The chain
    def law(slot, previous):
        pairs = (codebooks[0, previous] * hidden[0, slot] * codebooks[1, ids[0, slot]]).sum(-1)
        return torch.softmax((values[0, slot] + pairs).double() / 0.8, -1)

    paths = [*itertools.product(range(4), range(4))]
    first = law(0, 2)
    want = torch.stack([first[a] * law(1, ids[0, 0, a])[b] for a, b in paths])

    # 2. What is drawn
    settings = parameters(batch, torch.arange(batch) * 7919, 0.8)
    many = [x.expand(batch, *x.shape[1:]).contiguous() for x in (hidden, ids, values, torch.tensor([[10, 11]]))]
    anchor = torch.full((batch,), 2)
    path, scores = kernels.walk_candidates(many[0], *codebooks, anchor, *many[1:], *settings)
    drawn = torch.stack([(path == torch.stack([ids[0, 0, a], ids[0, 1, b]])).all(-1) for a, b in paths])
    assert scipy.stats.chisquare(drawn.sum(-1).numpy(), (want * batch).numpy()).pvalue > 1e-3
    assert torch.allclose(torch.softmax(scores[0, 0], -1).double(), first, atol=1e-6)

    # 3. The test can fail: logits without the pairs have another law
    wrong = torch.softmax(values[0].double() / 0.8, -1)
    wrong = torch.stack([wrong[0, a] * wrong[1, b] for a, b in paths])
    assert scipy.stats.chisquare(drawn.sum(-1).numpy(), (wrong * batch).numpy()).pvalue < 1e-6


def test_filters_keep_what_they_keep_of_the_candidates(implementation):
    case = draw_case(2, 2, 9)
    case[8], case[12] = torch.full((6,), 0.7), torch.ones(6)
    case[9], case[10], case[11] = (
        torch.tensor(x) for x in ([3, 0, 0, 2, 0, 1], [1.0, 0.6, 1, 0.5, 1, 1], [0, 0, 0.2, 0, 0, 0])
    )
    filtered = implementation.walk_candidates(*case)[1][:, 0]
    case[9:12] = torch.zeros(6, dtype=torch.int64), torch.ones(6), torch.zeros(6)
    free = implementation.walk_candidates(*case)[1][:, 0]
    best, kept = free.amax(-1, keepdim=True), filtered > -INFINITY
    assert torch.equal(filtered, torch.where(kept, free, -INFINITY))
    p = torch.softmax(free, -1)
    assert kept[0].sum() == 3
    assert p[1][kept[1]].sum() >= 0.6 > p[1][kept[1]].sum() - p[1][kept[1]].min()
    assert torch.equal(kept[2], (free[2] - best[2]).exp() >= 0.2)
    assert torch.equal(kept[4], free[4] > -INFINITY)
    assert torch.equal(kept[5], free[5] == best[5])


def test_temperature_zero_and_infinite_sharpness_take_the_best_score(implementation):
    case = draw_case(3, 4, 6)
    case[8], case[12] = torch.tensor([0.0, -1.0, math.nan, 9.0, 5.0, 0.0]), torch.tensor([1.0] * 3 + [INFINITY] * 3)
    path, scores = implementation.walk_candidates(*case)
    at_best = torch.where(scores == scores.amax(-1, keepdim=True), case[4], 10**9).amin(-1)
    assert torch.equal(path, at_best)
    case[12] = torch.ones(6)
    assert not torch.equal(implementation.walk_candidates(*case)[0][3:5], path[3:5])


def test_a_path_ends_where_there_is_no_candidate_or_nan(implementation):
    case = draw_case(4, 4, 5)
    clean = implementation.walk_candidates(*case)
    assert (clean[0] >= 0).all()
    case[0], case[4], case[5] = (x.clone() for x in (case[0], case[4], case[5]))
    case[0][0, 1, 3] = math.nan
    case[4][1, 2] = -1
    case[5][2, 0] = -INFINITY
    case[5][3, 3, 0], case[4][3, 3, 0] = math.nan, 7
    case[4][4, 1] = 40 + torch.arange(5)
    path, scores = implementation.walk_candidates(*case)
    for row, end in enumerate([1, 2, 0, 3, 1, 4]):
        assert torch.equal(path[row, :end], clean[0][row, :end])
        assert torch.equal(scores[row, :end], clean[1][row, :end])
        assert (path[row, end:] == -1).all()
        assert (scores[row, end:] == -INFINITY).all()


def test_ids_past_the_codebooks_are_no_candidates(implementation):
    case = draw_case(5, 3, 5)
    case[4][..., 0], case[5][..., 0] = torch.tensor([40, 2**40, -7, 2**62, 41, -(2**63)])[:, None], 1e6
    path, scores = implementation.walk_candidates(*case)
    assert (scores[..., 0] == -INFINITY).all()
    assert ((path >= -1) & (path < 40)).all()
    case[4][..., 0] = -1
    assert_equal(implementation.walk_candidates(*case), (path, scores))


def test_an_anchor_outside_the_codebook_adds_nothing(implementation):
    case = draw_case(6, 1, 5)
    case[3] = torch.tensor([-1, 40, 2**62, -(2**63), 10**6, 41])
    path, scores = implementation.walk_candidates(*case)
    case[0] = torch.zeros_like(case[0])
    case[3] = torch.zeros_like(case[3])
    assert_equal(implementation.walk_candidates(*case), (path, scores))


def test_equal_scores_go_to_the_lower_id(implementation):
    case = draw_case(8, 2, 4)
    case[0], case[8] = torch.zeros_like(case[0]), torch.zeros(6)
    case[4], case[5] = torch.tensor([9, 4, 30, 6]).expand(6, 2, 4), torch.tensor([1.0, 2, 2, 2]).expand(6, 2, 4)
    assert (implementation.walk_candidates(*case)[0] == 4).all()
    case[5] = torch.full((6, 2, 4), INFINITY)
    case[8] = torch.ones(6)
    assert (implementation.walk_candidates(*case)[0][case[12].isinf()] == 4).all()


def test_each_stream_has_its_own_noise(kernels):
    case = draw_case(9, 6, 12)
    case[8], case[9], case[10], case[11] = parameters(6, 0, 5.0)[1:5]
    case[12] = torch.ones(6)
    paths = [kernels.walk_candidates(*case, stream)[0] for stream in (0, 1, 2)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(paths, 2))

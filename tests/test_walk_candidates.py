import itertools
import math

import pytest
import torch
from op_checks import same
from test_select_tokens import draw_case as draw_rows
from test_select_tokens import parameters
from test_top_candidates import assert_equal

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


@pytest.mark.parametrize(("slots", "count", "rank"), [(1, 1, 1), (4, 5, 8), (3, 33, 20), (2, 128, 40), (15, 16, 7)])
def test_kernel_equals_twin(slots, count, rank, dtype, kernels):
    for seed in range(4):
        case = in_dtype(draw_case(seed, slots, count, 150, rank), dtype)
        want = reference.walk_candidates(*case, seed % 2)
        assert_equal(kernels.walk_candidates(*case, seed % 2), want)
        assert (want[0] >= 0).any()


def draw_links(seed, slots=4, count=5, codes=40, rank=8, batch=6):
    """The arguments of links, whose pairs are exact in float32; the scores leave something to other tokens."""
    case = draw_case(seed, slots, count, codes, rank, batch)
    return [*case[:5], case[5] / 4 - 4 - math.log(count)]


@pytest.mark.parametrize(("slots", "count", "rank"), [(1, 1, 1), (4, 5, 8), (3, 33, 20), (2, 128, 40), (15, 16, 7)])
def test_links_equal_the_twin_s(slots, count, rank, dtype, kernels):
    for seed in range(2):
        case = in_dtype(draw_links(seed, slots, count, 150, rank), dtype)
        links, order = kernels.link_candidates(*case)
        wanted, places = reference.link_candidates(*case)
        torch.testing.assert_close(links, wanted, rtol=1e-5, atol=1e-5)
        assert same(order[wanted > -INFINITY], places[wanted > -INFINITY])
        assert torch.equal(order.sort(-1).values, torch.arange(count, dtype=torch.uint8).expand_as(order))


def test_links_are_log_probabilities_over_the_vocabulary_in_which_candidates_are_moved(implementation):
    """As spelled out over all tokens, from the drafter's logits on."""
    g, batch, slots, vocab, count = torch.Generator().manual_seed(0), 2, 3, 30, 6
    hidden, (first, second) = torch.randn(batch, slots, 4, generator=g), torch.randn(2, vocab, 4, generator=g)
    logits, anchor, zeros = torch.randn(batch, slots, vocab, generator=g) * 2, torch.tensor([3, 9]), torch.zeros(2)
    positions = torch.arange(slots).repeat(batch, 1)
    ids, scores = implementation.tree_candidates(logits, positions, zeros.long(), zeros, count)
    links, order = implementation.link_candidates(hidden, first, second, anchor, ids, scores)
    for b, slot, before in itertools.product(range(batch), range(slots), range(count)):
        own, previous = ids[b, slot], int(ids[b, slot - 1, before] if slot else anchor[b])
        moved = logits[b, slot].clone()
        moved[own] += (first[previous] * hidden[b, slot] * second[own]).sum(-1)
        wanted = moved.log_softmax(-1)[own].sort(descending=True, stable=True)
        torch.testing.assert_close(links[b, slot, before], wanted.values)
        assert order[b, slot, before].tolist() == wanted.indices.tolist()


def test_a_list_with_nan_or_without_a_token_before_has_no_links(implementation):
    case = draw_links(4, 3, 5)
    clean, order = implementation.link_candidates(*case)
    hidden, ids, scores = case[0].clone(), case[4].clone(), case[5].clone()
    hidden[0, 1, 3], ids[1, 1, 2], scores[2, 0] = math.nan, 40, -INFINITY
    links, again = implementation.link_candidates(hidden, *case[1:4], ids, scores)
    assert (links[0, 1] == -INFINITY).all()
    assert (links[1, 2, 2] == -INFINITY).all()
    assert (links[1, 1] > -INFINITY).sum(-1).le(4).all()
    assert (links[2, 0] == -INFINITY).all()
    for b, slots in ((0, [0, 2]), (1, [0]), (2, [1, 2]), (3, [0, 1, 2])):
        assert torch.equal(links[b, slots], clean[b, slots])
        assert torch.equal(again[b, slots], order[b, slots])


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

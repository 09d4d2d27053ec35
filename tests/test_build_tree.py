import math

import numpy as np
import pytest
import torch
from op_checks import same

from dflash import ops

pytestmark = pytest.mark.op

INFINITY = math.inf


def draw_case(seed, batch=4, depths=6, count=9, kind="apart", linked=False):
    """An anchor, and candidates with distinct ids per depth and descending scores; if linked in a list per parent."""
    g = torch.Generator().manual_seed(seed)
    vocab, shape = 3 * count, (batch, depths, *[count] * (1 + linked))
    ids = torch.rand(batch, depths, vocab, generator=g).argsort(-1)[..., :count].contiguous()
    scores = -torch.rand(shape, generator=g) * 5
    if kind == "ties":
        scores = scores.round()
    if kind == "tiny":  # absorbed by the parent's score
        scores = torch.where(torch.rand(shape, generator=g) < 0.5, scores * 1e-8, scores)
    if kind == "few":
        scores = scores.masked_fill(torch.rand(shape, generator=g) < 0.7, -INFINITY)
    scores, anchor = scores.sort(-1, descending=True).values, torch.randint(vocab, (batch,), generator=g)
    if linked:
        return anchor, ids, scores, torch.rand(shape, generator=g).argsort(-1).to(torch.uint8)
    return anchor, torch.where(scores == -INFINITY, -1, ids), scores


def slow_tree(anchor, ids, scores, rows, order=None):
    """Take the first of all children of the rows so far, sorted by the whole key; for one sequence."""
    nodes, children, count = [(0.0, 0, anchor, -1, 0)], [], len(ids[0])  # score, depth, id, parent, place
    while len(nodes) < rows:
        parent, (score, depth, _, _, place) = len(nodes) - 1, nodes[-1]
        own_scores, places = (), range(count)
        if depth < len(ids):
            own_scores = scores[depth] if order is None else scores[depth][place]
            places = places if order is None else order[depth][place]
        for own, place in zip(own_scores, places, strict=False):
            if ids[depth][place] < 0 or not own > -INFINITY:
                break
            total = float(np.float32(score) + np.float32(own))
            children.append((-total, depth + 1, ids[depth][place], parent, place))
        if not children:
            break
        first = min(children)
        children.remove(first)
        nodes.append((-first[0], *first[1:]))
    return [node[:4] for node in nodes] + [(-INFINITY, 0, -1, -1)] * (rows - len(nodes))


def nodes_of(tree, b):
    ids, parents, depth, _, scores = (x[b].tolist() for x in tree)
    return list(zip(scores, depth, ids, parents, strict=True))


def check(build, case, rows):
    tree = build(*case[:3], rows, *case[3:])
    for b in range(len(case[0])):
        candidates = [x[b].tolist() for x in case]
        assert nodes_of(tree, b) == slow_tree(*candidates[:3], rows, *candidates[3:])
    assert_consistent(*tree)


def assert_consistent(ids, parents, depth, ancestors, scores):
    """Ancestors and depth follow from the parents, and a parent comes before its children."""
    batch, rows = ids.shape
    assert ancestors.shape == (batch, rows, -(-rows // 64))
    for b in range(batch):
        for row, parent in enumerate(parents[b].tolist()):
            assert parent < row
            above = [ancestors_of(ancestors[b, parent]), depth[b, parent] + 1] if parent >= 0 else [set(), 0]
            assert ancestors_of(ancestors[b, row]) == above[0] | {row}
            assert depth[b, row] == above[1]
        pads = scores[b] == -INFINITY
        assert torch.equal(pads, (ids[b] < 0) & (parents[b] < 0))


def ancestors_of(words):
    return {64 * w + bit for w, word in enumerate(words.tolist()) for bit in range(64) if word >> bit & 1}


@pytest.mark.parametrize("kind", ["apart", "ties", "tiny", "few"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_tree_is_what_sorting_all_prefixes_gives(kind, linked, implementation):
    for seed, (rows, depths, count) in enumerate([(2, 1, 1), (16, 15, 16), (13, 3, 2), (32, 4, 9), (40, 7, 5)]):
        check(implementation.build_tree, draw_case(seed, 2, depths, count, kind, linked), rows)


def test_places_past_the_candidates_are_the_last_one(kernels):
    anchor, ids, scores, order = draw_case(3, 2, 4, 5, linked=True)
    want = kernels.build_tree(anchor, ids, scores, 20, order)
    beyond = torch.where(order == 4, 200, order)
    assert same(kernels.build_tree(anchor, ids, scores, 20, beyond), want)


@pytest.mark.parametrize(
    ("shape", "rows"), [*(((d, c), 128) for d, c in ((15, 32), (1, 128), (127, 2), (2, 4))), ((7, 11), 65)]
)
def test_large_trees_and_trees_of_one_depth(shape, rows, kernels):
    for kind in ("apart", "ties"):
        check(kernels.build_tree, draw_case(9, 1, *shape, kind), rows)


def test_more_candidates_than_shared_memory_holds(kernels):
    for shape, linked in (((40, 80), False), ((15, 32), True)):
        anchor, ids, scores, *order = draw_case(7, 2, *shape, "ties", linked)
        want = ops.build_tree(anchor, ids, scores, 128, *order)
        assert same(kernels.build_tree(anchor, ids, scores, 128, *order), want)


def test_equal_scores_go_by_depth_then_id_then_parent(implementation):
    anchor, certain = torch.tensor([7]), [0.0, 0.0]
    ids = torch.tensor([[[5, 3], [9, 8], [6, 2]]])
    tree = implementation.build_tree(anchor, ids, torch.tensor([[certain] * 3]), 9)
    assert tree[0].tolist() == [[7, 3, 5, 8, 8, 9, 9, 2, 2]]
    assert tree[1].tolist() == [[-1, 0, 0, 1, 2, 1, 2, 3, 4]]
    assert tree[2].tolist() == [[0, 1, 1, 2, 2, 2, 2, 3, 3]]


def test_siblings_that_rounding_makes_equal_go_by_id(implementation):
    ids = torch.tensor([[[4, -1, -1], [9, 5, 7]]])
    scores = torch.tensor([[[-100.0, -INFINITY, -INFINITY], [-1e-9, -2e-9, -3e-9]]])
    tree = implementation.build_tree(torch.tensor([0]), ids, scores, 5)
    assert tree[0].tolist() == [[0, 4, 5, 7, 9]]
    assert tree[4].tolist() == [[0.0, -100.0, -100.0, -100.0, -100.0]]


def test_a_depth_ends_at_a_negative_id_and_at_a_score_of_nan(implementation):
    ids = torch.tensor([[[1, 2, 3, 4]], [[1, -1, 3, 4]]])
    scores = torch.tensor([[[-1.0, -2.0, math.nan, -3.0]], [[-1.0, -2.0, -3.0, -4.0]]])
    tree = implementation.build_tree(torch.tensor([8, 9]), ids, scores, 4)
    assert tree[0].tolist() == [[8, 1, 2, -1], [9, 1, -1, -1]]
    assert tree[2].tolist() == [[0, 1, 1, 0], [0, 1, 0, 0]]


def test_sequences_do_not_meet(kernels):
    anchor, ids, scores = draw_case(1, 6, 5, 8)
    whole = kernels.build_tree(anchor, ids, scores, 20)
    scores = scores.clone()
    scores[::2] = math.nan
    spoilt = kernels.build_tree(anchor, ids, scores, 20)
    for before, after in zip(whole, spoilt, strict=True):
        assert torch.equal(before[1::2], after[1::2])
    assert (spoilt[0][::2, 1:] == -1).all()

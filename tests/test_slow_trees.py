"""The trees of the tests are what they say."""

import itertools

import torch
from trees import choices_along, from_parents, heap_tree, path_to, random_tree


def sorted_tree(anchor, ids, scores, rows):
    """Every prefix of one sequence, sorted; a tie in all else is decided by the parents' order. Ids and parents."""
    depths, count = len(ids), len(ids[0])
    keys = {(): (0.0, 0, anchor)}
    for depth in range(depths):
        for ranks in itertools.product(range(count), repeat=depth + 1):
            parent = keys.get(ranks[:-1])
            if parent and ids[depth][ranks[-1]] >= 0:
                score = torch.tensor(-parent[0]) + torch.tensor(scores[depth][ranks[-1]])  # in float32
                keys[ranks] = (-float(score), depth + 1, ids[depth][ranks[-1]], parent)
    best = sorted(keys, key=keys.get)[:rows]
    missing = rows - len(best)
    tokens = [keys[ranks][2] for ranks in best] + [-1] * missing
    return tokens, [best.index(ranks[:-1]) if ranks else -1 for ranks in best] + [-1] * missing


def test_the_heap_takes_prefixes_in_sorted_order():
    g = torch.Generator().manual_seed(0)
    for seed in range(12):
        ids = torch.stack([torch.randperm(9, generator=g)[:3] for _ in range(6)]).view(2, 3, 3)
        scores = -torch.randint(0, (3, 1000)[seed % 2], (2, 3, 3), generator=g) / 7.0
        scores, order = scores.sort(descending=True)
        ids = ids.gather(2, order)
        if seed % 3 == 0:
            ids[0, 1, 1:], scores[0, 1, 1:] = -1, -torch.inf
        anchor = torch.tensor([5, 6])
        for rows in (2, 16, 45):
            tree, totals = heap_tree(anchor, ids, scores, rows)
            for b in range(2):
                want = sorted_tree(int(anchor[b]), ids[b].tolist(), scores[b].tolist(), rows)
                assert (tree.ids[b].tolist(), tree.parents[b].tolist()) == want
            assert torch.equal(totals.isinf(), tree.ids < 0)
            assert (totals.diff() <= 0)[tree.ids[:, 1:] >= 0].all()


def test_ancestors_are_the_path_and_the_row_itself():
    g = torch.Generator().manual_seed(1)
    tree = random_tree(g, 3, 128, 20, missing=9)
    for b, row in itertools.product(range(3), range(128)):
        bits = [j for j in range(128) if tree.ancestors[b, row, j // 64] >> j % 64 & 1]
        assert bits == path_to(tree.parents[b].tolist(), row)
        assert tree.depth[b, row] == len(bits) - 1
    assert tree.depth.max() <= 20
    assert (tree.ids[:, -1] < 0).any()
    assert from_parents(tree.ids.tolist(), tree.parents.tolist()).ancestors.equal(tree.ancestors)


def test_siblings_differ_and_choices_follow_the_path():
    g = torch.Generator().manual_seed(2)
    tree = random_tree(g, 4, 64, 8, vocab=12)
    choices, paths = choices_along(g, tree)
    for b, path in enumerate(paths):
        nodes = [*zip(tree.parents[b].tolist(), tree.ids[b].tolist(), strict=True)]
        assert len({*nodes}) == 64
        assert choices[b, path[:-1]].tolist() == tree.ids[b, path[1:]].tolist()
        assert (path[-1], int(choices[b, path[-1]])) not in nodes

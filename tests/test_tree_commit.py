"""The ops that keep the accepted path of a tree, together: compiled, and against a chain of the same tokens."""

import functools

import torch
from trees import chain, choices_along, random_tree

from dflash import ops

BATCH, ROWS, PATH_ROWS, CAPACITY, WIDTH = 3, 40, 16, 80, 24


def commit(ids, parents, choices, stops, limits, state, told, first, caches, features, context):
    ops.accept_path_(ids, parents, choices, stops, limits, *state, *told)
    path = told[0]
    ops.compact_kv_(path, state[2], first, caches[:2], caches[2:])
    ops.gather_rows_(features, path, context)


def draw(seed):
    """What `commit` takes, and the path that is to be accepted."""
    g = torch.Generator().manual_seed(seed)
    tree = random_tree(g, BATCH, ROWS, PATH_ROWS - 1)
    choices, paths = choices_along(g, tree)
    first = torch.tensor([3, 0, 9])
    # Tensors of their own: torch 2.11 loses what a compiled op writes to several views of one.
    zeros = functools.partial(torch.zeros, dtype=torch.int64)
    state = [zeros(BATCH, CAPACITY), first.clone(), zeros(BATCH), zeros(BATCH)]
    caches = [torch.randn(BATCH, 2, CAPACITY, 8, generator=g) for _ in range(4)]
    features, context = torch.randn(BATCH, ROWS, WIDTH, generator=g), torch.zeros(BATCH, PATH_ROWS, WIDTH)
    told, limits = [zeros(BATCH, PATH_ROWS) for _ in range(3)], torch.full((BATCH,), CAPACITY)
    call = [
        tree.ids, tree.parents, choices, torch.full((BATCH, 1), 999), limits, state, told, first, caches, features,
        context,
    ]  # fmt: skip
    return call, paths


def tensors(call):
    return [x for value in call for x in (value if isinstance(value, list) else [value])]


def test_one_compiled_graph_commits_as_the_ops_do():
    torch._dynamo.reset()
    compiled = torch.compile(commit, fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            (plain, _), (call, paths) = draw(seed), draw(seed)
            commit(*plain)
            compiled(*call)
            assert all(torch.equal(*pair) for pair in zip(tensors(plain), tensors(call), strict=True))
            assert call[5][2].tolist() == [len(path) for path in paths]


def test_what_is_kept_stands_as_if_the_path_had_been_a_chain():
    for seed in range(6):
        call, paths = draw(seed)
        ids, _, choices, *_, state, _, first, caches, features, context = call
        old = [cache.clone() for cache in caches]
        # 1. The chain of the accepted tokens, in a block of its own
        chains = [path + [0] * (PATH_ROWS - len(path)) for path in paths]
        chain_ids, posterior = (x.gather(1, torch.tensor(chains)) for x in (ids, choices))
        for b, path in enumerate(paths):
            chain_ids[b, len(path) :] = -1
        theirs = [x.clone() for x in state]
        ops.accept_prefix_(chain(chain_ids).ids, posterior, call[3], call[4], *theirs)
        # 2. The tree
        commit(*call)
        assert all(torch.equal(*pair) for pair in zip(state, theirs, strict=True))
        for b, path in enumerate(paths):
            assert torch.equal(context[b, : len(path)], features[b, path])
            slots, sources = (int(first[b]) + torch.tensor(rows) for rows in ([*range(len(path))], path))
            for cache, before in zip(caches, old, strict=True):
                assert torch.equal(cache[b, :, slots], before[b, :, sources])
                assert torch.equal(cache[b, :, : slots[0]], before[b, :, : slots[0]])
                assert torch.equal(cache[b, :, slots[-1] + 1 :], before[b, :, slots[-1] + 1 :])

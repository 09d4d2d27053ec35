import pytest
import torch
from op_checks import same

from dflash import ops
from dflash.cache import KVCache

pytestmark = pytest.mark.op

# Per layer: kv heads, head_dim, v_head_dim. Some rows are a multiple of 16 bytes, some are not.
LAYERS = {
    "alike": [(2, 16, 16)] * 3,
    "unlike": [(3, 128, 64), (1, 8, 8), (2, 256, 16)],
    "narrow": [(2, 3, 5), (1, 10, 7), (2, 40, 1)],
}


def make_caches(layers, batch, capacity, dtype):
    """Random caches of keys and of values."""
    g = torch.Generator().manual_seed(0)
    sizes = [[(heads, (k_dim, v_dim)[i]) for heads, k_dim, v_dim in layers] for i in range(2)]
    return [[torch.randn(batch, h, capacity, dim, generator=g).to(dtype) for h, dim in each] for each in sizes]


def draw_paths(seed, batch, rows, path_rows):
    """Ascending paths from row 0 and how many of their rows count; one in four is the spine."""
    g = torch.Generator().manual_seed(seed)
    paths = torch.arange(path_rows).repeat(batch, 1)
    for b in range(batch):
        if b % 4 != 3:
            paths[b, 1:] = (torch.randperm(rows - 1, generator=g)[: path_rows - 1] + 1).sort().values
    return paths, torch.randint(0, path_rows + 1, (batch,), generator=g)


def slow_compact(path, counts, first, caches):
    """The definition: read every slot that moves, then write."""
    caches = [cache.clone() for cache in caches]
    for cache in caches:
        old, capacity = cache.clone(), cache.shape[2]
        for b, (rows, count, start) in enumerate(zip(path.tolist(), counts.tolist(), first.tolist(), strict=True)):
            for j, row in enumerate(rows):
                if 1 <= j < count and row > j and start + j >= 0 and start + row < capacity:
                    cache[b, :, start + j] = old[b, :, start + row]
    return caches


def check(compact, path, counts, first, k_caches, v_caches):
    wanted = slow_compact(path, counts, first, k_caches + v_caches)
    k_caches, v_caches = ([cache.clone() for cache in caches] for caches in (k_caches, v_caches))
    assert compact(path, counts, first, k_caches, v_caches) is None
    assert same(k_caches + v_caches, wanted)


@pytest.mark.parametrize("kind", LAYERS)
def test_random_paths_against_the_definition(kind, dtype, implementation):
    for seed, (rows, path_rows) in enumerate(((2, 2), (16, 16), (64, 16), (128, 8), (40, 33), (5, 1))):
        path, counts = draw_paths(seed, 5, rows, path_rows)
        first = torch.tensor([0, 3, 150 - rows, 150, 7])  # of the third the last rows fill the cache
        check(implementation.compact_kv_, path, counts, first, *make_caches(LAYERS[kind], 5, 150, dtype))


def test_all_that_a_cache_holds_moves_down(implementation):
    """As in a cache that slides: the first slot too, by less than what stays, by more than there is, or not at all."""
    path, counts = torch.arange(131) + torch.tensor([[40], [0], [97], [500]]), torch.full((4,), 2**40)
    check(
        implementation.compact_kv_,
        path,
        counts,
        torch.full((4,), -1),
        *make_caches(LAYERS["unlike"], 4, 170, torch.float32),
    )


@pytest.mark.parametrize("count", [-(2**63), -1, 0, 1])
def test_nothing_moves_without_an_accepted_node(count, implementation):
    path, first = torch.tensor([[0, 5, 7], [0, 1, 2]]), torch.tensor([2, 3])
    k_caches, v_caches = make_caches(LAYERS["alike"], 2, 20, torch.float32)
    before = [cache.clone() for cache in k_caches + v_caches]
    implementation.compact_kv_(path, torch.tensor([count, 2**63 - 1]), first, k_caches, v_caches)
    assert all(torch.equal(*pair) for pair in zip(k_caches + v_caches, before, strict=True))


HOSTILE = [-(2**63), -(2**62), -21, -3, -1, 0, 17, 19, 20, 1000, 2**31, 2**62, 2**63 - 1]


def test_slots_outside_the_cache_stay(implementation):
    k_caches, v_caches = make_caches(LAYERS["alike"][:1], 2, 20, torch.float32)
    counts = torch.tensor([4, 2**63 - 1])
    for value in HOSTILE:
        for path, first in (
            ([[0, 2, 5, 6]] * 2, [value, 1]),
            ([[0, 2, value, 6], [value, value, 3, 9]], [1, 12]),
            ([[value] * 4] * 2, [value, -value if value > -(2**63) else value]),
        ):
            check(implementation.compact_kv_, torch.tensor(path), counts, torch.tensor(first), k_caches, v_caches)


@pytest.mark.parametrize("layers", [0, 1, 112, 113, 230])
def test_any_number_of_layers(layers, implementation):
    path, counts = draw_paths(1, 2, 9, 4)
    caches = make_caches([(1, 8, 8)] * layers, 2, 30, torch.float32)
    check(implementation.compact_kv_, path, torch.tensor([4, 3]), counts, *caches)


def test_other_dtypes_move_as_they_are():
    for dtype in (torch.float16, torch.float64, torch.int8):
        path, counts = draw_paths(2, 3, 20, 8)
        caches = [[x.to(dtype) for x in each] for each in make_caches(LAYERS["unlike"], 3, 40, torch.float32)]
        check(ops.compact_kv_, path, counts, torch.tensor([0, 3, 9]), *caches)


def test_a_cache_commits_a_path_of_every_layer():
    cache = KVCache(2, 40)
    for index, (heads, k_dim, v_dim) in enumerate(LAYERS["unlike"]):
        key, value = cache.layer(3 * index, torch.zeros(1, heads, 0, k_dim), torch.zeros(1, heads, 0, v_dim))
        key.copy_(torch.randn(key.shape))
        value.copy_(torch.randn(value.shape))
    path, length, num_context = torch.tensor([[0, 2, 7, 3], [0, 3, 4, 6]]), torch.tensor([9, 20]), torch.tensor([3, 4])
    for given, wanted in (
        (None, [x.clone() for x in cache.buffers]),
        (path, slow_compact(path, num_context, length - num_context, cache.buffers)),
    ):
        cache.commit_(length, num_context, given)
        assert all(torch.equal(*pair) for pair in zip(cache.buffers, wanted, strict=True))

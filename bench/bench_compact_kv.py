"""``ops.compact_kv_`` over the target's layers against ``index_copy_`` of ``index_select`` per cache.

One sequence, a path of 8 rows of which the last 5 move, in a tree of 64 rows; ``spine`` is a path that is in place.
"""

import torch
from harness import Case, main

from dflash import ops

LAYERS = {"pair": 6, "qwen3-0.6b": 28, "qwen3-8b": 36}  # of the target
PATH = [0, 1, 2, 5, 9, 17, 30, 44, 8, 9, 10, 11, 12, 13, 14, 15]
COUNT = 8


def ours(path, counts, first, k_caches, v_caches, _sources, _slots):
    ops.compact_kv_(path, counts, first, k_caches, v_caches)


def plain(_path, _counts, _first, k_caches, v_caches, sources, slots):
    for cache in (*k_caches, *v_caches):
        cache.index_copy_(2, slots, cache.index_select(2, sources))


def cases(o):
    for name, m in o.models.items():
        for path in (PATH, [*range(len(PATH))]):
            layers, context = LAYERS.get(name, m.layers), o.contexts[0]

            def make(m=m, path=path, layers=layers, context=context):
                caches = [[o.random(1, m.kv_heads, context + 64, m.head_dim) for _ in range(layers)] for _ in range(2)]
                rows = torch.tensor([path], device=o.device)
                sources, slots = rows[0, 1:COUNT] + context, o.positions(context, COUNT)[0, 1:]
                return rows, o.integers(COUNT), o.integers(context), *caches, sources, slots

            moves = sum(row > j for j, row in enumerate(path[:COUNT]))
            yield Case(
                f"layers={layers} heads={m.kv_heads}x{m.head_dim} moves={moves}",
                make,
                ours,
                {"index_copy_ of index_select": plain},
                layers * 4 * moves * m.kv_heads * m.head_dim * o.size + (len(path) + 2) * 8,
            )


if __name__ == "__main__":
    main(cases)

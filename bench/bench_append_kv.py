"""``ops.append_kv_`` against ``index_copy_`` of keys and values, as transformers' StaticCache appends."""

from harness import Case, main

from dflash import ops


def plain(key, value, positions, k_cache, v_cache):
    k_cache.index_copy_(2, positions[0], key)
    v_cache.index_copy_(2, positions[0], value)


def cases(o):
    for m in o.models.values():
        for rows in o.rows:
            context = o.contexts[0]

            def make(m=m, rows=rows, context=context):
                new = [o.random(1, rows, m.kv_heads, m.head_dim).transpose(1, 2) for _ in range(2)]
                caches = [o.random(1, m.kv_heads, context + rows, m.head_dim) for _ in range(2)]
                return *new, o.positions(context, rows), *caches

            yield Case(
                f"heads={m.kv_heads}x{m.head_dim} rows={rows}",
                make,
                ops.append_kv_,
                {"index_copy_": plain},
                4 * rows * m.kv_heads * m.head_dim * o.size,
            )


if __name__ == "__main__":
    main(cases)

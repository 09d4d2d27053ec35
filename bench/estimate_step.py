"""Print what a captured step with draft trees should cost on an H200: a model, no measurement.

Per kernel: the larger of bytes over bandwidth and assumed latencies. The assumptions are the fields of `Gpu`, for
launches that overlap as expected; none was measured. bench/step measures what is estimated here.

    python bench/estimate_step.py [--rows 16 32 64 128] [--contexts 1024 8192 32768]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

LAYERS, DRAFT_LAYERS, DRAFT_ROWS = 36, 5, 16
HIDDEN, WIDTH, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 151936, 32, 8, 128
GROUP = HEADS // KV_HEADS
QUERY_TILE, KEY_TILE, FEATURE_TILE = 64, 32, 128  # as in csrc/cuda
# The products of a layer: in, out, slices of the inner dimension, and MB of weights requested before the kernel waits.
PRODUCTS = ((HIDDEN, 6144, 5, 5), (HIDDEN, HIDDEN, 8, 12), (HIDDEN, 2 * WIDTH, 1, 3), (WIDTH, HIDDEN, 8, 10))

# Launches of torch in a step with a chain, next to our kernels: one each.
TORCH = ("drafts after their anchor", "report")


@dataclass(frozen=True)
class Gpu:
    """Assumed rates in MB per us, which is TB per second, and latencies in us."""

    memory: float = 4.3 * 0.94
    l2: float = 6.0  # what all multiprocessors together read
    one_l2: float = 0.11  # what one of them reads
    multiprocessors: int = 132
    ramp: float = 0.9  # start of a product
    tail: float = 0.9  # its end, without slices
    slice_tail: float = 1.6  # its end with slices, without the sums of the last block
    small: float = 2.3  # a norm, a rotation
    torch: float = 1.8  # a small kernel of torch
    ends: float = 40.0  # first and last norms, acceptance, from one graph to the next
    attention: float = 3.2  # until the first keys have arrived
    early: float = 1.6  # of that, if older keys are read before the wait
    stage: float = 0.46  # 32 slots in a block that waits for each of them
    busy: float = 0.20  # of the multiprocessor that runs it, so that two blocks share one
    fold: float = 0.04  # per chunk
    fold_all: float = 2.4  # a kernel of its own
    pass_: float = 0.14  # a set of rows that share a path, 16 positions, scores and values
    tree_copy: float = 1.0  # the block's K/V to shared memory, not hidden


def mb(*shape: int) -> float:
    """MB of a bfloat16 tensor."""
    size = 2e-6
    for extent in shape:
        size *= extent
    return size


def product(gpu: Gpu, rows: int, width: int, out: int, slices: int, early: float = 0.0) -> float:
    """One product of a few rows."""
    weights, tiles = mb(width, out), -(-out // FEATURE_TILE)
    requested = weights + tiles * mb(rows, width)  # every tile reads all rows
    stream = max((weights - early) / gpu.memory, requested / gpu.l2)
    sums = slices * FEATURE_TILE * max(rows, 16) * 4e-6 / gpu.one_l2 if slices > 1 else 0.0
    return gpu.ramp + stream + (gpu.slice_tail + sums if slices > 1 else gpu.tail)


def chunks(slots: int) -> tuple[int, int]:
    """How many chunks hold a slot, and the slots of the longest one."""

    def begin(chunk: int) -> int:
        octave, place = divmod(chunk, 8)
        return 128 * place if octave == 0 else (128 * (8 + place)) << (octave - 1)

    count, longest = 0, 0
    while begin(count) < slots:
        longest = max(longest, min(begin(count + 1), slots) - begin(count))
        count += 1
    return count, longest


def tree_passes(rows: int) -> float:
    """Sets of rows that a warp multiplies on their own: at most its nodes, in two groups of 16 positions."""
    return 0 if rows <= 1 else 2 * 0.75 * (16 // GROUP)  # a quarter shares the path of the row before it


def attention(gpu: Gpu, rows: int, context: int, tree: bool) -> float:
    """Tiles of 64 queries per kv head, each with all keys; a chunk of the cache per block."""
    tiles, (count, longest) = -(-rows * GROUP // QUERY_TILE), chunks(context + rows)
    keys = 2 * mb(KV_HEADS, HEAD_DIM, context)
    serial = longest / KEY_TILE * gpu.stage
    issued = tiles * KV_HEADS * context / KEY_TILE / gpu.multiprocessors * gpu.busy
    body = max(keys / gpu.memory, tiles * keys / gpu.l2, serial, issued)
    tail = tree_passes(rows) * gpu.pass_ + gpu.tree_copy if tree else 0.0
    return gpu.attention - (0 if tree else gpu.early) + body + tail + gpu.fold * count + gpu.fold_all


def layer(gpu: Gpu, rows: int, context: int, tree: bool) -> float:
    """Four products, attention, the rotation and two norms, which write 0.5 to 2 MB."""
    small = 3 * gpu.small + mb(rows, 6144 + 2 * HIDDEN + WIDTH) / gpu.l2
    return sum(product(gpu, rows, *shape) for shape in PRODUCTS) + attention(gpu, rows, context, tree) + small


def step(gpu: Gpu, rows: int, context: int, tree: bool) -> float:
    """Verify `rows` rows, draft 16, choose tokens; with a tree also build it, walk it and move its path."""
    target = LAYERS * layer(gpu, rows, context, tree)
    drafter = DRAFT_LAYERS * layer(gpu, DRAFT_ROWS, context, tree=False) + mb(HIDDEN, 5 * HIDDEN) / gpu.memory
    heads = sum(product(gpu, r, HIDDEN, VOCAB, 1) for r in (rows, DRAFT_ROWS))
    select = 2 * 7 + mb(rows, VOCAB) / gpu.memory  # the logits come back from memory, about
    tree_ops = 12 + 0.25 * rows + 3 + 3 if tree else 0.0  # candidates, a pop of the frontier per row, walk, moves
    glue = 2 * gpu.small + len(TORCH) * gpu.torch  # the first are embeddings, the drafter's and the target's
    return target + drafter + heads + select + tree_ops + glue + gpu.ends


def blocks(rows: int, context: int) -> str:
    """Blocks that attention and its tail keep busy, the bytes of their states, and the products of a tree's tail."""
    tiles, (count, _) = -(-rows * GROUP // QUERY_TILE), chunks(context + rows)
    state = (HEAD_DIM // 8 + 1) * 16 * 128 / 1e6
    mma = 4 * tree_passes(rows) * 2 * HEAD_DIM / 8  # per tile: four warps, scores and values, 8 columns each
    copies = 2 * (mb(rows, HEAD_DIM) + mb(31, HEAD_DIM))  # K and V of the block and of the slots before it
    return (
        f"{tiles * KV_HEADS * count:6d} attention blocks, {tiles * KV_HEADS * count * state:5.1f} MB of states, "
        f"{tiles * KV_HEADS * mma / 1e3:5.1f} k MMAs and {tiles * KV_HEADS * copies:4.1f} MB from L2 for paths"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    options, gpu = parser.parse_args(), Gpu()
    print("A model of Qwen3-8B in bfloat16 on an H200, one sequence; nothing here was measured. us")
    print(f"{'context':>8} {'rows':>5} {'step':>8} {'/ chain':>8} {'layer':>7} {'products':>9} {'attention':>10}")
    for context in options.contexts:
        chain = step(gpu, DRAFT_ROWS, context, tree=False)
        cases = [(DRAFT_ROWS, False), *((rows, True) for rows in options.rows)]
        for rows, tree in cases:
            total = step(gpu, rows, context, tree)
            products = sum(product(gpu, rows, *shape) for shape in PRODUCTS)
            name = str(rows) if tree else "chain"
            print(
                f"{context:8d} {name:>5} {total:8.0f} {total / chain:8.3f} {layer(gpu, rows, context, tree):7.1f} "
                f"{products:9.1f} {attention(gpu, rows, context, tree):10.1f}"
            )
    for rows in options.rows:
        print(f"{rows:4d} rows at {options.contexts[0]}, a layer: {blocks(rows, options.contexts[0])}")


if __name__ == "__main__":
    main()

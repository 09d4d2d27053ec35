"""Trees of random shape, and the chains that they consist of."""

import torch

from dflash.proposers import Tree


def tree_of(parents: list[list[int]]) -> Tree:
    """The tree whose rows have these parents, one list per sequence; a row whose parent is -1 sees only itself."""
    rows = len(parents[0])
    depth = torch.zeros(len(parents), rows, dtype=torch.int64)
    ancestors = torch.zeros(len(parents), rows, -(-rows // 64), dtype=torch.int64)
    for b, of_rows in enumerate(parents):
        bits = []
        for i, parent in enumerate(of_rows):
            assert -1 <= parent < i
            bits.append(1 << i | (bits[parent] if parent >= 0 else 0))
            depth[b, i] = bits[i].bit_count() - 1
            for word in range(ancestors.shape[2]):
                part = bits[i] >> 64 * word & (1 << 64) - 1
                ancestors[b, i, word] = part - (1 << 64 if part >> 63 else 0)
    return Tree(torch.tensor(parents), depth, ancestors)


def random_parents(rows: int, seed: int, pads: int = 0) -> list[int]:
    """Parents of a random tree, long paths among them; its last ``pads`` rows are missing."""
    generator, live = torch.Generator().manual_seed(seed), rows - pads
    back = torch.randint(0, 4, (live,), generator=generator)  # often the row before, now and then far from it
    return [-1, *(max(0, i - 1 - int(back[i]) * (1 + i // 8)) for i in range(1, live)), *([-1] * pads)]


def random_tree(rows: int, batch: int = 1, seed: int = 0) -> Tree:
    """A tree of another shape for each sequence; the last one has missing rows."""
    last = batch - 1
    return tree_of([random_parents(rows, seed + b, pads=rows // 5 if b == last and b else 0) for b in range(batch)])


def path_of(tree: Tree, b: int, row: int) -> list[int]:
    """The rows from the anchor to this row."""
    path = [row]
    while tree.parents[b, path[0]] >= 0:
        path.insert(0, int(tree.parents[b, path[0]]))
    return path


def longest_paths(tree: Tree, b: int) -> list[list[int]]:
    """The paths to the rows that nothing continues, missing rows among them."""
    continued = set(tree.parents[b].tolist())
    return [path_of(tree, b, row) for row in range(tree.parents.shape[1]) if row not in continued]

"""Draft trees for tests, by slow and obvious code: random ones, and what follows from parents.

A tree has ``rows`` rows per sequence, the root included. A parent comes before its children. Rows that are missing
stand at the end: id -1, parent -1, depth 0, and nobody's ancestor but their own.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from dflash.state import Tree


class SlowTree(NamedTuple):
    """A tree per sequence, in the tensors of the package's `Tree` and the ids of its `Block`."""

    ids: Tensor  # [batch, rows] int64
    parents: Tensor  # [batch, rows] int64, -1 for the root and for missing rows
    depth: Tensor  # [batch, rows] int64
    ancestors: Tensor  # [batch, rows, ceil(rows / 64)] int64, bit j % 64 of word j // 64 for row j


def path_to(parents: list[int], row: int) -> list[int]:
    """Return the rows from the root to ``row``."""
    rows = [row]
    while parents[rows[0]] >= 0:
        rows.insert(0, parents[rows[0]])
    return rows


def from_parents(ids: list[list[int]], parents: list[list[int]]) -> SlowTree:
    """Return the trees with these parents."""
    words = -(-len(ids[0]) // 64)
    paths = [[path_to(each, row) for row in range(len(each))] for each in parents]
    bits = [[sum(1 << row for row in path) for path in each] for each in paths]
    # An int64 holds bit 63 as its sign.
    ancestors = [
        [[(mask >> 64 * word & (1 << 64) - 1 ^ 1 << 63) - (1 << 63) for word in range(words)] for mask in each]
        for each in bits
    ]
    depth = [[len(path) - 1 for path in each] for each in paths]
    return SlowTree(*(torch.tensor(x, dtype=torch.int64) for x in (ids, parents, depth, ancestors)))


def tree_of(parents: list[list[int]]) -> Tree:
    """Return the trees with these parents, without ids."""
    return Tree(*from_parents(parents, parents)[1:])


def longest_paths(tree: Tree, b: int) -> list[list[int]]:
    """Return the paths to the rows that nothing continues, missing rows among them."""
    parents = tree.parents[b].tolist()
    return [path_to(parents, row) for row in range(len(parents)) if row not in parents]


def chain(ids: Tensor) -> SlowTree:
    """Return ``ids [batch, rows]`` as trees without branches."""
    batch, rows = ids.shape
    return from_parents(ids.tolist(), [[*range(-1, rows - 1)]] * batch)


def random_tree(
    generator: torch.Generator, batch: int, rows: int, depths: int, vocab: int = 40, missing: int = 0, wide: float = 0.5
) -> SlowTree:
    """Draw trees at most ``depths`` deep, siblings with different ids.

    At most ``missing`` rows are missing from a tree, more if ``vocab`` and ``depths`` leave no room. ``wide`` is how
    often a parent is any row; otherwise it is the row before, if that is not at the last depth.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    all_ids, all_parents = [], []
    for _ in range(batch):
        ids, parents, depth, children = [draw(0, vocab)], [-1], [0], [set()]
        for _ in range(rows - 1 - draw(0, missing + 1)):
            free = [row for row in range(len(ids)) if depth[row] < depths and len(children[row]) < vocab]
            if not free:
                break
            is_any = free[-1] < len(ids) - 1 or bool(torch.rand((), generator=generator) < wide)
            parent = free[draw(0, len(free))] if is_any else len(ids) - 1
            left = [token for token in range(vocab) if token not in children[parent]]
            token = left[draw(0, len(left))]
            children[parent].add(token), children.append(set())
            ids.append(token), parents.append(parent), depth.append(depth[parent] + 1)
        all_ids.append(ids + [-1] * (rows - len(ids)))
        all_parents.append(parents + [-1] * (rows - len(parents)))
    return from_parents(all_ids, all_parents)


def random_shapes(rows: int, batch: int = 1, seed: int = 0) -> Tree:
    """Draw trees of any depth, without ids, long paths among them. The last of several has missing rows."""

    def parents(seed: int, missing: int) -> list[int]:
        generator, present = torch.Generator().manual_seed(seed), rows - missing
        back = torch.randint(0, 4, (present,), generator=generator)  # often the row before, now and then far from it
        return [-1, *(max(0, i - 1 - int(back[i]) * (1 + i // 8)) for i in range(1, present)), *[-1] * missing]

    return tree_of([parents(seed + b, rows // 5 if 0 < b == batch - 1 else 0) for b in range(batch)])


def choices_along(generator: torch.Generator, tree: SlowTree, vocab: int = 40) -> tuple[Tensor, list[list[int]]]:
    """Draw a path per tree, and choices ``[batch, rows]`` that follow it and leave the tree; both are returned."""
    choices = torch.randint(0, vocab, tree.ids.shape, generator=generator)
    paths = []
    for b, (ids, parents) in enumerate(zip(tree.ids.tolist(), tree.parents.tolist(), strict=True)):
        present = [row for row, token in enumerate(ids) if token >= 0]
        end = present[int(torch.randint(0, len(present), (), generator=generator))]
        path = path_to(parents, end)
        for row, child in itertools.pairwise(path):
            choices[b, row] = ids[child]
        children = {ids[row] for row in present if parents[row] == end}
        choices[b, end] = next(token for token in range(vocab + 1) if token not in children)
        paths.append(path)
    return choices, paths

"""Pictures of draft trees: one step's tree, watched in a stream and laid out as lines of text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.cells import cell_len

from dflash import Generator, StreamEvent
from dflash.light import terminal

# Styles of rich, which also say what a piece of a picture is. Bonus tokens stand out without colors too.
ACCEPTED, BONUS, DRAFT, EDGE = "green", "bold underline yellow", "default", "dim"
Piece = tuple[str, str]  # a text, and which of the four it is
_PATH_EDGES = str.maketrans("─┬├└", "━┯┝┕")


class TreeStep(NamedTuple):
    """One step's tree: each row's token (-1 for a missing row) and parent (-1 for none), and what the step wrote."""

    ids: list[int]
    parents: list[int]
    emitted: list[int]

    @property
    def path(self) -> list[int]:
        """The accepted rows, the anchor first."""
        rows = {pair: row for row, pair in enumerate(zip(self.parents, self.ids, strict=True))}
        path = [0]
        for token in self.emitted:
            if (row := rows.get((path[-1], token))) is None:
                break
            path.append(row)
        return path

    @property
    def bonus(self) -> list[int]:
        """The token that the target chose after the path; empty where a draft ended the answer."""
        return self.emitted[len(self.path) - 1 :]

    def children(self, row: int) -> list[int]:
        """Return the rows that continue a row, the most probable first."""
        return [child for child, parent in enumerate(self.parents) if parent == row]

    @property
    def leaves_spine(self) -> bool:
        """True if the path takes a child that was not the most probable, which a chain would not have proposed."""
        return any(self.children(row)[0] != child for row, child in zip(self.path, self.path[1:], strict=False))


class TreeWatch:
    """Keeps the step of a stream that shows best what a tree is for.

    Attributes:
        best: of the steps that left the spine, the one that wrote most; of all steps, if none did; None at first.
    """

    def __init__(self) -> None:
        self.best: TreeStep | None = None

    def watch(self, generator: Generator, events: Iterator[StreamEvent]) -> Iterator[StreamEvent]:
        """Yield the events of ``generator``, which is on a CPU and drafts trees for one row."""
        yield from itertools.islice(events, 1)  # the prompt's; from here on the engine has the call's proposer
        proposer, blocks = generator.engine.proposer, []
        propose = proposer.propose
        proposer.propose = lambda state: blocks.append(propose(state)) or blocks[-1]
        try:
            for event in events:
                block, emitted = blocks.pop(), event.ids[0]
                step = TreeStep(block.ids[0].tolist(), block.tree.parents[0].tolist(), emitted)
                steps = [step] if self.best is None else [self.best, step]
                self.best = max(steps, key=lambda step: (step.leaves_spine, len(step.emitted)))
                yield event
        finally:
            del proposer.propose


def show_token(text: str) -> str:
    """Return a token's text with its white space made visible."""
    return terminal.printable(text.replace("\n", "↵").replace("\t", "→").replace(" ", "·")) or "∅"


def draw(step: TreeStep, decode: Callable[[int], str]) -> list[list[Piece]]:
    """Lay a tree out from left to right: a token's best continuation is next to it, the others are below that one.

    Edges of the accepted path are heavy, so that it shows without colors too.

    ``decode`` gives the text of a token. A line is a list of texts with what they are: ACCEPTED, BONUS, DRAFT or EDGE.
    """
    path = set(step.path)

    def lines_of(row: int) -> list[list[Piece]]:
        label = show_token(decode(step.ids[row]))
        children = [(child in path, lines_of(child)) for child in step.children(row)]
        if row == step.path[-1]:
            children += [(True, [[(show_token(decode(token)), BONUS)]]) for token in step.bonus]
        return _beside((label, ACCEPTED if row in path else DRAFT), children)

    return lines_of(0)


def _beside(token: Piece, children: list[tuple[bool, list[list[Piece]]]]) -> list[list[Piece]]:
    """Put the lines of a token's children to its right; a child is whether it is accepted, and its lines."""
    indent, lines = " " * cell_len(token[0]), []
    for number, (is_accepted, block) in enumerate(children):
        is_last = number == len(children) - 1
        edge = ("─" if is_last else "┬") if number == 0 else ("└" if is_last else "├")
        edge = edge.translate(_PATH_EDGES) if is_accepted else edge
        first = [token, (edge, EDGE)] if number == 0 else [(indent + edge, EDGE)]
        below = (indent + (" " if is_last else "│"), EDGE)
        lines += [[*first, *block[0]], *([below, *line] for line in block[1:])]
    return lines or [[token]]

"""Which kernels of a fused step fit next to each other on a multiprocessor: ``residency.py _C.so [CONTEXT]``.

A launch that overlaps starts early only if its blocks find registers, threads and shared memory next to the blocks of
the kernel ahead. There must be room for every block of the next kernel's first wave, except as stated in ``FEWER``.
Registers and static shared memory come from the machine code for sm_90, grids and dynamic shared memory from the
launchers (launches.py). The blocks of a grid are taken to spread evenly over an H100's or H200's multiprocessors.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "cuda_emulation")]

if TYPE_CHECKING:
    from cubins import Resources
    from launches import Launch

# Kernels, ahead and following, between which fewer blocks may fit: at least so many percent, and why.
FEWER = {
    # A step of Qwen3-8B's size takes an H100 7.5 ms so, and 8.1 with 192 to 256 blocks, which left room.
    ("linear_kernel", "linear_kernel"): (3, "384 blocks, three per multiprocessor, take all places but 12"),
    ("linear_kernel", "qkv_norm_rope_append_kernel"): (18, "the same"),
    ("linear_kernel", "rms_norm_kernel"): (37, "the same"),
    ("fold_chunks_kernel", "linear_kernel"): (76, "two blocks of a product fit next to one of the fold"),
    ("rms_norm_kernel", "linear_kernel"): (95, "the head's first wave wants every place, and the norm takes 16"),
    ("linear_kernel", "scan_slices"): (0, "the head holds the registers until its last wave ends"),
    ("scan_slices", "find_floors"): (30, "304 blocks, three per multiprocessor: 92 have room for one more"),
    ("find_floors", "choose_rows"): (30, "the same"),
}
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Need:
    """What blocks take of a multiprocessor, or what it has."""

    registers: int
    threads: int
    shared: int
    blocks: int = 1

    def times(self, count: int) -> Need:
        """Return what ``count`` of these take."""
        return Need(self.registers * count, self.threads * count, self.shared * count, self.blocks * count)

    def fit_next_to(self, taken: Need) -> int:
        """Return how many of these fit on a multiprocessor next to what is taken."""
        free = [whole - part for whole, part in zip(vars(SM_90).values(), vars(taken).values(), strict=True)]
        return max(0, min(left // own for left, own in zip(free, vars(self).values(), strict=True)))


SM_90 = Need(65536, 2048, 233472, 32)
_NOTHING = Need(0, 0, 0, 0)


def need(registers: int, threads: int, shared: int) -> Need:
    """Return what one block takes: a warp gets registers in portions of 256.

    ``registers`` are per thread, ``shared`` bytes include the 1024 that every block costs.
    """
    per_warp = -(-registers * 32 // 256) * 256
    return Need(-(-threads // 32) * per_warp, threads, shared)


def room(ahead: Need, ahead_grid: int, following: Need) -> int:
    """Return how many blocks of ``following`` fit on the GPU while every block of ``ahead`` that fits still runs."""
    fits = ahead.fit_next_to(_NOTHING)
    fewer, crowded = divmod(min(ahead_grid, fits * MULTIPROCESSORS), MULTIPROCESSORS)
    next_to_more = following.fit_next_to(ahead.times(fewer + 1)) if crowded else 0
    return crowded * next_to_more + (MULTIPROCESSORS - crowded) * following.fit_next_to(ahead.times(fewer))


@dataclass(frozen=True)
class Neighbors:
    """A launch that overlaps and the one ahead of it; ``places``: blocks of its first wave, of which ``fit`` do."""

    ahead: Launch
    following: Launch
    fit: int
    places: int

    @property
    def names(self) -> tuple[str, str]:
        """Both kernels without their template arguments."""
        return self.ahead.kernel.partition("<")[0], self.following.kernel.partition("<")[0]

    def __str__(self) -> str:
        mark = "   " if self.fit == self.places else " < "
        ahead, following = (f"{launch.kernel} ({launch.grid})" for launch in (self.ahead, self.following))
        return f"{self.fit:5d} of {self.places:5d}{mark}{ahead} -> {following}"


def neighbors(launches: list[Launch], resources: dict[str, Resources]) -> list[Neighbors]:
    """Return each pair of launches once, in the order of the step; ``resources`` have the 1024 bytes of a block."""
    needs = [need(resources[x.kernel].registers, x.threads, resources[x.kernel].shared + x.shared) for x in launches]
    found: dict[tuple[Launch, Launch], Neighbors] = {}
    for (ahead, own), (following, wanted) in pairwise(zip(launches, needs, strict=True)):
        if following.overlaps:
            places = min(following.grid, wanted.fit_next_to(_NOTHING) * MULTIPROCESSORS)
            fit = min(places, room(own, ahead.grid, wanted))
            found.setdefault((ahead, following), Neighbors(ahead, following, fit, places))
    return list(found.values())


def findings(pairs: list[Neighbors], fewer: dict[tuple[str, str], tuple[int, str]]) -> list[str]:
    """Return the pairs with less room than they must have, and exceptions that are not needed."""
    wrong = [
        f"room for {pair.fit} of {pair.places} blocks: {' -> '.join(pair.names)}"
        for pair in pairs
        if 100 * pair.fit < fewer.get(pair.names, (100, ""))[0] * pair.places
    ]
    needed = {pair.names for pair in pairs if pair.fit < pair.places}
    return wrong + [f"no exception is needed: {' -> '.join(names)}" for names in fewer if names not in needed]


def main(library: str, context: int) -> int:
    import build
    from cubins import readable, resources_of
    from launches import record_step

    found = resources_of(Path(library))
    resources = dict(zip(readable(list(found)), found.values(), strict=True))
    pairs = neighbors(record_step(build.load(), context), resources)
    print(
        f"Blocks that fit next to the kernel ahead, Qwen3-8B at {context} positions, sm_90 (an estimate, nothing ran)"
    )
    wrong = findings(pairs, FEWER)
    print(*pairs, *wrong, sep="\n")
    return int(bool(wrong) or not pairs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1024))

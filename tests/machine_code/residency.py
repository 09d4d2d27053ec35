"""Which kernels of a fused step fit next to each other on a multiprocessor: ``residency.py _C.so [CONTEXT]``.

A launch that overlaps starts early only if its blocks find registers, threads and shared memory next to the blocks of
the kernel ahead. Registers and static shared memory come from the machine code for sm_90, grids and dynamic shared
memory from the launchers (launches.py). The blocks of a grid are taken to spread evenly over an H100's or H200's
multiprocessors.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "cuda_emulation")]

MULTIPROCESSORS = 132
_RESERVED = 1024  # bytes of shared memory that every block costs besides its own


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
    """Return what one block takes: a warp gets registers in portions of 256."""
    per_warp = -(-registers * 32 // 256) * 256
    return Need(-(-threads // 32) * per_warp, threads, shared + _RESERVED)


def room(ahead: Need, ahead_grid: int, following: Need) -> int:
    """Return how many blocks of ``following`` fit on the GPU while every block of ``ahead`` that fits still runs."""
    fits = ahead.fit_next_to(_NOTHING)
    fewer, crowded = divmod(min(ahead_grid, fits * MULTIPROCESSORS), MULTIPROCESSORS)
    next_to_more = following.fit_next_to(ahead.times(fewer + 1)) if crowded else 0
    return crowded * next_to_more + (MULTIPROCESSORS - crowded) * following.fit_next_to(ahead.times(fewer))


def main(library: str, context: int) -> int:
    import build
    from cubins import readable, resources_of
    from launches import record_step

    found = resources_of(Path(library))
    resources = dict(zip(readable(list(found)), found.values(), strict=True))
    launches = record_step(build.load(), context)
    needs = [need(resources[x.kernel].registers, x.threads, resources[x.kernel].shared + x.shared) for x in launches]
    print(
        f"Blocks that fit next to the kernel ahead, Qwen3-8B at {context} positions, sm_90 (an estimate, nothing ran)"
    )
    seen = set()
    for (ahead, own), (following, wanted) in zip(zip(launches, needs), zip(launches[1:], needs[1:])):  # noqa: B905
        if not following.overlaps or (ahead, following) in seen:
            continue
        seen.add((ahead, following))
        places = min(following.grid, wanted.fit_next_to(_NOTHING) * MULTIPROCESSORS)  # of its first wave
        fits = min(places, room(own, ahead.grid, wanted))
        print(
            f"{fits:5d} of {places:5d}{'   ' if fits == places else ' < '}{ahead.kernel} ({ahead.grid}) -> "
            f"{following.kernel} ({following.grid}), {following.threads} threads, "
            f"{wanted.registers // following.threads} registers, {wanted.shared} B shared"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1024))

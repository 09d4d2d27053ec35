"""Draw when the blocks of one target layer come to their wait, leave it and end: ``python bench/gpu/timeline.py PNG``.

Needs a build with ``-D DFLASH_TRACE=ON``, in which every block leaves a record (csrc/cuda/trace.cuh), and one GPU. The
step is the fused one, captured, at the sizes of Qwen3-8B. A row of the picture is a launch, a line in it a block: light
while it waits for the kernel ahead, dark while it works. Blocks are sorted by multiprocessor. What a block does before
its wait (weights that are read early) is not seen. ``--try`` draws made-up records, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
_WORDS = 5  # of eight bytes per record, as in trace.cuh
_LAYER = re.compile(r"attention")  # a layer's launches lie between two of these


class Record(NamedTuple):
    """One block; times in nanoseconds."""

    arrived: int
    waited: int
    ended: int
    kernel: int
    multiprocessor: int
    block: int
    grid: int


@dataclass
class Launch:
    """The blocks of one launch."""

    kernel: str
    blocks: list[Record]

    @property
    def waited(self) -> int:
        """When its first block left its wait: what is ahead has ended then."""
        return min(block.waited for block in self.blocks)


def unpack(buffer: Tensor) -> list[Record]:
    """Return the records of a buffer ``[1 + records * 5]`` int64 on the CPU."""
    count = min(int(buffer[0]), (len(buffer) - 1) // _WORDS)
    rows = buffer[1 : 1 + count * _WORDS].view(count, _WORDS).tolist()
    return [
        Record(arrived, waited, ended, names & 0xFFFFFFFF, names >> 32 & 0xFFFFFFFF, at & 0xFFFFFFFF, at >> 32)
        for arrived, waited, ended, names, at in rows
    ]


def pack(records: list[Record]) -> Tensor:
    """Return what a GPU would have left."""
    rows = [(r.arrived, r.waited, r.ended, r.kernel | r.multiprocessor << 32, r.block | r.grid << 32) for r in records]
    return torch.tensor([len(records), *(word for row in rows for word in row)])


def name_of(kernel: int) -> str:
    """Return the function of the sources whose hash this is."""
    for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu*")):
        for name in set(re.findall(r"\b\w+(?=\()", source.read_text())):
            if fnv(name) == kernel:
                return name
    return f"{kernel:08x}"


def fnv(name: str) -> int:
    """Return FNV-1a of a name, as trace.cuh has it."""
    found = 2166136261
    for byte in name.encode():
        found = (found ^ byte) * 16777619 & 0xFFFFFFFF
    return found


def launches(records: list[Record]) -> list[Launch]:
    """Put records together by launch, in the order in which they left their waits.

    The n-th record of a block of a kernel with one grid belongs to the n-th launch of that kernel with that grid.
    """
    seen: dict[tuple, int] = defaultdict(int)
    found: dict[tuple, list[Record]] = defaultdict(list)
    for record in sorted(records):
        same = record.kernel, record.grid
        found[(*same, seen[(*same, record.block)])].append(record)
        seen[(*same, record.block)] += 1
    names = {kernel: name_of(kernel) for kernel in {record.kernel for record in records}}
    return sorted((Launch(names[key[0]], blocks) for key, blocks in found.items()), key=lambda launch: launch.waited)


def one_layer(found: list[Launch], at: int) -> list[Launch]:
    """Return the launches between two of attention, from the ``at``-th on."""
    places = [i for i, launch in enumerate(found) if _LAYER.search(launch.kernel)]
    if not places:
        return found
    at = min(at, max(len(places) - 2, 0))
    return found[places[at] : places[at + 1] + 1 if at + 1 < len(places) else None]


def draw(found: list[Launch], title: str, to: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.collections import LineCollection

    origin = min(block.arrived for launch in found for block in launch.blocks)
    figure, axes = pyplot.subplots(figsize=(16, 1 + 0.9 * len(found)))
    for row, launch in enumerate(found):
        blocks = sorted(launch.blocks, key=lambda block: (block.multiprocessor, block.arrived))
        for color, first, last in (("#c8d6e5", "arrived", "waited"), ("#1f4e79", "waited", "ended")):
            lines = [
                [((getattr(block, first) - origin) / 1000, y), ((getattr(block, last) - origin) / 1000, y)]
                for i, block in enumerate(blocks)
                for y in [row + 0.85 * i / len(blocks)]
            ]
            axes.add_collection(LineCollection(lines, colors=color, linewidths=max(0.3, 40 / len(blocks))))
    axes.set_yticks([row + 0.4 for row in range(len(found))])
    axes.set_yticklabels([f"{launch.kernel}\n{len(launch.blocks)} blocks" for launch in found])
    axes.invert_yaxis()
    axes.autoscale()
    axes.set_xlabel("microseconds; light: waits for the kernel ahead, dark: works")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(to, dpi=110)


def trace_step(context: int) -> tuple[list[Record], str]:
    """Run fused steps on the GPU; returns the records of the last one, and what it ran on."""
    from fused_step import STEPS, fused_steps

    from dflash import _C

    if not hasattr(_C, "set_trace"):
        raise SystemExit("this build has no trace: build with -D DFLASH_TRACE=ON")
    device, capacity = torch.device("cuda"), 1 << 20
    buffer = torch.zeros(1 + capacity * _WORDS, dtype=torch.int64, device=device)
    run = fused_steps(device, context)
    run(STEPS)  # captures
    _C.set_trace(buffer.data_ptr(), capacity)
    run(1)
    torch.cuda.synchronize()
    _C.set_trace(0, 0)
    return unpack(buffer.cpu()), f"{torch.cuda.get_device_name()}, Qwen3-8B, context {context}, one target layer"


def made_up() -> Iterator[Record]:
    """Yield records of three layers of nonsense."""
    time = 1_000_000
    for _ in range(3):
        for name, grid, took in (("linear_kernel", 240, 12000), ("block_attention_kernel", 40, 9000)):
            for block in range(grid):
                arrived = time - 3000 + 10 * block
                yield Record(arrived, max(arrived, time), time + took - 5 * block, fnv(name), block % 132, block, grid)
            time += took + 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("png", type=Path)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layer", type=int, default=20, help="of attention, counted over drafter and target")
    parser.add_argument("--try", dest="tries", action="store_true", help="draw made-up records")
    options = parser.parse_args()
    if options.tries:
        records, title = unpack(pack(list(made_up()))), "Made up, to try the drawing"
    else:
        records, title = trace_step(options.context)
    found = one_layer(launches(records), options.layer)
    options.png.parent.mkdir(parents=True, exist_ok=True)
    options.png.with_suffix(".trace").write_text(json.dumps([[launch.kernel, launch.blocks] for launch in found]))
    draw(found, title, options.png)
    for launch in found:
        first, last = min(b.waited for b in launch.blocks), max(b.ended for b in launch.blocks)
        print(f"{(last - first) / 1000:8.2f} us from the first wait's end to the last block's  {launch.kernel}")


if __name__ == "__main__":
    sys.path[0] = str(ROOT / "bench")  # where fused_step is found
    main()

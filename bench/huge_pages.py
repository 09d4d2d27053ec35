"""What huge pages would be worth on CPU: ``ops.linear`` with weights in pages of 4 KiB and in huge ones, in turns.

    python bench/huge_pages.py [--out 4096] [--width 12288] [--rows 1 16] [--repeats 15]

Linux gives huge pages where it is asked to (``madvise``). The weights of a user's model lie where torch or safetensors
has put them, and this package leaves them there. Prints; asserts nothing.
"""

import argparse
import mmap
import statistics
import time

import harness
import torch
from torch import Tensor

from dflash import ops

HUGE = 2 << 20


def weights(shape: tuple[int, int], dtype: torch.dtype, advice: int) -> Tensor:
    """Return random weights in memory of their own, with an ``madvise`` before it is first written."""
    count = shape[0] * shape[1]
    memory = mmap.mmap(-1, count * dtype.itemsize + HUGE)
    memory.madvise(advice)
    made = torch.frombuffer(memory, dtype=dtype)[:count].view(shape)
    return made.copy_(torch.randn(shape).mul_(shape[1] ** -0.5))


def main() -> None:
    """Time what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=int, default=4096)
    parser.add_argument("--width", type=int, default=12288)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    print(f"{harness.processor()}, {torch.get_num_threads()} threads, ISA {ops.isa()}, torch {torch.__version__}")
    for dtype in (torch.float32, torch.bfloat16):
        shape = arguments.out, arguments.width
        places = [weights(shape, dtype, advice) for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE)]
        for rows in arguments.rows:
            x = torch.randn(rows, arguments.width).to(dtype)
            times: list[list[float]] = [[], []]
            for _ in range(arguments.repeats):
                for place, samples in zip(places, times, strict=True):
                    began = time.perf_counter()
                    ops.linear(x, place)
                    samples.append(time.perf_counter() - began)
            small, huge = (1e6 * statistics.median(samples) for samples in times)
            ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
            print(f"{arguments.width}->{arguments.out} rows={rows:<3} {dtype}: 4 KiB {small:.0f} us, ", end="")
            print(f"huge {huge:.0f} us, {ratio:.2f}x")


if __name__ == "__main__":
    main()

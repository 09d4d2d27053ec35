"""Run a few fused steps, kernel by kernel: something to profile. ``python bench/fused_step.py [--device cpu]``.

The sizes are those of Qwen3-8B, on a CPU those of a tiny model; the weights are random, and acceptance is forced.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from step.forced import Forced
from step.meter import Meter, Waits
from step.ours import another
from step.pair import named_pair
from step.setting import Setting

ACCEPTED = 6  # tokens per step
STEPS = 6


@torch.no_grad()
def fused_steps(device: torch.device, context: int, obstacle: str = "") -> Callable[[int], None]:
    """Return what runs so many steps, ``STEPS`` at most, from ``context`` on.

    Args:
        device: where they run.
        context: positions in the caches.
        obstacle: with one, steps run kernel by kernel; without, as a CUDA graph.
    """
    model = "qwen3-8b" if device.type == "cuda" else "tiny"
    forced = Forced(device)
    setting = Setting(named_pair(model, torch.bfloat16, device), forced, Waits(), context, 1, STEPS, compile=False)
    setting.ours.fill_()
    forced.set_(ACCEPTED)
    run = another(setting, obstacle, fused=True)
    return torch.no_grad()(lambda steps: run(Meter(device), ACCEPTED, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    fused_steps(options.device, options.context, "a profiler looks at single kernels")(STEPS)
    if options.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

"""Cost of a drafter's pass by context length, with full layers and with sliding windows.

    python bench/bench_draft_window.py [--contexts 1024 4096 16384 65536] [--windows 0 2048] [--repeats 20]

Random weights: 5 layers of --hidden, 8 heads of 64 over 2 K/V heads, blocks of 16, 4 fresh context rows, one sequence,
float32. A window of 0 is none. Median milliseconds, and MiB of keys and values. Prints; asserts nothing.
"""

import argparse
import statistics
import time

import torch

import dflash
from dflash import ops

BLOCK, FRESH = 16, 4


def make_drafter(hidden: int, window: int, capacity: int) -> dflash.Drafter:
    """Return a random drafter whose layers all have this window, or none."""
    layers = {"layer_types": ["sliding_attention" if window else "full_attention"] * 5, "num_hidden_layers": 5}
    sliding = {"use_sliding_window": True, "sliding_window": window} if window else {}
    config = {
        **{"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "head_dim": 64, "hidden_size": hidden},
        **{"intermediate_size": 3 * hidden, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"num_target_layers": 8, "vocab_size": 1000, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "model_type": "qwen3"},
        **{"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 4, 7]}, "max_position_embeddings": capacity},
    }
    draft = dflash.Drafter(dflash.DraftConfig.from_config(config | layers | sliding))
    generator = torch.Generator().manual_seed(0)
    for parameter in draft.parameters():
        parameter.data.normal_(0, 0.05, generator=generator) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    return draft


@torch.no_grad()
def measure(draft: dflash.Drafter, context: int, repeats: int) -> tuple[float, float]:
    """Return the median time of a pass after ``context`` positions, and what its cache takes."""
    cache, length = draft.new_cache(1, context + 2 * BLOCK, slides=True), torch.tensor([context])
    for buffer in cache.buffers:
        buffer.normal_()
    cache.commit_(length, torch.tensor([FRESH]))
    features = torch.randn(1, BLOCK, draft.config.hidden_size)
    embeds, times = torch.randn(1, BLOCK, draft.config.hidden_size), []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        draft(features, torch.tensor([FRESH]), embeds, length, cache)
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times[3:]), sum(buffer.nbytes for buffer in cache.buffers) / 2**20


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 2048])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, ISA {ops.isa()}, torch {torch.__version__}")
    print("window    " + "".join(f"{context:>18}" for context in arguments.contexts))
    for window in arguments.windows:
        draft = make_drafter(arguments.hidden, window, max(arguments.contexts) + 2 * BLOCK)
        found = [measure(draft, context, arguments.repeats) for context in arguments.contexts]
        print(f"{window or 'none':<10}" + "".join(f"{ms:10.2f}{size:8.1f}" for ms, size in found), flush=True)


if __name__ == "__main__":
    main()

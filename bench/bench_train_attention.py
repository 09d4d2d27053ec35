"""Forward and backward pass of the trainable drafter with each attention: ``python bench/bench_train_attention.py``.

Columns: the attention, milliseconds per pass (the best of three), and that time over the first attention's. Prints;
asserts nothing.
"""

import time

import torch

from dflash import DraftConfig
from dflash.train import TrainableDrafter, new_drafter

ROWS, LENGTH, ANCHORS, BLOCK, HIDDEN = 8, 192, 36, 16, 192
CONFIG = DraftConfig(
    hidden_size=HIDDEN,
    intermediate_size=3 * HIDDEN,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=48,
    block_size=BLOCK,
    mask_token_id=0,
    target_layer_ids=(1, 2, 3, 4),
    causal=(False,) * 3,
    window=(0,) * 3,
)


def main() -> None:
    """Measure every attention of this device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    drafter = new_drafter(CONFIG, device=device)
    context = torch.randn(ROWS, LENGTH, 4 * HIDDEN, device=device)
    embeds = torch.randn(ROWS, ANCHORS, BLOCK, HIDDEN, device=device)
    anchors = torch.randint(1, LENGTH - BLOCK, (ROWS, ANCHORS), device=device)
    first = None
    print(f"{device}, {torch.get_num_threads()} threads, {ROWS} rows of {LENGTH}, {ANCHORS} blocks of {BLOCK} each")
    for attention in ("matmul", "sdpa", *(["flex"] if device == "cuda" else [])):
        model, best = TrainableDrafter(drafter, attention=attention), float("inf")
        for _ in range(4):  # the first warms up
            began = time.perf_counter()
            model(context, embeds, anchors).square().mean().backward()
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        first = first or best
        print(f"{attention:8}{1000 * best:9.1f} ms{best / first:7.2f} x")


if __name__ == "__main__":
    main()

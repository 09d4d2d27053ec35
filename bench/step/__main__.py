"""Milliseconds per step on a GPU, of this package and its peers, with a fixed number of tokens accepted per step.

    RUN="python bench/step --json bench/results"
    $RUN/step-1k.json --contexts 1024 --table                                  # every runner
    $RUN/step-long.json --contexts 8192 32768 --without static compiled
    $RUN/step-batch.json --contexts 1024 8192 32768 --batches 2 4 8 --runners eager graph fused
    $RUN/step-32k.json --contexts 32768 --runners static graph fused compiled
    $RUN/step-tree.json --runners graph fused --tree 16 32 64 128

On one H100 a runner takes 5 to 20 seconds at each context, `static` and `compiled` a minute. `--stop-after SECONDS`
starts no new measurement after that time; the JSON file is complete after every row. To see whether everything runs,
without a GPU:

    python bench/step --device cpu --model tiny --contexts 64

A Qwen3 target and a 5-layer drafter with blocks of 16, random weights, made on the device; greedy decoding. Nothing is
prefilled: the K/V caches hold random numbers. Acceptance with random weights means nothing, so every runner's is forced
in the same way. The drafter drafts, the target verifies the drafts and takes its argmax, as always. Then the target's
first n - 1 choices are replaced by the drafts and the n-th by another token (that draft with its lowest bit flipped).
n counts the bonus token. Loops that are not ours get the choice as an infinite logit. This adds three or four small
kernels to every runner's step and removes none. A runner whose steps did not emit n tokens each is left out by name.

Runners:
    reference   the reference package's loop and drafter, batch 1; needs `.peers/dflash/model.py` (bench_generate.py)
    native      transformers' `generate(speculation_type="dflash")` with its own drafter class, batch 1
    static      torch.compile and StaticCache: transformers' forward with SDPA over its StaticCache, the drafter in
                plain torch over static K/V, acceptance and counters on the device, all in one compiled graph.
                Launched like ours: as one CUDA graph, read one step late (step/static.py)
    eager       this package, kernel by kernel, with Generator(fused=False): the target's own modules
    graph       the same as one CUDA graph
    fused       graph with Generator(fused=True): the target's layers on our ops
    compiled    graph with Generator(compile=True)
    graph tree N, fused tree N
                with --tree N: the same with draft trees of N rows. Their shape is forced too, to 15 depths of equally
                many rows, of which the last is accepted: from 32 rows on, all that is accepted has to be moved

Columns:
    step        median time from the start of one step to the start of the next, on the device, by events; in rounds of
                --steps starting at the context, runners taking turns
    of floor    share of the floor: the time to read the weights once, the head twice and the context's K/V once, at the
                bandwidth that a large copy or a large read reaches in this run, and at 4.3 TB/s
    host        host time per step: wall clock minus the time in calls that wait for the device (Event.synchronize,
                Tensor.item and similar; a wait inside any other call counts as the host's)
    launches    what the host sends per step: kernels, copies, memsets, graphs
    kernels     what the device runs of it; launches and kernels come from torch.profiler, in a separate run

`--table` adds where the steps of `graph` and `fused` go: kernels by name, and the ops of the same step without a graph,
by shape, with the bytes each must move. Where kernels overlap, a kernel's time counts from its start, and may be mostly
waiting: take tables with DFLASH_OVERLAP=0. Prints; asserts nothing.

A row is written as soon as its runner has a first round, and again after all rounds (`rounds` in the JSON file).
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # bench/, where harness, peers and this package are found

from step.command import main  # noqa: E402

main(__doc__)

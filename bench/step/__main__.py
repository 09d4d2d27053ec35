"""Milliseconds a step on a GPU, of this package and of its peers, with a fixed number of tokens accepted.

    RUN="python bench/step --json bench/results"
    $RUN/step-1k.json --contexts 1024 --table                                  # every runner
    $RUN/step-long.json --contexts 8192 32768 --without static compiled
    $RUN/step-batch.json --contexts 1024 8192 32768 --batches 2 4 8 --runners eager graph fused
    $RUN/step-32k.json --contexts 32768 --runners static graph fused compiled

These four are meant to take less than 8 minutes in all on one H200, most of it torch.compile's in the first and the
last (an estimate: they have not run on one yet). `--stop-after SECONDS` begins no new measurement after that, and the
JSON file is whole after every row. `python bench/step --device cpu --model tiny --contexts 64` is a smoke run.

A Qwen3 target and a 5-layer drafter of 16 rows with random weights, made on the device; greedy. The context is random
numbers in the caches of K/V: nothing is prefilled. With random weights acceptance means nothing, so it is forced, in
every runner alike: the drafter drafts, the target verifies these drafts and its argmax is taken, all as ever; then the
target's choices are overwritten by the drafts themselves, and by one that differs (the draft with its lowest bit
flipped) where the n-th token is to be the last (`Forced`); n counts the bonus token. The loops that are not ours get it
as an infinite logit. That adds three or four small kernels to every runner's step, and takes none away. A runner whose
steps did not emit n tokens each is left out, by name.

Runners:
    reference   the reference package's loop and drafter, where `.peers/dflash/model.py` exists (see bench_generate.py);
                batch 1
    native      transformers' `generate(speculation_type="dflash")` with its own drafter class; batch 1
    static      torch.compile and StaticCache: transformers' own forward with SDPA over its StaticCache, the drafter in
                plain torch over K/V as static, one head and argmax each, acceptance and counters on the device, all in
                one compiled graph, launched as we launch ours: as one CUDA graph, read one step late. See `StaticStep`
    eager       this package, kernel by kernel
    graph       this package, one CUDA graph
    fused       the same with Generator(fused=True): the target's layers on our ops
    compiled    the same as graph with Generator(compile=True)

Columns: step, the median of the time between one step's begin and the next one's on the device, by events, in rounds of
--steps from the context on, runners taking turns; share of the floor, which is the time to read the weights once, the
head twice and the K/V of the context once, at the bandwidth of a large copy in this run and at 4.3 TB/s; host, what the
host spends on a step, wall clock less the time in calls that wait for the device (Event.synchronize, Tensor.item and
their like; a wait inside another call is taken for the host's); launches, what the host sends a step (kernels, copies,
memsets, graphs), and kernels, what the device runs of it, both by torch.profiler in a run of its own.
`--table` adds where the steps of `graph` and `fused` go: their kernels by name, and the ops of the same step without a
graph by shape, with the bytes they cannot do without. Prints, asserts nothing.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from step.command import main  # noqa: E402

main(__doc__)

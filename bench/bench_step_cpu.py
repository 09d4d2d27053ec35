"""Milliseconds per step at larger widths on CPU, against the time that reading the weights takes, and against peers.

    python bench/bench_step_cpu.py [--hidden 512 768 1024 2048] [--layers 8] [--repeats 5] [--pattern full] [--int8]
    python bench/bench_step_cpu.py --hidden 4096 --layers 1        # one layer as wide as Qwen3-8B's
    python bench/bench_step_cpu.py --against FOLDER [...]

The target is a random Qwen3 with a random 3-layer drafter of 16 rows. With --pattern qwen3_5 it is a random Qwen3.5,
three layers with a Gated DeltaNet to one with attention, and two targets of its width and layers run next to it: a
Qwen3.5 with attention in every layer ("full"), and a Qwen3, whose attention has no output gate.
Acceptance with random weights means nothing: a run emits a fixed number of tokens from a short prompt. What is compared
is a step without the prompt's pass: the time that a run takes longer than one that stops after the first token, over
the steps that it has more. A ratio is the median of those of runs that followed each other.

    MB         what a step must read: the weights of both models once, the target's head twice, and the context's K/V
    floor      the time to read these at the bandwidth of the fastest reduction of torch in this run, on all threads
    reference  the reference package's loop; left out where `.peers/dflash/model.py` is missing (see bench_generate.py)
    compiled   the same step in plain torch over transformers' StaticCache, compiled by torch.compile (step/static.py)
    token      transformers' `generate`, one token per step
    int8       with --int8: this package with the weights of both models in 8 bits, and ours over that

--without leaves peers out. With --against this release takes turns with another instead, each in a process of its own;
there the prompt's pass counts, and identical counts equal answers. Prints; asserts nothing.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import harness
import releases
import torch
from peers import reference_loop
from random_pair import Pair, make_pair
from torch import Tensor

import dflash
from dflash import ops
from dflash.ops import WeightStorage

PROMPT, PEERS = 16, ("reference", "compiled", "token")
# By pattern of the target: other targets that it is compared with, and their patterns.
OTHERS = {"full": {}, "qwen3_5": {"full": "qwen3_5_full", "Qwen3": "full"}}
Runner = Callable[[Tensor], tuple[Tensor, list[int]]]  # ids to sequences and tokens emitted per step
Steps = Callable[[], float]  # milliseconds per step


def works(arguments: argparse.Namespace) -> dict[str, Callable[[], list[releases.Work]]]:
    """Return this package's run at every width and dtype."""

    def pieces(hidden: int, dtype: str) -> list[releases.Work]:
        run = ours(pair(hidden, arguments.layers, dtype, arguments.pattern), arguments.new)
        return [lambda: timed(run, prompt())]

    settings = itertools.product(arguments.hidden, arguments.dtypes)
    return {f"{h:6} {arguments.layers:6} {dtype}": lambda h=h, dtype=dtype: pieces(h, dtype) for h, dtype in settings}


def pair(hidden: int, layers: int, dtype: str, pattern: str) -> Pair:
    """Make a pair of random weights."""
    if hidden == 4096:  # as in Qwen3-8B
        size = dataclasses.replace(harness.MODELS["qwen3-8b"], vocab=4096)
    else:
        size = harness.Model(hidden, hidden // 64, max(hidden // 128, 1), 64, 3 * hidden, 4096, 3, 3)
    if layers < 5:
        size = dataclasses.replace(size, layers=1, taps=1)
    return make_pair(size, layers, getattr(torch, dtype), torch.device("cpu"), pattern=pattern)


def prompt() -> Tensor:
    """Return 16 random tokens, always the same."""
    return torch.randint(2, 4000, (1, PROMPT), generator=torch.Generator().manual_seed(0))


def ours(pair: Pair, new: int, weights: WeightStorage = None) -> Runner:
    """Return a runner of this package; ``weights`` are those of both models."""
    # Every run has the whole prompt's pass. Recurrent targets could not start from the last run's cache as others can.
    stored = {"weights": weights, "draft_weights": weights}
    generator = dflash.Generator(pair.target, pair.drafter, max_length=256, reuse_prefix=False, **stored)

    def run(ids: Tensor) -> tuple[Tensor, list[int]]:
        out = generator.generate(ids, max_new_tokens=new, temperature=0.0, return_dict_in_generate=True)
        return out.sequences, out.statistics.acceptance_lengths[0]

    return run


def timed(run: Runner, ids: Tensor) -> releases.Result:
    """Run once; the units are steps."""
    began = time.perf_counter()
    sequences, lengths = run(ids)
    return releases.Result(time.perf_counter() - began, max(len(lengths), 1), sequences[0].tolist())


def measure(made: Pair, hidden: int, dtype: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the milliseconds per step of every runner, by name, one for each repeat."""
    lengths, others = (1, arguments.new), OTHERS[arguments.pattern].items()
    runs = {"ours": [ours(made, new) for new in lengths]}
    for name, pattern in others:
        runs[name] = [ours(pair(hidden, arguments.layers, dtype, pattern), new) for new in lengths]
    if arguments.int8:
        runs["int8"] = [ours(made, new, "int8") for new in lengths]
    steps = {name: functools.partial(step_ms, *both) for name, both in runs.items()} | peers(made, arguments)
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.repeats):
        for name, step in steps.items():
            times[name].append(step())
    return times


def peers(made: Pair, arguments: argparse.Namespace) -> dict[str, Steps]:
    """Return what is measured next to ours and can run, by name."""

    def reference() -> Steps:
        weights = made.drafter.state_dict()
        runs = [reference_loop(made.draft_config, weights, made.target, 0.0, new) for new in (1, arguments.new)]
        return functools.partial(step_ms, *runs)

    def token() -> Steps:
        return functools.partial(step_ms, *(one_by_one(made, new) for new in (1, arguments.new)))

    found: dict[str, Steps] = {}
    makers = {"reference": reference, "compiled": lambda: compiled(made, arguments.new), "token": token}
    for name in (name for name in PEERS if name not in arguments.without):
        try:
            found[name] = makers[name]()
            found[name]()
        except Exception as error:
            found.pop(name, None)
            print(f"{name} is left out: {error}".splitlines()[0], file=sys.stderr)
    return found


def one_by_one(pair: Pair, new: int) -> Runner:
    """Return a runner of transformers' own loop."""

    def run(ids: Tensor) -> tuple[Tensor, list[int]]:
        mask = torch.ones_like(ids)
        return pair.target.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False), [1] * (new - 1)

    return run


def compiled(pair: Pair, steps: int) -> Steps:
    """Return what times steps of plain torch and a static cache, compiled, with one token accepted by force."""
    from step.forced import Forced  # with --against another release is imported, which may lack what these need
    from step.meter import SKIPPED, Meter, Waits
    from step.setting import Setting
    from step.static import static

    setting = Setting(pair, Forced(torch.device("cpu")), Waits(), 2 * PROMPT + 1, 1, steps + SKIPPED, compile=True)
    setting.ours.fill_()
    setting.forced.set_(1)
    run = static(setting)

    @torch.no_grad()
    def step() -> float:
        meter = Meter(torch.device("cpu"))
        run(meter, 1, setting.steps)
        return statistics.median(meter.milliseconds())

    return step


def step_ms(first: Runner, whole: Runner) -> float:
    """Return the milliseconds of a step of ``whole``, without the pass over the prompt, which ``first`` has too."""
    seconds, steps = [], []
    for run in (first, whole):
        began = time.perf_counter()
        steps.append(len(run(prompt())[1]))
        seconds.append(time.perf_counter() - began)
    return 1000 * (seconds[1] - seconds[0]) / max(steps[1] - steps[0], 1)


def ratio(times: dict[str, list[float]], name: str, other: str) -> float:
    """Return how many times longer ``name`` took than ``other``."""
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def others(arguments: argparse.Namespace) -> list[str]:
    """Return the names of this package's runners next to the first."""
    return [*OTHERS[arguments.pattern], *(["int8"] if arguments.int8 else [])]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 768, 1024, 2048])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--new", type=int, default=8, help="new tokens per run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--pattern", choices=[*OTHERS], default="full", help="the target's layers")
    parser.add_argument("--without", nargs="+", choices=PEERS, default=[], metavar="PEER")
    parser.add_argument("--int8", action="store_true", help="also run with weights in 8 bits")
    releases.add_option(parser)
    arguments = parser.parse_args()
    if arguments.new < 2:
        parser.error(f"--new must be at least 2, one token without a step and one with, got {arguments.new}")
    return arguments


def row(hidden: int, dtype: str, bandwidth: float, arguments: argparse.Namespace) -> str:
    """Measure a width and return its line."""
    from step.pair import floor_bytes

    made = pair(hidden, arguments.layers, dtype, arguments.pattern)
    times = measure(made, hidden, dtype, arguments)
    medians = {name: statistics.median(values) for name, values in times.items()}
    size = floor_bytes(made.target, made.drafter, PROMPT, 1)
    floor = 1000 * size / bandwidth
    line = f"{hidden:6} {arguments.layers:6} {dtype:<9} {size / 1e6:7.0f} {floor:7.2f} {medians['ours']:7.2f} "
    line += f"{100 * floor / medians['ours']:5.3g} %"
    for name in PEERS:
        line += f" {medians[name]:9.2f} {ratio(times, name, 'ours'):5.2f}x" if name in times else f" {'-':>9} {'-':>6}"
    return line + "".join(f" {medians[name]:8.2f} {ratio(times, 'ours', name):12.2f}x" for name in others(arguments))


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    bandwidth = harness.read_bandwidth(harness.Timer(torch.device("cpu")))
    print(
        f"{harness.processor()}, {torch.get_num_threads()} threads, ISA {ops.isa()}, torch {torch.__version__}, "
        f"read {bandwidth / 1e9:.1f} GB/s; ms per step after a prompt of {PROMPT} tokens; random weights"
    )
    if arguments.against:
        print("hidden layers dtype         ours      other  ratio  identical")
        for found in releases.compare("bench_step_cpu", arguments, arguments.repeats):
            times = f"{1000 * found.seconds:7.2f} {1000 * found.other_seconds:10.2f} {found.ratio:5.2f}x"
            print(f"{found.name:<24} {times} {found.identical:>8}/{found.pieces}", flush=True)
        return
    columns = "".join(f" {name:>9} {'ratio':>6}" for name in PEERS)
    columns += "".join(f" {name:>8} {'ours / ' + name:>13}" for name in others(arguments))
    print("hidden layers dtype          MB   floor    ours  share" + columns)
    for hidden, dtype in itertools.product(arguments.hidden, arguments.dtypes):
        print(row(hidden, dtype, bandwidth, arguments), flush=True)


if __name__ == "__main__":
    main()

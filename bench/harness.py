"""What every ``bench_<op>.py`` shares: sizes, operands, interleaved timing, the lines and the JSON rows.

A bench file yields :class:`Case` objects and calls :func:`main`; ``bench_all.py`` runs them all. Prints, asserts
nothing. How to read a line: bench/README.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash import ops

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Model:
    """The sizes of a model that its ops' shapes follow from."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    layers: int  # of its drafter
    taps: int


MODELS = {
    "pair": Model(192, 3, 1, 64, 512, 512, 3, 3),
    "qwen3-0.6b": Model(1024, 16, 8, 128, 3072, 151936, 5, 5),
    "qwen3-8b": Model(4096, 32, 8, 128, 12288, 151936, 5, 5),
}
TINY = {"tiny": Model(64, 2, 1, 32, 96, 200, 2, 2)}


@dataclass(frozen=True)
class Case:
    """One line: an op at one shape, and what a user would write in plain torch instead.

    ``make`` returns the operands of a call; ``ours`` and every peer take them. ``moved`` is the least traffic of a call
    in bytes: every operand that it needs read once, every result written once. A shape that comes twice with the same
    dtype is measured once; ``dtype`` names another than the run's where an op has no floating operand.
    """

    shape: str
    make: Callable[[], tuple]
    ours: Callable
    peers: dict[str, Callable]
    moved: int
    dtype: str = ""


@dataclass(frozen=True)
class Options:
    """What a bench file reads when it lays out its cases."""

    models: dict[str, Model]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers of this run's dtype on its device: a million drawn, then repeated."""
        count = torch.Size(shape).numel()
        drawn = torch.randn(min(count, 1 << 20), generator=torch.Generator().manual_seed(count)) * scale
        drawn = drawn.to(self.device, dtype or self.dtype)
        return drawn.repeat(-(-count // max(len(drawn), 1)))[:count].view(shape)

    def positions(self, first: int, rows: int) -> Tensor:
        """``[1, rows]`` int64: first, first + 1, ..."""
        return torch.arange(first, first + rows, device=self.device)[None]

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)

    def rope(self, rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin, ``[1, rows, head_dim / 2]`` float32."""
        angles = torch.rand(1, rows, head_dim // 2, device=self.device) * 6
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as transformers writes it; cos and sin are full width and broadcast over heads."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def full_width(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin as :func:`rotate` takes them: ``[batch, 1, rows, head_dim]``, in the dtype of the heads."""
    return tuple(torch.cat((x, x), -1).to(dtype)[:, None] for x in (cos, sin))


# ---- timing


@functools.cache
def cache_bytes(device: torch.device) -> int:
    """The device's last-level cache."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes) or 32 << 20


def _bytes(operands: Iterable) -> int:
    tensors = (x if isinstance(x, list | tuple) else [x] for x in operands)
    return sum(t.nbytes for group in tensors for t in group if isinstance(t, Tensor))


def operand_sets(case: Case, cold: bool, device: torch.device) -> list[tuple]:
    """One set of operands, or with ``cold`` so many that a round over them leaves nothing in the cache."""
    sets = [case.make()]
    if cold:
        count = 2 * cache_bytes(device) // max(_bytes(sets[0]), 1) + 1
        sets += [case.make() for _ in range(min(count, 256) - 1)]
    return sets


def _cpu_sampler(run: Callable, sets: list[tuple], at_least: float, clock: Callable) -> Callable[[], float]:
    """A function that returns the seconds of one call, averaged over enough calls to last ``at_least`` seconds."""
    at = 0

    def calls(count: int) -> float:
        nonlocal at
        began = clock()
        for _ in range(count):
            run(*sets[at])
            at = at + 1 if at + 1 < len(sets) else 0
        return max(clock() - began, 1e-9) / count

    once, count = calls(1), 1
    if once < at_least:  # else the first call was all the warm-up it needs
        once = calls(1)
    while once * count < at_least:
        count = max(2 * count, min(int(at_least / once), 8 * count))
        once = calls(count)
    return functools.partial(calls, count)


def _cuda_sampler(run: Callable, sets: list[tuple], at_least: float, clock: Callable) -> Callable[[], float]:
    """The same by events around replays of a CUDA graph that holds calls over every set of operands."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a first call does must not be captured
        for _ in range(2):
            run(*sets[0])
    torch.cuda.current_stream().wait_stream(side)
    rounds = -(-16 // len(sets))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for operands in sets:
                run(*operands)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replays(count: int) -> float:
        began.record()
        for _ in range(count):
            graph.replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1000 / (count * rounds * len(sets))

    replays(1)
    return functools.partial(replays, max(1, int(at_least / max(replays(1) * rounds * len(sets), 1e-7))))


def interleaved(
    runners: dict[str, Callable], sets: list[tuple], device: torch.device, seconds: float, clock: Callable
) -> dict[str, list[float]]:
    """Seconds a call of every runner, sampled in turns for about ``seconds``.

    At least three samples each, but one will do where that would take more than ten times as long.
    """
    sampler = _cuda_sampler if device.type == "cuda" else _cpu_sampler
    samplers = {name: sampler(run, sets, seconds / 60, clock) for name, run in runners.items()}
    times: dict[str, list[float]] = {name: [] for name in runners}
    began, order = time.perf_counter(), list(runners)
    rounds, spent = 0, 0.0
    while rounds == 0 or (rounds < 50 and spent < (seconds if rounds >= 3 else max(10 * seconds, 0.1))):
        for name in order:
            times[name].append(samplers[name]())
        order.reverse()
        rounds, spent = rounds + 1, time.perf_counter() - began
    return times


def copy_bandwidth(device: torch.device, quick: bool, clock: Callable) -> float:
    """Bytes a second that a large copy reads and writes, the median of several."""
    count = 1 << (18 if quick else 28 if device.type == "cuda" else 26)
    source, target = torch.zeros(count, device=device), torch.zeros(count, device=device)
    sampler = _cuda_sampler if device.type == "cuda" else _cpu_sampler
    sample = sampler(lambda a, b: a.copy_(b), [(target, source)], 0.01, clock)
    return 2 * source.nbytes / statistics.median(sample() for _ in range(3 if quick else 9))


# ---- the lines


@dataclass
class Row:
    """One line as ``--json`` writes it. ``ratio``: time of the fastest peer over ours, median of the rounds."""

    op: str
    shape: str
    dtype: str
    us: float
    gb_s: float
    share_of_copy: float
    ratio: float
    peer: str
    peers_us: dict[str, float]

    def __str__(self) -> str:
        slower = "  <" if self.ratio < 1 else ""
        return (
            f"{self.op:<21} {self.shape:<46} {self.dtype:<8} | {self.us:10.1f} us | {self.gb_s:7.2f} GB/s | "
            f"{100 * self.share_of_copy:4.0f} % of copy | {self.ratio:6.2f}x {self.peer}{slower}"
        )


def measure(op: str, case: Case, options: Options, copy: float, clock: Callable, arguments: argparse.Namespace) -> Row:
    """Run one case."""
    seconds = 0.0 if arguments.quick else arguments.seconds
    with torch.inference_mode():
        sets = operand_sets(case, arguments.cold, options.device)
        times = interleaved({"ours": case.ours, **case.peers}, sets, options.device, seconds, clock)
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    peer = min(case.peers, key=medians.__getitem__)
    return Row(
        op=op,
        shape=case.shape,
        dtype=case.dtype or str(options.dtype).removeprefix("torch."),
        us=1e6 * medians["ours"],
        gb_s=case.moved / medians["ours"] / 1e9,
        share_of_copy=case.moved / medians["ours"] / copy,
        ratio=statistics.median(b / a for a, b in zip(times["ours"], times[peer], strict=True)),
        peer=peer,
        peers_us={name: 1e6 * medians[name] for name in case.peers},
    )


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine(device: torch.device) -> str:
    """The name of what the numbers come from; for a GPU with its clocks and CUDA."""
    if device.type == "cuda":
        query = f"--id={device.index or 0}", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"
        clocks = _said("nvidia-smi", *query)
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, clocks {clocks or 'unknown'}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver(device: torch.device) -> str:
    """The version of the GPU's driver; empty without one."""
    if device.type != "cuda":
        return ""
    return _said("nvidia-smi", f"--id={device.index or 0}", "--query-gpu=driver_version", "--format=csv,noheader")


def header(device: torch.device, copy: float) -> dict[str, str | int | float]:
    """What a reader needs to compare two runs."""
    commit = _said("git", "rev-parse", "--short", "HEAD") or "unknown"
    return {
        "machine": machine(device),
        "isa": ops.isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit + ("+" if _said("git", "status", "--porcelain", "-uno") else ""),
        "copy_gb_s": copy / 1e9,
    }


def run(
    benches: dict[str, Callable[[Options], Iterator[Case]]], arguments: argparse.Namespace
) -> tuple[dict[str, str | int | float], list[Row]]:
    """Measure every case of every bench and print its line as it comes."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    models = TINY if arguments.quick else {name: MODELS[name] for name in arguments.models}
    clock = time.thread_time if arguments.own_time else time.perf_counter
    copy = copy_bandwidth(device, arguments.quick, clock)
    facts = header(device, copy)
    print(
        f"{facts['machine']}, ISA {facts['isa']}, {facts['threads']} threads, torch {facts['torch']}, "
        f"commit {facts['commit']}, copy {facts['copy_gb_s']:.1f} GB/s, "
        f"operands {'from memory' if arguments.cold else 'as the last call left them'}"
    )
    rows, measured = [], set()
    for op, cases in benches.items():
        for dtype in arguments.dtypes:
            options = Options(
                models=models,
                rows=(3,) if arguments.quick else tuple(arguments.rows),
                contexts=(20,) if arguments.quick else tuple(arguments.contexts),
                dtype=getattr(torch, dtype),
                device=device,
            )
            for case in cases(options):
                if (op, case.shape, case.dtype or dtype) in measured:
                    continue
                measured.add((op, case.shape, case.dtype or dtype))
                rows.append(measure(op, case, options, copy, clock, arguments))
                print(rows[-1], flush=True)
    return facts, rows


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every bench."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 1024])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (graph replays timed by events)")
    parser.add_argument("--threads", type=int, help="torch's CPU threads")
    parser.add_argument("--seconds", type=float, default=0.2, help="of sampling per line, about")
    parser.add_argument(
        "--cold",
        action=argparse.BooleanOptionalAction,
        help="take turns over copies of the operands larger than the last-level cache (default on a GPU)",
    )
    parser.add_argument(
        "--own-time",
        action="store_true",
        help="one thread: its processor time alone, where other work shares the machine",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes and three samples: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the header and the rows there as well")
    return parser


def finish(
    benches: dict[str, Callable[[Options], Iterator[Case]]],
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
) -> None:
    """Run, and write the JSON file."""
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no GPU")
    if arguments.own_time and (arguments.device != "cpu" or (arguments.threads or torch.get_num_threads()) > 1):
        parser.error("--own-time counts one CPU thread: use it with --device cpu --threads 1")
    if arguments.cold is None:
        arguments.cold = arguments.device.startswith("cuda")
    facts, rows = run(benches, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def main(cases: Callable[[Options], Iterator[Case]]) -> None:
    """The command line of one bench file."""
    module = sys.modules[cases.__module__]
    options = parser(module.__doc__)
    finish({Path(module.__file__).stem.removeprefix("bench_"): cases}, options, options.parse_args())

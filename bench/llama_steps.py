"""A step, a prompt and many rows of one token, here and in llama.cpp's own benchmarks, in turns on this machine's CPU.

    python bench/llama_steps.py MODEL.gguf [--only steps prompts rows] [--threads N] [--repeats 3] [--json FILE]

llama.cpp is built as for `llama_cpp.py`. Both have the file as it is; then llama.cpp has it in Q8_0 and BF16, and here
its weights are int8 and bfloat16.
Milliseconds, medians; the ratio is llama.cpp's time over this package's, the median of those of turns.

    steps      1, 8 and 16 tokens after 64: llama-bench, and a whole step here without a drafter, padded to that block
    prompts    to the first token of a prompt: llama-bench's pass over it, and a whole call here
    rows       a step of 32 rows of one token, after 32 tokens each: llama-batched-bench, which chooses no tokens, and a
               session here, which samples them at T = 0.7 and hands them to its caller

Prints; asserts nothing.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import llama_server
import torch
from bench_rows import step_ms
from torch import Tensor

import dflash
from dflash.loading import Pretrained
from dflash.session import Session
from dflash.targets import machine_name

STEPS, PROMPTS, ROWS, BEFORE, NEW = (1, 8, 16), (128, 512, 2048), 32, 64, 33
KINDS = {"file": None, "int8": "Q8_0", "bf16": "BF16"}  # of llama.cpp, by the name of the same precision here


class LlamaCpp:
    """The benchmarks of llama.cpp for a model: milliseconds by what is measured."""

    def __init__(self, programs: Path, model: Path, threads: int) -> None:
        self.programs, self.model, self.threads = programs, model, threads

    def steps(self) -> list[float]:
        return llama_server.steps(self.programs, self.model, self.threads, STEPS, BEFORE, NEW)

    def prompts(self) -> list[float]:
        sizes = ",".join(map(str, PROMPTS))
        return [*llama_server.bench(self.programs, self.model, self.threads, "-p", sizes, "-n", 0, "-r", 2).values()]

    def rows(self) -> list[float]:
        sizes = "-npp", 32, "-ntg", NEW, "-npl", ROWS, "-c", ROWS * (32 + NEW), "--output-format", "jsonl"
        command = [self.programs / "llama-batched-bench", "-m", self.model, "-t", self.threads, *sizes]
        done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
        (found,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
        return [1000 * found["t_tg"] / NEW]


class Here:
    """The same of this package. Generators are made once."""

    def __init__(self, target: torch.nn.Module, weights: str | None) -> None:
        self.vocab = target.config.vocab_size
        fixed = {"weights": weights, "reuse_prefix": False}
        self.generator = functools.cache(lambda **sizes: dflash.Generator(target, None, **fixed, **sizes))

    def _ids(self, length: int) -> Tensor:
        return torch.randint(self.vocab, (1, length), generator=torch.Generator().manual_seed(length))

    def steps(self) -> list[float]:
        made = [self.generator(max_length=BEFORE + NEW, block_size=width) for width in STEPS]
        return [step_ms(generator, self._ids(BEFORE), NEW) for generator in made]

    def prompts(self) -> list[float]:
        times = []
        for length in PROMPTS:
            began = time.perf_counter()
            self.generator(max_length=max(PROMPTS) + 1).generate(self._ids(length), max_new_tokens=1, temperature=0.0)
            times.append(1000 * (time.perf_counter() - began))
        return times

    def rows(self) -> list[float]:
        session = Session(self.generator(max_length=256, batch_size=ROWS), cache_bytes=0)
        begun: set[int] = set()
        for seed in range(ROWS):
            options = {"max_new_tokens": 200, "temperature": 0.7, "seed": seed, "stop_token_ids": []}
            session.admit(session.resolve(self._ids(32), **options))
        while len(begun) < ROWS:
            begun |= {event.row for event in session.step()}
        session.step()  # of all rows
        began = time.perf_counter()
        for _ in range(NEW):
            session.step()
        return [1000 * (time.perf_counter() - began) / NEW]


NAMES = {
    "steps": [f"a step of {width}" for width in STEPS],
    "prompts": [f"a prompt of {length}" for length in PROMPTS],
    "rows": [f"{ROWS} rows of 1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--weights", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--build", type=Path, default=llama_server.BUILD, help="where llama.cpp is built")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    programs, rows = llama_server.build(arguments.build), []
    files = Pretrained(str(arguments.model))
    setting = {"machine": machine_name(torch.device("cpu")), "isa": dflash.ops.isa(), "threads": arguments.threads}
    print(", ".join(f"{key} {value}" for key, value in setting.items()), llama_server.SOURCE, sep=", ")
    print(f"{'':<24}llama.cpp     here   ratio")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        for precision in arguments.weights:
            model, kind = arguments.model, KINDS[precision]
            if kind is not None:
                model = llama_server.quantized(programs, arguments.model, kind, Path(folder))
            target = dataclasses.replace(files, keeps_blocks=kind is None).load_target(torch.bfloat16)
            theirs = LlamaCpp(programs, model, arguments.threads)
            ours = Here(target, "int8" if precision == "int8" else None)
            for part in arguments.only:
                getattr(ours, part)()  # a warm-up; their programs have their own
                turns = [(getattr(theirs, part)(), getattr(ours, part)()) for _ in range(arguments.repeats)]
                for i, name in enumerate(NAMES[part]):
                    times = [(there[i], here[i]) for there, here in turns]
                    there, here = (statistics.median(side) for side in zip(*times, strict=True))
                    ratio = statistics.median(there / here for there, here in times)
                    rows.append({"name": f"{name}, {precision}", "llama.cpp": there, "here": here, "ratio": ratio})
                    print(f"{rows[-1]['name']:<24}{there:>9.2f}{here:>9.2f}{ratio:>7.2f}x", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

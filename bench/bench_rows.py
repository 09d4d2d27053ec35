"""Milliseconds of a step by its rows: what a verified block costs next to one token, for a model on this machine.

    python bench/bench_rows.py --model FILE.gguf --against llama.cpp [--rows 1 8 16]
    python bench/bench_rows.py --model PATH [--rows 1 2 4 8 16 32 64] [--weights int8] [--dtype bfloat16] [--threads N]

PATH is what --model of the commands takes. There is no drafter: a step of n rows is one-token decoding, padded to a
block of n. Its time is that by which a run takes longer than one that stops after the first token, over its further
steps. Runs of n rows and of one row take turns; columns are medians, and the ratio is the median of those of turns.

    of one     how many times longer than a step of one row
    per row    milliseconds over rows: what a drafted token costs if all are accepted
    share      the time to read the target's weights once, at the bandwidth of the fastest reduction of torch, over ms
    head       milliseconds of the step's product with the head, and choice those of its selection over the vocabulary
    llama.cpp  milliseconds of llama-bench's pass, which chooses no token, and ratio those over ms

Prints; asserts nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import harness
import llama_server
import torch
from internals import time_parts
from torch import Tensor

import dflash
from dflash import ops
from dflash.cli.sources import Source, load_target
from dflash.targets import is_packed, weight_bytes_per_token

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


def step_ms(generator: dflash.Generator, prompt: Tensor, new: int) -> float:
    """Return the milliseconds of a step after the first token."""
    seconds = []
    for count in (1, new):
        began = time.perf_counter()
        generator.generate(prompt, max_new_tokens=count, temperature=0.0, stop_token_ids=[])
        seconds.append(time.perf_counter() - began)
    return 1000 * (seconds[1] - seconds[0]) / (new - 1)


def weight_bytes(target: torch.nn.Module, weights: str | None) -> int:
    """Return the bytes of weights that a step reads: all but an embedding that is not the head too."""
    if is_packed(target):
        return round(sum(weight_bytes_per_token(target).values()))
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    read = [p for p in target.parameters() if p is not embedding or embedding is head]
    return sum(p.numel() * (1 if weights == "int8" and p.dim() == 2 else p.element_size()) for p in read)


def parser_of(doc: str | None, *, rows: Sequence[int], new: int, repeats: int) -> argparse.ArgumentParser:
    """Return a parser of a model's options and those of its steps, with these defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=rows)
    parser.add_argument("--weights", choices=["int8"])
    parser.add_argument("--dtype", default="auto", help="default: that of the files")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt, which are random")
    parser.add_argument("--new", type=int, default=new, help="new tokens per run")
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def main() -> None:
    parser = parser_of(__doc__, rows=ROWS, new=17, repeats=5)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--against", choices=["llama.cpp"], help="take turns with llama-bench on the same GGUF file")
    arguments = parser.parse_args()
    if arguments.new < 2 or min(arguments.rows) < 1 or arguments.repeats < 1:
        parser.error("--rows and --repeats must be at least 1, and --new at least 2: one token without a step")
    torch.set_num_threads(arguments.threads)
    programs = llama_server.build() if arguments.against else Path()
    target = load_target(Source(arguments.model), arguments.dtype, "cpu")
    prompt = torch.randint(target.config.get_text_config().vocab_size, (1, arguments.prompt))
    bandwidth = harness.read_bandwidth(harness.Timer(torch.device("cpu")))
    size = weight_bytes(target, arguments.weights)
    setting = {
        "model": arguments.model, "dtype": str(target.dtype).removeprefix("torch."), "weights": arguments.weights,
        "processor": harness.processor(), "isa": ops.isa(), "threads": arguments.threads, "prompt": arguments.prompt,
        "read_gb_s": bandwidth / 1e9, "weight_mb": size / 1e6, "floor_ms": 1000 * size / bandwidth,
    }  # fmt: skip
    print(
        ", ".join(
            f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in setting.items()
        )
    )
    print("rows       ms  of one  per row  share    head  choice" + "  llama.cpp   ratio" * bool(arguments.against))

    def generator(rows: int) -> dflash.Generator:
        length = arguments.prompt + arguments.new
        made = dflash.Generator(
            target, None, max_length=length, block_size=rows, weights=arguments.weights, reuse_prefix=False
        )
        step_ms(made, prompt, 2)
        return made

    one, found = generator(1), []
    for rows in arguments.rows:
        runs = [one, one if rows == 1 else generator(rows)]
        parts = time_parts(runs[1])
        turns = []
        for _ in range(arguments.repeats):
            turn = [step_ms(run, prompt, arguments.new) for run in runs]
            if arguments.against:
                model, threads = Path(arguments.model), arguments.threads
                turn += llama_server.steps(programs, model, threads, [rows], arguments.prompt, arguments.new)
            turns.append(turn)
        head, choice = (1000 * statistics.median(parts[part]) for part in ("head", "choice"))
        ms, ratio = statistics.median(turn[1] for turn in turns), statistics.median(turn[1] / turn[0] for turn in turns)
        share = setting["floor_ms"] / ms
        found.append({"rows": rows, "ms": ms, "of_one": ratio, "share": share, "head": head, "choice": choice})
        line = f"{rows:4} {ms:8.2f} {ratio:7.2f} {ms / rows:8.2f} {share:6.0%} {head:7.2f} {choice:7.2f}"
        if arguments.against:
            theirs = statistics.median(turn[2] for turn in turns)
            found[-1] |= {"llama_cpp": theirs, "ratio": statistics.median(c / b for _, b, c in turns)}
            line += f" {theirs:10.2f} {found[-1]['ratio']:6.2f}x"
        print(line, flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**setting, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Whole generations, several ways, in one process: interleaved over prompts, medians over prompts.

    python bench/bench_generate.py [--pair FOLDER] [--prompts N] [--temperature 0] [--dtype float32] [--compile]
                                   [--busy N] [--json results.json] [--plot results.png]

Runners:
    transformers          `generate`, one token a forward; greedy, or sampling at the temperature
    prompt lookup         `generate(prompt_lookup_num_tokens=...)`, --lookup of them
    transformers dflash   `generate(speculation_type="dflash")` with transformers' own drafter class
                          (MuseGlimmerAssistantModel) holding the pair's weights; left out where they do not fit it
    as_assistant          the same loop around this package's drafter, by `dflash.as_assistant`
    reference             the reference package's loop and drafter, where `.peers/dflash/model.py` exists
                          (`pip install --no-deps --target .peers dflash==0.1.0`)
    one-token             this package without a drafter, one row a step
    dflash                this package; with --compile also `dflash compiled`

Columns: ms/token and tokens/s with the prompt's forward pass included; acceptance, the tokens that a step emits, bonus
token counted, where a step is a forward of the target that may verify drafts (the prompt's forward is one for prompt
lookup and one-token decoding); ms/step over the same steps; speedup over transformers; identical, answers equal token
for token, at T = 0 to transformers', at T > 0 to `one-token` (other runners draw other random numbers). With --busy
other programs want processors all the while. Prints; asserts nothing.
"""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from peers import native_drafter, reference_runner
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash
from dflash import ops
from dflash.evaluate.demo import PAIR

ROOT = Path(__file__).resolve().parents[1]
BASE, ONE_TOKEN = "transformers", "one-token"


class Answer(NamedTuple):
    """A runner's sequences ``[1, prompt + new]`` and the tokens that its steps emitted."""

    ids: Tensor
    tokens: int
    steps: int


Runner = Callable[[Tensor], Answer]


@contextmanager
def forwards(target: nn.Module):
    """Counts the forwards of ``target`` in a list of one."""
    count = [0]
    handle = target.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    try:
        yield count
    finally:
        handle.remove()


def theirs(target: nn.Module, temperature: float, new: int, prompt_is_step: bool = True, **options) -> Runner:
    """transformers' ``generate`` with ``options``, and with a cache whatever the generation_config says of it."""
    options["use_cache"] = True
    sample = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}

    def run(ids: Tensor) -> Answer:
        torch.manual_seed(1)
        with forwards(target) as count:
            out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **sample, **options)
        first = 0 if prompt_is_step else 1
        return Answer(out, out.shape[1] - ids.shape[1] - first, count[0] - first)

    return run


def ours(target: nn.Module, draft: nn.Module | None, length: int, arguments: argparse.Namespace, **options) -> Runner:
    """A :class:`dflash.Generator` of this package."""
    generator = dflash.Generator(target, draft, max_length=length, reuse_prefix=False, **options)

    def run(ids: Tensor) -> Answer:
        out = generator.generate(
            ids,
            max_new_tokens=arguments.new,
            temperature=arguments.temperature,
            seed=1,
            draft_sharpness=arguments.draft_sharpness,
            return_dict_in_generate=True,
        )
        lengths = out.statistics.acceptance_lengths[0]
        first = draft is None
        return Answer(out.sequences, sum(lengths) + first, len(lengths) + first)

    return run


def runners(arguments: argparse.Namespace, target: nn.Module, length: int) -> dict[str, Runner]:
    """Every runner that can run here, by name; says on standard error what is left out and why."""
    folder, dtype = arguments.pair / "draft", getattr(torch, arguments.dtype)
    temperature, new = arguments.temperature, arguments.new
    draft = dflash.load_draft(folder, dtype=dtype)
    found = {
        BASE: theirs(target, temperature, new),
        "prompt lookup": theirs(target, temperature, new, prompt_lookup_num_tokens=arguments.lookup),
    }

    def native() -> nn.Module:
        weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        return native_drafter(json.loads((folder / "config.json").read_text()), weights)

    assistants = {
        "transformers dflash": native,
        "as_assistant": lambda: dflash.as_assistant(draft),
    }
    for name, make in assistants.items():
        try:
            options = {"assistant_model": make(), "speculation_type": "dflash", "prompt_is_step": False}
            found[name] = theirs(target, temperature, new, **options)
        except (ValueError, RuntimeError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    if reference := reference_runner(folder, target, dtype, temperature, new):

        def of_reference(ids: Tensor) -> Answer:
            out, lengths = reference(ids)
            return Answer(out, sum(lengths), len(lengths))

        found["reference"] = of_reference
    else:
        print("reference is left out: there is no .peers/dflash/model.py", file=sys.stderr)
    found[ONE_TOKEN] = ours(target, None, length, arguments)
    found["dflash"] = ours(target, draft, length, arguments)
    if arguments.compile:
        found["dflash compiled"] = ours(target, draft, length, arguments, compile=True)
    return found


def measure(found: dict[str, Runner], prompts: list[Tensor], temperature: float) -> list[dict]:
    """A row of results per runner."""
    base = BASE if temperature == 0 else ONE_TOKEN  # at T > 0 the seed decides within this package only
    answers: dict[str, list[tuple[Answer, float]]] = {name: [] for name in found}
    for run in found.values():  # warm-up: allocation, compilation
        run(prompts[0])
    for ids in prompts:
        for name, run in found.items():
            began = time.perf_counter()
            answer = run(ids)
            answers[name].append((answer, 1000 * (time.perf_counter() - began)))
    rows = []
    for name, results in answers.items():
        counts = [answer.ids.shape[1] - ids.shape[1] for (answer, _), ids in zip(results, prompts, strict=True)]
        per_token = statistics.median(ms / count for (_, ms), count in zip(results, counts, strict=True))
        equal = [
            torch.equal(answer.ids, expected.ids)
            for (answer, _), (expected, _) in zip(results, answers[base], strict=True)
        ]
        steps = sum(answer.steps for answer, _ in results)
        rows.append(
            {
                "runner": name,
                "ms_per_token": per_token,
                "tokens_per_second": 1000 / per_token,
                "acceptance_length": sum(answer.tokens for answer, _ in results) / max(steps, 1),
                "ms_per_step": statistics.median(ms / max(answer.steps, 1) for answer, ms in results),
                "identical": sum(equal),
                "prompts": len(prompts),
            }
        )
    for row in rows:
        row["speedup"] = rows[0]["ms_per_token"] / row["ms_per_token"]
    return rows


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def header(arguments: argparse.Namespace, target: nn.Module, prompts: int) -> dict:
    """What the figures were measured on and with."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(git, capture_output=True, text=True) if (ROOT / ".git").exists() else None
    return {
        "command": "python " + shlex.join(sys.argv),
        "commit": done.stdout.strip() if done is not None and done.returncode == 0 else None,
        "machine": {"processor": processor(), "processors": os.cpu_count(), "architecture": platform.machine()},
        "isa": ops.isa(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dflash-engine": dflash.__version__,
        },
        "dtype": arguments.dtype,
        "temperature": arguments.temperature,
        "busy_processes": arguments.busy,
        "prompts": prompts,
        "new_tokens_at_most": arguments.new,
        "target_parameters": sum(parameter.numel() for parameter in target.parameters()),
    }


def plot(path: Path, rows: list[dict], about: dict) -> None:
    """A bar a runner, tokens a second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.45 * len(rows) + 1.3), layout="constrained")
    axes = figure.add_subplot()
    speeds = [row["tokens_per_second"] for row in rows]
    own = [row["runner"].startswith(("dflash", ONE_TOKEN)) for row in rows]
    bars = axes.barh([row["runner"] for row in rows], speeds, color=["tab:blue" if mine else "0.6" for mine in own])
    labels = [
        f"{row['tokens_per_second']:.0f}  ({row['speedup']:.1f}x, acceptance {row['acceptance_length']:.1f})"
        for row in rows
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.set_xlim(0, 1.45 * max(speeds))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens a second, batch 1, median over prompts")
    axes.set_title(
        f"{about['machine']['processor']}, {about['threads']} threads, {about['isa']}, {about['dtype']}, "
        f"T = {about['temperature']:g}, {about['prompts']} prompts",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that each keep a processor busy."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pair", type=Path, default=PAIR, help="folder with target/, draft/ and prompts.jsonl; default: the package's"
    )
    parser.add_argument("--prompts", type=int, help="default: all")
    parser.add_argument("--new", type=int, default=200, help="new tokens at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--draft-sharpness", type=lambda text: text if text == "auto" else float(text), default="auto", metavar="NUMBER"
    )
    parser.add_argument("--lookup", type=int, default=10, help="tokens that prompt lookup proposes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute beside the runners")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results, a row a runner, and what made them"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results (PNG, SVG or PDF)")
    arguments = parser.parse_args()
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]'")
    return arguments


def main() -> None:
    arguments = parse()
    target = AutoModelForCausalLM.from_pretrained(
        arguments.pair / "target", dtype=getattr(torch, arguments.dtype)
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.pair / "target")
    lines = (arguments.pair / "prompts.jsonl").read_text().splitlines()[: arguments.prompts]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompts = [
        torch.tensor([bos + tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False)]) for line in lines
    ]
    length = max(ids.shape[1] for ids in prompts) + arguments.new
    about = header(arguments, target, len(prompts))
    found = runners(arguments, target, length)
    beside = f", beside {arguments.busy} busy processes" if arguments.busy else ""
    print(
        f"{about['machine']['processor']}, {about['threads']} threads, ISA {about['isa']}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {arguments.dtype}, T = {arguments.temperature}, "
        f"{len(prompts)} prompts, {about['target_parameters'] / 1e6:.1f} M target parameters{beside}"
    )
    with busy(arguments.busy):
        rows = measure(found, prompts, arguments.temperature)
    print("runner               ms/token  tokens/s  acceptance  ms/step  speedup  identical")
    for row in rows:
        print(
            f"{row['runner']:<19} {row['ms_per_token']:9.2f} {row['tokens_per_second']:9.0f} "
            f"{row['acceptance_length']:11.2f} {row['ms_per_step']:8.2f} {row['speedup']:7.2f}x "
            f"{row['identical']:>7}/{row['prompts']}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({**about, "runners": rows}, indent=2) + "\n")
    if arguments.plot:
        plot(arguments.plot, rows, about)


if __name__ == "__main__":
    main()

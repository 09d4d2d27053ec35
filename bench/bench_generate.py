"""Whole generations, several ways, in one process: interleaved over prompts, medians of milliseconds a token.

    python bench/bench_generate.py --pair ../shared/pair [--prompts 64] [--temperature 0] [--dtype float32] [--compile]

Runners: `transformers` (generate, do_sample=False, or sampling at the temperature), `one-token` (this package without a
drafter, one row a step), `dflash` (the step eager) and, with --compile, `dflash compiled`; `reference` is the reference
package's loop where `.peers/dflash/model.py` exists (`pip install --no-deps --target .peers dflash==0.1.0`).
Prints; asserts nothing.
"""

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash
from dflash import ops

ROOT = Path(__file__).resolve().parents[1]


def reference_runner(folder: Path, target, dtype: torch.dtype, temperature: float, new: int) -> Callable | None:
    """The reference package's own loop over its own drafter, or None where it is not installed."""
    path = ROOT / ".peers" / "dflash" / "model.py"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("dflash_reference_package", path)
    sys.modules[spec.name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    package._cuda_time = time.perf_counter  # its timer wants a GPU
    model = package.DFlashDraftModel.from_pretrained(folder, dtype=dtype).eval()

    def run(ids):
        out = package.dflash_generate(model, target, ids, new, [0], temperature=temperature, return_stats=True)
        return out.output_ids, out.acceptance_lengths

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/, draft/ and prompts.jsonl")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new", type=int, default=120, help="new tokens at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--draft-sharpness", type=lambda text: text if text == "auto" else float(text), default="auto", metavar="NUMBER"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    dtype, temperature, new = getattr(torch, arguments.dtype), arguments.temperature, arguments.new

    target = AutoModelForCausalLM.from_pretrained(arguments.pair / "target", dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.pair / "target")
    draft = dflash.load_draft(arguments.pair / "draft", dtype=dtype)
    lines = (arguments.pair / "prompts.jsonl").read_text().splitlines()[: arguments.prompts]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompts = [
        torch.tensor([bos + tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False)]) for line in lines
    ]
    length = max(ids.shape[1] for ids in prompts) + new

    def ours(drafter, **options):
        generator = dflash.Generator(target, drafter, max_length=length, reuse_prefix=False, **options)

        def run(ids):
            out = generator.generate(
                ids,
                max_new_tokens=new,
                temperature=temperature,
                seed=1,
                draft_sharpness=arguments.draft_sharpness,
                return_dict_in_generate=True,
            )
            return out.sequences, out.statistics.acceptance_lengths[0]

        return run

    def plain(ids):
        sample = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        return target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **sample), []

    runners: dict[str, Callable] = {"transformers": plain, "one-token": ours(None), "dflash": ours(draft)}
    if arguments.compile:
        runners["dflash compiled"] = ours(draft, compile=True)
    if reference := reference_runner(arguments.pair / "draft", target, dtype, temperature, new):
        runners["reference"] = reference

    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, ISA {ops.isa()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.dtype}, T = {temperature}, "
        f"{len(prompts)} prompts, {sum(p.numel() for p in target.parameters()) / 1e6:.1f} M target parameters"
    )
    per_token: dict[str, list[float]] = {name: [] for name in runners}
    steps: dict[str, list[int]] = {name: [] for name in runners}
    identical = dict.fromkeys(runners, 0)
    for run in runners.values():  # warm-up: allocation, compilation
        run(prompts[0])
    for ids in prompts:
        expected = None
        for name, run in runners.items():
            began = time.perf_counter()
            out, lengths = run(ids)
            seconds = time.perf_counter() - began
            per_token[name].append(1000 * seconds / (out.shape[1] - ids.shape[1]))
            steps[name] += lengths
            # Sampled text is comparable within this package only, where the seed decides it.
            if expected is None and (temperature == 0 or name == "one-token"):
                expected = out
            identical[name] += expected is not None and torch.equal(out, expected)
    base = statistics.median(per_token["transformers"])
    print("runner            ms/token  tokens/s  acceptance  ms/step  speedup  identical")
    for name in runners:
        median = statistics.median(per_token[name])
        acceptance = sum(steps[name]) / len(steps[name]) if steps[name] else 1.0
        print(
            f"{name:<16} {median:9.2f} {1000 / median:9.0f} {acceptance:11.2f} {median * acceptance:8.2f} "
            f"{base / median:7.2f}x {identical[name]:>7}/{len(prompts)}"
        )


if __name__ == "__main__":
    main()

"""How fast the target answers prompts for its drafter's training data, by batch size.

    python bench/bench_regenerate.py [--pair FOLDER] [--prompts N] [--samples 8] [--new 160] [--bos]

Sampled at temperature 1 through `dflash_tools.train.regenerate`, with and without the pair's drafter, in one thread.
Tokens per second of CPU time, which other work on the machine disturbs less, and of wall-clock time. Prints; asserts
nothing.
"""

import argparse
import tempfile
import time
from pathlib import Path

import package_pair
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash
from dflash_tools.config import RegenerateConfig
from dflash_tools.train.data import load_prompts
from dflash_tools.train.regenerate import LocalWriter, regenerate


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package_pair.add_option(parser)
    parser.add_argument("--prompts", type=int, help="default: all")
    parser.add_argument("--samples", type=int, default=8, help="answers per prompt")
    parser.add_argument("--new", type=int, default=160, help="new tokens at most")
    parser.add_argument("--bos", action="store_true", help="put a BOS token before the prompts")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--batch", nargs="+", type=int, default=[16, 32, 64, 128])
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.pair / "target")
    prompts = load_prompts(arguments.pair / "prompts.jsonl")[: arguments.prompts]
    settings = RegenerateConfig((1.0,), samples=arguments.samples, max_new_tokens=arguments.new)
    print("dtype     drafter  batch   tokens  /CPU s  /second")
    for name in arguments.dtype:
        dtype = getattr(torch, name)
        target = AutoModelForCausalLM.from_pretrained(arguments.pair / "target", dtype=dtype)
        for draft in (None, dflash.load_draft(arguments.pair / "draft", dtype=dtype)):
            for batch in arguments.batch:
                writer = LocalWriter(target, tokenizer, draft, batch_size=batch, bos=arguments.bos)
                with tempfile.TemporaryDirectory() as folder:
                    began = time.process_time()
                    done = regenerate(prompts, writer, Path(folder) / "out.jsonl", settings)
                    rate = done.tokens / (time.process_time() - began)
                has_drafter = "no" if draft is None else "yes"
                rates = f"{rate:7.0f} {done.tokens_per_second:8.0f}"
                print(f"{name:<9} {has_drafter:<7} {batch:6} {done.tokens:8} {rates}", flush=True)


if __name__ == "__main__":
    main()

"""What the parts of a step cost by themselves: each called again and again on the state of a running generation.

    python bench/bench_budget.py [--pair FOLDER] [--dtype float32] [--temperature 0] [--repeats 200]

`verify` and `draft` are measured eager and through torch.compile; `as transformers' module` is the target's own forward
on the same rows, with a cache of transformers, cropped after each call. Medians, microseconds. Prints, asserts nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash
from dflash import ops
from dflash.evaluate.demo import PAIR


def microseconds(run: Callable[[], object], repeats: int) -> float:
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pair", type=Path, default=PAIR, help="folder with target/, draft/ and prompts.jsonl; default: the package's"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    target = AutoModelForCausalLM.from_pretrained(arguments.pair / "target", dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.pair / "target")
    draft = dflash.load_draft(arguments.pair / "draft", dtype=dtype)
    prompt = json.loads((arguments.pair / "prompts.jsonl").read_text().splitlines()[0])["prompt"]
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]])

    generator = dflash.Generator(target, draft, max_length=256, reuse_prefix=False)
    generator.generate(ids, max_new_tokens=24, temperature=arguments.temperature, seed=1)
    block, length = generator.block.clamp(min=0).clone(), generator.length.clone()
    generator.num_context.fill_(generator.block_size - 6)
    features = draft.fuse(generator.context, generator.num_context)
    hidden = torch.randn(1, generator.block_size, draft.config.hidden_size, dtype=dtype)
    logits, _ = generator.target.forward(block, length, generator.target_cache)
    positions = length[:, None] + torch.arange(generator.block_size) + 1

    def verify():
        return generator.target.forward(block, length, generator.target_cache)

    def propose():
        return generator._draft_logits(block, features)

    theirs = transformers.DynamicCache(config=target.config)
    target(input_ids=ids, past_key_values=theirs)

    def module():
        target(input_ids=block, past_key_values=theirs)
        theirs.crop(-block.shape[1])

    def step():
        generator.done.zero_()
        generator.length.copy_(length)
        generator.step()

    compiled = [torch.compile(part, fullgraph=True, dynamic=False) for part in (verify, propose)]
    parts = {
        "target, a block's rows, head included": verify,
        "the same, compiled": compiled[0],
        "the same, as transformers' module": module,
        "draft pass, head included": propose,
        "draft pass, compiled": compiled[1],
        "fuse the context": lambda: draft.fuse(generator.context, generator.num_context),
        "draft logits through the target's head": lambda: draft.logits(hidden[:, 1:], generator.target.head),
        "choose a block's tokens, once": lambda: generator._select(logits, positions, generator._ones),
        "the whole step": step,
        "the prompt's pass, first token included": lambda: generator.generate(ids, max_new_tokens=1),
    }
    rows, prompt_length = generator.block_size, ids.shape[1]
    print(
        f"{torch.get_num_threads()} threads, ISA {ops.isa()}, torch {torch.__version__}, {arguments.dtype}, "
        f"T = {arguments.temperature:g}, {rows} rows at length {int(length)}, prompt of {prompt_length}"
    )
    for name, call in parts.items():
        print(f"{name:<42}{microseconds(call, arguments.repeats):9.0f} us")


if __name__ == "__main__":
    main()

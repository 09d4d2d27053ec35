"""What targets in few bits answer with every instruction set, as JSON: one line for each set and dtype.

A process of its own: it chooses an instruction set once, and each set runs in a fork, which must be the first to run a
kernel. Files are packed by one, so each loads its models.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from baseline import left_padded
from families import make_draft

import dflash
from dflash import _C
from dflash.loading import Pretrained
from dflash_tools.measure import demo_prompts, encode

LONG = 280  # tokens of the longest prompt: attention sums chunks of 256 keys
# Threads, rows of a block, prompt tokens per pass and prompts at a time: blocks of 1 to 64 rows
RUNS = [(1, 1, 37, 1), (2, 16, 64, 4), (3, 5, 512, 4)]
TEXT = "Explain in one sentence why the sky is blue."
ARM_SETS = os.environ.get("DFLASH_ARM_SETS", "").split()  # under an emulator, with tests/arm on the path of modules


def run_all(dtypes: str, new: int, model: Path | str = "", weights: str = "int8") -> list[dict]:
    """Run this file. Returns its lines: answers of ``new`` tokens of the package's pair or of a model's files.

    ``weights`` is "int8", or empty for those of the files as they are.
    """
    command = [sys.executable, __file__, dtypes, str(new), str(model), weights]
    environment = {key: value for key, value in os.environ.items() if key != "DFLASH_ISA"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return list(map(json.loads, done.stdout.splitlines()))


def differing(lines: list[dict]) -> list[str]:
    """Return which runs differ from the first one of their dtype."""
    first = {line["dtype"]: line["runs"][0] for line in reversed(lines)}
    return [
        f"{line['isa']}, {line['dtype']}, {run}"
        for line in lines
        for run, answers in zip(RUNS, line["runs"], strict=True)
        if answers != first[line["dtype"]]
    ]


def load(dtype: torch.dtype, model: str) -> tuple:
    """Return a target, its drafter and prompts of several lengths."""
    if model:
        files = Pretrained(Path(model))
        target, ids = files.load_target(dtype), torch.tensor(files.load_tokenizer().encode(TEXT))
        draft, prompts = make_draft(target), [ids[:1], ids[:4], ids]
    else:
        target, draft, tokenizer = dflash.demo_pair(dtype=dtype)
        prompts = [encode(tokenizer, prompt.text)[0] for prompt in demo_prompts()[:3]]
    return target, draft, [*prompts, torch.cat(prompts * LONG)[:LONG]]


def answer(target, draft, prompts: list[torch.Tensor], new: int, run: tuple[int, int, int, int], weights) -> list:
    """Return each answer's tokens, and the log probabilities of prompt and answer."""
    threads, block_size, chunk, at_once = run
    torch.set_num_threads(threads)
    generator = dflash.Generator(
        target, draft, max_length=LONG + new, batch_size=at_once, block_size=block_size, prefill_chunk=chunk,
        weights=weights, draft_weights=None if block_size == 1 else "int8",
    )  # fmt: skip
    found = []
    for first in range(0, len(prompts), at_once):
        ids, mask = left_padded(prompts[first : first + at_once])
        out = generator.generate(
            ids, attention_mask=mask, max_new_tokens=new, logprobs=3, prompt_logprobs=True, stop_token_ids=[],
            return_dict_in_generate=True,
        )  # fmt: skip
        rows = zip(out.sequences[:, ids.shape[1] :].tolist(), out.prompt_logprobs, out.logprobs, strict=True)
        found += [[row, [*before, *after]] for row, before, after in rows]
    return found


def run_set(isa: str, dtypes: str, new: int, model: str, weights: str, receipts: list[str]) -> list[dict]:
    """Return one dict for each dtype. Receipts of the first set are checked by the others."""
    os.environ["DFLASH_ISA"] = isa
    if isa in ARM_SETS:
        importlib.import_module("remote").install(isa)
    assert _C.isa() == isa
    lines = []
    for number, dtype in enumerate(dtypes.split(",")):
        target, draft, prompts = load(getattr(torch, dtype), model)
        found = [answer(target, draft, prompts, new, run, weights or None) for run in RUNS]
        line = {"isa": isa, "dtype": str(target.dtype), "runs": found}
        if receipts:
            line["is_exact"] = dflash.verify(dflash.Receipt.parse(json.loads(receipts[number])), target).is_exact
        else:
            ids, mask = left_padded(prompts)
            recorder = dflash.Recorder(target, ids, attention_mask=mask, temperature=1.0, seed=3, max_new_tokens=new)
            options = {"weights": weights or None, "return_dict_in_generate": True}
            out = dflash.generate(target, draft, ids, **options, **recorder.arguments)
            line["receipt"] = recorder.receipt(out).to_json()
        lines.append(line)
    return lines


def main(dtypes: str, new: str, model: str, weights: str) -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    receipts: list[str] = []
    for isa in (*_C.isas(), *ARM_SETS):
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            lines = pool.submit(run_set, isa, dtypes, int(new), model, weights, receipts).result()
        receipts = receipts or [line["receipt"] for line in lines]
        for line in lines:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

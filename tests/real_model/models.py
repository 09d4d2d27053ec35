"""Files of real models, prompts for them, and their texts with drafts that are mostly right."""

import copy
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the helpers of other tests

import pytest
import torch
from baseline import left_padded
from families import hinted, make_draft

import dflash

BLOCK, TREE = 8, 12


def model_file(name: str) -> Path:
    """Return a file that ``.ci/run real_model`` has downloaded."""
    path = Path(os.environ.get("DFLASH_REAL_MODELS", "")) / name
    if not path.is_file():
        pytest.fail(f"DFLASH_REAL_MODELS must name a folder with {name}: .ci/run real_model downloads it")
    return path


@torch.no_grad()
def plain(target, prompts, new: int, stop: int) -> list[torch.Tensor]:
    """Return what transformers writes greedily. Prompts of one length are a batch: none is padded."""
    texts = {}
    for length in {len(prompt) for prompt in prompts}:
        places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.stack([prompts[place] for place in places])
        sizes = {"max_new_tokens": new, "eos_token_id": stop, "pad_token_id": stop}
        out = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **sizes)
        for place, text in zip(places, out[:, length:], strict=True):
            ends = (text == stop).nonzero()
            texts[place] = text[: int(ends[0]) + 1] if len(ends) else text
    return [texts[place] for place in range(len(prompts))]


def drafted(target, prompts, answers, new: int, **options) -> tuple[list[list[int]], float]:
    """Return what a generator writes whose drafter knows four of five tokens of ``answers``; its tokens per step."""
    texts = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    sizes = {"max_length": max(map(len, prompts)) + new, "block_size": BLOCK}
    generator = hinted(target, make_draft(target), texts, **sizes, **options)
    calls = {"tree": options["tree"]} if "tree" in options else {}
    return written(generator, prompts, new, **calls)


def one_token(target, prompts, new: int, **options) -> list[list[int]]:
    """Return what one-token decoding writes at the shapes of a block."""
    sizes = {"max_length": max(map(len, prompts)) + new, "batch_size": len(prompts), "block_size": BLOCK}
    return written(dflash.Generator(target, None, **sizes, **options), prompts, new)[0]


def written(generator, prompts, new: int, **calls) -> tuple[list[list[int]], float]:
    ids, mask = left_padded(prompts)
    out = generator.generate(ids, attention_mask=mask, max_new_tokens=new, return_dict_in_generate=True, **calls)
    rows = out.sequences[:, ids.shape[1] :].tolist()
    counts = out.statistics.num_new_tokens
    return [row[:count] for row, count in zip(rows, counts, strict=True)], out.statistics.acceptance_length


def narrow(kind: str, files, model) -> tuple[dict[str, str], object]:
    """Return options of a generator and a target: "int8" of ``model``, "bfloat16", or "packed", as the file has it."""
    if kind == "packed":
        return {}, files.load_target(torch.float32)
    return ({"weights": "int8"}, model) if kind == "int8" else ({}, copy.deepcopy(model).bfloat16())


def check_same(found, expected) -> None:
    """Check that rows of tokens are equal; the error says where they part."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        places = [place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]]
        assert ours == theirs, f"prompt {number} from token {places[0] if places else min(len(ours), len(theirs))}"

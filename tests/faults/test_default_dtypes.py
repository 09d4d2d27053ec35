"""A default dtype or device that the user has set changes no text."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from families import make_draft, make_target
from tiny_tokenizers import byte_level

import dflash

IDS = torch.tensor([[5, 17, 33, 70, 8, 61, 12], [9, 3, 44, 2, 90, 71, 30]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
BATCH = {"attention_mask": MASK, "max_new_tokens": 12}
RULES = {
    "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "no_repeat_ngram_size": 3,
    "logit_bias": {4: 2.5, (5, 6): -3.0, 7: -float("inf")}, "bad_words_ids": [[11], [12, 13]],
    "suppress_tokens": [20, 21], "begin_suppress_tokens": [22], "forced_eos_token_id": [2], "min_new_tokens": 4,
    "stop_token_ids": [2, 30],
}  # fmt: skip
CALLS = [
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "seed": 3},
    {"temperature": 0.8, "seed": 5, "acceptance": "rejection", "top_p": 0.9},
    {"denoise_steps": 3, "temperature": 0.7, "seed": 2, "draft_sharpness": 1.0},
    {**RULES, "temperature": 1.0, "seed": 8},
    {"logits_processor": [lambda ids, scores: scores - 0.5 * scores.softmax(-1)], "temperature": 0.6, "seed": 1},
    {"stopping_criteria": [lambda ids, scores: ids[0, -1] == 40]},
    {"stop_strings": ["ab", "j"], "tokenizer": byte_level()},
    {"num_return_sequences": 2, "temperature": 1.0},
]
OPTIONS = [{"fused": False}, {"weights": "int8", "draft_weights": "int8"}, {"tree": 16}]
TARGETS = [("qwen3", torch.bfloat16), ("gemma3", torch.float32), ("gpt_oss", torch.float32)]


@pytest.fixture(scope="module")
def pairs() -> list[tuple]:
    targets = [make_target("qwen3"), *(make_target(family, dtype=dtype) for family, dtype in TARGETS)]
    return [(target, make_draft(target)) for target in targets]


@contextlib.contextmanager
def default(of: torch.dtype | str | None) -> Iterator[None]:
    """Set torch's default dtype or device."""
    if isinstance(of, torch.dtype):
        torch.set_default_dtype(of)
    else:
        torch.set_default_device(of)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def texts(pairs: list[tuple], of: torch.dtype | str | None = None) -> list:
    """Return what every kind of call writes under a default, by generators that are made under it."""
    dflash.release()
    torch.manual_seed(0)
    (target, draft), *others = pairs
    written = []
    with default(of):
        written += [dflash.generate(target, draft, IDS, **BATCH, **call).tolist() for call in CALLS]
        for options in OPTIONS:
            generator = dflash.Generator(target, draft, max_length=40, batch_size=2, **options)
            written.append([(event.ids, event.finish_reasons) for event in generator.stream(IDS, **BATCH)])
        door = {"custom_generate": dflash.custom_generate, "draft": draft, "do_sample": False, "max_new_tokens": 12}
        written.append(target.generate(IDS[1:], **door).tolist())
        written += [dflash.generate(model, drafter, IDS, **BATCH).tolist() for model, drafter in others]
    return written


@pytest.fixture(scope="module")
def plain(pairs) -> list:
    return texts(pairs)


@pytest.mark.parametrize("of", [torch.float64, torch.bfloat16, torch.float16, "meta"], ids=str)
def test_no_default_changes_a_text(pairs, plain, of):
    assert texts(pairs, of) == plain

"""Random schedules of requests on one session, and what each of them writes alone."""

import functools
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from baseline import prompt
from families import make_draft, make_target, save_with_head
from tiny_tokenizers import byte_level

import dflash
from dflash.loading import load_mtp
from dflash.session import Session

ROWS, NEW = 4, 20
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "draft_sharpness": 2.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "stop_token_ids": [*range(30, 45)]},
    {"temperature": 1.0, "stop_strings": ["a", "b "], "tokenizer": ...},
    {"tokenizer": ..., "stop_token_ids": []},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.6, "frequency_penalty": 0.2, "temperature": 1.0},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "temperature": 1.2},
    {"logit_bias": {5: 3.0, (5, 6): 4.0, (7, 8, 9): -2.0}, "temperature": 1.0},
    {"logit_bias": {9: 2.0, 11: -float("inf")}},
    {"bad_words_ids": [[5], [6, 7], [8, 9, 10]], "suppress_tokens": [12]},
    {"min_new_tokens": 9, "stop_token_ids": [*range(2, 60)], "temperature": 1.0},
    {"forced_eos_token_id": 4, "begin_suppress_tokens": [*range(2, 50)]},
    {"grammar": dflash.Grammar.regex(r"([a-f]{2,9}[ \n])*(j|é)"), "temperature": 1.0},
    {"grammar": dflash.Grammar.lark('start: pair\npair: "a" pair "b" | "c" pair "d" | pair pair | /[e-g]+/')},
    {"grammar": dflash.Grammar.regex("a{1,3}"), "temperature": 1.0},
    {"grammar": dflash.Grammar.regex("(abc\n){9}"), "temperature": 1.0, "stop_strings": ["a\na"]},
]


class Request(NamedTuple):
    """A prompt and the other arguments of a call."""

    ids: torch.Tensor
    arguments: dict


class Result(NamedTuple):
    """What a request has written."""

    ids: list[int]
    text: str
    reason: str | None
    kept: list[torch.Tensor]


def requests(vocab: int, tokenizer) -> list[Request]:
    """Return requests of every kind, many of which share the beginning of their prompts."""
    stems = [prompt(40, seed=seed, vocab=vocab) for seed in (61, 62)]
    choose, made = random.Random(5), []
    end = {"tokenizer": tokenizer, "stop_token_ids": [tokenizer.eos_token_id]}
    for index in range(3 * len(SETTINGS)):
        stem, length = choose.choice(stems), choose.choice([1, 7, 8, 16, 17, 25, 40])
        ids = torch.cat([stem[:length], prompt(choose.randint(0, 9), seed=index, vocab=vocab)])
        arguments = {"max_new_tokens": choose.randint(1, NEW), "seed": index, **SETTINGS[index % len(SETTINGS)]}
        if "grammar" in arguments:
            arguments |= end
        elif "tokenizer" in arguments:
            arguments["tokenizer"] = tokenizer
        made.append(Request(ids, arguments))
    return made


def tiny(family: str, dtype: torch.dtype) -> tuple:
    target = make_target(family, dtype=dtype)
    return target, make_draft(target), byte_level()


PAIRS: dict[str, Callable] = {
    "tiny fp32": lambda: tiny("qwen3", torch.float32),
    "tiny bf16": lambda: tiny("qwen3", torch.bfloat16),
    "tiny bf16, own modules": lambda: tiny("qwen3", torch.bfloat16),
    "recurrent bf16": lambda: tiny("qwen3_5", torch.bfloat16),
    "head fp32": lambda: with_head(),
    "trained fp32": lambda: dflash.demo_pair(),
    "trained bf16": lambda: dflash.demo_pair(dtype=torch.bfloat16),
}


def with_head() -> tuple:
    with tempfile.TemporaryDirectory() as folder:
        target = dflash.load_target(save_with_head(Path(folder), "qwen3_5", vocab_size=104))
        return target, load_mtp(target), byte_level()


def options(pair: str) -> dict:
    fused = False if "own modules" in pair else "auto"
    return {"max_length": 72, "batch_size": ROWS, "prefill_chunk": 8, "fused": fused}


@functools.cache
def alone(pair: str) -> tuple:
    """Return target, drafter and requests of a pair, and what each request writes in a session of its own."""
    target, draft, tokenizer = PAIRS[pair]()
    wanted, results = requests(target.get_input_embeddings().weight.shape[0], tokenizer), []
    for request in wanted:
        session = Session(dflash.Generator(target, draft, **options(pair)))
        results += [result for _, result in play(session, [request], random.Random(0))]
        if "grammar" in request.arguments:  # masks that no session applies would be the same in all of them
            generator = dflash.Generator(target, draft, **options(pair))
            output = generator.generate(request.ids[None], return_dict_in_generate=True, **request.arguments)
            assert output.sequences[0, len(request.ids) :].tolist() == results[-1].ids
    return target, draft, wanted, results


def play(
    session: Session, wanted: list[Request], choose: random.Random, tell: Callable = lambda row, request: None,
    meanwhile: Callable = lambda: None,
) -> Iterator[tuple[Request, Result]]:  # fmt: skip
    """Yield each request that was not cancelled, and its result.

    ``tell`` is called when one gets its row, ``meanwhile`` between steps.
    """
    waiting, running = list(wanted), {}
    while waiting or running:
        while waiting and session.idle and (not running or choose.random() < 0.5):
            request = waiting.pop(0)
            row = session.admit(session.resolve(request.ids[None], **request.arguments))
            running[row] = request, [], []
            tell(row, request)
        meanwhile()
        for row, event, error in session.step():
            request, ids, texts = running[row]
            assert not error
            ids += event.ids[0]
            texts += event.text or []
            if event.finish_reasons[0] is not None:
                length, cache = len(request.ids) + len(ids) - 1, session.generator.state.target_cache
                kept = [x[row, :, :length].clone() for x in (*cache.keys.values(), *cache.values.values())]
                del running[row]
                session.retire(row)
                yield request, Result(ids, "".join(texts), event.finish_reasons[0], kept)
        if len(wanted) > 1 and running and choose.random() < 0.03:
            row = choose.choice(list(running))
            del running[row]
            session.retire(row)
        if choose.random() < 0.2:
            session.settle()

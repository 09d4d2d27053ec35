"""Log probabilities of tokens: those of a plain pass of the target, whatever is drafted or runs next to it."""

import functools

import pytest
import torch
from baseline import left_padded, prompt
from families import hinted, make_draft, make_target
from recorded import record
from tiny_tokenizers import byte_level

import dflash
from dflash.session import Session

NEW = 24
BOUND = 2e-5  # float32: sums over 97 tokens and a few layers, in another order
# As for logits in test_recurrent.py. On these texts transformers' two forms of the rule, in chunks and token by token,
# differ by 6.6e-5, and ours from its chunks by 4.7e-5.
RECURRENT_BOUND = 1e-4
PROMPTS = [prompt(length, seed=length) for length in (21, 1, 8, 13)]


@functools.cache
def pair(family: str = "qwen3") -> tuple:
    target = make_target(family)
    return target, make_draft(target)


def check(target, tokens: list[int], first: int, found: list, count: int, bound: float = BOUND) -> None:
    """Compare ``found`` with the target's pass over ``tokens``; it belongs to those from ``first`` on."""
    with torch.no_grad():
        expected = target(torch.tensor([tokens])).logits[0, first - 1 : -1].float().log_softmax(-1)
    assert len(found) == len(tokens) - first
    for row, token, value in zip(expected, tokens[first:], found, strict=True):
        best = row.topk(count)
        assert abs(value.logprob - row[token]) < bound
        assert value.top_ids == best.indices.tolist()
        assert value.top_logprobs == pytest.approx(best.values.tolist(), abs=bound)


CALLS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_k": 9, "seed": 3, "logit_bias": {5: 4.0}, "suppress_tokens": [7, 8]},
    "rejection": {"temperature": 1.0, "acceptance": "rejection", "seed": 4},
    "one token per step": {"block_size": 1},
    "narrow": {"block_size": 4},
    "its own modules": {"fused": False, "temperature": 1.0, "seed": 5},
    "processors": {"logits_processor": [lambda ids, scores: scores * 0.5], "temperature": 1.0, "seed": 6},
    "recurrent": {"family": "qwen3_5"},
}


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_of_a_plain_pass_over_the_same_tokens(name):
    arguments = dict(CALLS[name])
    target, draft = pair(family := arguments.pop("family", "qwen3"))
    options = {key: arguments.pop(key) for key in ("block_size", "fused") if key in arguments}
    generator = dflash.Generator(target, draft, max_length=64, batch_size=4, prefill_chunk=8, **options)
    ids, mask = left_padded(PROMPTS)
    out = generator.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, logprobs=3, prompt_logprobs=True, stop_token_ids=[11],
        return_dict_in_generate=True, **arguments,
    )  # fmt: skip
    for row, text in enumerate(PROMPTS):
        count = out.statistics.num_new_tokens[row]
        tokens = text.tolist() + out.sequences[row, ids.shape[1] :][:count].tolist()
        assert out.prompt_logprobs[row][0] is None
        found = [*out.prompt_logprobs[row][1:], *out.logprobs[row]]
        check(target, tokens, 1, found, 3, RECURRENT_BOUND if family == "qwen3_5" else BOUND)


@pytest.mark.parametrize("draft_too", [False, True])
def test_values_under_a_grammar_are_the_targets_own_and_those_of_a_long_prompt_complete(draft_too):
    """The values of one chunk are computed in parts."""
    (target, draft), ids = pair(), prompt(150)
    arguments = {"grammar": dflash.Grammar.regex(r"(b\n){9}"), "tokenizer": byte_level(), "stop_token_ids": [0]}
    out = dflash.generate(
        target, draft if draft_too else None, ids[None], max_new_tokens=NEW, logprobs=2, prompt_logprobs=True,
        return_dict_in_generate=True, **arguments,
    )  # fmt: skip
    assert out.sequences.shape[1] == 150 + 19
    check(target, out.sequences[0].tolist(), 1, [*out.prompt_logprobs[0][1:], *out.logprobs[0]], 2)


@pytest.mark.parametrize("replays", [False, True], ids=["direct", "replayed"])
def test_a_stream_gives_each_token_its_value_up_to_a_stop_string_in_mid_block(replays):
    target, draft = pair()
    tokenizer, ids, arguments = byte_level(), PROMPTS[0][None], {"temperature": 1.0, "seed": 8, "max_new_tokens": NEW}
    whole = dflash.generate(target, None, ids, **arguments)[0]
    generator = hinted(target, draft, [whole], spoil=7, max_length=64, block_size=6)
    if replays:
        record(generator)
    stop = tokenizer.decode(whole[31:33].tolist())
    call = arguments | {"logprobs": 2, "tokenizer": tokenizer, "stop_strings": [stop]}
    events = list(generator.stream(ids, prompt_logprobs=True, **call))
    answer = [token for event in events for token in event.ids[0]]
    assert events[-1].finish_reasons == ["stop"]
    assert len(answer) < NEW
    assert all(len(event.logprobs[0]) == len(event.ids[0]) for event in events)
    assert max(map(len, (event.ids[0] for event in events))) > 1
    found = [value for event in events for value in event.logprobs[0]]
    check(target, ids[0].tolist() + answer, 21, found, 2)
    assert [event.prompt_logprobs is None for event in events] == [False] + [True] * (len(events) - 1)
    check(target, ids[0].tolist(), 1, events[0].prompt_logprobs[0][1:], 2)
    # `generate` reads them at its end, and now of a prompt that the caches hold.
    out = generator.generate(ids, return_dict_in_generate=True, **call)
    assert out.statistics.num_prefilled_tokens == [1]
    assert (out.logprobs, out.prompt_logprobs) == ([found], None)


def run(session: Session, wanted: list[tuple[int, dict]], together: int) -> dict[int, list]:
    """Run requests, so many at once; return each one's events' values, those of its prompt first."""
    waiting, running, found = list(enumerate(wanted)), {}, {}
    while waiting or running:
        while waiting and len(running) < together:
            index, (which, arguments) = waiting.pop(0)
            call = session.resolve(PROMPTS[which][None], max_new_tokens=NEW, seed=index, **arguments)
            running[session.admit(call)], found[index] = index, []
        for row, event, _ in session.step():
            found[running[row]] += [*(event.prompt_logprobs or ()), event.ids, event.logprobs]
            if event.finish_reasons[0] is not None:
                session.retire(row)
                del running[row]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("replays", [False, True], ids=["direct", "replayed"])
def test_values_are_the_same_bits_alone_and_among_others(replays, dtype):
    target = make_target("qwen3", dtype=dtype)
    draft = make_draft(target)
    asked = {"logprobs": 4, "temperature": 1.0}
    wanted = [
        (0, asked), (2, {}), (1, asked | {"stop_token_ids": [*range(30)]}), (0, asked | {"prompt_logprobs": True}),
        (3, {"temperature": 1.0, "repetition_penalty": 1.3}), (0, {"logprobs": 0}), (3, asked),
        (2, asked | {"prompt_logprobs": True}), (0, {}),
    ]  # fmt: skip

    def session() -> Session:
        generator = dflash.Generator(target, draft, max_length=64, batch_size=3, prefill_chunk=8)
        return Session(record(generator) if replays else generator)

    together = run(session(), wanted, 3)
    for index in range(len(wanted)):
        silent = [(which, {}) for which, _ in wanted[:index]]  # keep the seed, which is the index
        assert run(session(), [*silent, wanted[index]], 1)[index] == together[index]
    assert together[1][1] is None
    assert together[5][1][0][0].top_ids == []

"""Log probabilities from the server: those of a plain pass of the target, next to the text that they belong to."""

import math

import pytest
import torch
from served import QUESTION, SUM, TRIP, direct, pair, prompt_ids
from tiny_tokenizers import byte_fallback, byte_level

import dflash
from dflash.outputs import TokenLogprobs
from dflash_serve.answer_text import AnswerTokens, Pieces
from dflash_serve.openai import completion_logprobs

BOUND = 1e-4  # float32, sums in another order; the values are as low as -30
END = "<|end|>"


def values(prompt: list[int], count: int, **arguments) -> tuple[list[int], list]:
    """Return prompt and answer of ``dflash.generate``, and each token's values: test_logprobs.py watches those."""
    ids, wanted = torch.tensor([prompt]), {"logprobs": count, "prompt_logprobs": True, "return_dict_in_generate": True}
    out = dflash.generate(*pair()[:2], ids, **(arguments or {"max_new_tokens": 1}), **wanted)
    return out.sequences[0].tolist(), [*out.prompt_logprobs[0], *out.logprobs[0]]


def names(ids) -> list[str]:
    return [pair()[2].decode([token]) for token in ids]


# ---------------------------------------------------------------------------------------------- chats


def test_a_stream_has_them_next_to_their_text_and_a_stop_string_takes_both(client):
    prompt, whole = prompt_ids(SUM)[0].tolist(), direct(prompt_ids(SUM), max_new_tokens=300)[0]
    stop = ", write 0\ntens: "
    call = {"model": "pair", "messages": QUESTION, "max_tokens": 300, "stop": [stop]}
    call |= {"logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**call).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    ids, wanted = values(prompt, 2, max_new_tokens=300)
    content = choice.logprobs.content
    for entry, token, value in zip(content, ids[len(prompt) :], wanted[len(prompt) :], strict=False):
        assert entry.token == names([token])[0] == bytes(entry.bytes).decode()
        assert entry.logprob == pytest.approx(value.logprob, abs=BOUND)
        assert [other.token for other in entry.top_logprobs] == names(value.top_ids)
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx(value.top_logprobs, abs=BOUND)
    found, longest = [], 0
    for chunk in client.chat.completions.create(**call, stream=True):
        if (part := chunk.choices[0]).logprobs is not None:
            assert "".join(entry.token for entry in part.logprobs.content) == part.delta.content
            found += part.logprobs.content
            longest = max(longest, len(part.logprobs.content))
    assert found == choice.logprobs.content
    assert longest > 1


# ---------------------------------------------------------------------------------------------- texts


def check_text(choice, prompt: list[int], echo: bool, count: int, **arguments) -> None:
    """Compare a choice's lists with the values of ``dflash.generate``; the prompt's first token has none."""
    found, (ids, wanted) = choice.logprobs, values(prompt, count, **arguments)
    if not arguments:  # nothing is asked for but the prompt
        ids, wanted = prompt, wanted[: len(prompt)]
    ids, wanted = (ids, wanted) if echo else (ids[len(prompt) :], wanted[len(prompt) :])
    assert found.tokens == names(ids)
    for token, value, logprob, top in zip(ids, wanted, found.token_logprobs, found.top_logprobs, strict=True):
        if value is None:
            assert (logprob, top) == (None, None)
            continue
        assert logprob == pytest.approx(value.logprob, abs=BOUND)
        best = dict(zip(names(value.top_ids), value.top_logprobs, strict=True))
        best.setdefault(names([token])[0], value.logprob)
        assert top == pytest.approx(best, abs=BOUND)
    for token, place in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[place:].startswith(token.removesuffix(END))


def test_texts_have_those_of_answers_and_with_echo_of_prompts(client):
    tokenizer = pair()[2]
    prompts = [tokenizer(SUM).input_ids, prompt_ids(TRIP)[0].tolist()]
    call = {"model": "pair", "max_tokens": 9, "logprobs": 2, "seed": 5, "temperature": 1}
    plain = client.completions.create(**call, prompt=prompts, n=2).choices
    echoed = client.completions.create(**call, prompt=prompts, n=2, echo=True).choices
    for index, prompt in enumerate(prompts):
        for number in range(2):
            arguments = {"seed": dflash.sampling.fold(5, number), "temperature": 1.0, "max_new_tokens": 9}
            check_text(plain[2 * index + number], prompt, False, 2, **arguments)
            check_text(echoed[2 * index + number], prompt, True, 2, **arguments)
    one = client.completions.create(**call, prompt=SUM, echo=True).choices[0]
    assert one.text == SUM + plain[0].text
    assert one.logprobs.text_offset[:2] == [0, 0], "the tokenizer's BOS is no part of the text"
    assert one.logprobs.tokens == echoed[0].logprobs.tokens
    check_text(one, prompts[0], True, 2, seed=5, temperature=1.0, max_new_tokens=9)


def test_streams_of_texts_have_the_same_lists(client):
    call = {"model": "pair", "prompt": [SUM, TRIP], "max_tokens": 9, "echo": True, "logprobs": 1}
    whole = client.completions.create(**call).choices
    parts = [chunk.choices[0] for chunk in client.completions.create(**call, stream=True)]
    for choice in whole:
        own = [part for part in parts if part.index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            found = [value for part in own if part.logprobs for value in getattr(part.logprobs, field)]
            assert found == getattr(choice.logprobs, field)
        assert own[0].logprobs.tokens == choice.logprobs.tokens[: len(own[0].logprobs.tokens)]
        assert own[0].text in (SUM, TRIP)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_written_for_max_tokens_0(client, stream):
    ids = pair()[2](SUM).input_ids
    call = {"model": "pair", "prompt": SUM, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    if stream:
        call["stream_options"] = {"include_usage": True, "include_drafts": True}
        first, last, usage = client.completions.create(**call)
        choice = first.choices[0]
        assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "length")
        assert last.choices[0].logprobs is None
    else:
        usage = client.completions.create(**call)
        choice = usage.choices[0]
        assert choice.finish_reason == "length"
    assert choice.text == SUM
    check_text(choice, ids, True, 1)
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (len(ids), 0)


# ---------------------------------------------------------------------------------------------- tokens that are no text


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"])
def test_parts_of_characters_are_told_by_their_bytes(tokenizer):
    text = "a bc é€😀 d"
    ids = [token for part in text for token in tokenizer(part, add_special_tokens=False).input_ids]
    if "<0x00>" in tokenizer.get_vocab():
        ids = tokenizer.convert_tokens_to_ids(["▁", "<0xE2>", "<0x82>", "<0xAC>", "▁a", "▁", "▁bc"])
        text = " € a  bc"
    pieces = Pieces(tokenizer)
    assert b"".join(pieces.of(token).bytes for token in ids).decode() == text
    halves = [pieces.of(token).text for token in ids if pieces.of(token).text.startswith("bytes:")]
    assert "bytes:\\xe2" in halves
    values = [TokenLogprobs(-1.0, [token], [-1.0]) for token in ids]
    tokens = pieces.of_prompt(ids, values, tokenizer.decode(ids))
    assert [token.start for token in tokens] == sorted(token.start for token in tokens)
    held = AnswerTokens(pieces, tokenizer, before=3)
    shown = held.push(ids, values, 2, is_whole=False)
    assert all(token.start < 5 for token in shown)
    assert shown + held.push([], [], 2, is_whole=True) == [t._replace(start=t.start + 3) for t in tokens]


def test_a_probability_of_0_and_equal_texts_can_be_sent():
    tokenizer = byte_fallback()
    letter = tokenizer.convert_tokens_to_ids("a")
    byte = tokenizer.convert_tokens_to_ids("<0x61>")
    value = TokenLogprobs(-math.inf, [letter, byte], [-0.5, -math.inf])
    found = completion_logprobs(Pieces(tokenizer).of_prompt([byte], [value], "a"))
    assert found["token_logprobs"] == [-9999.0]
    assert found["top_logprobs"] == [{"a": -0.5}]

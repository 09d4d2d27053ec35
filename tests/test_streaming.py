"""Test streaming, stop strings, streamers, several answers and reused prefixes against one-token decoding."""

import contextlib
import gc
import os
import random
import weakref

import pytest
import torch
from baseline import greedy, left_padded, prompt, sampled
from examples import examples
from families import cheat, make_draft, make_target
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level, random_tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

import dflash
from dflash.sampling import fold
from dflash.streaming import StopMatcher, TextDecoder

NEW = 40
NAN = float("nan")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


def joined(events, rows: int) -> list[list[int]]:
    return [[token for event in events for token in event.ids[row]] for row in range(rows)]


class TestEvents:
    @pytest.mark.parametrize("ahead", [False, True], ids=["", "one step late"])
    def test_events_join_to_what_generate_returns(self, target, draft, tokenizer, ahead):
        prompts = [prompt(length) for length in (3, 9, 30)]
        answers = [greedy(target, p, NEW) for p in prompts]
        stop = [int(answers[1][12])]
        expected = [greedy(target, p, NEW, stop=tuple(stop)) for p in prompts]
        ids, mask = left_padded(prompts)
        generator = cheat(target, draft, prompts, answers, 5, ahead)
        call = {"attention_mask": mask, "max_new_tokens": NEW, "stop_token_ids": stop}
        events = list(generator.stream(ids, tokenizer=tokenizer, **call))
        assert joined(events, 3) == [answer.tolist() for answer in expected]
        assert [len(row) for row in events[0].ids] == [1, 1, 1]
        assert any(len(row) > 3 for event in events for row in event.ids)
        for row, answer in enumerate(expected):
            assert "".join(event.text[row] for event in events) == tokenizer.decode(answer)
            reasons = [event.finish_reasons[row] for event in events]
            last = max(index for index, event in enumerate(events) if event.ids[row])
            assert set(reasons[:last]) <= {None}
            assert set(reasons[last:]) == {"stop" if int(answer[-1]) in stop else "length"}
        generator.reset()
        output = generator.generate(ids, attention_mask=mask, max_new_tokens=NEW, stop_token_ids=stop,
                                    return_dict_in_generate=True)  # fmt: skip
        statistics = events[-1].statistics
        assert statistics.acceptance_lengths == output.statistics.acceptance_lengths
        assert statistics.num_new_tokens == output.statistics.num_new_tokens == [len(answer) for answer in expected]
        assert output.finish_reasons == events[-1].finish_reasons
        assert [sum(event.statistics.num_new_tokens) for event in events] == [
            sum(len(row) for event in events[: index + 1] for row in event.ids) for index in range(len(events))
        ]

    def test_without_a_tokenizer_there_is_no_text(self, target, draft):
        assert next(dflash.stream(target, draft, prompt(4)[None], max_new_tokens=3)).text is None

    def test_accepted_drafts_are_distinguished_from_the_bonus_token(self, target, draft):
        p = prompt(6)
        answer = greedy(target, p, 33)
        generator = cheat(target, draft, [p], [answer], spoil=4, block_size=8)
        events = list(generator.stream(p[None], max_new_tokens=33))
        assert events[0].accepted == [0]
        for event in events[1:-1]:
            assert event.accepted[0] == len(event.ids[0]) - 1
        # The last step is cut by the limit: positions 36, 37, 38 are left, and the draft at 36 is spoilt.
        assert (len(events[-2].ids[0]), len(events[-1].ids[0]), events[-1].accepted) == (4, 2, [2])
        generator.spoil = 0
        stop = [int(answer[11])]
        assert stop[0] not in answer[:11]
        last = list(generator.stream(p[None], max_new_tokens=33, stop_token_ids=stop))[-1]
        assert (len(last.ids[0]), last.accepted) == (3, [3])  # two steps: 8 after the first token, then 3 of 8
        plain = dflash.Generator(target, None, max_length=64)
        assert {event.accepted[0] for event in plain.stream(p[None], max_new_tokens=5)} == {0}

    def test_arguments_are_checked_before_the_first_event_is_requested(self, target, draft):
        generator = dflash.Generator(target, draft, max_length=64)
        for stream in (generator.stream, lambda *args, **rest: dflash.stream(target, draft, *args, **rest)):
            with pytest.raises(ValueError, match="max_new_tokens must be"):
                stream(prompt(4)[None], max_new_tokens=0)
            for name in ("return_dict_in_generate", "streamer", "reuse_prefix", "temprature"):
                with pytest.raises(TypeError, match=name):
                    stream(prompt(4)[None], **{name: Recorder()})
            with pytest.raises(ValueError, match="temperature must be"):
                stream(prompt(4)[None], temperature=-1.0)
        with pytest.raises(ValueError, match="this generator's max_length, 64"):
            generator.stream(prompt(4)[None], max_new_tokens=61)


class TestText:
    """Emitted text is final, has only complete characters, and adds up to the decoded answer."""

    def pieces(self, decoder, ids, chance):
        rest, given = list(ids), []
        while rest:
            count = chance.randint(1, 9)
            given.append(decoder.push(rest[:count]))
            rest = rest[count:]
        return given, decoder.finish()

    @pytest.mark.parametrize("make", [byte_level, byte_fallback])
    def test_no_partial_character_is_emitted(self, make):
        tokenizer, chance = make(), random.Random(2)
        vocabulary = tokenizer.get_vocab()
        text = "a€b é😀😀 c€€ éd😀a" * 12
        if make is byte_level:
            shown = bytes_to_unicode()
            ids = [vocabulary[shown[byte]] for byte in text.encode()]
        else:
            ids = []
            for character in text.replace(" ", "▁"):
                known = character in vocabulary
                ids += [vocabulary[character]] if known else [vocabulary[f"<0x{b:02X}>"] for b in character.encode()]
        assert tokenizer.decode(ids) == text
        for _ in range(20):
            given, rest = self.pieces(TextDecoder(tokenizer), ids, chance)
            assert not any("\ufffd" in piece for piece in given)
            assert "".join(given) + rest == text
        assert sum(map(bool, given)) > 20, "text should arrive as it is generated"
        one_by_one = TextDecoder(tokenizer)
        assert one_by_one.push(ids[:1]) == "a"

    def test_a_possible_start_of_a_stop_string_is_held_back(self):
        tokenizer = byte_level()
        vocabulary = tokenizer.get_vocab()
        decoder = TextDecoder(tokenizer, ["abcd", "cab"])
        given = [decoder.push([vocabulary[letter]]) for letter in "aabcjcabcef"]
        assert given == ["", "a", "", "", "abcj", "", "", "c", "", "abce", "f"]
        assert decoder.push([vocabulary["ab"]]) == ""
        assert decoder.finish() == "ab"


class TestStopStrings:
    @pytest.mark.parametrize(("block_size", "ahead"), [(1, False), (2, True), (16, False), (16, True)])
    def test_stops_where_one_token_decoding_does(self, target, draft, tokenizer, block_size, ahead):
        prompts = [prompt(length, seed=2) for length in (2, 11, 25)]
        answers = [greedy(target, p, NEW) for p in prompts]
        ids, mask = left_padded(prompts)
        generator = cheat(target, draft, prompts, answers, 7, ahead, block_size=block_size)
        texts = [tokenizer.decode(answer) for answer in answers]
        chance, cut = random.Random(block_size), 0
        for _ in range(4):
            text = chance.choice(texts)
            at = chance.randrange(len(text) - 4)
            strings = [text[at : at + chance.randint(1, 4)], "no such text"]
            if "\ufffd" in strings[0]:
                continue
            expected = [
                target.generate(p[None], do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0,
                                stop_strings=strings, tokenizer=tokenizer)[0, len(p) :]
                for p in prompts
            ]  # fmt: skip
            call = {"attention_mask": mask, "max_new_tokens": NEW, "stop_strings": strings, "tokenizer": tokenizer}
            events = list(generator.stream(ids, **call))
            assert joined(events, 3) == [answer.tolist() for answer in expected]
            output = generator.generate(ids, return_dict_in_generate=True, **call)
            for row, answer in enumerate(expected):
                new = output.sequences[row, ids.shape[1] :]
                assert new[: len(answer)].tolist() == answer.tolist()
                assert new[len(answer) :].eq(0).all()
                stopped = len(answer) < NEW
                cut += stopped
                assert output.finish_reasons[row] == ("stop" if stopped else "length") or len(answer) == NEW
                assert sum(output.statistics.acceptance_lengths[row]) == len(answer) - 1
                pieces = [event.text[row] for event in events]
                assert "".join(pieces) == tokenizer.decode(answer)
                last = max(index for index, event in enumerate(events) if event.ids[row])
                text, shown = "".join(pieces), [len("".join(pieces[:index])) for index in range(1, last + 1)]
                for string in strings:
                    starts = [at for at in range(len(text)) if text.startswith(string, at)]
                    assert not any(at < end < at + len(string) for at in starts for end in shown)
        assert cut > 2

    def test_a_stop_string_may_begin_in_the_prompt(self, target, draft, tokenizer):
        p = torch.cat([prompt(7, seed=3), torch.tensor(tokenizer.encode("a"))])
        string = "a" + tokenizer.decode(greedy(target, p, 1))[:1]
        assert "\ufffd" not in string
        output = dflash.generate(target, draft, p[None], max_new_tokens=9, stop_strings=string, tokenizer=tokenizer)
        assert output.shape[1] == len(p) + 1

    @pytest.mark.long
    @examples(40)
    @given(st.randoms(use_true_random=False), st.sampled_from([40, 300, 300, 900]))
    def test_a_match_ends_with_the_token_that_completes_it_in_the_text(self, chance, size):
        tokenizer, ids = random_tokenizer(chance), []
        of_bytes = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)]
        share = chance.choice([0.02, 0.3, 0.95]) if isinstance(of_bytes[128], int) and of_bytes[128] else 0
        while len(ids) < size:
            if chance.random() >= share:
                ids.append(chance.randrange(len(tokenizer)))
                continue
            run = [*"".join(chance.choices("aé€😀 .", k=chance.choice([1, 3, 30, 300]))).encode()]
            if chance.random() < 0.2:
                run.insert(chance.randrange(len(run)), chance.randrange(256))
            ids += [of_bytes[byte] for byte in run]
        start = chance.randrange(1, size - 1)
        before, text, strings = tokenizer.decode(ids[:start]), tokenizer.decode(ids), ["no such text"]
        for _ in range(chance.randint(1, 3)):
            at = chance.choice([chance.randrange(len(text) + 1), max(0, len(before) - chance.randint(0, 5))])
            strings.append(text[at : at + chance.choice([1, 2, 3, 9, 100])] or "a")
        expected = None
        for end in range(start + 1, len(ids) + 1):
            text = tokenizer.decode(ids[:end])
            shared = len(os.path.commonprefix([text, before]))  # noqa: RUF071 - of characters
            if any(text.find(string, max(0, shared + 1 - len(string))) >= 0 for string in strings):
                expected = end
                break
        matcher, found, block = StopMatcher(tokenizer, strings, ids[:start]), None, chance.choice([1, 5, 16])
        for first in range(start, len(ids), block):
            if found is None and (count := matcher.push(ids[first : first + block])) is not None:
                found = first + count
        assert found == expected, strings

    def test_a_call_reads_no_vocabulary(self, target, draft):
        tokenizer, calls = byte_level(), []
        for name in ("get_vocab", "convert_ids_to_tokens"):
            setattr(tokenizer, name, calls.append)
        call = {"tokenizer": tokenizer, "max_new_tokens": NEW, "stop_strings": ["ab", "no such text"]}
        events = list(dflash.stream(target, draft, prompt(9)[None], **call))
        assert "".join(event.text[0] for event in events) == tokenizer.decode(joined(events, 1)[0])
        assert calls == []

    def test_a_conversation_continues_after_a_stop_string(self, target, draft, tokenizer):
        p = prompt(10, seed=4)
        answer = greedy(target, p, NEW)
        text = tokenizer.decode(answer[:14])[-2:]
        assert "\ufffd" not in text
        for ahead in (False, True):
            generator = cheat(target, draft, [p], [answer], 0, ahead)
            call = {"max_new_tokens": NEW, "stop_strings": text, "tokenizer": tokenizer}
            first = generator.generate(p[None], **call)
            kept = first.shape[1] - len(p)
            assert kept == 14, "the stop should be in the middle of a block"
            assert int(generator.state.length[0]) == first.shape[1] - 1
            longer = torch.cat([first[0], prompt(5, seed=9)])
            fresh = dflash.Generator(target, draft, max_length=160)
            compare_caches(generator, fresh, longer, prefilled=6)

    def test_the_generation_config_may_set_them(self, draft, tokenizer):
        target = make_target("qwen3")
        p = prompt(11, seed=2)
        string = tokenizer.decode(greedy(target, p, NEW)[:20])[-2:]
        target.generation_config.stop_strings = [string]
        with pytest.raises(ValueError, match="need the target's tokenizer"):
            dflash.generate(target, draft, p[None], max_new_tokens=NEW)
        expected = target.generate(p[None], do_sample=False, max_new_tokens=NEW, tokenizer=tokenizer)
        output = dflash.generate(target, draft, p[None], max_new_tokens=NEW, tokenizer=tokenizer)
        assert torch.equal(output, expected)
        assert output.shape[1] < len(p) + NEW


class Recorder:
    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        self.puts.append(value)

    def end(self):
        self.ends += 1


class TestStreamers:
    def test_a_streamer_gets_the_prompt_then_one_put_per_step_then_the_end(self, target, draft):
        p = prompt(7)
        answer = greedy(target, p, NEW)
        generator = cheat(target, draft, [p], [answer], spoil=5)
        recorder = Recorder()
        generator.generate(p[None], max_new_tokens=NEW, streamer=recorder)
        assert torch.equal(recorder.puts[0], p[None])
        assert [put.dim() for put in recorder.puts[1:]] == [1] * (len(recorder.puts) - 1)
        assert torch.equal(torch.cat(recorder.puts[1:]), answer)
        assert max(map(len, recorder.puts[1:])) > 2
        assert recorder.ends == 1

    def test_the_consumer_is_told_of_an_error(self, draft):
        broken = make_target("qwen3")
        with torch.no_grad():
            broken.lm_head.weight[5] = NAN
        recorder = Recorder()
        with pytest.raises(ValueError, match="NaN"):
            dflash.generate(broken, make_draft(broken), prompt(5)[None], max_new_tokens=4, streamer=recorder)
        assert recorder.ends == 1


class TestSeveralAnswers:
    def test_rows_are_consecutive_and_have_their_own_noise(self, target, draft):
        prompts = [prompt(5), prompt(12)]
        ids, mask = left_padded(prompts)
        call = {"attention_mask": mask, "max_new_tokens": 12, "temperature": 1.0, "num_return_sequences": 3}
        output = dflash.generate(target, draft, ids, seed=4, **call)
        expected = [sampled(target, prompts[row // 3], 12, fold(4, row), 1.0) for row in range(6)]
        assert output[:, :12].tolist() == ids.repeat_interleave(3, 0).tolist()
        assert output[:, 12:].tolist() == [answer.tolist() for answer in expected]
        assert len({tuple(answer.tolist()) for answer in expected[:3]}) == 3
        events = list(dflash.stream(target, draft, ids, seed=4, **call))
        assert joined(events, 6) == output[:, 12:].tolist()
        given = dflash.generate(target, draft, ids, seed=[fold(4, row) for row in range(6)], **call)
        assert torch.equal(given, output)


def compare_caches(generator, fresh, ids, prefilled=None, **call):
    """Run ``ids`` on ``generator`` and on ``fresh``: the token and the prompt's cache entries must be equal."""
    outputs = [
        each.generate(ids[None], max_new_tokens=1, return_dict_in_generate=True, **call) for each in (generator, fresh)
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    if prefilled is not None:
        assert outputs[0].statistics.num_prefilled_tokens == [prefilled]
    assert outputs[1].statistics.num_prefilled_tokens == [len(ids)]
    ours, theirs = generator.state.target_cache, fresh.state.target_cache
    pairs = [(ours.keys[layer], theirs.keys[layer]) for layer in ours.keys]
    pairs += [(ours.values[layer], theirs.values[layer]) for layer in ours.values]
    if generator.draft is not None:
        ours, theirs = generator.state.draft_cache, fresh.state.draft_cache
        pairs += zip(ours.buffers, theirs.buffers, strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine[0, :, : len(ids)], other[0, :, : len(ids)], rtol=1e-4, atol=1e-5)


class TestConversation:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("block_size", [1, 5, 16])
    def test_only_new_tokens_are_run(self, target, draft, temperature, block_size):
        p = prompt(20, seed=6)
        call = {"temperature": temperature, "seed": 3}
        answer = sampled(target, p, 24, 3, temperature)
        generator = cheat(target, draft, [p], [answer], spoil=6, block_size=block_size)
        ids, expected_prefill = p, 20
        for turn in range(3):
            output = generator.generate(ids[None], max_new_tokens=24, return_dict_in_generate=True, **call)
            assert output.statistics.num_prefilled_tokens == [expected_prefill]
            fresh = dflash.generate(target, draft, ids[None], max_new_tokens=24, block_size=block_size, **call)
            assert torch.equal(output.sequences, fresh)
            ids = torch.cat([output.sequences[0], prompt(4 + turn, seed=turn)])
            expected_prefill = 5 + turn  # the answer's last token was never run
        fresh = dflash.Generator(target, draft, max_length=160, block_size=block_size)
        compare_caches(generator, fresh, ids, expected_prefill, **call)

    def test_rows_of_a_ragged_batch_reuse_different_prefixes(self, target, draft):
        prompts = [prompt(length, seed=7) for length in (40, 3, 17)]
        ids, mask = left_padded(prompts)
        answers = [greedy(target, p, 20) for p in prompts]
        generator = cheat(target, draft, prompts, answers, spoil=5, prefill_chunk=8)
        generator.generate(ids, attention_mask=mask, max_new_tokens=20)
        follow = [
            torch.cat([prompts[0], answers[0], prompt(30, seed=8)]),  # continues
            prompt(50, seed=9),  # something else
            torch.cat([prompts[2], answers[2][:7], prompt(2, seed=8)]),  # diverges inside the answer
        ]
        assert follow[2][24] != answers[2][7]
        assert follow[1][0] != prompts[1][0]
        for cache in (generator.state.target_cache.keys, generator.state.draft_cache.keys):
            for buffer in cache.values():
                for row in range(3):
                    buffer[row, :, int(generator.state.length[row]) :] = NAN  # stale slots are never read
        ids, mask = left_padded(follow)
        output = generator.generate(ids, attention_mask=mask, max_new_tokens=20, return_dict_in_generate=True)
        assert output.statistics.num_prefilled_tokens == [31, 50, 2]
        for row, p in enumerate(follow):
            assert output.sequences[row, ids.shape[1] :].tolist() == greedy(target, p, 20).tolist()

    def test_less_is_reused_if_the_longest_row_would_not_fit_after_it(self, target, draft):
        prompts = [prompt(70, seed=1), prompt(5, seed=1)]
        ids, mask = left_padded(prompts)
        generator = dflash.Generator(target, draft, max_length=80, batch_size=2, block_size=4)
        generator.generate(ids, attention_mask=mask, max_new_tokens=10)
        follow = [prompts[0], prompt(60, seed=2)]
        ids, mask = left_padded(follow)
        output = generator.generate(ids, attention_mask=mask, max_new_tokens=10, return_dict_in_generate=True)
        assert output.statistics.num_prefilled_tokens == [46, 60]  # 24 + 60 are the cache's 84
        for row, p in enumerate(follow):
            assert output.sequences[row, ids.shape[1] :].tolist() == greedy(target, p, 10).tolist()

    def test_the_full_prompt_is_run_if_nothing_can_be_reused(self, draft):
        target = make_target("qwen3")
        own = make_draft(target)
        p = prompt(12)

        def prefilled(generator) -> int:
            output = generator.generate(p[None], max_new_tokens=6, return_dict_in_generate=True)
            assert output.sequences[0, 12:].tolist() == greedy(target, p, 6).tolist()
            return output.statistics.num_prefilled_tokens[0]

        generator = dflash.Generator(target, own, max_length=40)
        assert [prefilled(generator), prefilled(generator)] == [12, 1]
        generator.reset()
        assert [prefilled(generator), prefilled(generator)] == [12, 1]
        with torch.no_grad():
            target.model.embed_tokens.weight.mul_(-1)
        assert [prefilled(generator), prefilled(generator)] == [12, 1]
        with torch.no_grad():
            own.fc.weight.mul_(2)
        assert [prefilled(generator), prefilled(generator)] == [12, 1]
        generator = dflash.Generator(target, own, max_length=40, reuse_prefix=False)
        assert [prefilled(generator), prefilled(generator)] == [12, 12]
        shots = [dflash.generate(target, own, p[None], max_new_tokens=2, return_dict_in_generate=True) for _ in "ab"]
        assert [shot.statistics.num_prefilled_tokens for shot in shots] == [[12], [12]]

    def test_nothing_is_reused_from_a_call_that_met_nan(self):
        target = make_target("qwen3")
        p = prompt(12)
        answer = greedy(target, p, 8)
        embedding = target.model.embed_tokens.weight
        whole = embedding[answer[3]].clone()
        generator = dflash.Generator(target, make_draft(target), max_length=40)
        with torch.no_grad():
            embedding.data[answer[3]] = NAN  # through .data, which the fingerprint does not notice
        with pytest.raises(ValueError, match="NaN"):
            generator.generate(p[None], max_new_tokens=8)
        embedding.data[answer[3]] = whole
        output = generator.generate(p[None], max_new_tokens=8, return_dict_in_generate=True)
        assert output.statistics.num_prefilled_tokens == [12]
        assert output.sequences[0, 12:].tolist() == answer.tolist()


class Interrupting(Recorder):
    """Stands for a user who presses Ctrl-C at the first new token."""

    def put(self, value):
        if value.dim() == 1:
            raise KeyboardInterrupt


class TestLeaving:
    def test_a_closed_stream_leaves_a_consistent_state(self, target, draft):
        p = prompt(14, seed=4)
        answer = greedy(target, p, NEW)
        for ahead in (False, True):
            generator = cheat(target, draft, [p], [answer], 5, ahead)
            events = generator.stream(p[None], max_new_tokens=NEW)
            got = [token for _ in range(3) for token in next(events).ids[0]]
            events.close()
            assert got == answer[: len(got)].tolist()
            ids = torch.cat([p, answer[: len(got)], prompt(3, seed=5)])
            compare_caches(generator, dflash.Generator(target, draft, max_length=160), ids, prefilled=3 if ahead else 4)

    def test_a_stream_ends_when_its_generator_starts_another_call(self, target, draft):
        generator = dflash.Generator(target, draft, max_length=80)
        p = prompt(5)
        events = generator.stream(p[None], max_new_tokens=NEW)
        next(events)
        assert generator.generate(p[None], max_new_tokens=6)[0, 5:].tolist() == greedy(target, p, 6).tolist()
        with pytest.raises(RuntimeError, match="this stream has ended"):
            next(events)
        events = generator.stream(p[None], max_new_tokens=NEW)
        next(events)
        generator.reset()
        with pytest.raises(RuntimeError, match="this stream has ended"):
            next(events)
        assert generator.generate(p[None], max_new_tokens=6)[0, 5:].tolist() == greedy(target, p, 6).tolist()

    def test_a_stream_neither_adopts_nor_leaks_a_mode(self, target, draft):
        p = prompt(5)
        generator = dflash.Generator(target, draft, max_length=80)
        with torch.inference_mode():
            events = generator.stream(p[None], max_new_tokens=8)
            first = next(events)
            assert torch.is_inference_mode_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = next(events)
            assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
        assert joined([first, second, *events], 1)[0] == greedy(target, p, 8).tolist()

    @pytest.mark.parametrize("how", ["closed", "interrupted"])
    def test_a_one_shot_call_that_is_left_frees_its_caches(self, kept, how):
        target = make_target("qwen3")
        draft, p = make_draft(target), prompt(5)
        dflash.generate(target, draft, p[None], max_new_tokens=4)
        references = [kept, weakref.ref(kept().state.target_cache.keys[0])]
        gc.disable()
        try:
            if how == "closed":
                events = dflash.stream(target, draft, p[None], max_new_tokens=30)
                next(events)
                events.close()
            else:
                with contextlib.suppress(KeyboardInterrupt):
                    dflash.generate(target, draft, p[None], max_new_tokens=30, streamer=Interrupting())
            assert [reference() for reference in references] == [None, None]
        finally:
            gc.enable()
        output = dflash.generate(target, draft, p[None], max_new_tokens=4)
        assert output[0, 5:].tolist() == greedy(target, p, 4).tolist()

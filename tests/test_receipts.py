"""Test receipts: every token of an answer is derived again without a drafter, and whatever was changed is found."""

import dataclasses
import importlib.metadata
import json
import math
import re
from typing import ClassVar

import pytest
import torch
from baseline import left_padded, prompt
from families import RECURRENT, cheat, make_draft, make_target
from tiny_pair import save_pair, word_tokenizer
from tiny_tokenizers import byte_level
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM

import dflash
from dflash.receipts import Fingerprints, verification
from dflash.targets import weights_digest

NEW = 24


def recorded(target, draft, ids: torch.Tensor, **arguments) -> dflash.Receipt:
    recorder = dflash.Recorder(target, ids, **arguments)
    return recorder.receipt(dflash.generate(target, draft, ids, return_dict_in_generate=True, **recorder.arguments))


def with_answer(receipt: dflash.Receipt, row: int = 0, **changes) -> dflash.Receipt:
    answers = list(receipt.answers)
    answers[row] = dataclasses.replace(answers[row], **changes)
    return dataclasses.replace(receipt, answers=tuple(answers))


def with_token(receipt: dflash.Receipt, row: int, index: int, token: int | None = None) -> dflash.Receipt:
    """Return a receipt with another token at a place of an answer."""
    ids = list(receipt.answers[row].ids)
    ids[index] = (ids[index] + 1) % 97 if token is None else token
    return with_answer(receipt, row, ids=tuple(ids))


def with_fingerprints(receipt: dflash.Receipt, **changes) -> dflash.Receipt:
    return dataclasses.replace(receipt, fingerprints=dataclasses.replace(receipt.fingerprints, **changes))


def with_settings(receipt: dflash.Receipt, **changes) -> dflash.Receipt:
    return dataclasses.replace(receipt, settings=dataclasses.replace(receipt.settings, **changes))


@pytest.fixture(scope="module")
def receipt(target, draft) -> dflash.Receipt:
    """Three answers to each of two prompts, whose text depends on the seed."""
    ids, mask = left_padded([prompt(5), prompt(19)])
    sampling = {"temperature": 1.0, "top_k": 60, "seed": 7}
    return recorded(target, draft, ids, attention_mask=mask, max_new_tokens=NEW, num_return_sequences=3, **sampling)


class TestAnswersThatFollow:
    def test_a_receipt_made_with_a_drafter_verifies_without_one(self, receipt, target):
        assert len({answer.ids for answer in receipt.answers}) == 6
        found = dflash.verify(receipt, target)
        assert found.follows
        assert found.is_exact
        assert found.num_tokens == 6 * NEW
        assert found.differences == {}

    def test_the_events_of_a_stream_are_enough(self, target, draft, receipt):
        ids, mask = left_padded([prompt(5), prompt(19)])
        arguments = {"attention_mask": mask, "temperature": 1.0, "top_k": 60, "seed": 7, "num_return_sequences": 3}
        recorder = dflash.Recorder(target, ids, max_new_tokens=NEW, **arguments)
        events = dflash.stream(target, draft, ids, **recorder.arguments)
        recorder.add(next(events))
        with pytest.raises(ValueError, match="all 6 answers of the call, and these to their end"):
            recorder.receipt()
        for event in events:
            recorder.add(event)
        assert recorder.receipt() == receipt

    def test_a_seed_that_nobody_named_is_drawn_and_recorded(self, target):
        torch.manual_seed(5)
        plain = dflash.generate(target, None, prompt(6)[None], temperature=1.0, max_new_tokens=NEW)
        torch.manual_seed(5)
        receipt = recorded(target, None, prompt(6)[None], temperature=1.0, max_new_tokens=NEW)
        assert list(receipt.answers[0].ids) == plain[0, 6:].tolist()
        assert dflash.verify(receipt, target).is_exact

    def test_the_callers_modes_of_torch_do_not_matter(self, receipt, target):
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            assert dflash.verify(receipt, target).is_exact

    def test_many_tokens_are_checked_answer_by_answer(self, receipt, target, monkeypatch):
        monkeypatch.setattr(verification, "_TOKENS_AT_ONCE", 100)
        assert dflash.verify(receipt, target).is_exact

    @pytest.mark.parametrize("rules", [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"no_repeat_ngram_size": 2, "logit_bias": {5: 3.0, 9: -math.inf, (4, 7): 20.0, (3, 4, 8): -2.0}},
        {"bad_words_ids": [[11], [5, 6], [7, 8, 9]], "suppress_tokens": [12], "begin_suppress_tokens": [13, 14]},
        {"stop_token_ids": list(range(20, 40)), "min_new_tokens": 9, "forced_eos_token_id": 22},
        {"stop_token_ids": list(range(20, 40)), "min_length": 14},
    ], ids=str)  # fmt: skip
    def test_every_rule_is_applied_as_in_the_call(self, target, draft, rules):
        ids, mask = left_padded([prompt(1), prompt(4), prompt(9)])
        rules = {"temperature": 1.2, "stop_token_ids": [], **rules}
        receipt = recorded(target, draft, ids, attention_mask=mask, max_new_tokens=NEW, seed=2, **rules)
        assert dflash.Receipt.parse(json.loads(receipt.to_json())) == receipt
        assert dflash.verify(receipt, target).is_exact

    def test_the_generation_config_of_the_call_counts_not_that_of_the_check(self):
        target = make_target("qwen3")
        target.generation_config.update(do_sample=True, temperature=1.4, top_k=30, repetition_penalty=1.2)
        receipt = recorded(target, None, prompt(8)[None], max_new_tokens=NEW, seed=1)
        assert (receipt.settings.temperature, receipt.settings.repetition_penalty) == (1.4, 1.2)
        assert dflash.verify(receipt, make_target("qwen3")).is_exact

    @pytest.mark.parametrize("family", RECURRENT)
    def test_recurrent_targets(self, family):
        target = make_target(family)
        ids, mask = left_padded([prompt(3), prompt(40)])
        arguments = {"attention_mask": mask, "max_new_tokens": 40, "temperature": 1.0, "seed": 4}
        receipt = recorded(target, make_draft(target), ids, **arguments)
        assert dflash.verify(receipt, target).is_exact
        found = dflash.verify(with_token(receipt, 1, 20), target).answers
        assert [row.mismatch and row.mismatch.index for row in found] == [None, 20]


class TestChangesAreFound:
    @pytest.mark.parametrize("index", [0, 1, 16, NEW - 1])
    def test_an_edited_token_is_named(self, receipt, target, index):
        original = receipt.answers[4].ids[index]
        found = dflash.verify(with_token(receipt, 4, index), target)
        assert [answer.follows for answer in found.answers] == [True] * 4 + [False, True]
        mismatch = found.answers[4].mismatch
        assert (mismatch.index, mismatch.token, mismatch.chosen) == (index, (original + 1) % 97, original)
        assert mismatch.margin > mismatch.rounding

    def test_another_seed(self, receipt, target):
        other = with_answer(receipt, seed=receipt.answers[0].seed + 1)
        assert [answer.follows for answer in dflash.verify(other, target).answers] == [False] + [True] * 5

    @pytest.mark.parametrize("changes", [
        *({"temperature": 0.8}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"repetition_penalty": 1.5}),
        *({"presence_penalty": 1.0}, {"frequency_penalty": -2.0}, {"no_repeat_ngram_size": 1}),
        *({"logit_bias": (((50,), 8.0),)}, {"suppress_tokens": tuple(range(48))}, {"forced_eos_token_id": (1,)}),
    ], ids=str)  # fmt: skip
    def test_another_setting(self, receipt, target, changes):
        found = dflash.verify(with_settings(receipt, **changes), target)
        assert not found.follows
        assert any(answer.mismatch for answer in found.answers)

    def test_other_weights_are_named(self, receipt):
        with pytest.raises(ValueError, match=r"weights is [0-9a-f]{64} in the receipt"):
            dflash.verify(receipt, make_target("qwen3", seed=1))

    def test_what_differs_without_deciding_is_listed(self, receipt, target):
        found = dflash.verify(with_fingerprints(receipt, torch="1.0", config="0"), target)
        assert found.is_exact
        assert found.differences == {"torch": ("1.0", torch.__version__), "config": ("0", receipt.fingerprints.config)}

    def test_a_large_bias_makes_no_token_a_near_tie(self, target):
        """It is added to logits that have been rounded, so it does not make their rounding larger."""
        receipt = recorded(target, None, prompt(7)[None], max_new_tokens=NEW, logit_bias=dict.fromkeys(range(97), 1e6))
        [answer] = dflash.verify(with_token(receipt, 0, 3), target).answers
        assert answer.mismatch.index == 3
        assert answer.mismatch.rounding < 1e-3

    @pytest.mark.parametrize(
        ("changes", "name"), [({"dtype": torch.bfloat16}, "dtype"), ({"vocab_size": 96}, "vocab_size")]
    )
    def test_another_dtype_or_vocabulary_is_named(self, receipt, changes, name):
        with pytest.raises(ValueError, match=f"{name} is .* in the receipt and .* here"):
            dflash.verify(receipt, make_target("qwen3", **changes))

    def test_a_text_longer_than_the_target_can_read(self, receipt, target):
        long = with_answer(receipt, prompt=(5,) * 500)
        with pytest.raises(ValueError, match="an answer of 524 tokens is another target's: this one has 512 positions"):
            dflash.verify(long, target)

    def test_logits_that_are_nan(self, receipt):
        broken = make_target("qwen3")
        with torch.no_grad():
            broken.get_input_embeddings().weight[receipt.answers[2].ids[3]] = torch.nan
        forged = dataclasses.replace(receipt, fingerprints=Fingerprints.of(broken))
        with pytest.raises(ValueError, match="logits are NaN in answer"):
            dflash.verify(forged, broken)


class TestEnds:
    @pytest.fixture(scope="class")
    def stopped(self, target, draft) -> dflash.Receipt:
        arguments = {"temperature": 1.0, "seed": 1, "stop_token_ids": list(range(60, 70)), "max_new_tokens": 200}
        receipt = recorded(target, draft, prompt(7)[None], **arguments)
        assert receipt.answers[0].finish_reason == "stop"
        assert len(receipt.answers[0].ids) > 3
        assert dflash.verify(receipt, target).is_exact
        return receipt

    def end_of(self, receipt, target, *tokenizer) -> str:
        [answer] = dflash.verify(receipt, target, *tokenizer).answers
        assert answer.mismatch is None
        assert not answer.follows
        return answer.wrong_end

    def test_an_answer_that_was_cut_goes_on_or_ends_for_another_reason(self, stopped, target, draft):
        arguments = {"temperature": 1.0, "seed": 1, "stop_token_ids": [], "max_new_tokens": 200}
        whole = recorded(target, draft, prompt(7)[None], **arguments).answers[0].ids
        count = len(stopped.answers[0].ids)
        cut = f"it ends after {count - 2} tokens, and nothing ends it before max_new_tokens, 200"
        assert self.end_of(with_answer(stopped, ids=whole[: count - 2]), target) == cut
        longer = f"it has {count + 1} tokens, and token {count} ends it"
        assert self.end_of(with_answer(stopped, ids=whole[: count + 1]), target) == longer
        wrong = 'its finish_reason is "length", and it ends by "stop"'
        assert self.end_of(with_answer(stopped, finish_reason="length"), target) == wrong

    @pytest.mark.parametrize("most", [9, NEW - 1])
    def test_more_tokens_than_were_allowed(self, receipt, target, most):
        [*_, answer] = dflash.verify(with_settings(receipt, max_new_tokens=most), target).answers
        assert answer.wrong_end == f"it has {NEW} tokens, and max_new_tokens is {most}"

    def test_stop_strings_are_looked_for_again(self, target, draft):
        tokenizer = byte_level()
        arguments = {"temperature": 1.0, "seed": 5, "stop_token_ids": [], "max_new_tokens": 60, "tokenizer": tokenizer}
        whole = recorded(target, draft, prompt(7)[None], **arguments)
        text = tokenizer.decode(whole.answers[0].ids)
        stop = re.search("[a-z]{3}", text[40:])[0]
        receipt = recorded(target, draft, prompt(7)[None], stop_strings=[stop], **arguments)
        assert receipt.answers[0].ids == whole.answers[0].ids[: len(receipt.answers[0].ids)]
        assert receipt.answers[0].finish_reason == "stop"
        assert dflash.verify(receipt, target, tokenizer).is_exact
        goes_on = with_answer(receipt, ids=whole.answers[0].ids, finish_reason="length")
        assert "ends it" in self.end_of(goes_on, target, tokenizer)
        # 2. A stop token that comes later does not make up for it
        ids, count = whole.answers[0].ids, len(receipt.answers[0].ids)
        last = next(index for index in range(count, len(ids)) if ids[index] not in ids[:index])
        goes_on = with_settings(with_answer(receipt, ids=ids[: last + 1]), stop_token_ids=(ids[last],))
        assert self.end_of(goes_on, target, tokenizer) == f"it has {last + 1} tokens, and token {count} ends it"

    def test_stop_strings_need_the_receipts_own_tokenizer(self, target):
        tokenizer = byte_level()
        arguments = {"stop_strings": ["ab"], "tokenizer": tokenizer, "max_new_tokens": 5}
        receipt = recorded(target, None, prompt(7)[None], **arguments)
        with pytest.raises(ValueError, match=r"stop strings or a grammar, so its own tokenizer is.*: pass tokenizer="):
            dflash.verify(receipt, target)
        with pytest.raises(ValueError, match="this is another"):
            dflash.verify(receipt, target, word_tokenizer())


class TestGrammars:
    ARGUMENTS: ClassVar = {"tokenizer": byte_level(), "stop_token_ids": [0], "max_new_tokens": 60, "seed": 4}
    GRAMMARS: ClassVar = [
        dflash.Grammar.regex(r"([a-f]{3}( |\n)){4,12}"),
        dflash.Grammar.lark('start: pair\npair: "a" pair "b" | "c" pair "d" | pair pair | /[e-g]+/'),
    ]

    @pytest.mark.parametrize(
        ("grammar", "temperature", "dtype"),
        [(GRAMMARS[0], 1.0, torch.bfloat16), (GRAMMARS[1], 0.0, torch.float32), (GRAMMARS[1], 1.0, torch.bfloat16)],
        ids=["regex", "greedy", "lark"],
    )
    def test_answers_under_a_grammar_follow(self, grammar, temperature, dtype, tmp_path):
        target = make_target("qwen3", dtype=dtype)
        ids, mask = left_padded([prompt(5), prompt(19)])
        arguments = {"attention_mask": mask, "grammar": grammar, "temperature": temperature, **self.ARGUMENTS}
        receipt = recorded(target, make_draft(target), ids, **arguments)
        receipt.write(tmp_path / "receipt.json")
        receipt = dflash.Receipt.read(tmp_path / "receipt.json")
        assert receipt.settings.grammar == grammar
        assert dflash.verify(receipt, target, byte_level()).is_exact
        # Without the grammar, or by another, the target would not have chosen these tokens.
        for other in (None, dflash.Grammar.regex("[h-j]+")):
            assert not dflash.verify(with_settings(receipt, grammar=other), target, byte_level()).follows

    def test_a_token_that_the_grammar_bans_is_named(self, target):
        receipt = recorded(target, None, prompt(7)[None], grammar=self.GRAMMARS[0], **self.ARGUMENTS)
        banned = with_token(receipt, 0, 5, byte_level().encode("j")[0])
        [answer] = dflash.verify(banned, target, byte_level()).answers
        assert (answer.mismatch.index, answer.mismatch.margin) == (5, math.inf)

    @pytest.mark.parametrize("grammar", [GRAMMARS[0], None])
    def test_another_version_of_llguidance_is_noted_where_it_decides(self, target, grammar):
        receipt = recorded(target, None, prompt(7)[None], grammar=grammar, **self.ARGUMENTS)
        installed = importlib.metadata.version("llguidance")
        assert receipt.fingerprints.llguidance == installed
        found = dflash.verify(with_fingerprints(receipt, llguidance="0.1"), target, byte_level())
        assert found.is_exact
        assert found.differences == ({"llguidance": ("0.1", installed)} if grammar else {})

    def test_answers_with_different_grammars_have_no_receipt(self, target):
        ids = torch.stack([prompt(7)] * 2)
        with pytest.raises(ValueError, match="one grammar for all answers, got 2"):
            dflash.Recorder(target, ids, grammar=[self.GRAMMARS[0], None], **self.ARGUMENTS)


class TestBfloat16:
    @pytest.mark.parametrize(("family", "temperature"), [("qwen3", 1.0), ("qwen3_moe", 0.0), ("gpt_oss", 1.0)])
    def test_the_shapes_of_the_call_give_its_bits(self, family, temperature):
        """No near-tie is left, however many drafts were accepted in the call."""
        target = make_target(family, dtype=torch.bfloat16)
        prompts = [prompt(length, seed=6) for length in (1, 17, 60)]
        ids, mask = left_padded(prompts)
        arguments = {"attention_mask": mask, "max_new_tokens": 40, "temperature": temperature, "seed": 8}
        receipt = recorded(target, make_draft(target), ids, **arguments)
        answers = [torch.tensor(answer.ids) for answer in receipt.answers]
        drafting = cheat(target, make_draft(target), prompts, answers, spoil=5, max_length=128)
        recorder = dflash.Recorder(target, ids, **arguments)
        output = drafting.generate(ids, return_dict_in_generate=True, **recorder.arguments)
        assert recorder.receipt(output) == receipt
        assert dflash.verify(receipt, target).is_exact

    @pytest.mark.parametrize(("change", "is_near"), [(0.0, True), (2**-7, True), (2**-3, False)])
    def test_a_near_tie_is_reported_with_its_margin(self, change, is_near):
        target = make_target("qwen3", dtype=torch.bfloat16)
        receipt = recorded(target, None, prompt(12)[None], max_new_tokens=NEW)
        best, ids = receipt.answers[0].ids[-1], receipt.answers[0].ids
        rival = next(token for token in range(96, 0, -1) if token not in ids)
        with torch.no_grad():  # the rival's logit is a little smaller, or equal and of a higher id
            target.lm_head.weight[rival] = target.lm_head.weight[best] * (1 - change)
            best, rival = (best, rival) if change or best < rival else (rival, best)
        logits = target(torch.tensor([receipt.answers[0].prompt + ids[:-1]])).logits[0, -1].float()
        receipt = dataclasses.replace(receipt, fingerprints=Fingerprints.of(target))
        [answer] = dflash.verify(with_answer(receipt, ids=(*ids[:-1], rival)), target).answers
        assert answer.follows == is_near
        [found] = answer.near_ties if is_near else [answer.mismatch]
        assert (found.index, found.token, found.chosen) == (NEW - 1, rival, best)
        logit = float(logits[best])
        assert found.margin == pytest.approx(change * logit, abs=2**-7 * logit)
        assert found.rounding == pytest.approx(2**-6 * logit, rel=0.05)


class TestRefusals:
    @pytest.mark.parametrize(("arguments", "words"), [
        ({"acceptance": "rejection", "temperature": 1.0}, 'needs acceptance="keyed"'),
        ({"logits_processor": [lambda _, scores: scores]}, "cannot state logits_processor: use rules"),
        ({"no_repeat_ngram_size": 1000}, "no_repeat_ngram_size must be at most 256, got 1000"),
        ({"bad_words_ids": [[5, 6], [5] * 40_000]}, "must be at most 65536, got 80000"),
        ({"stop_strings": ["a" * 4097], "tokenizer": byte_level()}, "4096 characters together, got 1 with 4097"),
        ({"temprature": 1.0}, "unexpected keyword argument"),
    ], ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "")  # fmt: skip
    def test_what_cannot_be_checked_is_refused_before_any_work(self, target, arguments, words):
        passes = []
        handle = target.register_forward_hook(lambda *_: passes.append(1))
        with pytest.raises((ValueError, TypeError), match=words):
            dflash.Recorder(target, prompt(4)[None], **arguments)
        handle.remove()
        assert not passes


class TestFingerprints:
    def test_one_changed_bit_is_another_digest_and_files_do_not_matter(self, tmp_path):
        same = make_target("qwen3")
        for name, tensor in same.state_dict().items():
            before = weights_digest(same)
            tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
            assert weights_digest(same) != before, name
        target = make_target("qwen3", dtype=torch.bfloat16)
        target.save_pretrained(tmp_path, max_shard_size="50KB")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert weights_digest(loaded) == weights_digest(target)
        assert weights_digest(loaded.float()) != weights_digest(target)

    def test_tensors_inside_a_quantized_one_count(self):
        def wrapped(scale: float) -> torch.nn.Module:
            module = torch.nn.Linear(3, 2, bias=False)
            module.weight = torch.nn.Parameter(TwoTensor(torch.ones(2, 3), torch.full((2, 3), scale)))
            return module

        assert weights_digest(wrapped(1.0)) == weights_digest(wrapped(1.0)) != weights_digest(wrapped(2.0))

    def test_the_tokenizer_and_its_chat_template(self, target):
        plain, other = word_tokenizer(), word_tokenizer(chat_template="{{ messages }}")
        ours = Fingerprints.of(target, plain)
        assert set(ours.differences(Fingerprints.of(target, other))) == {"chat_template"}
        assert set(ours.differences(Fingerprints.of(target, byte_level()))) == {"tokenizer"}


class TestCommand:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        return save_pair(tmp_path_factory.mktemp("pair"))

    @pytest.fixture
    def written(self, shell, folder, tmp_path):
        models = ["--model", folder / "target", "--draft", folder / "draft"]
        sampling = ["--temperature", 1, "--seed", 4, "--max-new-tokens", 12]
        shell("generate", *models, *sampling, "--receipt", tmp_path / "receipt.json", "w5 w6 w7").assert_done()
        return tmp_path / "receipt.json"

    def edit(self, path, index: int) -> None:
        content = json.loads(path.read_text())
        content["answers"][0]["ids"][index] ^= 1
        path.write_text(json.dumps(content))

    def test_every_token_follows_until_one_does_not(self, shell, folder, written):
        done = shell("verify", written, "--model", folder / "target")
        assert (done.code, done.err) == (0, "")
        assert done.out == "every token follows from seed and weights: 12 tokens\n"
        self.edit(written, 7)
        done = shell("verify", written, "--model", folder / "target")
        assert done.code == 1
        assert done.out.startswith("does not follow: token 8 is ")
        report = json.loads(shell("verify", written, "--model", folder / "target", "--json").out)
        assert not report["follows"]
        assert report["answers"][0]["mismatch"]["index"] == 7
        assert report["answers"][0]["mismatch"]["margin"] > 0

    def test_other_weights_cannot_be_checked(self, shell, written):
        shell("verify", written).assert_refused("dflash: vocab_size is 97 in the receipt")  # the package's pair

    def test_a_near_tie_counts_as_asked(self, shell, folder, written, monkeypatch):
        self.edit(written, 11)
        monkeypatch.setattr("dflash.receipts.verification._ROUNDING", {torch.float32: math.inf})
        done = shell("verify", written, "--model", folder / "target")
        assert done.code == 0
        assert done.out.startswith("near-tie in float32: token 12 is ")
        assert done.out.endswith("12 tokens, 1 of them by a near-tie\n")
        assert shell("verify", written, "--model", folder / "target", "--exact").code == 1

    @pytest.mark.parametrize(("path", "words"), [(".", "is a folder"), ("missing/receipt.json", "there is no folder")])
    def test_a_receipt_that_cannot_be_written_is_said_before_the_models_are_loaded(
        self, shell, folder, tmp_path, monkeypatch, path, words
    ):
        monkeypatch.setattr("dflash.cli.options.ModelOptions.load", None)
        models = ["--model", folder / "target", "--draft", folder / "draft"]
        shell("generate", *models, "--receipt", tmp_path / path, "w5").assert_refused(words)

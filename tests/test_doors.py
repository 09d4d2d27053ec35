"""Test our loop as transformers' custom generate, and our drafter in its assisted generation."""

import functools
import json

import pytest
import torch
from baseline import left_padded, prompt
from families import make_draft, make_target, needs_assistant
from tiny_tokenizers import byte_level
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
)
from transformers.generation import LogitsProcessor, StoppingCriteria
from transformers.generation.stopping_criteria import ConfidenceCriteria

import dflash
from dflash.loading import draft_folder

NEW = 30


def ours(target, draft, ids, **call):
    call = {"max_new_tokens": NEW, "pad_token_id": 0} | call
    return target.generate(ids, custom_generate=dflash.custom_generate, draft=draft, **call)


class TestCustomGenerate:
    def test_greedy_equals_generate(self, target, draft):
        prompts = [prompt(length) for length in (4, 9, 21)]
        ids, mask = left_padded(prompts)
        call = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
        expected = target.generate(ids, **call)
        assert torch.equal(ours(target, draft, ids, **call), expected)
        stop = [int(expected[0, 21 + 5]), int(expected[1, 21 + 11])]
        expected = target.generate(ids, **call, eos_token_id=stop)
        output = ours(target, draft, ids, **call, eos_token_id=stop, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        assert output.finish_reasons[0] == "stop"
        assert output.statistics.block_size == 16
        total = ours(target, draft, ids, attention_mask=mask, max_new_tokens=None, max_length=30, block_size=4)
        assert torch.equal(total, target.generate(ids, attention_mask=mask, max_length=30, pad_token_id=0))
        alone = target.generate(ids[:1, -4:], custom_generate=dflash.custom_generate, max_new_tokens=NEW)
        assert torch.equal(alone, target.generate(ids[:1, -4:], max_new_tokens=NEW, do_sample=False))

    def test_weights_are_stored_as_in_generate(self, target, draft):
        ids, call = prompt(11)[None], {"max_new_tokens": NEW, "weights": "int8"}
        expected = dflash.generate(target, draft, ids, **call)
        output = ours(target, draft, ids, return_dict_in_generate=True, **call, draft_weights="int8")
        assert torch.equal(output.sequences, expected)
        assert output.statistics.weights == "int8"
        assert not torch.equal(ours(target, draft, ids), expected)

    def test_acceptance_and_denoise_steps_are_those_of_generate(self, target, draft):
        p = prompt(8)[None]
        call = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": NEW, "seed": 6}
        rule = {"temperature": 0.8, "max_new_tokens": NEW, "seed": 6}
        for own in ({"acceptance": "rejection"}, {"denoise_steps": 3}, {"tree": 32}):
            expected = dflash.generate(target, draft, p, return_dict_in_generate=True, **rule, **own)
            output = ours(target, draft, p, return_dict_in_generate=True, **call, **own)
            assert torch.equal(output.sequences, expected.sequences)
            assert output.statistics.acceptance_lengths == expected.statistics.acceptance_lengths

    def test_sampling_settings_are_applied(self, target, draft):
        p = prompt(8)[None]
        call = {"do_sample": True, "temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.05}
        rule = {name: value for name, value in call.items() if name != "do_sample"} | {"max_new_tokens": NEW}
        expected = dflash.generate(target, draft, p, seed=6, **rule)
        assert torch.equal(ours(target, draft, p, seed=6, **call), expected)
        assert torch.equal(
            ours(target, draft, p, seed=6, draft_sharpness=2.0, renormalize_logits=True, **call), expected
        )
        # transformers' own default is top_k = 50.
        plain = ours(target, draft, p, seed=6, do_sample=True)
        assert torch.equal(
            plain, dflash.generate(target, draft, p, seed=6, temperature=1.0, top_k=50, max_new_tokens=NEW)
        )
        torch.manual_seed(5)
        first = ours(target, draft, p, **call)
        torch.manual_seed(5)
        assert torch.equal(ours(target, draft, p, **call), first)

    def test_several_answers_equal_repeated_prompts(self, target, draft):
        ids, mask = left_padded([prompt(3), prompt(7)])
        call = {"attention_mask": mask, "max_new_tokens": 9, "seed": 2, "num_return_sequences": 3}
        output = ours(target, draft, ids, do_sample=True, top_k=0, **call)
        assert torch.equal(output, dflash.generate(target, draft, ids, temperature=1.0, **call))

    def test_streamer_and_stopping_criteria_are_followed(self, target, draft, capsys):
        tokenizer, p = byte_level(), prompt(9)
        full = target.generate(p[None], do_sample=False, max_new_tokens=NEW)
        string = tokenizer.decode(full[0, 9 : 9 + 12])[-2:].strip("\ufffd")
        criteria = [StopStringCriteria(tokenizer, [string]), MaxLengthCriteria(9 + 20)]
        call = {"stopping_criteria": criteria, "do_sample": False}
        expected = target.generate(p[None], max_new_tokens=NEW, streamer=TextStreamer(tokenizer), **call)
        assert expected.shape[1] < 9 + 20
        printed = capsys.readouterr().out
        assert torch.equal(ours(target, draft, p[None], streamer=TextStreamer(tokenizer), **call), expected)
        assert capsys.readouterr().out == printed
        assert torch.equal(ours(target, draft, p[None], acceptance="rejection", **call), expected)
        wrapped = functools.partial(dflash.custom_generate, draft=draft)
        call["streamer"] = TextStreamer(tokenizer)
        assert torch.equal(target.generate(p[None], custom_generate=wrapped, max_new_tokens=NEW, **call), expected)
        assert capsys.readouterr().out == printed
        stop = int(full[0, 9 + 4])
        call = {"stopping_criteria": [EosTokenCriteria(stop)], "do_sample": False, "pad_token_id": 0}
        expected = target.generate(p[None], max_new_tokens=NEW, eos_token_id=96, **call)
        assert torch.equal(ours(target, draft, p[None], eos_token_id=96, **call), expected)

    def test_a_model_whose_config_asks_for_the_defaults_is_served(self, target, draft):
        p = prompt(6)[None]
        expected = target.generate(p, do_sample=False, max_new_tokens=NEW)
        call = {"do_sample": False, "use_cache": False}
        assert torch.equal(ours(target, draft, p, **call), expected)
        positions = torch.arange(6)[None]
        call = {"position_ids": positions, "attention_mask": torch.ones_like(p), "past_key_values": DynamicCache()}
        assert torch.equal(ours(target, draft, p, **call), expected)


class NoEven(LogitsProcessor):
    """Bans even ids after an odd one, and odd ids after an even one."""

    def __call__(self, input_ids, scores):
        banned = (torch.arange(scores.shape[1])[None] + input_ids[:, -1:]) % 2 == 1
        return scores.masked_fill(banned, -torch.inf)


class After(StoppingCriteria):
    """Ends a row once two of its last three tokens are equal."""

    def __call__(self, input_ids, scores, **kwargs):
        last = input_ids[:, -3:]
        return (last[:, :-1] == last[:, 1:]).any(1)


RULES = [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2, "suppress_tokens": [3, 5, 8]},
    {"bad_words_ids": [[4], [7, 9]], "repetition_penalty": 1.1},
    {"min_new_tokens": 12, "eos_token_id": list(range(0, 97, 3)), "forced_eos_token_id": 6},
    {"sequence_bias": {(5,): 4.0, (9, 7): -3.0}, "begin_suppress_tokens": [1, 2, 30]},
    {"logits_processor": LogitsProcessorList([NoEven()])},
    {"logits_processor": LogitsProcessorList([NoEven(), RepetitionPenaltyLogitsProcessor(1.3)])},
    {"logits_processor": LogitsProcessorList([NoEven()]), "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)]), "no_repeat_ngram_size": 3},
    {"stopping_criteria": [After()], "repetition_penalty": 0.8},
    {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1] * 7 % 97), int(ids[-1] * 11 % 97)]},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: ",".join(rule))
def test_rules_processors_and_criteria_match_transformers(target, draft, rule):
    for length in (1, 14):
        p = prompt(length, seed=3)[None]
        call = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0} | rule
        assert torch.equal(ours(target, draft, p, **call), target.generate(p, **call))


REFUSED = [
    (
        {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)]), "do_sample": True},
        r"TemperatureLogitsWarper with temperature=0\.5 where generation_config\.temperature is 1\.0",
    ),
    (
        {"logits_processor": LogitsProcessorList([TopKLogitsWarper(50, filter_value=0.0)]), "do_sample": True},
        "TopKLogitsWarper with a min_tokens_to_keep or filter_value of its own",
    ),
    ({"stopping_criteria": [ConfidenceCriteria(0.5)]}, "ConfidenceCriteria: it is not a function of the ids"),
    ({"typical_p": 0.5, "do_sample": True}, r"generation_config.typical_p=0\.5"),
    ({"num_beams": 2}, "generation_config.num_beams=2"),
    ({"output_scores": True, "return_dict_in_generate": True}, "generation_config.output_scores=True"),
    ({"position_ids": torch.arange(3, 8)[None]}, "position_ids other than 0, 1, 2"),
    ({"draft_sharpness": -1.0}, "draft_sharpness must be a number of at least 0"),
]


class TestRefusals:
    @pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda value: str(value)[:40])
    def test_unsupported_arguments_are_refused_by_name(self, target, draft, arguments, message):
        with pytest.raises(ValueError, match=message):
            ours(target, draft, prompt(5)[None], **arguments)

    @pytest.mark.parametrize("name", ["cache_implementation", "output_scores", "num_beams", "prompt_lookup_num_tokens"])
    def test_generate_refuses_what_custom_generate_does(self, draft, name):
        target, value = make_target("qwen3"), {"cache_implementation": "quantized", "num_beams": 2}.get(name, 3)
        setattr(target.generation_config, name, value)
        with pytest.raises(ValueError, match=f"generation_config asks for {name}={value!r}, which is not applied"):
            dflash.generate(target, draft, prompt(5)[None])

    def test_processors_and_criteria_that_cannot_see_padding_are_refused(self, target, draft):
        ids, mask = left_padded([prompt(3), prompt(7)])
        for call, name in (
            ({"logits_processor": LogitsProcessorList([NoEven()])}, "NoEven in a padded batch"),
            ({"stopping_criteria": [After()]}, "After in a padded batch"),
        ):
            with pytest.raises(ValueError, match=name):
                ours(target, draft, ids, attention_mask=mask, **call)
        with pytest.raises(ValueError, match="PrefixConstrainedLogitsProcessor to 2 rows"):
            ours(target, draft, prompt(5)[None].repeat(2, 1), prefix_allowed_tokens_fn=lambda row, ids: [1])

    def test_an_assistant_model_is_refused(self, target, draft):
        with pytest.raises(ValueError, match="does not apply assistant_model: pass the drafter as draft="):
            ours(target, draft, prompt(5)[None], assistant_model=make_target("qwen3"))

    def test_a_cache_that_holds_tokens_is_refused(self, target, draft):
        cache = DynamicCache()
        p = prompt(6)[None]
        target(input_ids=p[:, :3], past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match=r"(cache|past_key_values) that holds tokens, 3 here"):
            ours(target, draft, p, past_key_values=cache)

    def test_a_call_from_outside_transformers_is_refused(self, target, draft):
        with pytest.raises(TypeError, match="custom_generate is called by transformers"):
            dflash.custom_generate(target, prompt(5)[None], draft=draft)


class Counting:
    """An assistant that counts its drafts."""

    def __init__(self, assistant):
        self.assistant, self.calls = assistant, 0

    def __getattr__(self, name):
        return getattr(self.assistant, name)

    def __call__(self, **arguments):
        self.calls += 1
        return self.assistant(**arguments)


def test_an_assistant_is_refused_where_the_loop_of_transformers_misses_stop_tokens(draft, monkeypatch):
    monkeypatch.setattr("dflash.hf.transformers_version", lambda: (5, 17))
    with pytest.raises(
        RuntimeError, match=r"needs transformers >= 5\.18: .* this version, 5\.17, continues after a stop"
    ):
        dflash.as_assistant(draft)


@needs_assistant
class TestAssistant:
    def call(self, target, assistant, ids, **arguments):
        call = {"do_sample": False, "use_cache": True, "pad_token_id": 0} | arguments
        return target.generate(ids, assistant_model=assistant, speculation_type="dflash", **call)

    def test_random_drafts_change_nothing(self, target, draft):
        assistant = dflash.as_assistant(draft)
        for length in (2, 15, 40):
            p = prompt(length)[None]
            expected = target.generate(p, do_sample=False, max_new_tokens=NEW)
            assert torch.equal(self.call(target, assistant, p, max_new_tokens=NEW), expected)

    def test_a_drafter_in_8_bits_changes_nothing(self, target, draft):
        assistant, p = dflash.as_assistant(draft, draft_weights="int8"), prompt(15)[None]
        expected = target.generate(p, do_sample=False, max_new_tokens=NEW)
        assert torch.equal(self.call(target, assistant, p, max_new_tokens=NEW), expected)
        with pytest.raises(ValueError, match='draft_weights must be "int8" or None, got'):
            dflash.as_assistant(draft, draft_weights="int4")
        with pytest.raises(ValueError, match=r"needs a drafter on CPU in .* got one on cpu in .*16"):
            dflash.as_assistant(make_draft(target).half(), draft_weights="int8")

    @pytest.fixture(scope="class")
    def trained(self, pair_dir):
        """Return the trained target, its drafter of the first generation, and its first prompts."""
        tokenizer = AutoTokenizer.from_pretrained(pair_dir / "target")
        texts = [json.loads(line)["prompt"] for line in (pair_dir / "prompts.jsonl").read_text().splitlines()[:8]]
        prompts = [torch.tensor([[0, *tokenizer.encode(text, add_special_tokens=False)]]) for text in texts]
        target = AutoModelForCausalLM.from_pretrained(pair_dir / "target", dtype=torch.float32).eval()
        return target, dflash.load_draft(draft_folder(pair_dir, 1), dtype=torch.float32), prompts

    def test_its_proposals_equal_our_own(self, trained):
        """On a trained pair, the text equals plain generate's and the steps equal our own loop's."""
        target, draft, prompts = trained
        assistant = Counting(dflash.as_assistant(draft))
        tokens = steps = 0
        for ids in prompts:
            expected = target.generate(ids, do_sample=False, max_new_tokens=100)
            before = assistant.calls
            output = self.call(target, assistant, ids, max_new_tokens=100)
            assert torch.equal(output, expected)
            loop = dflash.generate(target, draft, ids, max_new_tokens=100, return_dict_in_generate=True)
            assert assistant.calls - before == len(loop.statistics.acceptance_lengths[0])
            tokens += output.shape[1] - ids.shape[1] - 1
            steps += assistant.calls - before
        assert tokens / steps > 7

    def test_left_padding_is_not_context(self, trained):
        target, draft, (ids, *_) = trained
        padded = torch.cat([ids.new_zeros(1, 5), ids], 1)
        mask = torch.cat([ids.new_zeros(1, 5), torch.ones_like(ids)], 1)
        assistants = [Counting(dflash.as_assistant(draft)) for _ in range(2)]
        alone = self.call(target, assistants[0], ids, max_new_tokens=60)
        output = self.call(target, assistants[1], padded, attention_mask=mask, max_new_tokens=60)
        assert torch.equal(output[:, 5:], alone)
        assert assistants[0].calls == assistants[1].calls

    def test_wrong_assistant_arguments_are_refused(self, target):
        with pytest.raises(TypeError, match="draft must be"):
            dflash.as_assistant(torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match='as_assistant needs speculation_type="dflash" in the call'):
            target.generate(prompt(5)[None], assistant_model=dflash.as_assistant(make_draft(target)))
        other = make_draft(make_target("qwen3", dtype=torch.bfloat16))
        with pytest.raises(ValueError, match=r"drafter's dtype is torch.bfloat16, the target embeds in .*32"):
            self.call(target, dflash.as_assistant(other), prompt(5)[None], max_new_tokens=4)

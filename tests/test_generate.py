"""Test the generator from the caller's side: arguments, errors, statistics and state between calls."""

import dataclasses
import gc
import weakref

import pytest
import torch
from baseline import greedy, left_padded, prompt
from families import cheat, draft_config, make_draft, make_target
from tiny_tokenizers import byte_level
from transformers import RepetitionPenaltyLogitsProcessor, TextStreamer

import dflash
from dflash.fit import check_config

NAN = float("nan")


def ids(rows: int = 1, length: int = 5) -> torch.Tensor:
    return torch.arange(rows * length).view(rows, length) % 90 + 1


REJECTION = {"acceptance": "rejection", "temperature": 1.0}
BAD_CALLS = [
    ({"ids": torch.zeros(1, 0, dtype=torch.int64)}, ValueError, r"at least one token in each row, got shape \[1, 0\]"),
    ({"ids": ids()[None]}, ValueError, r"ids must be \[batch, length\], got 3 dimensions"),
    ({"ids": ids().float()}, TypeError, r"ids must be int64 or int32, got torch.float32"),
    ({"ids": [[1, 2]]}, TypeError, r"ids must be a tensor .* got list"),
    ({"ids": ids() - 3}, ValueError, r"ids must lie in 0 \.\. 96 .* got -2"),
    ({"ids": ids() + 92}, ValueError, r"ids must lie in 0 \.\. 96 .* got 97"),
    ({"attention_mask": torch.ones(1, 4)}, ValueError, r"must have the shape of ids, \[1, 5\], got \[1, 4\]"),
    ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, ValueError, "attention_mask has holes"),
    ({"attention_mask": torch.zeros(1, 5)}, ValueError, "hides a whole row"),
    ({"attention_mask": torch.full((1, 5), 2)}, ValueError, "zeros and ones only"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be an integer of at least 1, got 0"),
    ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens must be an integer of at least 1, got 2.5"),
    ({"max_new_tokens": 508}, ValueError, "5 tokens and 508 new tokens pass the target's max_position_embeddings, 512"),
    ({"seed": [1, 2]}, ValueError, "seed must be an integer or one per row, 1 in all, got 2"),
    ({"stop_token_ids": [97]}, ValueError, r"stop_token_ids must hold token ids in 0 \.\. 96, got 97"),
    ({"stop_token_ids": 2.5}, TypeError, "stop_token_ids must hold token ids in .* got 2.5"),
    ({"block_size": 17}, ValueError, "block_size must be at most the drafter's own, 16, got 17"),
    ({"block_size": 0}, ValueError, "block_size must be an integer of at least 1, got 0"),
    ({"block_size": "most"}, ValueError, "must be an integer of at least 1, \"auto\" or None, got 'most'"),
    ({"block_size": "auto", "tree": 16}, ValueError, "block_size='auto' cannot be combined with tree=16"),
    ({"block_size": "auto", "acceptance": "rejection"}, ValueError, "cannot be combined with acceptance="),
    ({"tree": 1}, ValueError, r'tree must be a number of rows in 2 \.\. 128, "auto" or None, got 1$'),
    ({"tree": 16, "block_size": 1}, ValueError, "tree=16 needs a drafter to grow from"),
    ({"tree": 16, "denoise_steps": 2}, ValueError, "tree=16 cannot be combined with denoise_steps=2"),
    ({"tree": 16, "draft_sharpness": 2.0}, ValueError, r"cannot be combined with draft_sharpness=2\.0"),
    ({"denoise_steps": 0}, ValueError, "denoise_steps must be an integer of at least 1, got 0"),
    ({**REJECTION, "denoise_steps": 2}, ValueError, "needs denoise_steps=1, got 2"),
    ({**REJECTION, "block_size": 1}, ValueError, "needs drafts to reject"),
    ({"draft_weights": "int4"}, ValueError, r'draft_weights must be "int8" or None, got'),
    ({"weights": "int4"}, ValueError, r'weights must be "int8" or None, got \'int4\''),
    ({"draft_weights": "int8", "block_size": 1}, ValueError, "needs a drafter, got draft=None or block_size=1: leave"),
    ({"drafter_window": 0}, ValueError, "drafter_window must be an integer of at least 1, got 0"),
    ({"drafter_window": 8, "block_size": 1}, ValueError, "drafter_window=8 needs a drafter, got draft=None or block"),
    ({"prompt_lookup": 0}, ValueError, "prompt_lookup must be an integer of at least 1, got 0"),
    ({"prompt_lookup": 2.5}, TypeError, "prompt_lookup must be an integer of at least 1, got 2.5"),
    ({"prompt_lookup": 2, "block_size": 1}, ValueError, "needs blocks of at least 2 rows, got block_size=1"),
    ({"prompt_lookup": 2, "tree": 16}, ValueError, "drafts chains, got tree=16: leave one of them out"),
    ({**REJECTION, "draft_sharpness": 2.0}, ValueError, "draft_sharpness must be 1 there"),
    ({**REJECTION, "logits_processor": [print]}, ValueError, "with logits_processor or stopping_criteria"),
    ({"logprobs": 21}, ValueError, "logprobs must be at most 20, got 21"),
    ({"logprobs": -1}, ValueError, "logprobs must be an integer of at least 0, got -1"),
    ({"logprobs": True}, TypeError, "logprobs must be an integer"),
    ({"prompt_logprobs": True}, ValueError, "prompt_logprobs=True needs logprobs too"),
    ({"logprobs": 1, "prompt_logprobs": 1}, TypeError, "prompt_logprobs must be True or False, got 1"),
    ({"logprobs": 1, "tree": 16}, ValueError, "logprobs cannot be combined with tree=16: pass tree=None"),
    ({"suppress_tokens": range(97)}, ValueError, "together leave no token to choose"),
    ({"bad_words_ids": [[x] for x in range(97)]}, ValueError, "together leave no token to choose"),
    ({"forced_eos_token_id": 3, "suppress_tokens": [3]}, ValueError, r"_eos_token_id \[3\] is also in suppress_tokens"),
    ({"repetition_penalty": 1.1, "logits_processor": [RepetitionPenaltyLogitsProcessor(1.2)]}, ValueError,
     r"repetition_penalty is 1\.1 .* and logits_processor holds a RepetitionPenaltyLogitsProcessor: choose one"),
    ({"stop_strings": "x"}, ValueError, r"stop_strings \['x'\] need the target's tokenizer"),
    ({"stop_strings": "x", "tokenizer": object()}, ValueError, "tokenizer, got object: pass tokenizer="),
    ({"stop_strings": ["a", ""], "tokenizer": byte_level()}, ValueError, "must be strings that are not empty, got ''"),
    ({"stop_strings": [7], "tokenizer": byte_level()}, ValueError, "must be strings that are not empty, got 7"),
    ({"streamer": TextStreamer(byte_level()), "ids": ids(2)}, ValueError, "takes a batch of one row, got 2 rows"),
    ({"streamer": []}, TypeError, r"streamer must have put\(\) and end\(\).* got list"),
    ({"num_return_sequences": 2}, ValueError, "num_return_sequences must be 1, got 2"),
    ({"num_return_sequences": 0}, ValueError, "num_return_sequences must be an integer of at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_CALLS, ids=lambda value: str(value)[:40])
def test_bad_arguments_are_named_before_any_work(target, draft, arguments, error, message, kept):
    dflash.generate(target, draft, ids(), max_new_tokens=1)
    before, call = kept(), {"ids": ids(), "max_new_tokens": 4, **arguments}
    with pytest.raises(error, match=message):
        dflash.generate(target, draft, **call)
    assert kept() is before
    target.generation_config.max_new_tokens = 4
    del call["max_new_tokens"]
    if "max_new_tokens" not in arguments:
        with pytest.raises(error, match=message):
            dflash.generate(target, draft, **call)
    target.generation_config.max_new_tokens = None


def test_a_generator_refuses_calls_that_do_not_fit(target, draft):
    generator = dflash.Generator(target, draft, max_length=20, batch_size=2)
    with pytest.raises(ValueError, match="5 tokens and 16 new tokens do not fit this generator's max_length, 20"):
        generator.generate(ids(), max_new_tokens=16)
    with pytest.raises(ValueError, match="ids has 3 rows, this generator was made for 2"):
        generator.generate(ids(3), max_new_tokens=4)
    with pytest.raises(ValueError, match="ids has 3 rows, this generator was made for 2"):
        generator.generate(ids(), max_new_tokens=4, num_return_sequences=3, temperature=1.0)
    with pytest.raises(ValueError, match="max_length 600 is past the target's max_position_embeddings, 512"):
        dflash.Generator(target, draft, max_length=600)
    with pytest.raises(ValueError, match="max_length must be an integer of at least 2"):
        dflash.Generator(target, draft, max_length=1)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
        dflash.Generator(target, draft, max_length=20, batch_size=0)


@pytest.mark.parametrize(
    "name", ["batch_size", "denoise_steps", "prefill_chunk", "compile", "graph", "fused", "reuse_prefix"]
)
def test_none_is_no_value_of_an_option_that_is_never_off(target, draft, name):
    with pytest.raises(TypeError, match=f"{name} must have a value, got None: leave it out for the default"):
        dflash.Generator(target, draft, max_length=20, **{name: None})


def test_options_are_compared_by_value_and_may_be_none_where_that_is_off(target, draft):
    unset = dict.fromkeys(("block_size", "tree", "weights", "draft_weights", "drafter_window", "prompt_lookup"))
    generator = dflash.Generator(target, draft, max_length=20, graph=0, fused=0, **unset)
    assert generator.block_size == 16
    assert generator.fused_reason == dflash.Generator(target, draft, max_length=20, fused=False).fused_reason
    with pytest.raises(ValueError, match="graph=True needs a target on a GPU"):
        dflash.Generator(target, draft, max_length=20, graph=1)


def untied(target, missing: str, **settings) -> dflash.Drafter:
    """Return a drafter whose config does not say ``missing``, so that only its settings can be compared."""
    config = {name: value for name, value in draft_config(target).items() if name != missing}
    return dflash.Drafter(dflash.DraftConfig.from_config(config | {"dflash_config": settings}))


UNFIT = {
    "its hidden_size is 32, the target's is 64": lambda _: make_draft(make_target("qwen3", hidden_size=32)),
    "its num_target_layers is 5, the target's is 4": lambda _: make_draft(make_target("qwen3", num_hidden_layers=5)),
    "its vocab_size is 101, the target's is 97": lambda _: make_draft(make_target("qwen3", vocab_size=101), "DFlash2"),
    "its dtype is torch.bfloat16, the target's is torch.float32: load it with dtype=torch.float32": lambda target: (
        make_draft(target).bfloat16()
    ),
    "its device is meta, the target's is cpu": lambda target: make_draft(target).to("meta"),
    r"it taps layers \[0, 4\], the": lambda target: untied(
        target, "num_target_layers", mask_token_id=1, target_layer_ids=[0, 4]
    ),
    "its mask_token_id is 97, the target embeds": lambda target: untied(
        target, "vocab_size", mask_token_id=97, target_layer_ids=[0, 2]
    ),
    "draft must be a module, 'mtp' or None, got str: load it once": lambda _: "a folder",
    "draft must be": lambda _: torch.nn.Linear(2, 2),
}


@pytest.mark.parametrize("message", UNFIT)
def test_a_drafter_that_does_not_fit_is_refused(target, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dflash.generate(target, UNFIT[message](target), ids(), max_new_tokens=4)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 64), ("vocab_size", 97)])
def test_a_drafter_is_compared_with_the_config_of_each_layer(draft, key, value):
    layered = make_target("qwen3", per_layer_config={1: {key: value}})
    check_config(layered, draft.config)
    other = dataclasses.replace(draft.config, own_parts=("embed_tokens",), **{key: value + 8})
    with pytest.raises(ValueError, match=f"its {key} is {value + 8}, the target's is {value}"):
        check_config(layered, other)


def test_nan_logits_of_the_target_are_an_error_that_says_where(target, draft):
    broken = make_target("qwen3")
    with torch.no_grad():
        broken.lm_head.weight[5] = NAN
    with pytest.raises(ValueError, match="logits are NaN in row 0 for position 5"):
        dflash.generate(broken, draft, ids(), max_new_tokens=4)
    # NaN that appears later: only while the third new token is chosen.
    answer = greedy(target, ids()[0], 4)
    late = make_target("qwen3")
    with torch.no_grad():
        late.model.embed_tokens.weight[answer[1]] = NAN
    for block_size in (1, 16):
        with pytest.raises(ValueError, match="logits are NaN in row 0 for position 7"):
            dflash.generate(late, make_draft(late), ids(), max_new_tokens=8, block_size=block_size)


def test_nan_in_the_drafter_costs_only_speed(target):
    broken = make_draft(target)
    with torch.no_grad():
        broken.norm.weight.fill_(NAN)
    output = dflash.generate(target, broken, ids(), max_new_tokens=9)
    assert output[0, 5:].tolist() == greedy(target, ids()[0], 9).tolist()


def test_none_follows_the_generation_config(draft):
    target = make_target("qwen3")
    config = target.generation_config
    full = greedy(target, ids()[0], 30)
    config.max_new_tokens = 7
    assert dflash.generate(target, draft, ids())[0, 5:].tolist() == full[:7].tolist()
    config.max_new_tokens, config.max_length = None, 11
    assert dflash.generate(target, draft, ids())[0, 5:].tolist() == full[:6].tolist()
    config.max_length = None
    assert dflash.generate(target, draft, ids()).shape == (1, 25)
    config.eos_token_id = [int(full[3]), 96]
    stopped = dflash.generate(target, draft, ids())
    first = full.tolist().index(int(full[3]))
    assert stopped[0, 5:].tolist() == full[: first + 1].tolist()
    assert dflash.generate(target, draft, ids(), stop_token_ids=[]).shape == (1, 25)
    config.eos_token_id = [97, 5000]  # past the vocabulary: never emitted
    assert dflash.generate(target, draft, ids()).shape == (1, 25)
    config.do_sample, config.temperature, config.top_k, config.eos_token_id = True, 0.8, 3, None
    by_config = dflash.generate(target, draft, ids(), seed=1)
    assert torch.equal(by_config, dflash.generate(target, draft, ids(), seed=1, temperature=0.8, top_k=3))
    assert not torch.equal(by_config, dflash.generate(target, draft, ids(), seed=1, temperature=0.8, top_k=0))


def test_the_prompt_comes_back_and_rows_are_right_padded(target, draft):
    prompts = [prompt(3), prompt(8)]
    batch, mask = left_padded(prompts)
    full = [greedy(target, p, 12) for p in prompts]
    stop = [int(full[0][2])]
    output = dflash.generate(target, draft, batch, attention_mask=mask, max_new_tokens=12, stop_token_ids=stop)
    expected = [greedy(target, p, 12, stop=tuple(stop)) for p in prompts]
    assert output.shape == (2, 8 + max(map(len, expected)))
    assert torch.equal(output[:, :8], batch)
    for row, answer in zip(output, expected, strict=True):
        assert row[8 : 8 + len(answer)].tolist() == answer.tolist()
        assert row[8 + len(answer) :].eq(0).all()
    right = torch.stack([torch.cat([p, p.new_zeros(8 - len(p))]) for p in prompts])
    keep = torch.stack([torch.arange(8) < len(p) for p in prompts])
    same = dflash.generate(target, draft, right, attention_mask=keep, max_new_tokens=12, stop_token_ids=stop)
    assert torch.equal(same[:, 8:], output[:, 8:])
    whole = dflash.generate(target, draft, batch[:1].int(), attention_mask=mask[:1], max_new_tokens=2)
    assert torch.equal(whole[0, 8:], full[0][:2])


def test_statistics_count_what_happened(target, draft):
    p = prompt(6)
    answer = greedy(target, p, 33)
    generator = cheat(target, draft, [p, p], [answer, answer], block_size=8)
    batch = p[None].repeat(2, 1)
    output = generator.generate(batch, max_new_tokens=33, return_dict_in_generate=True)
    statistics = output.statistics
    assert statistics.acceptance_lengths == [[8, 8, 8, 8]] * 2
    assert statistics.acceptance_length == 8
    assert statistics.histogram == [0] * 8 + [8]
    assert statistics.acceptance_per_position == [1.0] * 7
    assert statistics.num_new_tokens == [33, 33]
    assert 0 < statistics.time_to_first_token < statistics.seconds
    assert statistics.tokens_per_second == pytest.approx(66 / statistics.seconds)
    assert output.finish_reasons == ["length", "length"]
    generator.spoil = 4  # positions 8, 12, 16, ... are never drafted right
    statistics = generator.generate(p[None], max_new_tokens=33, return_dict_in_generate=True).statistics
    assert sum(statistics.acceptance_lengths[0]) == 32
    assert statistics.acceptance_lengths[0][1:-1] == [4] * 7
    one = generator.generate(p[None], max_new_tokens=1, return_dict_in_generate=True).statistics
    assert one.acceptance_lengths == [[]]
    assert one.num_new_tokens == [1]


def test_a_generator_refuses_a_target_whose_tensors_were_replaced(draft):
    target = make_target("qwen3")
    generator = dflash.Generator(target, draft, max_length=32)
    target.load_state_dict({name: tensor.clone() for name, tensor in target.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match="tensors were replaced since this generator was made"):
        generator.generate(ids(), max_new_tokens=4)


def test_a_greedy_call_leaves_the_random_state(target, draft):
    before = torch.random.get_rng_state()
    dflash.generate(target, draft, ids(), max_new_tokens=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    dflash.generate(target, draft, ids(), max_new_tokens=4, temperature=1.0)
    assert not torch.equal(torch.random.get_rng_state(), before)


class TestOneShot:
    def test_caches_persist_until_they_are_released(self, target, draft, kept):
        dflash.generate(target, draft, ids(), max_new_tokens=4)
        before = weakref.ref(kept())
        dflash.generate(target, draft, ids(1, 9), max_new_tokens=30)
        assert kept() is before()
        dflash.generate(target, draft, ids(1, 9), max_new_tokens=400)
        assert before() is None, "it had to grow"
        dflash.release()
        assert kept() is None

    def test_a_call_never_reuses_the_caches_of_an_earlier_one(self, target, draft):
        first = dflash.generate(target, draft, ids(), max_new_tokens=9)
        output = dflash.generate(target, draft, first, max_new_tokens=4, return_dict_in_generate=True)
        assert output.statistics.num_prefilled_tokens == [14]
        for door in (dflash.generate, dflash.stream):
            with pytest.raises(TypeError, match=r"a call takes no reuse_prefix: one-shot calls never .* Generator"):
                door(target, draft, first, max_new_tokens=4, reuse_prefix=True)
        generator = dflash.Generator(target, draft, max_length=40)
        with pytest.raises(TypeError, match="a call takes no reuse_prefix"):
            generator.generate(first, max_new_tokens=4, reuse_prefix=True)

    @pytest.mark.parametrize("dropped", ["target", "draft"])
    def test_it_keeps_neither_module_alive(self, dropped, kept):
        modules = {"target": make_target("qwen3")}
        modules["draft"] = make_draft(modules["target"])
        dflash.generate(modules["target"], modules["draft"], ids(), max_new_tokens=4)
        weight = weakref.ref(next(modules[dropped].parameters()))
        reference = weakref.ref(modules.pop(dropped))
        gc.collect()
        assert reference() is None
        assert weight() is None, "a cycle keeps the weights"
        assert kept() is None

    def test_a_changed_attribute_counts_after_release(self):
        target = make_target("qwen3")
        before = dflash.generate(target, None, ids(), max_new_tokens=12)
        target.model.layers[0].self_attn.scaling *= 3
        dflash.release()
        scaled = dflash.generate(target, None, ids(), max_new_tokens=12)
        assert scaled[0, 5:].tolist() == greedy(target, ids()[0], 12).tolist()
        assert not torch.equal(scaled, before)

    def test_calls_inside_and_outside_of_inference_mode_and_autocast(self):
        target = make_target("qwen3")
        draft = make_draft(target)
        expected = greedy(target, ids()[0], 6).tolist()
        with torch.inference_mode():
            assert dflash.generate(target, draft, ids(), max_new_tokens=6)[0, 5:].tolist() == expected
            generator = dflash.Generator(target, draft, max_length=20)
        assert dflash.generate(target, draft, ids(), max_new_tokens=6)[0, 5:].tolist() == expected
        assert generator.generate(ids(), max_new_tokens=6)[0, 5:].tolist() == expected
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert dflash.generate(target, draft, ids(), max_new_tokens=6)[0, 5:].tolist() == expected

    def test_changed_weights_are_noticed(self):
        target = make_target("qwen3")
        draft = make_draft(target)
        before = dflash.generate(target, draft, ids(), max_new_tokens=12)
        with torch.no_grad():
            target.lm_head.weight.copy_(target.lm_head.weight.flip(0))
        changed = dflash.generate(target, draft, ids(), max_new_tokens=12)
        assert changed[0, 5:].tolist() == greedy(target, ids()[0], 12).tolist()
        assert not torch.equal(changed, before)
        target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.flip(0))
        assert torch.equal(dflash.generate(target, draft, ids(), max_new_tokens=12), before)


def test_a_step_that_raised_leaves_no_row_out_of_the_next_call(target, draft):
    """Steps leave out rows that have ended; the rows of another call run."""
    generator = dflash.Generator(target, draft, max_length=64, batch_size=2)
    prompts = torch.stack([prompt(8), prompt(8, seed=1)])
    expected = [greedy(target, p, 12) for p in prompts]
    stop = int(expected[0][2])

    def fail(ids, scores):
        if ids.shape[1] > 8 + 6:
            raise RuntimeError("no more")
        return scores

    with pytest.raises(RuntimeError, match="no more"):
        generator.generate(prompts, max_new_tokens=12, stop_token_ids=[stop], logits_processor=[fail])
    out = generator.generate(prompts, max_new_tokens=12)
    assert [row.tolist() for row in out[:, 8:]] == [text.tolist() for text in expected]

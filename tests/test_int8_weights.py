"""Targets and drafters whose weights are held in 8 bits: whose text it is, and that nothing else changes."""

import copy
import dataclasses
import json

import pytest
import torch
from baseline import greedy, prompt
from families import make_draft, make_target

import dflash
from dflash.ops import Int8Weight, reference
from dflash.session import Session
from dflash.target import UnsupportedTargetError

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3 (windowed)": {},
    "qwen3_5": {},
    "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]},
}
NEAR = 0.1  # of logits: a float that rounds otherwise can move an activation of these models by a whole step
LONG = 300  # tokens of a prompt that runs in passes of more rows than a kernel of ours takes


def generator(target, draft=None, **options):
    return dflash.Generator(target, draft, max_length=400, **({"weights": "int8"} | options))


def answer(made, ids, new=32, **arguments):
    return made.generate(ids[None], max_new_tokens=new, **arguments)[0, len(ids) :]


@torch.no_grad()
def standing_for(target):
    """A copy of a target whose products have the operands that 8 bits stand for; its embedding stays."""
    wide = copy.deepcopy(target)
    head = wide.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.clone())  # not the embedding's any more
    for module in wide.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(Int8Weight.of(module.weight).wide())
            module.register_forward_pre_hook(round_input)
    return wide


def round_input(_module, inputs):
    integers, steps = reference.round_rows(inputs[0])
    return ((integers * steps[..., None]).flatten(-2)[..., : inputs[0].shape[-1]],)


@pytest.mark.parametrize("length", [20, LONG])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_the_target_with_rounded_operands(family, length):
    target = make_target(family, **FAMILIES[family])
    before, ids = copy.deepcopy(target.state_dict()), prompt(length)
    got = answer(generator(target, make_draft(target)), ids, 32)
    with torch.no_grad():
        logits = standing_for(target)(torch.cat([ids, got])[None]).logits[0, len(ids) - 1 : -1]
    assert (logits.amax(-1) - logits.gather(1, got[:, None])[:, 0]).max() < NEAR
    after = target.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("length", [20, LONG])
def test_it_is_not_the_text_of_the_target_as_it_is(length):
    target, ids = make_target("qwen2"), prompt(length)
    assert not torch.equal(answer(generator(target), ids), greedy(target, ids, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [20, LONG])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_one_token_at_a_time(family, length, dtype):
    target = make_target(family, dtype=dtype, **FAMILIES[family])
    drafting = generator(target, draft := make_draft(target), draft_weights="int8")
    alone = generator(target, block_size=drafting.block_size)
    for arguments in ({}, {"temperature": 1.0, "seed": 3}):
        ids = prompt(length)
        assert torch.equal(answer(drafting, ids, **arguments), answer(alone, ids, **arguments))
    assert draft.qkv_weight.dtype == dtype


@pytest.mark.parametrize("compile", [False, True])
def test_the_modules_of_the_target_are_never_run(compile, monkeypatch):
    """They have the weights as they are, which must decide no token and no log probability."""
    target = make_target("qwen3", num_hidden_layers=2)
    made = generator(target, make_draft(target), compile=compile, prefill_chunk=290)

    def run(*_arguments, **_options):
        raise AssertionError("a module was run")

    monkeypatch.setattr(type(made.engine.target), "_run_modules", run)
    answers = [answer(made, prompt(LONG), logprobs=2, prompt_logprobs=True), answer(made, prompt(20))]
    tree = [] if compile else [answer(made := generator(target, make_draft(target), tree=20), prompt(20), tree=20)]
    assert all(torch.equal(got, answers[1]) for got in tree)


@pytest.mark.parametrize("compile", [False, True])
def test_weights_that_change_in_place_are_held_again(compile):
    target = make_target("qwen3", num_hidden_layers=2)
    other = make_target("qwen3", num_hidden_layers=2, seed=5)
    made, ids = generator(target, make_draft(target), compile=compile), prompt(20)
    before = answer(made, ids)
    target.load_state_dict(other.state_dict())
    after = answer(made, ids)
    assert not torch.equal(after, before)
    assert torch.equal(after, answer(generator(other), ids))


def test_reset_reads_weights_that_changed_unnoticed():
    target = make_target("qwen3", num_hidden_layers=2)
    made, ids = generator(target), prompt(20)
    before = answer(made, ids)
    weight = target.model.layers[0].mlp.down_proj.weight
    weight.numpy(force=True)[1::2] *= -30
    made.reset()
    after = answer(made, ids)
    assert torch.equal(after, answer(generator(copy.deepcopy(target)), ids))
    assert not torch.equal(after, before)


def test_caches_of_an_earlier_call_are_reused():
    target = make_target("qwen3", num_hidden_layers=2)
    made, ids = generator(target, make_draft(target)), prompt(LONG)
    answer(made, ids[:-10])
    again = made.generate(ids[None], max_new_tokens=32, return_dict_in_generate=True)
    assert again.statistics.num_prefilled_tokens[0] < 20
    assert torch.equal(again.sequences[0, LONG:], answer(generator(target), ids))


@pytest.mark.parametrize("draft_weights", ["int8", None])
def test_a_drafter_in_8_bits_changes_no_text_and_stays_as_it_is(draft_weights):
    target = make_target("qwen3")
    draft, ids = make_draft(target), prompt(40)
    before = copy.deepcopy(draft.state_dict())
    made = generator(target, draft, weights=None, draft_weights=draft_weights)
    assert torch.equal(answer(made, ids), greedy(target, ids, 32))
    held = {type(layer.q) for layer in made.draft._stack.layers}
    assert held == {Int8Weight} if draft_weights else Int8Weight not in held
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in before.items())
    assert all(isinstance(layer.q, torch.Tensor) for layer in draft._stack.layers)


def test_a_drafter_that_changes_in_place_is_held_again():
    target = make_target("qwen3", num_hidden_layers=2)
    made = generator(target, draft := make_draft(target), draft_weights="int8")
    answer(made, prompt(20))
    before = made.draft._stack.layers[0].o.values.clone()
    with torch.no_grad():
        draft.layers[0].self_attn.o_proj.weight.mul_(-1)
    answer(made, prompt(20))
    assert torch.equal(made.draft._stack.layers[0].o.values, -before)


@pytest.mark.parametrize(("family", "options", "reason"), [
    ("qwen3", {"fused": False}, "fused=False was asked for"),
    ("gemma3", {}, "is not one of the models that are recognized"),
    ("qwen3_moe", {}, "it has experts"),
])  # fmt: skip
def test_targets_that_cannot_be_held_in_8_bits_are_refused(family, options, reason):
    target = make_target(family)
    with pytest.raises(
        UnsupportedTargetError, match=f'weights="int8" needs a target on CPU .*{reason}.*Leave weights out'
    ):
        generator(target, **options)


def test_a_drafter_in_float16_is_refused():
    target = make_target("qwen3")
    with pytest.raises(
        ValueError, match=r"draft_weights='int8' needs a drafter on CPU in float32 or bfloat16, got one on"
    ):
        generator(target, make_draft(target).half(), draft_weights="int8")


def test_weights_that_are_not_finite_are_refused():
    target = make_target("qwen3")
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight[3, 4] = float("inf")
    with pytest.raises(UnsupportedTargetError, match=r'weights="int8" cannot be followed: .* infinite or NaN'):
        generator(target)


def test_unknown_values_are_refused():
    target = make_target("qwen3")
    for name in ("weights", "draft_weights"):
        with pytest.raises(ValueError, match=rf'{name} must be "int8" or None, got \'int4\''):
            generator(target, **{name: "int4"})
    with pytest.raises(ValueError, match=r"draft_weights='int8' needs a drafter, got none"):
        generator(target, draft_weights="int8")


def test_one_shot_calls_keep_the_weights_apart():
    target, ids = make_target("qwen2"), prompt(20)
    draft = make_draft(target)
    held = dflash.generate(target, draft, ids[None], max_new_tokens=32, weights="int8", draft_weights="int8")
    plain = dflash.generate(target, draft, ids[None], max_new_tokens=32)
    assert torch.equal(held[0, 20:], answer(generator(target), ids))
    assert torch.equal(plain[0, 20:], greedy(target, ids, 32))
    events = dflash.stream(target, draft, ids[None], max_new_tokens=32, weights="int8")
    assert [token for event in events for token in event.ids[0]] == held[0, 20:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("streams", [False, True])
def test_a_receipt_states_the_weights_and_is_checked_with_them(streams, dtype, tmp_path):
    target, ids = make_target("qwen2", dtype=dtype), prompt(20)[None]
    draft = make_draft(target)
    recorder = dflash.Recorder(target, ids, max_new_tokens=32)
    if streams:
        for event in dflash.stream(target, draft, ids, weights="int8", **recorder.arguments):
            recorder.add(event)
        receipt = recorder.receipt()
    else:
        options = {"return_dict_in_generate": True, "weights": "int8"}
        receipt = recorder.receipt(dflash.generate(target, draft, ids, **options, **recorder.arguments))
    receipt.write(tmp_path / "receipt.json")
    receipt = dflash.Receipt.read(tmp_path / "receipt.json")
    assert receipt.weights == "int8"
    assert dflash.verify(receipt, target).follows
    assert not dflash.verify(dataclasses.replace(receipt, weights=None), target).is_exact
    with pytest.raises(ValueError, match=r'weights must be "int8" or null, got'):
        dflash.Receipt.parse(json.loads(receipt.to_json()) | {"weights": "int4"})


def test_a_session_writes_the_text_of_the_quantized_target():
    target, ids = make_target("qwen2"), prompt(20)
    made = generator(target, make_draft(target), prefill_chunk=16)
    session = Session(made)
    row = session.admit(session.resolve(ids[None], max_new_tokens=32))
    written = []
    while session.is_busy:
        written += [token for event in session.step() if event.row == row for token in event.event.ids[0]]
    assert written == answer(generator(target), ids).tolist()

"""Targets and drafters whose weights are held in 8 bits: whose text it is, and that nothing else changes."""

import copy
import dataclasses
import json
import weakref

import pytest
import torch
from baseline import greedy, prompt
from draft_variants import random_drafter
from families import draft_config, make_draft, make_target

import dflash
from dflash.drafter import check_draft_weights, quantized_draft
from dflash.ops import Int8Weight, reference
from dflash.receipts import Verifier
from dflash.session import Session
from dflash.target import UnsupportedTargetError, check_int8, structural_twin
from dflash.target.fused import recognize

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


def test_reset_reads_the_drafters_weights_too():
    target = make_target("qwen3", num_hidden_layers=2)
    config = draft_config(target)
    config["dflash_config"]["attention_value_scale"] = 0.5
    made = generator(target, draft := random_drafter(config), draft_weights="int8")
    answer(made, prompt(20))
    before, attention = made.draft._stack.layers[0], draft.layers[0].self_attn
    for weight in (attention.o_proj.weight, draft.layers[0].mlp.up_proj.weight):
        weight.numpy(force=True)[1::2] *= -1
    made.reset()
    answer(made, prompt(20))
    after = made.draft._stack.layers[0]
    for old, new in ((before.o, after.o), (before.up, after.up)):
        assert torch.equal(new.values[1::2], -old.values[1::2])
        assert torch.equal(new.values[::2], old.values[::2])


def test_reset_forgets_values_in_its_turn(monkeypatch):
    made = generator(target := make_target("qwen3", num_hidden_layers=2), make_draft(target))
    turns = []
    monkeypatch.setattr(made.engine, "forget_values", lambda: turns.append(made.turns.is_taken_here))
    made.reset()
    assert turns == [True]


def test_a_rewired_drafter_has_its_own_wiring_and_copies():
    target = make_target("qwen3", num_hidden_layers=2)
    draft = make_draft(target)
    quantized = quantized_draft("int8", draft)
    config = dataclasses.replace(draft.config, causal=(True,) * 3, window=(7,) * 3)
    rewired = quantized.rewired(config)
    assert [(layer.causal, layer.window) for layer in rewired._stack.layers] == [(True, 7)] * 3
    assert [(layer.causal, layer.window) for layer in quantized._stack.layers] != [(True, 7)] * 3
    before = rewired._stack.layers[0].o.values.clone()
    with torch.no_grad():
        draft.layers[0].self_attn.o_proj.weight.mul_(-1)
    for one in (quantized, rewired):
        one.refresh()
        assert torch.equal(one._stack.layers[0].o.values, -before)


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
        UnsupportedTargetError, match=f"weights='int8' needs a target on CPU .*{reason}.*Leave weights out"
    ):
        generator(target, **options)


class Linear8bitLt(torch.nn.Linear):
    """What bitsandbytes puts in a linear layer's place, as far as it is looked at."""


Linear8bitLt.__module__ = "bitsandbytes.nn.modules"


@pytest.mark.parametrize("says", ["a layer", "the config"])
def test_a_target_that_is_quantized_already_is_refused(says):
    target = make_target("qwen3")
    if says == "a layer":
        target.model.layers[2].mlp.up_proj.__class__ = Linear8bitLt
    else:
        target.config.quantization_config, target.model.layers[2].mlp.act_fn = {"bits": 8}, torch.nn.GELU()
    with pytest.raises(
        UnsupportedTargetError, match=r"got Qwen3ForCausalLM: its weights are quantized already\. Leave"
    ):
        generator(target)


def test_targets_in_float16_and_on_other_devices_are_refused():
    target = make_target("qwen3", dtype=torch.float16)
    with pytest.raises(UnsupportedTargetError, match=r"its dtype is torch.float16, the CPU kernels take float32 and"):
        generator(target)
    target = make_target("qwen3").to("meta")
    with pytest.raises(UnsupportedTargetError, match=r"it is on meta\. Leave weights out"):
        check_int8(target)


def test_a_drafter_in_float16_or_on_another_device_is_refused():
    draft = make_draft(make_target("qwen3"))
    wanted = "draft_weights='int8' needs a drafter on CPU in float32 or bfloat16, got one on"
    with pytest.raises(ValueError, match=f"{wanted} cpu in torch.float16: leave it out"):
        check_draft_weights("int8", draft.half())
    with pytest.raises(ValueError, match=f"{wanted} meta in torch.float16: leave it out"):
        check_draft_weights("int8", draft.to("meta"))


@torch.no_grad()
def spoil(linear, value=float("nan")):
    """Make a weight infinite or NaN, where no sample of its values looks."""
    linear.weight[3, 4] = value


@pytest.mark.parametrize(("value", "name"), [(float("inf"), "infinity"), (float("nan"), "NaN")])
def test_weights_that_are_not_finite_are_refused_by_name(value, name):
    target, ids = make_target("qwen3", num_hidden_layers=2), prompt(20)
    draft = make_draft(target)
    says = f"needs finite weights, got {name} in"
    made = generator(target, draft, draft_weights="int8")
    spoil(draft.layers[0].mlp.up_proj, value)
    for attempt in (lambda: generator(target, draft, draft_weights="int8"), lambda: answer(made, ids)):
        with pytest.raises(ValueError, match=f"draft_weights='int8' {says} layers.0.mlp.up_proj: leave it out"):
            attempt()
    spoil(target.model.layers[1].mlp.up_proj, value)
    for attempt in (lambda: generator(target), lambda: answer(made, ids)):
        with pytest.raises(UnsupportedTargetError, match=f"weights='int8' {says} model.layers.1.mlp.up_proj: leave"):
            attempt()


def test_a_target_that_was_not_finite_for_a_while_writes_its_text_again():
    target, ids = make_target("qwen3", num_hidden_layers=2), prompt(20)
    made = generator(target)
    before, weight = answer(made, ids), target.model.layers[1].mlp.up_proj.weight.clone()
    spoil(target.model.layers[1].mlp.up_proj)
    for _ in range(2):
        with pytest.raises(UnsupportedTargetError, match=r"got NaN in model\.layers\.1\.mlp\.up_proj"):
            answer(made, ids)
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight.copy_(weight)
    assert torch.equal(answer(made, ids), before)


def test_a_head_that_is_not_finite_leaves_the_layers_as_they_are():
    target = make_target("qwen3", num_hidden_layers=2)
    fused = recognize(structural_twin(target), ())
    spoil(target.lm_head)
    with pytest.raises(UnsupportedTargetError, match="got NaN in lm_head: leave it out"):
        fused.store_as_int8()
    assert not fused.is_int8
    assert all(isinstance(layer.q, torch.Tensor) for layer in fused.stack.layers)


def test_earlier_copies_are_freed_before_new_ones_are_made(monkeypatch):
    fused = recognize(structural_twin(make_target("qwen3", num_hidden_layers=2)), ())
    fused.store_as_int8()
    old = [weakref.ref(layer.gate.values) for layer in fused.stack.layers]
    alive = []
    quantize = Int8Weight.of
    monkeypatch.setattr(Int8Weight, "of", lambda weight: alive.extend(ref() for ref in old) or quantize(weight))
    fused.store_as_int8()
    assert alive
    assert all(value is None for value in alive)


def unfit(target):
    """Pairs and options that are refused, whatever the weights."""
    draft = make_draft(target)
    yield draft, {"block_size": 17}
    yield draft, {"block_size": 1}
    yield draft.to(torch.bfloat16), {}
    yield make_draft(target, "DFlash2"), {"tree": 16}
    yield make_draft(target), {"fused": False}
    yield make_draft(target), {"prefill_chunk": 0}


def test_what_is_refused_quantizes_nothing(monkeypatch):
    target, quantized = make_target("qwen3", num_hidden_layers=2), []
    monkeypatch.setattr(Int8Weight, "of", quantized.append)
    for draft, options in unfit(target):
        with pytest.raises(ValueError, match=r"block_size|dtype|tree|fused|prefill_chunk"):
            generator(target, draft, draft_weights="int8", **options)
    assert not quantized


def test_unknown_values_are_refused():
    target = make_target("qwen3")
    for name in ("weights", "draft_weights"):
        with pytest.raises(ValueError, match=rf'{name} must be "int8" or None, got \'int4\''):
            generator(target, **{name: "int4"})
    with pytest.raises(
        ValueError, match=r"draft_weights='int8' needs a drafter, got draft=None or block_size=1: leave it out"
    ):
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


def kept():
    return dflash.api._cached.generator


def test_a_kept_generator_is_one_for_its_weights():
    target, ids = make_target("qwen3", num_hidden_layers=2), prompt(20)[None]
    draft, made = make_draft(target), []
    for options in ({}, {"draft_weights": "int8"}, {"weights": "int8"}, {"weights": "int8", "draft_weights": "int8"}):
        dflash.generate(target, draft, ids, max_new_tokens=2, **options)
        made.append(kept())
        stored = isinstance(kept().draft._stack.layers[0].q, Int8Weight)
        assert (kept().weights, stored) == (options.get("weights"), "draft_weights" in options)
        dflash.generate(target, draft, ids, max_new_tokens=2, **options)
        assert kept() is made[-1]
    assert len(set(map(id, made))) == 4


def test_what_is_refused_keeps_the_generator_of_the_last_pair():
    target, experts = make_target("qwen3", num_hidden_layers=2), make_target("qwen3_moe")
    draft, ids = make_draft(target), prompt(20)[None]
    dflash.generate(target, draft, ids, max_new_tokens=2)
    before = kept()
    for model, drafter, options, message in (
        (target, draft, {"weights": "int4"}, "weights must be"),
        (target, draft, {"draft_weights": "int4"}, "draft_weights must be"),
        (target, None, {"draft_weights": "int8"}, "needs a drafter, got draft=None"),
        (target, draft, {"draft_weights": "int8", "block_size": 1}, "needs a drafter, got draft=None or block_size=1"),
        (experts, None, {"weights": "int8"}, "it has experts"),
        (make_target("gemma3"), None, {"weights": "int8"}, "not one of the models that are recognized"),
    ):
        with pytest.raises(ValueError, match=message):
            dflash.generate(model, drafter, ids, max_new_tokens=2, **options)
        assert kept() is before


def test_release_reads_weights_that_changed_unnoticed():
    target, ids = make_target("qwen3", num_hidden_layers=2), prompt(20)
    call = {"max_new_tokens": 32, "weights": "int8"}
    before = dflash.generate(target, None, ids[None], **call)[0, 20:]
    target.model.layers[0].mlp.down_proj.weight.numpy(force=True)[1::2] *= -30
    dflash.release()
    after = dflash.generate(target, None, ids[None], **call)[0, 20:]
    assert torch.equal(after, answer(generator(copy.deepcopy(target)), ids))
    assert not torch.equal(after, before)


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
    content = json.loads(receipt.to_json())
    with pytest.raises(ValueError, match=r'weights must be "int8" or null, got'):
        dflash.Receipt.parse(content | {"weights": "int4"})
    del content["weights"]
    with pytest.raises(ValueError, match="weights"):
        dflash.Receipt.parse(content)


def test_a_receipt_of_int8_weights_needs_a_target_that_can_store_them():
    target, ids = make_target("qwen3_moe"), prompt(20)[None]
    recorder = dflash.Recorder(target, ids, max_new_tokens=4)
    output = dflash.generate(target, None, ids, return_dict_in_generate=True, **recorder.arguments)
    receipt = dataclasses.replace(recorder.receipt(output), weights="int8")
    says = "states int8 weights, and this target's cannot be stored so: it has experts. Load .* with, on the CPU"
    with pytest.raises(ValueError, match=says):
        dflash.verify(receipt, target)


def verified(passes):
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value


def test_a_verifier_takes_the_twin_of_a_generator(monkeypatch):
    target, ids = make_target("qwen2", num_hidden_layers=2), prompt(20)[None]
    made = generator(target, make_draft(target))
    recorder = dflash.Recorder(target, ids, max_new_tokens=8)
    receipt = recorder.receipt(made.generate(ids, return_dict_in_generate=True, **recorder.arguments))
    monkeypatch.setattr(Int8Weight, "of", lambda _weight: pytest.fail("a weight was quantized again"))
    assert verified(Verifier(target, twin=made.engine.target).passes(receipt)).is_exact
    monkeypatch.undo()
    assert torch.equal(answer(made, ids[0], 8), answer(generator(target), ids[0], 8))


def test_a_session_writes_the_text_of_the_quantized_target():
    target, ids = make_target("qwen2"), prompt(20)
    made = generator(target, make_draft(target), prefill_chunk=16)
    session = Session(made)
    row = session.admit(session.resolve(ids[None], max_new_tokens=32))
    written = []
    while session.is_busy:
        written += [token for event in session.step() if event.row == row for token in event.event.ids[0]]
    assert written == answer(generator(target), ids).tolist()

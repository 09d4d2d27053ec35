"""Targets and drafters whose weights are stored as int8: whose text it is, and that nothing else changes."""

import copy
import dataclasses
import itertools
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from baseline import check_answers, greedy, left_padded, prompt
from families import Cheat, hinted, make_draft, make_target
from gguf import GGMLQuantizationType
from gguf_files import write_llama
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dflash
from dflash.drafter import check_draft_weights
from dflash.ops import PackedWeight, reference
from dflash.targets import Target, UnsupportedTargetError, check_int8, store_int8_, weight_bytes_per_token

FAMILIES = {
    "llama": {}, "qwen2": {}, "qwen3": {"tie_word_embeddings": True}, "qwen3 (windowed)": {}, "qwen3_5": {},
    "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]},
}  # fmt: skip
# Those that run as transformers' modules: windows, scaled embeddings, softcaps, convolutions with a state
MODULES = {
    "gemma3": {"tie_word_embeddings": True}, "gemma2": {"sliding_window": 20, "final_logit_softcapping": 5.0},
    "lfm2": {},
}  # fmt: skip
EXPERTS = {"qwen3_moe": {}, "mixtral": {}, "gpt_oss": {}, "deepseek_v3": {}}
FAMILIES |= MODULES | EXPERTS
BLOCK = 16
LONG = 300  # tokens of a prompt that bfloat16 runs in passes of more rows than a kernel of ours takes


def generator(target, draft=None, **options):
    return dflash.Generator(target, draft, max_length=400, **({"weights": "int8"} | options))


def answer(made, ids, new=32, **arguments):
    return made.generate(ids[None], max_new_tokens=new, **arguments)[0, len(ids) :]


@torch.no_grad()
def standing_for(target):
    """A copy of a target whose products have the operands that 8 bits stand for; its embedding stays."""
    wide = copy.deepcopy(target)
    head = wide.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.clone())  # not the embedding's any more
    for module in wide.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(PackedWeight.of(module.weight, "w8a8").dense())
            module.register_forward_pre_hook(round_input)
        elif hasattr(module, "gate_up_proj"):
            module.forward = experts_standing_for(module)
    return wide


def experts_standing_for(module):
    """The forward of experts in 8 bits, by the op's twin."""
    gate_up, down, form = module.gate_up_proj, module.down_proj, ("silu", 0.0, 0.0)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    if module.is_transposed:  # gpt-oss: gate and up alternate
        gate_up, down, form = gate_up.mT, down.mT.contiguous(), ("clamped_silu", module.alpha, module.limit)
        gate_up = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1)
        biases = torch.cat([biases[0][:, ::2], biases[0][:, 1::2]], 1), biases[1]
    gate_up, down = (PackedWeight.of(weight, "w8a8") for weight in (gate_up, down))

    def forward(x, ids, scores):
        weights, scales = (gate_up.packed, down.packed), (gate_up.scales, down.scales)
        return reference.experts(x, ids, scores, *weights, *biases, *form, False, *scales, "w8a8", "w8a8")

    return forward


def round_input(_module, inputs):
    integers, scales = reference.round_rows(inputs[0], 64)
    return ((integers * scales[..., None]).flatten(-2)[..., : inputs[0].shape[-1]],)


@torch.no_grad()
def logits_of(target, text, length):
    """The logits of a text whose prompt, of ``length`` tokens, is run in one pass, and its answer in blocks."""
    cache, at, found = target.new_cache(1, 400, BLOCK), torch.zeros(1, dtype=torch.int64), []
    for start, stop in itertools.pairwise([0, *range(length, len(text) + 1, BLOCK)]):
        found.append(target.forward(text[None, start:stop], at + start, cache, keep=at + stop - start)[0][0])
    return torch.cat(found)


def errors(logits, expected):
    """The relative error of each row's logits. An activation that rounds otherwise reaches all rows after it."""
    return (logits - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.mark.parametrize("length", [20, LONG])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_follows_from_the_logits_of_the_target_with_rounded_operands(family, length):
    near, far, closest = 0.0, 0.0, 1.0
    for seed in range(3):
        target, ids = make_target(family, seed=seed, **FAMILIES[family]), prompt(length)
        before = copy.deepcopy(target.state_dict())
        got = answer(generator(target, make_draft(target)), ids, 32)
        text = torch.cat([ids, got])
        logits = logits_of(Target(target, weights="int8"), text, length)
        with torch.no_grad():
            expected, plain = (model(text[None]).logits[0] for model in (standing_for(target), target))
        found = errors(logits, expected)
        near, far = near + float(found.median()), far + float(errors(plain, expected).median())
        closest = min(closest, float(found.min()))
        last = logits[length - 1 : -1]
        assert (last.amax(-1) - last.gather(1, got[:, None])[:, 0]).max() < 1e-3
        after = target.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert closest < 1e-5
    assert far > 2.5 * near


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [20, LONG])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_one_token_at_a_time(family, length, dtype):
    target, ids = make_target(family, dtype=dtype, **FAMILIES[family]), prompt(length)
    stored = {"max_length": 400, "weights": "int8", "draft_weights": "int8"}
    drafting = Cheat(target, make_draft(target), **stored)
    alone = generator(target, block_size=drafting.block_size)
    for arguments in ({}, {"temperature": 1.0, "seed": 3}):
        expected = answer(alone, ids, **arguments)
        drafting.script = torch.cat([ids, expected, ids.new_zeros(BLOCK)])[None]
        for drafting.spoil, steps in ((0, 2), (5, 7)):
            call = {"max_new_tokens": 32, "return_dict_in_generate": True, **arguments}
            output = drafting.generate(ids[None], **call)
            assert torch.equal(output.sequences[0, length:], expected)
            assert len(output.statistics.acceptance_lengths[0]) in (steps, steps + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gpt_oss", *MODULES])
def test_rows_of_a_ragged_batch_write_what_they_write_alone(family, dtype):
    target = make_target(family, dtype=dtype, **FAMILIES[family])
    prompts = [prompt(length) for length in (4, LONG, 21)]
    ids, mask = left_padded(prompts)
    made = generator(target, make_draft(target), batch_size=3, draft_weights="int8")
    output = made.generate(ids, attention_mask=mask, max_new_tokens=24)
    alone = generator(target, block_size=made.block_size)
    check_answers(output, ids.shape[1], [answer(alone, row, 24) for row in prompts])


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "qwen3_moe"])
def test_a_tree_changes_no_text_of_modules_in_8_bits(family):
    target, ids = make_target(family, **FAMILIES[family]), prompt(40)
    expected = answer(generator(target, block_size=BLOCK), ids)
    options = {"max_length": 400, "weights": "int8", "tree": 12}
    drafting = hinted(target, make_draft(target), [torch.cat([ids, expected])], **options)
    output = drafting.generate(ids[None], max_new_tokens=32, tree=12, return_dict_in_generate=True)
    assert torch.equal(output.sequences[0, 40:], expected)
    assert 3 < output.statistics.acceptance_length < 7


def test_a_compiled_step_of_modules_follows_weights_that_change():
    target, ids = make_target("gemma2"), prompt(20)
    made = generator(target, make_draft(target), compile=True)
    alone = generator(target, block_size=made.block_size, compile=True)
    answers = []
    for seed in (0, 5):
        target.load_state_dict(make_target("gemma2", seed=seed).state_dict())
        answers.append(answer(made, ids))
        assert torch.equal(answers[-1], answer(alone, ids))
    assert not torch.equal(*answers)


def test_a_target_runs_as_modules_in_8_bits_if_that_is_asked_for():
    target, ids = make_target("qwen3"), prompt(20)
    made = generator(target, make_draft(target), fused=False)
    assert made.fused_reason == "fused=False was asked for"
    assert torch.equal(answer(made, ids), answer(generator(target, fused=False, block_size=BLOCK), ids))


@pytest.mark.parametrize("compile", [False, True])
def test_the_modules_of_a_fused_target_are_never_run(compile):
    """They round otherwise between products, which must decide no token and no log probability."""
    target = make_target("qwen3", num_hidden_layers=2)
    made = generator(target, make_draft(target), compile=compile, prefill_chunk=290)
    for layer in made.engine.target.model.get_decoder().layers:
        layer.forward = None
    answers = [answer(made, prompt(LONG), logprobs=2, prompt_logprobs=True), answer(made, prompt(20))]
    tree = [] if compile else [answer(made := generator(target, make_draft(target), tree=20), prompt(20), tree=20)]
    assert all(torch.equal(got, answers[1]) for got in tree)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("change", ["in place", "unnoticed, then reset", "inference tensors"])
def test_weights_that_change_are_quantized_again(change, family):
    with torch.inference_mode(change == "inference tensors"):
        target = make_target(family)
    made, ids = generator(target, draft := make_draft(target), draft_weights="int8"), prompt(20)
    before, mlp = answer(made, ids), target.model.layers[0].mlp
    weight = mlp.experts.gate_up_proj[0] if family == "gpt_oss" else mlp.down_proj.weight
    if change == "in place":
        target.load_state_dict(make_target(family, seed=5).state_dict())
    elif change == "inference tensors":
        with torch.inference_mode():
            weight[1::2] *= -30
    else:
        weight.numpy(force=True)[1::2] *= -30
        made.reset()
    after = answer(made, ids)
    assert not torch.equal(after, before)
    fresh = target if change == "inference tensors" else copy.deepcopy(target)
    assert torch.equal(after, answer(generator(fresh, draft), ids))


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
    assert torch.equal(drafted(made.draft), drafted(draft)) == (draft_weights is None)
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in before.items())


@torch.no_grad()
def drafted(draft):
    """Return the hidden states of a drafter's pass over a given context and block."""
    g, config = torch.Generator().manual_seed(1), draft.config
    context = torch.randn(1, 16, config.hidden_size, generator=g)
    block, count = torch.randn(1, BLOCK, config.hidden_size, generator=g), torch.tensor([16])
    return draft(context, count, block, count, draft.new_cache(1, 40))


@pytest.mark.parametrize("change", ["in place", "unnoticed, then reset", "another parameter"])
def test_changed_weights_of_a_drafter_are_quantized_again(change):
    target = make_target("qwen3", num_hidden_layers=2)
    made = generator(target, draft := make_draft(target), draft_weights="int8")
    answer(made, prompt(20))
    before, linear = drafted(made.draft), draft.layers[0].mlp.down_proj
    with torch.no_grad():
        if change == "in place":
            linear.weight.mul_(-1)
        elif change == "another parameter":
            linear.weight = nn.Parameter(-linear.weight, requires_grad=False)
        else:
            linear.weight.numpy(force=True)[:] *= -1
            made.reset()
    answer(made, prompt(20))
    assert torch.equal(drafted(made.draft), drafted(generator(target, draft, draft_weights="int8").draft))
    assert not torch.equal(drafted(made.draft), before)


@pytest.mark.parametrize(("family", "reason"), [
    ("glm5_next", r"model\..*\.mlp\.experts\.gate_up_proj is a weight of Glm5NextTextExperts"),
    ("gpt2", r"transformer\.h\..\.mlp\.c_.*\.weight is a weight of Conv1D"),
])  # fmt: skip
def test_weights_that_are_not_of_linear_layers_are_refused_by_name(family, reason):
    says = rf"weights='int8' needs a target on CPU .*: {reason}\. Leave weights out"
    with pytest.raises(UnsupportedTargetError, match=says):
        generator(make_target(family))


class Linear8bitLt(nn.Linear):
    """What bitsandbytes puts in a linear layer's place, as far as it is looked at."""


Linear8bitLt.__module__ = "bitsandbytes.nn.modules"


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(("kind", "says"), [
    (Scaled, r"layers\.1\.mlp\.up_proj\.weight is a weight of Scaled\. Leave"),
    (Linear8bitLt, r"got Qwen3For.*: its weights are quantized already\. Leave"),
    (None, r"got Qwen3For.*: its weights are quantized already\. Leave"),
], ids=["a subclass", "a layer", "codes"])  # fmt: skip
def test_linear_layers_of_others_and_targets_that_are_quantized_already_are_refused(kind, says):
    target = make_target("gemma2" if kind is Scaled else "qwen3")
    if kind is not None:
        target.model.layers[1].mlp.up_proj.__class__ = kind
    else:
        target.model.layers[2].mlp.act_fn.register_buffer("qweight", torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(UnsupportedTargetError, match=says):
        generator(target)


def test_weights_that_transformers_has_unpacked_are_stored_whatever_the_config_says(tmp_path):
    write_llama(tmp_path / "x.gguf", GGMLQuantizationType.Q8_0)
    unpacked = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf")
    assert unpacked.config.quantization_config is not None
    plain = LlamaForCausalLM(LlamaConfig.from_dict(unpacked.config.to_dict() | {"quantization_config": None}))
    plain.load_state_dict(unpacked.state_dict())
    ours, theirs = (dflash.generate(model, None, prompt(20)[None], weights="int8") for model in (unpacked, plain))
    assert torch.equal(ours, theirs)


def test_models_in_float16_and_on_other_devices_are_refused():
    half, meta = make_target("qwen3", dtype=torch.float16), make_target("qwen3").to("meta")
    with pytest.raises(UnsupportedTargetError, match=r"its dtype is torch.float16, the CPU kernels take float32 and"):
        generator(half)
    with pytest.raises(UnsupportedTargetError, match=r"it is on meta\. Leave weights out"):
        check_int8(meta)
    for place in ("cpu", "meta"):
        says = (
            f"needs a drafter on CPU in float32 or bfloat16, or on CUDA .*, got one on {place} in torch.float16: leave"
        )
        with pytest.raises(ValueError, match=says):
            check_draft_weights("int8", make_draft(half).to(place))


@pytest.mark.parametrize(("dtype", "fits"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_drafters_on_gpus_are_stored_in_8_bits_if_they_are_in_16(dtype, fits):
    draft = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    with nullcontext() if fits else pytest.raises(ValueError, match=r"got one on cuda in torch\.float32: leave it out"):
        check_draft_weights("int8", draft)


@torch.no_grad()
def spoil(linear, value):
    """Make a weight infinite or NaN, where no sample of its values looks."""
    linear.weight[3, 4] = value


def test_experts_that_are_not_finite_are_refused_by_name():
    target = make_target("gpt_oss")
    with torch.no_grad():
        target.model.layers[1].mlp.experts.down_proj[2, 3, 4] = torch.nan
    with pytest.raises(UnsupportedTargetError, match=r"got NaN in model\.layers\.1\.mlp\.experts\.down_proj: leave"):
        generator(target)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize(("value", "name"), [(float("inf"), "infinity"), (float("nan"), "NaN")])
def test_weights_that_are_not_finite_are_refused_by_name(family, value, name):
    target, ids = make_target(family), prompt(20)
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


def test_one_shot_calls_keep_the_weights_apart():
    target, ids = make_target("qwen2"), prompt(20)
    draft = make_draft(target)
    stored = dflash.generate(target, draft, ids[None], max_new_tokens=32, weights="int8", draft_weights="int8")
    plain = dflash.generate(target, draft, ids[None], max_new_tokens=32)
    assert torch.equal(stored[0, 20:], answer(generator(target), ids))
    assert torch.equal(plain[0, 20:], greedy(target, ids, 32))
    events = dflash.stream(target, draft, ids[None], max_new_tokens=32, weights="int8")
    assert [token for event in events for token in event.ids[0]] == stored[0, 20:].tolist()


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


def test_targets_of_one_model_share_their_copies(target):
    first, second = Target(target, weights="int8"), Target(target, weights="int8")
    assert first.head.packed.packed is second.head.packed.packed
    with torch.no_grad():
        target.lm_head.weight.mul_(2)
    for each in (first, second):
        each.new_cache(1, 32, 4)
    assert first.head.packed.packed is second.head.packed.packed
    torch.testing.assert_close(first.head.packed.dense(), target.lm_head.weight, rtol=0.02, atol=0.02)
    with torch.no_grad():
        target.lm_head.weight.div_(2)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_copies_in_the_place_of_the_weights_write_the_same_text(family):
    target, ids = make_target(family, tie_word_embeddings=True), prompt(LONG)
    draft = make_draft(target)
    expected, dense = answer(generator(target, draft), ids), weight_bytes_per_token(target)
    store_int8_(target)
    assert not any(type(module) is nn.Linear or hasattr(module, "gate_up_proj") for module in target.modules())
    assert torch.equal(answer(generator(target, draft), ids), expected)
    made = Target(target, weights="int8")
    assert made.head.packed.packed is target.get_output_embeddings().blocks
    read = weight_bytes_per_token(target)
    assert dense.keys() == {"float32"}
    assert dense["float32"] / 4 < read["int8"] + read.get("float32", 0) < dense["float32"] / 3


def test_a_token_reads_a_dense_head_that_is_tied_and_the_experts_that_it_chooses():
    target = make_target("qwen3_moe", tie_word_embeddings=True)
    layers = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 8 * 64 + 2 * 3 * 64 * 32)  # attention, routers, 2 of 8 experts
    assert weight_bytes_per_token(target) == {"float32": 4 * (97 * 64 + layers)}


def test_a_receipt_of_int8_weights_needs_a_target_that_can_store_them():
    target, ids = make_target("gpt2"), prompt(20)[None]
    recorder = dflash.Recorder(target, ids, max_new_tokens=4)
    output = dflash.generate(target, None, ids, return_dict_in_generate=True, **recorder.arguments)
    receipt = dataclasses.replace(recorder.receipt(output), weights="int8")
    says = "int8 weights, and this target's cannot be stored so: transformer.* of Conv1D. Load .* with, on the CPU"
    with pytest.raises(ValueError, match=says):
        dflash.verify(receipt, target)

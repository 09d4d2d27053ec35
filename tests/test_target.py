"""The target: logits and taps equal the model's, the model stays untouched, and what cannot run is refused by name."""

import functools
import threading
import types

import pytest
import torch
from baseline import greedy
from families import make_draft, make_target
from test_losslessness import SUPPORTED
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM, T5Config

import dflash
from dflash.targets import Target, UnsupportedTargetError, structural_copy

FUSED = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma3"}


def ids(length: int = 60) -> torch.Tensor:
    return torch.arange(length)[None] * 7 % 90 + 1


@torch.no_grad()
@pytest.mark.parametrize("family", SUPPORTED)
def test_logits_and_taps_equal_the_model_in_two_chunks(family):
    model = make_target(family)
    plain = model(ids(), output_hidden_states=True)
    target = Target(model, (0, 2, 3))
    # transformers runs recurrences over a prompt in chunks, in another order of sums than ours.
    tolerance = 5e-4 if target.is_recurrent else 2e-4
    cache, zero = target.new_cache(1, 70, 16), torch.zeros(1, dtype=torch.int64)
    first, taps_first = target.forward(ids()[:, :41], zero, cache, keep=zero + 41)
    second, taps_second = target.forward(ids()[:, 41:], zero + 41, cache, keep=zero + 19)

    torch.testing.assert_close(torch.cat([first, second], 1), plain.logits, rtol=0, atol=tolerance)
    for index, layer in enumerate((0, 2, 3)):
        tap = torch.cat([taps_first[index], taps_second[index]], 1)
        state = plain.hidden_states[layer + 1]
        state = state.flatten(2).unflatten(-1, (-1, tap.shape[-1])).mean(2)  # of the streams of hyper-connections
        torch.testing.assert_close(tap, state, rtol=0, atol=tolerance)


def test_the_users_model_is_not_changed():
    model = make_target("mistral (windowed)").train()
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    config, draft = model.config.to_dict(), make_draft(model)
    before = [tensor.clone() for module in (model, draft) for tensor in module.state_dict().values()]
    dflash.generate(model, draft, ids(9), max_new_tokens=8)
    with pytest.raises(ValueError, match="temperature"):
        dflash.generate(model, draft, ids(9), max_new_tokens=8, temperature=-1.0)
    assert all(module.training for module in model.modules())
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks for module in model.modules())
    after = [tensor for module in (model, draft) for tensor in module.state_dict().values()]
    assert all(map(torch.equal, after, before))


def test_the_copy_shares_every_weight():
    model = make_target("llama")
    copied = structural_copy(model)
    ours, theirs = dict(copied.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)
    assert all(a is not b for a, b in zip(copied.modules(), model.modules(), strict=True))


def test_a_compiled_model_and_a_compiled_forward_are_unwrapped():
    model = make_target("qwen3")
    draft = make_draft(model)
    expected = dflash.generate(model, draft, ids(5), max_new_tokens=6)
    assert torch.equal(dflash.generate(torch.compile(model), draft, ids(5), max_new_tokens=6), expected)
    model.forward = torch.compile(model.forward)
    assert torch.equal(dflash.generate(model, draft, ids(5), max_new_tokens=6), expected)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_data_is_refused(kind):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
    model = make_target("llama", rope_parameters=rope | factors)
    with pytest.raises(ValueError, match=f"RoPE is '{kind}'.*depend"):
        dflash.generate(model, None, ids(4), max_new_tokens=4)


def test_models_that_are_not_causal_language_models_are_refused():
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder"):
        dflash.generate(AutoModelForSeq2SeqLM.from_config(config), None, ids(4), max_new_tokens=4)
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"PreTrainedModel is needed, got Linear$"):
        dflash.generate(linear, None, ids(4), max_new_tokens=4)
    linear.get_base_model = make_target  # as PeftModel has it
    with pytest.raises(ValueError, match=r"is needed, got Linear: pass model\.get_base_model\(\), which has the ada"):
        dflash.generate(linear, None, ids(4), max_new_tokens=4)
    with pytest.raises(ValueError, match="no language-model head"):
        dflash.generate(make_target("qwen3").model, None, ids(4), max_new_tokens=4)


def test_weights_that_the_kernels_cannot_read_are_refused():
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(make_target("qwen3").config)
    for model, reason in ((empty, "meta device"), (make_target("qwen3").half(), "float16, .* dtype=torch.float32")):
        with pytest.raises(ValueError, match=reason):
            dflash.generate(model, None, ids(4), max_new_tokens=4)


def test_a_target_that_cannot_be_copied_is_refused():
    model = make_target("qwen3")
    model.lock = threading.Lock()
    with pytest.raises(UnsupportedTargetError, match="Qwen3ForCausalLM cannot be copied"):
        dflash.generate(model, None, ids(4), max_new_tokens=4)


class NoLogitsToKeep(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        kwargs.pop("logits_to_keep", None)
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


class DropsAncestors(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        kwargs.pop("block_ancestors", None)
        return super().forward(input_ids, **kwargs)


class FailsWithTrees(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        if "block_ancestors" in kwargs:
            raise TypeError("unknown argument")
        return super().forward(input_ids, **kwargs)


def llama_of(kind: type) -> LlamaForCausalLM:
    llama = make_target("llama")
    model = kind(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    return model


class TestTrialOfTrees:
    """A model with functions of its own is tried with a tree too, which only `tree=` needs."""

    @pytest.mark.parametrize("kind", [DropsAncestors, FailsWithTrees])
    def test_a_model_that_goes_wrong_with_trees_takes_chains_only(self, kind):
        model = llama_of(kind)
        draft, expected = make_draft(model), greedy(model, ids(20)[0], 12).tolist()
        wrong = "failed in a trial run of a tree: TypeError: unknown argument"
        if kind is not FailsWithTrees:
            wrong = r"gave other logits in a trial run of a tree \(relative difference .*\)"
        message = rf"takes chains only: pass tree=None \({kind.__name__} {wrong}\)"
        for tree in (16, None, "auto", None):  # what a trial has found is remembered
            if tree is None:
                assert dflash.generate(model, draft, ids(20), max_new_tokens=12)[0, 20:].tolist() == expected
                continue
            with pytest.raises(ValueError, match=f"tree={tree!r} needs a target that .* {message}"):
                dflash.generate(model, draft, ids(20), max_new_tokens=12, tree=tree)
            with pytest.raises(ValueError, match=message):
                dflash.Generator(model, draft, max_length=40, tree=tree)

    def test_a_model_that_passes_takes_trees(self):
        model = llama_of(NoLogitsToKeep)
        found = dflash.generate(model, make_draft(model), ids(20), max_new_tokens=12, tree=16)[0, 20:]
        assert found.tolist() == greedy(model, ids(20)[0], 12).tolist()


class CountsPasses(LlamaForCausalLM):
    passes = 0

    def forward(self, *arguments, **options):
        CountsPasses.passes += 1
        return super().forward(*arguments, **options)


class TestTrial:
    """Every target is tried on a few tokens before it is run, once per model."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("family", SUPPORTED)
    def test_every_supported_family_passes(self, family, dtype):
        target = Target(make_target(family, dtype=dtype))
        assert (target.tree_obstacle == "") == (family != "deepseek_v4")  # which pools rows of one path
        assert (not target.fused_reason) == (family.partition(" ")[0] in FUSED)

    def test_a_model_is_tried_once_until_its_weights_change(self):
        model = llama_of(CountsPasses)

        def passes() -> int:
            before = CountsPasses.passes
            dflash.Generator(model, max_length=40)
            return CountsPasses.passes - before

        assert 0 < passes() <= 10
        assert passes() == 0
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        assert passes() > 0
        dflash.release()
        assert passes() > 0

    def test_more_layers_may_differ_more_in_16_bits(self):
        def louder(_model, _arguments, options, out):
            out.logits = out.logits * (1.075 if options["use_cache"] else 1.0)

        few, many = (make_target("llama", dtype=torch.bfloat16, num_hidden_layers=count) for count in (8, 32))
        for model in (few, many):
            model.register_forward_hook(louder, with_kwargs=True)
        Target(many)
        with pytest.raises(UnsupportedTargetError, match=r"relative difference 7\..e-02"):
            Target(few)

    def test_logits_that_are_not_finite_say_nothing(self):
        model = make_target("llama")
        with torch.no_grad():
            model.lm_head.weight[3] = float("nan")
        Target(model)
        with pytest.raises(ValueError, match="NaN"):
            dflash.generate(model, None, ids(4), max_new_tokens=2)

    def test_a_family_whose_logits_differ_is_refused(self):
        model = make_target("llama")
        attention = model.model.layers[2].self_attn

        def forward(self, hidden_states, **kwargs):
            out, weights = type(self).forward(self, hidden_states, **kwargs)
            return (out if self.config._attn_implementation == "sdpa" else out * 0.5), weights

        attention.forward = types.MethodType(forward, attention)
        with pytest.raises(UnsupportedTargetError, match=r"llama gives other logits .*relative difference"):
            Target(model)


def tp_forward(module, *arguments):
    return type(module).forward(module, *arguments)


def test_a_forward_of_the_same_name_is_not_that_of_transformers():
    model = make_target("llama", num_hidden_layers=2)
    module = model.model.layers[0].mlp.up_proj
    module.forward = functools.partial(tp_forward, module)
    with pytest.raises(UnsupportedTargetError, match=r"Linear\.forward was replaced"):
        dflash.Generator(model, max_length=64)

"""A target whose functions, hooks or layers were changed before it is used gives its text, or is refused by name."""

import copy
import functools
import re
import types

import accelerate
import answers
import pytest
import torch
from answers import answered, own, streamed, through_transformers
from families import make_draft, make_target
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama

import dflash
from dflash.targets import UnsupportedTargetError

pytestmark = pytest.mark.usefixtures("released")


def one_shot(model: PreTrainedModel, draft: nn.Module | None = None) -> list[int]:
    dflash.release()  # as after every change of a live model but its tensors, hooks and adapters
    return answers.one_shot(model, draft)


def text_or_refusal(model: PreTrainedModel) -> tuple[str, list[int]]:
    try:
        return "", one_shot(model)
    except UnsupportedTargetError as error:
        return str(error), []


def changed(function, wraps: bool = False):
    """The function with every tensor that it returns scaled, and one value moved."""

    def scale(value):
        if isinstance(value, torch.Tensor):
            factor = 1 - 0.9 * (torch.arange(value.shape[-1]) % 5 == 0)
            return value * factor if value.is_floating_point() else value
        return tuple(map(scale, value)) if isinstance(value, tuple) else value

    def patch(*arguments, **options):
        return scale(function(*arguments, **options))

    return functools.wraps(function)(patch) if wraps else patch


PATCHES = {
    "LlamaMLP.forward": (modeling_llama.LlamaMLP, "forward"),
    "modeling_llama.apply_rotary_pos_emb": (modeling_llama, "apply_rotary_pos_emb"),
    "Linear.forward": (nn.Linear, "forward"),
    "torch.nn.functional.silu": (nn.functional, "silu"),
}


class TestFunctionsThatAreReplaced:
    @pytest.mark.parametrize(("name", "wraps"), [*((name, False) for name in PATCHES), ("LlamaMLP.forward", True)])
    def test_the_text_is_that_of_the_patched_model(self, name, wraps, monkeypatch):
        model = make_target("llama", num_hidden_layers=2)
        draft, before = make_draft(model), own(model)
        assert one_shot(model, draft) == before
        owner, function = PATCHES[name]
        monkeypatch.setattr(owner, function, changed(getattr(owner, function), wraps))
        after = own(model)
        assert after != before, "the patch should change the text"
        assert one_shot(model, draft) == after
        assert streamed(model) == after == through_transformers(model)
        new = dflash.Generator(model, draft, max_length=64)
        assert new.fused_reason
        assert answered(new) == after
        monkeypatch.undo()
        assert one_shot(model, draft) == before

    def test_a_patch_that_matters_at_long_positions_only_is_followed(self, monkeypatch):
        """What patches for long contexts do: no short trial run sees them."""
        model, rotate = make_target("llama", num_hidden_layers=2), modeling_llama.apply_rotary_pos_emb

        def stretched(q, k, cos, sin, **options):
            return rotate(q, k, *((x * 0.2 if x.shape[1] > 40 else x) for x in (cos, sin)), **options)

        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", stretched)
        reason = dflash.Generator(model, max_length=100).fused_reason
        assert "apply_rotary_pos_emb is not transformers' own" in reason

    def test_what_goes_wrong_on_the_ops_runs_in_the_models_own_modules(self, monkeypatch):
        model = make_target("llama")
        monkeypatch.setattr(nn.functional, "silu", nn.functional.relu)
        generator = dflash.Generator(model, max_length=64)
        assert generator.fused_reason.startswith("it gives other logits with dflash's cache and attention")
        assert answered(generator) == own(model)
        with pytest.raises(UnsupportedTargetError, match="got LlamaForCausalLM, which gives other logits"):
            dflash.Generator(model, max_length=64, fused=True)
        quantized = dflash.Generator(model, max_length=64, weights="int8")
        assert quantized.fused_reason == generator.fused_reason

    def test_an_attention_that_takes_no_function_by_name_is_refused(self, monkeypatch):
        """What unsloth does: its own attention, which knows nothing of our cache."""
        model = make_target("llama")

        def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
            cache = kwargs.get("cache", kwargs.get("past_key_values"))  # the second before transformers 5.24
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx)
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
            return self.o_proj(out.transpose(1, 2).flatten(2)), None

        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
        own(model)
        with pytest.raises(UnsupportedTargetError, match=r"llama (gives other logits|failed in a trial run)"):
            one_shot(model)


class TestPartsThatWeReplace:
    """Attention, masks and the loop: a replacement of transformers' own could not be followed."""

    @pytest.mark.parametrize("name", ["_sample", "prepare_inputs_for_generation"])
    def test_a_replaced_method_of_the_loop_is_refused_by_name(self, name, monkeypatch):
        model, owner = make_target("llama"), modeling_llama.LlamaForCausalLM
        monkeypatch.setattr(owner, name, changed(getattr(owner, name)))
        with pytest.raises(UnsupportedTargetError, match=rf"LlamaForCausalLM\.{name} was replaced, .*: undo"):
            one_shot(model)

    def test_a_replaced_attention_or_mask_is_refused(self, monkeypatch):
        model, mask = make_target("llama"), torch.ones(24, 24, dtype=torch.bool)[None, None]
        for owner, name, patch, said in (
            (nn.functional, "scaled_dot_product_attention", changed(nn.functional.scaled_dot_product_attention),
             "llama gives other logits"),
            (modeling_llama, "create_causal_mask", lambda **_: mask, "builds its own mask"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, patch)
            with pytest.raises(UnsupportedTargetError, match=said):
                one_shot(model)
            monkeypatch.undo()

    @pytest.mark.parametrize("name", ["sdpa", "my_attention"])
    def test_an_attention_function_of_the_users_is_refused(self, name, monkeypatch):
        own_function = changed(sdpa_attention.sdpa_attention_forward)
        monkeypatch.setitem(AttentionInterface._global_mapping, name, own_function)
        model = make_target("llama")
        model.config._attn_implementation = name
        with pytest.raises(UnsupportedTargetError, match=f"its attention function '{name}' is not transformers' own"):
            one_shot(model)

    def test_an_eager_attention_matters_only_to_a_model_that_runs_it(self, monkeypatch):
        model, attend = make_target("llama"), modeling_llama.eager_attention_forward
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", changed(attend))
        assert one_shot(model) == own(model)
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedTargetError, match="its attention function 'eager' is not transformers' own"):
            one_shot(model)


class TestHooks:
    @pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
    def test_global_hooks_are_followed(self, register):
        model = make_target("llama")
        before = one_shot(model)
        is_pre = register is register_module_forward_pre_hook

        def hook(module, arguments, *output):
            if isinstance(module, nn.Linear):
                return (arguments[0].relu(),) if is_pre else output[0].relu()
            return None

        handle = register(hook)
        try:
            assert one_shot(model) == own(model) != before
            assert answered(dflash.Generator(model, max_length=64)) == own(model)
        finally:
            handle.remove()
        assert one_shot(model) == before


class TestMethodsOfOneModule:
    def test_a_method_of_one_module_is_followed(self):
        model = make_target("qwen3")
        before, mlp = one_shot(model), model.model.layers[1].mlp
        mlp.forward = types.MethodType(changed(type(mlp).forward), mlp)
        assert one_shot(model) == own(model) != before
        del mlp.forward
        assert one_shot(model) == before

    @pytest.mark.parametrize("is_compiled", [True, False])
    def test_a_compiled_function_or_a_hook_of_accelerate_that_changes_the_output_is_refused(self, is_compiled):
        class Negate(accelerate.hooks.ModelHook):
            def post_forward(self, module, output):
                return -output

        model = make_target("qwen3")
        mlp = model.model.layers[1].mlp
        if is_compiled:
            mlp.forward = torch.compile(lambda x: -x, backend="eager")
        else:
            accelerate.hooks.add_hook_to_module(mlp, Negate())
        with pytest.raises(UnsupportedTargetError, match=r"Qwen3MLP\.forward was replaced by"):
            one_shot(model)

    def test_an_idle_hook_of_accelerate_is_looked_through(self):
        model = make_target("qwen3")
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
        assert hasattr(model, "_hf_hook")
        assert one_shot(model) == own(model)
        assert not dflash.Generator(model, max_length=64).fused_reason


class TestLayers:
    @pytest.mark.parametrize(
        ("family", "num_layers"), [("llama", 3), ("mistral (windowed)", 1), ("gemma3", 3), ("deepseek_v3", 1)]
    )
    def test_a_lowered_number_of_layers_is_followed(self, family, num_layers):
        model = make_target(family)
        before = one_shot(model)
        model.config.num_hidden_layers = num_layers
        assert one_shot(model) == own(model) != before
        model.config.num_hidden_layers = 4
        assert one_shot(model) == before

    def test_a_drafter_for_more_layers_is_refused_by_name(self):
        model = make_target("llama")
        draft = make_draft(model)
        model.config.num_hidden_layers = 3
        with pytest.raises(ValueError, match=r"num_target_layers is 4, the target's is 3|taps layers"):
            one_shot(model, draft)
        assert one_shot(model, make_draft(model)) == own(model)

    def test_fewer_layers_than_the_config_says_are_followed_without_taps(self):
        model = make_target("llama")
        draft, model.model.layers = make_draft(model), model.model.layers[:2]
        assert one_shot(model) == own(model)
        with pytest.raises(UnsupportedTargetError, match="no list of 4 decoder layers was found"):
            one_shot(model, draft)

    @pytest.mark.parametrize(
        ("family", "where"),
        [("mistral (windowed)", "layer"), ("qwen3 (windowed)", "config"), ("qwen2", "types"), ("gemma3", "config"),
         ("gpt_oss", "layer")],
    )  # fmt: skip
    def test_a_changed_window_is_followed_or_refused_by_name(self, family, where):
        """Transformers masks by the model's config; attention modules keep numbers of their own."""
        model = make_target(family)
        attention, config = model.model.layers[0].self_attn, model.config
        if where == "config":
            config.sliding_window = 4
        elif where == "types":
            config.layer_types = ["sliding_attention"] * 4
            config.sliding_window = 4
        elif hasattr(attention, "sliding_window"):
            attention.sliding_window = 4
        else:
            attention.config = copy.deepcopy(config)
            attention.config.sliding_window = 4
        refusal, text = text_or_refusal(model)
        said = r"attends over a window of \w+ in layer|gives other logits|fails on its own in a trial run"
        assert re.search(said, refusal) or text == own(model)

    def test_a_window_that_differs_past_the_trial_run_is_refused(self):
        model = make_target("gemma3", sliding_window=60)
        assert one_shot(model) == own(model)
        model.model.layers[2].self_attn.sliding_window = 50
        with pytest.raises(UnsupportedTargetError, match="attends over a window of 50 in layer 2 by its modules"):
            one_shot(model)


def hook_one_module(model: PreTrainedModel) -> None:
    chosen = model.model.layers[1].mlp
    chosen.register_forward_hook(lambda module, _, output: -output if module is chosen else None)


def copy_a_layer(model: PreTrainedModel) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.config.num_hidden_layers = 5


CHANGES = {
    "a hook that looks for its own module": hook_one_module,
    "attention that is not causal": lambda model: setattr(model.model.layers[1].self_attn, "is_causal", False),
    "a copied layer": copy_a_layer,
    "one layer in two places": lambda model: model.model.layers.__setitem__(1, model.model.layers[0]),
    "one attention in two layers": lambda model: setattr(
        model.model.layers[1], "self_attn", model.model.layers[0].self_attn
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_copy_computes_otherwise_is_refused(change):
    model = make_target("llama")
    CHANGES[change](model)
    with pytest.raises(UnsupportedTargetError, match="llama gives other logits"):
        one_shot(model)

"""Tensors of the target that change between calls count from the next call on, however they were changed."""

import pytest
import torch
from baseline import greedy, prompt
from families import make_draft, make_target
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import dflash

NEW = 10
IDS = prompt(24)


@pytest.fixture(autouse=True)
def _released():
    yield
    dflash.release()


def expected(model: PreTrainedModel, ids: torch.Tensor = IDS) -> list[int]:
    return greedy(model, ids, NEW).tolist()


def one_shot(model: PreTrainedModel, draft: nn.Module | None = None) -> list[int]:
    return dflash.generate(model, draft, IDS[None], max_new_tokens=NEW)[0, len(IDS) :].tolist()


def answered(generator: dflash.Generator, ids: torch.Tensor = IDS) -> list[int]:
    return generator.generate(ids[None], max_new_tokens=NEW)[0, len(ids) :].tolist()


def num_prefilled(generator: dflash.Generator, ids: torch.Tensor) -> int:
    output = generator.generate(ids[None], max_new_tokens=NEW, return_dict_in_generate=True)
    return output.statistics.num_prefilled_tokens[0]


def longer() -> torch.Tensor:
    """A prompt whose first tokens are those of `IDS`."""
    return torch.cat([IDS, prompt(5, seed=3)])


# ---------------------------------------------------------------------------------------------- ways to change


@torch.no_grad()
def in_place(tensor: torch.Tensor) -> None:
    tensor.mul_(0.5)


@torch.inference_mode()
def under_inference_mode(tensor: torch.Tensor) -> None:
    tensor.mul_(0.5)


def through_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(0.5)


def through_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[...] *= 0.5


def through_dlpack(tensor: torch.Tensor) -> None:
    torch.utils.dlpack.from_dlpack(tensor.detach()).mul_(0.5)


@torch.no_grad()
def together(tensor: torch.Tensor) -> None:
    torch._foreach_mul_([tensor], 0.5)


def by_a_fused_optimizer(tensor: torch.Tensor) -> None:
    parameter = nn.Parameter(tensor.detach())
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], lr=0.2, fused=True).step()


WAYS = [in_place, under_inference_mode, through_data, through_numpy, through_dlpack, together, by_a_fused_optimizer]
ways = pytest.mark.parametrize("change", WAYS, ids=lambda way: way.__name__)


class TestFrequencies:
    @ways
    @pytest.mark.parametrize("family", ["llama", "mistral (windowed)", "qwen2", "qwen3"])
    def test_changed_frequencies_count_at_once(self, family, change):
        model = make_target(family, num_hidden_layers=2)
        draft = make_draft(model)
        generator = dflash.Generator(model, draft, max_length=64, block_size=4)
        before = one_shot(model, draft)
        assert before == answered(generator)
        change(model.model.rotary_emb.inv_freq)
        after = expected(model)
        assert after != before
        assert one_shot(model, draft) == after == answered(generator)
        assert answered(generator, longer()) == expected(model, longer())

    def test_a_compiled_step_follows_changed_frequencies(self):
        model = make_target("llama", num_hidden_layers=2)
        generator = dflash.Generator(model, max_length=64, compile=True)
        before = answered(generator)
        in_place(model.model.rotary_emb.inv_freq)
        assert answered(generator) == expected(model) != before

    def test_replaced_frequencies_are_noticed(self):
        model = make_target("llama", num_hidden_layers=2)
        generator, before = dflash.Generator(model, max_length=64), one_shot(model)
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5
        assert one_shot(model) == expected(model) != before
        with pytest.raises(ValueError, match="tensors were replaced since this generator was made"):
            answered(generator)

    def test_a_changed_factor_of_the_angles_counts_after_release(self):
        model = make_target("llama", num_hidden_layers=2)
        before = one_shot(model)
        model.model.rotary_emb.attention_scaling = 0.5
        dflash.release()
        assert one_shot(model) == expected(model) != before


class TestBuffers:
    @ways
    def test_a_changed_buffer_counts_at_once(self, change):
        model = make_target("gemma3")
        scale, generator = model.model.embed_tokens.embed_scale, dflash.Generator(model, max_length=64)
        assert one_shot(model) == answered(generator)
        change(scale)
        after = expected(model)
        assert one_shot(model) == after == answered(generator)
        assert answered(generator, longer()) == expected(model, longer())


class ScaledMLP(modeling_llama.LlamaMLP):
    """Multiplies by a tensor that is no parameter and no buffer."""

    def forward(self, x):
        return super().forward(x) * self.find()


class _Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.inside = {"scale": tensor}


HOLDERS = {
    "attribute": (lambda scale: {"scale": scale}, lambda self: self.scale),
    "list": (lambda scale: {"scales": [scale]}, lambda self: self.scales[0]),
    "dict": (lambda scale: {"scales": {"a": (scale,)}}, lambda self: self.scales["a"][0]),
    "object": (lambda scale: {"holder": _Holder(scale)}, lambda self: self.holder.inside["scale"]),
}


class TestPlainTensors:
    @pytest.mark.parametrize(
        ("holder", "change"),
        [*(("attribute", way) for way in WAYS), ("list", in_place), ("dict", through_numpy), ("object", in_place)],
    )
    def test_a_changed_plain_tensor_counts_at_once(self, holder, change, monkeypatch):
        make, find = HOLDERS[holder]
        monkeypatch.setattr(ScaledMLP, "find", find, raising=False)
        model = make_target("llama", num_hidden_layers=2)
        scales = []
        for layer in model.model.layers:
            layer.mlp.__class__ = ScaledMLP
            scales.append(torch.linspace(0.5, 2.0, 64))
            vars(layer.mlp).update(make(scales[-1]))
        generator, before = dflash.Generator(model, max_length=64), one_shot(model)
        assert before == expected(model) == answered(generator)
        for scale in scales:
            change(scale)
        after = expected(model)
        assert after != before
        assert one_shot(model) == after == answered(generator)
        assert answered(generator, longer()) == expected(model, longer())

    def test_a_plain_tensor_that_has_a_gradient_does_not_keep_a_target_from_running(self):
        model = make_target("llama", num_hidden_layers=2)
        model.model.layers[0].mlp.trace = torch.ones(2, requires_grad=True) * 2
        assert one_shot(model) == expected(model)


class TestReusedPrefix:
    @ways
    @pytest.mark.parametrize("part", ["everything", "k_proj", "norm"])
    def test_no_key_of_changed_weights_is_used_again(self, part, change):
        model = make_target("qwen3", num_hidden_layers=2)
        generator = dflash.Generator(model, make_draft(model), max_length=80)
        answered(generator)
        for name, parameter in model.named_parameters():
            if part in (name.rpartition(".weight")[0].rpartition(".")[2], "everything"):
                change(parameter)
        assert answered(generator, longer()) == expected(model, longer())

    @pytest.mark.parametrize("transposed", [False, True])
    def test_weights_that_are_inference_tensors_may_change_in_one_value(self, transposed):
        with torch.inference_mode():
            model = make_target("qwen3", num_hidden_layers=2)
            if transposed:
                for layer in model.model.layers:
                    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.t().contiguous().t())
            generator = dflash.Generator(model, max_length=80)
            answered(generator)
            model.model.layers[0].self_attn.v_proj.weight[3, 5] = 40.0
            assert answered(generator, longer()) == expected(model, longer())

    def test_a_model_moved_under_inference_mode_gives_its_own_text(self):
        model = make_target("qwen3", num_hidden_layers=2)
        generator = dflash.Generator(model, max_length=80)
        answered(generator)
        with torch.inference_mode():
            model.bfloat16().float()
        assert one_shot(model) == expected(model)
        with pytest.raises(ValueError, match="tensors were replaced"):
            answered(generator)

    def test_the_prefix_of_unchanged_weights_is_used_again(self):
        model = make_target("qwen3", num_hidden_layers=2)
        generator = dflash.Generator(model, make_draft(model), max_length=80)
        answered(generator)
        assert num_prefilled(generator, longer()) < len(longer()) - 12
        model.model.layers[0].mlp.up_proj.weight.data += 0
        assert num_prefilled(generator, torch.cat([longer(), prompt(3, seed=4)])) < 20
        in_place(model.lm_head.weight)
        assert num_prefilled(generator, longer()) == len(longer())

    @pytest.mark.parametrize("bits", [4, 8])
    def test_weights_that_torch_cannot_compare_are_compared(self, bits):
        model = make_target("qwen3", num_hidden_layers=2)
        dtype = torch.float4_e2m1fn_x2 if bits == 4 else torch.float8_e4m3fn
        model.model.layers[0].mlp.packed = nn.Buffer(torch.zeros(8, 8, dtype=torch.uint8).view(dtype))
        generator = dflash.Generator(model, max_length=80)
        answered(generator)
        assert num_prefilled(generator, longer()) < len(longer())

    def test_a_buffer_with_nan_does_not_stop_reuse(self):
        model = make_target("qwen3", num_hidden_layers=2)
        model.model.layers[0].mlp.unset = nn.Buffer(torch.full((4,), torch.nan))
        generator = dflash.Generator(model, max_length=80)
        answered(generator)
        assert num_prefilled(generator, longer()) < len(longer())

"""Tensors of the target that change between calls count from the next call on, however they were changed."""

import pytest
import torch
from answers import NEW, answered, one_shot, own
from baseline import prompt
from families import make_draft, make_target
from torch import nn
from transformers.models.llama import modeling_llama

import dflash

pytestmark = pytest.mark.usefixtures("released")
IDS = prompt(24)


def num_prefilled(generator: dflash.Generator, ids: torch.Tensor) -> int:
    output = generator.generate(ids[None], max_new_tokens=NEW, return_dict_in_generate=True)
    return output.statistics.num_prefilled_tokens[0]


def longer() -> torch.Tensor:
    """A prompt whose first tokens are those of `IDS`."""
    return torch.cat([IDS, prompt(5, seed=3)])


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


@torch.no_grad()
def together(tensor: torch.Tensor) -> None:
    torch._foreach_mul_([tensor], 0.5)


def by_a_fused_optimizer(tensor: torch.Tensor) -> None:
    parameter = nn.Parameter(tensor.detach())
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], lr=0.2, fused=True).step()


WAYS = [in_place, under_inference_mode, through_data, through_numpy, together, by_a_fused_optimizer]
COUNTED = [in_place, under_inference_mode, together]  # by torch's version counters; after others call `reset`


class TestFrequencies:
    @pytest.mark.parametrize(
        ("family", "change"),
        [*(("llama", way) for way in WAYS), ("qwen3", in_place)],
        ids=lambda part: getattr(part, "__name__", part),
    )
    def test_changed_frequencies_count_at_once(self, family, change):
        model = make_target(family, num_hidden_layers=2)
        draft = make_draft(model)
        generator = dflash.Generator(model, draft, max_length=64, block_size=4)
        before = one_shot(model, draft, IDS)
        assert before == answered(generator, IDS)
        change(model.model.rotary_emb.inv_freq)
        after = own(model, IDS)
        assert after != before
        assert one_shot(model, draft, IDS) == after
        generator.reset()  # for what torch does not count
        assert answered(generator, IDS) == after

    def test_replaced_frequencies_are_noticed(self):
        model = make_target("llama", num_hidden_layers=2)
        generator, before = dflash.Generator(model, max_length=64), one_shot(model, None, IDS)
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5
        assert one_shot(model, None, IDS) == own(model, IDS) != before
        with pytest.raises(ValueError, match="tensors were replaced since this generator was made"):
            answered(generator, IDS)


class ScaledMLP(modeling_llama.LlamaMLP):
    """Multiplies by a tensor that is no parameter and no buffer."""

    def forward(self, x):
        return super().forward(x) * self.holder["scale"][0]


def test_tensors_in_other_attributes_are_shared():
    model = make_target("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.holder = ScaledMLP, {"scale": [torch.linspace(0.5, 2.0, 64)]}
    before = one_shot(model, None, IDS)
    assert before == own(model, IDS)
    model.model.layers[0].mlp.holder["scale"][0].mul_(-1)
    assert one_shot(model, None, IDS) == own(model, IDS) != before


class TestReusedPrefix:
    @pytest.mark.parametrize(
        ("part", "change"),
        [*zip(["everything", "k_proj", "norm"] * 2, WAYS, strict=True)],
        ids=lambda part: getattr(part, "__name__", part),
    )
    def test_no_key_of_changed_weights_is_used_again(self, part, change):
        model = make_target("qwen3", num_hidden_layers=2)
        generator = dflash.Generator(model, make_draft(model), max_length=80)
        answered(generator, IDS)
        for name, parameter in model.named_parameters():
            if part in (name.rpartition(".weight")[0].rpartition(".")[2], "everything"):
                change(parameter)
        if change not in COUNTED:
            generator.reset()
        assert answered(generator, longer()) == own(model, longer())

    def test_weights_that_are_inference_tensors_may_change_in_one_value(self):
        with torch.inference_mode():
            model = make_target("qwen3", num_hidden_layers=2)
            generator = dflash.Generator(model, max_length=80)
            answered(generator, IDS)
            model.model.layers[0].self_attn.v_proj.weight[3, 5] = 40.0
            assert answered(generator, longer()) == own(model, longer())

    def test_the_prefix_of_unchanged_weights_is_used_again(self):
        model = make_target("qwen3", num_hidden_layers=2)
        generator = dflash.Generator(model, make_draft(model), max_length=80)
        answered(generator, IDS)
        assert num_prefilled(generator, longer()) < len(longer()) - 12
        assert num_prefilled(generator, torch.cat([longer(), prompt(3, seed=4)])) < 20
        in_place(model.lm_head.weight)
        assert num_prefilled(generator, longer()) == len(longer())

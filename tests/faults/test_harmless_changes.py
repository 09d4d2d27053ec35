"""A target with parts of other libraries, which leave attention, masks, caches and loop alone, still runs."""

import types

import pytest
from answers import one_shot, own
from families import make_target
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class LinearWithTo(nn.Linear):
    """Like the layers of bitsandbytes, which have a ``to`` of their own."""

    def to(self, *arguments, **options):
        return super().to(*arguments, **options)


class Inside(nn.Module):
    """A wrapper that knows its layer, as adapters do. It has no config."""

    is_causal = True

    def __init__(self, inner: nn.Module, layer_idx: int) -> None:
        super().__init__()
        self.inner, self.layer_idx = inner, layer_idx

    def forward(self, *arguments, **options):
        return self.inner(*arguments, **options)


def layers_with_methods_of_tensors(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = LinearWithTo


def a_method_that_peft_puts_back(model):
    model.prepare_inputs_for_generation = types.MethodType(type(model).prepare_inputs_for_generation, model)


def checkpointed_layers(model):  # which are not shards
    for layer in model.model.layers:
        layer.mlp = checkpoint_wrapper(layer.mlp)


def a_layer_without_rows(model):
    model.model.layers[0].mlp.adapter = nn.Linear(8, 0, bias=False)


def wrappers_that_know_their_layer(model):
    for index, layer in enumerate(model.model.layers):
        layer.mlp.up_proj = Inside(layer.mlp.up_proj, index)


def wrappers_of_attention(model):
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = Inside(layer.self_attn, index)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "change",
    [layers_with_methods_of_tensors, a_method_that_peft_puts_back, checkpointed_layers, a_layer_without_rows,
     wrappers_that_know_their_layer, wrappers_of_attention],
)  # fmt: skip
def test_the_text_is_the_models_own(change):
    model = make_target("llama", num_hidden_layers=2)
    change(model)
    assert one_shot(model) == own(model)

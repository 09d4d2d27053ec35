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


def test_layers_may_have_methods_that_tensors_have_too():
    model = make_target("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = LinearWithTo
    assert one_shot(model) == own(model)


def test_methods_of_the_loop_that_peft_puts_back_are_no_replacement():
    model = make_target("llama")
    model.prepare_inputs_for_generation = types.MethodType(type(model).prepare_inputs_for_generation, model)
    assert one_shot(model) == own(model)


def test_checkpointed_layers_are_not_taken_for_shards():
    model = make_target("llama")
    for layer in model.model.layers:
        layer.mlp = checkpoint_wrapper(layer.mlp)
    assert one_shot(model) == own(model)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_rows_is_not_taken_for_a_shard():
    model = make_target("llama")
    model.model.layers[0].mlp.adapter = nn.Linear(8, 0, bias=False)
    assert one_shot(model) == own(model)


class Inside(nn.Module):
    """A wrapper that knows its layer, as adapters do."""

    def __init__(self, inner: nn.Module, layer_idx: int) -> None:
        super().__init__()
        self.inner, self.layer_idx = inner, layer_idx

    def forward(self, *arguments, **options):
        return self.inner(*arguments, **options)


def test_wrappers_that_know_their_layer_are_not_taken_for_attention():
    model = make_target("llama")
    for index, layer in enumerate(model.model.layers):
        layer.mlp.up_proj, layer.mlp.down_proj = Inside(layer.mlp.up_proj, index), Inside(layer.mlp.down_proj, index)
    assert one_shot(model) == own(model)


def test_a_wrapper_of_attention_needs_no_config():
    model = make_target("llama")
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = Inside(layer.self_attn, index)
        layer.self_attn.is_causal = True
    assert one_shot(model) == own(model)

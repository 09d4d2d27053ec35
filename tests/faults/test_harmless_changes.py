"""A target with parts of other libraries, which leave attention, masks, caches and loop alone, still runs."""

import pytest
import torch
from baseline import greedy, prompt
from families import make_target
from torch import nn

import dflash

NEW = 10
IDS = prompt(9)


def assert_lossless(model):
    text = dflash.generate(model, None, IDS[None], max_new_tokens=NEW)[0, len(IDS) :]
    assert text.tolist() == greedy(model, IDS, NEW).tolist()


class LinearWithTo(nn.Linear):
    """Like the layers of bitsandbytes, which have a ``to`` of their own."""

    def to(self, *arguments, **options):
        return super().to(*arguments, **options)


class LinearWithDevice(nn.Linear):
    @property
    def device(self):
        return self.weight.device


@pytest.mark.parametrize("kind", [LinearWithTo, LinearWithDevice])
def test_layers_may_have_methods_that_tensors_have_too(kind):
    model = make_target("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = kind
    assert_lossless(model)


@pytest.mark.parametrize("owner", [nn.Module, torch.Tensor])
def test_a_wrapped_to_is_followed(owner, monkeypatch):
    """Libraries for other devices wrap ``to``."""
    model, to = make_target("llama"), owner.to
    monkeypatch.setattr(owner, "to", lambda self, *arguments, **options: to(self, *arguments, **options))
    assert_lossless(model)

"""The text of a model that somebody has changed: its own, and what each way into the package writes."""

import torch
from baseline import greedy, prompt
from torch import nn
from transformers import PreTrainedModel

import dflash

NEW = 10
IDS = prompt(9)


def own(model: PreTrainedModel, ids: torch.Tensor = IDS) -> list[int]:
    """Return what ``model.generate`` writes."""
    return greedy(model, ids, NEW).tolist()


def one_shot(model: PreTrainedModel, draft: nn.Module | None = None, ids: torch.Tensor = IDS) -> list[int]:
    return dflash.generate(model, draft, ids[None], max_new_tokens=NEW)[0, len(ids) :].tolist()


def streamed(model: PreTrainedModel) -> list[int]:
    events = dflash.stream(model, None, IDS[None], max_new_tokens=NEW)
    return [token for event in events for token in event.ids[0]]


def through_transformers(model: PreTrainedModel) -> list[int]:
    out = model.generate(IDS[None], do_sample=False, max_new_tokens=NEW, custom_generate=dflash.custom_generate)
    return out[0, len(IDS) :].tolist()


def answered(generator: dflash.Generator, ids: torch.Tensor = IDS) -> list[int]:
    return generator.generate(ids[None], max_new_tokens=NEW)[0, len(ids) :].tolist()

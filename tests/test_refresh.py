"""Test what a drafter notices between calls: weights that changed, and prefixes that may be used again."""

import copy

import pytest
import torch
from baseline import prompt
from families import DRAFTERS, make_draft
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dflash
from dflash import Drafter

NEW = 10


NAMES = ("value scale", "DSpark of some tokens", "DFlash2", "own head", "the target's head")
KINDS = {name: DRAFTERS[name] for name in NAMES}
KINDS["made in inference mode"] = lambda target, folder: torch.inference_mode()(make_draft)(target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_runs_only_what_is_new(target, tmp_path, kind):
    draft = KINDS[kind](target, tmp_path)
    again, fresh = (dflash.Generator(target, draft, max_length=80) for _ in range(2))
    first = again.generate(prompt(24)[None], max_new_tokens=NEW)[0]
    ids = torch.cat([first, prompt(5, seed=3)])[None]
    ours, theirs = (each.generate(ids, max_new_tokens=NEW, return_dict_in_generate=True) for each in (again, fresh))
    assert ours.statistics.num_prefilled_tokens[0] in (5, 6), "the first answer's last token may not have been run"
    assert theirs.statistics.num_prefilled_tokens == [39]
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(again.state.block, fresh.state.block), "what is drafted is the same"


FOLLOWING = ("value scale", "DSpark of some tokens")


def predicted(draft: Drafter) -> list[torch.Tensor]:
    """Return a drafter's hidden states, and its scores of all tokens after another."""
    draft.refresh()
    generator, block, length = torch.Generator().manual_seed(3), 4, torch.tensor([6])
    shape = 6, len(draft.config.target_layer_ids) * 64
    context, embeds = (torch.randn(1, *size, generator=generator).to(draft.dtype) for size in (shape, (block, 64)))
    hidden = draft(draft.fuse(context, length), length, embeds, length, draft.new_cache(1, 12))
    if draft.selector is None:
        return [hidden]
    pairs = draft.selector.pair_weights(hidden)
    return [hidden, (pairs.predecessors[5] * pairs.queries[:, 0]).float() @ pairs.successors.float().T]


def followed(draft: Drafter) -> nn.Module:
    """Return a module from whose weight another follows."""
    return draft.layers[1].self_attn.o_proj if draft.markov_head is None else draft.markov_head.markov_w2


@torch.no_grad()
def in_place(draft: Drafter) -> None:
    followed(draft).weight.mul_(2)


@torch.inference_mode()
def in_inference_mode(draft: Drafter) -> None:
    followed(draft).weight.mul_(2)


def replaced(draft: Drafter) -> None:
    followed(draft).weight.data = followed(draft).weight * 2


def loaded(draft: Drafter) -> None:
    draft.load_state_dict(
        {name: tensor * (2 if tensor.dim() == 2 else 1) for name, tensor in draft.state_dict().items()}
    )


@torch.inference_mode()
def made_in_inference_mode(draft: Drafter) -> None:
    """Write to a tensor whose writes torch does not count."""
    followed(draft).weight = nn.Parameter(followed(draft).weight.clone(), requires_grad=False)
    draft.refresh()
    followed(draft).weight.mul_(2)


def in_another_dtype(draft: Drafter) -> None:
    in_place(draft.to(torch.bfloat16))


WAYS = (in_place, in_inference_mode, replaced, loaded, made_in_inference_mode, in_another_dtype)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", FOLLOWING)
def test_weights_that_changed_are_followed(target, tmp_path, kind, way):
    def check() -> torch.Tensor:
        made = Drafter(draft.config, dtype=draft.dtype)
        made.load_state_dict(draft.state_dict())
        found = predicted(draft)
        assert all(map(torch.equal, found, predicted(made)))
        return found[-1].float()

    draft = KINDS[kind](target, tmp_path)
    before = check()
    way(draft)
    assert not torch.equal(check(), before)


@pytest.mark.parametrize("kind", FOLLOWING)
def test_a_copy_follows_its_own_weights(target, tmp_path, kind):
    draft = KINDS[kind](target, tmp_path)
    before, other = predicted(draft), copy.deepcopy(draft)
    in_place(other)
    assert not torch.equal(predicted(other)[-1], before[-1])
    assert all(map(torch.equal, predicted(draft), before))


class Calls(TorchDispatchMode):
    """Counts torch's calls."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", FOLLOWING)
def test_weights_that_did_not_change_are_not_read(target, tmp_path, kind):
    draft = KINDS[kind](target, tmp_path)
    draft.refresh()
    with Calls() as calls:
        draft.refresh()
    assert calls.count == 0
    in_place(draft)
    with Calls() as calls:
        draft.refresh()
    assert calls.count > 0

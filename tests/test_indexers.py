"""Targets whose layers attend to the keys that an indexer selects: the text is the target's own, at every edge."""

import pytest
import torch
from baseline import check_answers, check_batch, greedy, prompt
from families import cheat, make_draft, make_target
from op_checks import Emulated

import dflash
from dflash.ops import reference
from dflash.targets import sparse

FAMILIES = ["deepseek_v32", "glm_moe_dsa"]  # half of the latter's layers have an indexer, the others share
NEW = 24


def check(target, prompts, **options):
    expected = [greedy(target, p, NEW) for p in prompts]
    generator = cheat(target, make_draft(target), prompts, expected, spoil=5, **options)
    return check_batch(generator.generate, prompts, expected, max_new_tokens=NEW).statistics.acceptance_length


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_rejected_at_the_edges_of_the_selection(family):
    target = make_target(family)
    around = [target.config.index_topk + more for more in (-2, -1, 0, 1, 2)]
    for block_size in (2, 5, 16):
        assert check(target, [prompt(length) for length in around], block_size=block_size) > 1.5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 16}, {"tree": 32}], ids=["chain", "chunks", "tree"])
def test_equal_scores_are_chosen_as_the_model_chooses(family, options):
    target = make_target(family, index_topk=24)
    for name, weight in target.named_parameters():
        if "weights_proj" in name:
            weight.data.zero_()  # every score is 0
    generator = dflash.Generator(target, make_draft(target), max_length=160, **options)
    for length in (1, 23, 40, 61):
        p = prompt(length)
        check_answers(generator.generate(p[None], max_new_tokens=NEW), length, [greedy(target, p, NEW)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compiled", [False, True], ids=["modules", "compiled"])
def test_the_indexers_of_the_model_run_over_the_whole_cache_on_a_gpu(family, compiled, monkeypatch):
    unbound = tuple(family._replace(forward=None) for family in sparse.FAMILIES)
    monkeypatch.setattr(sparse, "FAMILIES", unbound)  # what is bound here is for ties on a CPU
    target = make_target(family)
    check(target, [prompt(length) for length in (1, 9, 40)], block_size=7, compile=compiled)


def test_trees_and_later_turns_see_their_own_path():
    target = make_target("glm_moe_dsa")
    draft = make_draft(target)
    p = prompt(30)
    generator = dflash.Generator(target, draft, max_length=200, tree=16, reuse_prefix=True)
    for _ in range(3):
        answer = generator.generate(p[None], max_new_tokens=12)
        check_answers(answer, len(p), [greedy(target, p, 12)])
        p = torch.cat([answer[0], prompt(5)])


def test_visible_slots_are_those_before_and_the_path():
    tree = dflash.state.Tree(
        torch.tensor([[-1, 0, 0, 2]]), torch.tensor([[0, 1, 1, 2]]), torch.tensor([[1, 3, 5, 13]])[..., None]
    )
    lengths = torch.tensor([2])
    chain = reference.visible(lengths, 4, 7)[0].long()
    assert chain.tolist() == [[1] * (3 + row) + [0] * (4 - row) for row in range(4)]
    path = reference.visible(lengths, 4, 7, ancestors=tree.ancestors)[0, 3].long()
    assert path.tolist() == [1, 1, 1, 0, 1, 1, 0]


def test_the_kernels_of_the_cache_take_keys_without_values(emulation):
    on = Emulated(emulation)
    key, nothing = torch.randn(2, 1, 5, 16), torch.empty(2, 1, 5, 0)
    keys, values = torch.zeros(2, 1, 9, 16), torch.zeros(2, 1, 9, 0)
    on.append_kv_(key, nothing, torch.arange(5).expand(2, 5).contiguous(), keys, values)
    assert torch.equal(keys[:, :, :5], key)
    on.compact_kv_(torch.tensor([[0, 2, 3], [0, 1, 4]]), torch.tensor([3, 3]), torch.tensor([0, 0]), [keys], [values])
    assert torch.equal(keys[0, 0, :3], key[0, 0, [0, 2, 3]])
    assert torch.equal(keys[1, 0, :3], key[1, 0, [0, 1, 4]])

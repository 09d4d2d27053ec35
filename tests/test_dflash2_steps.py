"""Test steps with DFlash 2 drafters: captured, compiled, without host reads, and the text that they write."""

import pytest
import torch
from baseline import greedy, left_padded, prompt
from draft_variants import random_tensors, save_checkpoint
from families import VOCAB, draft_config, hinted, make_draft, make_target
from recorded import record

import dflash

NEW = 30
LENGTHS = (1, 9, 30, 64)
KNOWN = torch.arange(2, VOCAB)[torch.arange(VOCAB - 2) % 4 != 1]  # what the reduced vocabulary holds
CALLS = {
    "greedy": {},
    "one sharpness": {"temperature": 1.0, "seed": 3, "draft_sharpness": 1.0},
    "the drafter's best": {"temperature": 0.8, "top_k": 20, "seed": 4, "draft_sharpness": float("inf")},
    "rejection": {"temperature": 1.0, "seed": 5, "acceptance": "rejection"},
    "rules": {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "suppress_tokens": [11]},
    "tree": {"tree": 24},
    "drawn along a tree": {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "tree": 24},
}


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module", params=["whole vocabulary", "reduced vocabulary"])
def draft(request, target, tmp_path_factory):
    """Return a drafter that shares the target's head, or one with a head of its own over three quarters of it."""
    if request.param == "whole vocabulary":
        return make_draft(target, "DFlash2")
    config = draft_config(target, "DFlash2")
    tensors = random_tensors(dflash.DraftConfig.from_config(config))
    generator = torch.Generator().manual_seed(7)
    tensors["lm_head.weight"] = torch.randn(len(KNOWN), config["hidden_size"], generator=generator)
    tensors["d2t"] = KNOWN - torch.arange(len(KNOWN))
    folder = tmp_path_factory.mktemp("draft")
    return dflash.load_draft(save_checkpoint(folder, config | {"draft_vocab_size": len(KNOWN)}, tensors))


@pytest.fixture(scope="module")
def batch(target):
    """Return left-padded prompts, their mask, and the prompts with their greedy answers."""
    prompts = [prompt(length) for length in LENGTHS]
    return *left_padded(prompts), [torch.cat([p, greedy(target, p, NEW)]) for p in prompts]


def same(ours: dflash.GenerateOutput, theirs: dflash.GenerateOutput) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.statistics.acceptance_lengths == theirs.statistics.acceptance_lengths


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_step_is_captured_and_writes_the_same(target, draft, batch, name):
    ids, mask, texts = batch
    eager, late = hinted(target, draft, texts, tree=24), record(hinted(target, draft, texts, tree=24))
    for limit in (NEW, 7):  # the first captures, the second only replays
        call = {"attention_mask": mask, "max_new_tokens": limit, "tree": None, **CALLS[name]}
        expected = eager.generate(ids, return_dict_in_generate=True, **call)
        same(late.generate(ids, return_dict_in_generate=True, **call), expected)
        eager.reset(), late.reset()
    assert (late.runner.device.captures, late.graph_reason) == (1, "")
    assert late.runner.device.steps["replayed"] > 4


@pytest.mark.parametrize("draft", ["reduced vocabulary"], indirect=True)
def test_steps_compile_into_one_graph_of_each_kind(target, draft, batch, monkeypatch):
    torch._dynamo.reset()
    ids, mask, texts = batch
    compile, graphs = torch.compile, []

    def traced(function, *, options, **more):
        graphs.append(function)
        guards = {"guard_filter_fn": options["guard_filter_fn"]}
        return compile(function, backend="aot_eager", options=guards, **more)

    expected = hinted(target, draft, texts, tree=24)
    monkeypatch.setattr(torch, "compile", traced)
    compiled = hinted(target, draft, texts, compile=True, tree=24)
    for name in ("the drafter's best", "rejection", "tree"):
        call = {"attention_mask": mask, "max_new_tokens": 8, "tree": None, "return_dict_in_generate": True}
        same(compiled.generate(ids, **call | CALLS[name]), expected.generate(ids, **call | CALLS[name]))
    assert len(graphs) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_bfloat16_the_text_is_that_of_the_one_token_mode(temperature):
    target, prompts = make_target("qwen3", dtype=torch.bfloat16), [prompt(length, seed=6) for length in LENGTHS[1:]]
    ids, mask = left_padded(prompts)
    call = {"attention_mask": mask, "max_new_tokens": NEW, "temperature": temperature, "seed": 8}
    expected = dflash.Generator(target, None, max_length=110, batch_size=3, block_size=16).generate(ids, **call)
    texts = [torch.cat([p, row[-NEW:]]) for p, row in zip(prompts, expected, strict=True)]
    lengths = set()
    for spoil in (3, 100):
        generator = hinted(target, make_draft(target, "DFlash2"), texts, spoil)
        output = generator.generate(ids, return_dict_in_generate=True, **call)
        assert torch.equal(output.sequences, expected)
        lengths.update(n for row in output.statistics.acceptance_lengths for n in row)
    assert {3, 16} <= lengths

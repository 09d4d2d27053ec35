"""A target on the ops, op by op as on a GPU: the logits and taps of its modules, and the same text from the engine."""

import copy

import pytest
import torch
from baseline import greedy, prompt
from families import make_draft, make_target
from op_checks import OpByOp, assert_as_exact_as_torch
from recorded import no_host_reads, record

import dflash
from dflash import decoder, ops
from dflash.cache import KVCache
from dflash.target import UnsupportedTargetError, fused, structural_twin
from dflash.target.fused import FusedTarget

TAPS = (1, 0)  # the last layer's tap is read after the norm
FAMILIES = ["llama", "mistral (windowed)", "qwen2", "qwen3 (windowed)"]


def on_ops(model, capacity: int, batch: int = 1) -> tuple[FusedTarget, KVCache]:
    layers, cache = FusedTarget(structural_twin(model), TAPS), KVCache(batch, capacity)
    layers.prepare_(cache)
    return layers, cache


def run_op_by_op(monkeypatch, kernels) -> None:
    monkeypatch.setattr(fused, "ops", kernels)
    monkeypatch.setattr(decoder, "ops", OpByOp(kernels))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_blocks_are_as_exact_as_the_models_own(family, kernels, dtype, monkeypatch):
    model = make_target(family, dtype=dtype, num_hidden_layers=2, max_window_layers=1)
    layers, cache = on_ops(model, 41, batch=2)
    ids = torch.stack([prompt(40, seed) for seed in (1, 2)])
    exact = copy.deepcopy(model).double()(ids, output_hidden_states=True)
    plain = model(ids, output_hidden_states=True)
    run_op_by_op(monkeypatch, kernels)
    layers.forward(ids[:, :24], torch.zeros(2, dtype=torch.int64), cache, 1)
    starts = [24, 17]
    block = torch.stack([ids[row, start : start + 16] for row, start in enumerate(starts)])
    logits, tapped = layers.forward(block, torch.tensor(starts), cache, torch.arange(3, 16))

    def at(states: torch.Tensor, skip: int = 0) -> torch.Tensor:
        return torch.stack([states[row, start + skip : start + 16] for row, start in enumerate(starts)])

    assert_as_exact_as_torch(logits, at(plain.logits, 3), at(exact.logits, 3))
    theirs = [torch.cat([at(output.hidden_states[tap + 1]) for tap in TAPS], -1) for output in (plain, exact)]
    assert_as_exact_as_torch(tapped, *theirs)


@torch.no_grad()
def test_a_rows_bits_do_not_depend_on_its_place_in_the_block(kernels, dtype, monkeypatch):
    """This is why bf16 output equals one-token decoding bit for bit."""
    model = make_target("qwen3", dtype=dtype, num_hidden_layers=2)
    (layers, cache), ids = on_ops(model, 40), prompt(40)[None]
    run_op_by_op(monkeypatch, kernels)
    layers.forward(ids[:, :16], torch.tensor([0]), cache, 1)
    early, early_taps = layers.forward(ids[:, 16:32], torch.tensor([16]), cache, 0)
    late, late_taps = layers.forward(ids[:, 20:36], torch.tensor([20]), cache, 0)
    assert torch.equal(early[:, 4:], late[:, :12])
    assert torch.equal(early_taps[:, 4:], late_taps[:, :12])


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", num_hidden_layers=2)


@pytest.mark.parametrize(("batch", "drafts"), [(1, True), (3, True), (2, False)])
def test_the_recorded_step_writes_the_greedy_text(target, batch, drafts, monkeypatch):
    draft = make_draft(target) if drafts else None
    generator = record(dflash.Generator(target, draft, max_length=80, batch_size=batch, block_size=16))
    assert generator.engine.target.is_fused
    monkeypatch.setattr(decoder, "ops", OpByOp(ops))
    prompts = torch.stack([prompt(20, seed) for seed in range(batch)])
    out = generator.generate(prompts, max_new_tokens=40, temperature=0.0, stop_token_ids=[])
    for row, ids in zip(out, prompts, strict=True):
        assert torch.equal(row[20:], greedy(target, ids, 40))
    assert generator.graph_reason == ""
    assert generator.runner.steps["replayed"] > 4
    with no_host_reads():
        generator.step()


class TestArgument:
    def test_the_text_is_the_same_with_and_without(self, target):
        draft, ids = make_draft(target), prompt(20)[None]
        generators = {
            asked: dflash.Generator(target, draft, max_length=80, fused=asked) for asked in (True, False, "auto")
        }
        answers = [generator.generate(ids, max_new_tokens=30, temperature=0.0) for generator in generators.values()]
        assert all(torch.equal(answer, answers[0]) for answer in answers)
        assert {asked: generator.engine.target.is_fused for asked, generator in generators.items()} == {
            True: True,
            False: False,
            "auto": True,
        }

    def test_true_refuses_a_target_that_is_not_recognized(self):
        other = make_target("gemma3")
        with pytest.raises(UnsupportedTargetError, match=r"fused=True needs exactly a Llama, .* got Gemma3ForCausalLM"):
            dflash.Generator(other, max_length=40, fused=True)
        dflash.Generator(other, max_length=40)

    def test_other_values_are_refused(self, target):
        with pytest.raises(ValueError, match="fused must be True, False or \"auto\", got 'yes'"):
            dflash.Generator(target, max_length=40, fused="yes")

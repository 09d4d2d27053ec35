"""A target on the ops, op by op as on a GPU: the logits and taps of its modules, and the same text from the engine."""

import copy

import pytest
import torch
from baseline import greedy, prompt
from families import make_draft, make_target
from op_checks import Emulated, OpByOp, assert_as_exact_as_torch
from recorded import no_host_reads, record

import dflash
from dflash import decoder, ops
from dflash.cache import KVCache, RecurrentCache
from dflash.targets import Target, UnsupportedTargetError, fused, structural_copy
from dflash.targets.fused import FusedTarget, fuse, kernel_obstacle

TAPS = (1, 0)  # the last layer's tap is read after the norm
FAMILIES = {
    **{key: {"max_window_layers": 1} for key in ("llama", "mistral (windowed)", "qwen2", "qwen3 (windowed)")},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},  # each with its own RoPE
}
DENSE = {"mlp_only_layers": [0, 1, 2, 3]}


def on_ops(model, capacity: int, batch: int = 1) -> tuple[FusedTarget, KVCache]:
    layers, cache = fuse(structural_copy(model), TAPS)[0], KVCache(batch, capacity)
    layers.refresh(cache)
    return layers, cache


def run_op_by_op(monkeypatch, kernels) -> None:
    monkeypatch.setattr(fused, "ops", kernels)
    monkeypatch.setattr(decoder, "ops", OpByOp(kernels))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_blocks_are_as_exact_as_the_models_own(family, kernels, dtype, monkeypatch):
    model = make_target(family, dtype=dtype, num_hidden_layers=2, **FAMILIES[family])
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_is_eight_launches(dtype, emulation, monkeypatch):  # a chunk's attention needs no sum of chunks
    def launches(num_layers: int) -> int:
        layers, cache = on_ops(make_target("qwen3", dtype=dtype, num_hidden_layers=num_layers), 40)
        run_op_by_op(monkeypatch, Emulated(emulation))
        emulation.record(True)
        try:
            layers.forward(prompt(16)[None], torch.tensor([0]), cache, 1)
            return len(emulation.recorded())
        finally:
            emulation.record(False)

    assert launches(3) - launches(2) == 8


def make_recurrent_target(family: str, dtype: torch.dtype = torch.float32):
    """A tiny target with recurrent layers, all of whose weights are random: the norms' too."""
    model = make_target(family.removesuffix(" (dense)"), **(DENSE if "dense" in family else {}))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=g) * 0.2)
    return model.to(dtype)


@torch.no_grad()
def run_recurrent(layers: FusedTarget, ids: torch.Tensor) -> tuple[torch.Tensor, list[tuple[slice, slice]]]:
    """Run a prompt and blocks of which random parts are accepted, wrong tokens behind them.

    Returns the logits of the rows that were right, and where they are: ``(rows, positions)`` of each run.
    """
    batch, prompts, accepted = len(ids), torch.tensor([20, 13])[: len(ids)], torch.tensor([[1, 16, 5], [9, 2, 16]])
    cache = RecurrentCache(batch, ids.shape[1] + 16, 16, device="cpu")
    layers.refresh(cache)
    got, where = [], []

    def run(rows: torch.Tensor, lengths: torch.Tensor, right: torch.Tensor, keep: torch.Tensor | None) -> None:
        cache.begin_pass_(lengths, keep)
        logits, _ = layers.forward(rows, lengths, cache, 0)
        cache.end_pass_(lengths)
        for row, (length, count) in enumerate(zip(lengths.tolist(), right.tolist(), strict=True)):
            got.append(logits[row, :count])
            where.append((row, slice(length, length + count)))

    run(ids[:, :20], torch.zeros_like(prompts), prompts, prompts)
    lengths = prompts
    for counts in accepted.T[:, :batch]:
        block = torch.stack([ids[row, start : start + 16] for row, start in enumerate(lengths.tolist())])
        for row, count in enumerate(counts.tolist()):
            block[row, count:] = 5
        run(block, lengths, counts, None)
        lengths = lengths + counts
    return torch.cat(got), where


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next (dense)"])
def test_recurrent_layers_are_as_exact_as_the_models_own(family, kernels, dtype, monkeypatch):
    model = make_recurrent_target(family, dtype)
    ids = torch.stack([prompt(60, seed) for seed in (1, 2)])
    plain, exact = model(ids).logits, copy.deepcopy(model).double()(ids).logits
    run_op_by_op(monkeypatch, kernels)
    logits, where = run_recurrent(fuse(structural_copy(model), TAPS)[0], ids)
    plain, exact = (torch.cat([x[at] for at in where]) for x in (plain, exact))
    assert_as_exact_as_torch(logits, plain, exact, factor=3.0)


def delta_net(model):
    return model.model.layers[0].linear_attn


CHANGES = {
    "a subclass": lambda m: setattr(delta_net(m), "__class__", type("Mine", (type(delta_net(m)),), {})),
    "a subclass of a norm": lambda m: setattr(
        delta_net(m).norm, "__class__", type("M", (type(delta_net(m).norm),), {})
    ),
    "a bias of the convolution": lambda m: setattr(delta_net(m).conv1d, "bias", torch.nn.Parameter(torch.ones(160))),
    "a bias of a projection": lambda m: setattr(delta_net(m).in_proj_b, "bias", torch.nn.Parameter(torch.ones(4))),
    "a hook": lambda m: delta_net(m).out_proj.register_forward_hook(lambda *_: None),
    "a replaced forward": lambda m: setattr(delta_net(m), "forward", delta_net(m).forward),
    "a parameter of another dtype": lambda m: setattr(
        delta_net(m), "A_log", torch.nn.Parameter(torch.ones(4).double())
    ),
    "a second module": lambda m: delta_net(m).add_module("gate", torch.nn.Identity()),
}


OTHER_NUMBERS = {
    "another eps": lambda m: setattr(delta_net(m).norm, "variance_epsilon", 1e-1),
    "another eps of the layer": lambda m: setattr(m.model.layers[1].input_layernorm, "eps", 1e-1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_recurrent_model_is_not_recognized(change):
    model = make_recurrent_target("qwen3_5")
    assert fuse(model, TAPS)[0] is not None
    CHANGES[change](model)
    assert fuse(model, TAPS)[0] is None


@pytest.mark.parametrize("change", OTHER_NUMBERS)
def test_other_numbers_are_seen_by_the_trial_run(change):
    model = make_recurrent_target("qwen3_5")
    OTHER_NUMBERS[change](model)
    target = Target(model)
    assert target.fused_reason.startswith("it gives other logits")
    assert target.fused_reason


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def recurrent_target():
    return make_recurrent_target("qwen3_5")


@pytest.mark.parametrize("op_by_op", [True, False])
def test_a_fused_recurrent_target_writes_the_greedy_text(recurrent_target, op_by_op, monkeypatch):
    draft = make_draft(recurrent_target)
    generator = dflash.Generator(recurrent_target, draft, max_length=80, batch_size=2, block_size=16)
    assert not generator.fused_reason
    if op_by_op:
        generator = record(generator)
        monkeypatch.setattr(decoder, "ops", OpByOp(ops))
    prompts = torch.stack([prompt(20, seed) for seed in range(2)])
    out = generator.generate(prompts, max_new_tokens=30, temperature=0.0, stop_token_ids=[])
    for row, ids in zip(out, prompts, strict=True):
        assert torch.equal(row[20:], greedy(recurrent_target, ids, 30))
    if op_by_op:
        assert generator.graph_reason == ""
        with no_host_reads():
            generator.step()


@pytest.mark.parametrize(("batch", "drafts"), [(1, True), (3, True), (2, False)])
def test_the_recorded_step_writes_the_greedy_text(target, batch, drafts, monkeypatch):
    draft = make_draft(target) if drafts else None
    generator = record(dflash.Generator(target, draft, max_length=80, batch_size=batch, block_size=16))
    assert not generator.fused_reason
    monkeypatch.setattr(decoder, "ops", OpByOp(ops))
    prompts = torch.stack([prompt(20, seed) for seed in range(batch)])
    out = generator.generate(prompts, max_new_tokens=40, temperature=0.0, stop_token_ids=[])
    for row, ids in zip(out, prompts, strict=True):
        assert torch.equal(row[20:], greedy(target, ids, 40))
    assert generator.graph_reason == ""
    assert generator.runner.device.steps["replayed"] > 4
    with no_host_reads():
        generator.step()


class TestArgument:
    def test_the_text_is_the_same_with_and_without(self, target):
        draft, ids = make_draft(target), prompt(20)[None]
        generators = [dflash.Generator(target, draft, max_length=80, fused=asked) for asked in (True, False, "auto")]
        answers = [generator.generate(ids, max_new_tokens=30, temperature=0.0) for generator in generators]
        assert all(torch.equal(answer, answers[0]) for answer in answers)
        assert [not generator.fused_reason for generator in generators] == [True, False, True]

    @pytest.mark.parametrize(("status", "options", "reason"), [
        ("", {}, ""),
        ("", {"head_dim": 20}, ""),  # attention is the same kernel either way
        ("no kernel image is available", {}, "our CUDA kernels cannot run: no kernel image is available"),
        ("", {"dtype": torch.float32}, "our kernels for cuda do not multiply in torch.float32"),
        ("", {"intermediate_size": 60}, "our CUDA kernels need products over multiples of 8, and weights at"),
    ])  # fmt: skip
    def test_auto_on_a_gpu_means_the_ops_where_their_kernels_run(self, status, options, reason, monkeypatch):
        gpu = torch.device("cuda", 0)
        monkeypatch.setattr(fused, "kernel_obstacle", lambda device, *rest: kernel_obstacle(gpu, *rest))
        monkeypatch.setattr(ops, "cuda_status", lambda _: status)
        model = make_target("qwen3", **{"dtype": torch.bfloat16, "num_hidden_layers": 2, **options})
        auto = Target(model)
        assert bool(auto.fused_reason) == bool(reason)
        assert auto.fused_reason.startswith(reason)
        assert not Target(model, fused=True).fused_reason
        assert Target(model, fused=False).fused_reason

    @pytest.mark.parametrize(("family", "asked", "reason"), [
        ("qwen3", False, "fused=False was asked for"),
        ("gemma2", "auto", "Gemma2ForCausalLM is not one of the models that are recognized, or it was changed"),
    ])  # fmt: skip
    def test_a_generator_says_why_it_runs_the_modules(self, family, asked, reason):
        assert dflash.Generator(make_target(family), max_length=40, fused=asked).fused_reason == reason

    def test_true_refuses_a_target_that_is_not_recognized(self):
        other = make_target("gemma2")
        with pytest.raises(UnsupportedTargetError, match=r"fused=True needs exactly a Llama, .* got Gemma2ForCausalLM"):
            dflash.Generator(other, max_length=40, fused=True)
        dflash.Generator(other, max_length=40)

    def test_other_values_are_refused(self, target):
        with pytest.raises(ValueError, match="fused must be True, False or \"auto\", got 'yes'"):
            dflash.Generator(target, max_length=40, fused="yes")

"""Targets with experts: on the op where it computes what transformers would, with its own functions elsewhere."""

import pytest
import torch
from baseline import prompt
from families import make_target
from rollback import BLOCK, play, run_prompts
from torch import nn
from transformers.activations import ACT2FN

from dflash import ops
from dflash.targets import Target, fused
from dflash.targets.fused import kernel_obstacle

FAMILIES = [
    *("qwen3_moe", "gpt_oss", "gemma4 (experts)", "glm4_moe", "deepseek_v3", "kimi_k25", "minimax_m2", "qwen3_5_moe"),
    *("qwen3_next", "kimi_linear", "bailing_hybrid", "granitemoehybrid", "lfm2_moe"),
]
LENGTHS = (1, 17, 60)


class Counted:
    """The functions of ``dflash.ops``, and how often `experts` was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name):
        return getattr(ops, name)

    def experts(self, *arguments):
        self.calls += 1
        return ops.experts(*arguments)


@pytest.fixture
def counted(monkeypatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(fused, "ops", counted)
    return counted


@torch.no_grad()
def block_logits(target: Target) -> torch.Tensor:
    """Logits of a block after a prompt."""
    cache = target.new_cache(1, 64, BLOCK)
    run_prompts(target, cache, [prompt(9)], 16)
    return target.forward(prompt(BLOCK, seed=1)[None], torch.tensor([9]), cache)[0]


def experts_of(model) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_runs_on_the_op_and_has_the_models_own_logits(family, counted):
    model = make_target(family)
    own = block_logits(Target(model, fused=False))
    assert counted.calls == 0
    target = Target(model)
    counted.calls = 0
    ours = block_logits(target)
    assert counted.calls == 2 * len(experts_of(model)) > 0
    torch.testing.assert_close(ours, own, rtol=0, atol=1e-3)


def test_a_chunk_of_many_rows_runs_transformers_function(counted):
    target = Target(make_target("qwen3_moe"))
    counted.calls = 0
    with torch.no_grad():
        target.forward(prompt(257)[None], torch.tensor([0]), target.new_cache(1, 300, BLOCK))
    assert counted.calls == 0


class Squared(nn.Module):
    def forward(self, x):
        return x * x


def choose_eager(model):
    model.set_experts_implementation("eager")


def change_the_activation(model):
    for module in experts_of(model):
        module.act_fn = Squared()


def take_another_activation(model):
    for module in experts_of(model):
        module.act_fn = ACT2FN["relu"]


def hook(model):
    for module in experts_of(model):
        module.register_forward_hook(lambda *_: None)


def split_the_experts(model):
    for module in experts_of(model):
        module._is_expert_parallel = True


def add_a_weight(model):
    for module in experts_of(model):
        module.adapter = nn.Linear(2, 2)


def gate_on_its_own(model):
    for module in experts_of(model):
        gate = module._apply_gate
        module._apply_gate = lambda both, gate=gate: gate(both) / 2


CHANGES = [
    *(choose_eager, change_the_activation, take_another_activation, hook, split_the_experts, add_a_weight),
    gate_on_its_own,
]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_experts_that_compute_something_else_keep_their_own_functions(change, counted):
    model = make_target("glm4_moe")
    change(model)
    own = block_logits(Target(model, fused=False))
    target = Target(model)
    counted.calls = 0
    assert torch.equal(block_logits(target), own)
    assert counted.calls == 0


@pytest.mark.parametrize(
    ("reason", "width", "offset", "runs"),
    [("", 16, 0, True), ("no kernels", 16, 0, False), ("", 12, 0, False), ("", 16, 1, False)],
)
def test_on_a_gpu_experts_need_the_kernels(monkeypatch, reason, width, offset, runs):
    """The op would run its twin there, which copies the weights of each row's experts."""
    monkeypatch.setattr(ops, "cuda_status", lambda _: reason)
    numbers = torch.empty(offset + 4 * 3 * width * 16, dtype=torch.bfloat16)[offset:]
    gate_up, down = numbers.split([4 * 2 * width * 16, 4 * width * 16])
    weights = gate_up.view(4, 2 * width, 16), down.view(4, 16, width)
    assert (kernel_obstacle(torch.device("cuda", 0), weights, (16, width)) == "") is runs


def test_the_users_model_keeps_its_classes():
    model = make_target("gpt_oss")
    before = [type(module) for module in model.modules()]
    Target(model)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("kimi_k25", "bailing_hybrid")])
def test_bf16_logits_do_not_depend_on_what_is_accepted(family, counted):
    target = Target(make_target(family, dtype=torch.bfloat16))
    prompts = [prompt(length) for length in LENGTHS]
    one = play(target, prompts, 16)
    assert counted.calls > 0
    for seed in (1, 2):
        played = play(target, prompts, 16, seed, one.tokens)
        assert played.steps < one.steps / 2
        assert all(map(torch.equal, played.logits, one.logits))

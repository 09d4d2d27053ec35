"""The emulation of CUDA itself: right kernels give right answers in every order, and each planted fault shows."""

import math
import os
import subprocess
import sys

import pytest
import torch
from op_checks import Emulated
from trees import choices_along, random_tree

from dflash import ops

SEEDS = range(8)
REVERSED = torch.arange(1.0, 65).flip(0)
LANES = torch.arange(64).view(2, 32)
WANTED = {
    "missing_barrier": REVERSED, "missing_second_barrier": REVERSED,
    "missing_syncwarp": torch.arange(1.0, 65)[LANES.flip(1)].flatten(),
    "copy_without_wait": torch.arange(1.0, 129).view(2, 64).flip(1).flatten(),
    "copy_without_barrier": torch.arange(1.0, 129).view(2, 64).flip(1).flatten(),
    "copy_of_a_later_group": torch.arange(1.0, 129).view(2, 64).flip(1).flatten(),
    "copy_of_a_changing_source": torch.arange(1.0, 65),
    "unwritten_shared": torch.arange(1.0, 65) * (torch.arange(64) % 8 != 0), "early_read": torch.arange(3.0, 67),
    "early_read_of_stores": torch.arange(3.0, 67), "early_read_of_atomics": torch.arange(3.0, 67),
    "early_store": torch.full((64,), 5.0), "early_end": torch.arange(3.0, 67),
    "read_two_kernels_ahead": torch.arange(3.0, 67), "overwritten_slot": torch.tensor([-5.0, *range(2, 64), 0.0]),
    "no_atomic": torch.tensor([*range(1, 61), 1830, 62, 63, 0.0]),
    "no_fence_ahead": torch.tensor([*range(1, 61), 1830, 62, 63, 0.0]),
    "no_fence_after": torch.tensor([*range(1, 61), 1830, 62, 63, 0.0]),
}  # fmt: skip
# No order of blocks on a CPU makes the answer wrong
UNSEEN_BY_SANITIZERS = ["no_fence_ahead", "no_fence_after", "early_read_of_stores", "early_read_of_atomics"]
SHOWN = [
    *WANTED, "unwritten_register", "divergent_barrier", "lane_left", "lane_outside", "misaligned_load",
    "past_dynamic_shared",
]  # fmt: skip


def run(emulation, name, fault, seed):
    """Return whether the case's answer is right, and the answer; RuntimeError where the emulation refuses to go on."""
    wanted = WANTED.get(name, torch.arange(1.0, 65))
    x, out = torch.arange(1.0, len(wanted) + 1), torch.full((len(wanted),), -7.0)
    emulation.seed(seed)
    emulation.self_test(name, fault, x.data_ptr(), out.data_ptr())
    emulation.synchronize()
    return torch.equal(out, wanted), out


@pytest.mark.parametrize("name", [*SHOWN, "past_static_shared", "past_global", "collectives"])
def test_right_kernels_give_the_right_answer(emulation, name):
    assert all(run(emulation, name, False, seed)[0] for seed in SEEDS)


@pytest.mark.parametrize("name", SHOWN)
def test_a_planted_fault_shows(emulation, name):
    if name == "past_dynamic_shared" and emulation.sanitized():
        pytest.skip("ends the process: see the next test")
    if name in UNSEEN_BY_SANITIZERS and not emulation.watched():
        pytest.skip("accesses are not watched in this build")
    shown = 0
    for seed in SEEDS:
        try:
            shown += not run(emulation, name, True, seed)[0]
        except RuntimeError as error:
            assert "emulation: " in str(error)  # noqa: PT017
            shown += 1
    assert shown >= len(SEEDS) / 2  # in about every order, not by luck


@pytest.mark.parametrize("name", ["past_static_shared", "past_global", "past_dynamic_shared"])
def test_the_sanitizers_see_an_access_past_the_end(emulation, name):
    if not emulation.sanitized():
        pytest.skip("only with DFLASH_EMULATION=sanitize")
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); import build; e = build.load(True)\n"
        "x, out = torch.ones(64), torch.ones(64)\n"
        "e.self_test(sys.argv[2], True, x.data_ptr(), out.data_ptr()); e.synchronize()"
    )
    command = [sys.executable, "-c", code, os.path.join(os.path.dirname(__file__), "cuda_emulation"), name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "AddressSanitizer: " in done.stderr or "runtime error: index 64 out of bounds" in done.stderr
    assert "self_test.cu" in done.stderr


def test_blocks_that_share_a_sum_need_their_fences(emulation):
    if not emulation.watched():
        pytest.skip("accesses are not watched in this build")
    kernels, g = Emulated(emulation), torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 520, generator=g).bfloat16() for rows in (16, 136))
    want = kernels.linear(x, weight)
    emulation.ignore_fences(True)
    try:
        with pytest.raises(RuntimeError, match="no fence, atomic and fence stand between"):
            Emulated(emulation).linear(x, weight)  # its counters stay where they are
    finally:
        emulation.ignore_fences(False)
    assert torch.equal(kernels.linear(x, weight), want)


def test_the_last_block_sees_what_the_others_stored(emulation):
    x, partial, counter, out = torch.arange(1.0, 5), torch.zeros(4), torch.zeros(1, dtype=torch.int32), torch.zeros(64)
    for fault in (False, True):
        for repeat in range(3):
            out.fill_(-7)
            emulation.last_block(fault, x.data_ptr(), partial.data_ptr(), counter.data_ptr(), out.data_ptr())
            emulation.synchronize()
            # A counter that is not put back shows on the second launch.
            assert out.eq(10).all() == (not fault or repeat == 0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensor_core_layouts(emulation, dtype, transposed):
    a, b = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype)
    stored, out = (b if transposed else b.t().contiguous()), torch.zeros(16, 8)
    addresses = (a.data_ptr(), stored.data_ptr(), out.data_ptr())
    emulation.tensor_core(dtype == torch.float16, *addresses, transposed)
    emulation.synchronize()
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_kernels_may_start_before_the_one_ahead_has_run(emulation, seed):
    """A chain through every kind of small kernel: none reads what the one ahead writes before its wait."""
    on, g = Emulated(emulation), torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 2, 3, 64, generator=g)
    weight, positions = torch.ones(64), torch.tensor([[3, 4, 5], [0, 7, 2]])
    lengths, cos, sin = torch.tensor([3, 0]), torch.ones(9, 4), torch.zeros(9, 4)
    settings = (torch.tensor([1, 2]), torch.ones(2), torch.tensor([0, 3]), torch.ones(2), torch.zeros(2), torch.ones(2))
    block, stops, limits = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[99], [98]]), torch.tensor([20, 20])

    def chain():
        q_out, sums = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 64)
        caches = [torch.zeros(2, 2, 9, 8) for _ in range(4)]
        state = [torch.zeros(2, 30, dtype=torch.int64), torch.tensor([3, 4]), *torch.zeros(2, 2, dtype=torch.int64)]
        a = on.rms_norm(x, weight, 1e-6)
        b, total = on.add_rms_norm(a, residual, weight, 1e-6, sums)
        on.qkv_norm_rope_append_(b, lengths, None, None, cos, sin, None, None, 1e-6, q_out, *caches[:2])
        on.append_kv_(q_out.transpose(1, 2)[:, :2], q_out.transpose(1, 2)[:, 2:], positions, *caches[2:])
        c = on.silu_mul(q_out.view(2, 3, 32))
        ids = on.select_tokens(c, state[1], *settings)
        on.accept_prefix_(block, ids, stops, limits, *state)
        return a, b, total, c, ids, q_out, *caches, sums, *state

    assert on.check_overlapping(chain, seed)[4].unique().numel() > 1


@pytest.mark.parametrize("seed", range(3))
def test_the_kernels_of_a_trees_candidates_may_start_early(emulation, seed):
    on, g = Emulated(emulation), torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 600, generator=g), torch.randn(2, 3, 80, generator=g)
    codebooks, positions = torch.randn(2, 300, 40, generator=g), torch.tensor([[3, 4, 5], [0, 7, 2]])
    row, anchor, sharpness = torch.tensor([1, 2]), torch.tensor([8, 9]), torch.tensor([math.inf, 1.0])
    one, temperature = torch.ones(2), torch.tensor([0.0, 1.0])  # all outlive the launches, which run late
    settings = positions, row, one, row * 0, one, one * 0, sharpness

    def build():
        logits = on.silu_mul(x)
        ids, scores = on.tree_candidates(logits, positions, row, temperature, 8)
        return logits, ids, scores, *on.build_tree(anchor, ids, scores, 20)

    def walk():
        logits, hidden = on.silu_mul(x), on.silu_mul(y)
        ids, values = on.top_candidates(logits, positions, row, one, sharpness, 8)
        walked = on.walk_candidates(hidden, *codebooks, anchor, ids, values, *settings)
        return logits, ids, values, *walked, hidden

    def link():
        logits, hidden = on.silu_mul(x), on.silu_mul(y)
        ids, scores = on.tree_candidates(logits, positions, row, temperature, 8)
        links, order = on.link_candidates(hidden, *codebooks, anchor, ids, scores)
        return logits, ids, scores, *on.build_tree(anchor, ids, links, 20, order), links, order, hidden

    assert on.check_overlapping(build, seed)[3].unique().numel() > 10
    assert on.check_overlapping(link, seed)[3].unique().numel() > 10
    assert on.check_overlapping(walk, seed)[3].unique().numel() > 4


@pytest.mark.parametrize("seed", range(4))
def test_the_kernels_that_commit_a_tree_may_start_early(emulation, seed):
    """Choice, walk, compaction, gather: each reads what the one ahead of it writes."""
    emulated, g = Emulated(emulation), torch.Generator().manual_seed(seed)
    batch, rows, path_rows = 3, 40, 8
    tree = random_tree(g, batch, rows, path_rows)
    choices, paths = choices_along(g, tree)
    logits, zero = torch.nn.functional.one_hot(choices, 64).float(), torch.zeros(batch, dtype=torch.int64)
    settings = zero, zero.float(), zero, torch.ones(batch), torch.zeros(batch), torch.ones(batch)
    first, features = torch.tensor([3, 0, 7]), torch.randn(batch, rows, 24, generator=g)
    stops, limits = torch.full((batch, 1), 999), torch.full((batch,), 99)
    positions = torch.arange(rows).repeat(batch, 1)
    caches = [torch.randn(batch, 2, 60, 8, generator=g) for _ in range(4)]

    def run(on=emulated):
        state = [torch.zeros(batch, 99, dtype=torch.int64), first.clone(), *torch.zeros(2, batch, dtype=torch.int64)]
        chain, moved = [torch.full((batch, path_rows), -7) for _ in range(3)], [cache.clone() for cache in caches]
        gathered = torch.zeros(batch, path_rows, 24)
        chosen = on.select_tokens(logits, positions, *settings)
        on.accept_path_(tree.ids, tree.parents, chosen, stops, limits, *state, *chain)
        on.compact_kv_(chain[0], state[2], first, moved[:2], moved[2:])
        on.gather_rows_(features, chain[0], gathered)
        return chosen, *state, *chain, *moved, gathered

    want = emulated.check_overlapping(run, seed)
    assert all(torch.equal(a, b) for a, b in zip(want, run(ops), strict=True))
    kept = [row[:count] for row, count in zip(want[5].tolist(), want[3].tolist(), strict=True)]
    assert kept == [path[:path_rows] for path in paths]
    assert not torch.equal(want[8], caches[0])

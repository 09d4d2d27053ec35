import math

import pytest
import torch
from op_checks import same
from test_select_tokens import draw_case as draw_rows
from test_select_tokens import parameters
from test_tree_candidates import best_anywhere

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

INFINITY = math.inf


def draw_case(seed, vocab, batch=12, rows=2, sharpness=(INFINITY, 2.0, 1.0)):
    """Logits (ties, infinities and NaN among them), positions, seeds, temperatures and sharpness."""
    logits, positions, seeds, temperature, *_ = draw_rows(seed, vocab, batch, rows)
    return logits, positions, seeds, temperature, torch.tensor(sharpness)[torch.arange(batch) % len(sharpness)]


def plain(batch):
    """The sharpness of candidates without noise."""
    return torch.full((batch,), INFINITY)


def assert_equal(have, want):
    assert same(have, want)


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 113, 1025])
def test_kernel_equals_twin(vocab, dtype, kernels):
    for seed in range(6):
        sharpness = (INFINITY, 2.0, 1.0, 0.0, math.nan, -1.0, 0.5, 1e30)
        logits, *rest = draw_case(seed, vocab, *((4, 1) if vocab > 1000 else (8, 2)), sharpness[seed % 2 * 4 :])
        logits, count = logits.to(dtype), (1, 4, 16, 128)[seed % 4]
        assert_equal(kernels.top_candidates(logits, *rest, count), reference.top_candidates(logits, *rest, count))


def test_kernel_equals_twin_on_a_full_vocabulary(kernels):
    logits = torch.randn(2, 1, 151936, generator=torch.Generator().manual_seed(1)) * 3
    rest = torch.tensor([[5], [2**33]]), torch.tensor([1, -2]), torch.tensor([1.0, 0.7]), torch.ones(2)
    for x in (logits, logits.bfloat16()):
        for sharpness in (plain(2), rest[-1]):
            case = x, *rest[:-1], sharpness, 16
            assert_equal(kernels.top_candidates(*case), reference.top_candidates(*case))


def test_plain_candidates_are_the_largest_logits_and_ties_go_to_the_lower_id(implementation):
    logits, positions, seeds, temperature, _ = draw_case(1, 300)  # rounded: many ties
    ids, values = implementation.top_candidates(logits, positions, seeds, temperature, plain(12), 16)
    order = logits.double() - torch.arange(300).double() * 1e-9
    want = order.topk(16, -1).indices
    assert torch.equal(ids, want)
    assert torch.equal(values, logits.gather(-1, want))


def test_a_temperature_of_zero_gives_plain_candidates_at_every_sharpness(implementation):
    logits, positions, seeds, _, sharpness = draw_case(0, 200)
    cold = implementation.top_candidates(logits, positions, seeds, torch.zeros(12), sharpness, 5)
    assert_equal(cold, implementation.top_candidates(logits, positions, seeds, torch.ones(12), plain(12), 5))


def test_the_first_candidate_is_the_token_that_select_tokens_chooses(kernels):
    logits, positions, seeds, temperature, sharpness = draw_case(0, 500)
    ids, _ = kernels.top_candidates(logits, positions, seeds, temperature, sharpness, 8)
    settings = parameters(12, seeds, temperature, sharpness=sharpness)
    assert torch.equal(ids[..., 0], ops.select_tokens(logits, positions, *settings))


def test_the_best_tokens_may_lie_anywhere(kernels):
    logits, (_, positions, seeds, _, _) = best_anywhere(), draw_case(0, 10, 4, 1)
    for sharpness in (1.0, INFINITY):
        rest = positions, seeds, torch.ones(4), torch.full((4,), sharpness)
        for count in (3, 128):
            assert_equal(kernels.top_candidates(logits, *rest, count), reference.top_candidates(logits, *rest, count))


def test_tokens_of_minus_infinity_are_no_candidates(implementation):
    logits, *rest = draw_case(0, 150, 4, 1)
    logits[..., 3:] = -INFINITY
    logits[0] = -INFINITY
    ids, values = implementation.top_candidates(logits, *rest, 8)
    assert (ids[0] == -1).all()
    assert torch.equal(ids[1:, ..., :3].sort(-1).values, torch.arange(3).expand(3, 1, 3))
    assert (ids[..., 3:] == -1).all()
    assert torch.equal(values == -INFINITY, ids < 0)

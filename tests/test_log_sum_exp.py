import math

import pytest
import torch
from op_checks import assert_as_exact_as_torch

from dflash.ops import reference

pytestmark = pytest.mark.op

INFINITY = math.inf


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (1, 2, 64), (2, 3, 1001), (2, 151936)], ids=str)
def test_against_float64(shape, dtype, kernels):
    logits = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    exact = logits.double().logsumexp(-1)
    assert_as_exact_as_torch(kernels.log_sum_exp(logits), reference.log_sum_exp(logits), exact)


def test_a_row_depends_on_itself_only(dtype, kernels):
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = kernels.log_sum_exp(logits)
    logits[1::2, 5] = math.nan
    found = kernels.log_sum_exp(logits)
    assert torch.equal(found[::2], whole[::2])
    assert found[1::2].isnan().all()
    assert torch.equal(kernels.log_sum_exp(logits[4:5]), whole[4:5])


@pytest.mark.parametrize("width", [1, 40, 70])
def test_logits_without_bounds(width, implementation):
    rows = torch.tensor([-INFINITY, 0.0, 3e38, INFINITY])[:, None].repeat(1, width)
    rows[1, 1:] = -INFINITY
    want = torch.tensor([-INFINITY, 0.0, 3e38, INFINITY])
    torch.testing.assert_close(implementation.log_sum_exp(rows), want)

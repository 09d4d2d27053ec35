import math

import pytest
import torch
from op_checks import assert_as_exact_as_torch

from dflash.ops import reference

pytestmark = pytest.mark.op
SHAPES = [(1, 1, 1, 1), (2, 4, 24, 20), (3, 3, 128, 128), (4, 8, 17, 33)]  # key_heads, heads, key_dim, value_dim


def draw(shape, dtype, batch=2, rows=5):
    """The arguments of `delta_net_inputs`; b and a are columns of one product."""
    key_heads, heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*size, scale=1.0):
        return (torch.randn(size, generator=generator) * scale).to(dtype)

    qkv = normal(batch, rows, 2 * key_heads * key_dim + heads * value_dim, scale=2.0)
    b, a = normal(batch, rows, 2 * heads + 1, scale=4.0)[..., : 2 * heads].chunk(2, -1)
    return qkv, b, a, normal(heads), normal(heads), key_heads, key_dim


def by_hand(qkv, b, a, a_log, dt_bias, key_heads, key_dim):
    """The same, one row and head at a time, in float64."""
    heads, value_dim = a_log.numel(), (qkv.shape[-1] - 2 * key_heads * key_dim) // a_log.numel()
    (q, k, v, log_decay, beta) = results = [
        torch.zeros(*qkv.shape[:2], *size, dtype=torch.float64)
        for size in ((key_heads, key_dim), (key_heads, key_dim), (heads, value_dim), (heads,), (heads,))
    ]
    for at in ((i, j) for i in range(qkv.shape[0]) for j in range(qkv.shape[1])):
        row = qkv[at].double()
        for h in range(key_heads):
            for out, first, scale in ((q, 0, key_dim**-0.5), (k, key_heads * key_dim, 1.0)):
                head = row[first + h * key_dim :][:key_dim]
                out[at][h] = head / math.sqrt(float(head @ head) + 1e-6) * scale
        v[at] = row[2 * key_heads * key_dim :].view(heads, value_dim)
        for h in range(heads):
            x = float(a[at][h]) + float(dt_bias[h])
            log_decay[at][h] = -math.exp(float(a_log[h])) * math.log1p(math.exp(x))
            beta[at][h] = 1 / (1 + math.exp(-float(b[at][h])))
    results[4] = beta.to(b.dtype).double()
    return results


@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_against_float64(shape, dtype, kernels):
    arguments = draw(shape, dtype)
    ours, twin = kernels.delta_net_inputs(*arguments), reference.delta_net_inputs(*arguments)
    for o, t, e in zip(ours, twin, by_hand(*arguments), strict=True):
        assert o.dtype == torch.float32
        if o.shape == arguments[1].shape and dtype != torch.float32:  # beta may fall the other way in a tie
            torch.testing.assert_close(o.double(), e, rtol=2 * torch.finfo(dtype).eps, atol=0)
        else:
            assert_as_exact_as_torch(o, t, e)


def test_a_row_of_inputs_does_not_depend_on_its_neighbours(kernels):
    arguments = draw(SHAPES[1], torch.bfloat16)
    one = [x[:, 3:4] for x in arguments[:3]]
    for whole, alone in zip(
        kernels.delta_net_inputs(*arguments), kernels.delta_net_inputs(*one, *arguments[3:]), strict=True
    ):
        assert torch.equal(whole[:, 3:4], alone)


def test_extreme_gates_are_finite(kernels):
    qkv, _, _, _, _, *sizes = draw(SHAPES[1], torch.float32, 1, 4)
    gates = torch.tensor([-1e4, -100.0, 100.0, 1e4])[None, :, None].expand(1, 4, 4)
    zeros = torch.zeros(4)
    *_, log_decay, beta = kernels.delta_net_inputs(qkv, gates, gates, zeros, zeros, *sizes)
    torch.testing.assert_close(log_decay, -torch.nn.functional.softplus(gates), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(beta, torch.sigmoid(gates), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("heads", "width"), [(1, 1), (4, 20), (3, 128), (2, 113)])
def test_gated_norm_against_float64(heads, width, dtype, kernels):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, heads, width, generator=generator) * 3
    z = (torch.randn(2, 5, heads * width + 3, generator=generator) * 3).to(dtype)[..., 3:]
    weight = torch.randn(width, generator=generator).to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    exact = (exact * torch.nn.functional.silu(z.double().view(x.shape))).flatten(2)
    out = kernels.gated_rms_norm(x, z, weight, 1e-6)
    assert_as_exact_as_torch(out, reference.gated_rms_norm(x, z, weight, 1e-6), exact)
    assert torch.equal(kernels.gated_rms_norm(x[:, 2:3], z[:, 2:3], weight, 1e-6), out[:, 2:3])

"""Up to 128 rows in a block: a row has the bits that it has alone, whatever its place."""

import pytest
import torch

pytestmark = pytest.mark.op

ROWS, ALONE = 128, (0, 15, 16, 63, 64, 127)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_norms_and_activations(dtype, kernels):
    x, residual, weight = (
        randn(1, ROWS, 136, dtype=dtype),
        randn(1, ROWS, 136, dtype=dtype, seed=1),
        randn(136, dtype=dtype),
    )
    out, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    normed, activated = kernels.rms_norm(x, weight, 1e-6), kernels.silu_mul(x)
    for row in ALONE:
        one = x[:, row : row + 1], residual[:, row : row + 1]
        for have, want in zip(kernels.add_rms_norm(*one, weight, 1e-6), (out, total), strict=True):
            assert torch.equal(have[:, 0], want[:, row])
        assert torch.equal(kernels.rms_norm(one[0], weight, 1e-6)[:, 0], normed[:, row])
        assert torch.equal(kernels.silu_mul(one[0])[:, 0], activated[:, row])


def test_heads_go_to_their_slots_at_the_angles_of_their_depths(dtype, kernels):
    """Rows of one depth share their angles and have slots of their own."""
    depth = torch.randint(0, 16, (1, ROWS), generator=torch.Generator().manual_seed(2))
    angles = torch.arange(ROWS + 9)[:, None] * torch.rand(8)
    qkv, weights = randn(1, ROWS, 6 * 16, dtype=dtype), [randn(16, dtype=dtype, seed=seed) for seed in (3, 4)]

    def run(qkv, length, depth):
        q_out = qkv.new_zeros(1, qkv.shape[1], 2, 16)
        caches = [qkv.new_zeros(1, 2, ROWS + 9, 16) for _ in "kv"]
        given = torch.tensor([length]), None, depth, angles.cos(), angles.sin()
        kernels.qkv_norm_rope_append_(qkv, *given, *weights, 1e-6, q_out, *caches)
        return q_out, *caches

    q_out, k_cache, v_cache = run(qkv, 7, depth)
    assert torch.equal(v_cache[0, :, 7 : 7 + ROWS].transpose(0, 1), qkv[0].view(ROWS, 6, 16)[:, 4:])
    assert k_cache[0, :, [*range(7), ROWS + 7, ROWS + 8]].eq(0).all()
    for row in ALONE:
        position = 7 + int(depth[0, row])
        q_alone, k_alone, _ = run(qkv[:, row : row + 1], position, None)
        assert torch.equal(q_alone[0, 0], q_out[0, row])
        assert torch.equal(k_alone[0, :, position], k_cache[0, :, 7 + row])


def test_choices_take_the_noise_of_given_positions(dtype, kernels):
    """Rows of one position and equal logits choose alike; of other positions, or of other logits, as they do alone."""
    logits = randn(1, ROWS, 300, dtype=dtype)
    positions = torch.randint(20, 36, (1, ROWS), generator=torch.Generator().manual_seed(5))
    logits[0, 90], positions[0, 90] = logits[0, 3], positions[0, 3]
    settings = [torch.tensor([value]) for value in (11, 1.0, 0, 1.0, 0.0, 1.0)]
    ids = kernels.select_tokens(logits, positions, *settings)
    assert ids[0, 90] == ids[0, 3]
    assert ids.unique().numel() > ROWS // 3
    for row in ALONE:
        assert kernels.select_tokens(logits[:, row : row + 1], positions[:, row : row + 1], *settings) == ids[0, row]

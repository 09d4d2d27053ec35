import pytest
import torch

pytestmark = pytest.mark.op

NAN = float("nan")


def draw(batch, heads, rows, dims, dtype, capacity=200):
    generator = torch.Generator().manual_seed(rows)
    key, value = (torch.randn(batch, heads, rows, dim, generator=generator).to(dtype) for dim in dims)
    positions = torch.stack([torch.randperm(capacity, generator=generator)[:rows] for _ in range(batch)])
    caches = [torch.full((batch, heads, capacity, dim), NAN, dtype=dtype) for dim in dims]
    return key, value, positions, *caches


def expected(new, positions, cache):
    cache = cache.clone()
    for b in range(new.shape[0]):
        for row, position in enumerate(positions[b].tolist()):
            if 0 <= position < cache.shape[2]:
                cache[b, :, position] = new[b, :, row]
    return cache


def assert_same(cache, want):
    assert torch.equal(cache.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(cache.isnan(), want.isnan())


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 113])
def test_every_row_goes_to_its_slot_and_nowhere_else(rows, implementation, dtype):
    for batch, heads, dims in ((1, 1, (64, 64)), (3, 2, (24, 16)), (2, 8, (5, 7))):
        key, value, positions, k_cache, v_cache = draw(batch, heads, rows, dims, dtype)
        positions[0, ::3] = -1
        positions[-1, 1::3] = 200
        want_k, want_v = expected(key, positions, k_cache), expected(value, positions, v_cache)
        implementation.append_kv_(key, value, positions, k_cache, v_cache)
        assert_same(k_cache, want_k)
        assert_same(v_cache, want_v)


def test_strided_views(dtype, kernels):
    key, value, positions, k_cache, v_cache = draw(2, 3, 17, (24, 16), dtype)
    want_k, want_v = expected(key, positions, k_cache), expected(value, positions, v_cache)
    packed = torch.cat([key, value], -1).transpose(1, 2).contiguous().transpose(1, 2)
    columns = value.transpose(2, 3).contiguous().transpose(2, 3)
    for k, v in ((packed[..., :24], packed[..., 24:]), (key, columns)):
        assert not v.is_contiguous()
        out_k, out_v = k_cache.clone(), v_cache.clone()
        kernels.append_kv_(k, v, positions, out_k, out_v)
        assert_same(out_k, want_k)
        assert_same(out_v, want_v)

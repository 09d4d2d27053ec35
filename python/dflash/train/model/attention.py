"""Attention for all blocks of all sequences at once, in three implementations that give the same numbers.

Each implementation is a pair of functions: one builds the mask, the other attends. A block sees the context before its
anchor, and itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ATTENTIONS", "visible_keys"]


def visible_keys(anchors: Tensor, length: int, block_size: int, causal: bool, window: int) -> Tensor:
    """Return the keys that each slot of each block sees.

    Args:
        anchors: ``[batch, anchors]`` int64.
        length: number of context positions. A block does not see those at or past its anchor.
        block_size: slots per block, at ``anchor + k``.
        causal: True if a slot does not see later slots.
        window: keys that a slot sees on each side, itself included; 0 for all.

    Returns:
        ``[batch, anchors, block, length + block]`` bool, the block's own keys last.
    """
    slot = torch.arange(block_size, device=anchors.device)
    context = torch.arange(length, device=anchors.device)
    start = anchors[..., None, None]
    query = anchors[..., None] + slot
    before = (context < start).expand(-1, -1, block_size, -1)
    inside = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    if causal:
        inside = inside.tril()
    if window:
        before = before & (query[..., None] - context < window)
        inside = inside & ((slot[:, None] - slot).abs() < window)
    return torch.cat([before, inside.expand(*anchors.shape, -1, -1)], -1)


def _sdpa_mask(anchors: Tensor, length: int, block: int, causal: bool, window: int, group: int) -> Tensor:
    """Return ``[batch * anchors, 1, group * block (or 1), length + block]`` bool, True where a key is seen."""
    visible = visible_keys(anchors, length, block, causal, window).flatten(0, 1)
    if not causal and not window:
        return visible[:, None, :1]  # every slot sees the same keys
    return visible.repeat(1, group, 1)[:, None]


def _sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: Tensor, count: int
) -> Tensor:
    """Attend with one batch row per block: a copy of its sequence's keys, then its own. Grouped heads become rows.

    One mask over the keys of all blocks would make the block part ``count`` times as large. The copies only cost memory
    traffic.
    """
    batch, rows, heads, dim = q.shape
    kv_heads, block = k.shape[2], rows // count

    def keys(before: Tensor, own: Tensor) -> Tensor:
        before = before.transpose(1, 2)[:, None].expand(-1, count, -1, -1, -1)
        own = own.unflatten(1, (count, block)).transpose(2, 3)
        return torch.cat([before, own], 3).flatten(0, 1)

    packed = q.view(batch * count, block, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = mask.expand(-1, -1, packed.shape[2], -1)
    out = F.scaled_dot_product_attention(packed, keys(context_k, k), keys(context_v, v), mask)
    out = out.unflatten(2, (heads // kv_heads, block)).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, heads, dim)


def _matmul_mask(anchors: Tensor, length: int, block: int, causal: bool, window: int, group: int) -> Tensor:
    """Return ``[batch, anchors * group * block, length + block]`` bool, True where a key is hidden."""
    visible = visible_keys(anchors, length, block, causal, window)
    return ~visible[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 3)


def _matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: Tensor, count: int
) -> Tensor:
    """Attend to the context with one product for all blocks, and to each block's own keys with a small product.

    The default on CPU: it copies no context keys and is faster than SDPA in a forward and backward pass
    (``python bench/bench_train_attention.py``), with the same numbers (tests/test_train_model.py).
    """
    batch, rows, heads, dim = q.shape
    kv_heads, length = k.shape[2], context_k.shape[1]
    group, block = heads // kv_heads, rows // count
    with torch.autocast(q.device.type, enabled=False):  # softmax is float32 inside for every dtype
        packed = q.view(batch, count, block, kv_heads, group, dim).permute(0, 3, 1, 4, 2, 5) * dim**-0.5
        packed = packed.reshape(batch * kv_heads, count * group * block, dim)
        context_k, context_v = (x.transpose(1, 2).flatten(0, 1) for x in (context_k, context_v))
        k, v = (x.unflatten(1, (count, block)).permute(0, 3, 1, 2, 4).flatten(0, 2) for x in (k, v))
        behind = packed @ context_k.transpose(1, 2)
        own = packed.view(batch * kv_heads * count, group * block, dim) @ k.transpose(1, 2)
        scores = torch.cat([behind, own.view(batch * kv_heads, -1, block)], -1)
        if kv_heads > 1:
            mask = mask.repeat_interleave(kv_heads, 0)
        weights = scores.masked_fill_(mask, float("-inf")).softmax(-1)
        behind, own = weights.split([length, block], -1)
        out = behind @ context_v
        out = out + (own.reshape(batch * kv_heads * count, group * block, block) @ v).view_as(out)
    out = out.view(batch, kv_heads, count, group, block, dim).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(batch, rows, heads, dim)


_TILE = 128  # rows and keys of FlexAttention's sparse blocks


def _flex_mask(anchors: Tensor, length: int, block: int, causal: bool, window: int, group: int):  # noqa: ARG001
    """Return the block mask over ``[context ; all blocks]`` of a sequence.

    The tiles follow from the anchors. ``create_block_mask`` would build a dense mask of rows times keys first.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def visible(b, h, row, key):  # noqa: ARG001
        own, other = row // block, key - length
        start = anchors[b, own]
        behind = key < length
        seen = (behind & (key < start)) | (~behind & (other // block == own))
        if causal or window:
            ahead = torch.where(behind, key, start + other % block) - start - row % block
            if causal:
                seen = seen & (ahead <= 0)
            if window:
                seen = seen & (ahead.abs() < window)
        return seen

    # 1. Find the first and last anchor of every tile of rows
    count, device = anchors.shape[1], anchors.device
    rows, keys = count * block, length + count * block
    spare = -rows % _TILE
    starts = anchors.repeat_interleave(block, 1)
    last = F.pad(starts, (0, spare), value=-1).unflatten(1, (-1, _TILE)).amax(-1)[..., None]
    first = F.pad(starts, (0, spare), value=keys).unflatten(1, (-1, _TILE)).amin(-1)[..., None]
    # 2. Find the key tiles that it sees: in the context, and in its own blocks
    row = torch.arange(0, rows, _TILE, device=device)[:, None]  # a tile's first row, and key
    key = torch.arange(0, keys, _TILE, device=device)
    behind = key < last.clamp(max=length)
    if window:
        behind = behind & (first - (key + _TILE - 1) < window)
    begin = length + row // block * block
    end = length + ((row + _TILE - 1).clamp(max=rows - 1) // block + 1) * block
    own = (key < end) & (key + _TILE > begin)
    # 3. Separate the tiles that it sees completely; they need no mask
    full = (key + _TILE <= first.clamp(max=length)) & (window == 0)
    tiles = [_tile_list(mask) for mask in ((behind | own) & ~full, full)]
    return BlockMask.from_kv_blocks(*tiles[0], *tiles[1], _TILE, visible, (rows, keys))


def _tile_list(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key tiles that each row tile sees, and all key tiles with the seen ones first.

    ``seen`` is ``[batch, row tiles, key tiles]``.
    """
    order = (~seen).byte().argsort(dim=-1, stable=True)
    return seen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


_compiled_flex = None


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask, count: int) -> Tensor:  # noqa: ARG001
    global _compiled_flex
    from torch.nn.attention.flex_attention import flex_attention

    if q.is_cuda and _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention, dynamic=True)
    run = _compiled_flex if q.is_cuda else flex_attention
    keys, values = torch.cat([context_k, k], 1).transpose(1, 2), torch.cat([context_v, v], 1).transpose(1, 2)
    return run(q.transpose(1, 2), keys, values, block_mask=mask, enable_gqa=True).transpose(1, 2)


ATTENTIONS = {
    "flex": (_flex_mask, _flex_attention),
    "sdpa": (_sdpa_mask, _sdpa_attention),
    "matmul": (_matmul_mask, _matmul_attention),
}

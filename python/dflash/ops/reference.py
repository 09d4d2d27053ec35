"""The ops of `dflash.ops` in plain torch: the oracle of the tests, and what runs on devices without a kernel.

Same names and arguments, whose types are those of the ops; any floating dtype; sums in at least fp32. `visible` is not
an op: attention here and the masks of targets share it. Nothing here depends on data: each twin runs under
``FakeTensorMode`` and inside a CUDA graph. Imports torch and the formats of weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .formats import DENSE, FORMATS, Blocks, PackedWeight, unpack


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(x, weight, eps, counts=None, zero_centered=False, front=None):
    """``x / sqrt(mean(x^2) + eps) * weight``, or ``1 + weight``; rows at or past ``counts`` are zero."""
    wide = x.to(_compute_dtype(x))
    weight = weight.to(wide.dtype)
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + weight if zero_centered else weight)
    if counts is not None:
        out = live_rows(out, counts)
    return _behind(front, out.to(x.dtype))


def _behind(front: Tensor | None, x: Tensor) -> Tensor:
    """``x`` with the rows of ``front`` before its own."""
    return x if front is None else torch.cat([front, x], 1)


def add_rms_norm(x, residual, weight, eps, tap=None, zero_centered=False, front=None):
    """``h = x + residual``; returns ``(rms_norm(h), h)`` and puts h in the tap."""
    total = x + residual
    if tap is not None:
        tap.copy_(total)
    return rms_norm(total, weight, eps, None, zero_centered, front), total


def dynamic_conv(x, base, dynamic, front=None):
    """``out[t] = sum of (base[i] + dynamic[t, i]) * x[t - i]`` over ``i <= t``; a weight of zero adds nothing."""
    rows, wide = x.shape[1], _compute_dtype(x)
    values, size = x.to(wide), x.shape[2] // dynamic.shape[3]
    weights = base.to(wide) + dynamic.to(wide).repeat_interleave(size, -1)
    # Adding zero of either sign to -0.0 gives that zero.
    total = torch.full(x.shape, -0.0, dtype=wide, device=x.device)
    for i in range(min(base.shape[0], rows)):
        weight, sums = weights[:, i:, i], total[:, i:]
        total[:, i:] = torch.where(weight == 0, sums, sums + weight * values[:, : rows - i])
    return _behind(front, total.to(x.dtype))


def conv_add_rms_norm(x, base, dynamic, residual, weight, eps, tap=None, zero_centered=False):
    """`dynamic_conv`, then `add_rms_norm`."""
    return add_rms_norm(dynamic_conv(x, base, dynamic), residual, weight, eps, tap, zero_centered)


def draft_rows(tokens, length, drafts, table, mask_id, num_drafts, rows, mask_embedding=None, scale=1.0):
    """The scaled embeddings of the anchor and the drafts or masks, the anchors, and the positions of the drafts."""
    at = length.clamp(0, tokens.shape[1] - 1)[:, None]
    anchor = tokens.gather(1, at)
    drafts = torch.full_like(anchor, mask_id).expand(-1, num_drafts) if drafts is None else drafts
    ids = torch.cat([anchor, drafts], 1)[:, :rows]
    embeds = table[ids.clamp(0, table.shape[0] - 1)]
    if mask_embedding is not None:
        embeds = torch.where((ids == mask_id)[..., None], mask_embedding, embeds)
    positions = at + torch.arange(1, num_drafts + 1, device=at.device)
    return (embeds.to(_compute_dtype(embeds)) * scale).to(embeds.dtype), anchor[:, 0].clone(), positions


def silu_mul(gate_up, gate="silu"):
    """``silu(gate) * up`` for ``gate_up = [gate, up]`` side by side; with gelu if ``gate`` is "gelu_tanh"."""
    first, up = gate_up.to(_compute_dtype(gate_up)).chunk(2, -1)
    return _gated(first, up, gate, 0.0, 0.0).to(gate_up.dtype)


def sigmoid_mul(x, gate):
    """``x * sigmoid(gate)``."""
    wide = _compute_dtype(x)
    return (x.to(wide) * torch.sigmoid(gate.to(wide))).to(x.dtype)


def fuse_features(context, num_context, fc_weight, norm_weight, eps):
    """``rms_norm(context @ fc_weight.T)``; rows at or past ``num_context`` are zero."""
    return rms_norm(linear(live_rows(context, num_context), fc_weight), norm_weight, eps, num_context)


def live_rows(x: Tensor, counts: Tensor) -> Tensor:
    """``x [batch, rows, hidden]`` with zeros for the rows at or past ``counts [batch]``, which may hold anything."""
    live = torch.arange(x.shape[1], device=x.device) < counts[:, None]
    return torch.where(live[..., None], x, 0)


def _norm_rope(
    x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, zero_centered: bool = False
) -> Tensor:
    """RMSNorm over the heads of ``x [batch, rows, heads, head_dim]``, then half-split RoPE, rounded once."""
    wide = x.to(_compute_dtype(x))
    if weight is not None:
        wide = rms_norm(wide, weight.to(wide.dtype), eps, None, zero_centered)
    half = cos.shape[-1]
    cos, sin = (t.to(wide.dtype).unsqueeze(2) for t in (cos, sin))
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1).to(x.dtype)


def _append(new: Tensor, positions: Tensor, cache: Tensor) -> None:
    """Write ``cache[b, :, positions[b, r]] = new[b, :, r]``. A position outside the cache repeats a row that is inside,
    or puts slot 0 back."""
    if new.shape[2] == 0:
        return
    live = (positions >= 0) & (positions < cache.shape[2])
    some = live.any(1, keepdim=True)
    source = torch.where(live, torch.arange(new.shape[2], device=new.device), live.int().argmax(1, keepdim=True))
    slots = torch.where(some, positions.gather(1, source), 0)
    source, slots = (t[:, None, :, None].expand_as(new) for t in (source, slots))
    new = torch.where(some[:, :, None, None], new.gather(2, source), cache.gather(2, slots))
    cache.scatter_(2, slots, new)


def qkv_norm_rope_append_(
    qkv, lengths, num_context, depth, cos, sin, q_norm_weight, k_norm_weight, eps, q_out, k_cache, v_cache,
    zero_centered=False, gated=False, prefetch=False, origin=None,
):  # fmt: skip
    """Split packed rows into heads, norm and rotate q and k, write q of the last rows and append k and v."""
    q_rows, num_heads, head_dim = q_out.shape[1:]
    lengths = lengths.clamp(-q_rows, 2 * k_cache.shape[2] + q_rows)
    first, device = qkv.shape[1] - q_rows, lengths.device
    slots = lengths[:, None] + torch.arange(q_rows, device=device)
    positions = slots if depth is None else lengths[:, None] + depth.clamp(0, q_rows)
    if first:  # rows of context
        index, live = torch.arange(first, device=device), num_context.clamp(0, first)
        before = torch.where(index < live[:, None], (lengths - live)[:, None] + index, -1)
        slots, positions = torch.cat([before, slots], 1), torch.cat([before, positions], 1)
    if origin is not None:
        positions = positions + origin.clamp(0, len(cos))[:, None]
    at = positions.clamp(0, len(cos) - 1)
    cos, sin = cos[at], sin[at]
    heads, step = qkv.unflatten(-1, (-1, head_dim)), 2 if gated else 1
    q, k, v = heads.split([step * num_heads, k_cache.shape[1], v_cache.shape[1]], 2)
    q_out.copy_(_norm_rope(q[:, first:, ::step], q_norm_weight, eps, cos[:, first:], sin[:, first:], zero_centered))
    _append(_norm_rope(k, k_norm_weight, eps, cos, sin, zero_centered).transpose(1, 2), slots, k_cache)
    _append(v.transpose(1, 2), slots, v_cache)


def append_context_kv_(kv, positions, cos, sin, k_norm_weight, eps, k_caches, v_caches):
    """Norm and rotate k and append k and v, for every layer."""
    for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        k, v = kv[layer].unflatten(-1, (-1, k_cache.shape[-1])).chunk(2, 2)
        weight = None if k_norm_weight is None else k_norm_weight[layer]
        _append(_norm_rope(k, weight, eps, cos, sin).transpose(1, 2), positions, k_cache)
        _append(v.transpose(1, 2), positions, v_cache)


def append_kv_(key, value, positions, k_cache, v_cache):
    """Append key and value rows at their positions."""
    _append(key, positions, k_cache)
    _append(value, positions, v_cache)


def visible(
    lengths: Tensor, rows: int, capacity: int, causal: bool = True, window: int = 0, ancestors: Tensor | None = None
) -> Tensor:
    """``[batch, rows, capacity]``: which slots each row of a block sees. In a tree a row is a key at its depth."""
    slot, row = (torch.arange(count, device=lengths.device) for count in (capacity, rows))
    start = lengths[:, None]
    if ancestors is None:
        query, position = start + row, slot.expand(len(lengths), -1)
        seen = (slot < start + rows)[:, None].expand(-1, rows, -1)
        if causal:
            seen = seen & (slot <= query[..., None])
    else:
        bits = (ancestors[..., row // 64] >> row % 64) & 1
        query = start + (bits.sum(-1) - 1).clamp(min=0)
        of_block, own = (slot >= start) & (slot < start + rows), (slot - start).clamp(0, rows - 1)
        position = torch.where(of_block, query.gather(1, own), slot)
        among = bits.bool().gather(2, own[:, None].expand(-1, rows, -1))
        seen = (slot < start)[:, None] | (among & (of_block & (position >= 0))[:, None])
    if window:
        distance = query[..., None] - position[:, None]
        seen = seen & ((distance if causal else distance.abs()) < window)
    return seen


def block_attention(
    q, k_cache, v_cache, lengths, scale, causal, window=0, softcap=0.0, sinks=None, ancestors=None, fresh=-1,
):  # fmt: skip
    """Attention of a block of queries over a cache that already holds the block; a query without keys gives zero."""
    rows = q.shape[1]
    num_kv_heads, capacity = k_cache.shape[1:3]
    dtype, lengths = _compute_dtype(q), lengths.clamp(-rows, 2 * capacity + rows)
    seen = visible(lengths, rows, capacity, causal, min(window, capacity + rows), ancestors if rows else None)
    grouped = q.to(dtype).unflatten(2, (num_kv_heads, -1))
    scores = torch.einsum("brhgd,bhcd->bhgrc", grouped, k_cache.to(dtype)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(seen[:, None, None], scores, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(dtype).view(num_kv_heads, -1, 1, 1)
        top = torch.maximum(top, sinks)
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    weights = weights / torch.where(total == 0, 1.0, total)
    # A slot that a query does not see may hold anything, and 0 * NaN is NaN: such values are left out of the product,
    # and the queries that do see them are marked.
    finite = v_cache.isfinite().all(-1)
    values = torch.where(finite[..., None], v_cache.to(dtype), 0.0)
    out = torch.einsum("bhgrc,bhcv->brhgv", weights, values)
    spoilt = torch.einsum("bhgrc,bhc->brhg", weights, (~finite).to(dtype)) != 0
    return torch.where(spoilt[..., None], float("nan"), out).flatten(2, 3).to(q.dtype)


# ---- token choice by keyed noise. Every step is one IEEE operation, in the order of csrc/common/noise.h: equal bits.

_LOW32 = 0xFFFFFFFF


def _philox(key: tuple[Tensor, Tensor], counter: list[Tensor]) -> list[Tensor]:
    """Philox 4x32-10 (Salmon et al. 2011) on int64 tensors that hold 32-bit words; shapes broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2^64, as wanted
        c0, c1 = (p1 >> 32 & _LOW32) ^ c1 ^ k0, p1 & _LOW32
        c2, c3 = (p0 >> 32 & _LOW32) ^ c3 ^ k1, p0 & _LOW32
        k0, k1 = k0 + 0x9E3779B9 & _LOW32, k1 + 0xBB67AE85 & _LOW32
    return [c0, c1, c2, c3]


def _log64(x: Tensor) -> Tensor:
    """ln(x) for positive normal float64: ``k ln2 + 2 artanh((m - 1) / (m + 1))``, m in [sqrt(1/2), sqrt(2))."""
    bits = x.view(torch.int64) + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
    k = (bits >> 52) - 1023
    m = ((bits & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD).view(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = torch.full_like(s, 1.0 / 19.0)
    for divisor in (17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        series = series * square + 1.0 / divisor
    return k.to(torch.float64) * 0.6931471805599453 + (s + s) * (series * square + 1.0)


def _shared_exp(d: Tensor) -> Tensor:
    """exp(d) for fp32 d <= 0, relative error below 2e-7; 0 below -86."""
    under = d < -86.0
    d = torch.where(under, 0.0, d)
    n = (d * 1.4426950216293335 + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to an integer
    r = (d - n * 0.693359375) - n * -2.12194442e-4
    p = torch.full_like(r, 1.9875691e-4)
    for c in (1.3981999e-3, 8.3334519e-3, 4.1665796e-2, 1.6666666e-1, 0.5, 1.0, 1.0):
        p = p * r + c
    scale = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(under, 0.0, p * scale)


def _noise_words(seeds: Tensor, positions: Tensor, group: Tensor, stream: int) -> Tensor:
    """The four Philox words of the tokens ``4 * group ..`` of ``group [batch, rows, n]``: ``[batch, rows, n, 4]``."""
    key, position = seeds[:, None, None], positions[:, :, None]
    counter = [group, position & _LOW32, position >> 32 & _LOW32, torch.full_like(position, stream)]
    return torch.stack(_philox((key & _LOW32, key >> 32 & _LOW32), counter), -1)


def _fraction(words: Tensor) -> Tensor:
    """``(word + 0.5) / 2^32`` in float64, exact."""
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def _uniform(seeds: Tensor, positions: Tensor, vocab: int, stream: int) -> Tensor:
    """`_fraction` of each token's Philox word, ``[batch, rows, vocab]``."""
    group = torch.arange((vocab + 3) // 4, device=positions.device).expand(*positions.shape, -1)
    return _fraction(_noise_words(seeds, positions, group, stream).flatten(2)[..., :vocab])


def _gumbel(fraction: Tensor) -> Tensor:
    return (-_log64(-_log64(1.0 - fraction))).to(torch.float32)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int, stream: int = 0) -> Tensor:
    """Return the keyed noise of `select_tokens`, ``[batch, rows, vocab]`` float32, a function of (seed, position, token
    id) alone.

    Word ``id & 3`` of Philox 4x32-10 with the seed as key and (id >> 2, position low, position high, stream) as
    counter is x; the noise is ``-ln(-ln(1 - (x + 0.5) / 2^32))`` in float64, rounded to fp32. Streams are independent
    of one another; tokens are chosen with stream 0.
    """
    return _gumbel(_uniform(seeds, positions, vocab, stream))


def gumbel_noise_of(ids: Tensor, seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """`gumbel_noise` of the tokens ``ids [batch, rows, n]``: ``[batch, rows, n]`` float32. A negative id's is unset."""
    words = _noise_words(seeds, positions, ids >> 2 & _LOW32, stream)
    return _gumbel(_fraction(words.gather(-1, (ids & 3)[..., None])[..., 0]))


def uniform_noise(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Return one number in (0, 1) per position, ``[batch, rows]`` float64: ``(x + 0.5) / 2^32`` of `gumbel_noise`'s
    first word x."""
    return _uniform(seeds, positions, 1, stream)[..., 0]


def lowest_argmax(x: Tensor) -> Tensor:
    """Return the argmax over the last dimension, ties to the lowest index on every device."""
    ids = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), ids, x.shape[-1]).amin(-1)


def filtered_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """``logits / temperature [batch, rows, vocab]``, fp32, and which tokens top-k, top-p and min-p keep, in bool."""
    vocab = logits.shape[-1]
    temperature, top_k, top_p, min_p = (x[:, None, None] for x in (temperature, top_k, top_p, min_p))
    z = logits.to(torch.float32) / temperature
    order, index = z.sort(-1, descending=True)
    best = order[..., :1]

    kth = order.gather(-1, (top_k - 1).clamp(0, vocab - 1).expand_as(best))
    in_top_k = (order >= kth) | (top_k <= 0) | (top_k >= vocab)
    e = _shared_exp(torch.where(order == best, 0.0, order - best))
    q = torch.where(in_top_k, torch.round(e * 2.0**38), 0.0).to(torch.int64)
    before = q.cumsum(-1) - q
    first = torch.cat([torch.ones_like(order[..., :1], dtype=torch.bool), order[..., 1:] != order[..., :-1]], -1)
    greater = torch.where(first, before, 0).cummax(-1).values  # of equal tokens, what lies before the first
    total = q.sum(-1, keepdim=True).to(torch.float64)
    in_top_p = (greater.to(torch.float64) < top_p.to(torch.float64) * total) | ~(top_p < 1)
    keep = in_top_k & in_top_p & ((e >= min_p) | ~(min_p > 0)) | (order == best)
    return z, torch.empty_like(keep).scatter_(-1, index, keep)


def select_tokens(logits, positions, seeds, temperature, top_k, top_p, min_p, sharpness):
    """``argmax(sharpness * filter(logits / temperature) + gumbel_noise)``; -1 for a row that holds NaN."""
    logits = logits.to(torch.float32)
    temperature = temperature.clamp(max=torch.finfo(torch.float32).max)
    sharpness = torch.where(sharpness >= 0, sharpness, 0.0)
    if positions.dim() == 1:
        positions = positions[:, None] + torch.arange(1, logits.shape[1] + 1, device=positions.device)
    z, keep = filtered_logits(logits, temperature, top_k, top_p, min_p)
    temperature, sharpness = temperature[:, None, None], sharpness[:, None, None]
    score = torch.where(torch.isinf(z), z, sharpness * z) + gumbel_noise(seeds, positions, logits.shape[-1])
    greedy = ~(temperature > 0) | torch.isposinf(sharpness)
    value = torch.where(greedy, logits, torch.where(keep, score, -torch.inf))
    is_best = (value == value.amax(-1, keepdim=True)) & (keep | greedy)  # a score that is kept may overflow to -inf
    vocab = logits.shape[-1]
    ids = torch.where(is_best, torch.arange(vocab, device=logits.device), vocab).amin(-1)
    return torch.where(torch.isnan(logits).any(-1), -1, ids)


def log_sum_exp(logits):
    """``logsumexp`` of each row, in fp32."""
    return logits.to(torch.float32).logsumexp(-1)


def tree_candidates(logits, positions, seeds, temperature, count, noise_weight=0.1):
    """The ``count`` best tokens per depth and their scores; id -1 where the score is -inf or the row holds NaN."""
    z = logits.to(_compute_dtype(logits))
    vocab, top = z.shape[-1], z.amax(-1, keepdim=True)
    below = torch.where(z == -torch.inf, z, torch.where(z == top, 0.0, z - top))  # finite where z is +inf
    score = below - below.logsumexp(-1, keepdim=True)

    temperature = temperature.clamp(max=torch.finfo(torch.float32).max)[:, None, None]
    noisy = below / temperature + gumbel_noise(seeds, positions, vocab)
    noisy = noisy - noisy.logsumexp(-1, keepdim=True)
    plain_share, noisy_share = (math.log(w) if w > 0 else -math.inf for w in (1 - noise_weight, noise_weight))
    mixed = torch.logaddexp(score + plain_share, noisy + noisy_share)
    score = torch.where((temperature > 0) & (noise_weight > 0), mixed, score).clamp(max=0.0)

    score = torch.where(torch.isnan(logits).any(-1, keepdim=True) | torch.isnan(score), -torch.inf, score)
    score = torch.nn.functional.pad(score, (0, max(count - vocab, 0)), value=-torch.inf)
    score, ids = (x[..., :count].contiguous() for x in score.sort(dim=-1, descending=True, stable=True))
    return torch.where(score == -torch.inf, -1, ids), score.to(torch.float32)


def top_candidates(logits, positions, seeds, temperature, sharpness, count):
    """The ``count`` tokens with the best unfiltered scores of `select_tokens`, and their logits, in fp32."""
    logits = logits.to(torch.float32)
    vocab = logits.shape[-1]
    temperature = temperature.clamp(max=torch.finfo(torch.float32).max)[:, None, None]
    sharpness = torch.where(sharpness >= 0, sharpness, 0.0)[:, None, None]
    z = logits / temperature
    score = torch.where(torch.isinf(z), z, sharpness * z) + gumbel_noise(seeds, positions, vocab)
    score = torch.where(~(temperature > 0) | torch.isposinf(sharpness), logits, score)

    score = torch.where(torch.isnan(logits).any(-1, keepdim=True), -torch.inf, score)
    score = torch.nn.functional.pad(score, (0, max(count - vocab, 0)), value=-torch.inf)
    score, ids = (x[..., :count].contiguous() for x in score.sort(dim=-1, descending=True, stable=True))
    live = score > -torch.inf
    chosen = logits.gather(-1, ids.clamp(max=vocab - 1))
    return torch.where(live, ids, -1), torch.where(live, chosen, -torch.inf)


def walk_candidates(
    hidden, predecessors, successors, anchor, ids, logits, positions, seeds, temperature, top_k, top_p, min_p,
    sharpness, stream=0,
):  # fmt: skip
    """Slot by slot the choice of `select_tokens` among the candidates, given the one before; -1 from a failure on."""
    codes = len(predecessors)
    dtype = _compute_dtype(hidden)
    temperature = temperature.clamp(max=torch.finfo(torch.float32).max)
    sharpness = torch.where(sharpness >= 0, sharpness, 0.0)[:, None]
    greedy = ~(temperature > 0)[:, None] | torch.isposinf(sharpness)
    path, scores = anchor.new_empty(ids.shape[:2]), torch.empty_like(logits)

    previous, alive = anchor, torch.ones_like(anchor, dtype=torch.bool)
    for slot in range(ids.shape[1]):
        # 1. The score of each candidate after the token before
        own = ids[:, slot]
        live = (own >= 0) & (own < codes)
        paired = ((previous >= 0) & (previous < codes))[..., None]
        product = predecessors[previous.clamp(0, codes - 1)].to(dtype) * hidden[:, slot].to(dtype)
        pairs = (product[:, None] * successors[own.clamp(0, codes - 1)].to(dtype)).sum(-1)
        score = (logits[:, slot].to(dtype) + torch.where(paired, pairs, 0.0)).to(torch.float32)
        nan = (torch.isnan(score) & live).any(-1)
        live = live & (score > -torch.inf)

        # 2. Filters and noise
        score = torch.where(live, score, -torch.inf)
        z, keep = (x[:, 0] for x in filtered_logits(score[:, None], temperature, top_k, top_p, min_p))
        live = live & (keep | greedy)
        noise = gumbel_noise_of(own[:, None], seeds, positions[:, slot, None], stream)[:, 0]
        value = torch.where(torch.isinf(z), z, sharpness * z) + noise
        value = torch.where(greedy, score, value)

        # 3. The best
        value = torch.where(live, value, -torch.inf)
        best = live & (value == value.amax(-1, keepdim=True))
        chosen = torch.where(best, own, torch.iinfo(torch.int64).max).amin(-1)
        alive = alive & live.any(-1) & ~nan
        previous = torch.where(alive, chosen, -1)
        path[:, slot] = previous
        scores[:, slot] = torch.where(live & alive[..., None], torch.where(greedy, score, z), -torch.inf)
    return path, scores


def link_candidates(hidden, predecessors, successors, anchor, ids, scores):
    """The scores of all pairs of neighbors, each list normalized with what its candidates leave to other tokens."""
    codes, (_, slots, count), dtype = len(predecessors), ids.shape, _compute_dtype(hidden)
    # 1. Which are candidates, and the probability of other tokens
    live = (ids >= 0) & (ids < codes) & (scores > -torch.inf)
    own = torch.where(live, scores, -torch.inf).to(dtype)
    rest = (1 - own.exp().sum(-1)).clamp(min=0)[..., None]
    # 2. The scores after each token
    before = torch.cat([anchor[:, None, None].expand(-1, 1, count), ids], 1)[:, :slots]
    paired = (before >= 0) & (before < codes)
    product = predecessors[before.clamp(0, codes - 1)].to(dtype) * hidden[:, :, None].to(dtype)
    pairs = product @ successors[ids.clamp(0, codes - 1)].to(dtype).transpose(-1, -2)
    score = own[:, :, None] + torch.where(paired[..., None] & live[:, :, None], pairs, 0.0)
    is_first = torch.arange(slots, device=ids.device)[:, None] == 0
    valid = (paired | is_first) & (score < torch.inf).all(-1)
    # 3. Their order
    links = (score - torch.logaddexp(score.logsumexp(-1), rest.log())[..., None]).to(torch.float32).clamp(max=0.0)
    links = torch.where(valid[..., None] & (score > -torch.inf), links, -torch.inf)
    by_id = ids.argsort(stable=True, dim=-1)[:, :, None].expand_as(links)
    links, order = links.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return links, by_id.gather(-1, order).to(torch.uint8)


def _first_of(scores: Tensor, *keys: Tensor) -> Tensor:
    """The place of the highest of ``scores [batch, n]``, ties to the lowest of each of ``keys`` in turn."""
    best = scores == scores.amax(-1, keepdim=True)
    for key in keys:
        best = best & (key == torch.where(best, key, torch.iinfo(torch.int64).max).amin(-1, keepdim=True))
    return best.int().argmax(-1)


def build_tree(anchor, ids, scores, rows, order=None):
    """The tree of the best prefixes: each row is the best by the whole key of all children of the rows before it."""
    batch, depths, count = ids.shape
    lists = 1 if order is None else count  # per depth; a node's children are those of the list at its place
    scores, ids = scores.reshape(batch, depths, lists, count), ids[:, :, None].expand(-1, -1, lists, -1)
    places = torch.zeros_like(ids)
    if order is not None:
        places = order.view_as(ids).long().clamp(max=count - 1)
        ids = ids.gather(-1, places)
    live = ((ids >= 0) & (scores > -torch.inf)).long().cumprod(-1).bool()
    none = torch.full_like(scores[:, :1], -torch.inf)
    scores = torch.cat([torch.where(live, scores, -torch.inf), none], 1)  # nothing follows the last depth
    ids, places = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (ids, places))
    per_row = [x.new_zeros(batch, rows) for x in (anchor, anchor, anchor, anchor, scores)]
    tree_ids, parents, depth, place_of, tree_scores = per_row
    bits = torch.zeros(batch, rows, -(-rows // 64) * 64, dtype=torch.bool, device=ids.device)
    children = torch.full((batch, rows, count), -torch.inf, dtype=scores.dtype, device=ids.device)
    child_ids = torch.zeros_like(children, dtype=torch.int64)

    everyone = torch.arange(batch, device=ids.device)
    parent_of = torch.arange(rows, device=ids.device)[:, None].expand(rows, count).reshape(-1)
    for row in range(rows):
        if row == 0:
            tree_ids[:, 0], parents[:, 0] = anchor, -1
        else:
            # 1. The best child by score, depth, id and parent
            flat, flat_ids = children.flatten(1), child_ids.flatten(1)
            place = _first_of(flat, depth[:, parent_of], flat_ids, parent_of.expand(batch, -1))
            exists, parent = flat[everyone, place] > -torch.inf, parent_of[place]
            # 2. Its row
            tree_ids[:, row] = torch.where(exists, flat_ids[everyone, place], -1)
            parents[:, row] = torch.where(exists, parent, -1)
            depth[:, row] = torch.where(exists, depth[everyone, parent] + 1, 0)
            tree_scores[:, row] = flat[everyone, place]
            place_of[:, row] = places[everyone, depth[everyone, parent], place_of[everyone, parent], place % count]
            bits[:, row] = bits[everyone, parent] & exists[:, None]
            flat[everyone, place] = -torch.inf
        bits[:, row, row] = True
        # 3. Its children
        level = torch.where(tree_scores[:, row] > -torch.inf, depth[:, row], depths)
        children[:, row] = tree_scores[:, row, None] + scores[everyone, level, place_of[:, row]]
        child_ids[:, row] = ids[everyone, level, place_of[:, row]]

    powers = torch.ones(64, dtype=torch.int64, device=ids.device) << torch.arange(64, device=ids.device)
    ancestors = torch.where(bits.unflatten(-1, (-1, 64)), powers, 0).sum(-1)
    return tree_ids, parents, depth, ancestors, tree_scores


def accept_prefix_(block_ids, posterior, stop_token_ids, limits, tokens, length, num_context, done):
    """Emit the longest matching prefix and one more token of every running row, and advance its state."""
    rows, capacity = block_ids.shape[1], tokens.shape[1]
    steps = torch.arange(rows, device=tokens.device)
    matches = (block_ids[:, 1:] == posterior[:, :-1]) & (posterior[:, :-1] >= 0)
    count = matches.long().cumprod(-1).sum(-1) + 1
    stops = (posterior[:, :, None] == stop_token_ids[:, None]).any(-1) & (posterior >= 0)
    count = torch.minimum(count, torch.where(stops, steps + 1, rows).amin(-1))
    limits = limits.clamp(0, capacity)
    room = torch.where((length < 0) | (length >= limits), 0, limits - 1 - length)
    count = torch.minimum(count, room)
    invalid = ((posterior < 0) & (steps < count[:, None])).any(-1)
    count = count - invalid.long()  # -1 matches no proposal, so it can only be the last
    running = done == 0
    count = torch.where(running, count, 0)

    last = (count - 1).clamp_min(0)[:, None]
    stopped = stops.gather(1, last)[:, 0] & (count > 0)
    state = torch.where(invalid, 3, torch.where(stopped, 1, torch.where(count >= room, 2, 0)))
    offset = torch.arange(capacity, device=tokens.device) - (length.clamp(0, capacity) + 1)[:, None]
    fresh = (offset >= 0) & (offset < count[:, None])
    tokens.copy_(torch.where(fresh, posterior.gather(1, offset.clamp(0, rows - 1)), tokens))
    length.add_(count)
    num_context.copy_(count)
    done.copy_(torch.where(running, state, done))


def accept_path_(
    ids, parents, choices, stop_token_ids, limits, tokens, length, num_context, done, path, chain_choices, chain_ids,
):  # fmt: skip
    """Walk from row 0 to the child that each choice names; then `accept_prefix_` on the chain of these rows."""
    rows, node = ids.shape[1], torch.arange(ids.shape[1], device=ids.device)
    is_child = (parents >= 0) & (parents < node) & (ids >= 0)
    is_chosen = is_child & (ids == choices.gather(1, torch.where(is_child, parents, 0)))
    follows = is_chosen[:, None] & (parents[:, None] == node[:, None])  # [batch, parent, child]
    child = torch.where(follows, node, rows).amin(-1)  # the first, or `rows`
    visited = [torch.zeros_like(length)[:, None]]
    for _ in range(path.shape[1] - 1):
        last = visited[-1]
        visited.append(torch.where(last < rows, child.gather(1, last.clamp(max=rows - 1)), rows))
    walked = torch.cat(visited, 1)
    is_row, safe = walked < rows, walked.clamp(max=rows - 1)
    block_ids, posterior = (torch.where(is_row, x.gather(1, safe), -1) for x in (ids, choices))
    accept_prefix_(block_ids, posterior, stop_token_ids, limits, tokens, length, num_context, done)
    depth = torch.arange(path.shape[1], device=path.device)
    is_emitted = depth < num_context[:, None]
    path.copy_(torch.where(is_emitted, walked, depth))
    chain_choices.copy_(torch.where(is_emitted, posterior, -1))
    chain_ids.copy_(torch.where(depth <= num_context[:, None], block_ids, -1))


def compact_kv_(path, counts, first, k_caches, v_caches):
    """Move slot ``first + path[j]`` to slot ``first + j`` in every cache: all are read, then all written."""
    j = torch.arange(path.shape[1], device=path.device)
    for cache in (*k_caches, *v_caches):
        capacity = cache.shape[2]
        bound = capacity + path.shape[1]  # clamped to it, a slot outside stays outside
        base = first.clamp(-bound, bound)[:, None]
        source, slot = base + path.clamp(-2 * bound, 2 * bound), base + j
        moves = (j >= 1) & (j < counts[:, None]) & (path > j) & (slot >= 0) & (source < capacity)
        index = source.clamp(0, capacity - 1)[:, None, :, None].expand(-1, cache.shape[1], -1, cache.shape[3])
        _append(cache.gather(2, index), torch.where(moves, slot, -1), cache)


def gather_rows_(x, path, out):
    """``out[b, j] = x[b, path[b, j]]``, the index clamped."""
    index = path.clamp(0, x.shape[1] - 1)[:, :, None].expand(-1, -1, x.shape[2])
    out[:, : path.shape[1]].copy_(x.gather(1, index))


_AMX_INNER = 32


def gated_recurrence_(q, k, v, log_decay, beta, state, saved_k, saved_d, saved_a, pending, keep):
    """Apply ``pending`` saved rows to the state, run the rows, and keep the state after ``keep`` of them."""
    rows, block, groups = q.shape[1], saved_k.shape[1], v.shape[2] // q.shape[2]
    a, (q, k, held_k) = log_decay.exp(), (x.repeat_interleave(groups, 2) for x in (q, k, saved_k))
    current = state
    for t in range(block):
        moved = _advance(current, saved_a[:, t], held_k[:, t], saved_d[:, t])
        current = torch.where((t < pending)[:, None, None, None], moved, current)
    kept, out, corrected = current, torch.empty_like(v), torch.empty_like(v)
    for t in range(rows):
        d = v[:, t]
        if beta is not None:
            held = (_decayed(current, a[:, t]) * k[:, t, :, :, None]).sum(-2)
            d = beta[:, t, :, None] * (d - held)
        current = _advance(current, a[:, t], k[:, t], d)
        out[:, t], corrected[:, t] = (current * q[:, t, :, :, None]).sum(-2), d
        kept = torch.where((t < keep)[:, None, None, None], current, kept)
    state.copy_(kept)
    stored = min(rows, block)
    for saved, last in ((saved_k, k[:, :, ::groups]), (saved_d, corrected), (saved_a, a)):
        saved[:, :stored] = last[:, :stored]
    return out


def _decayed(state: Tensor, a: Tensor) -> Tensor:
    return state * (a[..., None] if a.dim() == 3 else a[..., None, None])


def _advance(state: Tensor, a: Tensor, k: Tensor, d: Tensor) -> Tensor:
    """``a S + k d^T`` for ``[batch, heads, key_dim, value_dim]``, the one place where a state moves."""
    return _decayed(state, a) + k[..., None] * d[..., None, :]


def causal_conv_(x, weight, bias, silu, window, pending, keep):
    """Convolve each channel over the window's context and the rows, taps from the oldest; move the window."""
    (batch, rows, channels), width = x.shape, weight.shape[1]
    block, wide = window.shape[1] - width + 1, _compute_dtype(x)
    reach = torch.arange(width - 1, device=x.device)

    def slots(first: Tensor, most: int) -> Tensor:
        return (first.clamp(0, most)[:, None] + reach)[:, :, None].expand(-1, -1, channels)

    inputs = torch.cat([window.gather(1, slots(pending, block)), x], 1)
    total = torch.zeros(batch, rows, channels, dtype=wide, device=x.device)
    if bias is not None:
        total = total + bias.to(wide)
    for j in range(width):
        total = total + weight[:, j].to(wide) * inputs[:, j : j + rows].to(wide)
    window[:, : width - 1] = inputs.gather(1, slots(keep, rows))
    stored = min(rows, block)
    window[:, width - 1 : width - 1 + stored] = x[:, :stored]
    return (torch.nn.functional.silu(total) if silu else total).to(x.dtype)


def delta_net_inputs(qkv, b, a, a_log, dt_bias, key_heads, key_dim):
    """``(q, k, v, log_decay, beta)`` of a Gated DeltaNet layer, as `gated_recurrence_` takes them."""
    wide, keys = _compute_dtype(qkv), key_heads * key_dim
    q, k, v = qkv.to(wide).split([keys, keys, qkv.shape[-1] - 2 * keys], -1)
    q, k = (x.unflatten(-1, (key_heads, key_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    log_decay = -a_log.to(wide).exp() * torch.nn.functional.softplus(a.to(wide) + dt_bias.to(wide))
    beta = torch.sigmoid(b.to(wide)).to(b.dtype).to(wide)
    return q * key_dim**-0.5, k, v.unflatten(-1, (a_log.shape[0], -1)), log_decay, beta


def gated_rms_norm(x, z, weight, eps):
    """``rms_norm(x) * weight * silu(z)`` per head, side by side."""
    gate = torch.nn.functional.silu(z.to(x.dtype)).view(x.shape)
    return (rms_norm(x, weight.to(x.dtype), eps) * gate).flatten(2).to(z.dtype)


def separate_rows(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operands of ``x @ weight.T`` in a form in which no row of ``x`` meets another.

    On CPUs with AMX, torch's 16-bit product of an inner dimension that is not a multiple of 32 reads past the end of a
    row into the next one, and 0 * NaN is NaN. Zeros up to the next multiple prevent it.
    """
    short = -x.shape[-1] % _AMX_INNER
    if short and x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        x, weight = (torch.nn.functional.pad(operand, (0, short)) for operand in (x, weight))
    return x, weight


def round_rows(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Round rows ``x [..., in]`` to 8 bits: ``size`` adjacent elements share a 127th of their largest magnitude.

    Returns:
        ``(integers [..., groups, size], group_scales [..., groups])``, at least fp32, zero past ``in``. The scale of a
        group that is not finite is NaN; magnitudes up to 1e-30 are zero.
    """
    wide = torch.nn.functional.pad(x.to(_compute_dtype(x)), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    top = wide.abs().amax(-1)
    is_finite, divides = top.isfinite(), top > 1e-30
    inverse = torch.where(is_finite & divides, torch.full_like(top, 127) / top, 0)
    integers = (torch.where(is_finite[..., None], wide, 0) * inverse[..., None]).round()
    return integers, torch.where(is_finite, torch.where(divides, top / 127, 0), torch.nan)


def linear(x, weight, bias=None, prefetch=False, scales=None, format=DENSE.name):
    """Compute ``x @ weight.T + bias``; a row of NaN spoils no other."""
    if format == DENSE.name:
        return torch.nn.functional.linear(*separate_rows(x, weight), bias)
    scaled = _packed_product(x, weight, scales, format)
    return (scaled if bias is None else scaled + bias).to(x.dtype)


def _packed_product(x: Tensor, packed: Tensor, scales: Tensor, format: str) -> Tensor:
    """``x @ values.T``, times the scale of each channel, not rounded."""
    weight, size = PackedWeight(packed, scales, format, x.shape[-1]), FORMATS[format].row_group
    if size is None and scales is None:
        return x.to(_compute_dtype(x)) @ weight.dense(x.dtype).to(_compute_dtype(x)).T
    if size is None:
        return x.to(_compute_dtype(x)) @ weight.values().to(_compute_dtype(x)).T * scales
    integers, group_scales = round_rows(x, size)
    if scales is None:
        return _product_of_blocks(integers, group_scales, unpack(packed, format))
    values = weight.values()
    total = group_scales.new_zeros(*x.shape[:-1], len(values))
    for group in range(group_scales.shape[-1]):  # sums below 2**24, which float32 holds
        some = values[:, group * size : (group + 1) * size].to(group_scales.dtype)
        total += integers[..., group, : some.shape[1]] @ some.T * group_scales[..., group, None]
    return total * scales


def unpack_rows(packed, ids, columns, format):
    """Rows of a weight in blocks, in fp32."""
    return unpack(packed, format).dense()[ids.clamp(0, len(packed) - 1), :columns]


def _product_of_blocks(integers: Tensor, row_scales: Tensor, weight: Blocks) -> Tensor:
    """The product of rounded rows with a weight in blocks: a rounded sum per group (linear_blocks.h)."""
    total = row_scales.new_zeros(*row_scales.shape[:-1], len(weight.codes))
    size = weight.codes.shape[-1]
    for group in range(row_scales.shape[-1]):
        row_scale = row_scales[..., group, None]
        for part in range(weight.codes.shape[2]):
            some = integers[..., group, part * size : (part + 1) * size].double()
            sums = some @ weight.codes[:, group, part].double().T
            total = _fma(sums, (weight.scales[:, group, part] * row_scale).double(), total)
        if weight.minima is not None:
            wide = row_scale * integers[..., group, :].sum(-1, keepdim=True)
            total = _fma(weight.minima[:, group].double(), wide.double(), total)
    return total


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` with one rounding, of numbers whose product is exact in double; see ``fma_vec`` in vec.h."""
    product, added = a * b, c.double()
    total = product + added
    back = total - product
    side = ((product - (total - back)) + (added - back)) * total
    bits = total.view(torch.int64)
    step = torch.where(bits % 2 == 0, (side > 0).long() - (side < 0).long(), 0)
    return (bits + step).view(torch.float64).to(c.dtype)


def linears(x, weights, biases=(), prefetch=False, scales=None, format=DENSE.name):
    """``x @ weight.T + bias`` of each, side by side."""
    split = [None] * len(weights) if scales is None else scales.split([weight.shape[0] for weight in weights])
    biases = biases or [None] * len(weights)
    out = [linear(x, weight, bias, False, s, format) for weight, bias, s in zip(weights, biases, split, strict=True)]
    return out[0] if len(out) == 1 else torch.cat(out, -1)


def swiglu(x, gate, up, prefetch=False, scales=None, format=DENSE.name):
    """``silu(x @ gate.T) * (x @ up.T)``, both products rounded first."""
    return silu_mul(linears(x, [gate, up], (), False, scales, format))


def experts(
    x, ids, scores, gate_up, down, gate_up_bias=None, down_bias=None, gate="silu", alpha=1.702, limit=7.0,
    transposed=False, gate_up_scales=None, down_scales=None, format=DENSE.name, down_format=DENSE.name,
):  # fmt: skip
    """The sum over slots of ``scores * down(gate(gate_up(x)))`` of the expert in each. Copies the chosen weights."""
    wide, num_experts = _compute_dtype(x), gate_up.shape[0]
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for slot in range(ids.shape[1]):
        exists = (ids[:, slot] >= 0) & (ids[:, slot] < num_experts)
        expert = torch.where(exists, ids[:, slot], 0)
        both = _expert_product(x, gate_up, gate_up_bias, expert, transposed, gate_up_scales, format)
        halves = (both[:, ::2], both[:, 1::2]) if transposed else both.chunk(2, -1)
        inner = _gated(*halves, gate, alpha, limit).to(x.dtype)
        result = _expert_product(inner, down, down_bias, expert, transposed, down_scales, down_format)
        out = torch.where(exists[:, None], out + scores[:, slot, None].to(wide) * result, out)
    return out.to(x.dtype)


def _expert_product(
    x: Tensor, weights: Tensor, biases: Tensor | None, expert: Tensor, transposed: bool, scales: Tensor | None,
    format: str,
) -> Tensor:  # fmt: skip
    """The product of each row ``x [rows, in]`` with the weight of its expert ``[rows]``, not rounded."""
    wide = _compute_dtype(x)
    if format == DENSE.name:
        weight = weights[expert].to(wide)  # [rows, out, in], or transposed
        out = torch.matmul(x[:, None].to(wide), weight if transposed else weight.mT)[:, 0]
    else:
        split = [None] * len(weights) if scales is None else scales
        every = [_packed_product(x, *one, format) for one in zip(weights, split, strict=True)]
        out = torch.stack(every, 1)[torch.arange(len(x), device=x.device), expert]
    return out if biases is None else out + biases[expert].to(wide)


def _gated(gate: Tensor, up: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    if kind == "clamped_silu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up

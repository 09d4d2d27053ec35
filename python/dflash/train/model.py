"""The drafter's forward pass through differentiable torch functions, all blocks of all sequences at once.

The parameters are those of a :class:`~dflash.Drafter`; its own forward runs on kernels that know no gradient, a cache,
and one block a row. Here a block sees the context features strictly before its anchor, and itself; blocks never meet.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..drafter import DraftConfig, Drafter
from ..target import UnsupportedTargetError, decoder_layers, refusal, structural_twin, text_config, unwrap

__all__ = ["TargetFeatures", "TrainableDrafter", "visible_keys"]


def visible_keys(anchors: Tensor, length: int, block_size: int, causal: bool, window: int) -> Tensor:
    """What each slot of each block sees: ``[batch, anchors, block, length + block]`` bool, the block's own keys last.

    Args:
        anchors: ``[batch, anchors]`` int64.
        length: context positions ``0 .. length - 1``; those at or past an anchor are hidden from its block.
        block_size: slots of a block, at ``anchor + k``.
        causal: whether a slot sees no later slot.
        window: keys that a slot sees to a side, itself counted; 0 for all.
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


class TrainableDrafter(nn.Module):
    """``drafter``, with gradients: its parameters are switched on, and stay views of its packed tensors.

    Optimizers work in place, so the drafter's own forward uses each step's weights without a copy.

    Args:
        drafter: in float32, for training; its parameters are this module's, under ``drafter.``.
        attention: ``"flex"``, ``"sdpa"`` or ``"matmul"``, the same numbers; None for FlexAttention on CUDA and plain
            matrix products elsewhere.

    Raises:
        ValueError: the drafter has attention sinks, which the differentiable functions do not take.
    """

    def __init__(self, drafter: Drafter, *, attention: str | None = None) -> None:
        super().__init__()
        if drafter.config.attention_sinks:
            raise ValueError("a drafter with attention sinks cannot be trained: the differentiable attention has none")
        if attention is not None and attention not in _ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(_ATTENTIONS)} or None, got {attention!r}")
        self.drafter = drafter.requires_grad_(True)
        self.attention = attention

    @property
    def config(self) -> DraftConfig:
        return self.drafter.config

    def forward(self, context: Tensor, block_embeds: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states of every slot of every block.

        Args:
            context: ``[batch, length, taps * hidden]``, the target's states at positions 0 .. length - 1.
            block_embeds: ``[batch, anchors, block, hidden]``, the target's raw embeddings of the blocks' tokens.
            anchors: ``[batch, anchors]`` int64, each block's first position.

        Returns:
            ``[batch, anchors, block, hidden]`` past the final norm; slot k > 0 predicts the token at ``anchor + k``.
        """
        drafter, config = self.drafter, self.drafter.config
        (count, block), length = block_embeds.shape[1:3], context.shape[1]
        heads, kv_heads, dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
        mask, attend = _ATTENTIONS[self.attention or ("flex" if context.is_cuda else "matmul")]
        features = _norm(drafter.hidden_norm, drafter.fc(context))
        slots = anchors[..., None] + torch.arange(block, device=anchors.device)
        ahead = _rotation(drafter, slots.flatten(1))
        behind = _rotation(drafter, torch.arange(length, device=anchors.device)[None])
        masks = {}
        for kind in set(zip(config.causal, config.window, strict=True)):
            masks[kind] = mask(anchors, length, block, *kind, heads // kv_heads)
        residual = drafter.scale_embeddings(block_embeds).flatten(1, 2)
        for i, layer in enumerate(drafter.layers):
            own, mlp = layer.self_attn, layer.mlp
            hidden = _norm(layer.input_layernorm, residual)
            q, k, v = own.q_proj(hidden), own.k_proj(hidden), own.v_proj(hidden)
            before_k, before_v = own.k_proj(features), own.v_proj(features)
            q = _rotate(_norm(own.q_norm, q.unflatten(-1, (heads, dim))), ahead)
            k = _rotate(_norm(own.k_norm, k.unflatten(-1, (kv_heads, dim))), ahead)
            before_k = _rotate(_norm(own.k_norm, before_k.unflatten(-1, (kv_heads, dim))), behind)
            v, before_v = v.unflatten(-1, (kv_heads, dim)), before_v.unflatten(-1, (kv_heads, dim))
            out = attend(q, k, v, before_k, before_v, masks[config.causal[i], config.window[i]], count)
            residual = residual + own.o_proj(out.flatten(2))
            hidden = _norm(layer.post_attention_layernorm, residual)
            residual = residual + mlp.down_proj(F.silu(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))
        return _norm(drafter.norm, residual).unflatten(1, (count, block))


def _norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """RMSNorm in float32, in the dtype of ``x``."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + module.eps).rsqrt() * module.weight).to(x.dtype)


def _rotation(drafter: Drafter, positions: Tensor) -> tuple[Tensor, Tensor]:
    """``(cos, sin)`` of ``positions [batch, rows]``, each ``[batch, rows, 1, head_dim / 2]`` float32."""
    cos, sin = drafter.rotary(positions)
    return cos[:, :, None], sin[:, :, None]


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of the half-split kind on ``x [batch, rows, heads, head_dim]``."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


# ---------------------------------------------------------------------------------------------- SDPA


def _sdpa_mask(anchors: Tensor, length: int, block: int, causal: bool, window: int, group: int) -> Tensor:
    """``[batch * anchors, 1, group * block (or 1), length + block]`` bool."""
    visible = visible_keys(anchors, length, block, causal, window).flatten(0, 1)
    if not causal and not window:
        return visible[:, None, :1]  # every slot sees the same keys
    return visible.repeat(1, group, 1)[:, None]


def _sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, before_k: Tensor, before_v: Tensor, mask: Tensor, count: int
) -> Tensor:
    """One batch row a block: its own keys behind a copy of its sequence's, grouped-query heads packed into rows.

    A mask over all blocks' keys at once would cost ``count`` times the block part; the copies cost memory traffic.
    """
    batch, rows, heads, dim = q.shape
    kv_heads, block = k.shape[2], rows // count

    def keys(before: Tensor, own: Tensor) -> Tensor:
        before = before.transpose(1, 2)[:, None].expand(-1, count, -1, -1, -1)
        own = own.unflatten(1, (count, block)).transpose(2, 3)
        return torch.cat([before, own], 3).flatten(0, 1)

    packed = q.view(batch * count, block, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = mask.expand(-1, -1, packed.shape[2], -1)
    out = F.scaled_dot_product_attention(packed, keys(before_k, k), keys(before_v, v), mask)
    out = out.unflatten(2, (heads // kv_heads, block)).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, heads, dim)


# ---------------------------------------------------------------------------------------------- matrix products


def _matmul_mask(anchors: Tensor, length: int, block: int, causal: bool, window: int, group: int) -> Tensor:
    """``[batch, anchors * group * block, length + block]`` bool, True where a key is hidden."""
    visible = visible_keys(anchors, length, block, causal, window)
    return ~visible[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 3)


def _matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, before_k: Tensor, before_v: Tensor, mask: Tensor, count: int
) -> Tensor:
    """Scores of all blocks against the context in one product, against their own keys in one small product each.

    The default on CPU: the numbers are SDPA's (tests/test_train_model.py), and a forward and backward pass is faster by
    what ``python bench/bench_train_attention.py`` prints. No context key is copied, no key of another block touched.
    """
    batch, rows, heads, dim = q.shape
    kv_heads, length = k.shape[2], before_k.shape[1]
    group, block = heads // kv_heads, rows // count
    with torch.autocast(q.device.type, enabled=False):  # softmax keeps float32 inside, whatever comes in
        packed = q.view(batch, count, block, kv_heads, group, dim).permute(0, 3, 1, 4, 2, 5) * dim**-0.5
        packed = packed.reshape(batch * kv_heads, count * group * block, dim)
        before_k, before_v = (x.transpose(1, 2).flatten(0, 1) for x in (before_k, before_v))
        k, v = (x.unflatten(1, (count, block)).permute(0, 3, 1, 2, 4).flatten(0, 2) for x in (k, v))
        behind = packed @ before_k.transpose(1, 2)
        own = packed.view(batch * kv_heads * count, group * block, dim) @ k.transpose(1, 2)
        scores = torch.cat([behind, own.view(batch * kv_heads, -1, block)], -1)
        if kv_heads > 1:
            mask = mask.repeat_interleave(kv_heads, 0)
        weights = scores.masked_fill_(mask, float("-inf")).softmax(-1)
        behind, own = weights.split([length, block], -1)
        out = behind @ before_v
        out = out + (own.reshape(batch * kv_heads * count, group * block, block) @ v).view_as(out)
    out = out.view(batch, kv_heads, count, group, block, dim).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(batch, rows, heads, dim)


# ---------------------------------------------------------------------------------------------- FlexAttention


_TILE = 128  # rows and keys of FlexAttention's sparse blocks


def _flex_mask(anchors: Tensor, length: int, block: int, causal: bool, window: int, group: int):
    """The block mask over ``[context ; all blocks]`` of a sequence.

    Which tiles are seen follows from the anchors alone: nothing the size of rows times keys is built, as
    ``create_block_mask`` would.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def visible(b, h, row, key):
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

    count, device = anchors.shape[1], anchors.device
    rows, keys = count * block, length + count * block
    spare = -rows % _TILE
    starts = anchors.repeat_interleave(block, 1)
    last = F.pad(starts, (0, spare), value=-1).unflatten(1, (-1, _TILE)).amax(-1)[..., None]
    first = F.pad(starts, (0, spare), value=keys).unflatten(1, (-1, _TILE)).amin(-1)[..., None]
    row = torch.arange(0, rows, _TILE, device=device)[:, None]  # a tile's first row, and key
    key = torch.arange(0, keys, _TILE, device=device)
    behind = key < last.clamp(max=length)
    if window:
        behind = behind & (first - (key + _TILE - 1) < window)
    begin = length + row // block * block
    end = length + ((row + _TILE - 1).clamp(max=rows - 1) // block + 1) * block
    own = (key < end) & (key + _TILE > begin)
    full = (key + _TILE <= first.clamp(max=length)) & (window == 0)
    tiles = [_tile_list(mask) for mask in ((behind | own) & ~full, full)]
    return BlockMask.from_kv_blocks(*tiles[0], *tiles[1], _TILE, visible, (rows, keys))


def _tile_list(seen: Tensor) -> tuple[Tensor, Tensor]:
    """``seen [batch, row tiles, key tiles]`` as how many key tiles a row tile sees, and which, those first."""
    order = (~seen).byte().argsort(dim=-1, stable=True)
    return seen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


_compiled_flex = None


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, before_k: Tensor, before_v: Tensor, mask, count: int) -> Tensor:
    global _compiled_flex
    from torch.nn.attention.flex_attention import flex_attention

    if q.is_cuda and _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention, dynamic=True)
    run = _compiled_flex if q.is_cuda else flex_attention
    keys, values = torch.cat([before_k, k], 1).transpose(1, 2), torch.cat([before_v, v], 1).transpose(1, 2)
    return run(q.transpose(1, 2), keys, values, block_mask=mask, enable_gqa=True).transpose(1, 2)


_ATTENTIONS = {
    "flex": (_flex_mask, _flex_attention),
    "sdpa": (_sdpa_mask, _sdpa_attention),
    "matmul": (_matmul_mask, _matmul_attention),
}


# ---------------------------------------------------------------------------------------------- the target


class TargetFeatures:
    """The frozen target, as training needs it: tapped hidden states of whole sequences, embeddings and the head.

    Runs a structural twin of the model (the model itself is not touched) without gradients. Layers behind the last tap
    are left out unless ``final`` states are wanted.

    Args:
        target: a causal language model of transformers that the engine runs.
        layer_ids: whose outputs are tapped; the last layer's is read after the final norm.
        final: keep the final hidden states too, for distillation.

    Raises:
        UnsupportedTargetError: the engine refuses the target.
    """

    def __init__(self, target: nn.Module, layer_ids: tuple[int, ...], *, final: bool = False) -> None:
        target = unwrap(target)
        if reason := refusal(target):
            raise UnsupportedTargetError(f"this target is not supported: {reason}")
        self.model = structural_twin(target)
        self.final = final
        total = text_config(target).num_hidden_layers
        self.layer_ids = tuple(layer_ids)
        decoder = self.model.get_decoder()
        layers = decoder_layers(self.model, total)
        self._norm_is_tapped = total - 1 in self.layer_ids
        if not final and not self._norm_is_tapped:
            del layers[max(self.layer_ids) + 1 :]
        self._taps: dict[int, Tensor] = {}
        for layer_id in self.layer_ids:
            module = decoder.norm if layer_id == total - 1 else layers[layer_id]

            def keep(_module, _args, output, taps=self._taps, layer_id=layer_id):
                taps[layer_id] = output[0] if isinstance(output, tuple) else output

            module.register_forward_hook(keep)

    @property
    def embedding_weight(self) -> Tensor:
        """``[vocab, hidden]``."""
        return self.model.get_input_embeddings().weight

    def head(self, hidden: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., vocab]``, without the family's own scaling."""
        return self.model.get_output_embeddings()(hidden)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Taps and final states of right-padded sequences; causal attention keeps the pads out of what is before them.

        Args:
            input_ids: ``[batch, length]`` int64.

        Returns:
            ``[batch, length, taps * hidden]``, and ``[batch, length, hidden]`` past the final norm or None.
        """
        out = self.model.get_decoder()(input_ids=input_ids, use_cache=False)
        taps = torch.cat([self._taps[layer_id] for layer_id in self.layer_ids], -1)
        self._taps.clear()
        return taps, out.last_hidden_state if self.final else None

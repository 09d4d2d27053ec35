"""The drafter that is trained: a new one, its forward pass for all blocks of all sequences at once, and the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dflash import DraftConfig, Drafter
from dflash.internals import CandidateSelector, MarkovHead, drafter_config, targets

from .batches import BatchBlocks


def choose_mask_id(target: nn.Module, tokenizer: Any = None, mask_token_id: int | None = None, rows: Any = None) -> int:
    """Return the mask token: ``mask_token_id``, else the tokenizer's, else an embedding row past the tokenizer's ids.

    Args:
        target: the causal language model.
        tokenizer: the target's tokenizer.
        mask_token_id: the caller's choice.
        rows: training rows (``input_ids``), in which a proposed token must not occur.

    Raises:
        ValueError: no mask token can be found, or ``mask_token_id`` has no embedding. The message proposes a special
            token that is not used.
    """
    table = targets.unwrap(target).get_input_embeddings().weight.shape[0]
    own = None if tokenizer is None else getattr(tokenizer, "mask_token_id", None)
    unused = table if tokenizer is None else max(tokenizer.get_vocab().values(), default=-1) + 1
    free = next((found for found in (own, unused) if found is not None and found < table), None)
    if mask_token_id is not None and 0 <= mask_token_id < table:
        return mask_token_id
    if mask_token_id is None and free is not None:
        return free
    # Propose a special token that does not occur in the data, else any token that does not.
    if free is None and tokenizer is not None:
        seen = set(tokenizer.all_special_ids).union(*([] if rows is None else rows["input_ids"]))
        special = {token for token, about in tokenizer.added_tokens_decoder.items() if about.special}
        unseen = set(range(table)) - seen if rows is not None else special - seen
        free = min((unseen & special) or {max(unseen)}) if unseen else None
    advice = "name one that the target never writes (--mask-token-id"
    if free is not None:
        text = None if tokenizer is None else tokenizer.convert_ids_to_tokens(free)
        advice += f" {free}, {'a row without a token' if text is None else repr(text)}, does not occur in the data"
    if mask_token_id is not None:
        what = f"mask_token_id must lie in 0 .. {table - 1}, the embedding rows, got {mask_token_id}"
        raise ValueError(f"{what}: {advice})")
    if tokenizer is None:
        raise ValueError("no mask token: there is no tokenizer to find one, name one (--mask-token-id)")
    raise ValueError(f"no mask token: the tokenizer has none, and no embedding row is free; {advice})")


def _rope(config: Any) -> drafter_config.Rope:
    """Return the target's RoPE if drafters support it, else default RoPE with the target's theta."""
    given = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in given.values()):
        given = given.get("full_attention") or next(value for value in given.values() if isinstance(value, dict))
    theta = given.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    partial = given.get("partial_rotary_factor") not in (None, 1.0)
    if given.get("rope_type", "default") in drafter_config.ROPE_TYPES.keys() - {"default"} and not partial:
        longest = getattr(config, "max_position_embeddings", None)
        given = {"rope_parameters": given, "rope_theta": theta, "max_position_embeddings": longest}
        return drafter_config.read_rope(given, {}, 2)  # what it keeps does not depend on the width of a head
    return drafter_config.Rope(theta=float(theta))


def draft_config(  # noqa: PLR0913 - public, each documented
    target: nn.Module,
    *,
    mask_token_id: int,
    num_layers: int = 5,
    block_size: int = 16,
    target_layer_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    sliding_window: int = 0,
    draft_vocab_size: int | None = None,
    markov_rank: int = 0,
    predicts_from_anchor: bool = False,
) -> DraftConfig:
    """Return the config of a drafter as wide as ``target``, with the same heads, RoPE and scales.

    Args:
        target: a causal language model of transformers.
        mask_token_id: see `choose_mask_id`.
        num_layers: number of draft layers.
        block_size: tokens per block, the anchor included; at least 2.
        target_layer_ids: tapped layers; None for the published rule (`dflash.drafter.build_target_layer_ids`).
        intermediate_size: width of the MLP; None for the target's.
        sliding_window: window of all layers but the last, which are then causal inside the block; 0 for none.
        draft_vocab_size: number of tokens that can be drafted, see `adopt_head_`; None for all.
        markov_rank: columns of a Markov head, which scores each token by the one before it; 0 for none.
        predicts_from_anchor: the anchor's row predicts too, as in DSpark.

    Raises:
        ValueError: a number is out of range. The message names it.
    """
    # 1. Check the numbers
    model = targets.unwrap(target)
    config = targets.text_config(model)
    total = config.num_hidden_layers
    limits = [("layers", num_layers, 1), ("block size", block_size, 2), ("sliding window", sliding_window, 0)]
    limits += [("intermediate size", intermediate_size, 1), ("draft vocabulary", draft_vocab_size, 1)]
    limits += [("Markov rank", markov_rank, 0)]
    for name, value, least in limits:
        if value is not None and value < least:
            raise ValueError(f"the drafter's {name} must be at least {least}, got {value}")
    if draft_vocab_size is not None and draft_vocab_size >= config.vocab_size:
        most = f"below the target's {config.vocab_size}, got {draft_vocab_size}: leave it out for all"
        raise ValueError(f"the drafter's draft vocabulary must be {most}")
    taps = target_layer_ids
    taps = tuple(drafter_config.build_target_layer_ids(total, num_layers) if taps is None else taps)
    if not taps or min(taps) < 0 or max(taps) >= total:
        raise ValueError(f"target_layer_ids must be layers of the target, 0 .. {total - 1}, got {list(taps)}")
    # 2. Copy everything else from the target
    first = (getattr(config, "per_layer_config", None) or [config])[0]  # Gemma 4's layers have a config each
    width = intermediate_size or getattr(first, "intermediate_size", None) or 3 * config.hidden_size
    heads = first.num_attention_heads
    kv_heads = getattr(first, "num_key_value_heads", None) or heads
    # The factor on the embeddings is in the module (Gemma) or in the forward pass (Granite)
    embedding = model.get_input_embeddings()
    factors = (embedding, "scalar_embed_scale"), (embedding, "embed_scale"), (config, "embedding_multiplier")
    scale = next((value for owner, name in factors if (value := getattr(owner, name, None)) is not None), None)
    multiplier, softcap = targets.logit_scale(model)
    windowed = [sliding_window > 0 and i < num_layers - 1 for i in range(num_layers)]
    return DraftConfig(
        hidden_size=config.hidden_size,
        intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(first, "head_dim", None) or config.hidden_size // heads,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        causal=tuple(windowed),
        window=tuple(sliding_window if one else 0 for one in windowed),
        rope=_rope(config),
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        input_embedding_scale=1.0 if scale is None else float(scale),
        output_multiplier=multiplier,
        final_logit_softcapping=softcap,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        markov_rank=markov_rank,
        predicts_from_anchor=predicts_from_anchor,
        own_parts=() if draft_vocab_size is None else ("lm_head",),
        num_target_layers=total,
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
    )


@torch.no_grad()
def new_drafter(config: DraftConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> Drafter:
    """Return a float32 drafter with random weights; the same seed gives the same ones.

    Norms are 1 and biases 0. Matrices are normal with deviation ``1 / sqrt(inputs)``; those that write to the residual
    stream are smaller by ``sqrt(2 * layers)``. What DFlash 2 adds starts as in `add_dflash2`.
    """
    if config.dflash2 is not None:
        first = new_drafter(dataclasses.replace(config, dflash2=None), seed=seed, device=device)
        return add_dflash2(first, config.dflash2, seed=seed)
    drafter = Drafter(config, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if name.endswith("markov_w2.weight"):
            parameter.zero_()  # so the head adds nothing at first
            continue
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = parameter.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * config.num_hidden_layers) ** 0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu") * std)
    return drafter


@torch.no_grad()
def adopt_head_(drafter: Drafter, target: nn.Module, rows: Any) -> None:
    """Let a drafter with a reduced vocabulary draft the most frequent tokens, by the target's rows for them.

    Args:
        drafter: a new drafter with a ``draft_vocab_size``; its ``d2t`` and head are written.
        target: the causal language model.
        rows: ``datasets.Dataset`` with ``input_ids`` and ``loss_mask``. Tokens that the target wrote are counted.
    """
    config = drafter.config
    counts = torch.zeros(config.vocab_size, dtype=torch.int64, device="cpu")
    for part in rows.with_format("numpy").iter(1024):
        for ids, mask in zip(part["input_ids"], part["loss_mask"], strict=True):
            counts += torch.bincount(torch.from_numpy(ids[mask != 0]).long(), minlength=config.vocab_size)
    kept = counts.argsort(descending=True, stable=True)[: config.draft_vocab_size].sort().values
    drafter.d2t.copy_(kept - torch.arange(len(kept), device="cpu"))
    head = targets.unwrap(target).get_output_embeddings().weight
    drafter.lm_head.weight.copy_(head[kept.to(head.device)])


@torch.no_grad()
def adopt_layers_(drafter: Drafter, target: nn.Module) -> bool:
    """Start a new drafter as the last layers of a Llama, Mistral or Qwen3, which read its last tap as their context.

    docs/training.md says what that is worth. Queries and keys that the target does not normalize get the size that
    they have there on average.

    Args:
        drafter: from `new_drafter`, or one of DFlash 2 made of that.
        target: the causal language model.

    Returns:
        False if the target is none of these or has fewer layers or other shapes; nothing is written then.
    """
    decoder, own = targets.unwrap(target).get_decoder(), [dict(layer.named_parameters()) for layer in drafter.layers]
    if type(decoder).__name__ not in _ADOPTED or len(decoder.layers) < len(own):
        return False
    adopted = [dict(layer.named_parameters()) for layer in decoder.layers[-len(own) :]]
    for mine, theirs in zip(own, adopted, strict=True):
        if any(name not in mine or mine[name].shape != weight.shape for name, weight in theirs.items()):
            return False
    for mine, theirs in zip(own, adopted, strict=True):
        for name, weight in theirs.items():
            mine[name].copy_(weight)
        for kind in "qk":
            if (name := f"self_attn.{kind}_norm.weight") not in theirs:
                rows = theirs[f"self_attn.{kind}_proj.weight"] * theirs["input_layernorm.weight"]
                mine[name].fill_(rows.float().square().sum(1).mean().sqrt())
    drafter.norm.weight.copy_(decoder.norm.weight)
    drafter.hidden_norm.weight.copy_(adopted[0]["input_layernorm.weight"])
    drafter.fc.weight.mul_(0.1)[:, -drafter.config.hidden_size :].diagonal().add_(1)
    return True


_ADOPTED = ("LlamaModel", "MistralModel", "Qwen3Model")  # their layers are a drafter's, but for norms in attention


def visible_keys(anchors: Tensor, length: int, block_size: int, causal: bool, window: int) -> Tensor:
    """Return the keys that each slot of each block sees, ``[batch, anchors, block, keys]`` bool, its own keys last."""
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


def _matmul_mask(anchors: Tensor, length: int, block: int, causal: bool, window: int, group: int) -> Tensor:
    """Return ``[batch, anchors * group * block, length + block]`` bool, True where a key is hidden."""
    visible = visible_keys(anchors, length, block, causal, window)
    return ~visible[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 3)


def _matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: Tensor, count: int
) -> Tensor:
    """Attend to the context with one product for all blocks, and to each block's own keys with a small product.

    It copies no context keys, and its forward and backward pass on CPU is faster than that of SDPA. On CUDA its scores
    would fill the memory: 2 GB per layer for 4,096 tokens, 512 blocks and 32 heads.
    """
    batch, rows, heads, dim = q.shape
    kv_heads, length = k.shape[2], context_k.shape[1]
    group, block = heads // kv_heads, rows // count
    with torch.autocast(q.device.type, enabled=False):  # softmax is float32 inside for every dtype
        packed = q.view(batch, count, block, kv_heads, group, dim).permute(0, 3, 1, 4, 2, 5) * dim**-0.5
        packed = packed.reshape(batch * kv_heads, count * group * block, dim)
        context_k, context_v = (x.transpose(1, 2).flatten(0, 1) for x in (context_k, context_v))
        k, v = (x.unflatten(1, (count, block)).permute(0, 3, 1, 2, 4).flatten(0, 2) for x in (k, v))
        before = packed @ context_k.transpose(1, 2)
        own = packed.view(batch * kv_heads * count, group * block, dim) @ k.transpose(1, 2)
        scores = torch.cat([before, own.view(batch * kv_heads, -1, block)], -1)
        if kv_heads > 1:
            mask = mask.repeat_interleave(kv_heads, 0)
        weights = scores.masked_fill_(mask, float("-inf")).softmax(-1)
        before, own = weights.split([length, block], -1)
        out = before @ context_v
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
        in_context = key < length
        seen = (in_context & (key < start)) | (~in_context & (other // block == own))
        if causal or window:
            ahead = torch.where(in_context, key, start + other % block) - start - row % block
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
    in_context = key < last.clamp(max=length)
    if window:
        in_context = in_context & (first - (key + _TILE - 1) < window)
    begin = length + row // block * block
    end = length + ((row + _TILE - 1).clamp(max=rows - 1) // block + 1) * block
    own = (key < end) & (key + _TILE > begin)
    # 3. Separate the tiles that it sees completely; they need no mask
    full = (key + _TILE <= first.clamp(max=length)) & (window == 0)
    tiles = [_tile_list(mask) for mask in ((in_context | own) & ~full, full)]
    return BlockMask.from_kv_blocks(*tiles[0], *tiles[1], _TILE, visible, (rows, keys))


def _tile_list(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key tiles each row tile sees, and all of them, seen first. ``seen [batch, rows, keys]``."""
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


ATTENTIONS = {"flex": (_flex_mask, _flex_attention), "matmul": (_matmul_mask, _matmul_attention)}


@torch.no_grad()
def add_dflash2(drafter: Drafter, parts: drafter_config.DFlash2Config, *, seed: int = 0) -> Drafter:
    """Return a DFlash 2 drafter with the weights of a first-generation one and parts that change nothing yet.

    Its convolutions are the identity. Its successor codebook is zero, so every pair of tokens scores 0. The other two
    factors of a score are random, since the product of two zeros would have no gradient.

    Raises:
        ValueError: ``parts`` do not fit the drafter, or it is a DFlash 2 drafter already.
    """
    config = drafter.config
    if config.dflash2 is not None:
        raise ValueError("the drafter is a DFlash 2 drafter already")
    if config.markov_rank or config.draft_vocab_size is not None:
        raise ValueError("a DFlash 2 drafter has no Markov head and the whole vocabulary: leave out both")
    drafter_config.check_dflash2(parts, config.hidden_size, config.vocab_size)
    if (taps := parts.conv_kernel_size) > config.block_size:  # the reference package could not run it
        raise ValueError(f"the drafter: conv_kernel_size must be at most block_size {config.block_size}, got {taps}")
    out = Drafter(dataclasses.replace(config, dflash2=parts), dtype=drafter.dtype, device=drafter.device)
    out.load_state_dict(drafter.state_dict(), strict=False)
    for layer in out.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.base_kernel.zero_()[:, 0] = 1
            conv.kernel_projection.weight.zero_()
    selector, generator = out.candidate_selector, torch.Generator().manual_seed(seed)
    selector.successor_codebook.zero_()
    for factor in (selector.predecessor_codebook, selector.hidden_projection.weight):
        values = torch.randn(factor.shape, generator=generator, dtype=torch.float32, device="cpu")
        factor.copy_(values * factor.shape[1] ** -0.5)
    return out


def convolve(x: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
    """Add up rows of ``x [..., block, hidden]``, up to ``taps - 1`` back.

    Weights are ``base [taps, hidden]`` plus ``dynamic [..., block, taps, groups]``, shared by a group of channels.
    """
    rows, groups = x.shape[-2], dynamic.shape[-1]
    grouped = x.unflatten(-1, (groups, -1))
    terms = []
    for tap in range(min(len(base), rows)):
        weight = base[tap].unflatten(-1, (groups, -1)) + dynamic[..., tap:, tap, :, None]
        terms.append(F.pad(weight * grouped[..., : rows - tap, :, :], (0, 0, 0, 0, tap, 0)))
    return sum(terms[1:], terms[0]).flatten(-2)


def prepare(conv: nn.Module | None, hidden: Tensor, block: int) -> tuple[Tensor, Tensor | None]:
    """Convolve a sublayer's input ``[batch, anchors * block, hidden]``; return it and both sides' dynamic kernels."""
    if conv is None:
        return hidden, None
    blocks = hidden.unflatten(1, (-1, block))
    kernels = conv.kernel_projection(blocks).unflatten(-1, (2, conv.base_kernel.shape[1], -1))
    return convolve(blocks, conv.base_kernel[0], kernels[..., 0, :, :]).flatten(1, 2), kernels


def finish(conv: nn.Module | None, hidden: Tensor, kernels: Tensor | None) -> Tensor:
    """Convolve a sublayer's output with the kernels that `prepare` made of its input."""
    if conv is None or kernels is None:
        return hidden
    blocks = hidden.unflatten(1, kernels.shape[1:3])
    return convolve(blocks, conv.base_kernel[1], kernels[..., 1, :, :]).flatten(1, 2)


def candidate_scores(
    selector: CandidateSelector, hidden: Tensor, logits: Tensor, previous: Tensor, candidates: Tensor
) -> Tensor:
    """Return the selector's scores ``[rows, top_k]``: a candidate's logit plus its score after the token before."""
    query = selector.hidden_projection(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # as the engine does, which sums in float32
        given = F.embedding(previous, selector.predecessor_codebook).float() * query.float()
        successors = F.embedding(candidates, selector.successor_codebook).float()
        pairs = torch.bmm(successors, given[..., None]).squeeze(-1)
    return logits.gather(-1, candidates).float() + pairs


def check_trainable(config: DraftConfig) -> None:
    """Raise ``ValueError`` if a drafter has something that cannot be trained here. The message names it."""
    own = ", ".join(part for part in config.own_parts if part != "lm_head")
    is_reduced = config.dflash2 is not None and config.draft_vocab_size is not None
    for applies, what, why in (
        (config.attention_sinks, "drafter with attention sinks", "the differentiable attention has none"),
        (is_reduced, "DFlash 2 drafter with a draft vocabulary", "its codebooks are of the whole one"),
        (
            config.dflash2 and config.predicts_from_anchor,
            "DFlash 2 drafter from the anchor's row",
            "no file could say so",
        ),
        (own, f"drafter with its own {own}", "training uses the target's"),
        (config.scales_like_target, "Muse Glimmer assistant", "training takes no multiplier from the target"),
        (config.attention_value_scale != 1.0, "drafter with attention_value_scale", "the attention here has none"),
    ):
        if applies:
            raise ValueError(f"a {what} cannot be trained: {why}")


class TrainableDrafter(nn.Module):
    """A drafter with gradients. Its parameters stay views of its packed tensors, so inference uses each step's weights.

    Args:
        drafter: the drafter, in float32 for training. This module holds its parameters under ``drafter.``.
        attention: ``"flex"`` (FlexAttention) or ``"matmul"``; None chooses the former on CUDA, the latter elsewhere.
    """

    def __init__(self, drafter: Drafter, *, attention: str | None = None) -> None:
        super().__init__()
        check_trainable(drafter.config)
        if attention is not None and attention not in ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)} or None, got {attention!r}")
        self.drafter = drafter
        if not any(parameter.requires_grad for parameter in drafter.parameters()):  # nobody has chosen
            drafter.requires_grad_(True)
        if "lm_head" in drafter.config.own_parts:
            drafter.lm_head.requires_grad_(False)
        self.attention = attention

    def forward(self, context: Tensor, block_embeds: Tensor, anchors: Tensor) -> Tensor:
        """Return the hidden states of every slot of every block.

        Args:
            context: ``[batch, length, taps * hidden]``, the target's states at positions 0 .. length - 1.
            block_embeds: ``[batch, anchors, block, hidden]``, the target's raw embeddings of the blocks' tokens.
            anchors: ``[batch, anchors]`` int64, each block's first position.

        Returns:
            ``[batch, anchors, block, hidden]`` after the final norm. Slot k > 0 predicts the token at ``anchor + k``:
            it is row k of the block, or row k - 1 if the anchor's row predicts.
        """
        # 1. Fuse the target's states, and compute rotations
        drafter, config = self.drafter, self.drafter.config
        if config.predicts_from_anchor:
            block_embeds = block_embeds[:, :, :-1]
        (count, block), length = block_embeds.shape[1:3], context.shape[1]
        make_mask, attend = ATTENTIONS[self.attention or ("flex" if context.is_cuda else "matmul")]
        features = _norm(drafter.hidden_norm, drafter.fc(context))
        slots = anchors[..., None] + torch.arange(block, device=anchors.device)
        block_rotation = _rotation(drafter, slots.flatten(1))
        context_rotation = _rotation(drafter, torch.arange(length, device=anchors.device)[None])
        # 2. Make one mask for each kind of layer
        kinds, group = zip(config.causal, config.window, strict=True), config.num_attention_heads // config.num_kv_heads
        masks = {kind: make_mask(anchors, length, block, *kind, group) for kind in set(kinds)}
        # 3. Run the layers
        residual = drafter.scale_embeddings(block_embeds).flatten(1, 2)
        for layer, *kind in zip(drafter.layers, config.causal, config.window, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            attention_conv, mlp_conv = (getattr(layer, name, None) for name in ("attention_conv", "mlp_conv"))
            hidden, kernels = prepare(attention_conv, _norm(layer.input_layernorm, residual), block)
            q = _project(attention.q_proj, attention.q_norm, hidden, config.head_dim, block_rotation)
            k = _project(attention.k_proj, attention.k_norm, hidden, config.head_dim, block_rotation)
            context_k = _project(attention.k_proj, attention.k_norm, features, config.head_dim, context_rotation)
            v, context_v = (attention.v_proj(x).unflatten(-1, (-1, config.head_dim)) for x in (hidden, features))
            out = attend(q, k, v, context_k, context_v, masks[tuple(kind)], count)
            residual = residual + finish(attention_conv, attention.o_proj(out.flatten(2)), kernels)
            hidden, kernels = prepare(mlp_conv, _norm(layer.post_attention_layernorm, residual), block)
            out = mlp.down_proj(F.silu(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))
            residual = residual + finish(mlp_conv, out, kernels)
        hidden = _norm(drafter.norm, residual).unflatten(1, (count, block))
        return F.pad(hidden, (0, 0, 1, 0)) if config.predicts_from_anchor else hidden


def _project(linear: nn.Linear, norm: nn.RMSNorm, x: Tensor, head_dim: int, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys, ``[batch, rows, heads, head_dim]``, normalized and rotated."""
    return _rotate(_norm(norm, linear(x).unflatten(-1, (-1, head_dim))), rotation)


def _norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """Return RMSNorm, computed in float32, in the dtype of ``x``."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + module.eps).rsqrt() * module.weight).to(x.dtype)


def _rotation(drafter: Drafter, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(cos, sin)`` of ``positions [batch, rows]``, each ``[batch, rows, 1, head_dim / 2]`` float32."""
    cos, sin = drafter.rotary(positions)
    return cos[:, :, None], sin[:, :, None]


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply half-split RoPE to ``x [batch, rows, heads, head_dim]``."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


# ---------------------------------------------------------------------------------------------- the loss


# Most logits held at once. More rows run in chunks, and the backward pass computes their logits again.
CHUNK_ELEMENTS = 1 << 26


@dataclass
class BlockLoss:
    """Sums over a batch, to be added up over micro-batches and processes. What was not requested is None.

    Attributes:
        loss: ``sum(weight * loss)``, with its autograd graph.
        weight: sum of the weights.
        cross_entropy, distance, selector_loss: weighted sums, detached.
        correct, counted: ``[block - 1]``, correct tokens and all tokens per slot, unweighted.
        accepted: tokens that the correct prefixes of complete blocks would emit, bonus token included.
        blocks: number of complete blocks: every slot has a weight.
        found: number of labels that are among the selector's candidates.
    """

    loss: Tensor
    weight: Tensor
    cross_entropy: Tensor
    distance: Tensor | None = None
    selector_loss: Tensor | None = None
    correct: Tensor | None = None
    counted: Tensor | None = None
    accepted: Tensor | None = None
    blocks: Tensor | None = None
    found: Tensor | None = None


class Teacher(NamedTuple):
    """The target's distribution over each slot's token, and its share of the loss."""

    states: Tensor  # [batch, anchors, block, hidden], what the target predicts from
    logits: Callable[[Tensor], Tensor]  # from states to logits, of the tokens that the drafter's are of
    share: float  # DSpark: 0.9


class _SlotLosses(NamedTuple):
    """Losses of some slots, each ``[slots]``; and which drafts are correct, and which labels are candidates."""

    cross_entropy: Tensor
    distance: Tensor
    selector: Tensor
    correct: Tensor
    found: Tensor


def block_loss(  # noqa: PLR0913 - public, each documented
    hidden: Tensor,
    blocks: BatchBlocks,
    logits: Callable[[Tensor], Tensor],
    *,
    draft_ids: Tensor | None = None,
    is_dynamic: bool = False,
    selector: CandidateSelector | MarkovHead | None = None,
    selector_weight: float = 1.0,
    teacher: Teacher | None = None,
    statistics: bool = False,
) -> BlockLoss:
    """Return the weighted sum of the losses of all slots with a weight.

    ``loss = sum_k w_k ((1 - t) CE(q_k, label_k) + t |q_k - p_k|_1 + selector_weight CE(s_k, label_k))``, where q is the
    drafter's distribution, p the target's with the teacher's share t, and s the selector's over the candidates, given
    the token before. A label that is no candidate takes the place of the last one.

    Args:
        hidden: ``[batch, anchors, block, hidden]``, from the drafter.
        blocks: the blocks of the same batch.
        logits: function from the drafter's hidden states to logits.
        draft_ids: ``[vocab]`` int64, each token's place among the logits, -1 for tokens that cannot be drafted; None
            for all in order. A slot whose label cannot be drafted has no weight and is never correct.
        is_dynamic: weigh the slots by D-PACE (`dpace_weights`) instead of by ``blocks.weights``.
        selector: a DFlash 2 drafter's selector, or a Markov head, which is a part of q; None without either.
        selector_weight: weight of the selector's loss.
        teacher: the target's distribution; None for t = 0.
        statistics: count correct tokens too: those that a greedy draft has while it is correct.
    """
    is_markov = isinstance(selector, MarkovHead)
    selects = selector is not None and not is_markov
    # 1. Pick the slots with a weight. Slot 0, which has none, holds the token before slot 1
    rows = blocks.weights.flatten().nonzero().squeeze(1)
    tokens = blocks.labels.flatten()
    labels = tokens if draft_ids is None else draft_ids[tokens]
    states = hidden.new_empty(len(rows), 0) if teacher is None else teacher.states.flatten(0, 2)[rows]
    picked = hidden.flatten(0, 2)[rows], labels[rows], tokens[rows - 1], states

    def compare(hidden: Tensor, labels: Tensor, previous: Tensor, states: Tensor) -> _SlotLosses:
        # 2. Compare the logits with the labels
        scores = logits(hidden).float()
        if is_markov:
            pairs = F.linear(F.embedding(previous, selector.markov_w1.weight), selector.markov_w2.weight)
            scores = scores + pairs.float()
        entropy = F.cross_entropy(scores, labels, reduction="none", ignore_index=-1)
        distance = selected = torch.zeros_like(entropy)
        correct = found = torch.zeros_like(labels[:0], dtype=torch.bool)
        if teacher is not None:
            distance = (scores.softmax(-1) - teacher.logits(states).float().softmax(-1)).abs().sum(-1)
        if statistics:
            correct = scores.detach().argmax(-1) == labels
        # 3. Compare the selector's scores of the candidates with the labels. Its choice is drafted
        if selects:
            candidates, found = _candidates(scores.detach(), labels, selector.top_k)
            place = (candidates == labels[:, None]).int().argmax(-1)
            pairs = candidate_scores(selector, hidden, scores, previous, candidates)
            selected = F.cross_entropy(pairs, place, reduction="none")
            correct = (pairs.detach().argmax(-1) == place) & found
        return _SlotLosses(entropy, distance, selected, correct, found)

    # 4. Do so in chunks if there are too many logits
    width = logits(picked[0][:0]).shape[-1]
    if selects:
        width = max(width, selector.top_k * selector.successor_codebook.shape[1])
    size = max(1, CHUNK_ELEMENTS // width)
    if len(rows) <= size:
        slots = compare(*picked)
    else:
        chunks = zip(*(x.split(size) for x in picked), strict=True)
        parts = [checkpoint(compare, *chunk, use_reentrant=False) for chunk in chunks]
        slots = _SlotLosses(*map(torch.cat, zip(*parts, strict=True)))
    # 5. Weigh the slots
    weights = blocks.weights.flatten()[rows]
    if is_dynamic:
        confidence = torch.where(labels[rows] < 0, 0.0, slots.cross_entropy.detach().neg().exp())
        grid = torch.zeros_like(blocks.weights).flatten().index_copy(0, rows, confidence).view_as(blocks.weights)
        weights = dpace_weights(grid, blocks.weights > 0).flatten()[rows]
    weights = torch.where(labels[rows] < 0, 0.0, weights)
    entropy, distance, selected = (torch.dot(part, weights) for part in slots[:3])
    share = 0.0 if teacher is None else teacher.share
    loss = (1 - share) * entropy + share * distance + selector_weight * selected
    out = BlockLoss(loss, weights.sum(), entropy.detach())
    out.distance = None if teacher is None else distance.detach()
    out.selector_loss = selected.detach() if selects else None
    # 6. Count correct tokens
    if statistics:
        _count(out, blocks, rows, slots.correct)
        out.found = slots.found.sum() if selects else None
    return out


def dpace_weights(confidence: Tensor, counted: Tensor, alpha: float = 0.5) -> Tensor:
    """Return D-PACE's slot weights, by how much each slot adds to the expected accepted length (arXiv 2605.18810).

    ``w_k = sum_{m >= k} prod_{i <= m} ((1 - alpha) q_i + alpha)``, with the drafter's probability q of the right token.

    Args:
        confidence: ``[batch, anchors, block]`` float32, the probabilities.
        counted: ``[batch, anchors, block]`` bool, slots that have a loss.
        alpha: how much of a slot's weight does not depend on the slots before it.
    """
    smooth = torch.where(counted, (1 - alpha) * confidence + alpha, 1.0)
    reached = smooth.cumprod(-1) * counted
    return reached.flip(-1).cumsum(-1).flip(-1) * counted


def _candidates(scores: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's best ids, the last replaced where the label is missing, ``[rows, count]``; where it is not."""
    ids = scores.topk(count).indices
    found = (ids == labels[:, None]).any(-1)
    ids[:, -1] = torch.where(found, ids[:, -1], labels)
    return ids, found


@torch.no_grad()
def _count(out: BlockLoss, blocks: BatchBlocks, rows: Tensor, right: Tensor) -> None:
    counted = blocks.weights > 0
    correct = torch.zeros_like(counted)
    correct.view(-1)[rows] = right
    out.correct, out.counted = correct[..., 1:].sum((0, 1)), counted[..., 1:].sum((0, 1))
    complete = counted[..., 1:].all(-1)
    lengths = 1 + correct[..., 1:].long().cumprod(-1).sum(-1)
    out.accepted, out.blocks = (lengths * complete).sum(), complete.sum()

"""What DFlash 2 adds to a drafter, with gradients: convolutions, the selector's scores, and how both start.

`ops.reference.dynamic_conv` is not used here: a weight of exactly zero, where training starts, has no gradient there.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from ...drafter import CandidateSelector, DFlash2Config, Drafter, GroupedConv, check_dflash2

__all__ = ["add_dflash2", "candidate_scores", "convolve", "finish", "prepare"]


@torch.no_grad()
def add_dflash2(drafter: Drafter, parts: DFlash2Config, *, seed: int = 0) -> Drafter:
    """Return a DFlash 2 drafter with the weights of a first-generation one and parts that change nothing yet.

    Its convolutions are the identity. Its successor codebook is zero, so every pair of tokens scores 0. The other two
    factors of a score are random, since the product of two zeros would have no gradient.

    Args:
        drafter: of the first generation; its weights are copied.
        parts: the shape of what is added.
        seed: the same seed gives the same codebook.

    Returns:
        The drafter, in the dtype and on the device of the old one.

    Raises:
        ValueError: ``parts`` do not fit the drafter, or it is a DFlash 2 drafter already.
    """
    config = drafter.config
    if config.dflash2 is not None:
        raise ValueError("the drafter is a DFlash 2 drafter already")
    check_dflash2(parts, config.hidden_size, config.vocab_size)
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
    """Add up each block's rows up to ``taps - 1`` rows back. A weight is a fixed part plus one that depends on the row.

    Args:
        x: ``[..., block, hidden]``.
        base: ``[taps, hidden]``, the fixed part; tap i weighs the row i rows before.
        dynamic: ``[..., block, taps, groups]``, the other part; a group of channels shares it.

    Returns:
        ``[..., block, hidden]``.
    """
    rows, groups = x.shape[-2], dynamic.shape[-1]
    grouped = x.unflatten(-1, (groups, -1))
    terms = []
    for tap in range(min(len(base), rows)):
        weight = base[tap].unflatten(-1, (groups, -1)) + dynamic[..., tap:, tap, :, None]
        terms.append(F.pad(weight * grouped[..., : rows - tap, :, :], (0, 0, 0, 0, tap, 0)))
    return sum(terms[1:], terms[0]).flatten(-2)


def prepare(conv: GroupedConv | None, hidden: Tensor, block: int) -> tuple[Tensor, Tensor | None]:
    """Convolve a sublayer's input.

    Args:
        conv: the sublayer's convolution; None for none.
        hidden: ``[batch, anchors * block, hidden]``.
        block: rows per block.

    Returns:
        The input, and the dynamic kernels of both sides, ``[batch, anchors, block, 2, taps, groups]``.
    """
    if conv is None:
        return hidden, None
    blocks = hidden.unflatten(1, (-1, block))
    kernels = conv.kernel_projection(blocks).unflatten(-1, (2, conv.base_kernel.shape[1], -1))
    return convolve(blocks, conv.base_kernel[0], kernels[..., 0, :, :]).flatten(1, 2), kernels


def finish(conv: GroupedConv | None, hidden: Tensor, kernels: Tensor | None) -> Tensor:
    """Convolve a sublayer's output with the kernels that `prepare` made of its input."""
    if conv is None or kernels is None:
        return hidden
    blocks = hidden.unflatten(1, kernels.shape[1:3])
    return convolve(blocks, conv.base_kernel[1], kernels[..., 1, :, :]).flatten(1, 2)


def candidate_scores(
    selector: CandidateSelector, hidden: Tensor, logits: Tensor, previous: Tensor, candidates: Tensor
) -> Tensor:
    """Return the selector's scores: a candidate's logit, plus its score after the token before.

    Args:
        selector: the drafter's selector.
        hidden: ``[rows, hidden]``, from the drafter.
        logits: ``[rows, vocab]``.
        previous: ``[rows]`` int64, the tokens before.
        candidates: ``[rows, top_k]`` int64.

    Returns:
        ``[rows, top_k]`` float32.
    """
    query = selector.hidden_projection(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # as the engine does, which sums in float32
        given = F.embedding(previous, selector.predecessor_codebook).float() * query.float()
        successors = F.embedding(candidates, selector.successor_codebook).float()
        pairs = torch.bmm(successors, given[..., None]).squeeze(-1)
    return logits.gather(-1, candidates).float() + pairs

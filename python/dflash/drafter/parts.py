"""The parts that only some drafters have: DFlash 2's, DSpark's, and weights that follow from others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..decoder import BlockConv
from .keys import DFlash2Config


def empty_parameter(like: Tensor, *shape: int) -> nn.Parameter:
    """Return an uninitialized parameter with the dtype and device of ``like``."""
    return nn.Parameter(like.new_empty(shape), requires_grad=False)


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear module whose parameters are these tensors, or views of the same storage."""
    out, size = weight.shape
    linear = nn.Linear(size, out, bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class Holder(nn.Module):
    """A module that only gives its parameter ``weight`` a name."""

    def __init__(self, like: Tensor, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = empty_parameter(like, rows, columns)


# ---------------------------------------------------------------------------------------------- DFlash 2


class GroupedConv(nn.Module):
    """The parameters of a convolution over a block's rows, one side in front of a sublayer and one after it."""

    def __init__(self, config: DFlash2Config, hidden: int, like: Tensor) -> None:
        super().__init__()
        taps, groups = config.conv_kernel_size, hidden // config.conv_group_size
        self.base_kernel = empty_parameter(like, 2, taps, hidden)
        self.kernel_projection = linear_of(like.new_empty(2 * taps * groups, hidden))

    def weights(self) -> BlockConv:
        """Return the parameters as a decoder stack takes them."""
        return BlockConv(self.base_kernel, self.kernel_projection.weight)


class PairWeights(NamedTuple):
    """What scores a candidate c after the token a: ``sum over r of A[a, r] * query[r] * B[c, r]``."""

    predecessors: Tensor  # A, [vocab, rank]
    queries: Tensor  # [batch, drafts, rank], one per position
    successors: Tensor  # B, [vocab, rank]

    def scores(self, draft: int, previous: Tensor, candidates: Tensor) -> Tensor:
        """Return the scores ``[batch, count]`` float32 of one position's candidates.

        Args:
            draft: which position.
            previous: ``[batch]`` int64, the token before it.
            candidates: ``[batch, count]`` int64. Negative ids get the score of id 0.
        """
        given = self.predecessors[previous].float() * self.queries[:, draft].float()
        return (self.successors[candidates.clamp(min=0)].float() * given[:, None]).sum(-1)


class CandidateSelector(nn.Module):
    """Scores each of the ``top_k`` candidates of a position by the token that was drafted before it."""

    def __init__(self, config: DFlash2Config, hidden: int, vocab: int, like: Tensor) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = empty_parameter(like, vocab, config.selector_rank)
        self.successor_codebook = empty_parameter(like, vocab, config.selector_rank)
        self.hidden_projection = linear_of(like.new_empty(config.selector_rank, hidden))

    def pair_weights(self, hidden: Tensor) -> PairWeights:
        """Return what scores the pairs of a block, from the rows that predict, ``[batch, drafts, hidden]``."""
        queries = ops.linear(hidden, self.hidden_projection.weight)
        return PairWeights(self.predecessor_codebook, queries, self.successor_codebook)


# ---------------------------------------------------------------------------------------------- DSpark


class MarkovHead(nn.Module):
    """Adds ``W2 W1[a]`` to the logits that follow the token ``a``: a candidate selector whose queries are all ones.

    The head was trained over the whole vocabulary, so its candidates are as many as the ops take. ``draft_vocab`` is
    the number of rows of ``W2``, if that knows a part of the vocabulary only.
    """

    def __init__(self, rank: int, vocab: int, draft_vocab: int | None, like: Tensor) -> None:
        super().__init__()
        self.top_k = min(vocab, ops.MAX_CANDIDATES)
        self.markov_w1, self.markov_w2 = Holder(like, vocab, rank), Holder(like, draft_vocab or vocab, rank)
        self.spread_w2 = None if draft_vocab is None else DerivedWeight(like.new_zeros(vocab, rank))

    def refresh(self, d2t: Tensor) -> None:
        """Give each row of a reduced ``W2`` the place of its token among the target's (`target_ids`)."""
        weight, full = self.markov_w2.weight, self.spread_w2.weight.shape
        self.spread_w2.follow_([weight, d2t], lambda: weight.new_zeros(full).index_copy_(0, target_ids(d2t), weight))

    def pair_weights(self, hidden: Tensor) -> PairWeights:
        """Return what scores the pairs of a block, from the rows that predict, ``[batch, drafts, hidden]``."""
        successors = (self.markov_w2 if self.spread_w2 is None else self.spread_w2).weight
        queries = hidden.new_ones(*hidden.shape[:-1], successors.shape[1])
        return PairWeights(self.markov_w1.weight, queries, successors)


def target_ids(d2t: Tensor) -> Tensor:
    """Return the target's id of each token of a reduced vocabulary: ``d2t`` stores the difference."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


# ---------------------------------------------------------------------------------------------- derived weights


class DerivedWeight(nn.Module):
    """A tensor that follows from others, at a fixed address. It is computed again only after one of them has changed.

    Tensors that were replaced, or written to where torch counts it, have changed. torch counts neither writes through
    ``tensor.data`` or raw memory, nor any to a tensor that was made in inference mode. What follows from the latter is
    computed at every look.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self._seen: list[tuple[weakref.ref[Tensor], object]] = []

    @torch.no_grad()
    def follow_(self, sources: Sequence[Tensor], compute: Callable[[], Tensor]) -> None:
        """Take the value of ``compute``, which makes it from ``sources``, if one of these has changed."""
        if self._is_current(sources):
            return
        value = compute()
        if (value.dtype, value.device) != (self.weight.dtype, self.weight.device):
            self.weight = value
        # A write would look like other weights to whoever compares versions, such as the reuse of prefixes.
        elif not value.is_meta and not torch.equal(self.weight, value):
            self.weight.copy_(value)
        self._seen = [(weakref.ref(tensor), _version(tensor)) for tensor in (self.weight, *sources)]

    def forget(self) -> None:
        """Compute the tensor again at the next `follow_`."""
        self._seen = []

    def _is_current(self, sources: Sequence[Tensor]) -> bool:
        """Return True if no source was replaced or written to, and this module was not moved."""
        tensors = self.weight, *sources
        if len(tensors) != len(self._seen) or any(map(Tensor.is_inference, sources)):
            return False
        # By identity: an `id` may be that of a freed tensor, and `==` compares values.
        return all(
            ref() is tensor and version == _version(tensor)
            for (ref, version), tensor in zip(self._seen, tensors, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": []}  # a copy looks at sources of its own


def _version(tensor: Tensor) -> object:
    """Return what differs once a tensor was written to, moved or reshaped."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, None if tensor.is_inference() else tensor._version

"""What a DFlash 2 drafter adds: convolutions over a block's rows, and a selector that links the block's tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch import Tensor, nn

from .. import ops
from ..decoder import BlockConv
from .keys import DFLASH2_KEYS, Keys, is_dflash2

__all__ = ["CandidateSelector", "DFlash2Config", "GroupedConv", "PairWeights", "check_dflash2", "read_dflash2"]


@dataclass(frozen=True)
class DFlash2Config:
    """The shape of what DFlash 2 adds to a drafter. The defaults are those of published drafters.

    Attributes:
        conv_kernel_size: rows that a convolution reads, its own included.
        conv_group_size: channels that share the part of a kernel that depends on the row.
        selector_rank: columns of the codebooks.
        selector_top_k: candidates per position.
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16


def read_dflash2(keys: Keys, hidden: int, vocab: int | None) -> DFlash2Config | None:
    """Return what a config states of DFlash 2; None for a drafter of the first generation.

    Args:
        keys: of the config.
        hidden: its ``hidden_size``.
        vocab: its ``vocab_size``.

    Raises:
        ValueError: one of the four keys is missing, or does not fit the drafter.
    """
    if not is_dflash2(keys):
        return None
    values = {key: keys.value(key) for key in DFLASH2_KEYS}
    if missing := [key for key, value in values.items() if value is None]:
        raise keys.error(f"a DFlash 2 drafter states {', '.join(DFLASH2_KEYS)}, and {', '.join(missing)} is missing")
    if vocab is None:
        raise keys.error("vocab_size is missing: a DFlash 2 drafter's codebooks have that many rows")
    read = DFlash2Config(**{key: keys.integer(key, value, 1) for key, value in values.items()})
    if hidden % read.conv_group_size:
        raise keys.error(f"conv_group_size must divide hidden_size {hidden}, got {read.conv_group_size}")
    if read.selector_top_k > ops.MAX_CANDIDATES:
        raise keys.error(f"selector_top_k must be at most {ops.MAX_CANDIDATES}, got {read.selector_top_k}")
    if read.selector_top_k > vocab:
        raise keys.error(f"selector_top_k must be at most vocab_size {vocab}, got {read.selector_top_k}")
    return read


def check_dflash2(config: DFlash2Config, hidden: int, vocab: int | None) -> None:
    """Raise ``ValueError`` if a drafter ``hidden`` wide for ``vocab`` tokens cannot have these parts."""
    read_dflash2(Keys({"architectures": ["DFlash2DraftModel"], **asdict(config)}, "the drafter"), hidden, vocab)


class GroupedConv(nn.Module):
    """The parameters of a convolution over a block's rows, one side in front of a sublayer and one after it.

    Args:
        config: its shape.
        hidden: channels.
        like: a tensor whose dtype and device the parameters get.
    """

    def __init__(self, config: DFlash2Config, hidden: int, like: Tensor) -> None:
        super().__init__()
        taps, groups = config.conv_kernel_size, hidden // config.conv_group_size
        self.base_kernel = _parameter(like, 2, taps, hidden)
        self.kernel_projection = _linear(like, 2 * taps * groups, hidden)

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
    """Scores each candidate of a position by the token that was drafted before it.

    Args:
        config: its shape.
        hidden: width of the drafter.
        vocab: rows of the codebooks.
        like: a tensor whose dtype and device the parameters get.

    Attributes:
        top_k: candidates per position.
    """

    def __init__(self, config: DFlash2Config, hidden: int, vocab: int, like: Tensor) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = _parameter(like, vocab, config.selector_rank)
        self.successor_codebook = _parameter(like, vocab, config.selector_rank)
        self.hidden_projection = _linear(like, config.selector_rank, hidden)

    def pair_weights(self, hidden: Tensor) -> PairWeights:
        """Return what scores the pairs of a block.

        Args:
            hidden: ``[batch, drafts, hidden]``, the drafter's rows after the anchor's, after the final norm.
        """
        queries = ops.linear(hidden, self.hidden_projection.weight)
        return PairWeights(self.predecessor_codebook, queries, self.successor_codebook)


def _parameter(like: Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(like.new_empty(shape), requires_grad=False)


def _linear(like: Tensor, out: int, size: int) -> nn.Linear:
    linear = nn.Linear(size, out, bias=False, device="meta", dtype=like.dtype)
    linear.weight = _parameter(like, out, size)
    return linear

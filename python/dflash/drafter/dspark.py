"""What a DSpark drafter adds: an anchor's row that predicts, and a Markov head that links the block's tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import ops
from ..terminal import shortened
from .derived import DerivedWeight
from .dflash2 import DFlash2Config, PairWeights
from .keys import DSPARK_ARCHITECTURE, Keys
from .own_parts import target_ids

__all__ = ["MarkovHead", "read_dspark"]


def read_dspark(keys: Keys, vocab: int | None, dflash2: DFlash2Config | None) -> dict[str, Any]:
    """Return the fields ``predicts_from_anchor`` and ``markov_rank`` of a config.

    Args:
        keys: of the config.
        vocab: its ``vocab_size``.
        dflash2: what it states of DFlash 2.

    Raises:
        ValueError: the head is of another kind, does not fit the drafter, or it is not said which rows predict.
    """
    is_dspark = DSPARK_ARCHITECTURE in (keys.top.get("architectures") or [])
    rank, from_anchor = keys.value("markov_rank", 0), keys.value("sample_from_anchor")
    if rank:
        kind = keys.value("markov_head_type", "vanilla")
        if kind != "vanilla":
            raise keys.error(
                f"markov_head_type must be vanilla, got {shortened(kind)}: other heads are not implemented"
            )
        if vocab is None:
            raise keys.error("vocab_size is missing: a Markov head has that many rows")
        if dflash2 is not None:
            raise keys.error("markov_rank must be 0 in a DFlash 2 drafter, whose tokens a selector links already")
        if from_anchor is None and not is_dspark:
            raise keys.error(
                "sample_from_anchor must say whether the anchor's row predicts too: drafters with a Markov head are "
                f"trained either way. {DSPARK_ARCHITECTURE} in architectures would mean true"
            )
    return {"predicts_from_anchor": is_dspark if from_anchor is None else from_anchor, "markov_rank": rank}


class MarkovHead(nn.Module):
    """Adds ``W2 W1[a]`` to the logits that follow the token ``a``: a candidate selector whose queries are all ones.

    The head was trained over the whole vocabulary, so its candidates are as many as the ops take.

    Args:
        rank: columns of both tables.
        vocab: rows of ``W1``.
        draft_vocab: rows of ``W2``, if that knows a part of the vocabulary only.
        like: a tensor whose dtype and device the parameters get.

    Attributes:
        top_k: candidates per position.
    """

    def __init__(self, rank: int, vocab: int, draft_vocab: int | None, like: Tensor) -> None:
        super().__init__()
        self.top_k = min(vocab, ops.MAX_CANDIDATES)
        self.markov_w1, self.markov_w2 = nn.Module(), nn.Module()
        self.markov_w1.weight = nn.Parameter(like.new_empty(vocab, rank), requires_grad=False)
        self.markov_w2.weight = nn.Parameter(like.new_empty(draft_vocab or vocab, rank), requires_grad=False)
        self.spread_w2 = None if draft_vocab is None else DerivedWeight(like.new_zeros(vocab, rank))

    def refresh(self, d2t: Tensor) -> None:
        """Give each row of a reduced ``W2`` the place of its token among the target's (`target_ids`)."""
        weight, full = self.markov_w2.weight, self.spread_w2.weight.shape
        self.spread_w2.follow_([weight, d2t], lambda: weight.new_zeros(full).index_copy_(0, target_ids(d2t), weight))

    def pair_weights(self, hidden: Tensor) -> PairWeights:
        """Return what scores the pairs of a block.

        Args:
            hidden: ``[batch, drafts, hidden]``, the drafter's rows that predict.
        """
        successors = (self.markov_w2 if self.spread_w2 is None else self.spread_w2).weight
        queries = hidden.new_ones(*hidden.shape[:-1], successors.shape[1])
        return PairWeights(self.markov_w1.weight, queries, successors)

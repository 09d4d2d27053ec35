"""Logits processors and stopping criteria written in Python, which run on the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...settings import LogitsProcessor, StoppingCriterion

__all__ = ["HostRules"]


@dataclass(frozen=True)
class HostRules:
    """Python processors and criteria for the first ``rows`` rows of a batch; see `dflash.call.GenerateArguments`."""

    processors: tuple[LogitsProcessor, ...]
    criteria: tuple[StoppingCriterion, ...]
    rows: int

    def process(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Call every processor in order.

        Args:
            ids: ``[1, length]`` int64, the row so far.
            scores: ``[1, vocab]`` float32; may be overwritten.

        Returns:
            ``[1, vocab]`` float32.

        Raises:
            TypeError: a processor did not return a tensor.
            ValueError: it returned another shape, or turned numbers into NaN.
        """
        shape, valid = scores.shape, not scores.isnan().any()
        for processor in self.processors:
            scores = processor(ids, scores)
            name = getattr(processor, "__name__", type(processor).__name__)
            if not isinstance(scores, Tensor):
                raise TypeError(
                    f"logits_processor {name} must return scores {list(shape)}, got {type(scores).__name__}"
                )
            if scores.shape != shape:
                raise ValueError(f"logits_processor {name} must return scores {list(shape)}, got {list(scores.shape)}")
            if valid and scores.isnan().any():
                raise ValueError(f"logits_processor {name} returned NaN for position {ids.shape[1]}")
        return scores

    def stops(self, ids: Tensor) -> bool:
        """Ask every criterion, and return True if one of them ends the row ``ids [1, length]``."""
        results = []
        for criterion in self.criteria:
            result = criterion(ids, None)
            if not isinstance(result, (bool, Tensor)) or (isinstance(result, Tensor) and result.numel() != 1):
                name = getattr(criterion, "__name__", type(criterion).__name__)
                got = list(result.shape) if isinstance(result, Tensor) else repr(result)
                raise TypeError(f"stopping_criteria {name} must return a bool or a tensor of one, got {got}")
            results.append(bool(result))
        return any(results)

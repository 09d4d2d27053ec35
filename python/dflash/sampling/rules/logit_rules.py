"""Logit rules on the device: one small class per rule, applied in the order of ``RULES``.

Row ``j`` of a block chooses the token at position ``length + 1 + j``. Its prefix is ``tokens[: length + 1]`` followed
by the drafted ids ``1 .. j`` of the block; in a tree the position follows the row's depth, and the drafted ids are
those on its path. Counts, n-grams and bad words thus see what one-token decoding would have seen; a row whose drafts
were wrong is dropped, whatever its rules made of it. Meaning and order are those of transformers' processors
(``_get_logits_processor``), before temperature and filters, in float32. Each row of a batch has its own rules, sees
only its own tokens and writes what it writes as a single prompt; padding is never counted.

To add a rule, add a row to `dflash.settings.GenerateArguments`, and write a class with `Rule.values`, ``neutral`` and
`Rule.apply` that is named in ``RULES``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .bias import LogitBias, SequenceBias
from .penalties import CountPenalties, RepetitionPenalty
from .rule import Drafts, Rows, Rule, Settings, Text
from .sequence import ChainTokens, SeenTokens, TreeTokens
from .tokens import BannedTokens, BeginSuppressTokens, ForcedBos, ForcedEos, MinLength, SuppressTokens
from .words import BadWords, NoRepeatNgram

if TYPE_CHECKING:
    from ...state import Tree

__all__ = ["RULES", "LogitRules"]

RULES: tuple[type[Rule], ...] = (
    *(LogitBias, SequenceBias, RepetitionPenalty, CountPenalties, NoRepeatNgram, BadWords),
    *(BannedTokens, MinLength, ForcedBos, ForcedEos, SuppressTokens, BeginSuppressTokens),
)
"""Every rule, in the order in which they are applied."""


class LogitRules:
    """The rules of a step. Settings with the same `layout` share one object, and one captured step.

    Args:
        settings: the rules of each row; `set_` writes the values of other settings of the same layout.
        vocab_size: of the target's embeddings; its logits may be narrower.
        device: of the tensors.
    """

    def __init__(self, settings: Sequence[Settings], vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.rules = [rule(rows, vocab_size, torch.device(device)) for rule, rows in _rows_with_rules(settings)]
        self._reads_sequence = any(rule.reads_sequence for rule in self.rules)

    @staticmethod
    def layout(settings: Sequence[Settings]) -> tuple:
        """Return what a captured step depends on; equal layouts may share a LogitRules. Empty without a rule."""
        return tuple(rule.layout(rows) for rule, rows in _rows_with_rules(settings))

    def set_(self, settings: Sequence[Settings]) -> None:
        """Write the values of settings with the same layout in place."""
        for rule, (_, rows) in zip(self.rules, _rows_with_rules(settings), strict=True):
            rule.set_(rows, self.vocab_size)

    def apply(self, logits: Tensor, block: Drafts, text: Text) -> Tensor:
        """Apply every rule to the logits of a block's rows.

        Pure, of fixed shapes and without host synchronisation. After a row's first wrong draft the result means
        nothing, and is not needed.

        Args:
            logits: ``[batch, rows, vocab]``, float32 or bfloat16; row j is for position ``length + 1 + j``, in a tree
                for ``length + 1 + depth[j]``.
            block: its ``input_ids [batch, rows]`` int64, not negative, are the last emitted token, then drafts; with
                the ``tree`` of these, or None.
            text: the state, or anything with its ``tokens``, ``length``, ``prompt_length`` and ``limits``.

        Returns:
            ``[batch, rows, vocab]`` float32; ``logits`` unchanged where there is no rule.
        """
        if not self.rules:
            return logits
        ids, tree = block.input_ids, block.tree
        rows = self._rows(logits, text, tree)._replace(block=ids, tree=tree)
        if self._reads_sequence:
            rows = rows._replace(sequence=_sequence(rows))
        logits = logits.float()
        for rule in self.rules:
            logits = rule.apply(logits, rows)
        return logits

    def apply_to_drafts(self, logits: Tensor, text: Text) -> Tensor:
        """Apply to the drafter's logits the rules that certainly change the target's choice.

        Those are bans, forced tokens, and biases of at least 10 in size. Penalties and small biases are left out: the
        target's logits are further apart than a drafter's, and few of its choices fall to them. Drafts change the
        speed, never the text.

        Args:
            logits: ``[batch, rows, vocab]``; row j is for position ``length + 1 + j``.
            text: as for `apply`.
        """
        if not self.rules:
            return logits
        rows = self._rows(logits, text)
        for rule in self.rules:
            if rule.for_drafts:
                logits = rule.apply_to_drafts(logits, rows)
        return logits

    @staticmethod
    def _rows(logits: Tensor, text: Text, tree: Tree | None = None) -> Rows:
        ahead = torch.arange(1, logits.shape[1] + 1, device=logits.device) if tree is None else tree.depth + 1
        return Rows(text.length[:, None] + ahead, text.prompt_length[:, None], text.limits[:, None], text)


def _rows_with_rules(settings: Sequence[Settings]) -> Iterator[tuple[type[Rule], list[Settings | None]]]:
    """Yield each rule that a row has, once per value of its constants, and each row's settings; None without it."""
    unique = {id(row): row for row in settings if row}
    for rule in RULES:
        kinds = {key: tuple(rule.constants(row).items()) for key, row in unique.items() if rule.is_on(row)}
        for kind in sorted(set(kinds.values())):
            yield rule, [row if kinds.get(id(row)) == kind else None for row in settings]


def _sequence(rows: Rows) -> SeenTokens:
    """Return the tokens before ``rows.positions`` as each row sees them."""
    tokens, ids, tree = rows.text.tokens, rows.block, rows.tree
    if tree is None:
        return ChainTokens(tokens, ids, rows.positions)
    return TreeTokens(tokens, ids, rows.text.length, tree)

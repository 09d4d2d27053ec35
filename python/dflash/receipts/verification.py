"""Derive every token of a receipt again: one pass of the target over the recorded text, with the rules of the call."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine import Engine
from ..generator import plain_settings
from ..ops import WeightStorage
from ..targets import Target, check_target, embedding_table, int8_obstacle, max_positions, stop_string_criterion
from ..terminal import printable
from .receipt import Fingerprints, Receipt, RecordedAnswer, call_of
from .replay import Mismatch, mismatches_of, wrong_end

_ROWS = 128  # of a pass, over all answers: on a GPU they cost little more than a block
_TOKENS_AT_ONCE = 2**16  # prompts and answers, padding included, above which answers are checked one by one
_END = object()


@dataclass(frozen=True)
class CheckedAnswer:
    """What was found about one answer.

    Attributes:
        num_tokens: of the answer.
        mismatch: the first token that seed and weights do not choose; None if there is none.
        near_ties: tokens before it that lost by so little that rounding may decide.
        wrong_end: why the answer cannot end where it does; empty if it can, or if a token is wrong.
    """

    num_tokens: int
    mismatch: Mismatch | None
    near_ties: tuple[Mismatch, ...]
    wrong_end: str

    @property
    def follows(self) -> bool:
        """True if every token follows from seed and weights, near-ties included, and the answer ends as it must."""
        return self.mismatch is None and not self.wrong_end


@dataclass(frozen=True)
class Verification:
    """What `dflash.verify` found.

    Attributes:
        answers: in the receipt's order.
        differences: fingerprints by name where the receipt and this process differ: the receipt's, and the one here.
        seconds: that the target's passes took.
    """

    answers: tuple[CheckedAnswer, ...]
    differences: dict[str, tuple[object, object]]
    seconds: float

    @property
    def follows(self) -> bool:
        """True if every answer follows."""
        return all(answer.follows for answer in self.answers)

    @property
    def is_exact(self) -> bool:
        """True if every answer follows without a near-tie."""
        return self.follows and not any(answer.near_ties for answer in self.answers)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.num_tokens for answer in self.answers)

    def to_json(self) -> dict[str, object]:
        """Return it as values that JSON has; an infinite margin is null."""
        answers = []
        for answer in self.answers:
            row = dataclasses.asdict(answer) | {"follows": answer.follows}
            for mismatch in (row["mismatch"], *row["near_ties"]):
                if mismatch is not None and math.isinf(mismatch["margin"]):
                    mismatch["margin"] = None
            answers.append(row)
        names = ("follows", "is_exact", "num_tokens", "seconds")
        differences = {name: {"receipt": theirs, "here": here} for name, (theirs, here) in self.differences.items()}
        return {**{name: getattr(self, name) for name in names}, "answers": answers, "differences": differences}


def verify(
    receipt: Receipt, target: nn.Module, tokenizer: object = None, *, fingerprints: Fingerprints | None = None
) -> Verification:
    """Derive every token of a receipt again, and compare.

    The target runs over prompt and answer in passes of many rows; no drafter is needed. If a token does not follow, it
    runs once more in the shapes of the call, which give the same bits on the same kind of machine.

    Args:
        receipt: from `Receipt.read` or a `Recorder`.
        target: a causal language model of transformers; never modified.
        tokenizer: its own; needed if the receipt has stop strings or a grammar.
        fingerprints: of the target and the tokenizer, if they are known already.

    Raises:
        ValueError: the receipt cannot be checked with this target: other weights or dtype, another tokenizer where stop
            strings or a grammar need the receipt's own, int8 weights where the target's cannot be stored so, too few
            positions, or logits that are NaN.
    """
    passes = Verifier(target, tokenizer, fingerprints=fingerprints).passes(receipt)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value


class Verifier:
    """Checks many receipts with one target, which must not change; takes what `verify` takes.

    Args:
        target: a causal language model of transformers; never modified.
        tokenizer: its own; needed for receipts with stop strings or a grammar.
        fingerprints: of the target and the tokenizer, if they are known already.
        prepared: the target as a `Generator` runs it, so that no second copy of its weights is made.
    """

    def __init__(
        self,
        target: nn.Module,
        tokenizer: object = None,
        *,
        fingerprints: Fingerprints | None = None,
        prepared: Target | None = None,
    ) -> None:
        self._model, self._tokenizer, self._fingerprints = check_target(target), tokenizer, fingerprints
        self._targets: dict[WeightStorage, Target] = {} if prepared is None else {prepared.weights: prepared}

    @property
    def fingerprints(self) -> Fingerprints:
        """Those of the target and the tokenizer. The first use reads all weights."""
        if self._fingerprints is None:
            self._fingerprints = Fingerprints.of(self._model, self._tokenizer)
        return self._fingerprints

    def passes(self, receipt: Receipt) -> Generator[None, None, Verification]:
        """Do what `verify` does, a pass of the target at a time; yields after each."""
        # 1. Is this the target of the receipt?
        differences = self._compare(receipt)
        # 2. Derive the tokens again.
        device, found, seconds = embedding_table(self._model).device, [], 0.0
        with plain_settings(device), torch.no_grad():
            if receipt.weights not in self._targets:
                self._targets[receipt.weights] = Target(self._model, weights=receipt.weights)
            work = _check_all(self._targets[receipt.weights], receipt, self._tokenizer, found)
        while True:
            began = time.perf_counter()
            with plain_settings(device), torch.no_grad():  # left before the caller goes on
                is_over = next(work, _END) is _END
            seconds += time.perf_counter() - began
            if is_over:
                break
            yield
        # 3. Does each answer end where it must?
        strings = list(receipt.settings.stop_strings)
        criteria = [stop_string_criterion(self._tokenizer, strings)] if strings else []
        answers = []
        for answer, mismatches in zip(receipt.answers, found, strict=True):
            first = next((mismatch for mismatch in mismatches if not mismatch.is_near_tie), None)
            near_ties = tuple(mismatch for mismatch in mismatches if mismatch.is_near_tie)
            end = "" if first is not None else wrong_end(answer, receipt.settings, criteria)
            answers.append(CheckedAnswer(len(answer.ids), first, near_ties, end))
        return Verification(tuple(answers), differences, seconds)

    def _compare(self, receipt: Receipt) -> dict[str, tuple[object, object]]:
        """Return which fingerprints differ; raise ValueError if the receipt cannot be checked for it."""
        # 1. What needs no weights.
        longest = max(len(answer.prompt) + len(answer.ids) for answer in receipt.answers)
        positions = max_positions(self._model)
        if positions is not None and longest > positions:
            raise ValueError(
                f"the receipt has an answer that ends at position {longest}, past the target's "
                f"max_position_embeddings, {positions}: it was made with another target"
            )
        weights = receipt.weights
        if weights is not None and weights not in self._targets and (obstacle := int8_obstacle(self._model)):
            raise ValueError(
                f"the receipt states {weights} weights, and this target's cannot be stored so: {obstacle}. Load the "
                "target that it was made with, on the CPU"
            )
        table, theirs = embedding_table(self._model), receipt.fingerprints
        here = {"dtype": str(table.dtype).removeprefix("torch."), "vocab_size": table.shape[0]}
        _check_decisive({name: (getattr(theirs, name), value) for name, value in here.items()})
        # 2. The fingerprints.
        differences = theirs.differences(self.fingerprints)
        _check_decisive({name: differences[name] for name in ("weights",) if name in differences})
        if (receipt.settings.stop_strings or receipt.settings.grammar) and "tokenizer" in differences:
            raise ValueError(
                "the receipt has stop strings or a grammar, so its own tokenizer is needed to check its answers: "
                + ("pass tokenizer=" if self._tokenizer is None else "this is another")
            )
        # 3. What cannot matter here.
        ignored = {"llguidance"} if receipt.settings.grammar is None else set()
        if self._tokenizer is None or theirs.tokenizer is None:
            ignored |= {"tokenizer", "chat_template"}
        return {name: pair for name, pair in differences.items() if name not in ignored}


def _check_decisive(values: dict[str, tuple[object, object]]) -> None:
    """Raise ValueError if one that decides every text differs."""
    for name, (theirs, here) in values.items():
        if theirs != here:
            raise ValueError(
                f"the receipt cannot be checked with this target: {name} is {theirs} in the receipt and {here} here; "
                "load the target that it was made with"
            )


def _check_all(
    target: Target, receipt: Receipt, tokenizer: object, found: list[list[Mismatch]]
) -> Generator[None, None, None]:
    """Add each answer's mismatches to ``found``: all answers in one batch, unless that would cost memory."""
    answers = receipt.answers
    fits = len(answers) * _capacity(answers) <= _TOKENS_AT_ONCE
    for batch in [answers] if fits else [[answer] for answer in answers]:
        call, mismatches = call_of(batch, receipt, target.device, tokenizer), []
        for size, rows in _shapes(receipt, batch):
            engine = Engine(target, None, batch_size=size, max_length=_capacity(batch), block_size=rows)
            mismatches = yield from mismatches_of(engine, call, batch, receipt.prefill_chunk)
            if not any(mismatches):
                break
        found += mismatches


def _shapes(receipt: Receipt, answers: Sequence[RecordedAnswer]) -> list[tuple[int, int]]:
    """Return batch and rows of the passes to try: many rows, then the shapes of the call if there is room for them."""
    own = min(receipt.block_size, _ROWS)
    has_room = receipt.batch_size * _capacity(answers) <= _TOKENS_AT_ONCE
    shapes = [(len(answers), max(own, _ROWS // len(answers)))]
    return list(dict.fromkeys([*shapes, (receipt.batch_size if has_room else len(answers), own)]))


def _capacity(answers: Sequence[RecordedAnswer]) -> int:
    """Return room for the longest answer and its prompt: a power of two, since a target keeps a table for each."""
    longest = max(len(answer.prompt) for answer in answers) + max(len(answer.ids) for answer in answers)
    return 1 << (longest - 1).bit_length()


def lines_of(found: Verification, dtype: str, tokenizer: Any) -> list[str]:
    """Say what was found with a target of this dtype and tokenizer: a line per near-tie and one per answer."""
    lines = []
    for number, answer in enumerate(found.answers, 1):
        where = f"answer {number}: " if len(found.answers) > 1 else ""
        for mismatch in answer.near_ties:
            lines.append(f"{where}near-tie in {dtype}: {_describe(mismatch, tokenizer)}")
        lines.append(where + _verdict(answer, tokenizer))
    return lines


def _verdict(answer: CheckedAnswer, tokenizer: Any) -> str:
    """Say in one line what was found about an answer."""
    if answer.mismatch is not None:
        return f"does not follow: {_describe(answer.mismatch, tokenizer)}"
    if answer.wrong_end:
        return f"does not follow: every token does, but {answer.wrong_end}"
    but = f", {len(answer.near_ties)} of them by a near-tie" if answer.near_ties else ""
    return f"every token follows from seed and weights: {answer.num_tokens} tokens{but}"


def _describe(mismatch: Mismatch, tokenizer: Any) -> str:
    recorded, chosen = (
        f"{token} {printable(repr(tokenizer.decode([token])))}" for token in (mismatch.token, mismatch.chosen)
    )
    margin = "a rule forbids it" if math.isinf(mismatch.margin) else f"it lost by {mismatch.margin:.3g}"
    return (
        f"token {mismatch.index + 1} is {recorded}, seed and weights choose {chosen}; {margin} "
        f"(up to {mismatch.rounding:.2g} may be rounding)"
    )

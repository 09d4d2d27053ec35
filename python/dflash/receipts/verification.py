"""Derive every token of a receipt again: run the target over the recorded text, under the rules of the call."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..call import Call, TargetDefaults
from ..engine import Engine, Prefill
from ..generator import plain_settings
from ..sampling import Sampling
from ..settings import WeightStorage
from ..state import RUNNING, Block, State
from ..streaming import StopMatcher, Tokenizer
from ..targets import Target, check_target, embedding_table, int8_obstacle, max_positions
from ..terminal import listed, printable
from .receipt import Fingerprints, Receipt, RecordedAnswer, RecordedSettings, picture_digests

# Two ways to sum the same numbers differ by about this share of the logits: two units in the last place of the 16-bit
# types. In float32, where only sums are rounded, the errors of a few layers.
_ROUNDING = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-16}
_LARGEST_MARGIN, _HALVINGS = 1024.0, 40
_AT_ONCE = 16  # tokens in which stop strings are looked for
_NOTHING = -1  # pads answers; no token has this id
_ROWS = 128  # of a pass, over all answers: on a GPU they cost little more than a block
_TOKENS_AT_ONCE = 2**16  # prompts and answers, padding included, above which answers are checked one by one


@dataclass(frozen=True)
class Mismatch:
    """A recorded token that is not the target's choice.

    Attributes:
        index: of the token in the answer, from 0.
        token: the recorded id.
        chosen: the id that seed and weights choose there.
        margin: how far the recorded token's logit would have to rise, or the chosen token's fall, for the recorded
            token to be chosen. Infinite if a rule forbids it.
        rounding: margins up to this may come from rounding.
    """

    index: int
    token: int
    chosen: int
    margin: float
    rounding: float

    @property
    def is_near_tie(self) -> bool:
        """True if another order of sums may choose the recorded token."""
        return self.margin <= self.rounding


@dataclass(frozen=True)
class CheckedAnswer:
    """Verdict on one answer.

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
    """Result of `dflash.verify`.

    Attributes:
        answers: in the receipt's order.
        differences: fingerprints by name where the receipt and this process differ: the receipt's, and the one here.
        seconds: of the target's passes.
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
    receipt: Receipt, target: nn.Module, tokenizer: object = None, *, fingerprints: Fingerprints | None = None,
    pictures: Mapping[str, Tensor] | None = None,
) -> Verification:  # fmt: skip
    """Derive every token of a receipt again, and compare.

    The target runs over prompt and answer in passes of many rows; no drafter is needed. If a token does not follow, it
    runs once more in the shapes of the call, which give the same bits on the same kind of machine.

    Args:
        receipt: from `Receipt.read` or a `Recorder`.
        target: a causal language model of transformers; never modified.
        tokenizer: the target's; needed if the receipt has stop strings or a grammar.
        fingerprints: of the target and the tokenizer, if they are known already.
        pictures: the tensors of the call's pictures, if it had any.

    Raises:
        ValueError: the receipt cannot be checked with this target: other weights, dtype or pictures, another tokenizer
            although stop strings or a grammar need the receipt's, int8 weights that this target cannot have, too few
            positions, or logits that are NaN.
    """
    passes = Verifier(target, tokenizer, fingerprints=fingerprints).passes(receipt, pictures)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value


class Verifier:
    """Checks many receipts with one target, which must not change; takes what `verify` takes.

    Args:
        target: see `verify`.
        tokenizer: see `verify`.
        fingerprints: see `verify`.
        prepared: the target as a `Generator` runs it, to avoid a second copy of its weights.
    """

    def __init__(
        self, target: nn.Module, tokenizer: object = None, *, fingerprints: Fingerprints | None = None,
        prepared: Target | None = None,
    ) -> None:  # fmt: skip
        self._model, self._tokenizer = check_target(target), tokenizer
        if fingerprints is not None:
            self.fingerprints = fingerprints
        self._targets: dict[WeightStorage, Target] = {} if prepared is None else {prepared.weights: prepared}

    @functools.cached_property
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of the target and the tokenizer. The first use reads all weights."""
        return Fingerprints.of(self._model, self._tokenizer)

    def passes(
        self, receipt: Receipt, pictures: Mapping[str, Tensor] | None = None
    ) -> Generator[None, None, Verification]:
        """Verify like `verify`, but yield after each pass of the target."""
        if receipt.pictures != picture_digests(pictures):
            raise ValueError(
                f"the receipt names pictures, {listed([*receipt.pictures]) or 'none'}, and those here are others: pass "
                "pictures=, the tensors that the call had, to dflash.verify"
            )
        differences, seconds = self._compare(receipt), 0.0
        work, device = self._answers(receipt, pictures), embedding_table(self._model).device
        while True:
            began = time.perf_counter()
            with plain_settings(device), torch.no_grad():  # left before the caller continues
                answers = next(work)
            seconds += time.perf_counter() - began
            if answers is not None:
                return Verification(answers, differences, seconds)
            yield

    def _answers(
        self, receipt: Receipt, pictures: Mapping[str, Tensor] | None
    ) -> Iterator[tuple[CheckedAnswer, ...] | None]:
        """Derive the tokens again: yields None after each pass of the target, and finally the checked answers."""
        if receipt.weights not in self._targets:
            self._targets[receipt.weights] = Target(self._model, weights=receipt.weights)
        target, answers, found = self._targets[receipt.weights], receipt.answers, []
        # 1. All answers in one batch, unless that takes too much memory.
        fits = len(answers) * _capacity(answers) <= _TOKENS_AT_ONCE or bool(pictures)  # pictures belong to all answers
        for batch in [answers] if fits else [[answer] for answer in answers]:
            call, mismatches = _call_of(batch, receipt, target.device, self._tokenizer, pictures), []
            for size, rows in _shapes(receipt, batch):
                engine = Engine(target, None, batch_size=size, max_length=_capacity(batch), block_size=rows)
                mismatches = yield from _mismatches_of(engine, call, batch, receipt.prefill_chunk)
                if not any(mismatches):
                    break
            found += mismatches
        # 2. Check that each answer ends where it must.
        checked = []
        for answer, mismatches in zip(answers, found, strict=True):
            first = next((mismatch for mismatch in mismatches if not mismatch.is_near_tie), None)
            near_ties = tuple(mismatch for mismatch in mismatches if mismatch.is_near_tie)
            end = "" if first is not None else _wrong_end(answer, receipt.settings, self._tokenizer)
            checked.append(CheckedAnswer(len(answer.ids), first, near_ties, end))
        yield tuple(checked)

    def _compare(self, receipt: Receipt) -> dict[str, tuple[object, object]]:
        """Return the fingerprints that differ; raise ValueError if they make a check impossible."""
        # 1. Checks that need no weights.
        longest = max(len(answer.prompt) + len(answer.ids) for answer in receipt.answers)
        positions = max_positions(self._model)
        if positions is not None and longest > positions:
            raise ValueError(f"an answer of {longest} tokens is another target's: this one has {positions} positions")
        weights = receipt.weights
        if weights is not None and weights not in self._targets and (obstacle := int8_obstacle(self._model)):
            raise ValueError(
                f"the receipt states {weights} weights, and this target's cannot be stored so: {obstacle}. Load the "
                "target that it was made with, on the CPU"
            )
        table, theirs = embedding_table(self._model), receipt.fingerprints
        _expect_equal("dtype", theirs.dtype, str(table.dtype).removeprefix("torch."))
        _expect_equal("vocab_size", theirs.vocab_size, table.shape[0])
        # 2. The fingerprints.
        differences = theirs.differences(self.fingerprints)
        _expect_equal("weights", theirs.weights, self.fingerprints.weights)
        if (receipt.settings.stop_strings or receipt.settings.grammar) and "tokenizer" in differences:
            raise ValueError(
                "the receipt has stop strings or a grammar, so its own tokenizer is needed to check its answers: "
                + ("pass tokenizer=" if self._tokenizer is None else "this is another")
            )
        # 3. Leave out differences that cannot matter.
        ignored = {"llguidance"} if receipt.settings.grammar is None else set()
        if self._tokenizer is None or theirs.tokenizer is None:
            ignored |= {"tokenizer", "chat_template"}
        return {name: pair for name, pair in differences.items() if name not in ignored}


def _expect_equal(name: str, theirs: object, here: object) -> None:
    if theirs != here:
        raise ValueError(f"{name} is {theirs} in the receipt and {here} here: load the target that it was made with")


def _shapes(receipt: Receipt, answers: Sequence[RecordedAnswer]) -> list[tuple[int, int]]:
    """Return batch and rows of the passes to try: many rows, then the shapes of the call if they fit."""
    own, has_room = min(receipt.block_size, _ROWS), receipt.batch_size * _capacity(answers) <= _TOKENS_AT_ONCE
    many = len(answers), max(own, _ROWS // len(answers))
    return list(dict.fromkeys([many, (receipt.batch_size if has_room else len(answers), own)]))


def _capacity(answers: Sequence[RecordedAnswer]) -> int:
    """Return room for the longest answer and its prompt: a power of two, since a target keeps a table for each."""
    longest = max(len(answer.prompt) for answer in answers) + max(len(answer.ids) for answer in answers)
    return 1 << (longest - 1).bit_length()


# ---------------------------------------------------------------------------------------------- the passes


def _call_of(
    answers: Sequence[RecordedAnswer], receipt: Receipt, device: torch.device, tokenizer: object,
    pictures: Mapping[str, Tensor] | None,
) -> Call:  # fmt: skip
    """Return the call behind some answers of a receipt, without stop strings; ``tokenizer`` must be the receipt's."""
    prompts = [torch.tensor(answer.prompt, dtype=torch.int64, device="cpu") for answer in answers]
    left = {"batch_first": True, "padding_side": "left"}  # as prompts with pictures must be
    ids, mask = (pad_sequence(rows, **left) for rows in (prompts, [*map(torch.ones_like, prompts)]))
    arguments, grammar = receipt.settings.arguments(), receipt.settings.grammar
    arguments |= {"grammar": grammar, "tokenizer": None if grammar is None else cast("Tokenizer", tokenizer)}
    arguments |= {"attention_mask": mask.to(device), "seed": [answer.seed for answer in answers]}
    arguments |= {"pictures": pictures or None}
    # The generation_config of the target here does not count: a receipt states every setting.
    defaults = TargetDefaults({}, receipt.fingerprints.vocab_size, device)
    return Call.resolve(defaults, ids.to(device), arguments)


def _least(is_enough: Callable[[float], bool]) -> float:
    """Return the smallest sufficient change, by bisection; infinity if there is none."""
    if not is_enough(_LARGEST_MARGIN):
        return math.inf
    parts = range(1, 2**_HALVINGS)
    index = bisect.bisect_left(parts, True, key=lambda part: is_enough(_LARGEST_MARGIN * part / 2**_HALVINGS))
    return _LARGEST_MARGIN * (index + 1) / 2**_HALVINGS


def _wrong_end(answer: RecordedAnswer, settings: RecordedSettings, tokenizer: Tokenizer | None) -> str:
    """Return why an answer cannot end where it does; empty if it can. Stop strings need the tokenizer."""
    count = len(answer.ids)
    if count > settings.max_new_tokens:
        return f"it has {count} tokens, and max_new_tokens is {settings.max_new_tokens}"
    stop, ends = {*settings.stop_token_ids}, []
    if settings.stop_strings and tokenizer is not None:
        stops = StopMatcher(tokenizer, settings.stop_strings, list(answer.prompt))
        for start in range(0, count, _AT_ONCE):
            if (found := stops.push(list(answer.ids[start : start + _AT_ONCE]))) is not None:
                ends.append(start + found)
                break
    ends += [index for index, token in enumerate(answer.ids, 1) if token in stop][:1]
    end = min(ends, default=None)
    if end is not None and end < count:
        return f"it has {count} tokens, and token {end} ends it"
    if end is None and count < settings.max_new_tokens:
        return f"it ends after {count} tokens, and nothing ends it before max_new_tokens, {settings.max_new_tokens}"
    reason = "length" if end is None else "stop"
    if reason != answer.finish_reason:
        return f'its finish_reason is "{answer.finish_reason}", and it ends by "{reason}"'
    return ""


def _mismatches_of(
    engine: Engine, call: Call, answers: Sequence[RecordedAnswer], chunk: int
) -> Generator[None, None, list[list[Mismatch]]]:
    """Find each answer's tokens that are not the target's choice, up to the first that is not a near-tie.

    Every choice is made after the recorded tokens before it. Yields after each pass of the target. ``chunk`` is the
    number of prompt tokens per pass.
    """
    # 1. Run the prompts; their last row chooses the first token.
    if engine.target.ranks.count > 1:
        engine.check_ranks_agree(call, chunk)
    engine.refresh()
    engine.configure(call)
    prompts = Prefill(engine, call, [0] * len(answers), chunk=chunk, snapshot=False)
    while prompts.chunks:
        prompts.run_chunk()
        yield
    state, rows = engine.state, engine.block_size
    if engine.grammar_masks is not None:
        state.done.fill_(RUNNING)  # masks are made for rows that run
    prompt = state.at_prompt_end
    search = _Search(engine, answers, call.stop_token_ids)
    search.compare(Block(prompt.anchor), prompts.ends, prompt, 0)
    # 2. Run the answers, a block of recorded tokens at a time; row j chooses the token after its own.
    longest = max(len(answer.ids) for answer in answers)
    ids = torch.full((engine.batch_size, longest + rows), _NOTHING, dtype=torch.int64, device=engine.target.device)
    for row, answer in enumerate(answers):
        start, count = len(answer.prompt), len(answer.ids)
        ids[row, :count] = torch.tensor(answer.ids, dtype=torch.int64, device="cpu")
        state.tokens[row, start : start + count] = ids[row, :count]
    for start in range(0, longest - 1, rows):
        if search.is_over:
            break
        block = Block(ids[:, start : start + rows])
        if engine.grammar_masks is not None:
            engine.grammar_masks.ask(block)
        search.compare(block, engine.target.verify(block, state), state, start + 1)
        state.length.add_(rows)
        state.num_context.fill_(rows)
        state.target_cache.commit_(state.length, state.num_context)
        yield
    return search.found


class _Search:
    """Mismatches found so far, per answer. An answer is done at its first that is not a near-tie.

    Nothing is compared after a stop token, since a grammar allows nothing there; `_wrong_end` reports such an answer.
    """

    def __init__(self, engine: Engine, answers: Sequence[RecordedAnswer], stop: Sequence[int]) -> None:
        self._engine, self._rounding = engine, _ROUNDING.get(engine.target.dtype, 0.0)
        ends = [next((end for end, token in enumerate(a.ids, 1) if token in stop), None) for a in answers]
        self._recorded = [answer.ids[:end] for answer, end in zip(answers, ends, strict=True)]
        self.found: list[list[Mismatch]] = [[] for _ in answers]

    @property
    def is_over(self) -> bool:
        return all(found and not found[-1].is_near_tie for found in self.found)

    def compare(self, block: Block, raw: Tensor, state: State, first: int) -> None:
        """Compare the target's choices after each row of a block with the tokens ``first ..`` of the answers."""
        engine = self._engine
        logits = engine.rules.apply(raw, block, state)
        if engine.grammar_masks is not None:
            logits = engine.grammar_masks.apply(logits)
        choices = engine.target.ranks.share_(engine.keyed.choose(logits, block, state)).tolist()
        positions = state.chosen_positions(block)
        for row, (ids, found) in enumerate(zip(self._recorded, self.found, strict=True)):
            for index, (token, chosen) in enumerate(zip(ids[first:], choices[row], strict=False)):
                if chosen == token or (found and not found[-1].is_near_tie):
                    continue
                if chosen < 0:
                    raise ValueError(f"the target's logits are NaN in answer {row + 1} for token {first + index + 1}")
                sampling, position = state.sampling.rows(slice(row, row + 1)), positions[row, index]
                measured = self._measure(raw[row, index], logits[row, index], position, sampling, token, chosen)
                found.append(Mismatch(first + index, token, chosen, *measured))

    def _measure(
        self, raw: Tensor, logits: Tensor, position: Tensor, sampling: Sampling, token: int, chosen: int
    ) -> tuple[float, float]:
        """Return the margin by which ``token`` lost against ``chosen``, and the largest that rounding may explain.

        ``raw`` and ``logits`` are ``[vocab]``: the target's own, and with rules applied.
        """
        if token >= len(logits):  # ids that the embedding table has and the head has not
            return math.inf, 0.0
        logits, one = logits.float(), torch.ones(1, dtype=torch.float32, device=logits.device)

        def wins(changed_token: int, change: float) -> bool:
            changed = logits.clone()
            changed[changed_token] += change
            return int(sampling.select(changed[None, None], position.reshape(1, 1), one)) == token

        margin = min(_least(lambda change: wins(token, change)), _least(lambda change: wins(chosen, -change)))
        # A bias, however large, is added after the rounding.
        largest = float(torch.minimum(raw.float().abs(), logits.abs())[[token, chosen]].nan_to_num(posinf=0.0).max())
        return margin, self._rounding * max(1.0, largest)


# ---------------------------------------------------------------------------------------------- words


def lines_of(found: Verification, dtype: str, tokenizer: Any) -> list[str]:
    """Describe a verification by a target of this dtype and tokenizer: a line per near-tie and one per answer."""
    lines = []
    for number, answer in enumerate(found.answers, 1):
        where = f"answer {number}: " if len(found.answers) > 1 else ""
        lines += [f"{where}near-tie in {dtype}: {_describe(mismatch, tokenizer)}" for mismatch in answer.near_ties]
        lines.append(where + _verdict(answer, tokenizer))
    return lines


def _verdict(answer: CheckedAnswer, tokenizer: Any) -> str:
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

"""Rules on the logits (penalties, bans, forced tokens), applied to every row of a block before a token is chosen.

Row ``j`` of a block chooses the token at position ``length + 1 + j``. Its prefix is ``tokens[: length + 1]`` and the
drafted ``block_ids[1 .. j]``, so that counts, n-grams and bad words see what one-token decoding would have seen: a row
whose drafts were wrong is dropped, whatever its rules made of them. Semantics and order are those of transformers'
processors (``_get_logits_processor``), before temperature and filters, in float32. Each row of a batch sees its own
tokens alone, so that it writes what it writes as a single prompt; padding is never counted.

:class:`RuleSettings` holds the checked arguments, :class:`LogitRules` the tensors of the step, :class:`HostRules`
Python processors and criteria, which run on the host.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

__all__ = ["HostRules", "LogitRules", "RuleArguments", "RuleSettings"]

_ANY, _ABSENT, _UNUSED = -1, -2, -3  # in a table of bad words: matches all; before a row's first token; an empty slot

_DECISIVE_BIAS = 10.0  # smaller ones are kept from the drafter: acceptance was lower with them


class RuleArguments(TypedDict, total=False):
    """The rules that ``generate`` takes; None follows the target's generation_config, where unset is off.

    The neutral value given here in brackets switches off what the generation_config asks for. Token ids lie in the
    target's vocabulary.

    Attributes:
        repetition_penalty: positive; logits of tokens in the prompt or the answer so far are divided by it where
            positive, multiplied where negative (1).
        presence_penalty, frequency_penalty: finite; a token drawn ``c`` times in the answer so far loses
            ``c * frequency_penalty + (c > 0) * presence_penalty`` from its logit, as in OpenAI's API: the prompt does
            not count. Applied right after repetition_penalty (0).
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and answer together (0).
        logit_bias: token id -> what is added to its logit, finite or -inf; or, as transformers' ``sequence_bias`` has
            it, a tuple of ids -> what is added to the logit of the last where the others came before ({}).
        bad_words_ids: sequences of ids that are never completed; a stop token alone cannot be one ([]). transformers
            before 5.18 overlooks a sequence, here and in sequence_bias, whose other tokens are the whole text so far.
        suppress_tokens: ids never chosen ([]).
        begin_suppress_tokens: ids not chosen as the first new token ([]).
        forced_bos_token_id: the second token of a row whose prompt is a single token ([]).
        forced_eos_token_id: an id, or several of equal logit, of the last token that ``max_new_tokens`` allows ([]).
        min_length: no stop token before prompt and answer together have this length (0).
        min_new_tokens: no stop token among the first new tokens; min_length is then ignored (None).
        logits_processor: callables ``(input_ids [1, length] int64, scores [1, vocab] float32) -> scores``, such as
            transformers' ``LogitsProcessor``, called in order after every rule above, for each row of the batch with
            that row's own ids. They must be functions of their inputs: one that counts its calls sees other calls
            than in one-token decoding. They run on the host, token by token: slower.
        stopping_criteria: callables ``(input_ids [1, length] int64, None) -> bool`` or one-element tensor, such as
            transformers' ``StoppingCriteria``; the row ends with the first token for which one is true. Under the
            same condition, and beside the stop tokens and max_new_tokens, which hold as ever.
    """

    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    logit_bias: Mapping[int | tuple[int, ...], float] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    forced_bos_token_id: int | Sequence[int] | None
    forced_eos_token_id: int | Sequence[int] | None
    min_length: int | None
    min_new_tokens: int | None
    logits_processor: Sequence[Callable] | None
    stopping_criteria: Sequence[Callable] | None


# ---------------------------------------------------------------------------------------------- checked arguments


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a finite number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer of at least 0, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    return int(value)


def _token(name: str, value: object, vocab: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must hold token ids in 0 .. {vocab - 1}, got {value!r}")
    if not 0 <= value < vocab:
        raise ValueError(f"{name} must hold token ids in 0 .. {vocab - 1}, got {value!r}")
    return int(value)


def _listed(value: object) -> object:
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _tokens(name: str, value: object, vocab: int) -> tuple[int, ...]:
    value = _listed(value)
    if not _is_list(value):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(_token(name, token, vocab) for token in value)


def _one_or_more(name: str, value: object, vocab: int) -> tuple[int, ...]:
    value = _listed(value)
    return _tokens(name, value if _is_list(value) else [value], vocab)


def _biases(value: object, vocab: int) -> tuple[dict[int, float], tuple[tuple[tuple[int, ...], float], ...]]:
    """logit_bias of single tokens, and of sequences."""
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
    single, longer = {}, {}
    for key, bias in value.items():
        ids = _tokens("logit_bias", key, vocab) if isinstance(key, tuple) else (_token("logit_bias", key, vocab),)
        if not ids:
            raise ValueError("logit_bias must not hold an empty tuple")
        name = f"token {ids[0]}" if len(ids) == 1 else f"tokens {list(ids)}"
        if isinstance(bias, bool) or not isinstance(bias, numbers.Real):
            raise TypeError(f"logit_bias of {name} must be a finite number or -inf, got {bias!r}")
        if math.isnan(bias) or bias == math.inf:
            raise ValueError(f"logit_bias of {name} must be a finite number or -inf, got {bias!r}")
        if len(ids) == 1:
            single[ids[0]] = float(bias)
        else:
            longer[ids] = float(bias)
    return single, tuple(longer.items())


def _by_tuple(sequence_bias: object) -> dict[tuple[int, ...], float]:
    """transformers' ``sequence_bias``, a dict of tuples or a list of pairs, as ``logit_bias``."""
    pairs = sequence_bias.items() if isinstance(sequence_bias, Mapping) else sequence_bias
    return {tuple(sequence): bias for sequence, bias in pairs}


def _callables(name: str, value: object) -> tuple[Callable, ...]:
    if not _is_list(value):
        raise TypeError(f"{name} must be a list of callables, got {type(value).__name__}")
    value = tuple(value)
    for item in value:
        if not callable(item):
            raise TypeError(f"{name} must be a list of callables, got {item!r} in it")
    return value


# transformers puts a processor of the user's in the place of its own of the same class.
_SAME_RULE = {
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "SequenceBiasLogitsProcessor": "logit_bias",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
}


@dataclass(frozen=True)
class RuleSettings:
    """The rules of one call, checked, with the target's generation_config filled in; see :class:`RuleArguments`.

    Attributes:
        logit_bias, sequence_bias: those of single tokens, and pairs of ids and bias of longer sequences.
        stop_token_ids: what min_length and min_new_tokens keep away.
        Others: as the arguments, lists as tuples; ``()``, ``{}``, 0 or 1.0 where off.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | tuple = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: tuple[int, ...] = ()
    forced_eos_token_id: tuple[int, ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logits_processor: tuple[Callable, ...] = ()
    stopping_criteria: tuple[Callable, ...] = ()

    @classmethod
    def resolve(
        cls, given: RuleArguments, defaults: Mapping, stop_token_ids: Sequence[int], vocab: int
    ) -> RuleSettings:
        """Check ``given``, filling what is None from ``defaults``, the generation_config's values by name.

        Args:
            given: by name, see :class:`RuleArguments`.
            defaults: the same names, and ``sequence_bias``; None or missing is off.
            stop_token_ids: the ids that end a row.
            vocab: size of the vocabulary.

        Raises:
            TypeError: an unknown name, or a value of the wrong type. ValueError: out of range, or rules that
                contradict one another.
        """
        if unknown := given.keys() - RuleArguments.__annotations__.keys():
            raise TypeError(f"generate got an unexpected keyword argument {min(unknown)!r}")

        def value(name: str, off: object) -> object:
            if given.get(name) is not None:
                return given[name]
            if name == "logit_bias" and defaults.get("sequence_bias") is not None:
                return _by_tuple(defaults["sequence_bias"])
            return off if defaults.get(name) is None else defaults[name]

        penalty = _number("repetition_penalty", value("repetition_penalty", 1.0))
        if not penalty > 0:
            raise ValueError(f"repetition_penalty must be more than 0 (1 is off), got {penalty!r}")
        words = _listed(value("bad_words_ids", ()))
        if not _is_list(words) or not all(_is_list(_listed(word)) for word in words):
            raise TypeError(f"bad_words_ids must be a list of lists of token ids, got {words!r}")
        words = tuple(dict.fromkeys(_tokens("bad_words_ids", word, vocab) for word in words))
        if () in words:
            raise ValueError("bad_words_ids must not hold an empty list")
        bos = _one_or_more("forced_bos_token_id", value("forced_bos_token_id", ()), vocab)
        if len(bos) > 1:
            raise ValueError(f"forced_bos_token_id must be one token id, got {list(bos)}")
        # Given or configured, min_new_tokens takes min_length's place, even when it is 0 (as in transformers).
        min_new_tokens = value("min_new_tokens", None)
        min_length = _count("min_length", value("min_length", 0))
        biases, sequence_biases = _biases(value("logit_bias", {}), vocab)
        settings = cls(
            repetition_penalty=penalty,
            presence_penalty=_number("presence_penalty", value("presence_penalty", 0.0)),
            frequency_penalty=_number("frequency_penalty", value("frequency_penalty", 0.0)),
            no_repeat_ngram_size=_count("no_repeat_ngram_size", value("no_repeat_ngram_size", 0)),
            logit_bias=biases,
            sequence_bias=sequence_biases,
            bad_words_ids=tuple(word for word in words if len(word) > 1 or word[0] not in stop_token_ids),
            suppress_tokens=_tokens("suppress_tokens", value("suppress_tokens", ()), vocab),
            begin_suppress_tokens=_tokens("begin_suppress_tokens", value("begin_suppress_tokens", ()), vocab),
            forced_bos_token_id=bos,
            forced_eos_token_id=_one_or_more("forced_eos_token_id", value("forced_eos_token_id", ()), vocab),
            min_length=min_length if min_new_tokens is None else 0,
            min_new_tokens=_count("min_new_tokens", 0 if min_new_tokens is None else min_new_tokens),
            stop_token_ids=tuple(stop_token_ids),
            logits_processor=_callables("logits_processor", value("logits_processor", ())),
            stopping_criteria=_callables("stopping_criteria", value("stopping_criteria", ())),
        )
        settings._check_contradictions(vocab)
        return settings

    def _check_contradictions(self, vocab: int) -> None:
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = getattr(self, name)
            if forced and set(forced) <= set(self.suppress_tokens):
                raise ValueError(f"{name} {list(forced)} is also in suppress_tokens: no token is left")
        never = {token for token, bias in dict(self.logit_bias).items() if bias == -math.inf}
        never.update(self.suppress_tokens, (word[0] for word in self.bad_words_ids if len(word) == 1))
        if len(never) == vocab:
            raise ValueError("logit_bias, bad_words_ids and suppress_tokens together leave no token to choose")
        for processor in self.logits_processor:
            rule = _SAME_RULE.get(type(processor).__name__)
            value = None if rule is None else getattr(self, rule)
            if rule == "logit_bias":
                value = {**dict(self.logit_bias), **dict(self.sequence_bias)}
            if value and value != getattr(RuleSettings, rule, ()):
                raise ValueError(
                    f"{rule} is {value!r} (an argument or the target's generation_config) and "
                    f"logits_processor holds a {type(processor).__name__}: choose one of them"
                )


# ---------------------------------------------------------------------------------------------- in the step


def _aligned(word: Sequence[int], width: int) -> Tensor:
    """All but the last token of ``word``, right-aligned in ``[width]``."""
    return torch.tensor([_ANY] * (width - len(word) + 1) + list(word[:-1]))


def _biased_sequences(biases: Sequence[tuple[tuple[int, ...], float]]) -> dict[str, Tensor]:
    """The tables of ``biases``, pairs of ids and bias; those of one last token in the order in which they are added."""
    groups = list(dict.fromkeys(len(ids) for ids, _ in biases))  # transformers adds those of a length together
    ends: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ids, bias in sorted(biases, key=lambda pair: groups.index(len(pair[0]))):
        ends.setdefault(ids[-1], []).append((ids, bias))
    rows, deep, width = _slots(len(ends)), _slots(max(map(len, ends.values()))), max(groups) - 1
    prefixes, added = torch.full((rows, deep, width), _UNUSED), torch.zeros(rows, deep)
    filled = list(ends.values()) + [list(ends.values())[-1]] * (rows - len(ends))
    for row, sequences in enumerate(filled):
        for slot, (ids, bias) in enumerate(sequences):
            prefixes[row, slot], added[row, slot] = _aligned(ids, width), bias
    last = torch.tensor([sequences[0][0][-1] for sequences in filled])
    return {"biased_ends": last, "biased_prefixes": prefixes, "prefix_biases": added}


def _slots(count: int) -> int:
    """Room for ``count`` entries of a table: a power of two, so that few shapes are ever compiled."""
    return 1 << max(count - 1, 0).bit_length()


@dataclass(frozen=True)
class LogitRules:
    """The rules of a step: which there are is fixed, their values lie in tensors that keep their addresses.

    None stands for a rule that was not asked for. Two settings with the same :meth:`structure` share one object, and
    one compiled step: :meth:`set_` writes the values.

    Attributes:
        prompt_length, limits: ``[batch]`` int64, the generator's own: tokens in the prompt, and the length at which
            a row ends.
        vocab_size: of the target's embeddings; its logits may be narrower.
        ngram_size: of no_repeat_ngram_size; 0 is off.
        bias, draft_bias: ``[vocab]`` float32 of logit_bias, and what of it the drafter is told.
        biased_ends: ``[ends]`` int64, the last tokens of biased sequences, each once but for the filling of the table.
        biased_prefixes, prefix_biases: ``[ends, n, longest - 1]`` int64, right-aligned, and ``[ends, n]`` float32: the
            sequences with that last token.
        repetition_penalty, presence_penalty, frequency_penalty: ``[]`` float32.
        banned, suppressed, begin_suppressed, stop: ``[vocab]`` float32, -inf for bad_words_ids of one token,
            suppress_tokens, begin_suppress_tokens and the stop tokens, infinity for the others.
        word_prefixes, word_ends: ``[words, longest - 1]`` and ``[words]`` int64 of longer bad words, right-aligned.
        min_length, min_new_tokens: ``[]`` int64.
        forced_bos, forced_eos: ``[vocab]`` float32, the whole row of logits that forces them.
    """

    prompt_length: Tensor
    limits: Tensor
    vocab_size: int
    ngram_size: int = 0
    bias: Tensor | None = None
    draft_bias: Tensor | None = None
    biased_ends: Tensor | None = None
    biased_prefixes: Tensor | None = None
    prefix_biases: Tensor | None = None
    repetition_penalty: Tensor | None = None
    presence_penalty: Tensor | None = None
    frequency_penalty: Tensor | None = None
    banned: Tensor | None = None
    word_prefixes: Tensor | None = None
    word_ends: Tensor | None = None
    stop: Tensor | None = None
    min_length: Tensor | None = None
    min_new_tokens: Tensor | None = None
    forced_bos: Tensor | None = None
    forced_eos: Tensor | None = None
    suppressed: Tensor | None = None
    begin_suppressed: Tensor | None = None

    @staticmethod
    def structure(settings: RuleSettings) -> tuple:
        """What the shapes of the tensors depend on; equal structures may share a LogitRules. Empty without a rule."""
        shapes = tuple((name, *tensor.shape) for name, tensor in LogitRules._values(settings, 0).items())
        return (("ngram_size", settings.no_repeat_ngram_size), *shapes) if settings.no_repeat_ngram_size else shapes

    @classmethod
    def create(cls, settings: RuleSettings, prompt_length: Tensor, limits: Tensor, vocab: int) -> LogitRules:
        """Rules for a generator with these tensors, on their device."""
        values = {name: tensor.to(limits.device) for name, tensor in cls._values(settings, vocab).items()}
        return cls(prompt_length, limits, vocab, settings.no_repeat_ngram_size, **values)

    def set_(self, settings: RuleSettings) -> None:
        """Write the values of settings of the same structure in place."""
        for name, tensor in self._values(settings, self.vocab_size).items():
            getattr(self, name).copy_(tensor)

    @staticmethod
    def _values(s: RuleSettings, vocab: int) -> dict[str, Tensor]:
        """The tensors of ``s`` on the host, by attribute; with ``vocab`` 0 only their shapes mean anything."""

        def filled(ids: Iterable[int], value: float, others: float) -> Tensor:
            tensor = torch.full((vocab,), others)
            if vocab:
                tensor[list(ids)] = value
            return tensor

        def bound(ids: Iterable[int]) -> Tensor:
            return filled(ids, -math.inf, math.inf)

        values = {}
        if s.logit_bias or s.sequence_bias:
            values["bias"] = bias = torch.zeros(vocab)
            if vocab and s.logit_bias:
                bias[list(s.logit_bias)] = torch.tensor(list(s.logit_bias.values()))
            values["draft_bias"] = torch.where(bias.abs() >= _DECISIVE_BIAS, bias, 0.0)
        if s.sequence_bias:
            values |= _biased_sequences(s.sequence_bias)
        if s.repetition_penalty != 1:
            values["repetition_penalty"] = torch.tensor(s.repetition_penalty)
        if s.presence_penalty or s.frequency_penalty:
            values["presence_penalty"] = torch.tensor(s.presence_penalty)
            values["frequency_penalty"] = torch.tensor(s.frequency_penalty)
        if single := [word[0] for word in s.bad_words_ids if len(word) == 1]:
            values["banned"] = bound(single)
        if longer := [word for word in s.bad_words_ids if len(word) > 1]:
            width = max(map(len, longer)) - 1
            prefixes = torch.full((_slots(len(longer)), width), _UNUSED)
            for prefix, word in zip(prefixes, longer, strict=False):
                prefix.copy_(_aligned(word, width))
            ends = torch.zeros(len(prefixes), dtype=torch.int64)
            ends[: len(longer)] = torch.tensor([word[-1] for word in longer])
            values |= {"word_prefixes": prefixes, "word_ends": ends}
        if s.stop_token_ids and (s.min_length or s.min_new_tokens):
            values["stop"] = bound(s.stop_token_ids)
            values["min_length"] = torch.tensor(s.min_length)
            values["min_new_tokens"] = torch.tensor(s.min_new_tokens)
        for name, forced in (("forced_bos", s.forced_bos_token_id), ("forced_eos", s.forced_eos_token_id)):
            if forced:
                values[name] = filled(forced, 0.0, -math.inf)
        if s.suppress_tokens:
            values["suppressed"] = bound(s.suppress_tokens)
        if s.begin_suppress_tokens:
            values["begin_suppressed"] = bound(s.begin_suppress_tokens)
        return values

    def apply(self, logits: Tensor, tokens: Tensor, length: Tensor, block_ids: Tensor) -> Tensor:
        """The logits of a block's rows under every rule.

        Pure, of fixed shapes and without host synchronisation. After a row's first wrong draft the result means
        nothing, and is not needed.

        Args:
            logits: ``[batch, rows, vocab]``, float32 or bfloat16; row j is for position ``length + 1 + j``.
            tokens: ``[batch, capacity]`` int64, ``capacity > length + rows``; ``tokens[: length + 1]`` are emitted.
            length: ``[batch]`` int64.
            block_ids: ``[batch, rows]`` int64, not negative: the last emitted token, then drafts.

        Returns:
            ``[batch, rows, vocab]`` float32.
        """
        logits = logits.float()
        vocab = logits.shape[-1]
        # The token that a row chooses stands at `positions`, behind as many tokens.
        positions = length[:, None] + torch.arange(1, logits.shape[1] + 1, device=logits.device)
        prompt = self.prompt_length[:, None]
        sequence = None
        if self.ngram_size or self.word_ends is not None or self.biased_ends is not None:
            sequence = tokens.scatter(1, positions - 1, block_ids)
        if self.biased_ends is not None:
            logits = logits + self._sequence_bias(sequence, positions)[..., :vocab]
        elif self.bias is not None:
            logits = logits + self.bias[:vocab]
        if self.repetition_penalty is not None:
            ids, counts = _counts(tokens, torch.zeros_like(prompt), length, block_ids, vocab)
            old = logits.gather(2, ids)
            new = torch.where(old < 0, old * self.repetition_penalty, old / self.repetition_penalty)
            logits = logits.scatter(2, ids, torch.where(counts > 0, new, old))
        if self.presence_penalty is not None:
            ids, counts = _counts(tokens, prompt, length, block_ids, vocab)
            loss = counts * self.frequency_penalty + (counts > 0) * self.presence_penalty
            logits = logits.scatter(2, ids, logits.gather(2, ids) - loss)
        if self.ngram_size:
            logits = _ban_repeated_ngrams(logits, sequence, positions, self.ngram_size)
        if self.word_ends is not None:
            logits = _ban_words(logits, sequence, positions, self.word_prefixes, self.word_ends)
        return self._ban_and_force(logits, positions)

    def _sequence_bias(self, sequence: Tensor, positions: Tensor) -> Tensor:
        """``[batch, rows, vocab]``: what logit_bias adds, one sequence after the other, so that sums have an order."""
        matches = _ends_with(sequence, positions, self.biased_prefixes)
        total = self.bias[self.biased_ends]
        for slot in range(matches.shape[-1]):
            total = total + torch.where(matches[..., slot], self.prefix_biases[:, slot], 0.0)
        bias = self.bias.expand(*positions.shape, -1)
        return bias.scatter(2, self.biased_ends.expand_as(total), total)  # an end that fills the table has one value

    def apply_to_drafts(self, logits: Tensor, length: Tensor) -> Tensor:
        """The drafter's logits under the rules that certainly change the target's choice.

        Bans and forced tokens, and biases of at least 10 in size. Penalties and small biases are left out: the
        target's logits are further apart than a drafter's, and few of its choices fall to them. Drafts change the
        speed, never the text.

        Args:
            logits: ``[batch, rows, vocab]``; row j is for position ``length + 1 + j``.
            length: ``[batch]`` int64.
        """
        positions = length[:, None] + torch.arange(1, logits.shape[1] + 1, device=logits.device)
        if self.draft_bias is not None:
            logits = logits + self.draft_bias[: logits.shape[-1]]
        return self._ban_and_force(logits, positions)

    def _ban_and_force(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The rules that look at ``positions [batch, rows]`` alone."""
        vocab, prompt = logits.shape[-1], self.prompt_length[:, None]
        if self.banned is not None:
            logits = torch.minimum(logits, self.banned[:vocab])
        if self.stop is not None:
            early = (positions < self.min_length) | (positions - prompt < self.min_new_tokens)
            logits = torch.minimum(logits, torch.where(early[..., None], self.stop[:vocab], math.inf))
        if self.forced_bos is not None:
            logits = torch.where((positions == 1)[..., None], self.forced_bos[:vocab], logits)
        if self.forced_eos is not None:
            last = positions == self.limits[:, None] - 1
            logits = torch.where(last[..., None], self.forced_eos[:vocab], logits)
        if self.suppressed is not None:
            logits = torch.minimum(logits, self.suppressed[:vocab])
        if self.begin_suppressed is not None:
            first = prompt if self.forced_bos is None else prompt + (prompt <= 1)  # not where bos is forced
            bound = torch.where((positions == first)[..., None], self.begin_suppressed[:vocab], math.inf)
            logits = torch.minimum(logits, bound)
        return logits


def _counts(tokens: Tensor, first: Tensor, length: Tensor, block_ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """How often each row's prefix, from position ``first [batch, 1]`` on, holds each of the ids in question.

    Returns:
        ``[batch, rows, n]`` int64 below ``vocab``, every id of the prefix and others, some of them twice; and their
        counts ``[batch, rows, n]`` float32, exact below 2^24. An id has the same count wherever it stands.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    live = (place >= first) & (place <= length[:, None]) & (tokens < vocab)
    emitted = torch.zeros(tokens.shape[0], vocab, device=tokens.device)
    emitted = emitted.scatter_add(1, tokens.clamp(max=vocab - 1), live.float())
    ids = torch.cat([tokens, block_ids[:, 1:]], 1).clamp(max=vocab - 1)
    drafted = (block_ids[:, 1:, None] == ids[:, None]).float()
    counts = torch.cat([emitted.gather(1, ids)[:, None], drafted], 1).cumsum(1)
    return ids[:, None].expand_as(counts), counts


def _ban(logits: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """-inf for ``ids [batch, rows, n]`` where ``where [batch, rows, n]``; ids may repeat or lie past the logits."""
    vocab = logits.shape[-1]
    bound = torch.where(where & (ids < vocab), -math.inf, math.inf)
    return logits.scatter_reduce(2, ids.clamp(max=vocab - 1), bound, "amin")


def _ban_repeated_ngrams(logits: Tensor, sequence: Tensor, positions: Tensor, size: int) -> Tensor:
    """Ban whatever would complete an n-gram that ``sequence[: positions]`` holds already.

    The window that starts at ``i`` bans its last token if its others equal the last ``size - 1`` tokens.
    """
    windows = sequence.shape[1] - size + 1
    if windows < 1:
        return logits
    matches = torch.arange(windows, device=logits.device) + size <= positions[..., None]
    for k in range(size - 1):
        suffix = sequence.gather(1, (positions - size + 1 + k).clamp(min=0))
        matches = matches & (sequence[:, None, k : k + windows] == suffix[..., None])
    return _ban(logits, sequence[:, None, size - 1 :].expand_as(matches), matches)


def _ends_with(sequence: Tensor, positions: Tensor, prefixes: Tensor) -> Tensor:
    """``[batch, rows, ...]``: whether the tokens before ``positions [batch, rows]`` end with ``prefixes [..., n]``."""
    width = prefixes.shape[-1]
    place = positions[..., None] - width + torch.arange(width, device=sequence.device)
    suffix = sequence.gather(1, place.clamp(min=0).flatten(1)).view_as(place)
    suffix = torch.where(place < 0, _ABSENT, suffix).view(*positions.shape, *[1] * (prefixes.dim() - 1), width)
    return ((suffix == prefixes) | (prefixes == _ANY)).all(-1)


def _ban_words(logits: Tensor, sequence: Tensor, positions: Tensor, prefixes: Tensor, ends: Tensor) -> Tensor:
    """Ban the end of each word whose prefix ``[words, width]`` the tokens before ``positions`` end with."""
    matches = _ends_with(sequence, positions, prefixes)
    return _ban(logits, ends.expand_as(matches), matches)


# ---------------------------------------------------------------------------------------------- on the host


@dataclass(frozen=True)
class HostRules:
    """Python processors and criteria of the first ``rows`` rows of a batch; see :class:`RuleArguments`."""

    processors: tuple[Callable, ...]
    criteria: tuple[Callable, ...]
    rows: int

    def process(self, ids: Tensor, scores: Tensor) -> Tensor:
        """``scores [1, vocab]`` float32, which may be overwritten, after every processor; ``ids [1, length]``.

        Raises:
            TypeError, ValueError: a processor returned something else, or turned numbers into NaN.
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
        """Whether a criterion ends the row ``ids [1, length]``; all of them are asked."""
        results = []
        for criterion in self.criteria:
            result = criterion(ids, None)
            if not isinstance(result, (bool, Tensor)) or (isinstance(result, Tensor) and result.numel() != 1):
                name = getattr(criterion, "__name__", type(criterion).__name__)
                got = list(result.shape) if isinstance(result, Tensor) else repr(result)
                raise TypeError(f"stopping_criteria {name} must return a bool or a tensor of one, got {got}")
            results.append(bool(result))
        return any(results)

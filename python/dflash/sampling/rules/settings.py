"""The logit rules of one call: what users may pass, and the checked settings it becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from .. import checks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LogitsProcessor", "RuleArguments", "RuleSettings", "StoppingCriterion"]

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""``(input_ids [1, length] int64, scores [1, vocab] float32) -> scores``."""
StoppingCriterion = Callable[["Tensor", None], "bool | Tensor"]
"""``(input_ids [1, length] int64, None) -> bool``, or a tensor with one element."""


class RuleArguments(TypedDict, total=False):
    """The logit rules that ``generate`` takes.

    None follows the target's generation_config; what is unset there is off. The value in parentheses turns a rule off
    that the generation_config asks for. Token ids lie in the target's vocabulary.

    Attributes:
        repetition_penalty: positive. Divides the positive logits, and multiplies the negative ones, of tokens in the
            prompt or the answer so far (1).
        presence_penalty, frequency_penalty: -1e30 .. 1e30. A token drawn ``c`` times in the answer so far loses
            ``c * frequency_penalty + (c > 0) * presence_penalty`` from its logit, as in OpenAI's API: the prompt does
            not count. Applied right after repetition_penalty (0).
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and answer together (0).
        logit_bias: maps a token id to a number that is added to its logit, finite or -inf. A tuple of ids as the key,
            as in transformers' ``sequence_bias``, biases the last of them where the others came before ({}).
        bad_words_ids: sequences of ids that are never completed; a stop token on its own cannot be one ([]).
            transformers before 5.18 overlooks a sequence, here and in sequence_bias, whose other tokens are the whole
            text so far.
        suppress_tokens: ids that are never chosen ([]).
        begin_suppress_tokens: ids that are not chosen as the first new token ([]).
        forced_bos_token_id: the second token of a row whose prompt is a single token ([]).
        forced_eos_token_id: the last token that ``max_new_tokens`` allows: an id, or several of equal logit ([]).
        min_length: no stop token before prompt and answer together have this length (0).
        min_new_tokens: no stop token among the first new tokens; min_length is then ignored (None).
        logits_processor: callables ``(input_ids [1, length] int64, scores [1, vocab] float32) -> scores``, such as
            transformers' ``LogitsProcessor``. They are called in order after every rule above, for each row of the
            batch with that row's own ids. They must be functions of their inputs: one that counts its calls sees other
            calls than in one-token decoding. They run on the host, token by token, which is slower.
        stopping_criteria: callables ``(input_ids [1, length] int64, None) -> bool`` or one-element tensor, such as
            transformers' ``StoppingCriteria``. The row ends with the first token for which one is true. They too must
            be functions of their inputs; stop tokens and max_new_tokens still hold.
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
    logits_processor: Sequence[LogitsProcessor] | None
    stopping_criteria: Sequence[StoppingCriterion] | None


# transformers replaces its own processor by one of the user's if both are of the same class.
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
    """The rules of one call, checked, with the target's generation_config filled in; see `RuleArguments`.

    Attributes:
        logit_bias: bias per token id.
        sequence_bias: pairs of ids and bias, for sequences of two tokens or more.
        stop_token_ids: the ids that min_length and min_new_tokens hold back.

    The others are the arguments, lists as tuples; ``()``, ``{}``, 0 or 1.0 where off.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | tuple[()] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: tuple[int, ...] = ()
    forced_eos_token_id: tuple[int, ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logits_processor: tuple[LogitsProcessor, ...] = ()
    stopping_criteria: tuple[StoppingCriterion, ...] = ()

    @property
    def run_on_host(self) -> bool:
        """True if Python processors or criteria have to be called for every token."""
        return bool(self.logits_processor or self.stopping_criteria)

    @classmethod
    def resolve(
        cls, given: RuleArguments, defaults: Mapping[str, Any], stop_token_ids: Sequence[int], vocab_size: int
    ) -> RuleSettings:
        """Check ``given``, filling what is None from ``defaults``, the generation_config's values by name.

        Args:
            given: by name, see `RuleArguments`.
            defaults: the same names, and ``sequence_bias``; None or missing is off.
            stop_token_ids: the ids that end a row.
            vocab_size: size of the vocabulary.

        Raises:
            TypeError: a name is unknown, or a value has the wrong type.
            ValueError: a value is out of range, or two rules contradict each other.
        """
        if unknown := given.keys() - RuleArguments.__annotations__.keys():
            raise TypeError(f"generate got an unexpected keyword argument {min(unknown)!r}")
        reader = _Reader(given, defaults, vocab_size)
        logit_bias, sequence_bias = reader.biases()
        settings = cls(
            repetition_penalty=reader.repetition_penalty(),
            presence_penalty=checks.penalty("presence_penalty", reader.value("presence_penalty", 0.0)),
            frequency_penalty=checks.penalty("frequency_penalty", reader.value("frequency_penalty", 0.0)),
            no_repeat_ngram_size=reader.count("no_repeat_ngram_size"),
            logit_bias=logit_bias,
            sequence_bias=sequence_bias,
            bad_words_ids=reader.bad_words(stop_token_ids),
            suppress_tokens=checks.tokens("suppress_tokens", reader.value("suppress_tokens", ()), vocab_size),
            begin_suppress_tokens=checks.tokens(
                "begin_suppress_tokens", reader.value("begin_suppress_tokens", ()), vocab_size
            ),
            forced_bos_token_id=reader.forced_bos(),
            forced_eos_token_id=reader.one_or_more("forced_eos_token_id"),
            stop_token_ids=tuple(stop_token_ids),
            logits_processor=checks.callables("logits_processor", reader.value("logits_processor", ())),
            stopping_criteria=checks.callables("stopping_criteria", reader.value("stopping_criteria", ())),
            **reader.least_lengths(),
        )
        settings._check_contradictions(vocab_size)
        return settings

    def _check_contradictions(self, vocab_size: int) -> None:
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = getattr(self, name)
            if forced and set(forced) <= set(self.suppress_tokens):
                raise ValueError(f"{name} {list(forced)} is also in suppress_tokens: no token is left")
        never = {token for token, bias in dict(self.logit_bias).items() if bias == -math.inf}
        never.update(self.suppress_tokens, (word[0] for word in self.bad_words_ids if len(word) == 1))
        if len(never) == vocab_size:
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


class _Reader:
    """Read rules by name: the caller's value, else the generation_config's, else off."""

    def __init__(self, given: RuleArguments, defaults: Mapping[str, Any], vocab_size: int) -> None:
        self.given, self.defaults, self.vocab_size = given, defaults, vocab_size

    def value(self, name: str, off: object) -> Any:
        if self.given.get(name) is not None:
            return self.given[name]
        return off if self.defaults.get(name) is None else self.defaults[name]

    def count(self, name: str) -> int:
        return _count(name, self.value(name, 0))

    def one_or_more(self, name: str) -> tuple[int, ...]:
        value = checks.listed(self.value(name, ()))
        return checks.tokens(name, value if checks.is_list(value) else [value], self.vocab_size)

    def repetition_penalty(self) -> float:
        penalty = checks.finite("repetition_penalty", self.value("repetition_penalty", 1.0))
        if not penalty > 0:
            raise ValueError(f"repetition_penalty must be more than 0 (1 is off), got {penalty!r}")
        return penalty

    def bad_words(self, stop_token_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        words = checks.listed(self.value("bad_words_ids", ()))
        if not checks.is_list(words) or not all(checks.is_list(checks.listed(word)) for word in words):
            raise TypeError(f"bad_words_ids must be a list of lists of token ids, got {words!r}")
        words = dict.fromkeys(checks.tokens("bad_words_ids", word, self.vocab_size) for word in words)
        if () in words:
            raise ValueError("bad_words_ids must not hold an empty list")
        return tuple(word for word in words if len(word) > 1 or word[0] not in stop_token_ids)

    def forced_bos(self) -> tuple[int, ...]:
        bos = self.one_or_more("forced_bos_token_id")
        if len(bos) > 1:
            raise ValueError(f"forced_bos_token_id must be one token id, got {list(bos)}")
        return bos

    def least_lengths(self) -> dict[str, int]:
        """Return min_length and min_new_tokens. If the second is given or configured, even as 0, the first is off."""
        min_length, min_new_tokens = self.count("min_length"), self.value("min_new_tokens", None)
        if min_new_tokens is None:
            return {"min_length": min_length, "min_new_tokens": 0}
        return {"min_length": 0, "min_new_tokens": _count("min_new_tokens", min_new_tokens)}

    def biases(self) -> tuple[dict[int, float], tuple[tuple[tuple[int, ...], float], ...]]:
        """Return the biases of single tokens, and those of sequences."""
        value = self.given.get("logit_bias")
        if value is None and self.defaults.get("sequence_bias") is not None:
            pairs = self.defaults["sequence_bias"]  # a dict of tuples, or a list of pairs
            pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
            value = {tuple(sequence): bias for sequence, bias in pairs}
        elif value is None:
            value = self.value("logit_bias", {})
        if not isinstance(value, Mapping):
            raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
        single, longer = {}, {}
        for key, bias in value.items():
            ids = self._bias_key(key)
            number = _bias(f"token {ids[0]}" if len(ids) == 1 else f"tokens {list(ids)}", bias)
            if len(ids) == 1:
                single[ids[0]] = number
            else:
                longer[ids] = number
        return single, tuple(longer.items())

    def _bias_key(self, key: object) -> tuple[int, ...]:
        if not isinstance(key, tuple):
            return (checks.token("logit_bias", key, self.vocab_size),)
        ids = checks.tokens("logit_bias", key, self.vocab_size)
        if not ids:
            raise ValueError("logit_bias must not hold an empty tuple")
        return ids


def _count(name: str, value: object) -> int:
    wanted = f"{name} must be an integer of at least 0, got {value!r}"
    try:
        count = checks.integer(name, value)
    except TypeError:
        raise TypeError(wanted) from None
    if count < 0:
        raise ValueError(wanted)
    return count


def _bias(name: str, bias: object) -> float:
    wanted = f"logit_bias of {name} must be a finite number or -inf, got {bias!r}"
    try:
        number = checks.real(name, bias, "a number")
    except TypeError:
        raise TypeError(wanted) from None
    if math.isnan(number) or number == math.inf:
        raise ValueError(wanted)
    return number

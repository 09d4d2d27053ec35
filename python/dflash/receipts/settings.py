"""The settings that decide a text, as a receipt states them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from ..call import Call, TargetDefaults
from ..limits import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_NGRAM,
    MAX_POSITIONS,
    MAX_SHOWN,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_WORD_CELLS,
)
from ..sampling import Grammar, RuleSettings
from ..terminal import listed, printable, shortened

if TYPE_CHECKING:
    from ..call import GenerateArguments

__all__ = ["Settings", "unset"]

_Words = tuple[tuple[int, ...], ...]
_RULES = tuple(
    field.name
    for field in dataclasses.fields(RuleSettings)
    if field.name not in ("logit_bias", "sequence_bias", "stop_token_ids", "logits_processor", "stopping_criteria")
)


def unset(vocab_size: int, device: torch.device | str = "cpu") -> TargetDefaults:
    """Return the defaults of a target whose generation_config asks for nothing."""
    nothing: dict[str, object] = defaultdict(lambda: None, eos_token_id=[], rules={}, unsupported={})
    return TargetDefaults(nothing, vocab_size, torch.device(device))


@dataclass(frozen=True)
class Settings:
    """The settings of a call that decide its text, the target's generation_config filled in.

    Each is named and means as in `dflash.call.GenerateArguments`; ``logit_bias`` is a tuple of sequences of token ids
    with the bias of the last of them, and ``grammar`` is one for all answers. What changes only the speed is not among
    them.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    logit_bias: tuple[tuple[tuple[int, ...], float], ...]
    bad_words_ids: _Words
    suppress_tokens: tuple[int, ...]
    begin_suppress_tokens: tuple[int, ...]
    forced_bos_token_id: tuple[int, ...]
    forced_eos_token_id: tuple[int, ...]
    min_length: int
    min_new_tokens: int
    grammar: Grammar | None

    def __post_init__(self) -> None:
        _check_cost(self)

    @classmethod
    def of(cls, call: Call) -> Settings:
        """Return the settings of a call.

        Raises:
            ValueError: a rule is larger than a receipt may state (`dflash.limits`), or answers have different grammars.
        """
        if len(grammars := {matcher and matcher.grammar for matcher in call.grammars}) > 1:
            raise ValueError(f"a receipt states one grammar for all answers, got {len(grammars)}: make several calls")
        rules, sampling = call.rules, call.sampling.checked()
        single = (((token,), bias) for token, bias in dict(rules.logit_bias).items())
        return cls(
            max_new_tokens=call.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            stop_token_ids=tuple(call.stop_token_ids),
            stop_strings=call.stop_strings,
            logit_bias=(*single, *rules.sequence_bias),
            grammar=next(iter(grammars), None),
            **{name: getattr(rules, name) for name in _RULES},
        )

    @classmethod
    def parse(cls, content: object, vocab_size: int) -> Settings:
        """Check settings of unknown origin: the values that JSON has for them.

        Args:
            content: maps the name of every field to its value.
            vocab_size: of the target.

        Raises:
            ValueError: a name is missing or unknown, or a value is out of range.
            TypeError: a value has the wrong type.
        """
        # 1. What costs nothing: the names, sizes of numbers, what a call would take to mean "unset".
        given = check_names(content, [field.name for field in dataclasses.fields(cls)], "settings")
        _check_numbers(given)
        if missing := [name for name, value in given.items() if value is None]:
            raise ValueError(f"settings must not be null, got {listed(missing)}")
        # 2. The values, as a call checks them.
        strings, biases = _parse_strings(given.pop("stop_strings")), _parse_biases(given.pop("logit_bias"))
        grammar = _parse_grammar(given.pop("grammar"))
        _check_words(given["bad_words_ids"])
        arguments = _as_arguments({**given, "logit_bias": dict(biases), "seed": 0})
        call = Call.resolve(unset(vocab_size), torch.zeros(1, 1, dtype=torch.int64, device="cpu"), arguments)
        return dataclasses.replace(cls.of(call), stop_strings=strings, grammar=grammar)

    def arguments(self) -> GenerateArguments:
        """Return them as arguments of a call, without the stop strings and the grammar, which need a tokenizer."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del given["stop_strings"], given["grammar"]
        biases = {ids[0] if len(ids) == 1 else ids: bias for ids, bias in self.logit_bias}
        return _as_arguments({**given, "logit_bias": biases})

    def to_json(self) -> dict[str, object]:
        """Return what `parse` takes; a bias of -inf, which JSON has no number for, is "-inf"."""
        content = dataclasses.asdict(self) | {"grammar": dataclasses.asdict(self.grammar) if self.grammar else {}}
        content["logit_bias"] = [[ids, "-inf" if bias == -math.inf else bias] for ids, bias in self.logit_bias]
        return content


def _as_arguments(given: dict[str, object]) -> GenerateArguments:
    """Return arguments of a call. min_new_tokens, even if it is 0, would turn min_length off."""
    if given["min_length"]:
        given = {name: value for name, value in given.items() if name != "min_new_tokens"}
    return cast("GenerateArguments", given)


def check_names(content: object, names: Sequence[str], what: str) -> dict[str, object]:
    """Return a JSON object as a dict. Raise unless it has exactly these names."""
    if not isinstance(content, Mapping):
        raise TypeError(f"{what} must be an object, got {shortened(content)}")
    if missing := [name for name in names if name not in content]:
        raise ValueError(f"{what} must have {listed(missing)}")
    if unknown := [name for name in content if name not in names]:
        raise ValueError(f"{what} has {listed(unknown)}, which this version of dflash does not know")
    return dict(content)


def _check_numbers(value: object) -> None:
    """Raise unless every integer in a JSON value fits in int64."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"integers must fit in int64, got {shortened(value)}")
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(item)


def _parse_strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise TypeError(f"stop_strings must be a list of texts that are not empty, got {shortened(value)}")
    return tuple(value)


def _parse_grammar(value: object) -> Grammar | None:
    """Return a grammar from its kind and text, None from an empty object."""
    if value == {}:
        return None
    given = check_names(value, ["kind", "text"], "grammar")
    if not all(isinstance(part, str) for part in given.values()):
        raise TypeError(f"grammar must have a kind and a text, got {shortened(value)}")
    kind, text = str(given["kind"]), str(given["text"])
    _check_grammar(text)
    makers = {"json_schema": _schema_grammar, "regex": Grammar.regex, "lark": Grammar.lark}
    if kind not in makers:
        raise ValueError(f"grammar must be of the kind json_schema, regex or lark, got {shortened(kind)}")
    try:
        return makers[kind](text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"grammar: {printable(str(error)[:MAX_SHOWN])}") from error


def _schema_grammar(text: str) -> Grammar:
    return Grammar.json_schema(json.loads(text))


def _check_grammar(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(f"grammar must have at most {MAX_GRAMMAR_CHARACTERS} characters in a receipt, got {len(text)}")


def _parse_biases(value: object) -> list[tuple[int | tuple[int, ...], object]]:
    """Return the pairs of `Settings.logit_bias` as items of the argument ``logit_bias``."""
    pairs: list[tuple[int | tuple[int, ...], object]] = []
    for pair in value if isinstance(value, list) else [value]:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], list) or not pair[0]:
            raise TypeError(
                f"logit_bias must be a list of pairs of a list of token ids and a bias, got {shortened(pair)}"
            )
        ids, bias = pair
        if not all(type(token) is int for token in ids):
            raise TypeError(f"logit_bias must hold token ids, got {shortened(ids)}")
        pairs.append((ids[0] if len(ids) == 1 else tuple(ids), -math.inf if bias == "-inf" else bias))
    if len(dict(pairs)) < len(pairs):
        raise ValueError("logit_bias must have each sequence of token ids once")
    _check_cells("logit_bias", [key for key, _ in pairs if isinstance(key, tuple)])
    return pairs


def _check_words(value: object) -> None:
    if not isinstance(value, list) or not all(isinstance(word, list) for word in value):
        raise TypeError(f"bad_words_ids must be a list of lists of token ids, got {shortened(value)}")
    _check_cells("bad_words_ids", value)


def _check_cells(name: str, words: Sequence[Sequence[int]]) -> None:
    words = [word for word in words if len(word) > 1]
    cells = len(words) * max(map(len, words), default=0)
    if cells > MAX_WORD_CELLS:
        raise ValueError(
            f"{name}: sequences times the longest of them must be at most {MAX_WORD_CELLS} in a receipt, got {cells}"
        )


def _check_cost(settings: Settings) -> None:
    """Raise if checking a text by these settings could cost memory or time out of proportion to it."""
    _check_cells("bad_words_ids", settings.bad_words_ids)
    _check_cells("logit_bias", [ids for ids, _ in settings.logit_bias])
    if settings.no_repeat_ngram_size > MAX_NGRAM:
        raise ValueError(
            f"no_repeat_ngram_size must be at most {MAX_NGRAM} in a receipt, got {settings.no_repeat_ngram_size}"
        )
    if settings.max_new_tokens > MAX_POSITIONS:
        raise ValueError(f"max_new_tokens must be at most {MAX_POSITIONS}, got {settings.max_new_tokens}")
    if settings.grammar is not None:
        _check_grammar(settings.grammar.text)
    strings = settings.stop_strings
    if len(strings) > MAX_STOP_STRINGS or sum(map(len, strings)) > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"stop_strings must be at most {MAX_STOP_STRINGS}, of {MAX_STOP_CHARACTERS} characters together, in a "
            f"receipt, got {len(strings)} of {sum(map(len, strings))}"
        )

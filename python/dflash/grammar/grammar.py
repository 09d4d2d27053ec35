"""Grammars that an answer must match: JSON schemas, regular expressions and Lark grammars, through llguidance."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..settings import string
from ..streaming import Tokenizer
from .masks import Matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher

_NAMES = {"json_schema": "JSON schema", "regex": "regex", "lark": "Lark grammar"}
_WHITESPACE = r" ?(\r?\n[ \t]{0,32})?"
_MAX_REASON = 500  # characters of an error; some repeat the grammar
_MAX_VOCABULARIES = 8  # stop lists per tokenizer, which clients of a server may choose
_MAX_COMPILED = 64  # grammars per tokenizer and stop list that are kept compiled


@dataclass(frozen=True)
class Grammar:
    """What an answer must match, from its first token to the stop token.

    Make one with `json_schema`, `regex` or `lark`. llguidance (the extra ``grammar``) defines syntax and keywords.

    Attributes:
        kind: ``"json_schema"``, ``"regex"`` or ``"lark"``.
        text: the schema as JSON, the pattern, or the grammar.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, object]) -> Grammar:
        """Return the grammar of the JSON documents that a schema describes.

        Between two JSON tokens there may be a space, and a line break with up to 32 spaces or tabs: free whitespace
        would let a model write nothing else. ``"x-guidance": {"whitespace_flexible": False}`` in the schema forbids it,
        ``{"whitespace_pattern": REGEX}`` allows other.

        Raises:
            ValueError: the schema is invalid, contradicts itself or has an unsupported keyword, or llguidance is not
                installed.
            TypeError: it is not a dict of JSON values.
        """
        if not isinstance(schema, Mapping):
            raise TypeError(f"a JSON schema must be a dict, got {type(schema).__name__}")
        try:
            text = json.dumps(dict(schema), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"a JSON schema must hold JSON values only: {error}") from None
        return cls("json_schema", text)._checked()

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        r"""Return the grammar of the texts that a regular expression matches as a whole.

        The syntax is that of Rust's ``regex`` without look-around: ``\w`` and ``\d`` are Unicode. ``^`` and ``$`` may
        stand at the ends.

        Raises:
            ValueError: the pattern is invalid, or llguidance is not installed.
            TypeError: it is not a string.
        """
        return cls("regex", string("a regex", pattern))._checked()

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return a context-free grammar in Lark's syntax, as llguidance reads it, with the rule ``start``.

        Raises:
            ValueError: the grammar is invalid, or llguidance is not installed.
            TypeError: it is not a string.
        """
        return cls("lark", string("a Lark grammar", grammar))._checked()

    @property
    def source(self) -> str:
        """The grammar as llguidance takes it."""
        if self.kind == "regex":
            return _llguidance().LLMatcher.grammar_from_regex(self.text)
        given = {"lark_grammar": self.text} if self.kind == "lark" else {"json_schema": self._schema}
        return json.dumps({"grammars": [given]})

    @property
    def rule(self) -> str:
        """The grammar as what a rule of a larger Lark grammar stands for."""
        if self.kind == "json_schema":
            return f"%json {json.dumps(self._schema)}"
        lark = self.text if self.kind == "lark" else json.loads(self.source)["grammars"][0]["lark_grammar"]
        return f"%lark {{\n{lark}\n}}"

    @property
    def _schema(self) -> dict[str, object]:
        return {"x-guidance": {"whitespace_pattern": _WHITESPACE}} | json.loads(self.text)

    def begin(self, tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> Matcher:
        """Return the place of a row that has not begun; ``stop_token_ids`` end it.

        Raises:
            ValueError: the grammar allows no token of this tokenizer, or the tokenizer cannot be used.
        """
        return _vocabulary(tokenizer, tuple(stop_token_ids)).start(self)

    def _checked(self) -> Grammar:
        """Return the grammar; raise ValueError if llguidance does not take it."""
        if reason := _llguidance().LLMatcher.validate_grammar(self.source):
            raise ValueError(f"this {_NAMES[self.kind]} cannot be used: {reason.strip()[:_MAX_REASON]}")
        return self


class _Vocabulary:
    """A tokenizer as llguidance reads it, and the grammars compiled for it; the ids ``stop`` end a row."""

    def __init__(self, tokenizer: Any, stop: tuple[int, ...]) -> None:
        try:
            self.tokens = _llguidance().hf.from_tokenizer(tokenizer, eos_token=list(stop))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"grammars cannot be used with this {type(tokenizer).__name__}: {error}") from error
        if plain := [token for token in stop if not self.tokens.is_special_token(token)]:
            raise ValueError(
                f"stop_token_ids {plain} are text to this tokenizer, and a grammar decides which text may follow: "
                "with a grammar, name special tokens such as EOS only"
            )
        self.stop = frozenset(stop)
        self.start = functools.lru_cache(_MAX_COMPILED)(self._start)

    def _start(self, grammar: Grammar) -> Matcher:
        matcher: LLMatcher = _llguidance().LLMatcher(self.tokens, grammar.source, log_level=0)
        matcher.compute_bitmask()  # finds what only shows with a vocabulary
        if matcher.is_error():
            raise ValueError(
                f"no token of this tokenizer can begin a match of this {_NAMES[grammar.kind]}: "
                f"{matcher.get_error().splitlines()[0]}"
            )
        return Matcher(grammar, matcher, self.tokens.vocab_size, self.stop)


_vocabularies: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], _Vocabulary]] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: Any, stop: tuple[int, ...]) -> _Vocabulary:
    """Return the vocabulary of a tokenizer. Making one takes about a second for 150,000 tokens, so it is kept."""
    try:
        kept = _vocabularies.setdefault(tokenizer, {})
        key = len(tokenizer), *stop  # tokens may have been added
    except TypeError as error:
        raise ValueError(f"grammars cannot be used with this {type(tokenizer).__name__}: {error}") from error
    if key not in kept:
        vocabulary = _Vocabulary(tokenizer, stop)
        while len(kept) >= _MAX_VOCABULARIES:
            kept.pop(next(iter(kept), None), None)
        kept[key] = vocabulary
    return kept[key]


def _llguidance() -> Any:
    try:
        import llguidance.hf
    except ImportError as error:
        raise ValueError("a grammar needs the llguidance package: pip install '.[grammar]'") from error
    return llguidance

"""Grammars that answers must match, through llguidance: a call carries them, and the engine asks for their masks."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .settings import string
from .state import RUNNING, Block, State
from .streaming import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_NAMES = {"json_schema": "JSON schema", "regex": "regex", "lark": "Lark grammar"}
_GUIDANCE = {"whitespace_pattern": r" ?(\r?\n[ \t]{0,32})?"}
_MAX_REASON = 500  # characters of an error; some repeat the grammar
# llguidance recurses along references with up to 10 KB of stack for one, and an overflow ends the process. A text of
# this size cannot hold more of them than this stack, of which the system takes only what is used.
_MAX_BYTES, _MAX_DEPTH, _STACK_BYTES = 2**18, 100, 2**29
# Fuel bounds a grammar's lexer: 300 date-times take 58,000, 6,000 words of an enum 73,000. A regex whose n parts may
# all be missing takes memory by n^2: 63 MB with a fuel of 20,000, over 1 GB with 100,000, so only schemas have as much.
_REGEX_FUEL, _JSON_FUEL, _MAX_SQUARES = 20_000, 100_000, 2**24
_MAX_REMAINDERS = 100_000  # llguidance's states for multipleOf, which fuel does not count: 30 us and 1 KB each
_MAX_STATES, _MAX_ITEMS = 2**17, 20_000  # of the lexer, 0.4 to 1.4 KB each; of the parser, in one step
# What may follow at one place: an alternative takes one of the parser's items, an optional property four, and a step
# has several places. References and alternatives in each other are followed so deep. Some tokens are tried in advance.
_MAX_CHOICES, _LEVELS, _AHEAD = 2_500, 4, 8
_DEAD_END = "NoExtensionBias"  # llguidance's word for it; after other tokens there may be none
# A compiled grammar took up to 1 KB per byte of text, and 64 MB for the states of a regex that explodes.
_TEXT_BYTES, _STATES_BYTES, _MAX_KEPT_BYTES = 2**10, 2**26, 2**30
# llguidance looks ahead for all text that can only follow, at 4 us and 0.4 KB per byte, unless told not to. Then masks
# allow every way to split such text into tokens.
_UNFORCED, _MAX_FORCED = '%llguidance {"no_forcing": true}', 2**17
_LITERALS = re.compile(r"""\"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?""")
_NUMBERS = {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
_DATA = {"const", "enum", "default", "examples", "x-guidance"}  # their values are not schemas
# Keywords that llguidance refuses, and values with which they say nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "not": (False,), "then": (True, {}), "else": (True, {}), "propertyNames": (True, {}),
    "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}), "$recursiveAnchor": (False,),
}  # fmt: skip
_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
# Escapes and classes are skipped. Group 1: look-around, a back-reference, a word boundary.
_UNREADABLE = re.compile(r"\\[^0-9bBk]|\[(?:\\.?|[^]\\])*\]?|(\(\?<?[=!]|\\.)", re.DOTALL)


@dataclass(frozen=True)
class Grammar:
    """Pattern that an answer must match, from its first token to the stop token.

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
        return cls("json_schema", json.dumps(_read_schema(schema)))._checked()

    @classmethod
    def lenient_json_schema(cls, schema: Mapping[str, object]) -> tuple[Grammar, list[str]]:
        """Return the grammar of a schema without the parts it cannot express, and a description of each of them.

        ``oneOf`` counts as ``anyOf``. Patterns that llguidance cannot read are left out; where it refuses the schema
        still, all patterns and ``multipleOf`` are. Raises what `json_schema` does for other faults of the schema.
        """
        given = _read_schema(schema)
        given["x-guidance"] = {"lenient": True} | given.get("x-guidance", _GUIDANCE)
        grammar = cls("json_schema", json.dumps(given))
        is_refused, reasons = grammar._validated()
        left_out: list[str] = []
        for drops_all in (False, True):
            if is_refused and (dropped := _drop(given, drops_all)):
                left_out += dropped
                grammar = cls("json_schema", json.dumps(given))
                is_refused, reasons = grammar._validated()
        if is_refused:
            raise ValueError(f"this JSON schema cannot be used: {reasons[0]}")
        return grammar, [*dict.fromkeys([*left_out, *reasons])]

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

    @functools.cached_property
    def source(self) -> str:
        """The grammar as llguidance takes it."""
        if (is_short := self._is_short) and self.kind == "json_schema":
            return json.dumps({"grammars": [{"json_schema": self._schema}]})
        lark = f"start: {self.rule}" if self.kind == "json_schema" else self._lark
        return json.dumps({"grammars": [{"lark_grammar": lark if is_short else f"{lark}\n{_UNFORCED}"}]})

    @property
    def rule(self) -> str:
        """Body of a rule for this grammar in a larger Lark grammar."""
        if self.kind == "json_schema":
            return f"%json {json.dumps(self._schema)}"
        return f"%lark {{\n{self._lark}\n}}"

    @property
    def _lark(self) -> str:
        if self.kind == "lark":
            return self.text
        return json.loads(_llguidance().LLMatcher.grammar_from_regex(self.text))["grammars"][0]["lark_grammar"]

    @property
    def _schema(self) -> dict[str, object]:
        return {"x-guidance": _GUIDANCE} | json.loads(self.text)

    def begin(self, tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> Matcher:
        """Return the place of a row that has not begun; ``stop_token_ids`` end it.

        Raises:
            ValueError: the grammar allows no token of this tokenizer, or the tokenizer cannot be used.
        """
        return _vocabulary(tokenizer, stop_token_ids[0]).begin(self, frozenset(stop_token_ids))

    @property
    def _is_short(self) -> bool:
        """True if no more than `_MAX_FORCED` bytes can follow from repetitions without a choice."""
        schemas, plain = _split(self.text) if self.kind == "lark" else ([], self.text)
        if self.kind == "json_schema":
            schemas, plain = [self.text], ""
        # Terminals that name others may double at every step. Rules may not: the parser's items are bounded.
        name = ""
        for piece in re.split(r"[\n{]", _LITERALS.sub("", plain) if self.kind == "lark" else ""):
            head, colon, body = piece.partition(":")
            name, body = (head.strip(), body) if colon else (name, piece)
            if name.isupper() and re.search("[A-Z]", body):
                return False
        texts = [plain, *_patterns(_pairs(schemas))]
        counts = (math.prod(max(1, int(count)) for count in re.findall(r"[{~]\s*(\d{1,9})", text)) for text in texts)
        return sum(len(text) * count for text, count in zip(texts, counts, strict=True)) <= _MAX_FORCED

    @property
    def limits(self) -> Any:
        """Bounds for llguidance, as its own object."""
        has_json = self.kind == "json_schema" or (self.kind == "lark" and "%json" in self.text)
        return _limits(_JSON_FUEL if has_json else _REGEX_FUEL)

    def _checked(self) -> Grammar:
        """Return the grammar; raise ValueError if it cannot be used."""
        is_refused, reasons = self._validated()
        if is_refused:
            raise ValueError(f"this {_NAMES[self.kind]} cannot be used: {reasons[0]}")
        return self

    def _validated(self) -> tuple[bool, list[str]]:
        """Return True if the grammar is refused, and the reason or llguidance's warnings."""
        # 1. Bounds to check before llguidance sees the grammar.
        if (size := len(self.text.encode())) > _MAX_BYTES:
            raise ValueError(f"a {_NAMES[self.kind]} must have at most {_MAX_BYTES} bytes, got {size}")
        schemas, plain = _split(self.text) if self.kind == "lark" else ([self.text], "")
        if self.kind != "regex" and (reason := _excess(schemas)):
            return True, [reason]
        # 2. Regexes next to JSON have the same fuel as without it.
        if self.kind == "lark" and "%json" in self.text:
            is_refused, reasons = _validated(Grammar("lark", plain).source, _limits(_REGEX_FUEL))
            if is_refused and "lexer of more" in reasons[0]:
                return True, reasons
        return _validated(self.source, self.limits)


def _limits(fuel: int) -> Any:
    given = {"initial_lexer_fuel": fuel, "max_lexer_states": _MAX_STATES, "step_max_items": _MAX_ITEMS}
    # Computing large lexemes in advance counts no states.
    return _llguidance().LLParserLimits(**given, max_items_in_row=_MAX_ITEMS, precompute_large_lexemes=False)


def _validated(source: str, limits: Any) -> tuple[bool, list[str]]:
    check = functools.partial(_llguidance().LLMatcher.validate_grammar_with_warnings, limits=limits)
    is_refused, reasons = _on_large_stack(check, source)
    if is_refused and "lexer configuration" in reasons[0]:
        fuel, cure = limits.initial_lexer_fuel, "use fewer or shorter patterns, formats and enum values"
        reasons = [f"it needs a lexer of more than {fuel} units: {cure}"]
    return is_refused, [reason.strip()[:_MAX_REASON] for reason in reasons]


def _read_schema(schema: object) -> dict[str, Any]:
    """Return a copy of a JSON schema; raises TypeError if it is not one, ValueError for wrong options."""
    if not isinstance(schema, Mapping):
        raise TypeError(f"a JSON schema must be a dict, got {type(schema).__name__}")
    try:
        given: dict[str, Any] = json.loads(json.dumps(dict(schema), allow_nan=False))
    except RecursionError:
        raise ValueError(f"a JSON schema may be nested at most {_MAX_DEPTH} deep") from None
    except (TypeError, ValueError) as error:
        raise TypeError(f"a JSON schema must hold JSON values only: {error}") from None
    if not isinstance(options := given.get("x-guidance", {}), dict):
        raise ValueError(f'"x-guidance" in a JSON schema must be an object, got {json.dumps(options)[:_MAX_REASON]}')
    for item in _schemas_in(given):
        _drop_neutral(item)
    return given


def _schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all that it holds, each before its parts. No recursion: a schema may be deep."""
    rest = [schema]
    while rest:
        item = rest.pop()
        if isinstance(item, list):
            rest += item
        if not isinstance(item, dict):
            continue
        yield item
        for key, value in item.items():
            if key in _NAMED and isinstance(value, dict):
                rest += value.values()
            elif key not in _DATA:
                rest.append(value)


def _drop_neutral(schema: dict[str, Any]) -> None:
    """Drop keywords that say nothing from one schema; llguidance would refuse them."""
    dropped = [key for key, values in _NEUTRAL.items() if key in schema and schema[key] in values]
    for key in _DEPENDENT:
        if isinstance(found := schema.get(key), dict) and all(part in ([], True, {}) for part in found.values()):
            dropped.append(key)
    left = schema.keys() - {*dropped}
    if "if" not in left or not left & {"then", "else"}:
        dropped += ("if", "then", "else")
    if "contains" not in left or (schema.get("minContains") == 0 and "maxContains" not in left):
        dropped += ("contains", "minContains", "maxContains")
    for key in dropped:
        schema.pop(key, None)


def _split(lark: str) -> tuple[list[str], str]:
    """Return the schemas in a Lark grammar that can be read, and the grammar with empty ones instead."""
    schemas, plain, begin = [], "", 0
    for found in re.finditer(r"%json\s*", lark):
        if found.end() < begin:
            continue
        try:
            end = json.JSONDecoder().raw_decode(lark, found.end())[1]
        except (ValueError, RecursionError):
            continue  # words in a comment or a string; of a schema, llguidance says why it cannot be read
        schemas.append(lark[found.end() : end])
        plain, begin = f"{plain}{lark[begin : found.end()]}{{}}", end
    return schemas, plain + lark[begin:]


def _excess(schemas: Sequence[str]) -> str:
    """Return which bound these JSON schemas pass, empty for none. Constants count, since references may lead there."""
    for schema in schemas:
        marks = re.sub(r'"(?:[^"\\]|\\.)*"|[^][{}]+', "", schema)
        if (depth := max(itertools.accumulate(1 if mark in "[{" else -1 for mark in marks), default=0)) > _MAX_DEPTH:
            return f"it may be nested at most {_MAX_DEPTH} deep, and is {depth} deep"
    pairs = _pairs(schemas)
    if (squares := sum(len(pattern) ** 2 for pattern in _patterns(pairs))) > _MAX_SQUARES:
        return f"the squares of its patterns' lengths may add up to {_MAX_SQUARES}, and are {squares}: use shorter ones"
    if (choices := max(map(_choices, schemas), default=0)) > _MAX_CHOICES:
        what = f"the alternatives and four times the properties of one object may add up to {_MAX_CHOICES}"
        return f"{what}, and are {choices}: use fewer"
    multiples = {value for key, value in pairs if key == "multipleOf" and type(value) in (int, float) and value > 0}
    decimals = [Decimal(str(value)).normalize() for value in multiples if math.isfinite(value)]
    scale = max([0, *(-int(number.as_tuple().exponent) for number in decimals)])
    numbers, common = sum(key in _NUMBERS for key, _ in pairs), 1
    for number in decimals:
        common = math.lcm(common, int(number.scaleb(scale)))
        if common * numbers > _MAX_REMAINDERS:
            what = "the least common multiple of its multipleOf, in units of their last digit, times its"
            return f"{what} {numbers} bounds of numbers must be at most {_MAX_REMAINDERS}: use smaller or fewer ones"
    return ""


def _choices(schema: str) -> int:
    """Return how many items of the parser may be needed at one place of a JSON schema, about."""
    root = json.loads(schema)
    parts: dict[int, tuple[int, list[int]]] = {}  # per schema its own items, and what it consists of
    for item in _schemas_in(root):
        lists = (item.get(key) for key in ("anyOf", "oneOf", "allOf"))
        inside = [part for found in lists if isinstance(found, list) for part in found]
        kind, _, name = str(item.get("$ref")).removeprefix("#/").partition("/")
        if isinstance(root, dict) and isinstance(named := root.get(kind), dict) and name in named:
            inside.append(named[name])
        properties = item.get("properties")
        own = 4 * len(properties) if isinstance(properties, dict) else 0
        parts[id(item)] = own + len(inside), [*map(id, inside)]
    sizes: dict[int, int] = {}
    for _ in range(_LEVELS):
        sizes = {item: own + sum(sizes.get(part, 0) for part in inside) for item, (own, inside) in parts.items()}
    return max(sizes.values(), default=0)


def _pairs(schemas: Sequence[str]) -> list[tuple[str, Any]]:
    """Return all keys in these JSON texts, at every depth, with their values."""
    pairs: list[tuple[str, Any]] = []
    for schema in schemas:
        json.loads(schema, object_pairs_hook=lambda found: pairs.extend(found) or dict(found))
    return pairs


def _patterns(pairs: Sequence[tuple[str, Any]]) -> list[str]:
    patterns = [value for key, value in pairs if key == "pattern" and isinstance(value, str)]
    named = [value for key, value in pairs if key == "patternProperties" and isinstance(value, dict)]
    return patterns + [name for names in named for name in names]


def _drop(schema: dict[str, Any], drops_all: bool) -> list[str]:
    """Drop patterns that llguidance cannot read from a schema, or all and ``multipleOf``; return words for them."""

    def is_wrong(pattern: object) -> bool:
        return isinstance(pattern, str) and (drops_all or any(found[1] for found in _UNREADABLE.finditer(pattern)))

    left_out = []
    for item in _schemas_in(schema):
        for key in ("pattern", "multipleOf"):
            if is_wrong(item.get(key)) or (key == "multipleOf" and key in item and drops_all):
                left_out.append(f"{key} {json.dumps(item.pop(key))}")
        names = item.get("patternProperties")
        if isinstance(names, dict) and any(map(is_wrong, names)):
            left_out += [f"patternProperties {json.dumps(name)}" for name in names if is_wrong(name)]
            item["patternProperties"] = {name: value for name, value in names.items() if not is_wrong(name)}
            if item.pop("additionalProperties", None) is not None:  # it must not apply to these names
                left_out.append("additionalProperties next to patternProperties")
    return left_out


class _Vocabulary:
    """A tokenizer as llguidance reads it, with ``eos`` as its end, and the grammars compiled for it.

    Of these the oldest go when all would take too many bytes.
    """

    def __init__(self, tokenizer: Any, eos: int) -> None:
        self.size, self._eos = len(tokenizer), eos  # tokens may be added
        self._tokens = _llguidance().hf.from_tokenizer(tokenizer, eos_token=eos)
        self._compiled: dict[Grammar, Any] = {}

    def begin(self, grammar: Grammar, stop: frozenset[int]) -> Matcher:
        if plain := [token for token in sorted(stop) if not self._tokens.is_special_token(token)]:
            raise ValueError(f"stop_token_ids {plain} are text to this tokenizer: with a grammar, name special ones")
        matcher = self._compiled.pop(grammar, None)
        # Copies share the states that they visit, and fail once these reach llguidance's limits.
        if matcher is not None:
            (trial := matcher.deep_copy()).compute_bitmask()
        if matcher is None or trial.is_error():
            matcher = self._compile(grammar)
        self._compiled[grammar] = matcher
        size = 0
        for kept in reversed(list(self._compiled)):  # the newest first, which stays
            size += _STATES_BYTES + _TEXT_BYTES * len(kept.text)
            if size > _MAX_KEPT_BYTES:
                self._compiled.pop(kept, None)
        return Matcher(grammar, matcher, self._tokens.vocab_size, self._eos, stop)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        make = functools.partial(_llguidance().LLMatcher, log_level=0, limits=grammar.limits)
        matcher: LLMatcher = _on_large_stack(make, self._tokens, grammar.source)
        # Some errors depend on the vocabulary, and some limits are met only after the first tokens.
        ahead, kind, certain = matcher.deep_copy(), _NAMES[grammar.kind], True
        for what in ("begin", *["continue"] * _AHEAD):
            allowed = int.from_bytes(ahead.compute_bitmask(), "little")
            if ahead.is_error() and (certain or _DEAD_END not in _reason(ahead)):
                raise ValueError(f"no token of this tokenizer can {what} a match of this {kind}: {_reason(ahead)}")
            certain = certain and allowed.bit_count() == 1
            if not allowed or ahead.is_stopped() or not ahead.consume_token((allowed & -allowed).bit_length() - 1):
                break
        return matcher


_stack_size = threading.Lock()  # Python has one setting for all threads
_vocabularies: weakref.WeakKeyDictionary[Any, _Vocabulary] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: Any, stop: int) -> _Vocabulary:
    """Return the vocabulary of a tokenizer. Making one takes about a second for 150,000 tokens, so it is kept."""
    try:
        kept = _vocabularies.get(tokenizer)
        if kept is None or kept.size != len(tokenizer):
            eos = getattr(tokenizer, "eos_token_id", None)
            kept = _vocabularies[tokenizer] = _Vocabulary(tokenizer, stop if eos is None else eos)
        return kept
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"grammars cannot be used with this {type(tokenizer).__name__}: {error}") from error


def _on_large_stack(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of llguidance, which releases Python's lock, in a separate thread."""
    with ThreadPoolExecutor(1) as threads:
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
            try:
                result = threads.submit(function, *arguments)
            finally:
                threading.stack_size(before)
        return result.result()


def _llguidance() -> Any:
    try:
        import llguidance.hf
    except ImportError as error:
        raise ValueError("a grammar needs the llguidance package: pip install '.[grammar]'") from error
    return llguidance


# ---------------------------------------------------------------------------------------------- masks


class Matcher:
    """One row's place in its grammar; ``words`` is the size of a mask, 32 tokens in each.

    Args:
        grammar: kept for callers, not used here.
        state: llguidance's, not in error.
        vocab_size: tokens that it knows.
        eos: the id that it allows where a match may end.
        stop: the ids that end a row.
    """

    def __init__(self, grammar: Hashable, state: LLMatcher, vocab_size: int, eos: int, stop: frozenset[int]) -> None:
        self.grammar, self._state, self._vocab_size, self._eos, self._stop = grammar, state, vocab_size, eos, stop
        self.words = -(-vocab_size // 32)

    def masks(self, state: State, rows: int) -> GrammarMasks:
        """Return masks for a running batch and blocks of up to ``rows`` rows, for grammars of this tokenizer."""
        return GrammarMasks(state, rows, self.words)

    def copy(self) -> Matcher:
        """Return another at the same place; both share the visited states of the grammar."""
        return Matcher(self.grammar, self._state.deep_copy(), self._vocab_size, self._eos, self._stop)

    def consume(self, ids: Sequence[int]) -> None:
        """Move on by emitted tokens; raises ValueError if the grammar bans one or passes llguidance's limits."""
        if not self._state.consume_tokens(list(ids)):
            raise ValueError(_reason(self._state))

    def fill_(self, masks: Tensor, ids: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Write which tokens may follow each row of a block. A chain's masks are one call, without Python's lock.

        Args:
            masks: ``[rows, words]`` int32 on the host, contiguous; bit ``i % 32`` of word ``i // 32`` is for token i.
                Rows of banned drafts, of their continuations and of stop tokens are not written.
            ids: of the block's rows; the first is the anchor, which has been consumed; -1 for no proposal.
            parents: of a tree, the row that each row continues, -1 for none; None for a chain.

        Raises:
            ValueError: no token may follow the anchor.
        """
        if parents is None:
            drafts = list(itertools.takewhile(self._is_text, ids[1:]))
            state = self._state.deep_copy()  # a draft may lead to an error, which llguidance never leaves
            state.unsafe_compute_mask_ptr_with_draft_token(masks.data_ptr(), 4 * self.words, drafts)
            if not state.is_error():
                self._end_(masks)
                return
            ids, parents = [ids[0], *drafts], range(-1, len(drafts))
        children: list[list[int]] = [[] for _ in ids]
        for row, parent in enumerate(parents):
            if parent >= 0 and self._is_text(ids[row]):
                children[parent].append(row)
        self._visit(self._state.deep_copy(), 0, masks, ids, children)

    def _visit(self, state: LLMatcher, row: int, masks: Tensor, ids: Sequence[int], children: list[list[int]]) -> None:
        """Write the masks of a row and of its descendants."""
        state.unsafe_compute_mask_ptr(masks[row].data_ptr(), 4 * self.words)
        if state.is_error():  # llguidance would allow a stop token
            if row == 0:
                raise ValueError(_reason(state))
            masks[row] = 0
            return
        self._end_(masks[row])
        for child in children[row]:
            if _has(masks[row], ids[child]):
                ahead = state.deep_copy()
                ahead.consume_token(ids[child])
                self._visit(ahead, child, masks, ids, children)

    def _end_(self, masks: Tensor) -> None:
        """Allow stop tokens where llguidance allows its ``eos``; allow ``eos`` itself only if it is one."""
        if self._stop == {self._eos}:
            return
        may_end = masks[..., self._eos // 32] >> self._eos % 32 & 1
        for token in self._stop:
            masks[..., token // 32] |= may_end << token % 32
        if self._eos not in self._stop:
            masks[..., self._eos // 32] &= ~(may_end << self._eos % 32)

    def _is_text(self, token: int) -> bool:
        return 0 <= token < self._vocab_size and token not in self._stop


def first_banned(masks: Tensor, drafts: Sequence[int]) -> int | None:
    """Return the index of the first draft that its mask bans where another token is allowed; -1 ends the drafts."""
    for place, token in enumerate(itertools.takewhile(lambda token: token >= 0, drafts)):
        if not _has(masks[place], token):
            return place if masks[place].any() else None
    return None


def _has(mask: Tensor, token: int) -> bool:
    return token < 32 * len(mask) and bool(mask[token // 32].item() >> token % 32 & 1)


def _reason(state: LLMatcher) -> str:
    """Return the first line of an error; the others are llguidance's internals."""
    return state.get_error().splitlines()[0]


class GrammarMasks:
    """Masks for the rows of a batch, made on the host by llguidance.

    Masks of a drafted chain are made before the target runs: they also say which drafts to draw again. Masks of other
    blocks are made during the target's pass. A step waits for the device once, and once more for each redraw. If a
    row's grammar fails, that row ends: its masks allow nothing.

    Args:
        state: of the running batch.
        rows: the most rows of a block.
        words: of a mask.

    Attributes:
        errors: per row, why its grammar failed; empty otherwise.
    """

    def __init__(self, state: State, rows: int, words: int) -> None:
        batch, device = len(state.length), state.length.device
        self._state, on_gpu = state, device.type == "cuda"
        self.rows, self.words, self.errors = rows, words, [""] * batch
        self._matchers: list[Matcher | None] = [None] * batch
        self._consumed = [0] * batch  # tokens of each row, its prompt included, that its matcher has read
        self._masked: list[object] = [None] * batch  # per row, the consumed tokens and drafts of its masks
        # All bits are set for rows without a mask.
        self._masks = torch.full((batch, rows, words), -1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._is_masked = torch.zeros(batch, 1, 1, dtype=torch.bool, device=device)
        self._back = torch.arange(rows - 1, -1, -1, device=device)
        bits = [[not byte >> bit & 1 for bit in range(8)] for byte in range(256)]
        eight = torch.tensor(bits, dtype=torch.bool, device=device)
        self._banned_by_byte = eight.view(torch.int64)[:, 0]  # eight bools in each
        self._asked: Tensor | None = None
        self._arrived = torch.cuda.Event() if on_gpu else None  # the question is on the host
        self._sent = torch.cuda.Event() if on_gpu else None  # the masks have left the host

    @property
    def are_used(self) -> bool:
        """True if a row has a grammar."""
        return any(matcher is not None for matcher in self._matchers)

    def set_(self, row: int, matcher: Matcher | None, prompt_length: int = 0) -> None:
        """Let a row begin a grammar after its prompt, or have none. On a GPU this waits for the step that runs."""
        self._asked = None  # left over from a step that failed
        if matcher is None and self._matchers[row] is None:
            return
        self._is_masked[row] = matcher is not None
        self._matchers[row] = None if matcher is None else matcher.copy()
        self._consumed[row], self.errors[row] = prompt_length, ""
        if matcher is not None:
            if self._sent is not None:
                self._sent.synchronize()
            self._fill(row, [-1])

    def banned_drafts(self, drafts: Tensor, vocab_size: int) -> list[tuple[int, int, Tensor]]:
        """Find the first of each row's ``drafts [batch, drafts]`` that its grammar bans; waits for the device.

        Returns:
            Row, index of the draft, and ``[vocab]`` bool, True for the tokens banned there.
        """
        found = []
        for row, rest in self._advance(self._packed(drafts).tolist()).items():
            self._fill(row, [-1, *rest])
            if (place := first_banned(self._masks[row], rest)) is not None:
                mask = self._masks[row, place].to(drafts.device)
                found.append((row, place, self._banned(mask, vocab_size)))
        return found

    def ask(self, block: Block) -> None:
        """Send the block to the host, unless its masks are made; does not wait."""
        if block.is_checked:
            return
        asked = self._packed(block.ids if block.tree is None else torch.cat([block.ids, block.tree.parents], 1))
        if self._arrived is not None:
            pinned = torch.empty(asked.shape, dtype=asked.dtype, device="cpu", pin_memory=True)
            asked = pinned.copy_(asked, non_blocking=True)
            self._arrived.record()
        self._asked = asked

    def apply(self, logits: Tensor) -> Tensor:
        """Return ``logits [batch, rows, vocab]`` with -inf for banned tokens; NaN where every token is banned.

        Waits for the block of `ask` and makes its masks. Rows that are not running keep theirs.
        """
        rows = logits.shape[1]
        if self._asked is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            values, self._asked = self._asked.tolist(), None
            for row, ids in self._advance(values).items():
                if (self._consumed[row], ids[1:]) != self._masked[row]:
                    self._fill(row, ids[:rows], ids[rows:] or None)
        masks = self._masks[:, :rows].to(logits.device, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        banned = self._banned(masks, logits.shape[2]) & self._is_masked
        logits = logits.masked_fill(banned, -torch.inf)
        nothing = (logits.amax(-1, keepdim=True) == -torch.inf) & self._is_masked
        return logits.masked_fill_(nothing, torch.nan)

    def _fill(self, row: int, ids: list[int], parents: list[int] | None = None) -> None:
        """Write a row's masks; see `Matcher.fill_`."""
        self._masks[row] = -1
        try:
            self._matchers[row].fill_(self._masks[row], ids, parents)
        except ValueError as error:
            self._give_up(row, error)
        self._masked[row] = self._consumed[row], ids[1:]

    def _packed(self, ids: Tensor) -> Tensor:
        """Return lengths, ends, the last tokens that a step may have emitted, and ``ids``, as columns."""
        length = self._state.length[:, None]
        recent = self._state.tokens.gather(1, (length - self._back).clamp(min=0))
        return torch.cat([length, self._state.done[:, None], recent, ids], 1)

    def _advance(self, packed: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Move matchers to their rows' anchors; return the ids of the running rows that have one."""
        out = {}
        for row, (length, done, *rest) in enumerate(packed):
            matcher = self._matchers[row]
            if matcher is None or done != RUNNING:
                continue
            recent, ids = rest[: len(self._back)], rest[len(self._back) :]
            try:
                matcher.consume(recent[len(recent) - (length + 1 - self._consumed[row]) :])
            except ValueError as error:
                self._give_up(row, error)
                continue
            self._consumed[row] = length + 1
            out[row] = ids
        return out

    def _give_up(self, row: int, error: ValueError) -> None:
        """Allow nothing more in a row, which ends it."""
        self._masks[row] = 0
        self.errors[row] = f"the grammar of row {row} cannot go on at position {self._consumed[row]}: {error}"

    def _banned(self, masks: Tensor, vocab_size: int) -> Tensor:
        """Return ``[..., vocab]`` bool, True for ids that ``masks [..., words]`` ban or the tokenizer does not know."""
        banned = self._banned_by_byte[masks.view(torch.uint8).int()].view(torch.bool)
        return torch.nn.functional.pad(banned, (0, vocab_size - banned.shape[-1]), value=True)

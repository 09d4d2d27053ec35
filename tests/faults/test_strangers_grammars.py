"""Schemas and grammars of strangers: taken, or refused in words, whatever they say."""

import json
import random

import jsonschema_rs
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

import dflash

TOKENIZER = byte_level()
NAMES, NUMBERS, TEXT = (
    st.sampled_from(["a", "b", "$ref", ""]),
    st.integers(-2, 2**40) | st.floats(),
    st.text(max_size=5),
)
REGEXES = st.lists(st.sampled_from([*r"ab()[]{}|*+?^$.,-\\d", "{1000}", "(?=", "é", "\n"]), max_size=12).map("".join)
LEAVES = st.fixed_dictionaries({}, optional={
    "type": st.sampled_from(["string", "integer", "number", "object", "array", "null", "other", ["null"], 3]),
    "enum": st.lists(st.none() | TEXT | NUMBERS, max_size=3), "const": TEXT | NUMBERS, "pattern": REGEXES,
    "format": st.sampled_from(["date-time", "uuid", "other"]), "multipleOf": NUMBERS, "uniqueItems": st.just(True),
    **dict.fromkeys(("minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "minProperties"), NUMBERS),
    "required": st.lists(NAMES, max_size=2), "x-guidance": st.dictionaries(TEXT, TEXT, max_size=1),
    "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "http://a/b", ""]),
})  # fmt: skip
SCHEMAS = st.recursive(LEAVES, lambda inner: st.tuples(LEAVES, st.fixed_dictionaries({}, optional={
    **dict.fromkeys(("$defs", "properties", "patternProperties"), st.dictionaries(NAMES | REGEXES, inner, max_size=3)),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), st.lists(inner, max_size=3)),
    **dict.fromkeys(("items", "additionalProperties", "not", "if", "propertyNames"), inner | st.booleans()),
})).map(lambda both: both[0] | both[1]), max_leaves=12)  # fmt: skip
WORDS = [*"ab:()[]|?*+~&,.", "start:", "start", "\n", "a:", "B:", "B", '"a"', '""', "/a+/", "/(/", "%ignore",
         "~3..5", "~9999", "%json {", "%lark {", "}", '{"type": "integer"}', "[lazy]", "<a>", "//"]  # fmt: skip
GRAMMARS = {
    "schema": (dflash.Grammar.json_schema, SCHEMAS),
    "regex": (dflash.Grammar.regex, REGEXES),
    "lark": (
        dflash.Grammar.lark,
        st.lists(st.sampled_from(WORDS), max_size=30).map(lambda w: "start: a\n" + " ".join(w)),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("make", "drawn"), GRAMMARS.values(), ids=GRAMMARS)
@examples(25)
@given(data=st.data())
def test_any_grammar_is_taken_or_refused(make, drawn, data):
    try:
        matcher = make(data.draw(drawn)).begin(TOKENIZER, [0]).copy()
        masks = torch.empty(1, matcher.words, dtype=torch.int32)
        for _ in range(5):
            matcher.fill_(masks, [-1])
            allowed = [token for token in range(1, len(TOKENIZER)) if masks[0, token // 32] >> token % 32 & 1]
            if not allowed:
                break
            matcher.consume([data.draw(st.sampled_from(allowed))])
    except (ValueError, TypeError):
        pass


WORDY = dflash.demo_pair()[2]
UNSAID = {  # keywords that no grammar enforces, and some that it does
    "string": {"format": st.sampled_from(["date", "color"]),
               "pattern": st.sampled_from(["^a+$", "^(?=b)b", r"^(a)\1$", r"a\b"])},
    "integer": {"multipleOf": st.sampled_from([3, 999983]), "not": st.just({"const": 0})},
    "array": {"uniqueItems": st.just(True), "contains": st.just({"const": 1})},
    "object": {"propertyNames": st.just({"maxLength": 1}), "if": st.just({}), "then": st.just({"minProperties": 2}),
               "patternProperties": st.just({"^(?!p)": {"type": "null"}})},
}  # fmt: skip


def typed(kind: str, **kept: object) -> st.SearchStrategy:
    fixed = {key: value if isinstance(value, st.SearchStrategy) else st.just(value) for key, value in kept.items()}
    return st.fixed_dictionaries({"type": st.just(kind)} | fixed, optional=UNSAID[kind])


UNLIKE = st.recursive(
    typed("string", maxLength=3) | typed("string") | typed("integer", minimum=0, maximum=9),
    lambda inner: typed("array", items=inner, maxItems=2)
    | typed("object", properties=st.dictionaries(st.sampled_from(["pattern", "p", "ab"]), inner, min_size=1),
            additionalProperties=False)
    | st.lists(inner, min_size=1, max_size=2).map(lambda options: {"oneOf": options}),
    max_leaves=5,
)  # fmt: skip


def enforced(schema, warnings: str):
    """Return a schema without what its warnings name."""
    if isinstance(schema, list):
        return [enforced(item, warnings) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        word = f"{key} {json.dumps(value)}" if key in ("pattern", "multipleOf") else json.dumps(key)
        word = {"format": f"Unknown format: {value}", "additionalProperties": "additionalProperties next to",
                "patternProperties": "patternProperties "}.get(key, word)  # fmt: skip
        if key == "oneOf":
            kept["anyOf"] = enforced(value, warnings)
        elif key == "properties":
            kept[key] = {name: enforced(item, warnings) for name, item in value.items()}
        elif word not in warnings:
            kept[key] = enforced(value, warnings)
    return kept


@pytest.mark.long
@examples(25)
@given(schema=UNLIKE, seed=st.integers(0, 2**20))
def test_texts_keep_to_all_of_a_schema_that_was_not_warned_about(schema, seed):
    try:
        grammar, warnings = dflash.Grammar.lenient_json_schema(schema)
    except ValueError as error:  # a pattern and a format, say, that nothing meets
        assert "Unsatisfiable" in str(error)  # noqa: PT017
        return
    matcher, stop, ids = grammar.begin(WORDY, [WORDY.eos_token_id]).copy(), WORDY.eos_token_id, []
    masks, draw = torch.empty(1, matcher.words, dtype=torch.int32), random.Random(seed)
    while len(ids) < 200:
        matcher.fill_(masks, [-1])
        words = masks[0].tolist()
        allowed = [token for token in range(len(WORDY)) if words[token // 32] >> token % 32 & 1]
        if stop in allowed:
            value = json.loads(WORDY.decode(ids))
            assert jsonschema_rs.is_valid(enforced(schema, "; ".join(warnings)), value), (value, warnings)
            return
        ids.append(draw.choice(allowed))
        matcher.consume(ids[-1:])

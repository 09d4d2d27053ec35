"""Schemas and grammars of strangers: taken, or refused in words, whatever they say."""

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

#!/usr/bin/env bash
# llguidance 1.9.1 finds a JSON schema of 501 optional properties valid, and fails after the first character.
#
# `LLMatcher.validate_grammar` takes limits, and returns "empty string if the grammar is valid". Expected: a schema
# that is beyond a limit of the parser is refused there, before an answer begins. Seen: it returns no error and neither
# does a new matcher; after `{` the matcher stops with "Current row has 2003 items; max is 2000", because each optional
# property takes four items of the parser's row. 499 properties work. So a server that validates a request's schema
# still meets the error in the middle of an answer. Exits with 1 if that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q llguidance==1.9.1
cat >"$folder/find.py" <<'PYTHON'
import json
import sys

from llguidance import LLMatcher, LLTokenizer

tokenizer, found = LLTokenizer("byte"), {}
for count in (499, 501):
    properties = {f"p{number}": {"type": "integer"} for number in range(count)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    before = LLMatcher.validate_grammar(grammar, tokenizer)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    before += matcher.get_error()
    matcher.consume_tokens(tokenizer.tokenize_str("{"))
    found[count] = before, matcher.get_error()
    print(f"{count} properties: {before or 'valid'!r}; after '{{': {matcher.get_error()[:60] or 'no error'!r}")
is_as_seen = found[499] == ("", "") and found[501][0] == "" and "max is 2000" in found[501][1]
sys.exit(not is_as_seen)
PYTHON
"$folder/venv/bin/python" "$folder/find.py"

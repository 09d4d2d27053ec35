"""A receipt of unknown origin is checked, or refused in one line before a model is loaded for it."""

import copy
import json
from pathlib import Path

import pytest
import torch
from baseline import prompt
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

import dflash
from dflash.receipts.receipt import MAX_BYTES

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def content(target) -> dict:
    """The JSON of a good receipt with every kind of rule."""
    rules = {
        "logit_bias": {5: 1.0, 6: -float("inf"), (7, 8): 2.0},
        "bad_words_ids": [[11], [12, 13]],
        "suppress_tokens": [14],
        "stop_strings": ["ab"],
        "stop_token_ids": [20],
    }
    arguments = {"temperature": 1.0, "seed": 3, "max_new_tokens": 6, "tokenizer": byte_level(), **rules}
    recorder = dflash.Recorder(target, prompt(4)[None], **arguments)
    output = dflash.generate(target, None, prompt(4)[None], return_dict_in_generate=True, **recorder.arguments)
    return json.loads(recorder.receipt(output).to_json())


def changed(content: dict, path: str, value: object) -> dict:
    """The content with another value at a path such as ``answers.0.seed``; without the key if it is ``KeyError``."""
    content = copy.deepcopy(content)
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = content
    for part in way:
        place = place[part]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return content


def refused(shell, path: Path, text: str | bytes) -> str:
    """Return the one line that ``dflash verify`` prints for a file, without its beginning."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    done = shell("verify", path, "--model", "/nowhere")  # a model that would be looked for next
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), text[:60]
    assert done.err.startswith(f"dflash: {path}")
    assert len(done.err) < 500
    return done.err.removeprefix(f"dflash: {path}")


@pytest.mark.parametrize(("text", "words"), [
    ("", "not JSON that can be read"),
    (DEEP, "not JSON that can be read"),
    ('{"format": 1, "format": 2}', "is there twice"),
    ("[]", "must be a JSON object, got list"),
    (" " * (MAX_BYTES + 1), f"must have at most {MAX_BYTES} bytes"),
    (json.dumps({"format": "dflash-receipt-1"}), "a receipt must have answers"),
], ids=lambda value: value[:20] if isinstance(value, str) else "bytes")  # fmt: skip
def test_what_is_no_receipt_is_refused(shell, tmp_path, text, words):
    assert words in refused(shell, tmp_path / "receipt.json", text)


def test_a_file_that_is_not_there_or_a_folder_is_named(shell, tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        done = shell("verify", path, "--model", "/nowhere")
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"dflash: {path}: cannot be read: ")


HOSTILE = [
    ("format", "dflash-receipt-2", '"format" must be'),
    ("more", 1, "a receipt has more, which this version of dflash does not know"),
    ("answers", [], "answers must be a list of 1 to 1024"),
    ("answers", [{}] * 1025, "answers must be a list of 1 to 1024"),
    ("answers.0.prompt", [], "prompt must hold token ids in 0 .. 96, got []"),
    ("answers.0.ids", [97], "ids must hold token ids in 0 .. 96, got [97]"),
    ("answers.0.seed", 2**63, "seed must lie in"),
    ("answers.0.finish_reason", "other", 'finish_reason must be "stop" or "length"'),
    ("settings.top_k", KeyError, "settings must have top_k"),
    ("settings.newer_rule", 1, "settings has newer_rule, which this version of dflash does not know"),
    ("settings.top_k", None, "top_k must not be null"),
    ("settings.temperature", 10**400, "integers must fit in int64"),
    ("settings.temperature", float("nan"), "temperature must be a finite number"),
    ("settings.top_p", 0, "top_p must lie in"),
    ("settings.max_new_tokens", 2**62, "max_new_tokens must be at most"),
    ("settings.no_repeat_ngram_size", 10**9, "no_repeat_ngram_size must be at most 256"),
    ("settings.stop_token_ids", [[1]], "stop_token_ids must hold token ids"),
    ("settings.stop_strings", ["a"] * 129, "be at most 128 strings with 4096 characters together, got 129"),
    ("settings.stop_strings", [""], "stop_strings must be strings that are not empty"),
    ("settings.grammar", None, "grammar must not be null"),
    ("settings.grammar", {"kind": "regex"}, "grammar: it must have text"),
    ("settings.grammar", {"kind": "gbnf", "text": "a"}, 'kind must be "json_schema" or "regex" or "lark", got'),
    ("settings.grammar", {"kind": "regex", "text": "a" * 2**18 + "a"}, "a regex must have at most 262144 bytes"),
    ("settings.grammar", {"kind": "lark", "text": "\x1b[31m"}, "grammar: this Lark grammar cannot be used"),
    ("settings.bad_words_ids", [[5, 6]] * 10 + [[5] * 60_000], "bad_words_ids: sequences times the longest of them"),
    ("settings.suppress_tokens", list(range(97)), "leave no token to choose"),
    ("settings.logit_bias", [[[5], 1.0], [[5], 2.0]], "logit_bias must have each sequence of token ids once"),
    ("settings.logit_bias", [[[], 1.0]], "logit_bias must be a list of pairs"),
    ("settings.logit_bias", [[[5], "inf"]], "logit_bias of token 5 must be a finite number or -inf"),
    ("fingerprints.weights", "x" * 121, "weights must be a text of at most 120 characters"),
    ("fingerprints.dtype", "os.system", 'dtype must be "float32" or "bfloat16" or "float16"'),
    ("fingerprints.vocab_size", 2**40, "vocab_size must lie in"),
    ("block_size", 10**9, "block_size must lie in"),
    ("batch_size", 0, "batch_size must lie in 1 .. 1024"),
    ("prefill_chunk", 2**31, "prefill_chunk must lie in"),
]


@pytest.mark.parametrize(
    ("path", "value", "words"), HOSTILE, ids=[f"{path}-{words[:24]}" for path, _, words in HOSTILE]
)
def test_a_wrong_value_is_refused_by_its_name(shell, tmp_path, content, path, value, words):
    text = json.dumps(changed(content, path, value))
    assert words in refused(shell, tmp_path / "receipt.json", text)


def test_a_text_that_would_steer_the_terminal_is_escaped(shell, tmp_path, content):
    for path in ("\x1b[31m", "settings.\x1b[31m", "answers.0.\x1b[31m"):
        message = refused(shell, tmp_path / "receipt.json", json.dumps(changed(content, path, 1)))
        assert r"\x1b[31m" in message
        assert "\x1b" not in message


def test_a_machine_that_is_too_small_is_not_called_a_wrong_token(shell, tmp_path, content, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("out of memory: tried to allocate 5 TiB")

    monkeypatch.setattr("dflash.receipts.verify", fail)
    (tmp_path / "receipt.json").write_text(json.dumps(content))
    done = shell("verify", tmp_path / "receipt.json")
    assert (done.code, done.out) == (2, "")
    assert done.err == "dflash: the receipt cannot be checked here: out of memory: tried to allocate 5 TiB\n"


def test_the_largest_rules_that_are_taken_can_be_checked(target, content):
    tokenizer = byte_level()
    largest = {
        "bad_words_ids": [[5 + n % 80, n % 97] * 2 for n in range(2**14)],
        "logit_bias": [[[n // 97 % 97, n % 97], -0.1] for n in range(97 * 97)],
        "no_repeat_ngram_size": 256,
        "stop_strings": ["b" * 16] * 64,
        "min_new_tokens": 2**63 - 1,
    }
    for name, value in largest.items():
        receipt = dflash.Receipt.parse(changed(content, f"settings.{name}", value))
        dflash.verify(receipt, target, tokenizer)


VALUES = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    st.sampled_from([2**63, -(2**63), 10**400, "-inf", KeyError]),
    st.lists(st.integers(-1, 100) | st.floats() | st.lists(st.integers(0, 96), max_size=3), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def paths(content: object, way: str = "") -> list[str]:
    """The paths of all values inside a JSON value."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path for key, item in items for path in (f"{way}{key}", *paths(item, f"{way}{key}."))]


@pytest.mark.long
@examples(100)
@given(data=st.data())
def test_any_value_anywhere_is_checked_or_refused(target, content, data):
    place = data.draw(st.sampled_from(paths(content)))
    try:
        receipt = dflash.Receipt.parse(json.loads(json.dumps(changed(content, place, data.draw(VALUES)))))
    except (ValueError, TypeError):
        return
    try:
        found = dflash.verify(receipt, target, byte_level())
    except ValueError:
        return
    assert found.num_tokens == sum(len(answer.ids) for answer in receipt.answers)

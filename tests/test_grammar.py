"""Structured output: text under a grammar equals one-token decoding under llguidance's own masks."""

import json
import re
import sys
from functools import partial

import llguidance.hf
import pytest
import torch
from baseline import check_answers, check_batch, left_padded, prompt, sampled
from families import cheat, make_draft, make_target
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tiny_pair import save_pair
from tiny_tokenizers import byte_level, spoken, word_pieces
from transformers import TopKLogitsWarper

import dflash
from dflash.call import Call, TargetDefaults
from dflash.proposers import ChainProposer
from dflash.sampling import fold

NEW, EOS = 24, 0
LENGTHS = [1, 7, 30]
TOKENIZER = byte_level()
Grammar = dflash.Grammar
GRAMMARS = {
    "regex": Grammar.regex(r"(ab|c[d-f]* ){3,5}\n(é|€|j)?"),
    "forced": Grammar.regex(r"(b\n){40}"),
    "nested": Grammar.lark('start: pair\npair: "a" pair "b" | "c" pair "d" | pair pair | /[e-g]+/'),
    "free": Grammar.regex(r"(?s:.*)"),
}


WAYS = [{}, {"block_size": 5}, {"denoise_steps": 2}, {"prompt_lookup": 1}, {"tree": 2}, {"tree": 16}, {"tree": 70}]


class Allowed:
    """Masks logits token by token with a new matcher each time: nothing of a block, a rollback or an engine."""

    def __init__(self, grammar: dflash.Grammar, tokenizer=TOKENIZER, stop: tuple[int, ...] = (EOS,)) -> None:
        self.tokens, self.source = from_tokenizer(tokenizer, eos_token=list(stop)), grammar.source

    def mask(self, tokens: list[int]) -> torch.Tensor | None:
        """Return what may follow ``tokens``, ``[bits]`` bool; None if the grammar does not allow these."""
        matcher = LLMatcher(self.tokens, self.source, log_level=0)
        if not matcher.consume_tokens(tokens):
            return None
        words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = (words[:, None] >> torch.arange(8) & 1).bool().flatten()
        return torch.zeros_like(allowed) if matcher.is_error() else allowed

    def __call__(self, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        allowed = self.mask(tokens)[: logits.shape[-1]]
        allowed = torch.nn.functional.pad(allowed, (0, logits.shape[-1] - len(allowed)))
        return logits.float().masked_fill(~allowed, -torch.inf)


def oracle(target, grammar, p, *, seed=0, temperature=0.0, new=NEW, stop=(EOS,), **filters) -> torch.Tensor:
    return sampled(target, p, new, seed, temperature, stop=stop, process=Allowed(grammar, stop=stop), **filters)


def call(grammar, **changes) -> dict:
    return {"grammar": grammar, "tokenizer": TOKENIZER, "max_new_tokens": NEW, "stop_token_ids": [EOS]} | changes


@pytest.fixture(scope="module")
def prompts():
    return [prompt(length, seed=51) for length in LENGTHS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", GRAMMARS)
def test_text_equals_one_token_decoding(target, draft, prompts, name, temperature):
    grammar, p = GRAMMARS[name], prompts[1]
    expected = oracle(target, grammar, p, seed=3, temperature=temperature)
    drafts = [(draft, options) for options in WAYS]
    for drafter, options in (*drafts, (None, {}), (None, {"prompt_lookup": 1})):
        arguments = call(grammar, temperature=temperature, seed=3, **options)
        check_batch(partial(dflash.generate, target, drafter), [p], [expected], **arguments)


@pytest.mark.parametrize(("options", "filters"), [
    ({}, {"top_k": 3, "top_p": 0.9}), ({"block_size": "auto"}, {}), ({"compile": True}, {}),
], ids=["filters", "widths", "compiled"])  # fmt: skip
def test_filters_widths_and_compiled_steps_keep_to_the_text(target, draft, prompts, options, filters):
    grammar, p = GRAMMARS["regex"], prompts[1]
    expected = oracle(target, grammar, p, seed=3, temperature=1.5, **filters)
    generator = dflash.Generator(target, draft, max_length=80, **options)
    check_batch(generator.generate, [p], [expected], **call(grammar, temperature=1.5, seed=3, **filters))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spoil", [0, 2, 7])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_bites_inside_blocks(target, draft, prompts, name, spoil, temperature):
    grammar, p = GRAMMARS[name], prompts[1]
    answer = oracle(target, grammar, p, seed=3, temperature=temperature)
    generator = cheat(target, draft, [p], [answer], spoil, max_length=80)
    output = check_batch(generator.generate, [p], [answer], **call(grammar, temperature=temperature, seed=3))
    if spoil == 0 and len(answer) > 2:
        assert output.statistics.acceptance_length > min(len(answer) - 1, 16) / 2


@pytest.mark.parametrize(("temperature", "answers"), [(0.0, 1), (1.0, 2)])
def test_every_prompt_of_a_batch_has_its_own_grammar(target, draft, prompts, temperature, answers):
    grammars = [GRAMMARS["regex"], None, GRAMMARS["nested"]]
    ids, mask = left_padded(prompts)
    expected = []
    for row in range(len(prompts) * answers):
        p, grammar = prompts[row // answers], grammars[row // answers]
        masked = {} if grammar is None else {"process": Allowed(grammar)}
        expected.append(sampled(target, p, NEW, fold(9, row), temperature, stop=(EOS,), **masked))
    arguments = call(grammars, attention_mask=mask, temperature=temperature, seed=9, num_return_sequences=answers)
    check_answers(dflash.generate(target, draft, ids, **arguments), ids.shape[1], expected)


def test_rules_come_before_and_processors_after(target, draft, prompts):
    grammar, p, top = GRAMMARS["regex"], prompts[1], TopKLogitsWarper(2)
    allowed, bias = Allowed(grammar), torch.zeros(97)
    bias[TOKENIZER.encode("c")] = 3.0

    def process(tokens, logits):
        return top(None, allowed(tokens, logits + bias)[0])[None]

    expected = sampled(target, p, NEW, 3, 1.0, stop=(EOS,), process=process)
    rules = {"logit_bias": {TOKENIZER.encode("c")[0]: 3.0}, "logits_processor": [top]}
    output = dflash.generate(target, draft, p[None], **call(grammar, temperature=1.0, seed=3, **rules))
    check_answers(output, len(p), [expected])


def test_a_step_that_failed_leaves_nothing_to_the_next_call(target, prompts):
    """The masks of its block were asked for, and its target raised."""
    generator, p, arguments = dflash.Generator(target, None, max_length=80), prompts[1], call(GRAMMARS["regex"])
    verify, passes = generator.engine.target.verify, []

    def fail_once(*given):
        passes.append(1)
        if len(passes) == 3:
            raise MemoryError
        return verify(*given)

    generator.engine.target.verify = fail_once
    with pytest.raises(MemoryError):
        generator.generate(p[None], **arguments)
    check_answers(generator.generate(p[None], **arguments), len(p), [oracle(target, GRAMMARS["regex"], p)])


def test_only_steps_with_a_grammar_are_kept_from_graphs(target, draft, prompts):
    generator, defaults = dflash.Generator(target, draft, max_length=80), TargetDefaults.of(target)
    plain, masked = (Call.resolve(defaults, prompts[1][None], call(g)) for g in (None, GRAMMARS["regex"]))
    assert generator.engine.graph_obstacle(plain, "") == ""
    assert generator.engine.graph_obstacle(masked, "") == "a grammar's masks are made on the host"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", ["a{3,6}", "a(bc)*d|ef", "(ab)?", "j[a-d]{2}"])
def test_a_row_stops_at_a_match_and_nowhere_else(target, draft, prompts, pattern, temperature):
    ids, mask = left_padded(prompts)
    arguments = call(Grammar.regex(pattern), attention_mask=mask, temperature=temperature, seed=5)
    output = dflash.generate(target, draft, ids, return_dict_in_generate=True, **arguments)
    for answer, reason in zip(output.sequences[:, ids.shape[1] :].tolist(), output.finish_reasons, strict=True):
        if reason == "stop":
            assert re.fullmatch(pattern, TOKENIZER.decode(answer[: answer.index(EOS)]))
        else:
            assert (len(answer), EOS in answer) == (NEW, False)
    assert "stop" in output.finish_reasons


@pytest.mark.parametrize("stop", [[EOS], [EOS, 1], [1]])  # 1 is not the tokenizer's EOS
def test_every_stop_token_ends_a_match(target, draft, prompts, stop):
    ids = torch.stack([prompts[1]] * 8)
    arguments = call(Grammar.regex("a{3,6}"), temperature=3.0, seed=5, stop_token_ids=stop)
    answers = dflash.generate(target, draft, ids, **arguments)[:, ids.shape[1] :].tolist()
    assert dflash.generate(target, draft, ids, tree=8, **arguments)[:, ids.shape[1] :].tolist() == answers
    ends = [next(token for token in answer if token in stop) for answer in answers]
    assert set(ends) == set(stop)
    assert all(re.fullmatch("a{3,6}", TOKENIZER.decode(a[: a.index(e)])) for a, e in zip(answers, ends, strict=True))


def test_a_tokenizer_is_read_once_whatever_the_stop_lists(monkeypatch):
    tokenizer, read, readings = byte_level(), llguidance.hf.from_tokenizer, []
    monkeypatch.setattr(llguidance.hf, "from_tokenizer", lambda *a, **rest: readings.append(a) or read(*a, **rest))
    for stop in ([1], [EOS], [EOS, 1], [1, EOS]):
        Grammar.regex("a+").begin(tokenizer, stop)
    assert len(readings) == 1


def test_a_stop_string_ends_a_row_earlier(target, draft, prompts):
    arguments = call(Grammar.regex("(ab|c){12}"), stop_strings=["cab", "abc", "cc"])
    output = dflash.generate(target, draft, prompts[1][None], return_dict_in_generate=True, **arguments)
    text = TOKENIZER.decode(output.sequences[0, len(prompts[1]) :])
    assert output.finish_reasons == ["stop"]
    assert re.fullmatch("(ab|c)+a?", text)
    assert any(stop in text for stop in arguments["stop_strings"])
    assert len(text) < 12


def test_ids_that_the_tokenizer_does_not_know_are_never_chosen(prompts):
    target = make_target("qwen3", vocab_size=120)  # its head is padded
    ids = torch.stack([prompts[1]] * 4)
    free = dflash.generate(target, None, ids, **call(None, temperature=2.0, seed=1))
    assert free[:, ids.shape[1] :].max() >= 97
    draft = make_draft(target)
    masked = dflash.generate(target, draft, ids, **call(GRAMMARS["free"], temperature=2.0, seed=1))
    assert masked.max() < 97


def test_a_draft_may_lead_where_the_grammar_ends_without_a_match(target, draft, prompts):
    """The vocabulary has no z: é is allowed, and nothing after it."""
    p, grammar = prompts[1], Grammar.regex("aéz|ab{5}")
    dead, alive = ([*TOKENIZER.encode(text)] for text in ("aé", "abbbbb"))
    generator = cheat(target, draft, [p], [torch.tensor(dead)], max_length=80)
    bias = dict.fromkeys(alive, 50.0) | {token: -50.0 for token in range(97) if token not in (*alive, *dead, 0)}
    arguments = call(grammar, logit_bias=bias | {dead[1]: -50.0}, forced_bos_token_id=[])
    answer = generator.generate(p[None], **arguments)[0, len(p) :].tolist()
    assert TOKENIZER.decode(answer, skip_special_tokens=True) == "abbbbb"
    with pytest.raises(
        ValueError, match=r"grammar (of row 0 cannot go on|and the other rules together leave no token)"
    ):
        generator.generate(p[None], **call(grammar, logit_bias=bias | {dead[1]: 100.0}))


def test_rules_that_ban_everything_allowed_are_an_error(target, draft, prompts):
    arguments = call(Grammar.regex("a{9}"), suppress_tokens=[2, 26])
    with pytest.raises(ValueError, match=r"the grammar and the other rules together leave no token, in row 0"):
        dflash.generate(target, draft, prompts[1][None], **arguments)


def test_drafts_keep_to_the_grammar(target, draft, prompts, monkeypatch):
    """Nothing else can be written, so every draft that is drawn again is accepted."""
    p, arguments = prompts[1][None], call(GRAMMARS["forced"], return_dict_in_generate=True)
    for temperature in (0.0, 1.0):
        output = dflash.generate(target, draft, p, temperature=temperature, **arguments)
        assert output.statistics.acceptance_length > 7
    monkeypatch.setattr(ChainProposer, "ROUNDS", 0)
    assert dflash.generate(target, draft, p, **arguments).statistics.acceptance_length < 2


@pytest.fixture(scope="module")
def pair():
    return dflash.demo_pair()


RECORD = "ini to json:\n[item]\nname=oak\nsize=12\ncolor=amber\nport=8080\n=>\n"


def schema(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_of_a_trained_pair_is_valid_with_and_without_a_drafter(pair, temperature):
    target, draft, tokenizer = pair
    text, number = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 99999}
    other = schema(the_color=text, the_port=number, list={"type": "array", "items": number, "maxItems": 3})
    ids = tokenizer(RECORD, return_tensors="pt").input_ids
    for wanted in (schema(name=text, size=number, color=text, port=number), other):
        arguments = {"grammar": Grammar.json_schema(wanted), "tokenizer": tokenizer, "max_new_tokens": 120}
        arguments |= {"temperature": temperature, "seed": 2, "return_dict_in_generate": True}
        alone = dflash.generate(target, None, ids, **arguments)
        drafted = dflash.generate(target, draft, ids, **arguments)
        assert drafted.sequences.tolist() == alone.sequences.tolist()
        assert drafted.finish_reasons == ["stop"]
        assert drafted.statistics.acceptance_length > 2
        answer = json.loads(tokenizer.decode(drafted.sequences[0, ids.shape[1] :], skip_special_tokens=True))
        assert [*answer] == wanted["required"]


def test_whitespace_between_json_tokens_is_bounded(pair):
    tokenizer = pair[2]
    start = Grammar.json_schema({"type": "object"}).begin(tokenizer, [0])

    def allows(text):
        matcher = start.copy()
        try:
            matcher.consume(tokenizer.encode(text, add_special_tokens=False))
        except ValueError:
            return False
        return True

    for text in ('{"a": [1, 2]}', '{"a":[1,2]}', json.dumps({"a": [{"b": 1}]}, indent=4)):
        assert allows(text)
    for text in ('{"a":  1}', '{"a":\n\n1}'):
        assert not allows(text)


WRONG_GRAMMARS = [
    (lambda: Grammar.regex("(ab"), ValueError, r"this regex cannot be used: .*unclosed group"),
    (lambda: Grammar.regex("a(?=b)"), ValueError, "look-around"),
    (lambda: Grammar.regex(3), TypeError, "a regex must be a string, got int"),
    (lambda: Grammar.regex("\ud800"), ValueError, "a regex must be Unicode text"),
    (lambda: Grammar.lark("start: other"), ValueError, 'this Lark grammar cannot be used: .*unknown name: "other"'),
    (lambda: Grammar.lark(b"start: A"), TypeError, "a Lark grammar must be a string, got bytes"),
    (lambda: Grammar.json_schema('{"type": "object"}'), TypeError, "a JSON schema must be a dict, got str"),
    (lambda: Grammar.json_schema({"type": "strin"}), ValueError, "this JSON schema cannot be used: Invalid type"),
    (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), ValueError, r"Unimplemented keys.*uniqueIt"),
    (lambda: Grammar.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), ValueError, "Unsatisfiable"),
    (lambda: Grammar.json_schema({"enum": [object()]}), TypeError, "a JSON schema must hold JSON values only"),
    (lambda: Grammar.regex("a" * 2**18 + "a"), ValueError, "a regex must have at most 262144 bytes, got 262145"),
]


@pytest.mark.parametrize(("make", "error", "message"), WRONG_GRAMMARS)
def test_a_wrong_grammar_is_refused_when_it_is_made(make, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        make()


NEUTRAL = [
    {"uniqueItems": False}, {"not": False}, {"propertyNames": {}}, {"propertyNames": True}, {"dependentRequired": {}},
    {"dependentRequired": {"a": []}}, {"dependentSchemas": {"a": True}}, {"dependencies": {"a": {}}},
    {"unevaluatedProperties": True}, {"unevaluatedItems": {}}, {"if": {"type": "object"}}, {"then": {"minLength": 3}},
    {"if": {"type": "object"}, "then": True, "else": {}}, {"contains": {"type": "null"}, "minContains": 0},
    {"minContains": 2},
]  # fmt: skip


@pytest.mark.parametrize("keywords", NEUTRAL, ids=json.dumps)
def test_keywords_that_say_nothing_are_left_out(keywords):
    """A property may have such a name all the same."""
    parts = {"not": {"type": "null"}, "if": {"type": "array", "items": {"type": "integer", **keywords}}}
    plain = {"type": "object", "properties": {**parts, "if": {"type": "array", "items": {"type": "integer"}}}}
    given = {"type": "object", "properties": parts, **keywords}
    assert Grammar.json_schema(given) == Grammar.json_schema(plain)
    with pytest.raises(ValueError, match="Unimplemented keys"):
        Grammar.json_schema({"if": {"type": "object"}, "then": {"required": ["a"]}, **keywords, "not": {}})


WRONG_CALLS = [
    ({"grammar": {"type": "object"}}, TypeError, r"grammar must be a dflash.Grammar, .* got .*make one with"),
    ({"grammar": [Grammar.regex("a"), "b"]}, TypeError, "grammar must be a dflash.Grammar"),
    ({"grammar": (Grammar.regex("a") for _ in range(1))}, TypeError, "or a list with one or None per prompt, got <gen"),
    ({"grammar": [Grammar.regex("a")] * 2}, ValueError, "one per prompt, 1 in all, got 2"),
    ({"tokenizer": None}, ValueError, "a grammar needs the target's tokenizer"),
    ({"stop_token_ids": []}, ValueError, "stop_token_ids is empty"),
    ({"stop_token_ids": [EOS, 5]}, ValueError, r"stop_token_ids \[5\] are text to this tokenizer"),
    ({"acceptance": "rejection", "temperature": 1.0}, ValueError, "cannot be combined with grammar"),
    ({"tokenizer": word_pieces(), "stop_token_ids": [1]}, ValueError, "grammars cannot be used with this"),
    ({"tokenizer": spoken(), "stop_token_ids": [1]}, ValueError, "grammars cannot be used with this"),
    ({"tokenizer": object()}, ValueError, "grammars cannot be used with this object"),
    ({"grammar": Grammar.regex("z")}, ValueError, "no token of this tokenizer can begin a match of this regex"),
    ({"grammar": Grammar.regex("az")}, ValueError, "no token of this tokenizer can continue a match of this regex"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_CALLS)
def test_a_wrong_call_is_refused_before_any_work(target, draft, prompts, monkeypatch, changes, error, message):
    monkeypatch.setattr(target, "forward", lambda *_, **__: pytest.fail("the target ran"))
    with pytest.raises(error, match=message):
        dflash.generate(target, draft, prompts[1][None], **call(Grammar.regex("a+")) | changes)


def chained_schema(link, length: int = 4000) -> Grammar:
    definitions = {f"{i:x}": link({"$ref": f"#/$defs/{i + 1:x}"}) for i in range(length)}
    definitions[f"{length:x}"] = {"type": "null"}
    return Grammar.json_schema({"$defs": definitions, "$ref": "#/$defs/0"})


@pytest.mark.parametrize("make", [
    lambda: chained_schema(lambda ref: ref),
    lambda: chained_schema(lambda ref: {"properties": {"a": ref}}, 900),  # 1,900 need too large a lexer
    lambda: chained_schema(lambda ref: {"items": ref, "type": "array"}),
    lambda: chained_schema(lambda ref: {"anyOf": [ref, {"type": "null"}]}),
    lambda: chained_schema(lambda ref: {"allOf": [ref]}),
    lambda: Grammar.lark("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(18_000)) + 'r18000: "a"'),
    lambda: Grammar.lark("start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(18_000)) + 'T18000: "a"'),
], ids=["$ref", "properties", "items", "anyOf", "allOf", "rules", "terminals"])  # fmt: skip
def test_a_long_chain_of_references_does_not_end_the_process(pair, make):
    matcher = make().begin(pair[2], [0])
    matcher.fill_(torch.zeros(1, matcher.words, dtype=torch.int32), [-1])


MANY = schema(**{f"p{i}": {} for i in range(626)})
SHARED = {"anyOf": [{"$ref": "#/$defs/a"}] * 5, "$defs": {"a": schema(**{f"p{i}": {} for i in range(200)})}}
TOO_LARGE = {
    "regex": (lambda: Grammar.regex("a?" * 40_000), "this regex .* a lexer of more than 20000 units: use fewer or sh"),
    "lark": (lambda: Grammar.lark(f"start: %json {{}} | /{'a?' * 9000}/"), "a lexer of more than 20000 units"),
    "schema": (lambda: Grammar.json_schema({"enum": [f"{i:09}" for i in range(20_000)]}), "more than 100000 units"),
    "pattern": (lambda: Grammar.json_schema({"pattern": "^" + "a?" * 4000 + "$"}), "may add up to 16777216"),
    "multiple": (lambda: Grammar.json_schema({"multipleOf": 999983}), "multipleOf.* must be at most 100000"),
    "multiples": (lambda: Grammar.json_schema({"allOf": [{"multipleOf": n} for n in (997, 991, 3)]}), "at most 100000"),
    "in Lark": (lambda: Grammar.lark('start: %json {"multipleOf": 999983}'), "at most 100000"),
    "after a comment": (lambda: Grammar.lark('// %json x\nstart: %json {"multipleOf": 999983}'), "at most 100000"),
    "after a string": (lambda: Grammar.lark('start: "%json x" | %json {"multipleOf": 999983}'), "at most 100000"),
    "repetition": (lambda: Grammar.regex("a{" + "9" * 5000 + "}"), "this regex cannot be used"),
    "open literals": (lambda: Grammar.lark("start: " + "/\\" * 100_000), "this Lark grammar cannot be used"),
    "properties": (lambda: Grammar.json_schema(MANY), "one object may add up to 2500, and are 2504"),
    "alternatives": (lambda: Grammar.json_schema(SHARED), "one object may add up to 2500, and are 4010"),
    "depth": (lambda: Grammar.json_schema({"const": json.loads("[" * 100 + "]" * 100)}), "nested at most 100 deep"),
}


@pytest.mark.parametrize(("make", "message"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_grammar_that_would_take_seconds_or_gigabytes_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [
    lambda: Grammar.regex("e{1000}{1000}"),
    lambda: Grammar.json_schema({"type": "string", "pattern": "^e{1000}{1000}$"}),
    lambda: Grammar.lark("start: C\nC: B~100\nB: A~100\nA: /e{20}/"),
], ids=["regex", "schema", "terminals"])  # fmt: skip
def test_a_long_text_that_can_only_follow_is_not_computed_in_advance(pair, make):
    """It would take 4 us and 0.4 KB per byte. What shows that it is not: its tokens may be the short ones too."""
    _, _, tokenizer = pair
    matcher = make().begin(tokenizer, [tokenizer.eos_token_id]).copy()
    masks = torch.zeros(1, matcher.words, dtype=torch.int32)
    matcher.fill_(masks, [-1])
    if matcher.grammar.kind == "json_schema":
        matcher.consume(tokenizer('"', add_special_tokens=False).input_ids)
        matcher.fill_(masks, [-1])
    allowed = [tokenizer.decode(t) for t in range(len(tokenizer)) if masks[0, t // 32] >> t % 32 & 1]
    assert allowed == ["e", "ee"]


def test_large_grammars_of_schemas_are_taken(pair):
    dates = schema(**{f"p{i}": {"type": "string", "format": "date-time"} for i in range(300)})
    prices = schema(**{f"p{i}": {"type": "number", "multipleOf": 0.01, "minimum": 0} for i in range(100)})
    numbers = schema(**{f"p{i}": {"type": "integer"} for i in range(600)}) | {"required": []}
    for wanted in (dates, prices, numbers, {"enum": [f"word{i}" for i in range(6000)]}):
        Grammar.json_schema(wanted).begin(pair[2], [0])


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"a grammar needs the llguidance package: pip install '\.\[grammar\]'"):
        Grammar.regex("a")


def test_a_tokenizer_may_get_more_tokens(target, prompts):
    tokenizer = byte_level()
    grammar = Grammar.regex("z")
    with pytest.raises(ValueError, match="no token of this tokenizer can begin"):
        dflash.generate(target, None, prompts[1][None], **call(grammar, tokenizer=tokenizer))
    tokenizer.add_tokens(["z"])
    wide = make_target("qwen3", vocab_size=98)
    output = dflash.generate(wide, None, prompts[1][None], **call(grammar, tokenizer=tokenizer))
    assert output[0, len(prompts[1]) :].tolist() == [97, EOS]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> list[str]:
    """Return the options that name a tiny target with a byte-level tokenizer, and a drafter."""
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    TOKENIZER.save_pretrained(folder / "target")
    return ["--model", str(folder / "target"), "--draft", str(folder / "draft"), "--max-new-tokens", "30", "--raw"]


def test_the_command_takes_each_kind_of_grammar(shell, model, tmp_path):
    schema, lark = tmp_path / "schema.json", tmp_path / "words.lark"
    schema.write_text('{"enum": [11, 22]}')
    lark.write_text('start: "a" start "b" | "c"\n')
    done = shell("generate", *model, "--regex", "a(b|cd){2,4}", "abc").assert_done()
    assert re.fullmatch("a(b|cd){2,4}", done.out.removesuffix("\n"))
    report = json.loads(shell("generate", *model, "--grammar", lark, "--json", "abc").assert_done().out)
    assert re.fullmatch("(a*)c(b*)", report["text"]) or report["finish_reason"] == "length"
    refused = shell("generate", *model, "--json-schema", schema, "abc")
    refused.assert_refused("no token of this tokenizer can begin a match of this JSON schema")  # it has no digits


def test_wrong_options_are_named_before_the_target_is_loaded(shell, model, tmp_path, monkeypatch):
    from dflash.cli import sources

    monkeypatch.setattr(sources, "load_target", lambda *_: pytest.fail("the target was loaded"))
    wrong, listed = tmp_path / "wrong.json", tmp_path / "list.json"
    wrong.write_text('{"type": ')
    listed.write_text("[]")
    cases = [
        (["--regex", "(a"], "this regex cannot be used"),
        (["--regex", "a", "--grammar", wrong], "give one of --regex and --grammar, not both"),
        (["--grammar", tmp_path / "none"], "--grammar: there is no file"),
        (["--json-schema", tmp_path / "none"], "cannot be read"),
        (["--json-schema", wrong], "not JSON that can be read"),
        (["--json-schema", listed], "must be a JSON object"),
        (["--regex", "z"], "no token of this tokenizer can begin a match"),
    ]
    for options, message in cases:
        shell("generate", *model, *options, "abc").assert_refused(message)

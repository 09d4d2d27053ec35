"""Test that every logit rule equals transformers' own processor, in blocks, batches and full generations."""

import functools
import inspect
import json
import math
from typing import NamedTuple

import pytest
import torch
from baseline import check_answers, check_batch, greedy, left_padded, prompt
from families import VOCAB, cheat, make_draft, make_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
)
from transformers.generation import logits_process as theirs
from trees import path_to, random_shapes

import dflash
from dflash.ops import reference
from dflash.sampling import LogitRules, fold
from dflash.settings import resolve, resolve_rules
from dflash.state import Block, Tree
from dflash.targets import transformers_version

NEW = 24
LENGTHS = [1, 2, 16, 37]
INF = math.inf


class Penalties:
    """Slow presence_penalty and frequency_penalty, as OpenAI's API defines them.

    ``mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence``, where ``c[j]`` is how often token
    ``j`` was sampled before the current position.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        sampled = input_ids[0, self.prompt_length :].tolist()
        for token in set(sampled):
            scores[0, token] -= sampled.count(token) * self.frequency + self.presence
        return scores


def processors(rule: dict, prompt_length: int, max_length: int, stop: tuple[int, ...] = ()) -> LogitsProcessorList:
    """Return transformers' processors for ``rule``, in the order of its ``_get_logits_processor``."""
    made = LogitsProcessorList()
    eos = torch.tensor(stop) if stop else None
    if "logit_bias" in rule:
        bias = {(ids if isinstance(ids, tuple) else (ids,)): float(b) for ids, b in rule["logit_bias"].items()}
        made.append(theirs.SequenceBiasLogitsProcessor(bias))
    if "repetition_penalty" in rule:
        made.append(theirs.RepetitionPenaltyLogitsProcessor(rule["repetition_penalty"]))
    if "presence_penalty" in rule or "frequency_penalty" in rule:
        amounts = rule.get("presence_penalty", 0.0), rule.get("frequency_penalty", 0.0)
        made.append(Penalties(*amounts, prompt_length))
    if "no_repeat_ngram_size" in rule:
        made.append(theirs.NoRepeatNGramLogitsProcessor(rule["no_repeat_ngram_size"]))
    if "bad_words_ids" in rule:
        made.append(theirs.NoBadWordsLogitsProcessor(rule["bad_words_ids"], eos))
    if "min_length" in rule and stop:
        made.append(theirs.MinLengthLogitsProcessor(rule["min_length"], eos))
    if "min_new_tokens" in rule and stop:
        made.append(theirs.MinNewTokensLengthLogitsProcessor(prompt_length, rule["min_new_tokens"], eos))
    if "forced_bos_token_id" in rule:
        made.append(theirs.ForcedBOSTokenLogitsProcessor(rule["forced_bos_token_id"]))
    if "forced_eos_token_id" in rule:
        made.append(theirs.ForcedEOSTokenLogitsProcessor(max_length, rule["forced_eos_token_id"]))
    if "suppress_tokens" in rule:
        made.append(theirs.SuppressTokensLogitsProcessor(rule["suppress_tokens"]))
    if "begin_suppress_tokens" in rule:
        begin = prompt_length + (prompt_length <= 1 and "forced_bos_token_id" in rule)
        made.append(theirs.SuppressTokensAtBeginLogitsProcessor(rule["begin_suppress_tokens"], begin))
    return made


@torch.no_grad()
def one_token_decoding(
    target, p, new, rule=None, *, stop=(), extra=(), criteria=(), seed=0, temperature=0.0, top_k=0, top_p=1.0
) -> torch.Tensor:
    """Decode one row token by token with transformers' model and processors and the oracle's token choice."""
    rules = [*processors(rule or {}, len(p), len(p) + new, stop), *extra]
    tokens, cache, ids = p[None], None, p[None]
    for _ in range(new):
        output = target(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, scores = output.past_key_values, output.logits[:, -1].float()
        for rule in rules:
            scores = rule(tokens, scores)
        settings = [torch.tensor([value]) for value in (seed, temperature, top_k, top_p, 0.0, 1.0)]
        ids = reference.select_tokens(scores[:, None], torch.tensor([[tokens.shape[1]]]), *settings)
        tokens = torch.cat([tokens, ids], 1)
        if int(ids) in stop or any(bool(criterion(tokens, None)) for criterion in criteria):
            break
    return tokens[0, len(p) :]


@pytest.fixture(scope="module")
def prompts():
    return [prompt(length, seed=21) for length in LENGTHS]


BLOCK_RULES = {
    "repetition": {"repetition_penalty": 1.3}, "repetition reward": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 0.7}, "frequency": {"frequency_penalty": -0.4},
    "both": {"presence_penalty": 1.5, "frequency_penalty": 0.25}, "unigrams": {"no_repeat_ngram_size": 1},
    "bigrams": {"no_repeat_ngram_size": 2}, "trigrams": {"no_repeat_ngram_size": 3},
    "5-grams": {"no_repeat_ngram_size": 5}, "40-grams": {"no_repeat_ngram_size": 40},
    "70-grams": {"no_repeat_ngram_size": 70}, "bias": {"logit_bias": {0: 2.5, 3: -INF, 10: -1.0}},
    "sequence bias": {"logit_bias": {
        (0, 1): 2.5, 3: -1.0, (1, 1, 1, 1): -INF, (2, 0): 0.3, (0, 0): 0.1, (1, 0): 0.7, (2, 1, 0): 0.9, (0,): 0.2,
        (0, 1, 0, 1, 9): 4.0, (9, 9, 9, 9, 9, 9, 9): 1.0,
    }},
    "bad words": {"bad_words_ids": [[2], [0, 1], [1, 0], [2, 1, 0], [1, 1, 1, 1], [0, 1, 0, 1, 3], [4]]},
    "suppress": {"suppress_tokens": [0, 6]},
    "begin": {"begin_suppress_tokens": [1, 2]},
    "forced bos": {"forced_bos_token_id": 3},
    "forced bos and begin": {"forced_bos_token_id": 3, "begin_suppress_tokens": [1, 2]},
    "forced eos": {"forced_eos_token_id": 4},
    "forced eos, several": {"forced_eos_token_id": [4, 2]},
    "min_length": {"min_length": 12},
    "min_new_tokens": {"min_new_tokens": 9},
    "most": {
        "logit_bias": {1: 3.0, 2: -2.0, (0, 1): -0.5, (2, 2, 10): 1.5}, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.1, "no_repeat_ngram_size": 4, "min_new_tokens": 12,
        "bad_words_ids": [[0, 1, 0], [5]], "suppress_tokens": [6], "begin_suppress_tokens": [0],
        "forced_bos_token_id": 1, "forced_eos_token_id": 4,
    },
}  # fmt: skip


class Text(NamedTuple):
    """The parts of the state that rules read."""

    tokens: torch.Tensor | None
    length: torch.Tensor
    prompt_length: torch.Tensor
    limits: torch.Tensor


def rules_of(rule: dict, stop: tuple[int, ...] = (), vocab: int = 11) -> dict:
    return resolve_rules(resolve({**rule, "stop_token_ids": stop}, {}, vocab), vocab)


class Rules:
    """Build the rules of ``rule`` for rows with these prompt lengths and limits."""

    def __init__(self, rule: dict, prompt_length: torch.Tensor, limits: torch.Tensor, vocab: int, stop=(4, 5)) -> None:
        self.rules = LogitRules([rules_of(rule, stop, vocab)] * len(limits), vocab)
        self.sizes = prompt_length, limits

    def apply(self, logits, tokens, length, block, tree=None) -> torch.Tensor:
        return self.rules.apply(logits, Block(block, tree), Text(tokens, length, *self.sizes))

    def apply_to_drafts(self, logits, length) -> torch.Tensor:
        return self.rules.apply_to_drafts(logits, Text(None, length, *self.sizes))


@pytest.mark.parametrize("name", BLOCK_RULES)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_a_block_equals_the_processors_called_token_by_token(rows, name):
    if name in ("bad words", "sequence bias") and transformers_version() < (5, 18):
        pytest.skip("transformers overlooks a sequence whose prefix is the whole text before 5.18")
    rule = BLOCK_RULES[name]
    vocab, capacity, stop = 11, 61, (4, 5)
    generator = torch.Generator().manual_seed(rows)
    prompt_length = torch.tensor([1, 1, 3, 10, 40, 2])
    length = torch.tensor([0, 4, 3, 9, 41, 12])  # the first and fourth row choose their first token
    limits = torch.tensor([3, 18, 15, 12, 50, 14])
    tokens = torch.randint(0, 3, (6, capacity), generator=generator)  # few ids: many repetitions; stale slots too
    block = torch.randint(0, 3, (6, rows), generator=generator)
    tokens[4], block[4] = 1, 1
    block[:, 0] = tokens.gather(1, length[:, None])[:, 0]
    logits = torch.randn(6, rows, vocab, generator=generator) * 3
    logits = logits.bfloat16() if rows == 5 else logits
    got = Rules(rule, prompt_length, limits, vocab, stop).apply(logits, tokens, length, block)
    changed = False
    for row in range(6):
        calls = processors(rule, int(prompt_length[row]), int(limits[row]), stop)
        for j in range(rows):
            ids = torch.cat([tokens[row, : length[row] + 1], block[row, 1 : j + 1]])[None]
            expected = calls(ids, logits[row, j][None].float())[0]
            torch.testing.assert_close(got[row, j], expected, rtol=0, atol=1e-6)
            exact = not {"presence_penalty", "frequency_penalty"} & rule.keys()
            assert not exact or torch.equal(got[row, j], expected)
            changed |= not torch.equal(expected, logits[row, j].float())
    assert changed == (name != "70-grams")


@pytest.mark.parametrize("name", BLOCK_RULES)
def test_a_tree_equals_the_processors_called_along_each_path(name):
    if name in ("bad words", "sequence bias") and transformers_version() < (5, 18):
        pytest.skip("transformers overlooks a sequence whose prefix is the whole text before 5.18")
    rule, vocab, rows, stop = BLOCK_RULES[name], 11, 67, (4, 5)
    generator = torch.Generator().manual_seed(7)
    prompt_length, length, limits = torch.tensor([[1, 10], [0, 9], [8, 12]])
    tokens = torch.randint(0, 3, (2, 90), generator=generator)
    tree = random_shapes(rows, 2)
    assert tree.depth.amax() > 8
    block = torch.randint(0, 3, (2, rows), generator=generator)
    block[:, 0] = tokens.gather(1, length[:, None])[:, 0]
    missing = tree.parents.lt(0)
    missing[:, 0] = False
    block[missing] = -1
    assert missing.any()
    logits = torch.randn(2, rows, vocab, generator=generator) * 3
    got = Rules(rule, prompt_length, limits, vocab, stop).apply(logits, tokens, length, block, tree)
    changed = False
    for sequence in range(2):
        calls = processors(rule, *(int(size[sequence]) for size in (prompt_length, limits)), stop)
        for row in (~missing[sequence]).nonzero()[:, 0].tolist():
            drafts = block[sequence, path_to(tree.parents[sequence].tolist(), row)[1:]]
            ids = torch.cat([tokens[sequence, : length[sequence] + 1], drafts])[None]
            expected = calls(ids, logits[sequence, row][None].clone())[0]
            torch.testing.assert_close(got[sequence, row], expected, rtol=0, atol=1e-6)
            changed |= not torch.equal(expected, logits[sequence, row])
    assert changed == (name not in ("40-grams", "70-grams"))


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_rows_with_different_rules_keep_every_bit_of_their_own(shape):
    vocab, rows, stop, names = 11, 9, (4, 5), [None, *BLOCK_RULES, None]
    generator, batch = torch.Generator().manual_seed(3), len(BLOCK_RULES) + 2
    settings = [rules_of(BLOCK_RULES.get(name, {}), stop) for name in names]
    length = torch.randint(0, 40, (batch,), generator=generator)
    sizes = (length - 5).clamp(min=1), length + torch.randint(2, 12, (batch,), generator=generator)
    tokens = torch.randint(0, 3, (batch, 61), generator=generator)
    block = torch.randint(0, 3, (batch, rows), generator=generator)
    tree = random_shapes(rows, batch) if shape == "tree" else None
    logits = torch.randn(batch, rows, vocab, generator=generator).bfloat16()
    logits[:, 2, 7] = -INF
    logits[:, 3, 1] = float("nan")

    def results(chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rules = LogitRules([settings[row] for row in chosen], vocab)
        text = Text(*(x[chosen] for x in (tokens, length, *sizes)))
        of_rows = None if tree is None else Tree(*(x[chosen] for x in tree))
        applied = rules.apply(logits[chosen], Block(block[chosen], of_rows), text)
        return applied.float(), rules.apply_to_drafts(logits[chosen], text).float()

    together, alone = results([*range(batch)]), [results([row]) for row in range(batch)]
    for together_part, alone_parts in zip(together, zip(*alone, strict=True), strict=True):
        for row, part in enumerate(alone_parts):
            torch.testing.assert_close(together_part[row], part[0], rtol=0, atol=0, equal_nan=True, msg=str(names[row]))
    assert torch.equal(together[0][0].nan_to_num(), logits[0].float().nan_to_num())


class LargestIntegers(TorchDispatchMode):
    """Notes the bytes of the largest int64 tensor that an op has made."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **options or {})
        if isinstance(out, torch.Tensor) and out.dtype == torch.int64:
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", ["trigrams", "bad words", "sequence bias"])
def test_no_row_of_a_block_gets_a_copy_of_the_text(name, shape):
    batch, rows, capacity = 2, 32, 700
    tokens, length = torch.randint(0, 3, (batch, capacity)), torch.tensor([40, 600])
    block, tree = torch.randint(0, 3, (batch, rows)), random_shapes(rows, batch) if shape == "tree" else None
    rules = Rules(BLOCK_RULES[name], length, length + 9, 11)
    with LargestIntegers() as largest:
        rules.apply(torch.randn(batch, rows, 11), tokens, length, block, tree)
    assert 0 < largest.bytes < batch * rows * capacity * 8 // 4


def test_logits_may_be_narrower_than_the_embeddings():
    tokens, length, block = torch.randint(0, 11, (2, 30)), torch.tensor([7, 20]), torch.randint(0, 11, (2, 4))
    block[:, 2] = 10
    rules = Rules(BLOCK_RULES["most"], torch.tensor([3, 5]), torch.tensor([16, 24]), 11)
    logits = torch.randn(2, 4, 11)
    wide = rules.apply(logits, tokens, length, block)
    assert torch.equal(rules.apply(logits[..., :8], tokens, length, block), wide[..., :8])


def test_drafts_know_bans_and_forced_tokens():
    rule = BLOCK_RULES["most"] | {"logit_bias": {0: -3.0, 1: -100.0}}
    tokens, length = torch.randint(0, 3, (2, 30)), torch.tensor([7, 20])
    sizes = torch.tensor([3, 5]), torch.tensor([16, 24])
    logits = torch.randn(2, 4, 11)
    got = Rules(rule, *sizes, 11).apply_to_drafts(logits, length)
    known = {name: rule[name] for name in ("min_new_tokens", "suppress_tokens", "begin_suppress_tokens")}
    known |= {"logit_bias": {1: -100.0}, "bad_words_ids": [[5]], "forced_bos_token_id": 1, "forced_eos_token_id": 4}
    expected = Rules(known, *sizes, 11).apply(logits, tokens, length, torch.zeros(2, 4, dtype=torch.int64))
    assert torch.equal(got, expected)


def biting(plain: list[torch.Tensor]) -> dict[str, dict]:
    """Return rules that change the plain text, made from its own tokens."""
    text = torch.cat(plain).tolist()
    pairs = [answer[i : i + 2].tolist() for answer in plain for i in (3, 8, 9)]
    triples = [answer[i : i + 3].tolist() for answer in plain for i in (5, 14)]
    return {
        "bigrams": {"no_repeat_ngram_size": 2, "repetition_penalty": 0.5},
        "sequence bias": {
            "logit_bias": {tuple(ids): -6.0 for ids in pairs} | {tuple(ids): -INF for ids in triples} | {40: 0.5}
        },
        "together": {
            "logit_bias": {40: 2.0, text[0]: -1.0, tuple(triples[1]): -5.0}, "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3, "bad_words_ids": [[text[2]], *pairs], "suppress_tokens": [text[4]],
            "begin_suppress_tokens": [int(answer[0]) for answer in plain], "forced_bos_token_id": 50,
            "forced_eos_token_id": 7,
        },
    }  # fmt: skip


def as_sequences(logit_bias: dict) -> list:
    """Return the rule in the form of transformers' ``sequence_bias``."""
    listed = lambda ids: list(ids) if isinstance(ids, tuple) else [ids]  # noqa: E731
    return [[listed(ids), float(bias)] for ids, bias in logit_bias.items()]


def by_transformers(target, p, rule, new=NEW, stop=None):
    rule = dict(rule)
    if "logit_bias" in rule:
        rule["sequence_bias"] = as_sequences(rule.pop("logit_bias"))
    stop = list(stop) if stop else None
    out = target.generate(p[None], do_sample=False, max_new_tokens=new, eos_token_id=stop, pad_token_id=0, **rule)
    return out[0, len(p) :]


@pytest.mark.parametrize("name", ["bigrams", "sequence bias", "together"])
def test_greedy_equals_transformers_generate(target, draft, prompts, plain, name):
    rule = biting(plain)[name]
    expected = [by_transformers(target, p, rule) for p in prompts]
    assert any(not torch.equal(a, b) for a, b in zip(expected, plain, strict=True)), "the rule should bite"
    for block_size in (1, 5, 16):
        generator = cheat(target, draft, prompts, expected, block_size=block_size, spoil=9)
        output = check_batch(generator.generate, prompts, expected, max_new_tokens=NEW, **rule)
        assert block_size < 16 or output.statistics.acceptance_length > 5
    for row in (0, 2):  # single rows, with a drafter that is always wrong
        alone = dflash.generate(target, draft, prompts[row][None], max_new_tokens=NEW, **rule)
        check_answers(alone, len(prompts[row]), [expected[row]])


def test_sampled_equals_one_token_decoding(target, draft, prompts, plain):
    rule = biting(plain)["together"] | {"frequency_penalty": 1.2}
    sampling = {"temperature": 0.9, "top_k": 30, "top_p": 0.95}
    expected = [
        one_token_decoding(target, p, NEW, rule, seed=fold(5, row), **sampling) for row, p in enumerate(prompts)
    ]
    generator = cheat(target, draft, prompts, expected, block_size=5, spoil=7)
    check_batch(generator.generate, prompts, expected, max_new_tokens=NEW, seed=5, **sampling, **rule)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("rule", [{"min_length": 30}, {"min_new_tokens": 12}, {"min_length": 40, "min_new_tokens": 3}])
def test_no_stop_token_before_the_shortest_length(target, draft, prompts, plain, rule):
    stop = [int(answer[i]) for answer in plain for i in (1, 13)]
    expected = [by_transformers(target, p, rule, stop=stop) for p in prompts]
    without = [greedy(target, p, NEW, tuple(stop)) for p in prompts]
    assert any(len(a) > len(b) for a, b in zip(expected, without, strict=True)), "the rule should bite"
    assert any(len(a) < NEW for a in expected)
    for block_size in (1, 5, 16):
        generator = cheat(target, draft, prompts, expected, block_size=block_size)
        check_batch(generator.generate, prompts, expected, max_new_tokens=NEW, stop_token_ids=stop, **rule)


def test_none_follows_the_generation_config_and_a_neutral_value_switches_it_off(draft, prompts, plain):
    rule = biting(plain)["together"]
    target = make_target("qwen3")
    p = prompts[2][None]
    expected = dflash.generate(target, draft, p, max_new_tokens=NEW, **rule)
    config = target.generation_config
    for name, value in rule.items():
        if name == "logit_bias":
            config.sequence_bias = {tuple(ids): bias for ids, bias in as_sequences(value)}
        else:
            setattr(config, name, value)
    assert torch.equal(dflash.generate(target, draft, p, max_new_tokens=NEW), expected)
    assert torch.equal(target.generate(p, do_sample=False, max_new_tokens=NEW, pad_token_id=0), expected)
    config.sequence_bias = as_sequences(rule["logit_bias"])
    assert torch.equal(dflash.generate(target, draft, p, max_new_tokens=NEW), expected)
    off = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "logit_bias": {}}
    off |= {name: [] for name in rule.keys() - off.keys()}
    assert dflash.generate(target, draft, p, max_new_tokens=NEW, **off)[0, p.shape[1] :].equal(plain[2])


def test_a_generator_forgets_the_rules_of_its_last_call(target, draft, prompts, plain):
    generator = dflash.Generator(target, draft, max_length=80)
    p = prompts[2][None]
    generator.generate(p, max_new_tokens=NEW, repetition_penalty=2.0, logits_processor=[TopKLogitsWarper(3)])
    assert generator.generate(p, max_new_tokens=NEW)[0, p.shape[1] :].equal(plain[2])
    expected = by_transformers(target, prompts[2], {"repetition_penalty": 1.5})
    assert generator.generate(p, max_new_tokens=NEW, repetition_penalty=1.5)[0, p.shape[1] :].equal(expected)


def test_banned_tokens_are_not_drafted(target, draft, prompts):
    generator = dflash.Generator(target, draft, max_length=80)
    p = prompts[3][None]
    drafted = []
    proposer = generator.engine.proposer
    propose = proposer.propose

    def spy(state):
        block = propose(state)
        drafted.append(block.ids[:, 1:].clone())
        return block

    proposer.propose = spy
    generator.generate(p, max_new_tokens=NEW)
    free = set(torch.cat(drafted).flatten().tolist())
    ban = sorted(free)[::2]
    drafted.clear()
    generator.generate(p, max_new_tokens=NEW, suppress_tokens=ban)
    assert not set(torch.cat(drafted).flatten().tolist()) & set(ban)


def test_the_step_is_one_graph_with_every_rule():
    torch._dynamo.reset()
    target = make_target("qwen3", num_hidden_layers=1)
    generator = dflash.Generator(target, make_draft(target, "Qwen3.6-27B"), max_length=64, batch_size=2, block_size=6)
    eager = dflash.Generator(target, None, max_length=64, batch_size=2)
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    generator.engine.leaves_out = False  # as with compile=True: it changes shapes
    generator.step = torch.compile(generator.step, fullgraph=True, dynamic=False, backend=count)
    ids, mask = left_padded([prompt(3), prompt(20)])
    call = {"attention_mask": mask, "max_new_tokens": 14, "stop_token_ids": [8], "temperature": 0.8, "seed": 1}
    rule = {**BLOCK_RULES["most"], "logit_bias": {20: 2.0}}
    assert torch.equal(generator.generate(ids, **call, **rule), eager.generate(ids, **call, **rule))
    compiled = len(graphs)
    rule |= {"repetition_penalty": 1.7, "logit_bias": {20: -5.0, 30: 1.0}, "bad_words_ids": [[1, 2, 3], [9]]}
    rule |= {"forced_eos_token_id": [9, 11], "suppress_tokens": [5, 6, 7], "min_new_tokens": 2}
    assert torch.equal(generator.generate(ids, **call, **rule), eager.generate(ids, **call, **rule))
    assert len(graphs) == compiled, "new values of the same rules need no new graph"


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters, reason="this torch stops at 8 graphs"
)
def test_a_compiled_generator_takes_more_sets_of_rules_than_torch_takes_graphs(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    target = make_target("qwen3", num_hidden_layers=1)
    p = prompt(5)
    for _ in range(2):
        generator = dflash.Generator(target, None, max_length=32, compile=True)
        for size in range(torch._dynamo.config.recompile_limit + 2):
            output = generator.generate(p[None], max_new_tokens=6, no_repeat_ngram_size=size)
            check_answers(output, 5, [by_transformers(target, p, {"no_repeat_ngram_size": size}, new=6)])


def test_a_penalty_leaves_the_acceptance_of_a_trained_pair(pair_dir):
    tokenizer = AutoTokenizer.from_pretrained(pair_dir / "target")
    target = AutoModelForCausalLM.from_pretrained(pair_dir / "target", dtype=torch.float32).eval()
    generator = dflash.Generator(target, dflash.load_draft(pair_dir / "draft", dtype=torch.float32), max_length=512)
    call = {"max_new_tokens": 120, "repetition_penalty": 1.2}
    steps = []
    for line in (pair_dir / "prompts.jsonl").read_text().splitlines()[:5]:
        p = torch.tensor([[0, *tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False)]])
        output = generator.generate(p, return_dict_in_generate=True, **call)
        assert torch.equal(output.sequences, target.generate(p, do_sample=False, **call))
        steps += output.statistics.acceptance_lengths[0]
    assert sum(steps) / len(steps) > 9.3  # 9.7 measured; 8.2 if the drafter applies the penalty too


def only_near_the_last(input_ids, scores):
    """A user's processor that allows only ids within 30 of the last one."""
    distance = (torch.arange(VOCAB) - input_ids[0, -1]).abs()
    return scores.masked_fill(distance > 30, -INF)


class Contains(StoppingCriteria):
    """Stops once a token appears in the answer or the prompt."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.eq(self.token).any(1)


PROCESSORS = {
    "repetition": lambda: [RepetitionPenaltyLogitsProcessor(1.6)],
    "bigrams": lambda: LogitsProcessorList([NoRepeatNGramLogitsProcessor(2), SequenceBiasLogitsProcessor({(3,): 9.0})]),
    "its own": lambda: [only_near_the_last, TopKLogitsWarper(20)],
    "in place": lambda: [lambda ids, scores: scores.index_fill_(1, ids[0, -2:], -INF)],
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("make", PROCESSORS.values(), ids=PROCESSORS)
def test_python_processors_equal_one_token_decoding(target, draft, prompts, plain, make, temperature):
    seeds = [fold(6, row) for row in range(len(prompts))]
    expected = [
        one_token_decoding(target, p, NEW, extra=make(), seed=seed, temperature=temperature)
        for p, seed in zip(prompts, seeds, strict=True)
    ]
    assert any(not torch.equal(a, b) for a, b in zip(expected, plain, strict=True)), "the processor should bite"
    call = {"max_new_tokens": NEW, "temperature": temperature, "seed": 6}
    for block_size in (1, 5, 16):
        generator = cheat(target, draft, prompts, expected, block_size=block_size, spoil=8)
        output = check_batch(generator.generate, prompts, expected, logits_processor=make(), **call)
        assert block_size < 16 or output.statistics.acceptance_length > 4
        assert output.finish_reasons == ["length"] * 4
    generate = functools.partial(dflash.generate, target, draft)
    check_batch(generate, prompts, expected, logits_processor=make(), **call)


def test_processors_see_what_one_token_decoding_shows_them(target, draft, prompts):
    calls = []

    def spy(input_ids, scores):
        assert scores.shape == (1, VOCAB)
        assert scores.dtype == torch.float32
        calls.append(tuple(input_ids[0].tolist()))
        return scores

    rule = {"repetition_penalty": 1.4}  # a processor comes after the rules
    answers = [one_token_decoding(target, p, NEW, rule) for p in prompts[:2]]
    stop, seen, ours = (int(answers[0][6]),), [], []  # the first row is drafted past it
    for p in prompts[:2]:
        extra = [spy, lambda _, scores: (seen.append(scores), scores)[1]]
        one_token_decoding(target, p, NEW, rule, extra=extra, stop=stop)
    wanted, calls[:] = set(calls), []
    ids, mask = left_padded(prompts[:2])
    generator = cheat(target, draft, prompts[:2], answers, spoil=5, batch_size=3)
    call = {"attention_mask": mask, "stop_token_ids": stop, **rule}
    processors = [spy, lambda _, scores: (ours.append(scores), scores)[1]]
    generator.generate(ids, max_new_tokens=NEW, logits_processor=processors, **call)
    assert set(calls) == wanted
    assert len(calls) == len(wanted), "no prefix is shown twice, none that one-token decoding would not show"
    assert len(ours) == len(seen)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_stopping_criteria_end_a_row_where_one_token_decoding_ends(target, draft, prompts, plain, block_size):
    stop = (int(plain[0][15]),)
    criteria = [MaxLengthCriteria(30), Contains(int(plain[1][9])), lambda ids, scores: ids.shape[1] == 50]
    call = {"stop": stop, "criteria": criteria}
    expected = [one_token_decoding(target, p, NEW, **call) for p in prompts]
    assert len({len(answer) for answer in expected}) > 2
    generator = cheat(target, draft, prompts, plain, block_size=block_size)
    call = {"stop_token_ids": stop, "stopping_criteria": StoppingCriteriaList(criteria)}
    output = check_batch(generator.generate, prompts, expected, max_new_tokens=NEW, **call)
    assert output.finish_reasons == ["length" if len(answer) == NEW else "stop" for answer in expected]


@pytest.mark.parametrize(("processor", "error", "message"), [
    (lambda ids, scores: None, TypeError, r"logits_processor <lambda> must return scores \[1, 97\], got NoneType"),
    (lambda ids, scores: scores[0], ValueError, r"must return scores \[1, 97\], got \[97\]"),
    (lambda ids, scores: scores * float("nan"), ValueError, "logits_processor <lambda> returned NaN for position 5"),
])  # fmt: skip
def test_a_processor_that_breaks_its_contract_is_named(target, draft, processor, error, message):
    with pytest.raises(error, match=message):
        dflash.generate(target, draft, prompt(5)[None], max_new_tokens=4, logits_processor=[processor])


def test_a_criterion_that_breaks_its_contract_is_named(target, draft):
    call = {"max_new_tokens": 4, "stopping_criteria": [lambda ids, scores: ids]}
    with pytest.raises(
        TypeError, match=r"stopping_criteria <lambda> must return a bool or tensor of one, got \[1, 6\]"
    ):
        dflash.generate(target, draft, prompt(5)[None], **call)

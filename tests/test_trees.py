"""Test draft trees from the caller's side: the text is the target's own, whatever the tree holds."""

import functools
import itertools
import math

import pytest
import torch
from baseline import check_answers, check_batch, greedy, left_padded, prompt, sampled, written
from draft_variants import random_drafter
from families import FAMILIES, RECURRENT, VOCAB, draft_config, make_draft, make_target
from recorded import record
from test_tree_target import model_of
from tiny_tokenizers import byte_level
from torch import Tensor

import dflash
from dflash.cache import KVCache
from dflash.engine.budget import TreeBudget
from dflash.proposers import TreeProposer
from dflash.sampling import fold
from dflash.state import TREE_SIZES, RowReport

NEW = 24
NAN = float("nan")
SUPPORTED = [name for name in FAMILIES if name not in (*RECURRENT, "deepseek_v4", "phimoe (windowed)")]
A_FEW = ["qwen3", "gemma3", "gpt_oss"]


class ScriptedTree(TreeProposer):
    """Grows trees around a given text, which leaves the first candidates at every fifth position."""

    script: Tensor  # [batch, capacity] int64, the text by position
    spoil = 0  # every so many positions the text is not among the candidates; 0 for never

    def candidates(self, logits, positions, sampling):
        super().candidates(logits, positions, sampling)
        truth = self.script.gather(1, positions.clamp(max=self.script.shape[1] - 1))
        rank = (positions % 5 == 0).long()[..., None]
        place = torch.arange(self.siblings)
        ids = (truth[..., None] + place - rank) % VOCAB
        if self.spoil:
            ids = torch.where((positions % self.spoil == 0)[..., None], (truth[..., None] + 1 + place) % VOCAB, ids)
        return ids, (-0.05 - place).expand(ids.shape).contiguous()


class RandomTree(TreeProposer):
    """Grows trees of random tokens with random scores."""

    def candidates(self, logits, positions, sampling):
        generator = torch.Generator().manual_seed(int(positions.sum()))
        shape = *positions.shape, VOCAB
        ids = torch.rand(shape, generator=generator).argsort(-1)[..., : self.siblings].contiguous()
        return ids, -torch.rand(ids.shape, generator=generator).mul(4).sort(-1).values


def grown(kind: type, target, draft, answers=None, prompts=None, **options) -> dflash.Generator:
    """Return a generator whose trees are of this kind, around the ``answers`` to ``prompts``."""
    options = {"max_length": 160, "tree": 128, "batch_size": 1 if prompts is None else len(prompts)} | options
    generator = dflash.Generator(target, draft, **options)
    engine, sizes = generator.engine, (generator.batch_size, generator.block_size)
    engine.tree = kind(generator.draft, engine.target, *sizes)
    if answers is not None:
        engine.tree.script = torch.zeros(generator.batch_size, 300, dtype=torch.int64)
        for row, (p, answer) in enumerate(zip(prompts, answers, strict=True)):
            engine.tree.script[row, : len(p) + len(answer)] = torch.cat([p, answer])
    return generator


@pytest.mark.parametrize("family", SUPPORTED)
def test_greedy_equals_generate_in_ragged_batches(family):
    target = make_target(family)
    prompts = [prompt(length) for length in (1, 2, 15, 17, 60)]
    expected = [greedy(target, p, NEW) for p in prompts]
    generator = grown(ScriptedTree, target, make_draft(target), expected, prompts)
    generator.engine.tree.spoil = 7
    for size in (2, 17, 64, 128):
        output = check_batch(generator.generate, prompts, expected, max_new_tokens=NEW, tree=size)
        assert size < 16 or output.statistics.acceptance_length > 2.5, "right drafts should have been accepted"


@pytest.mark.parametrize("kind", [TreeProposer, ScriptedTree, RandomTree])
def test_sampled_text_equals_the_baseline_whatever_the_tree_holds(target, draft, prompts, kind):
    for rule in ({"temperature": 1.0}, {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.01}):
        expected = [sampled(target, p, NEW, fold(11, row), **rule) for row, p in enumerate(prompts)]
        generator, means = grown(kind, target, draft, expected, prompts), []
        for size in (2, 16, 33, 64, 128):
            call = {"max_new_tokens": NEW, "seed": 11, "tree": size, **rule}
            output = check_batch(generator.generate, prompts, expected, **call)
            means.append(output.statistics.acceptance_length)
        assert kind is not ScriptedTree or means[-1] > 6


def test_small_blocks_grow_shallow_trees(target, draft, prompts, plain):
    for block_size, size in ((2, 2), (2, 40), (5, 3), (5, 64)):
        generator = grown(ScriptedTree, target, draft, plain, prompts, block_size=block_size)
        output = check_batch(generator.generate, prompts, plain, max_new_tokens=NEW, tree=size)
        assert max(map(max, output.statistics.acceptance_lengths)) <= min(block_size, size)


def test_a_call_may_ask_for_a_chain_or_a_smaller_tree(target, draft, prompts, plain):
    generator = dflash.Generator(target, draft, max_length=80, tree=32)
    for asked, rows in (({"tree": 32}, 32), ({"tree": None}, 16), ({"tree": 9}, 9), ({"tree": 16}, 16), ({}, 32)):
        output = check_batch(generator.generate, prompts[1:2], plain[1:2], max_new_tokens=NEW, **asked)
        assert set(output.statistics.rows) == {rows}


def test_bfloat16_equals_the_chain_at_the_same_padded_shapes(prompts):
    """Every kernel gives a row the same bits for any number of rows, so one-token mode may run a block of 16."""
    target = make_target("qwen3", dtype=torch.bfloat16)
    ids, mask = left_padded(prompts)
    call = {"max_new_tokens": NEW, "temperature": 0.8, "seed": 4}
    one = dflash.Generator(target, None, max_length=80, batch_size=3, block_size=16)
    answers = [*one.generate(ids, attention_mask=mask, **call)[:, ids.shape[1] :]]
    generator = grown(ScriptedTree, target, make_draft(target), answers, prompts)
    for size in (16, 64):
        output = check_batch(generator.generate, prompts, answers, tree=size, **call)
        assert output.statistics.acceptance_length > 4, "right drafts should have been accepted"


def prefilled(generator, row: int) -> tuple[KVCache, Tensor, KVCache]:
    """Run a row's text as a prompt: the target's cache, the features of every position, and the drafter's cache."""
    state, target, draft = generator.state, generator.engine.target, generator.draft
    length = int(state.length[row])
    ids, live = state.tokens[row : row + 1, :length], state.length[row : row + 1]
    cache, drafts = target.new_cache(1, 300, 1), draft.new_cache(1, 300)
    with torch.no_grad():
        _, taps = target.forward(ids, torch.zeros(1, dtype=torch.int64), cache, 1, keep=live)
        features = torch.cat(taps, -1)
        draft.inject_(draft.fuse(features, live), torch.arange(length)[None], drafts)
    return cache, features[0], drafts


@pytest.mark.parametrize("family", A_FEW)
def test_after_every_step_the_state_is_that_of_a_prompt(family):
    target = make_target(family)
    draft = make_draft(target)
    prompts = [prompt(9, seed=32), prompt(26, seed=32)]
    answers = [greedy(target, p, NEW) for p in prompts]
    ids, mask = left_padded(prompts)
    generator = grown(ScriptedTree, target, draft, answers, prompts, tree=70)
    generator.engine.tree.spoil, moved = 11, 0
    for _ in generator.stream(ids, attention_mask=mask, max_new_tokens=NEW):
        state = generator.state
        moved += bool((state.tree_path > torch.arange(16)).any())
        for row in range(2):
            cache, features, drafts = prefilled(generator, row)
            length, fresh = int(state.length[row]), int(state.num_context[row])
            close = {"rtol": 1e-3, "atol": 2e-4}
            for held, expected, covered in (
                (state.target_cache, cache, length),
                (state.draft_cache, drafts, length - fresh),
            ):
                for ours, theirs in zip(held.buffers, expected.buffers, strict=True):
                    torch.testing.assert_close(ours[row, :, :covered], theirs[0, :, :covered], **close)
            torch.testing.assert_close(state.context[row, :fresh], features[length - fresh :], **close)
    assert moved > 1, "some paths should have left the first rows"


def test_nan_in_a_tree_stays_in_its_row(draft, prompts, plain):
    """A token whose embedding is NaN is drafted next to the right one, and never chosen."""
    target = make_target("qwen3")
    used = set(torch.cat([*prompts, *plain]).tolist())
    poison = next(token for token in range(2, VOCAB) if token not in used)
    with torch.no_grad():
        target.get_input_embeddings().weight[poison] = NAN

    class Poisoned(ScriptedTree):
        def candidates(self, logits, positions, sampling):
            ids, scores = super().candidates(logits, positions, sampling)
            ids[..., 2] = torch.where((ids == poison).any(-1), ids[..., 2], poison)
            return ids, scores

    generator = grown(Poisoned, target, draft, plain, prompts)
    assert check_batch(generator.generate, prompts, plain, max_new_tokens=NEW).statistics.acceptance_length > 6


def test_rows_end_at_stop_tokens_and_limits_in_the_middle_of_a_path(target, draft, prompts, plain):
    # Position 20 of the second row and 45 of the third leave the spine: stops there are on a sibling branch.
    stop = [int(plain[1][20 - 16]), int(plain[2][45 - 40])]
    expected = [greedy(target, p, NEW, tuple(stop)) for p in prompts]
    assert len(expected[1]) <= 5
    assert len(expected[2]) <= 6
    generator = grown(ScriptedTree, target, draft, plain, prompts)
    output = check_batch(generator.generate, prompts, expected, max_new_tokens=NEW, stop_token_ids=stop)
    assert output.finish_reasons == ["stop" if int(answer[-1]) in stop else "length" for answer in expected]
    for new in (1, 2, 3, 8):
        output = check_batch(generator.generate, prompts, [answer[:new] for answer in plain], max_new_tokens=new)
        assert output.finish_reasons == ["length"] * 3


@pytest.mark.parametrize("family", ["gpt_bigcode", "opt"])
def test_the_last_learned_position_can_be_reached(family):
    target = model_of(family, torch.float32)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
    config = draft_config(target)
    config["dflash_config"]["target_layer_ids"] = [0, 2]  # these models have no final norm that we know
    draft, p = random_drafter(config, 0, torch.float32), prompt(90 - NEW)
    expected = greedy(target, p, NEW)
    generator = grown(ScriptedTree, target, draft, [expected], [p], max_length=90)
    for size in (16, 128):
        output = check_batch(generator.generate, [p], [expected], max_new_tokens=NEW, tree=size)
        assert output.statistics.acceptance_length > 3


def only_even(ids: Tensor, scores: Tensor) -> Tensor:
    """Ban odd tokens where the sum of the last two is a multiple of three: a rule that reads the path."""
    if int(ids[0, -2:].sum()) % 3 == 0:
        scores[:, 1::2] = -math.inf
    return scores


def ends_on_a_sum(ids: Tensor, scores: None) -> bool:
    return ids.shape[1] > 45 and int(ids[0, -3:].sum()) % 4 == 0


RULES = {
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 0.9},
    "bans": {"no_repeat_ngram_size": 2, "suppress_tokens": [4, 5], "forced_bos_token_id": 50, "min_new_tokens": 12},
    "processors": {"logits_processor": [only_even], "temperature": 0.9},
    "criteria": {"stopping_criteria": [ends_on_a_sum], "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("name", RULES)
def test_rules_write_what_they_write_with_chains(target, draft, prompts, name):
    ids, mask = left_padded(prompts)
    call = {"attention_mask": mask, "max_new_tokens": NEW, "seed": 6} | RULES[name]
    one_token = dflash.Generator(target, None, max_length=80, batch_size=3)
    expected = one_token.generate(ids, stop_token_ids=[3], return_dict_in_generate=True, **call)
    answers = list(expected.sequences[:, ids.shape[1] :])
    generator = grown(ScriptedTree, target, draft, answers, prompts)
    output = generator.generate(ids, stop_token_ids=[3], tree=64, return_dict_in_generate=True, **call)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.finish_reasons == expected.finish_reasons
    assert output.statistics.acceptance_length > 3


@pytest.mark.parametrize("variant", ["Qwen3-4B", "DFlash2"])
def test_stop_strings_and_reused_prefixes(target, prompts, variant):
    tokenizer, p, draft = byte_level(), prompts[2], make_draft(target, variant)
    answer = greedy(target, p, 40)
    stops = [tokenizer.decode(answer[9:12].tolist()), tokenizer.decode(answer[20:22].tolist())]
    expected = dflash.Generator(target, None, max_length=160)
    generator = grown(ScriptedTree, target, draft, [answer], [p], max_length=160)
    conversation, reasons, prefilled = p[None], [], []
    for _ in range(3):  # the second and third time most of the prompt is in the caches
        call = {"max_new_tokens": 20, "stop_strings": stops, "tokenizer": tokenizer, "return_dict_in_generate": True}
        wanted, got = expected.generate(conversation, **call), generator.generate(conversation, tree=64, **call)
        assert torch.equal(got.sequences, wanted.sequences)
        assert got.finish_reasons == wanted.finish_reasons
        assert got.statistics.num_prefilled_tokens == wanted.statistics.num_prefilled_tokens
        reasons += got.finish_reasons
        prefilled.append(got.statistics.num_prefilled_tokens)
        conversation = torch.cat([got.sequences, torch.tensor([[7, 8]])], 1)
    assert reasons[0] == "stop"
    assert max(prefilled[1:]) < prefilled[0]


def test_replayed_steps_write_the_same_at_every_size(target, draft, prompts, plain):
    generator = record(grown(TreeProposer, target, draft, batch_size=3))
    for size in (16, 64, None, 16):
        check_batch(generator.generate, prompts, plain, max_new_tokens=NEW, tree=size)
    assert generator.runner.graphs == 3
    assert generator.runner.device.steps["replayed"] > generator.runner.device.steps["eager"]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_compiled_step_writes_the_same_tokens(backend, monkeypatch):
    """With either, ``fullgraph=True`` raises where dynamo would break the graph."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    target = make_target("qwen3", num_hidden_layers=2)
    draft = make_draft(target, "Qwen3.6-27B")
    prompts = [prompt(3), prompt(20)]
    generator = dflash.Generator(target, draft, max_length=60, batch_size=2, compile=True, tree=40)
    check_batch(generator.generate, prompts, [greedy(target, p, 12) for p in prompts], max_new_tokens=12)
    expected = [sampled(target, p, 12, fold(2, row), 1.0) for row, p in enumerate(prompts)]
    check_batch(generator.generate, prompts, expected, max_new_tokens=12, temperature=1.0, seed=2)


def report(expected: tuple[float, ...], done: int = 0) -> RowReport:
    return RowReport(0, done, [], [], list(expected))


# What a step costs where reading the weights takes most of its time, and where every row takes its own.
GPU = dict(zip(TREE_SIZES, (1.0, 1.0, 1.05, 1.2, 1.6), strict=True))
EQUAL = dict.fromkeys(TREE_SIZES, 1.0)


class TestBudget:
    def test_it_takes_what_brings_most_tokens_for_its_cost(self):
        for expected, best in (((2.0, 3.0, 4.0, 6.0, 6.5), 64), ((8.0, 12.0, 14.0, 14.1, 14.2), 32), ((7.0,) * 5, 8)):
            budget = TreeBudget(GPU)
            for _ in range(20):
                budget.observe(64, [5], [report(expected)])
            assert budget.choose() == best

    def test_a_batch_adds_up_its_rows_and_ended_rows_do_not_count(self):
        steep, flat = report((2.0, 3.0, 4.0, 6.0, 6.5)), report((12.0,) * 5)
        ended = report((12.0,) * 5, done=1)
        for other, best in ((flat, 8), (ended, 64)):
            budget = TreeBudget(GPU)
            for _ in range(20):
                budget.observe(16, [12, 12, 12, 3], [other, other, other, steep])
            assert budget.choose() == best

    def test_drafts_that_are_worth_nothing_are_left_out_and_tried_again(self):
        budget = TreeBudget({1: 0.7, **GPU})
        for _ in range(20):
            budget.observe(16, [1], [report((7.0, 8.0, 9.0, 9.5, 10.0))])
        assert budget.choose() == 1
        for _ in range(4):
            assert budget.choose() == 1
            budget.observe(1, [1], [report((0.0,) * 5)])
        assert budget.choose() == 8
        budget.observe(16, [9], [report((7.0, 8.0, 9.0, 9.5, 10.0))])
        assert budget.choose() > 1

    def test_a_call_begins_with_what_others_have_learned_and_can_still_change_its_mind(self):
        budget, costs = TreeBudget({}), {1: 0.7, **GPU}
        for _ in range(200):
            budget.observe(16, [1], [report((7.0, 8.0, 9.0, 9.5, 10.0))])
        budget.begin()
        budget.costs = costs
        assert budget.choose() == 1
        for _ in range(10):
            budget.observe(16, [9], [report((7.0, 8.0, 9.0, 9.5, 10.0))])
        assert budget.choose() > 1


@pytest.mark.parametrize("variant", ["Qwen3-4B", "DFlash2"])
def test_auto_writes_the_same_text_at_changing_sizes(target, prompts, plain, variant):
    ids, mask = left_padded(prompts)
    generator = grown(TreeProposer, target, make_draft(target, variant), batch_size=3, tree="auto")
    for temperature in (0.0, 1.0):
        call = {"attention_mask": mask, "max_new_tokens": NEW, "temperature": temperature, "seed": 3}
        expected = plain
        if temperature:
            expected = [sampled(target, p, NEW, fold(3, row), temperature) for row, p in enumerate(prompts)]
        stream = generator.stream(ids, **call)
        events = [next(stream)]  # the prompt's: from here on the call has its budget
        budget = generator.engine.budget
        budget.costs, budget.choose = EQUAL, itertools.cycle((1, *TREE_SIZES)).__next__
        events += stream
        for row, answer in enumerate(expected):
            assert written(events, row) == answer.tolist()
        statistics = events[-1].statistics
        assert statistics.rows == [(1, *TREE_SIZES)[step % 6] for step in range(len(statistics.rows))]
        assert len(statistics.rows) == max(map(len, statistics.acceptance_lengths)) > 4


def test_auto_measures_its_costs_once_and_leaves_the_state_as_it_was(target, draft, prompts, plain):
    options = {"max_length": 160, "batch_size": 3, "tree": "auto", "reuse_prefix": False}
    measures, knows = (dflash.Generator(target, draft, **options) for _ in range(2))
    first = check_batch(measures.generate, prompts, plain, max_new_tokens=NEW)
    measured = dict(measures.engine.costs)
    assert all(cost > 0 for costs in measured.values() for cost in costs.values())
    knows.engine.costs = dict(measured)
    second = check_batch(knows.generate, prompts, plain, max_new_tokens=NEW)
    check_batch(measures.generate, prompts, plain, max_new_tokens=NEW)
    assert measures.engine.costs == knows.engine.costs == measured
    assert first.statistics.acceptance_lengths == second.statistics.acceptance_lengths
    assert first.statistics.rows == second.statistics.rows


def test_a_generator_names_what_its_trees_lack(target, draft, prompts):
    with pytest.raises(ValueError, match=r"tree=16 cannot be combined with acceptance=.* Pass tree=None"):
        dflash.Generator(target, draft, max_length=80, tree=16).generate(prompts[0][None], acceptance="rejection")
    for made in (None, 16):
        generator = dflash.Generator(target, draft, max_length=80, tree=made)
        with pytest.raises(ValueError, match=f"tree=32 takes up to 32 rows, this generator was made with tree={made}"):
            generator.generate(prompts[0][None], max_new_tokens=4, tree=32)


@pytest.mark.parametrize(("family", "reason"), [
    ("qwen3_5", "whose layers are all attention, Qwen3_5For"),
    ("deepseek_v4", "pass tree=None .*pools rows of one path"),
])  # fmt: skip
def test_targets_that_take_chains_only_are_refused(family, reason):
    target = make_target(family)
    draft, p = make_draft(target), prompt(5)[None]
    for attempt in (
        lambda: dflash.generate(target, draft, p, max_new_tokens=4, tree=16),
        lambda: dflash.Generator(target, draft, max_length=64, tree=16),
    ):
        with pytest.raises(ValueError, match=f"tree=16 needs a target .*{reason}"):
            attempt()


def test_a_generator_made_for_chains_names_the_recurrent_layers_that_rule_out_trees():
    target = make_target("qwen3_5")
    generator = dflash.Generator(target, make_draft(target), max_length=64)
    with pytest.raises(ValueError, match="tree=16 needs a target whose layers are all attention, Qwen3_5For"):
        generator.generate(prompt(5)[None], max_new_tokens=4, tree=16)


def test_one_shot_calls_grow_their_generator_for_larger_trees(target, draft, prompts, plain, kept):
    p = prompts[1][None]
    for tree in (None, 16, 64, 9, None):
        check_answers(dflash.generate(target, draft, p, max_new_tokens=NEW, tree=tree), 16, plain[1:2])
    assert kept().tree == 64

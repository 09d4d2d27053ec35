"""Test ``block_size="auto"``: the widths that it chooses, and that the text never changes."""

import functools
import itertools
import math

import families
import pytest
import torch
from baseline import check_answers, greedy, left_padded, prompt, sampled
from families import Cheat, at_costs, hinted, make_draft, make_target
from recorded import no_host_reads, record
from torch import Tensor

import dflash
from dflash.engine.budget import WidthBudget
from dflash.proposers import chain_widths
from dflash.sampling import fold
from dflash.state import RowReport

NEW = 40
WIDTHS = (1, 4, 8, 12, 16)
STEEP = {1: 0.9, 4: 1.0, 8: 1.4, 12: 1.9, 16: 2.4}  # every row takes its own time
FLAT = dict.fromkeys(WIDTHS, 1.0)  # reading the weights takes all of it
EQUAL = {4: 1.0, 16: 1.0}


def cheat(target, draft, prompts, answers, costs=FLAT, **options) -> Cheat:
    """Return a generator whose drafts are the ``answers``."""
    options = {"max_length": 100, "block_size": "auto"} | options
    return at_costs(families.cheat(target, draft, prompts, answers, **options), costs)


def made(target, draft, costs=FLAT, **options) -> dflash.Generator:
    return at_costs(dflash.Generator(target, draft, **{"max_length": 100, "block_size": "auto"} | options), costs)


def cycling(generator, ids, widths=WIDTHS, **call) -> list[dflash.StreamEvent]:
    """Return the events of a call whose steps take these widths in turns."""
    stream = generator.stream(ids, max_new_tokens=NEW, **call)
    events = [next(stream)]  # the prompt's: from here on the call has its budget
    budget = generator.engine.budget
    budget.costs, budget.choose = dict.fromkeys(widths, 1.0), itertools.cycle(widths).__next__
    return events + list(stream)


def check_written(events, answers) -> None:
    """Check that each row of a call has its answer."""
    for row, answer in enumerate(answers):
        assert [token for event in events for token in event.ids[row]] == answer.tolist()


def report(length: int, done: int = 0) -> RowReport:
    return RowReport(length, done, [], [], [])


def fed(costs, *steps: tuple[int, int], length: int = 0, block_size: int = 16) -> WidthBudget:
    """Return a budget that has seen steps of ``(rows, emitted)``."""
    budget = WidthBudget(costs, block_size)
    for rows, emitted in steps:
        length += emitted
        budget.observe(rows, [emitted], [report(length)])
    return budget


class TestBudget:
    def test_the_width_follows_what_drafts_are_worth(self):
        assert fed(STEEP, *[(16, 16)] * 20).choose() == 16
        assert fed(STEEP, *[(16, 9)] * 20).choose() == 12
        assert fed(STEEP, *[(16, 6)] * 20).choose() == 8
        assert fed(STEEP, *[(16, 2)] * 20).choose() == 4

    def test_the_rows_of_a_batch_decide_together_and_ended_rows_do_not_count(self):
        for done, width in ((0, 4), (1, 16)):
            budget = WidthBudget({1: 0.9, 4: 1.0, 16: 3.0}, 16)
            for step in range(30):
                lengths = [report(16 * step), *[report(300 + 2 * step, done)] * 3]
                budget.observe(16, [16, 2, 2, 2], lengths)
            assert budget.choose() == width

    def test_a_useless_drafter_is_left_out_within_a_few_steps_and_tried_less_and_less_often(self):
        budget, widths = fed({1: 1.0, 4: 1.3, 8: 1.5, 12: 1.7, 16: 1.9}), []
        for step in range(150):
            widths.append(budget.choose())
            budget.observe(widths[-1], [1], [report(step)])
        drafted = [step for step, width in enumerate(widths) if width > 1]
        first = widths.index(1)
        assert first <= 8
        rests = [after - before - 1 for before, after in itertools.pairwise(drafted[first - 1 :])]
        assert rests == [4, 8, 16, 31, 31, 31]
        assert {widths[step] for step in drafted[first:]} == {4}

    def test_drafts_that_are_worth_something_again_are_made_again(self):
        bad = [*[(16, 1)] * 4, *[(4, 1)] * 40]
        assert fed(STEEP, *bad, *[(1, 1)] * 4).choose() == 4
        assert fed(STEEP, *bad, *[(1, 1)] * 4, (4, 1)).choose() == 1
        assert fed(STEEP, *bad, *[(1, 1)] * 4, (4, 4)).choose() > 1
        assert fed(STEEP, *bad, *[(1, 1)] * 4, *[(4, 4)] * 20).choose() == 8

    def test_a_call_begins_with_what_others_have_learned(self):
        for emitted, width in ((16, 16), (6, 8), (1, 1)):
            budget = fed(STEEP, *[(16, emitted)] * 200)
            budget.begin()
            budget.costs = STEEP
            assert budget.choose() == width

    @pytest.mark.parametrize("steps", [3, 40])
    def test_calls_of_any_length_notice_that_drafts_are_worth_something_again(self, steps):
        budget, widths = WidthBudget({}, 16), []
        for good in [False] * 60 + [True] * 20:
            budget.begin()
            budget.costs = STEEP
            for step in range(steps):
                widths.append(budget.choose())
                ends = int(step == steps - 1)
                budget.observe(widths[-1], [widths[-1] if good else 1], [report(step, ends)])
        bad, good = widths[: 60 * steps], widths[60 * steps :]
        assert sum(width > 1 for width in bad[60:]) < len(bad) / 6
        assert good[-1] == 16


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_at_changing_widths(target, draft, prompts, plain, drawn, temperature):
    ids, mask = left_padded(prompts)
    generator = made(target, draft, batch_size=3)
    events = cycling(generator, ids, (16, 4, 1, 12, 8), attention_mask=mask, temperature=temperature, seed=3)
    check_written(events, drawn if temperature else plain)
    rows = events[-1].statistics.rows
    assert rows == list(itertools.islice(itertools.cycle((16, 4, 1, 12, 8)), len(rows)))


def test_right_drafts_are_accepted_at_every_width(target, draft, prompts, plain):
    ids, mask = left_padded(prompts)
    generator = cheat(target, draft, prompts, plain)
    events = cycling(generator, ids, (16, 1, 4, 8), attention_mask=mask)
    check_written(events, plain)
    assert [row[:4] for row in events[-1].statistics.acceptance_lengths] == [[16, 1, 4, 8]] * 3
    assert [event.accepted for event in events[1:5]] == [[15] * 3, [0] * 3, [3] * 3, [7] * 3]


def test_the_drafter_takes_up_what_was_written_without_drafts(target, draft):
    ids, kept = prompt(9)[None], []
    for widths in ((4,), (1,), (1, 1, 16)):
        generator = made(target, draft)
        cycling(generator, ids, widths)
        written = ids.shape[1] + NEW - 17  # the last step's features may wait for the next pass
        kept.append([buffer[0, :, :written].clone() for buffer in generator.state.draft_cache.buffers])
    for other in kept[1:]:
        torch.testing.assert_close(other, kept[0])


def test_bfloat16_equals_one_token_decoding_at_the_same_padded_shapes(prompts):
    target = make_target("qwen3", dtype=torch.bfloat16)
    ids, mask = left_padded(prompts)
    call = {"attention_mask": mask, "temperature": 0.8, "seed": 4}
    one = dflash.Generator(target, None, max_length=100, batch_size=3, block_size=16)
    one = one.generate(ids, max_new_tokens=NEW, **call)[:, ids.shape[1] :]
    generator = cheat(target, make_draft(target), prompts, list(one))
    events = cycling(generator, ids, **call)
    check_written(events, one)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "lfm2"])
def test_recurrent_states_follow_changing_widths(family):
    target = make_target(family)
    prompts = [prompt(9, seed=32), prompt(26, seed=32)]
    answers = [greedy(target, p, NEW) for p in prompts]
    ids, mask = left_padded(prompts)
    generator = cheat(target, make_draft(target), prompts, answers)
    generator.engine.chain.spoil = 11
    events = cycling(generator, ids, (16, 4, 1, 12, 8), attention_mask=mask)
    check_written(events, answers)
    assert events[-1].statistics.acceptance_length > 4


@pytest.fixture(scope="module")
def drawn(target, prompts) -> list[Tensor]:
    """Return what one-token decoding writes after the prompts at temperature 1."""
    return [sampled(target, p, NEW, fold(3, row), 1.0) for row, p in enumerate(prompts)]


@pytest.mark.parametrize(("variant", "way"), [
    ("Qwen3-4B", {"denoise_steps": 3}), ("Qwen3-4B", {"draft_sharpness": math.inf}),
    ("Qwen3-4B", {"logits_processor": [lambda ids, scores: scores]}),
    ("DFlash2", {}), ("DFlash2", {"temperature": 0.0}),
], ids=["passes", "sharpness", "processors", "DFlash2", "DFlash2 greedy"])  # fmt: skip
def test_other_ways_to_draft_keep_the_text(target, prompts, plain, drawn, variant, way):
    """The drafter knows six tokens of seven."""
    call = {"temperature": 1.0, "seed": 3} | way
    answers = drawn if call["temperature"] else plain
    ids, mask = left_padded(prompts)
    texts = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    generator = hinted(target, make_draft(target, variant), texts, spoil=7, block_size="auto")
    widths = chain_widths(generator.block_size)
    at_costs(generator, dict.fromkeys(widths, 1.0))
    events = cycling(generator, ids, [widths[place] for place in (4, 1, 0, 3, 2)], attention_mask=mask, **call)
    check_written(events, answers)
    assert events[-1].statistics.acceptance_length > 2.5


def test_a_step_of_every_width_neither_waits_nor_reads(target, draft, prompts):
    generator = made(target, draft, batch_size=3)
    ids, mask = left_padded(prompts)
    next(generator.stream(ids, attention_mask=mask, max_new_tokens=NEW, temperature=1.0, seed=1))
    for width in (16, 4, 1, 12, 8):
        generator.engine.chain.rows = width
        with no_host_reads():
            generator.step()


def test_steps_are_captured_once_per_width(target, draft, prompts, plain):
    ids, mask = left_padded(prompts)
    generator = record(cheat(target, draft, prompts, plain, costs=EQUAL))
    for _ in range(3):
        events = cycling(generator, ids, (16, 4), attention_mask=mask)
        check_written(events, plain)
    assert generator.runner.graphs == 2
    assert generator.runner.device.steps["replayed"] > 0


def test_the_compiled_step_follows_the_width(monkeypatch):
    """``fullgraph=True`` raises where dynamo would break the graph; what a backend makes of it is tested elsewhere."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    target = make_target("qwen3", num_hidden_layers=1)
    draft, prompts = make_draft(target), [prompt(5), prompt(9)]
    ids, mask = left_padded(prompts)
    generator = made(target, draft, EQUAL, max_length=61, batch_size=2, compile=True)
    events = cycling(generator, ids, (16, 4), attention_mask=mask, temperature=1.0, seed=2)
    check_written(events, [sampled(target, p, NEW, fold(2, row), 1.0) for row, p in enumerate(prompts)])


def test_costs_are_measured_once_per_length_and_leave_the_text_as_it_was(target, draft):
    generator = dflash.Generator(target, draft, max_length=320, block_size="auto", reuse_prefix=False)
    for length in (40, 60, 270, 50, 280):
        p = prompt(length)
        check_answers(generator.generate(p[None], max_new_tokens=NEW), length, [greedy(target, p, NEW)])
    assert len(generator.engine.costs) == 2
    for costs in generator.engine.costs.values():
        assert sorted(costs) == list(WIDTHS)
        assert min(costs.values()) > 0


def test_costs_of_one_row_and_all_are_measured_whatever_the_default_device(target, draft):
    generator, p = dflash.Generator(target, draft, max_length=100, batch_size=2, block_size="auto"), prompt(20)
    with torch.device("meta"):
        output = generator.generate(p[None], max_new_tokens=NEW)
    check_answers(output, 20, [greedy(target, p, NEW)])


def test_it_needs_a_drafter_of_blocks(target):
    with pytest.raises(ValueError, match=r"block_size=.auto. needs a drafter of blocks .* got draft="):
        dflash.Generator(target, None, max_length=40, block_size="auto")

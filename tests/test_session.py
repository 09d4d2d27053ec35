"""Requests that join and leave the rows of one generator: what is refused, which row is taken, what is run again."""

import functools
import re

import pytest
import torch
from baseline import greedy, prompt
from families import at_costs, hinted, make_draft, make_target
from recorded import record
from tiny_tokenizers import byte_fallback, byte_level

import dflash
from dflash import ops
from dflash.session import Session

NEW, CHUNK = 12, 8


def new_pair(family: str) -> tuple:
    target = make_target(family)
    return target, make_draft(target)


@functools.cache
def pair() -> tuple:
    return new_pair("qwen3")


def own(text: torch.Tensor, new: int = NEW) -> list[int]:
    """Return what the shared pair's target writes by itself."""
    return greedy(pair()[0], text, new).tolist()


def session(family: str = "", *, replays: bool = False, cache_bytes: int = 2**20, **options) -> Session:
    """Return a session on the shared pair, or on a new one of a family."""
    target, draft = new_pair(family) if family else pair()
    sizes = {"max_length": 96, "batch_size": 3, "prefill_chunk": CHUNK}
    generator = dflash.Generator(target, draft, **sizes | options)
    return Session(record(generator) if replays else generator, cache_bytes=cache_bytes)


def admit(of: Session, ids: torch.Tensor, **arguments) -> int:
    return of.admit(of.resolve(ids[None], **{"max_new_tokens": NEW} | arguments))


def finish(of: Session) -> dict[int, tuple[list[int], int]]:
    """Run all requests to their ends and retire them; return each one's ids, and the prompt tokens that were run."""
    written: dict[int, list[int]] = {}
    prefilled = {}
    while of.is_busy:
        for row, event, error in of.step():
            assert not error
            written.setdefault(row, []).extend(event.ids[0])
            prefilled[row] = event.statistics.num_prefilled_tokens[0]
            if event.finish_reasons[0] is not None:
                of.retire(row)
    return {row: (ids, prefilled[row]) for row, ids in written.items()}


def answer(of: Session, text: torch.Tensor) -> tuple[list[int], int]:
    """Run a request next to those that are there; return its ids, and the prompt tokens that were run."""
    row = admit(of, text)
    return finish(of)[row]


def finish_but(of: Session, bad: int, good: int) -> tuple[dict[int, list[int]], str]:
    """Run all requests; return what they wrote, and the error of the one that fails."""
    seen, errors = {good: [], bad: []}, {}
    while of.is_busy:
        for row, event, error in of.step():
            seen[row] += event.ids[0]
            if error:
                errors[row] = error
                of.retire(row)
    assert errors.keys() == {bad}
    return seen, errors[bad]


REFUSED = {
    "two rows": ({"ids": torch.ones(2, 3, dtype=torch.int64)}, "it has 2 rows: each takes a row of its own"),
    "several answers": ({"num_return_sequences": 2, "temperature": 1.0}, "it has 2 rows"),
    "rejection": ({"acceptance": "rejection", "temperature": 1.0}, "it has acceptance='rejection'"),
    "processors": ({"logits_processor": [lambda ids, scores: scores]}, "it has logits_processor or stopping_criteria"),
    "criteria": ({"stopping_criteria": [lambda ids, scores: False]}, "it has logits_processor or stopping_criteria"),
    "denoising": ({"denoise_steps": 2}, "it has denoise_steps=2: every row is drafted in 1"),
    "too long": ({"max_new_tokens": 95}, "do not fit this generator's max_length, 96"),
    "temperature": ({"temperature": -1.0}, "temperature must be a finite number of at least 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_all_rows_share_is_refused_before_a_row_is_taken(name):
    arguments, message = REFUSED[name]
    of = session()
    with pytest.raises(ValueError, match=message):
        of.resolve(**{"ids": prompt(3)[None]} | arguments)
    assert of.idle == [0, 1, 2]


MASKED = {"grammar": dflash.Grammar.regex("(ab|c)+"), "tokenizer": byte_level(), "stop_token_ids": [0]}


def test_a_compiled_step_takes_no_grammars():
    with pytest.raises(ValueError, match="it has a grammar, and this generator's step is compiled"):
        session(compile=True).resolve(prompt(3)[None], **MASKED)


def test_trees_are_refused():
    of = session(tree=16)
    with pytest.raises(ValueError, match="it has tree=16: all rows of a step are chains, pass tree=None"):
        of.resolve(prompt(3)[None])
    assert of.resolve(prompt(3)[None], tree=None)


def rows_of_steps(of: Session, texts: list[torch.Tensor]) -> list[int]:
    """Run a request per row, check its text, and return the rows that each step verified."""
    taken = {admit(of, text, max_new_tokens=40, stop_token_ids=[]): text for text in texts}
    seen, written = [], {row: [] for row in taken}
    while of.is_busy:
        for row, event, _ in of.step():
            written[row] += event.ids[0]
            seen = event.statistics.rows
    for row, text in taken.items():
        of.retire(row)
        assert written[row] == own(text, 40)
    return seen


def test_all_rows_have_one_width_chosen_by_what_they_have_accepted():
    """A random drafter is worth nothing, and one that knows most of the text is worth its whole block."""
    target, draft = pair()
    texts = [prompt(9, seed=seed) for seed in (1, 2, 3)]
    known = [torch.cat([text, greedy(target, text, 40)]) for text in texts]
    sizes = {"max_length": 96, "prefill_chunk": CHUNK, "block_size": "auto"}
    costs = {1: 1.0, 4: 1.2, 8: 1.3, 12: 1.4, 16: 1.5}
    random = Session(at_costs(dflash.Generator(target, draft, batch_size=3, **sizes), costs))
    good = Session(at_costs(hinted(target, draft, known, spoil=1000, **sizes), costs))
    assert rows_of_steps(random, texts).count(1) > 30
    assert rows_of_steps(random, texts)[0] == 1, "the session remembers"
    assert set(rows_of_steps(good, texts)) == {16}


def test_where_bits_would_depend_on_the_width_steps_have_the_whole_block():
    target = make_target("qwen3", dtype=torch.bfloat16)
    sizes = {"max_length": 96, "prefill_chunk": CHUNK, "block_size": "auto", "fused": False}
    of = Session(at_costs(dflash.Generator(target, make_draft(target), **sizes), {1: 1.0, 16: 9.0}))
    admit(of, prompt(9))
    while of.is_busy:
        for _, event, _ in of.step():
            assert set(event.statistics.rows) <= {16}


def test_rows_are_taken_and_freed():
    of = session()
    rows = [admit(of, prompt(n)) for n in (3, 4, 5)]
    assert sorted(rows) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="all 3 rows are taken: retire one first"):
        admit(of, prompt(3))
    of.retire(rows[1])
    for row in (rows[1], 3, -1):
        with pytest.raises(ValueError, match=f"row must be one that a request has, got {row}"):
            of.retire(row)
    assert admit(of, prompt(6)) == rows[1]


@pytest.mark.parametrize("draft", [True, False])
def test_steps_leave_out_rows_that_are_done(draft, monkeypatch):
    target, drafter = pair()
    of = Session(dflash.Generator(target, drafter if draft else None, max_length=96, batch_size=3), cache_bytes=0)
    sizes, run = [], ops.decoder_layers

    def decoder_layers(hidden, *arguments, **named):
        sizes.append(len(hidden))
        return run(hidden, *arguments, **named)

    monkeypatch.setattr(ops, "decoder_layers", decoder_layers)
    wanted = {}
    for new in (40, 4, 20):
        ids = prompt(new)
        wanted[admit(of, ids, max_new_tokens=new, stop_token_ids=[])] = own(ids, new)
    assert {row: ids for row, (ids, _) in finish(of).items()} == wanted
    passes = 2 if draft else 1
    assert sizes[-passes:] == [1] * passes
    assert {2, 3} <= set(sizes)


def test_a_long_prompt_adds_one_chunk_to_three_steps_of_the_others():
    of = session()
    first = admit(of, prompt(5), stop_token_ids=[], max_new_tokens=60)
    of.step()
    of.step()
    long, short = prompt(60), prompt(6)
    second, third = admit(of, long, stop_token_ids=[]), admit(of, short, stop_token_ids=[], max_new_tokens=60)
    steps, begun = 0, {}
    while second not in begun:
        rows = [row for row, *_ in of.step()]
        steps += first in rows
        for row in {second, third}.intersection(rows):
            begun.setdefault(row, steps)
    assert begun == {third: 0, second: 6 * 3}, "a short prompt comes before a long one"
    assert finish(of).keys() == {first, second, third}
    assert answer(of, long)[0] == own(long)


def test_whole_chunks_of_a_prompt_are_not_run_again():
    of, text = session(), prompt(40, seed=1)
    for length, cached in ((29, 0), (29, 24), (40, 24), (33, 32), (32, 24)):  # a prompt's last token is always run
        assert answer(of, text[:length]) == (own(text[:length]), length - cached)


@pytest.mark.parametrize(("family", "passes"), [("qwen3", 2), ("qwen3_5", 3), ("qwen3_moe", 3)])
def test_a_short_end_joins_the_chunk_before_it_where_that_changes_no_bits(family, passes):
    text = prompt(2 * CHUNK + 1, seed=1)
    longer, held = torch.cat([text, prompt(2 * CHUNK, seed=2)]), []
    for first in (text, longer):
        of = session(family)
        row, steps = admit(of, first, max_new_tokens=1), 1
        while not of.step():
            steps += 1
        assert steps == passes + 2 * (first is longer), "recurrent states and experts keep whole chunks apart"
        of.retire(row)
        keys = of.generator.state.target_cache.keys
        held.append(torch.stack([layer[row, :, : 2 * CHUNK] for layer in keys.values()]))
    assert torch.equal(*held)
    wanted = greedy(make_target(family), text, NEW).tolist()
    assert answer(of, text) == (wanted, 1), "the joined chunk was kept"


def test_a_block_is_found_by_all_tokens_up_to_its_end():
    of, same = session(), prompt(2 * CHUNK, seed=1)
    for seed in (2, 3):
        text = torch.cat([prompt(CHUNK, seed=seed), same])
        assert answer(of, text) == (own(text), len(text))


@pytest.mark.parametrize("options", [{"cache_bytes": 0}, {"reuse_prefix": False}], ids=str)
def test_without_a_cache_every_prompt_is_run_whole(options):
    of = session(**options)
    for _ in range(2):
        assert answer(of, prompt(29))[1] == 29
        assert not of.settle()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_prompts_that_arrive_together_run_their_common_beginning_once(family):
    target = make_target(family)
    of, stem = session(family), prompt(44, seed=1)
    texts = [torch.cat([stem, prompt(3 + n, seed=n)]) for n in (2, 3, 4)]
    rows = [admit(of, text) for text in texts]
    results = finish(of)
    assert sum(run for _, run in results.values()) == 40 + sum(len(text) - 40 for text in texts)
    assert [results[row][0] for row in rows] == [greedy(target, text, NEW).tolist() for text in texts]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_conversations_that_outnumber_the_rows_run_only_what_is_new(family):
    target = make_target(family)
    of = session(family, batch_size=2, cache_bytes=2**26)
    texts, cached = [prompt(20, seed=seed) for seed in range(5)], [0] * 5
    for turn in range(3):
        for number, text in enumerate(texts):
            ids, run = answer(of, text)
            assert (ids, run) == (greedy(target, text, NEW).tolist(), len(text) - cached[number])
            while of.settle():
                pass
            whole = torch.cat([text, torch.tensor(ids)])
            cached[number] = len(whole) // CHUNK * CHUNK
            texts[number] = torch.cat([whole, prompt(5, seed=9 * turn + number)])


def test_an_answer_settles_while_others_run_until_its_row_is_taken():
    of, texts = session(batch_size=2), [prompt(20, seed=seed) for seed in (1, 2, 3)]
    ids, _ = answer(of, texts[0])
    admit(of, texts[1], max_new_tokens=40)
    of.step()
    assert of.settle()
    assert not of.is_settled
    admit(of, texts[2])
    assert of.is_settled
    finish(of)
    assert answer(of, torch.cat([texts[0], torch.tensor(ids)]))[1] == 32 - 24, "one chunk had been run again"


def test_the_cache_keeps_to_its_bytes_and_drops_what_was_used_least_recently():
    of = session()
    answer(of, prompt(33))
    block = of.prefix.num_bytes // 4
    of, texts = session(cache_bytes=5 * block), [prompt(33, seed=seed) for seed in (1, 2)]
    runs = []
    for text in (texts[0], texts[1], texts[1], texts[0], prompt(60)):
        runs.append(answer(of, text)[1])
        assert of.prefix.num_bytes <= 5 * block
    assert runs == [33, 33, 33 - 32, 33 - 8, 60], "of a prompt its last chunks go first"


def test_a_beginning_that_is_used_often_stays_cached():
    of = session()
    answer(of, prompt(9))
    of, stem, runs = session(cache_bytes=6 * of.prefix.num_bytes), prompt(24, seed=1), []
    for seed in range(2, 7):
        for text in (torch.cat([stem, prompt(3, seed=seed)]), prompt(18, seed=10 * seed)):
            runs.append(answer(of, text)[1])
    assert runs == [27, 18, 3, 18, 3, 18, 3, 18, 3, 18]


def test_a_call_of_the_generator_ends_the_session_and_a_new_one_begins_afresh():
    of, text = session(), prompt(20, seed=1)
    admit(of, text)
    of.step()
    expected = of.generator.generate(text[None], max_new_tokens=NEW)[0, 20:].tolist()
    for act in (of.step, lambda: admit(of, text), lambda: of.retire(0)):
        with pytest.raises(RuntimeError, match="runs another call"):
            act()
    assert answer(Session(of.generator), text) == (expected, 20)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_step_that_fails_ends_the_session_and_the_next_one_begins_afresh(family):
    """The target raises between its layers: some recurrent states have moved, others have not."""
    target, of, passes = make_target(family), session(family, batch_size=2, fused=False), []

    def fail(*_) -> None:
        passes.append(1)
        if len(passes) == 4:
            raise KeyboardInterrupt

    row = admit(of, prompt(16))
    layer = of.generator.engine.target.model.get_decoder().layers[2].mlp
    handle = layer.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        finish(of)
    handle.remove()
    for use in (of.step, lambda: of.retire(row), lambda: admit(of, prompt(16))):
        with pytest.raises(RuntimeError, match="or a step failed"):
            use()
    longer = torch.cat([prompt(16), prompt(5)])
    assert answer(Session(of.generator), longer) == (greedy(target, longer, NEW).tolist(), 21)


def test_nan_logits_end_one_request_and_leave_the_others():
    of, marked = session(), torch.tensor([96, 5, 6])
    verify, state = of.generator.engine.target.verify, of.generator.state

    def spoil(block, of_state):
        return verify(block, of_state).masked_fill((state.tokens[:, :1, None] == 96), float("nan"))

    of.generator.engine.target.verify = spoil
    good, bad = admit(of, prompt(9)), admit(of, marked)
    seen, error = finish_but(of, bad, good)
    assert error == f"the target's logits are NaN in row {bad} for position 4"
    assert len(seen[bad]) == 1
    assert seen[good] == own(prompt(9))


def test_only_steps_beside_a_grammar_wait_for_masks():
    of = session(replays=True)
    runner = of.generator.runner
    admit(of, prompt(5), max_new_tokens=60, stop_token_ids=[])
    for _ in range(4):
        of.step()
    replayed = runner.device.steps["replayed"]
    assert replayed
    masked = admit(of, prompt(6), **MASKED)
    of.step()
    while masked not in of.idle:
        for row, event, _ in of.step():
            assert runner.reason == "a grammar's masks are made on the host"
            if row == masked and event.finish_reasons[0]:
                of.retire(row)
    assert runner.device.steps["replayed"] == replayed
    of.step()
    assert runner.reason == ""
    assert runner.device.steps["replayed"] == replayed + 1


def test_grammars_of_two_tokenizers_cannot_run_at_the_same_time():
    of = session()
    admit(of, prompt(5), **MASKED)
    of.step()
    other = MASKED | {"tokenizer": byte_fallback(), "grammar": dflash.Grammar.regex("[a-h]+"), "stop_token_ids": [1]}
    with pytest.raises(ValueError, match="must be for one tokenizer, got two"):
        admit(of, prompt(6), **other)
    assert of.idle == [1, 2]
    finish(of)
    admit(of, prompt(6), **other)


def test_a_grammar_that_cannot_go_on_ends_its_row_only():
    """The vocabulary has no z, but not only one text leads there."""
    of, arguments = session(), MASKED | {"grammar": dflash.Grammar.regex("[ab]éz")}
    good, bad = admit(of, prompt(9)), admit(of, prompt(6), **arguments)
    seen, error = finish_but(of, bad, good)
    assert re.search(rf"grammar (of row {bad} cannot go on|and the other rules together leave no token)", error)
    assert seen[good] == own(prompt(9))


def test_one_captured_step_serves_requests_that_come_and_go():
    of = session(replays=True)
    for length in (5, 20, 9, 33):
        admit(of, prompt(length), temperature=1.0, seed=length)
        of.step()
        if not of.idle:
            finish(of)
    finish(of)
    assert of.generator.runner.device.captures == 1
    assert of.generator.runner.device.steps["replayed"] > 5

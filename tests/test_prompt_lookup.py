"""Test drafts that are looked up in the text so far: they never change it, with a drafter and without one."""

import pytest
import test_session
import torch
from baseline import greedy, left_padded, prompt

import dflash
from dflash.proposers import chain_widths
from dflash.proposers.lookup import look_up

NEW = 40
SEVENS = [lambda ids, scores: torch.where(torch.arange(scores.shape[1]) == 7, 1.0, 0.0)[None]]  # a processor
REPEATED = prompt(6).repeat(5)  # what follows its last tokens stood there before
TEXTS = torch.tensor([[7, 1, 2, 3, 1, 2, 9, 1, 2, 0, 0, 0], [5, 5, 5, 5, 0, 0, 0, 0, 0, 0, 0, 0], [1, 2, 3] + 9 * [0]])


@pytest.mark.parametrize(("ngram", "found"), [
    (1, [[9, 1, 2, 9], [5, 5, 5, 5], [-1, -1, -1, -1]]),
    (2, [[9, 1, 2, 9], [5, 5, 5, 5], [-1, -1, -1, -1]]),  # the last of two places, and its text again
    (3, [[-1, -1, -1, -1], [5, 5, 5, 5], [-1, -1, -1, -1]]),
    (4, [[-1, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]]),
])  # fmt: skip
def test_what_followed_the_last_place_is_found(ngram, found):
    assert look_up(TEXTS, torch.tensor([8, 3, 2]), ngram, 4).tolist() == found


def test_texts_shorter_than_the_n_gram_have_nothing():
    assert look_up(TEXTS, torch.tensor([8, 3, 2]), 13, 2).tolist() == [[-1, -1]] * 3


def test_nothing_is_found_past_the_end_of_a_text():
    """Tokens after ``length`` are stale: those of an earlier, longer text."""
    assert look_up(TEXTS, torch.tensor([2, 0, 0]), 2, 2).tolist() == [[-1, -1]] * 3


@pytest.mark.parametrize(("drafts", "block_size"), [(True, "auto"), (False, None), (False, 5), (False, "auto")])
def test_the_text_is_that_without(target, draft, drafts, block_size):
    call = {"prompt_lookup": 2, "block_size": block_size}
    prompts = [REPEATED, prompt(9), prompt(1)]
    ids, mask = left_padded(prompts)
    out = dflash.generate(target, draft if drafts else None, ids, attention_mask=mask, max_new_tokens=NEW, **call)
    for row, each in enumerate(prompts):
        assert torch.equal(out[row, ids.shape[1] :], greedy(target, each, NEW))
    sampled = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 3}
    expected = dflash.generate(target, None, REPEATED[None], **sampled)
    assert torch.equal(dflash.generate(target, draft if drafts else None, REPEATED[None], **sampled, **call), expected)


@pytest.mark.parametrize("drafts", [True, False], ids=["drafter", "alone"])
def test_text_that_repeats_itself_takes_few_steps(target, draft, drafts):
    """The drafter does not know what the processor makes of the text."""
    call = {"max_new_tokens": NEW, "logits_processor": SEVENS, "prompt_lookup": 2, "block_size": 8}
    out = dflash.generate(target, draft if drafts else None, prompt(4)[None], return_dict_in_generate=True, **call)
    assert out.sequences[0, 4:].tolist() == [7] * NEW
    assert out.statistics.acceptance_lengths[0][-4:-1] == [8, 8, 8]


def test_the_drafter_runs_no_block_where_every_row_is_looked_up_but_takes_up_its_context(target, draft, monkeypatch):
    rows, forward, caches = [], type(draft).forward, []
    monkeypatch.setattr(type(draft), "forward", lambda *given: rows.append(given[3].shape[1]) or forward(*given))
    for options in ({"prompt_lookup": 2}, {}):
        generator = dflash.Generator(target, draft, max_length=64, block_size=8, **options)
        generator.generate(prompt(4)[None], max_new_tokens=NEW, logits_processor=SEVENS)
        caches.append(generator.state.draft_cache.values[1][0, :, :36])
        if options:
            assert rows[0] == 8
            assert set(rows[4:]) == {0}
    assert torch.allclose(*caches, atol=1e-5)


def test_costs_of_widths_are_measured_with_the_drafter(target, draft, monkeypatch):
    """Where drafts are looked up from the first step on, too."""
    rows, forward = [], type(draft).forward
    monkeypatch.setattr(type(draft), "forward", lambda *given: rows.append(given[3].shape[1]) or forward(*given))
    call = {"block_size": "auto", "prompt_lookup": 1, "max_new_tokens": 4, "logits_processor": SEVENS}
    dflash.generate(target, draft, torch.full((1, 12), 7), **call)
    assert set(chain_widths(draft.config.block_size)[1:]) <= set(rows)


def test_rejection_sampling_keeps_to_the_drafter(target, draft):
    """Its text is exact only if drafts are drawn from the drafter's distribution."""
    call = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 4, "acceptance": "rejection"}
    expected = dflash.generate(target, draft, REPEATED[None], **call)
    assert torch.equal(dflash.generate(target, draft, REPEATED[None], **call, prompt_lookup=1), expected)


def test_a_session_looks_up_in_each_row():
    target, _ = test_session.pair()
    session = test_session.session(prompt_lookup=2)
    rows = {test_session.admit(session, p, max_new_tokens=NEW): p for p in (REPEATED, prompt(9))}
    for row, (ids, _) in test_session.finish(session).items():
        assert ids == greedy(target, rows[row], NEW).tolist()

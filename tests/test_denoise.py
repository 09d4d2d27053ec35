"""Test denoise_steps: the schedule, the input of later passes, and that the text never changes."""

import torch
from baseline import left_padded, prompt
from families import make_draft, make_target

import dflash
from dflash.proposers.chain import most_confident


def test_the_most_confident_tokens_are_fixed():
    logits = torch.zeros(2, 4, 5)
    logits[0, :, 1] = torch.tensor([1.0, 4.0, 2.0, 3.0])
    logits[1, :, 1] = torch.tensor([1.0, 4.0, torch.nan, 3.0])
    drafts = torch.tensor([[1, 1, 1, 1], [1, 0, -1, 1]])  # row 1 chose an improbable token in its second place
    known = torch.zeros(2, 4, dtype=torch.bool)
    once = most_confident(logits, drafts, None, 1)
    assert torch.equal(most_confident(logits, drafts, known, 1), once)
    assert once.tolist() == [[False, True, False, False], [False, False, False, True]]
    assert most_confident(logits, drafts, once, 2).tolist() == [[False, True, False, True], [True, False, False, True]]
    assert most_confident(logits, drafts, once, 3).sum(1).tolist() == [3, 3]
    assert not most_confident(logits, drafts, known, 3)[1, 2], "NaN is fixed last"
    low = torch.tensor([[True, False, False, False]] * 2)
    assert most_confident(logits, drafts, low, 2).tolist() == [[True, True, False, False], [True, False, False, True]]


def test_each_pass_sees_the_fixed_tokens_and_injects_nothing_twice():
    target = make_target("qwen3")
    generator = dflash.Generator(target, make_draft(target), max_length=64, batch_size=2, denoise_steps=4)
    ids, mask = left_padded([prompt(5), prompt(9)])
    chain, known, every, waiting, mask_id = generator.engine.chain, [], [], [], generator.draft.config.mask_token_id
    rows_for, predict = chain.rows_for, chain.predict

    def watch_rows(state, num_drafts, drafts=None):
        known.append(torch.full((2, num_drafts), mask_id) if drafts is None else drafts.clone())
        return rows_for(state, num_drafts, drafts)

    def watch(block, features, state):
        predictions = predict(block, features, state)
        waiting.append(max(1, int(state.num_context.max())))
        every.append((known[-1], features.shape[1], predictions.logits.argmax(-1)))
        return predictions

    chain.rows_for, chain.predict = watch_rows, watch
    generator.generate(ids, attention_mask=mask, max_new_tokens=6)
    assert len(every) % 4 == 0
    assert len(every) >= 8
    for start in range(0, len(every), 4):
        passes = every[start : start + 4]
        assert [context for _, context, _ in passes] == [waiting[start], 0, 0, 0]
        unmasked = [(drafts != mask_id) for drafts, _, _ in passes]
        for kept, shown, (drafts, _, _), (before, _, choice) in zip(
            (3, 7, 11), unmasked[1:], passes[1:], passes, strict=False
        ):
            assert ((shown.sum(1) == kept) | (choice == mask_id).any(1)).all()  # a draft may be the mask id itself
            old = before != mask_id
            assert torch.equal(drafts[old], before[old]), "fixed tokens stay"
            fresh = shown & ~old
            assert torch.equal(drafts[fresh], choice[fresh]), "new tokens are the previous pass's choice"


def test_a_call_may_ask_for_its_own_number_of_passes():
    target = make_target("qwen3")
    draft = make_draft(target)
    two = dflash.Generator(target, draft, max_length=64, denoise_steps=2)
    asked = dflash.Generator(target, draft, max_length=64)
    p, passes = prompt(9)[None], []
    draft.register_forward_hook(lambda *arguments: passes.append(1))
    expected = two.generate(p, max_new_tokens=12, return_dict_in_generate=True)
    of_two = len(passes)
    passes.clear()
    output = asked.generate(p, max_new_tokens=12, denoise_steps=2, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.statistics.acceptance_lengths == expected.statistics.acceptance_lengths
    assert len(passes) == of_two == 2 * len(output.statistics.acceptance_lengths[0])
    passes.clear()
    steps = asked.generate(p, max_new_tokens=12, return_dict_in_generate=True).statistics.acceptance_lengths[0]
    assert len(passes) == len(steps), "the generator's default is one"
    events = asked.stream(p, max_new_tokens=12, denoise_steps=2)
    assert sum(len(event.ids[0]) for event in events) == 12

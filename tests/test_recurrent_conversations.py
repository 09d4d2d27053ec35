"""Prompts that go on from the states of the call before, from a snapshot, or from the start."""

import pytest
import torch
from baseline import greedy, left_padded, prompt
from families import make_draft, make_target
from test_recurrent import cheat
from tiny_tokenizers import byte_level

import dflash
from dflash.cache import RecurrentLayer

NEW = 24


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3_5")


def turn(generator, target, *prompts: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Generate, compare with `generate` on the whole prompts; return the sequences and how many tokens were run."""
    ids, mask = left_padded(list(prompts))
    output = generator.generate(ids, attention_mask=mask, max_new_tokens=NEW, return_dict_in_generate=True)
    for row, p in enumerate(prompts):
        assert output.sequences[row, ids.shape[1] :].tolist() == greedy(target, p, NEW).tolist()
    return output.sequences, output.statistics.num_prefilled_tokens


@pytest.mark.parametrize("ahead", [False, True], ids=["", "one step late"])
@pytest.mark.parametrize("spoil", [0, 5])
def test_only_new_tokens_are_run(target, ahead, spoil):
    ids = prompt(20, seed=6)
    generator = cheat(target, [ids], [greedy(target, ids, NEW)], spoil, ahead)
    ran = 20
    for number in range(3):
        sequences, prefilled = turn(generator, target, ids)
        assert prefilled == [ran]
        ids, ran = torch.cat([sequences[0], prompt(4 + number, seed=number)]), 5 + number


@pytest.mark.parametrize(("chunk", "ran"), [(7, 4), (16, 12), (512, 60)])
def test_regenerating_runs_the_last_chunk_of_the_prompt(target, chunk, ran):
    p = prompt(60)
    generator = dflash.Generator(target, make_draft(target), max_length=160, prefill_chunk=chunk)
    assert [turn(generator, target, p)[1] for _ in range(3)] == [[60], [ran], [ran if chunk < 60 else 60]]


def test_a_template_that_drops_reasoning_goes_on_from_the_snapshot(target):
    ids = prompt(60)
    generator = cheat(target, [ids], [greedy(target, ids, NEW)], max_length=256, prefill_chunk=16)
    counts = []
    for number in range(3):
        sequences, prefilled = turn(generator, target, ids)
        counts += prefilled
        answer = sequences[0, len(ids) + 15 :]  # without what came first
        ids = torch.cat([ids, answer, prompt(11, seed=number)])
    assert counts == [60, 80 - 48, 100 - 64]


@pytest.mark.parametrize("ahead", [False, True], ids=["", "one step late"])
@pytest.mark.parametrize("end", range(17, 22))
def test_a_stop_string_in_the_middle_of_a_block(target, ahead, end):
    p, tokenizer = prompt(30, seed=2), byte_level()
    answer = greedy(target, p, 40)
    generator = cheat(target, [p], [answer], 0, ahead, prefill_chunk=16)
    string = tokenizer.decode(answer[end - 1 : end + 1])
    call = {"stop_strings": string, "tokenizer": tokenizer}
    plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = target.generate(p[None], max_new_tokens=40, **plain, **call)
    assert 32 < expected.shape[1] < 70
    assert torch.equal(generator.generate(p[None], max_new_tokens=40, **call), expected)
    # The next block may have run already: its state is ahead of what was kept.
    sequences, prefilled = turn(generator, target, torch.cat([expected[0], prompt(5)]))
    assert prefilled == [expected.shape[1] + 5 - 16 if ahead else 6]
    assert turn(generator, target, torch.cat([sequences[0], prompt(5)]))[1] == [6]


@pytest.mark.parametrize("ahead", [False, True], ids=["", "one step late"])
def test_a_closed_stream_is_continued(target, ahead):
    p = prompt(14, seed=4)
    answer = greedy(target, p, 40)
    generator = cheat(target, [p], [answer], 5, ahead)
    events = generator.stream(p[None], max_new_tokens=40)
    got = [token for _ in range(3) for token in next(events).ids[0]]
    events.close()
    assert got == answer[: len(got)].tolist()
    ids = torch.cat([p, answer[: len(got)], prompt(3, seed=5)])
    assert turn(generator, target, ids)[1] == [3 if ahead else 4]


def test_rows_of_a_ragged_batch_resume_at_different_places(target):
    prompts = [prompt(length, seed=7) for length in (40, 3, 17)]
    answers = [greedy(target, p, NEW) for p in prompts]
    generator = cheat(target, prompts, answers, prefill_chunk=8)
    turn(generator, target, *prompts)
    follow = [
        torch.cat([prompts[0], answers[0], prompt(30, seed=8)]),  # continues
        prompt(50, seed=9),  # something else
        torch.cat([prompts[2], answers[2][:7], prompt(2, seed=8)]),  # diverges inside the answer: from the snapshot
    ]
    assert follow[2][24] != answers[2][7]
    assert follow[1][0] != prompts[1][0]
    sequences, prefilled = turn(generator, target, *follow)
    assert prefilled == [31, 50, 26 - 16]
    longer = [torch.cat([row[94 - len(p) :], prompt(2)]) for row, p in zip(sequences, follow, strict=True)]
    assert turn(generator, target, *longer)[1] == [3, 3, 3]


def test_a_snapshot_that_is_no_prefix_is_not_used(target):
    p = prompt(60)
    generator = dflash.Generator(target, make_draft(target), max_length=160, prefill_chunk=16)
    turn(generator, target, p)
    other = torch.cat([p[:40], prompt(20, seed=5)])  # the snapshot is at 48
    assert turn(generator, target, other)[1] == [60]
    assert turn(generator, target, other)[1] == [12]
    assert turn(generator, target, p)[1] == [60]


def test_nothing_is_reused_after_a_reset_or_with_other_weights():
    target, p = make_target("qwen3_5"), prompt(20)
    generator = dflash.Generator(target, make_draft(target), max_length=80, prefill_chunk=16)
    assert [turn(generator, target, p)[1] for _ in range(2)] == [[20], [4]]
    generator.reset()
    assert [turn(generator, target, p)[1] for _ in range(2)] == [[20], [4]]
    with torch.no_grad():
        target.model.layers[0].linear_attn.out_proj.weight.mul_(-1)
    assert [turn(generator, target, p)[1] for _ in range(2)] == [[20], [4]]
    never = dflash.Generator(target, make_draft(target), max_length=80, prefill_chunk=16, reuse_prefix=False)
    assert [turn(never, target, p)[1] for _ in range(2)] == [[20], [20]]


def test_a_snapshot_is_forgotten_by_a_call_that_goes_on_from_before_it(target):
    generator = dflash.Generator(target, make_draft(target), max_length=160, prefill_chunk=16)
    first, second = prompt(60), prompt(60, seed=4)
    turn(generator, target, first)
    generator.reuse_prefix = False  # takes no snapshot of its own
    turn(generator, target, second)
    generator.reuse_prefix = True
    assert turn(generator, target, torch.cat([second[:55], prompt(4)]))[1] == [59]


def test_a_first_pass_that_was_interrupted_inside_a_layer_leaves_nothing(target, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    generator = dflash.Generator(target, make_draft(target), max_length=160, fused=False)
    with monkeypatch.context() as context:
        context.setattr(RecurrentLayer, "recurrence", stop)  # a convolution's window is there already
        with pytest.raises(KeyboardInterrupt):
            generator.generate(prompt(20)[None], max_new_tokens=4)
    p = prompt(30)
    assert [turn(generator, target, q)[1] for q in (p, p, torch.cat([p[:20], prompt(5)]))] == [[30], [30], [25]]


def test_decoded_rows_are_run_again_where_a_prompt_would_clamp_them():
    """Nemotron-H: a prompt's dt has a lower limit, a decoded token's has none. The text must be that of one prompt."""
    target, ids = make_target("nemotron_h (dt under its limit)"), prompt(60)
    generator = cheat(target, [ids], [greedy(target, ids, NEW)], prefill_chunk=16)
    counts = []
    for number in range(2):
        sequences, prefilled = turn(generator, target, ids)
        counts += prefilled
        ids = torch.cat([sequences[0], prompt(4, seed=number)])
    assert counts == [60, 88 - 48]
    assert turn(generator, target, ids)[1] == [116 - 80]

"""Prompts with pictures: the text is what the model's own ``generate`` writes, whatever drafts it or runs beside it."""

import gc
import weakref

import pytest
import torch
from families import cheat, make_draft, make_target, needs_assistant
from pictures import FAMILIES_WITH_PICTURES, IMAGE, make_picture_target, picture_prompts

import dflash
from dflash.session import Session

NEW = 24
SHAPES = [(3, 4, 4), (9, 8, 6)]


def own(target, ids, mask, pictures):
    output = target.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **pictures)
    return output[:, ids.shape[1] :]


@pytest.fixture(scope="module")
def qwen():
    target = make_picture_target("qwen3_vl")
    return target, make_draft(target)


@pytest.mark.parametrize("family", FAMILIES_WITH_PICTURES)
def test_greedy_equals_generate_in_ragged_batches(family):
    target = make_picture_target(family)
    ids, mask, pictures = picture_prompts(family, SHAPES)
    expected = own(target, ids, mask, pictures)
    prompts = [row[live.bool()] for row, live in zip(ids, mask, strict=True)]
    for block_size in (7, 16):
        generator = cheat(target, make_draft(target), prompts, expected, spoil=5, block_size=block_size)
        output = generator.generate(
            ids, attention_mask=mask, pictures=pictures, max_new_tokens=NEW, return_dict_in_generate=True
        )
        assert output.sequences[:, ids.shape[1] :].tolist() == expected.tolist()
        assert output.statistics.acceptance_length > 2
    others = pictures | {"pixel_values": -pictures["pixel_values"]}
    answer = dflash.generate(target, None, ids, attention_mask=mask, pictures=others, max_new_tokens=NEW)
    assert answer[:, ids.shape[1] :].tolist() == own(target, ids, mask, others).tolist()
    assert answer[:, ids.shape[1] :].tolist() != expected.tolist()


@pytest.mark.parametrize("family", FAMILIES_WITH_PICTURES)
def test_the_drafter_sees_the_features_of_the_whole_prompt(family):
    target = make_picture_target(family)
    draft = make_draft(target)
    ids, mask, pictures = picture_prompts(family, SHAPES)
    with torch.no_grad():
        hidden = target(ids, attention_mask=mask, output_hidden_states=True, **pictures).hidden_states
    taken = []
    inner = draft.fuse
    draft.fuse = lambda features, *rest: taken.append(features) or inner(features, *rest)
    generator = dflash.Generator(target, draft, max_length=128, batch_size=2)
    generator.generate(ids, attention_mask=mask, pictures=pictures, max_new_tokens=1)
    layers = torch.cat([hidden[index + 1] for index in draft.config.target_layer_ids], -1)
    for got, wanted, live in zip(taken[0], layers, mask.bool(), strict=True):
        torch.testing.assert_close(got[: int(live.sum())], wanted[live], rtol=1e-4, atol=1e-4)


def test_trees_and_sampling_write_the_same_text(qwen):
    target, draft = qwen
    ids, mask, pictures = picture_prompts("qwen3_vl", SHAPES)
    given = {"attention_mask": mask, "pictures": pictures, "max_new_tokens": NEW}
    expected = own(target, ids, mask, pictures).tolist()
    assert dflash.generate(target, draft, ids, tree=16, **given)[:, ids.shape[1] :].tolist() == expected
    sampled = [dflash.generate(target, d, ids, temperature=0.9, seed=3, **given).tolist() for d in (draft, None)]
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_what_a_prompt_with_pictures_leaves_is_not_reused(family):
    target = make_picture_target(family)
    generator = dflash.Generator(target, make_draft(target), max_length=160, reuse_prefix=True)
    ids, mask, pictures = picture_prompts(family, SHAPES[1:])
    others = pictures | {"pixel_values": -pictures["pixel_values"]}
    for given in (pictures, others, pictures):
        answer = generator.generate(ids, pictures=given, max_new_tokens=NEW)
        assert answer[:, ids.shape[1] :].tolist() == own(target, ids, mask, given).tolist()
    text = generator.generate(ids[:, :9], max_new_tokens=NEW)
    assert text[:, 9:].tolist() == own(target, ids[:, :9], mask[:, :9], {}).tolist()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_requests_with_pictures_run_beside_others(family):
    target = make_picture_target(family)
    session = Session(dflash.Generator(target, make_draft(target), max_length=160, batch_size=2, prefill_chunk=16))
    ids, mask, pictures = picture_prompts(family, SHAPES[1:])
    others = pictures | {"pixel_values": -pictures["pixel_values"]}
    waiting, answers, wanted = [pictures, {}, others, pictures], {}, []
    for given in waiting:
        wanted.append(
            own(target, ids, mask, given)[0].tolist() if given else own(target, ids[:, :9], mask[:, :9], {})[0].tolist()
        )
    begun, running = 0, {}
    while begun < len(waiting) or running:
        while session.idle and begun < len(waiting):
            given = waiting[begun]
            call = session.resolve(ids if given else ids[:, :9], max_new_tokens=NEW, pictures=given or None)
            running[session.admit(call)] = begun
            begun += 1
        for row, event, error in session.step():
            assert not error
            answers.setdefault(running[row], []).extend(event.ids[0])
            if event.finish_reasons[0]:
                session.retire(row)
                del running[row]
    assert [answers[index] for index in range(len(waiting))] == wanted


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_receipt_names_the_pictures_and_is_checked_with_them(family, tmp_path):
    target = make_picture_target(family)
    ids, mask, pictures = picture_prompts(family, SHAPES)
    given = {"attention_mask": mask, "pictures": pictures, "temperature": 0.8, "max_new_tokens": NEW}
    recorder = dflash.Recorder(target, ids, **given)
    output = dflash.generate(target, make_draft(target), ids, return_dict_in_generate=True, **recorder.arguments)
    recorder.receipt(output).write(tmp_path / "receipt.json")
    receipt = dflash.Receipt.read(tmp_path / "receipt.json")
    assert receipt.pictures.keys() == pictures.keys()
    assert dflash.verify(receipt, target, pictures=pictures).follows
    for others in (None, pictures | {"pixel_values": -pictures["pixel_values"]}):
        with pytest.raises(ValueError, match=r"names pictures, pixel_values, .* pass pictures="):
            dflash.verify(receipt, target, pictures=others)


def test_columns_that_are_padding_in_every_row_change_nothing(qwen):
    target, draft = qwen
    ids, mask, pictures = picture_prompts("qwen3_vl", SHAPES)
    wide = [torch.nn.functional.pad(x, (3, 0)) for x in (ids, mask, pictures["mm_token_type_ids"])]
    given = {"attention_mask": wide[1], "pictures": pictures | {"mm_token_type_ids": wide[2]}, "max_new_tokens": NEW}
    answer = dflash.generate(target, draft, wide[0], **given)
    assert answer[:, wide[0].shape[1] :].tolist() == own(target, ids, mask, pictures).tolist()
    with pytest.raises(ValueError, match="needs one row without padding"):
        dflash.Recorder(target, wide[0], **given)


def test_a_request_whose_pictures_do_not_fit_fails_alone(qwen):
    target, draft = qwen
    session = Session(dflash.Generator(target, draft, max_length=160, batch_size=2, prefill_chunk=16))
    ids, mask, pictures = picture_prompts("qwen3_vl", SHAPES[1:])
    text = session.admit(session.resolve(ids[:, :9], max_new_tokens=NEW))
    one_less = ids.masked_fill((ids == IMAGE).cumsum(1).eq(1) & (ids == IMAGE), 20)
    spoiled = session.admit(session.resolve(one_less, max_new_tokens=NEW, pictures=pictures))
    new, errors = [], {}
    while session.is_busy:
        for row, event, error in session.step():
            new += event.ids[0] if row == text else []
            errors |= {row: error} if error else {}
    assert new == own(target, ids[:, :9], mask[:, :9], {})[0].tolist()
    assert errors.keys() == {spoiled}
    assert "cannot run these pictures" in errors[spoiled]
    session.retire(spoiled)
    again = session.admit(session.resolve(ids, max_new_tokens=NEW, pictures=pictures))
    new = []
    while session.is_busy:
        new += [token for row, event, _ in session.step() if row == again for token in event.ids[0]]
    assert new == own(target, ids, mask, pictures)[0].tolist()
    with pytest.raises(ValueError, match="cannot run these pictures"):
        dflash.generate(target, draft, one_less, pictures=pictures)


def test_pictures_are_let_go_after_the_prompt(qwen):
    target, draft = qwen
    generator = dflash.Generator(target, draft, max_length=160)
    ids, _, pictures = picture_prompts("qwen3_vl", SHAPES[1:])
    kept = weakref.ref(pictures["pixel_values"])
    generator.generate(ids, pictures=pictures, max_new_tokens=4)
    del pictures
    gc.collect()
    assert kept() is None


def test_what_cannot_be_run_is_refused_before_it_is(qwen):
    target, draft = qwen
    ids, mask, pictures = picture_prompts("qwen3_vl", SHAPES)

    def refused(message, error=ValueError, target=target, draft=draft, **changes):
        given = {"attention_mask": mask, "pictures": pictures, "max_new_tokens": 2} | changes
        with pytest.raises(error, match=message):
            dflash.generate(target, draft, ids, **given)

    refused("must be padded on the left", attention_mask=mask.flip(1))
    refused("cannot be combined with prompt_logprobs=True", logprobs=1, prompt_logprobs=True)
    refused("cannot be combined with num_return_sequences=2", num_return_sequences=2, temperature=1.0)
    refused("must not hold input_ids", pictures={"input_ids": ids})
    refused("takes pixel_values, .* and no num_beams", pictures=pictures | {"num_beams": mask})
    refused("must map names of tensors to tensors", TypeError, pictures=pictures["pixel_values"])
    refused("the prompt would run in other weights", weights="int8")
    refused("Qwen3ForCausalLM has no vision tower", target=make_target("qwen3"), draft=None)
    with pytest.raises(ValueError, match="has no vision tower"):  # before anything is asked of the stream
        dflash.stream(make_target("qwen3"), None, ids, attention_mask=mask, pictures=pictures)
    assert dflash.generate(make_target("qwen3"), None, ids, pictures={}, max_new_tokens=1).shape[1] == ids.shape[1] + 1


@needs_assistant
@pytest.mark.parametrize("family", [name for name in FAMILIES_WITH_PICTURES if name != "qwen3_5"])  # it refuses these
def test_transformers_own_loop_takes_the_drafter(family):
    target = make_picture_target(family)
    ids, mask, pictures = picture_prompts(family, SHAPES[1:])
    assistant = dflash.as_assistant(make_draft(target))
    call = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": assistant, "speculation_type": "dflash"}
    output = target.generate(ids, attention_mask=mask, **call, **pictures)
    assert output[:, ids.shape[1] :].tolist() == own(target, ids, mask, pictures).tolist()

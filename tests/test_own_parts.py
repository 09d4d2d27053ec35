"""Test drafters that bring parts which others share with the target: head, embedding, mask embedding, vocabulary."""

import copy
import os

import pytest
import torch
from baseline import prompt
from draft_variants import KNOWN, OFFSETS, own, reduced, save_drafter
from families import VOCAB, draft_config, make_target
from safetensors.torch import load_file

import dflash
from dflash_tools.train.export import export
from dflash_tools.train.model import TrainableDrafter


@pytest.fixture
def save(tmp_path, target):
    """Return a function that saves a drafter with more tensors and other keys."""

    def save(tensors=None, name="draft", **changes):
        return save_drafter(tmp_path / name, draft_config(target) | changes, tensors)

    return save


def answers(target, draft, **options) -> torch.Tensor:
    return dflash.generate(target, draft, prompt(9)[None], max_new_tokens=20, **options)


def test_an_own_head_and_an_own_embedding_are_used(target, save):
    head, table = own(VOCAB, 64), own(VOCAB, 64, seed=8)
    draft = dflash.load_draft(save({"lm_head.weight": head, "embed_tokens.weight": table}))
    tokens, hidden = (torch.tensor([[5]]), torch.tensor([0])), own(3, 64, seed=9)
    embeds, *_ = draft.embed_block(*tokens, 2, target.get_input_embeddings().weight)
    assert torch.equal(embeds, table[torch.tensor([[5, 1, 1]])])
    torch.testing.assert_close(draft.logits(hidden, target.lm_head), hidden @ head.T)
    assert torch.equal(answers(target, draft), answers(target, None))
    assert torch.equal(draft.lm_head.weight, head), "the target's head differs, so this one stays"


def test_parts_that_equal_the_targets_are_its_tensors(target, save):
    theirs = {"lm_head.weight": target.lm_head.weight, "embed_tokens.weight": target.model.embed_tokens.weight}
    draft = dflash.load_draft(save({name: tensor.detach().clone() for name, tensor in theirs.items()}))
    shared = dflash.load_draft(save(name="shared"))
    drafted = []
    for each in (draft, shared):
        generator = dflash.Generator(target, each, max_length=40)
        generator.generate(prompt(9)[None], max_new_tokens=20)
        drafted.append(generator.state.block)
    assert torch.equal(*drafted)
    for name, tensor in theirs.items():
        assert draft.get_parameter(name).data_ptr() == tensor.data_ptr()


def test_a_target_that_was_made_in_inference_mode_keeps_its_tensors_to_itself(save):
    with torch.inference_mode():
        theirs = make_target("qwen3")
    draft = dflash.load_draft(save({"lm_head.weight": theirs.lm_head.weight.clone()}))
    assert torch.equal(answers(theirs, draft), answers(theirs, None))
    assert draft.lm_head.weight.data_ptr() != theirs.lm_head.weight.data_ptr()
    draft.load_state_dict(draft.state_dict() | {"lm_head.weight": own(VOCAB, 64)})


def test_new_weights_for_a_shared_part_leave_the_target_as_it_was(target, save):
    before = target.lm_head.weight.detach().clone()
    draft = dflash.load_draft(save({"lm_head.weight": before.clone()}))
    dflash.Generator(target, draft, max_length=40)
    assert draft.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    draft.load_state_dict(draft.state_dict() | {"lm_head.weight": own(VOCAB, 64)})
    assert torch.equal(draft.lm_head.weight, own(VOCAB, 64))
    assert torch.equal(target.lm_head.weight, before)


def test_a_drafter_is_copied_with_its_own_parts(save):
    tensors = reduced() | {"embed_tokens.weight": own(VOCAB, 64, seed=8), "mask_embedding": own(64)}
    draft = dflash.load_draft(save(tensors, draft_vocab_size=len(KNOWN)))
    assert draft.config.own_parts == ("embed_tokens", "lm_head", "mask_embedding")
    for other in (copy.deepcopy(draft), dflash.load_draft(draft, dtype=torch.bfloat16)):
        assert other.config == draft.config
        for name, tensor in tensors.items():
            assert torch.equal(other.state_dict()[name], tensor.to(other.state_dict()[name].dtype))
        assert torch.equal(other.d2t, OFFSETS)


@pytest.mark.parametrize("layout", ["published", "speculators"])
def test_own_parts_are_exported(save, tmp_path, layout):
    tensors = reduced() | {"embed_tokens.weight": own(VOCAB, 64, seed=8)}
    draft = dflash.load_draft(folder := save(tensors, draft_vocab_size=len(KNOWN)))
    export(folder, tmp_path / "out", layout, target="owner/target")
    again = dflash.load_draft(tmp_path / "out")
    assert again.config == draft.config
    assert {name: tensor.tolist() for name, tensor in again.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in draft.state_dict().items()
    }
    assert load_file(tmp_path / "out" / "model.safetensors")["d2t"].dtype == torch.int64


def test_a_mask_embedding_is_exported_as_the_file_that_engines_read(save, tmp_path):
    folder = save({"mask_embedding": own(64)})
    export(folder, tmp_path / "out", "published")
    stored = torch.load(tmp_path / "out" / "mask_embedding.pt", weights_only=True)
    assert stored["mask_token_id"] == 1
    assert torch.equal(stored["embedding"], own(64))
    assert torch.equal(dflash.load_draft(tmp_path / "out").mask_embedding, own(64))
    with pytest.raises(ValueError, match="the speculators layout cannot have a mask embedding"):
        export(folder, tmp_path / "other", "speculators", target="owner/target")


SELECTOR = {"mask_token_id": 1, "target_layer_ids": [1, 3], "conv_kernel_size": 2, "conv_group_size": 16}
SELECTOR |= {"selector_rank": 8, "selector_top_k": 12}  # more than there are tokens


@pytest.mark.parametrize("changes", [{}, {"architectures": None, "dflash_config": SELECTOR}], ids=["", "selector"])
@pytest.mark.parametrize("call", [{}, {"temperature": 1.0, "seed": 3, "suppress_tokens": [5, 8]}], ids=str)
def test_a_reduced_vocabulary_drafts_its_tokens_only(target, save, changes, call):
    draft = dflash.load_draft(save(reduced(), draft_vocab_size=len(KNOWN), **changes))
    generator = dflash.Generator(target, draft, max_length=40, block_size=6)
    ids = generator.generate(prompt(9)[None], max_new_tokens=20, **call)
    drafted = set(generator.state.block[:, 1:].unique().tolist())
    assert drafted <= set(KNOWN.tolist()) - set(call.get("suppress_tokens", []))
    assert torch.equal(ids, answers(target, None, **call))


@pytest.mark.parametrize("stated", [{}, {"draft_vocab_size": VOCAB}])
def test_a_token_map_of_the_whole_vocabulary_gives_the_order_of_the_heads_rows(save, tmp_path, stated):
    head, hidden, tokens = own(VOCAB, 64), own(2, 64, seed=9), torch.arange(VOCAB)
    for name, order in (("same", tokens), ("other", tokens.flip(0))):
        folder = save({"lm_head.weight": head[order], "d2t": order - tokens}, name, **stated)
        export(folder, tmp_path / "out" / name, "speculators", target="owner/target")
        for each in (folder, tmp_path / "out" / name):
            torch.testing.assert_close(dflash.load_draft(each).logits(hidden, None), hidden @ head.T)


def test_a_reduced_head_is_scattered_after_multiplier_and_softcap(save):
    draft = dflash.load_draft(
        save(reduced(), draft_vocab_size=len(KNOWN), output_multiplier=0.5, final_logit_softcapping=3.0)
    )
    hidden = own(2, 64, seed=9)
    logits = draft.logits(hidden, None)
    expected = torch.tanh(hidden @ reduced()["lm_head.weight"].T * 0.5 / 3) * 3
    assert logits.shape == (2, VOCAB)
    torch.testing.assert_close(logits[:, KNOWN], expected)
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, KNOWN, False)
    assert logits[:, others].eq(-torch.inf).all()


@pytest.mark.parametrize("stored", ["tensor", "file", "dict"])
def test_a_mask_embedding_replaces_the_row_of_the_mask(target, save, stored):
    mask = own(64)
    folder = save({"mask_embedding": mask} if stored == "tensor" else None, input_embedding_scale=2.0)
    if stored != "tensor":
        content = mask[None] if stored == "file" else {"embedding": mask, "mask_token_id": 1}
        torch.save(content, folder / "mask_embedding.pt")
    draft, table = dflash.load_draft(folder), target.get_input_embeddings().weight.detach().clone()
    ids = torch.tensor([[5, 1, 7, 1]])
    embeds, *_ = draft.embed_block(ids, torch.tensor([0]), 3, table, ids[:, 1:])
    table[1] = mask
    assert torch.equal(embeds, table[ids] * 2)
    assert torch.equal(answers(target, draft), answers(target, None))


@pytest.mark.parametrize(("content", "message"), [
    (torch.zeros(32), r"mask_embedding.pt: the mask embedding must have hidden_size = 64 values, got \[32\]"),
    ({"embedding": torch.zeros(64), "mask_token_id": 4}, "its mask_token_id is 4, and the config's is 1"),
    ({"other": torch.zeros(64)}, "must hold a floating tensor, or a dict with one under 'embedding'"),
    (b"not a file of torch", "mask_embedding.pt: cannot be read"),
    (2**40, "mask_embedding.pt: must have at most 16777216 bytes, got 1099511627776"),
])  # fmt: skip
def test_a_mask_embedding_of_another_drafter_is_refused(save, content, message):
    path = save() / "mask_embedding.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, int):
        path.touch()
        os.truncate(path, content)  # a file of that size which takes no room
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        dflash.load_draft(path.parent)


SMALL = {"draft_vocab_size": len(KNOWN)}


@pytest.mark.parametrize(("tensors", "changes", "message"), [
    ({"d2t": OFFSETS}, SMALL, "missing tensors: lm_head.weight .*draft_vocab_size 9"),
    ({"lm_head.weight": own(9, 64)}, SMALL, "missing tensors: d2t"),
    ({"d2t": OFFSETS}, {}, "unknown tensors: d2t .*draft_vocab_size None"),
    (reduced() | {"d2t": OFFSETS + 10}, SMALL, "a token below vocab_size 97, and it maps 8 to 99"),
    (reduced() | {"d2t": -torch.arange(9)}, SMALL, "to another token, and it maps some to the same"),
    (reduced() | {"d2t": OFFSETS.float()}, SMALL, "tensor d2t must be stored as torch.int64, got torch.float32"),
    (reduced() | {"d2t": OFFSETS[:5]}, SMALL, r"the config makes tensor d2t \[9\], got \[5\]"),
    ({"embed_tokens.weight": own(97, 32)}, {}, r"the config makes tensor embed_tokens.weight \[97, 64\]"),
    ({"lm_head.weight": own(97, 64)}, {"vocab_size": None}, "must state vocab_size, since .* own lm_head.weight"),
    ({}, {"has_lm_head": True}, "missing tensors: lm_head.weight"),
])  # fmt: skip
def test_parts_that_do_not_fit_are_refused(save, tensors, changes, message):
    with pytest.raises(ValueError, match=message):
        dflash.load_draft(save(tensors, **changes))


@pytest.mark.parametrize("stated", [VOCAB, VOCAB + 3])
def test_own_parts_of_another_vocabulary_do_not_fit_the_target(target, save, stated):
    draft = dflash.load_draft(save({"embed_tokens.weight": own(VOCAB, 64)}))
    wider = make_target("qwen3")
    wider.resize_token_embeddings(VOCAB + 3)
    wider.config.vocab_size = stated
    with pytest.raises(ValueError, match=r"its vocab_size is 97, the target's is 100"):
        answers(wider, draft)


@pytest.mark.parametrize("rows", [VOCAB + 3, VOCAB - 3])
@pytest.mark.parametrize("part", [{}, {"mask_embedding": own(64)}], ids=["none", "mask_embedding"])
def test_a_drafter_without_rows_for_tokens_runs_with_a_resized_target(save, rows, part):
    draft, resized = dflash.load_draft(save(part)), make_target("qwen3")
    resized.resize_token_embeddings(rows)
    with pytest.warns(UserWarning, match=f"vocab_size is 97, the target's is {rows}: it has no rows for tokens"):
        drafted = answers(resized, draft)
    assert torch.equal(drafted, answers(resized, None))


@pytest.mark.parametrize("part", ["lm_head.weight", "embed_tokens.weight", "mask_embedding"])
def test_what_shares_the_targets_parts_refuses_own_ones(save, tmp_path, part):
    draft = dflash.load_draft(save({part: own(64) if part == "mask_embedding" else own(VOCAB, 64)}))
    with pytest.raises(ValueError, match=f"own {part.partition('.')[0]}"):
        dflash.as_assistant(draft)
    if part != "lm_head.weight":  # a head stays as it is in training
        with pytest.raises(ValueError, match=f"own {part.partition('.')[0]}"):
            TrainableDrafter(draft)

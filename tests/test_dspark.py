"""Test DSpark drafters: an anchor's row that predicts, and a Markov head that links the block's tokens."""

import copy
import dataclasses
import json

import pytest
import torch
from baseline import prompt
from draft_variants import KNOWN, config_dict, dflash2_dict, dspark_dict, reduced, save_checkpoint, save_drafter
from families import SOME, VOCAB, dspark_config
from safetensors.torch import load_file

import dflash
from dflash import DraftConfig
from dflash.proposers import ChainProposer
from dflash_tools.train import published_config
from dflash_tools.train.export import export, vllm_command

CONFIDENCE = {"confidence_head.proj.weight": torch.ones(1, 72), "confidence_head.proj.bias": torch.zeros(1)}


def save(folder, *, head: bool = True, short: bool = False, **changes):
    parts = (CONFIDENCE if head else {}) | (reduced() if short else {})
    return save_drafter(folder, dspark_config(**changes) | (SOME if short else {}), parts)


def test_a_dspark_config_is_read_with_a_draft_per_row(recwarn):
    read = DraftConfig.from_config(dspark_dict())
    assert (read.block_size, read.rows_per_pass, read.predicts_from_anchor, read.markov_rank) == (8, 7, True, 8)
    assert read.causal == (False,) * 3
    assert not recwarn.list
    plain = DraftConfig.from_config(dspark_dict(sample_from_anchor=False, markov_rank=0))
    assert (plain.block_size, plain.rows_per_pass, plain.predicts_from_anchor, plain.markov_rank) == (7, 7, False, 0)


@pytest.mark.parametrize(("written", "message"), [
    (dspark_dict(markov_head_type="gated"), "markov_head_type must be vanilla, got 'gated': other heads are not"),
    (dspark_dict(vocab_size=None), "vocab_size is missing: a Markov head has that many rows"),
    (dflash2_dict(markov_rank=8), "markov_rank must be 0 in a DFlash 2 drafter, whose tokens a selector links"),
    (config_dict(markov_rank=8), "sample_from_anchor must say whether the anchor's row predicts too"),
])  # fmt: skip
def test_a_dspark_config_that_is_not_supported_is_refused_by_name(written, message):
    with pytest.raises(ValueError, match=message):
        DraftConfig.from_config(written)


@pytest.mark.parametrize("rename", [
    lambda name: f"logit_head.{name}" if name.startswith(("markov", "confidence")) else name,
    lambda name: name.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj"),
], ids=["SpecForge, old files", "Model-Optimizer"])  # fmt: skip
def test_other_names_of_the_heads_tensors(tmp_path, rename):
    draft, tensors = dflash.load_draft(save(tmp_path)), load_file(tmp_path / "model.safetensors")
    save_checkpoint(tmp_path, dspark_config(), {rename(name): tensor for name, tensor in tensors.items()})
    again = dflash.load_draft(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in draft.state_dict().items())


def test_rows_for_interleaved_rope_are_reordered_and_norms_get_their_one(tmp_path):
    """Keys in the cache are those of a rotation of neighbors, written here with complex numbers."""
    folder = save(tmp_path / "draft", rope_is_neox_style=False, use_gemma_norm=True)
    draft, stored = dflash.load_draft(folder), load_file(folder / "model.safetensors")
    features, cache = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0)), draft.new_cache(1, 16)
    draft.inject_(features, torch.arange(7)[None], cache)
    keys = torch.nn.functional.linear(features[0], stored["layers.1.self_attn.k_proj.weight"]).unflatten(1, (2, 16))
    weight = 1 + stored["layers.1.self_attn.k_norm.weight"]
    keys = torch.nn.functional.rms_norm(keys, (16,), weight, draft.config.rms_norm_eps)
    angles = torch.arange(7)[:, None] * draft.config.rope.inverse_frequencies(16)
    turned = torch.view_as_complex(keys.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat([turned.real, turned.imag], -1).transpose(0, 1)
    torch.testing.assert_close(cache.keys[1][0, :, :7], expected, rtol=1e-4, atol=1e-5)
    export(folder, tmp_path / "out", "published")
    again = dflash.load_draft(tmp_path / "out")
    assert again.config == draft.config
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in draft.state_dict().items())


@pytest.fixture
def watched(monkeypatch):
    """Return a list to which each pass adds logits for every draft, computed here, and how and where they are drawn."""
    seen, predict = [], ChainProposer.predict

    def watch(self, block, features, state):
        draft = self.draft
        hidden = draft(features, state.num_context, block.embeds, state.length, state.draft_cache)
        seen.append((draft.logits(hidden, self.target.draft_head), copy.deepcopy(state.sampling), state.length.clone()))
        return predict(self, block, features, state)

    monkeypatch.setattr(ChainProposer, "predict", watch)
    return seen


@pytest.mark.parametrize("short", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("call", [{}, {"temperature": 0.8, "seed": 3, "draft_sharpness": 1.0}], ids=["T=0", "T=0.8"])
def test_drafts_follow_the_head_over_the_whole_vocabulary(target, tmp_path, watched, monkeypatch, short, call):
    draft, blocks, propose = dflash.load_draft(save(tmp_path, short=short)), [], ChainProposer.propose

    def record(self, state):
        block = propose(self, state)
        blocks.append(block.ids.clone())
        return block

    monkeypatch.setattr(ChainProposer, "propose", record)
    dflash.Generator(target, draft, max_length=40).generate(prompt(9)[None], max_new_tokens=12, **call)
    w1, w2 = draft.markov_head.markov_w1.weight, torch.zeros(VOCAB, 8)
    w2[KNOWN if short else slice(None)] = draft.markov_head.markov_w2.weight
    for block, (logits, sampling, length) in zip(blocks, watched, strict=True):
        assert block.shape == (1, 8), "seven rows, seven drafts"
        for row in range(7):
            scores = logits[:, row] + w1[block[:, row]] @ w2.T
            positions = length[:, None] + 1 + row
            assert torch.equal(sampling.select(scores[:, None], positions, sampling.sharpness)[:, 0], block[:, row + 1])
    assert len(blocks) > 5
    assert not short or set(torch.cat(blocks)[:, 1:].unique().tolist()) <= set(KNOWN.tolist())


@pytest.mark.parametrize("rank", [8, 0])
def test_transformers_loop_is_refused_and_what_is_saved_reads_back(tmp_path, rank):
    draft = dflash.load_draft(save(tmp_path, markov_rank=rank))
    with pytest.raises(ValueError, match="got a DFlash 2 or DSpark drafter"):
        dflash.as_assistant(draft)
    assert DraftConfig.from_config(published_config(draft.config)) == draft.config


SPECFORGE = {"architectures": ["DSparkDraftModel"], "markov_rank": None}
SPECFORGE["dflash_config"] = {"markov_rank": 8, "projector_type": "dspark"}


@pytest.mark.parametrize("changes", [{}, {"sample_from_anchor": False}, {"markov_rank": 0}, SPECFORGE], ids=str)
def test_a_dspark_drafter_is_exported_and_read_back(tmp_path, changes):
    folder = save(tmp_path / "draft", short=True, **changes)
    export(folder, tmp_path / "speculators", "speculators", target="owner/target")
    export(folder if changes is SPECFORGE else tmp_path / "speculators", tmp_path / "published", "published")
    draft = dflash.load_draft(folder)
    written = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert written["speculators_model_type"] == "dspark"
    assert written["block_size"] == 7
    method = written["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == (6 if "sample_from_anchor" in changes else 7)
    assert '"method": "dspark"' in vllm_command("owner/target", "owner/draft", draft.config)
    published = json.loads((tmp_path / "published" / "config.json").read_text())
    assert published["architectures"] == ["Qwen3DSparkModel"], "the class that engines know"
    assert (published["markov_rank"], published["target_layer_ids"]) == (draft.config.markov_rank, [1, 3])
    assert published["sample_from_anchor"] == draft.config.predicts_from_anchor
    for other in ("speculators", "published"):
        again = dflash.load_draft(tmp_path / other)
        assert dataclasses.replace(again.config, num_target_layers=4) == draft.config
        stored = load_file(tmp_path / other / "model.safetensors")
        assert all(torch.equal(stored[name], tensor) for name, tensor in draft.state_dict().items())

"""Test drafters in the layout of transformers' own ``generate(speculation_type="dflash")``."""

import dataclasses
import json

import pytest
import torch
from baseline import prompt
from draft_variants import (
    DFLASH2_VARIANTS,
    LLAMA3,
    VARIANTS,
    YARN,
    config_dict,
    dspark_dict,
    random_tensors,
    save_checkpoint,
    sliding,
)
from families import make_target
from transformers import AutoModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import dflash
from dflash import DraftConfig
from dflash_tools.train.export import export

VOCAB, NEW = 5, 24
YARN_ONCE = YARN | {"original_max_position_embeddings": 16}
LLAMA3_ONCE = LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 32}

pytest.importorskip("transformers.models.muse_glimmer_assistant")


def checkpoint(folder, config):
    return save_checkpoint(folder, config, random_tensors(DraftConfig.from_config(config)))


def fitted(target, **changes) -> dict:
    """Return a drafter's config of the target's width."""
    text = target.config
    taps = {"mask_token_id": 1, "target_layer_ids": [0, text.num_hidden_layers - 1]}
    sizes = {"hidden_size": text.hidden_size, "vocab_size": VOCAB, "num_target_layers": text.num_hidden_layers}
    return config_dict(**{"dflash_config": taps, "block_size": 6, **sizes, **changes})


@pytest.mark.parametrize("changes", [
    {},
    {"rope_theta": None, "rope_parameters": LLAMA3_ONCE},
    {"rope_scaling": YARN_ONCE},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {**sliding("sf", 12), "is_causal": False},
    {**sliding("ss", 2), "is_causal": False, "block_size": 4},
], ids=["full", "llama3", "yarn", "linear", "windows", "smallest window"])  # fmt: skip
def test_transformers_runs_the_export_as_this_package_does(tmp_path, monkeypatch, changes):
    target = make_target("qwen3", vocab_size=VOCAB)
    ids = prompt(17, vocab=VOCAB)[None]
    export(checkpoint(tmp_path / "draft", fitted(target, **changes)), tmp_path / "out", "transformers")
    # 1. transformers: the logits of every block
    expected, candidates = [], DFlashTokenCandidateGenerator.get_candidates

    def recorded(self, *args, **kwargs):
        found = candidates(self, *args, **kwargs)
        expected.extend([] if found[1] is None else [found[1]])
        return found

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
    assistant = {"assistant_model": AutoModel.from_pretrained(tmp_path / "out"), "speculation_type": "dflash"}
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    theirs = target.generate(ids, **settings, **assistant)
    # 2. The same here
    seen, logits = [], dflash.Drafter.logits
    monkeypatch.setattr(dflash.Drafter, "logits", lambda *args: seen.append(logits(*args)) or seen[-1])
    generator = dflash.Generator(target, dflash.load_draft(tmp_path / "draft"), max_length=ids.shape[1] + NEW)
    ours = generator.generate(ids, max_new_tokens=NEW, temperature=0)
    # 3. The same text from the same drafts, so the same tokens are accepted
    assert torch.equal(ours, theirs[:, : ids.shape[1] + NEW])
    assert 4 < len(seen) < len(expected) + 2
    for block, reference in zip(seen, expected, strict=False):
        torch.testing.assert_close(block, reference[0], rtol=1e-4, atol=1e-4)


def test_the_export_reads_back(tmp_path):
    draft = dflash.load_draft(checkpoint(tmp_path / "draft", config_dict(**sliding("sf", 12), is_causal=False)))
    export(tmp_path / "draft", tmp_path / "out", "transformers")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["sliding_window"], config["target_layer_ids"]) == (11, [1, 9, 17, 25, 33])
    back = dflash.load_draft(tmp_path / "out")
    unsaid = {"vocab_size": None, "num_target_layers": None, "scales_like_target": True}
    assert back.config == dataclasses.replace(draft.config, **unsaid)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)


@pytest.mark.parametrize(("config", "message"), [
    (DFLASH2_VARIANTS["DFlash2"], "cannot have the parts of DFlash 2"),
    (dspark_dict(), r"cannot have drafts from the anchor's row \(DSpark\)"),
    (config_dict(attention_bias=True), r"cannot have biases \(attention_bias\)"),
    (config_dict(attention_value_scale=0.5), "cannot have attention_value_scale 0.5"),
    (config_dict(final_logit_softcapping=30.0), "cannot have final_logit_softcapping"),
    (VARIANTS["Qwen3.6-27B"], r"cannot have causal layers \(\[True, True, False\]\)"),
    (config_dict(**sliding("ss", 1), is_causal=False), "cannot have a window of 1"),
])  # fmt: skip
def test_what_transformers_cannot_express_is_refused_by_name(tmp_path, config, message):
    checkpoint(tmp_path / "draft", config)
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "draft", tmp_path / "out", "transformers")
    assert not (tmp_path / "out").exists()


def test_parts_of_a_drafters_own_are_refused(tmp_path):
    config = config_dict()
    tensors = random_tensors(DraftConfig.from_config(config)) | {"lm_head.weight": torch.zeros(101, 64)}
    save_checkpoint(tmp_path / "draft", config, tensors)
    with pytest.raises(ValueError, match="cannot have its own lm_head"):
        export(tmp_path / "draft", tmp_path / "out", "transformers")
    assert not (tmp_path / "out").exists()

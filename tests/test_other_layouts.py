"""Test drafters in the layouts of other libraries: Muse Glimmer's assistant, NeMo AutoModel."""

import pytest
import torch
import transformers
from baseline import prompt
from draft_variants import config_dict, random_tensors, save_checkpoint
from families import make_target
from safetensors.torch import load_file

import dflash
from dflash import DraftConfig
from dflash.proposers import ChainProposer
from dflash_tools.train.export import export
from dflash_tools.train.model import TrainableDrafter

MUSE = {
    "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "hidden_size": 64,
    "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "sliding_window": 12, "block_size": 5, "mask_token_id": 1, "target_layer_ids": [1, 3],
}  # fmt: skip


def save_muse(folder):
    tensors = random_tensors(DraftConfig.from_config(MUSE))
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return save_checkpoint(folder, MUSE, {names.get(name, name): tensor for name, tensor in tensors.items()})


def test_a_muse_assistant_is_read_with_its_own_defaults(recwarn):
    config = DraftConfig.from_config(MUSE)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (5, 1, (1, 3))
    assert (config.causal, config.window) == ((False,) * 3, (13,) * 3)
    assert (config.vocab_size, config.rms_norm_eps, config.rope.theta) == (None, 1e-5, 500000.0)
    assert config.scales_like_target
    assert not recwarn.list


def test_a_muse_assistant_saved_by_transformers_gives_the_same_hidden_states(tmp_path):
    assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    theirs = assistant.MuseGlimmerAssistantModel._from_config(
        assistant.MuseGlimmerAssistantConfig(**MUSE), attn_implementation="eager"
    ).eval()
    theirs.load_state_dict(load_file(save_muse(tmp_path / "ours") / "model.safetensors"))
    theirs.save_pretrained(tmp_path / "theirs")
    draft = dflash.load_draft(tmp_path / "theirs")
    generator = torch.Generator().manual_seed(0)
    context, block = (torch.randn(1, rows, size, generator=generator) for rows, size in ((20, 128), (5, 64)))
    kept = transformers.cache_utils.DFlashCache(config=theirs.config)
    kept.activate_past_recording()
    kept.set_previous_accepted_tokens(20)
    with torch.no_grad():
        expected = theirs(noise_embeds=block, context_hidden_states=context, past_key_values=kept).last_hidden_state
    cache, length, none = draft.new_cache(1, 32), torch.tensor([20]), torch.tensor([0])
    features = draft.fuse(context, length)
    draft.inject_(features, torch.arange(20)[None], cache)
    hidden = draft(features[:, :0], none, block, length, cache)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


def test_a_muse_assistants_logits_are_scaled_as_the_targets(tmp_path, monkeypatch):
    target, draft = make_target("qwen3"), dflash.load_draft(save_muse(tmp_path))
    seen, predict = [], ChainProposer.predict
    monkeypatch.setattr(ChainProposer, "predict", lambda *args: seen.append(predict(*args)) or seen[-1])
    for multiplier, cap in ((None, None), (0.2, 2.0)):
        target.config.output_multiplier, target.config.final_logit_softcapping = multiplier, cap
        dflash.Generator(target, draft, max_length=40).generate(prompt(9)[None], max_new_tokens=2)
    torch.testing.assert_close(seen[-1].logits, torch.tanh(seen[0].logits * 0.2 / 2) * 2)


def test_a_muse_assistant_is_neither_trained_nor_exported(tmp_path):
    folder = save_muse(tmp_path / "draft")
    with pytest.raises(ValueError, match="Muse Glimmer assistant cannot be trained"):
        TrainableDrafter(dflash.load_draft(folder))
    with pytest.raises(ValueError, match="Muse Glimmer assistant cannot be exported"):
        export(folder, tmp_path / "out", "published")


@pytest.mark.parametrize("name", ["DFlashDraftModel", "Qwen3DFlashDraftModel"])
def test_a_plain_drafter_goes_by_either_class_name(name):
    assert DraftConfig.from_config(config_dict(architectures=[name])) == DraftConfig.from_config(config_dict())

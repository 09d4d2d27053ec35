"""Test DFlash 2 drafters: their config, their tensors, and what they share with the first generation."""

import pytest
import torch
from draft_variants import (
    config_dict,
    dflash2_dict,
    random_tensors,
    save_checkpoint,
)

from dflash import DraftConfig, load_draft
from dflash.drafter import DFlash2Config

KEYS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5}


@pytest.mark.parametrize("architecture", ["DFlash2DraftModel", "Qwen3DFlash2DraftModel"])
def test_a_dflash_2_config_is_recognized_at_either_level(architecture):
    expected = DFlash2Config(2, 16, 8, 5)
    assert DraftConfig.from_config(dflash2_dict(architectures=[architecture])).dflash2 == expected
    section = {"mask_token_id": 100, "target_layer_ids": [1, 9]}
    top = config_dict(architectures=[architecture], dflash_config=section, **KEYS)
    assert DraftConfig.from_config(top).dflash2 == expected
    assert DraftConfig.from_config(config_dict(architectures=None, dflash_config=section | KEYS)).dflash2 == expected
    assert DraftConfig.from_config(config_dict()).dflash2 is None


@pytest.mark.parametrize(("section", "changes", "message"), [
    *(({key: None}, {}, f"DFlash 2 drafter states .*, and {key} is missing") for key in KEYS),
    ({"conv_kernel_size": 0}, {}, "conv_kernel_size must be an integer >= 1, got 0"),
    ({"conv_kernel_size": 2.0}, {}, "conv_kernel_size must be an integer >= 0, got 2.0"),
    ({"conv_group_size": 48}, {}, "conv_group_size must divide hidden_size 64, got 48"),
    ({"selector_top_k": 102}, {}, "selector_top_k must be at most vocab_size 101, got 102"),
    ({"selector_top_k": 129}, {"vocab_size": 1000}, "selector_top_k must be at most 128, got 129"),
    ({}, {"vocab_size": None}, "vocab_size is missing: a DFlash 2 drafter's codebooks have that many rows"),
])  # fmt: skip
def test_what_a_dflash_2_config_gets_wrong_is_named(section, changes, message):
    config = dflash2_dict(**changes)
    config["dflash_config"] = {k: v for k, v in (config["dflash_config"] | section).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        DraftConfig.from_config(config)


@pytest.fixture
def tensors():
    return random_tensors(DraftConfig.from_config(dflash2_dict()))


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_codebooks_load_under_both_names(suffix, tensors, tmp_path):
    renamed = {name + suffix if name.endswith("codebook") else name: tensor for name, tensor in tensors.items()}
    state = load_draft(save_checkpoint(tmp_path, dflash2_dict(), renamed)).state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)


def test_a_codebook_under_both_names_is_refused(tensors, tmp_path):
    name = "candidate_selector.predecessor_codebook"
    save_checkpoint(tmp_path, dflash2_dict(), tensors | {f"{name}.weight": tensors[name].clone()})
    with pytest.raises(ValueError, match=f"tensors {name} and {name}.weight both hold {name}"):
        load_draft(tmp_path)

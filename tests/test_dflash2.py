"""Test DFlash 2 drafters: their config, their tensors, and what they share with the first generation."""

import pytest
import torch
from draft_variants import (
    DFLASH2_VARIANTS,
    config_dict,
    dflash2_dict,
    identity_dflash2,
    random_tensors,
    save_checkpoint,
)
from test_drafter import inputs, two_passes

from dflash import DraftConfig, Drafter, load_draft
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DFLASH2_VARIANTS)
def test_identity_convolutions_give_the_bits_of_a_first_generation_drafter(name, dtype):
    config = DFLASH2_VARIANTS[name]
    tensors = identity_dflash2(random_tensors(DraftConfig.from_config(config)))
    section = {key: value for key, value in config["dflash_config"].items() if key not in KEYS}
    first = Drafter(DraftConfig.from_config(config | {"architectures": None, "dflash_config": section}))
    first.load_state_dict({k: v for k, v in tensors.items() if "_conv" not in k and "selector" not in k})
    second = Drafter(DraftConfig.from_config(config))
    second.load_state_dict(tensors)
    context, block = inputs(first.config, 2, dtype=dtype)
    passes = [two_passes(draft.to(dtype), context, block, [17, 3], [3, 1])[:2] for draft in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*passes, strict=True))

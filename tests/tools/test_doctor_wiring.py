"""Test what the doctor tries: a drafter under another config, and the line that repairs a config."""

import dataclasses

import pytest
import torch
from draft_variants import DFLASH2_VARIANTS, VARIANTS, config_dict, random_drafter
from families import VOCAB
from tiny_tokenizers import byte_level

from dflash.drafter import DraftConfig, Drafter
from dflash.drafter.config import Rope
from dflash_tools.doctor import Wiring
from dflash_tools.doctor.diagnosis import check_positions
from dflash_tools.doctor.wiring import Facts, variants

CHANGES = {
    "causal": {"causal": (True,) * 2},
    "window": {"window": (3,) * 2},
    "RoPE": {"rope": Rope(theta=77.0)},
    "scaled RoPE": {"rope": Rope("linear", 1e4, 8.0)},
    "taps": {"target_layer_ids": (9, 1)},
    "scales": {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0},
}


def drafts(drafter: Drafter) -> torch.Tensor:
    """Return the logits of a block of four after a context of six."""
    generator = torch.Generator().manual_seed(3)
    taps = len(drafter.config.target_layer_ids)
    context, table = (torch.randn(shape, generator=generator) for shape in ((1, 6, taps * 64), (101, 64)))
    cache = drafter.new_cache(1, 12)
    features, length = drafter.fuse(context, torch.tensor([6])), torch.tensor([6])
    drafter.inject_(features, torch.arange(6)[None], cache)
    embeds, *_ = drafter.embed_block(torch.tensor([[7]]), torch.tensor([0]), 3, table, torch.full((1, 3), 100))
    hidden = drafter(features[:, :0], torch.tensor([0]), embeds, length, cache)
    return drafter.logits(hidden, lambda rows: rows @ table.T)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["is_causal-false-with-window", "DFlash2"])
def test_a_rewired_drafter_drafts_as_one_made_with_that_config(name, change):
    drafter = random_drafter((VARIANTS | DFLASH2_VARIANTS)[name])
    config = dataclasses.replace(drafter.config, **CHANGES[change])
    made = Drafter(config)
    made.load_state_dict(drafter.state_dict())
    before, logits = drafter.config, drafts(drafter)
    other = drafter.rewired(config)
    assert torch.equal(drafts(other), drafts(made))
    if change != "taps":  # which only the target's states show
        assert not torch.equal(drafts(other), logits)
    assert torch.equal(drafts(drafter), logits), "the drafter itself stays as it is"
    assert drafter.config is before


def test_a_rewired_drafter_keeps_its_own_parts():
    config = DraftConfig.from_config(config_dict(dflash_config={"mask_token_id": 100, "target_layer_ids": [1, 9]}))
    drafter = Drafter(dataclasses.replace(config, own_parts=("embed_tokens", "lm_head")))
    drafter.load_state_dict({name: torch.randn_like(tensor) for name, tensor in drafter.state_dict().items()})
    other = drafter.rewired(config)  # a config.json need not list them
    assert other.config.own_parts == ("embed_tokens", "lm_head")
    assert torch.equal(drafts(other), drafts(drafter))


# ---------------------------------------------------------------------------------------------- lines of a config

SLIDES = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}


KINDS = ("dflash", "dflash2", "dspark")


def speculators_config(kind: str = "dflash", **changes) -> dict:
    layer = {
        **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"head_dim": 32, "vocab_size": VOCAB, "num_key_value_heads": 1, **SLIDES},
    }
    config = {"speculators_model_type": kind, "aux_hidden_state_layer_ids": [2, 3], "mask_token_id": 4}
    return {**config, "sliding_window_non_causal": False, "transformer_layer_config": layer, **changes}


def written(config: dict, line: dict) -> DraftConfig:
    """Return what is read after a line was written into a config."""
    layer = config["transformer_layer_config"] | line.get("transformer_layer_config", {})
    return DraftConfig.from_config({**config, **line, "transformer_layer_config": layer})


def facts() -> Facts:
    """Return what is known of a pair with a tiny target."""
    return Facts({}, 4, byte_level(VOCAB), longest=200, embedding_rows=VOCAB, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("patch", "line"), [
    ({"target_layer_ids": [0, 2]}, {"aux_hidden_state_layer_ids": [1, 3]}),
    ({"mask_token_id": 5}, {"mask_token_id": 5}),
    ({"block_size": 4}, {"block_size": 4}),
    ({"is_causal": False, "causal": False}, {"sliding_window_non_causal": True}),
    ({"rope_theta": 5e5}, {"transformer_layer_config": {"rope_theta": 5e5}}),
    ({"layer_types": ["full_attention"] * 2, "is_causal": True}, None),
    ({"is_causal": True, "causal": True, "layer_types": ["sliding_attention", "full_attention"]}, None),
], ids=["taps", "mask", "block", "causal", "rope", "types", "causal types"])  # fmt: skip
def test_the_advised_line_has_the_same_effect_in_the_speculators_layout(patch, line, kind):
    config = speculators_config(kind)
    wiring = Wiring.read(config)
    advised = wiring.advised(patch)
    assert line in (None, advised)
    assert written(config, advised) == wiring.patched(patch).config != wiring.config


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_advised_in_the_speculators_layout_has_its_variant_s_effect(kind):
    config = speculators_config(kind)
    found = variants(Wiring.read(config), facts())
    lines = [(variant.config, variant.wiring.config) for variant in found if variant.config]
    assert {variant.fault for variant in found if variant.config} >= {"tap order", "mask id", "causality", "window"}
    assert all(written(config, line) == wired for line, wired in lines)


@pytest.mark.parametrize(("stated", "expected"), [({}, True), ({**SLIDES, "num_hidden_layers": 2}, False)])
def test_a_window_of_full_layers_may_be_an_option_of_the_run(stated, expected):
    advice = [variant.advice for variant in variants(Wiring.read(config_dict(**stated)), facts())]
    assert any("run with drafter_window=128" in each for each in advice) == expected


@pytest.mark.parametrize("is_causal", [True, False, None])
def test_causality_can_be_changed_where_an_export_has_stated_it(is_causal):
    """``is_causal`` inside ``transformer_layer_config`` wins over ``sliding_window_non_causal``."""
    config = speculators_config(sliding_window_non_causal=bool(is_causal))
    config["transformer_layer_config"]["is_causal"] = not is_causal
    patch = {"is_causal": is_causal, "causal": is_causal, "layer_types": ["full_attention", "sliding_attention"]}
    wiring = Wiring.read(config)
    advised = wiring.advised(patch)
    assert written(config, advised) == wiring.patched(patch).config
    assert wiring.patched(patch).config.causal == ((False, True) if is_causal is None else (is_causal,) * 2)


NESTED = config_dict(dflash_config={"mask_token_id": 100, "target_layer_ids": [1, 9], "causal": True})
TWICE = config_dict(mask_token_id=100, target_layer_ids=[1, 9], dflash_config={"mask_token_id": 100})


@pytest.mark.parametrize(("config", "patch", "advised"), [
    (NESTED, {"mask_token_id": 3, "block_size": 8}, {"dflash_config": {"mask_token_id": 3}, "block_size": 8}),
    (TWICE, {"mask_token_id": 3}, {"dflash_config": {"mask_token_id": 3}, "mask_token_id": 3}),
    (TWICE | {"mask_token_id": 3}, {"mask_token_id": 3}, {"dflash_config": {"mask_token_id": 3}}),
    (TWICE, {"target_layer_ids": [2, 10]}, {"target_layer_ids": [2, 10]}),
], ids=["nested", "twice", "right above", "above"])  # fmt: skip
def test_a_key_is_advised_where_it_stands_and_in_a_copy_that_differs(config, patch, advised):
    assert Wiring.read(config).advised(patch) == advised


def test_another_theta_is_advised_wherever_the_config_states_one():
    twice = config_dict(rope_parameters={"rope_type": "default", "rope_theta": 5e4}, rope_theta=5e4)
    once = config_dict(rope_parameters={"rope_type": "default", "rope_theta": 5e4}, rope_theta=None)
    for config, top in ((twice, {"rope_theta": 1e6}), (once, {})):
        found = variants(Wiring.read(config), facts())
        (line,) = [variant.config for variant in found if variant.change == "RoPE theta 1e+06 instead of 50000"]
        assert line == {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **top}


# ---------------------------------------------------------------------------------------------- positions


def test_positions_that_no_config_states_are_no_finding():
    config = speculators_config()
    assert Wiring.read(config).config.max_position_embeddings == 32768, "the layout's default"
    assert not list(check_positions(config, 40000, 40100))
    config["transformer_layer_config"]["max_position_embeddings"] = 32768
    (finding,) = check_positions(config, 40000, 40100)
    assert "a prompt has 40000 tokens, the drafter's max_position_embeddings is 32768" in finding.found
    (finding,) = check_positions(config_dict(), 4000, 4100)
    assert "a prompt with its answer has 4100 tokens" in finding.found

import dataclasses
import json
import warnings

import pytest
import torch
from draft_variants import FULL, LLAMA3, SLIDING, VARIANTS, YARN, config_dict, dflash2_dict, dspark_dict, sliding
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash import DraftConfig
from dflash.drafter.config import Rope, build_target_layer_ids


def parse(**changes) -> DraftConfig:
    return DraftConfig.from_config(config_dict(**changes))


def with_dflash(**more) -> dict:
    return {"mask_token_id": 100, "target_layer_ids": [1, 9, 17], **more}


def test_every_field_is_read():
    config = parse(attention_bias=True, output_multiplier=0.5, input_embedding_scale=4, final_logit_softcapping=30)
    assert config == DraftConfig(
        hidden_size=64, intermediate_size=88, num_hidden_layers=3, num_attention_heads=4, num_kv_heads=2, head_dim=16,
        block_size=16, mask_token_id=100, target_layer_ids=(1, 9, 17, 25, 33), causal=(False, False, False),
        window=(0, 0, 0), rope=Rope(theta=1e6), rms_norm_eps=1e-6, attention_bias=True, input_embedding_scale=4.0,
        output_multiplier=0.5, final_logit_softcapping=30.0, vocab_size=101, num_target_layers=36,
        max_position_embeddings=4096,
    )  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8
    assert isinstance(hash(config), int)


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers"])
def test_dflash_config_wins_over_the_top_level(key):
    outer, inner = {"target_layer_ids": ([3], [4, 2, 4])}.get(key, (16, 24))
    top = config_dict(**{key: outer, "dflash_config": {"mask_token_id": 100, "target_layer_ids": [1]}})
    top["dflash_config"].pop(key, None)
    read = lambda: getattr(DraftConfig.from_config(top), key)  # noqa: E731
    assert read() == (tuple(outer) if isinstance(outer, list) else outer)
    top["dflash_config"][key] = inner
    assert read() == (tuple(inner) if isinstance(inner, list) else inner)


@pytest.mark.parametrize(
    "key", ["attention_value_scale", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"]
)
def test_scales_are_read_at_either_level(key):
    assert getattr(parse(), key) == (0.0 if key == "final_logit_softcapping" else 1.0)
    assert getattr(parse(**{key: 3}), key) == 3.0
    assert getattr(parse(**{key: 3, "dflash_config": with_dflash(**{key: 0.25})}), key) == 0.25


def test_missing_keys_have_defaults():
    config = parse(
        vocab_size=None, head_dim=None, num_key_value_heads=None, block_size=None, layer_types=None,
        rms_norm_eps=None, rope_theta=None, architectures=None, model_type=None, max_position_embeddings=None,
        num_target_layers=None, attention_bias=None, hidden_act=None,
    )  # fmt: skip
    assert (config.vocab_size, config.head_dim, config.num_kv_heads, config.block_size) == (None, 16, 4, 16)
    assert (config.window, config.rope, config.rms_norm_eps) == ((0, 0, 0), Rope(theta=10000.0), 1e-6)


@pytest.mark.parametrize(
    ("target", "draft", "taps"),
    [(36, 5, (1, 9, 17, 25, 33)), (24, 5, (1, 6, 11, 16, 21)), (36, 1, (18,)), (2, 1, (1,))],
)
def test_missing_taps_are_interpolated(target, draft, taps):
    assert build_target_layer_ids(target, draft) == taps
    config = parse(
        num_target_layers=target, num_hidden_layers=draft, layer_types=None, dflash_config={"mask_token_id": 1}
    )
    assert config.target_layer_ids == taps


@pytest.mark.parametrize(("changes", "causal", "window"), [
    ({}, (False, False, False), (0, 0, 0)),
    (sliding("sfs", 5), (True, False, True), (5, 0, 5)),
    (sliding("sfs", 5) | {"is_causal": False}, (False, False, False), (5, 0, 5)),
    (sliding("sfs", 5) | {"dflash_config": with_dflash(causal=False)}, (False, False, False), (5, 0, 5)),
    (sliding("sfs", 5) | {"dflash_config": with_dflash(causal=True)}, (True, True, True), (5, 0, 5)),
    (sliding("sfs", 5) | {"is_causal": False, "dflash_config": with_dflash(causal=True)}, (False,) * 3, (5, 0, 5)),
    ({"is_causal": True}, (True, True, True), (0, 0, 0)),
    # without layer_types, as Qwen3's own config derives them
    (
        {"layer_types": None, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2},
        (False, False, True),
        (0, 0, 5),
    ),
    # a window over every layer, which are full by name
    ({"dflash_config": with_dflash(use_swa=True, swa_window_size=9)}, (False,) * 3, (9, 9, 9)),
    ({"dflash_config": with_dflash(use_swa=True, causal=True), "sliding_window": 7}, (True,) * 3, (7, 7, 7)),
    (sliding("sfs", 5) | {"dflash_config": with_dflash(use_swa=True)}, (True, False, True), (5, 0, 5)),
    (sliding("sfs", 5) | {"dflash_config": with_dflash(swa_window_size=6)}, (True, False, True), (6, 0, 6)),
    ({"dflash_config": with_dflash(use_swa=False, swa_window_size=9)}, (False,) * 3, (0, 0, 0)),
])  # fmt: skip
def test_causality_and_window_of_each_layer(changes, causal, window):
    config = parse(**changes)
    assert (config.causal, config.window) == (causal, window)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_transformers_config_reads_the_same(name):
    parsed = DraftConfig.from_config(VARIANTS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DraftConfig.from_config(Qwen3Config(**json.loads(json.dumps(VARIANTS[name])))) == parsed


OLD = {"original_max_position_embeddings": 512}
ROPES = [
    {"rope_type": "default", "rope_theta": 1e7}, {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5},
    LLAMA3 | OLD | {"rope_theta": 5e5},
    LLAMA3 | {"rope_theta": 5e5, "high_freq_factor": 3, "factor": 32, "original_max_position_embeddings": 8192},
    YARN | OLD, YARN | OLD | {"truncate": True, "rope_theta": 150000.0}, YARN | OLD | {"attention_factor": 0.7},
    YARN | OLD | {"mscale": 1.0, "mscale_all_dim": 0.8}, YARN | OLD | {"beta_fast": None, "beta_slow": None},
    YARN | {"factor": None, "original_max_position_embeddings": 100},
    YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64},
]  # fmt: skip


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_frequencies_equal_those_of_transformers_bit_for_bit(key, rope, head_dim):
    config = config_dict(head_dim=head_dim, **{key: rope})
    theirs = Qwen3Config(**json.loads(json.dumps(config)))
    kind = theirs.rope_parameters["rope_type"]
    build = Qwen3RotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    frequencies, scaling = build(theirs)
    ours = DraftConfig.from_config(config).rope
    assert (ours.type, ours.attention_scaling) == (kind, scaling)
    assert torch.equal(ours.inverse_frequencies(head_dim), frequencies)
    assert DraftConfig.from_config(theirs).rope == ours


def test_the_original_length_is_read_at_the_top_level():
    config = config_dict(rope_scaling=YARN | OLD, original_max_position_embeddings=256)
    assert DraftConfig.from_config(config).rope.original_max_position_embeddings == 256


BAD_ROPES = [
    ({"rope_type": "dynamic", "factor": 2.0}, "RoPE type 'dynamic' is not supported: default, linear, llama3, yarn"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ({FULL: {"rope_type": "default"}, SLIDING: {"rope_type": "default"}}, "per layer type is not supported"),
    ({"rope_type": "linear"}, "rope_parameters of type linear needs factor"),
    ({"rope_type": "linear", "factor": "2"}, r"rope_parameters.factor must be a finite number, got '2'"),
    (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor must be above low_freq_factor, got 4.0 and 4.0"),
    (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings must be an integer >= 1"),
    (YARN | {"rope_theta": 1.0}, "rope_theta must be > 1 for yarn, got 1.0"),
    (3, "rope_parameters must be an object, got 3"),
]


@pytest.mark.parametrize(("changes", "message"), [
    (
        {"architectures": ["LlamaForCausalLM"]},
        "must name DFlashDraftModel, DFlash2DraftModel or Qwen3DSparkModel, got Llama",
    ),
    ({"model_type": "llama"}, "model_type = 'llama' is not supported: a DFlash drafter has the shape of qwen3"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported: only silu"),
    ({"architectures": ["Qwen35DSparkModel"], "model_type": "qwen3_5"}, "RoPE over part of the head and gated attent"),
    ({"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 6}, "brings a DSpark head inside its own"),
    ({"dflash_config": with_dflash(lambda_base=1, foo=1)}, "unknown keys in dflash_config: foo, lambda_base"),
    ({"dflash_config": with_dflash(shift_label=True)}, "shift_label = True is not supported: other block layouts"),
    (
        {"dflash_config": with_dflash(projector_type="dspark", shift_label=False)},
        "shift_label = False is not supported: other block layouts",
    ),
    ({"dflash_config": with_dflash(pure_draft_prefix_len=1)}, "pure_draft_prefix_len = 1 is not supported: blocks"),
    ({"dflash_config": [1]}, r"dflash_config must be an object, got \[1\]"),
    ({"draft_vocab_size": 102}, "draft_vocab_size must be at most vocab_size = 101, got 102"),
    ({"target_hidden_size": 128}, "target_hidden_size = 128 differs from hidden_size = 64"),
    ({"speculators_config": {}}, "speculators_config = {} is not supported: this is half of the speculators layout"),
    ({"is_neox_style": "no"}, "is_neox_style must be true or false, got 'no'"),
    ({"dflash_config": with_dflash(use_aux_hidden_state=False)}, "use_aux_hidden_state = False is not supported"),
    ({"dflash_config": with_dflash(projector_type="domino")}, "projector_type = 'domino' is not supported"),
    ({"layer_types": [FULL, "chunked_attention", FULL]}, "or sliding_attention, got 'chunked_attention'"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "64"}, "hidden_size must be an integer >= 1, got '64'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
    ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3"),
    ({"head_dim": 15}, "head_dim must be even for RoPE, got 15"),
    ({"head_dim": None, "hidden_size": 62}, "without head_dim, hidden_size 62 must be a multiple"),
    ({"block_size": 8.0}, "block_size must be an integer >= 1, got 8.0"),
    ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is missing"),
    ({"dflash_config": with_dflash(mask_token_id=101)}, "mask_token_id must be below vocab_size 101, got 101"),
    ({"dflash_config": with_dflash(target_layer_ids=[])}, r"must be a list of one or more layers, got \[\]"),
    ({"dflash_config": with_dflash(target_layer_ids=[1, "2"])}, "target_layer_ids must be an integer >= 0, got '2'"),
    ({"dflash_config": with_dflash(target_layer_ids=[36])}, "must be below num_target_layers 36, got 36"),
    (
        {"dflash_config": {"mask_token_id": 1}, "num_target_layers": None},
        "target_layer_ids is missing, and without num_target_layers",
    ),
    ({"dflash_config": {"mask_token_id": 1}, "num_target_layers": 3}, "num_target_layers must be at least 4"),
    (
        {"dflash_config": {"mask_token_id": 1}, "eagle_aux_hidden_state_layer_ids": [2]},
        "eagle_aux_hidden_state_layer_ids counts layers differently",
    ),
    ({"layer_types": [FULL]}, r"layer_types must name num_hidden_layers = 3 layers, got \['full_attention'\]"),
    (sliding("sfs", 0), "sliding_window must be an integer >= 1, got 0"),
    (sliding("sfs", 5) | {"sliding_window": None}, "sliding_window must be an integer >= 1, got None"),
    (sliding("sfs", 5) | {"use_sliding_window": False}, "but use_sliding_window is false"),
    ({"dflash_config": with_dflash(use_swa=True)}, "sliding_window must be an integer >= 1, got None"),
    *(({"rope_parameters": rope}, message) for rope, message in BAD_ROPES),
    ({"rope_scaling": YARN, "max_position_embeddings": None}, "of type yarn needs original_max_position"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps must be > 0, got 0.0"),
    ({"output_multiplier": float("nan")}, "output_multiplier must be a finite number, got nan"),
])  # fmt: skip
def test_what_is_impossible_or_not_implemented_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(**changes)


def test_neutral_values_of_refused_keys_pass():
    config = parse(
        draft_vocab_size=101, target_hidden_size=64, is_neox_style=True, partial_rotary_factor=1.0, logit_scale=1,
        has_lm_head=False, conv_kernel_size=0, selector_rank=None, eagle_aux_hidden_state_layer_ids=[2, 10, 18, 26, 34],
        dflash_config=with_dflash(use_aux_hidden_state=True, projector_type="dflash", mask_token="<|MASK|>"),
    )  # fmt: skip
    assert config == parse(dflash_config=with_dflash())


HEAD = {"markov_rank": 8, "markov_head_type": "vanilla"}
TAPS = {"mask_token_id": 100, "target_layer_ids": [1, 9]}
NOTES = {"attention_mode": "gqa", "confidence_head_alpha": 1.0, "confidence_head_with_markov": True}
HYBRID = {"linear_num_key_heads": 16, "attn_output_gate": True, "partial_rotary_factor": 0.25}
COPIED_ROPE = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
OTHER_NAMES = {
    "SpecForge": config_dict(
        architectures=["DSparkDraftModel"], block_size=7, lm_head_chunk_size=None, dflash_config=TAPS | HEAD | NOTES
        | {"projector_type": "dspark", "shift_label": False, "pure_draft_prefix_len": 0}),
    "Model-Optimizer": config_dict(
        block_size=7, dflash_config=TAPS | HEAD
        | {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True}),
    "Ling": dspark_dict(architectures=["LingDSparkModel"]),
    "LFM2": dspark_dict(
        architectures=["Lfm2DSparkDraftModel"], mask_token_id=None, target_layer_ids=None, dflash_config=TAPS),
    "DeepSpec of a hybrid target": dspark_dict(rope_theta=None, rope_parameters=COPIED_ROPE, **HYBRID),
    "not from a bonus anchor": dspark_dict(dspark_bonus_anchor=False),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_dspark_of_another_trainer_reads_as_deepspecs(name, recwarn):
    assert DraftConfig.from_config(OTHER_NAMES[name]) == DraftConfig.from_config(dspark_dict())
    assert not recwarn.list


@pytest.mark.parametrize("name", ["DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"])
def test_other_names_of_dflash_2(name):
    assert DraftConfig.from_config(dflash2_dict(architectures=[name])) == DraftConfig.from_config(dflash2_dict())


def test_keys_of_nemotron():
    stated = sliding("sss", 24) | {"use_sliding_window": None, "sliding_window": None}
    keys = {"dflash_sliding_window": 24, "dflash_query_causal": False, "dspark_bonus_anchor": True}
    read = DraftConfig.from_config(dspark_dict(**stated | keys))
    assert (read.window, read.causal, read.predicts_from_anchor, read.block_size) == ((24,) * 3, (False,) * 3, False, 7)


def test_messages_name_their_source():
    with pytest.raises(ValueError, match=r"^here/config\.json: block_size must be"):
        DraftConfig.from_config(config_dict(block_size=0), "here/config.json")
    with pytest.raises(ValueError, match=r"^draft config: must be a mapping or have to_dict\(\), got int"):
        DraftConfig.from_config(3)


def test_unknown_metadata_is_warned_about_once():
    with pytest.warns(UserWarning, match="draft config: unknown keys are ignored: loss_decay, trained_by$") as caught:
        parse(trained_by="someone", loss_decay=7, _private=1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse()

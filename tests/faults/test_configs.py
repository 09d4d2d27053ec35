"""A config of unknown origin loads, or is refused by the name of its key within a second and 50 MB."""

import copy
import json
import math
import time
import tracemalloc
import unicodedata
import warnings

import pytest
from checkpoints import MEGABYTES, SECONDS, assert_refused, load_in_child, published, save_drafter, speculators
from draft_variants import YARN, sliding
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from dflash import DraftConfig, load_draft

HUGE = 10**400
YARN_SCALING = {**YARN, "original_max_position_embeddings": 512}

# The key that the error names, and the config.
NAMED = [
    ("num_hidden_layers", published(num_hidden_layers=10**12, layer_types=None)),
    ("num_hidden_layers", speculators(**{"transformer_layer_config.num_hidden_layers": 10**12})),
    ("hidden_size", published(hidden_size=2**20)), ("hidden_size", published(hidden_size=2**62)),
    ("head_dim", published(head_dim=2**40)),
    ("head_dim", published(head_dim=None, hidden_size=2**20, num_attention_heads=1, num_key_value_heads=1)),
    ("intermediate_size", published(intermediate_size=2**63)),
    ("num_attention_heads", published(num_attention_heads=2**62)),
    ("num_key_value_heads", published(num_key_value_heads=2**62)), ("vocab_size", published(vocab_size=2**63)),
    ("block_size", published(block_size=10**9)), ("max_position_embeddings", published(max_position_embeddings=2**70)),
    ("num_target_layers", published(num_target_layers=10**12)),
    ("target_layer_ids", published(**{"dflash_config.target_layer_ids": [1] * 10**5})),
    ("aux_hidden_state_layer_ids", speculators(aux_hidden_state_layer_ids=[2**70] * 5)),
    ("layer_types", published(layer_types=["full_attention"] * 10**4)),
    ("layer_types", published(layer_types={"a": 1})), ("rms_norm_eps", published(rms_norm_eps=HUGE)),
    ("rms_norm_eps", published(rms_norm_eps=math.nan)),
    ("rope_theta", published(rope_scaling={"rope_type": "default", "rope_theta": HUGE})),
    ("factor", published(rope_scaling=YARN_SCALING | {"factor": HUGE})),
    ("beta_slow", published(rope_scaling=YARN_SCALING | {"beta_slow": -1})),
    ("original_max_position", published(rope_scaling=YARN_SCALING | {"original_max_position_embeddings": HUGE})),
    ("rope_scaling", published(rope_scaling=YARN_SCALING | {"factor": {}})),
    ("rope_scaling", published(rope_scaling=[["rope_type", "yarn"]])),
    ("RoPE type", published(rope_scaling={"rope_type": ["yarn"]})),
    ("architectures", published(architectures="DFlashDraftModel")), ("architectures", speculators(architectures=7)),
    ("model_type", published(model_type=["qwen3"])),
    ("mask_token_id", published(**{"dflash_config.mask_token_id": HUGE})),
    ("mask_token_id", speculators(mask_token_id=-1)), ("sliding_window", published(**sliding("sfs", {}))),
    ("use_swa", published(**{"dflash_config.use_swa": {}})),
    ("sliding_window_non_causal", speculators(sliding_window_non_causal={})),
    ("transformer_layer_config", speculators(transformer_layer_config=[])), ("config.json", []),
]  # fmt: skip
TEXTS = {
    "nested brackets": "[" * 100_000,
    "an integer of many digits": f'{{"hidden_size": {"9" * 100_000}}}',
    "a key twice": '{"hidden_size": 64, "hidden_size": 65}',
    "UTF-16": json.dumps(published()).encode("utf-16"),
    "nothing": "",
}


def test_hostile_configs_are_refused_by_key_within_a_second_and_50_mb(tmp_path):
    good, folders = save_drafter(tmp_path / "good"), []
    for number, (_, config) in enumerate(NAMED):
        folders.append(save_drafter(tmp_path / str(number), config))
    for name, text in TEXTS.items():
        folders.append(save_drafter(tmp_path / name))
        (folders[-1] / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    names = [name for name, _ in NAMED] + ["config.json"] * len(TEXTS)
    assert_refused(names, load_in_child(good, folders))


@pytest.mark.parametrize("layout", [published, speculators])
def test_the_configs_that_the_tests_change_load(tmp_path, layout):
    assert load_draft(save_drafter(tmp_path, layout())).config == DraftConfig.from_config(published())


BOUNDARIES = [0, 1, -1, 2, 3, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, 2**64, HUGE, -HUGE, 0.5, 1e-300, 1e300, 5e-324]
NAMES = ["qwen3", "yarn", "llama3", "linear", "dflash", "full_attention", "sliding_attention"]
WORDS = ["", *NAMES, "a\x1b[2Jb", "\u202e"]
EDGES = [None, True, False, math.nan, math.inf, -math.inf, [], {}, *BOUNDARIES, *WORDS]
LEAVES = st.one_of(st.sampled_from(EDGES), st.integers(), st.floats(), st.text(max_size=20))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
LINEAR_SCALING = {"rope_type": "linear", "factor": 2.0}
ROPES = [None, YARN_SCALING, LINEAR_SCALING, YARN_SCALING | {"mscale": 1.0, "mscale_all_dim": 0.5}]
EXTRA = [
    *("sliding_window", "use_sliding_window", "is_causal", "attention_sink_bias", "final_logit_softcapping"),
    *("output_multiplier", "max_window_layers", "target_hidden_size", "partial_rotary_factor", "mscale", "beta_fast"),
    *("attention_factor", "use_swa", "swa_window_size", "causal", "projector_type", "shift_label", "new\x1bkey"),
]


def objects(content, path=()):
    """Every object inside a config, with the keys that lead to it."""
    yield path, content
    for key, value in content.items():
        if isinstance(value, dict):
            yield from objects(value, (*path, key))


@st.composite
def changed_configs(draw):
    """A valid config with one to three values replaced, removed or added, and the names of their keys."""
    layout, rope = draw(st.sampled_from([published, speculators])), draw(st.sampled_from(ROPES))
    inside = "" if layout is published else "transformer_layer_config."
    config = layout(**{inside + "rope_scaling": rope})
    names = set()
    for _ in range(draw(st.integers(1, 3))):
        path, place = draw(st.sampled_from(list(objects(config))))
        key = draw(st.sampled_from([*place, *EXTRA]))
        names |= {*path, key, *(inner for _, content in objects({key: place.get(key)}) for inner in content)}
        if draw(st.booleans()) and key in place:
            del place[key]
        else:
            place[key] = copy.deepcopy(draw(st.sampled_from(EDGES) | VALUES))
    return config, names


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory):
    return save_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.mark.long
@examples(80)
@given(changed_configs())
def test_a_changed_config_loads_or_is_refused_by_the_name_of_a_changed_key(drafter_folder, change):
    config, names = change
    (drafter_folder / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    begun = time.process_time()
    try:
        with warnings.catch_warnings(record=True):
            drafter = load_draft(drafter_folder)
        message = None
    except ValueError as error:
        message = str(error)
    seconds, (_, peak) = time.process_time() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < SECONDS
    assert peak < MEGABYTES * 2**20
    if message is None:
        assert isinstance(hash(drafter.config), int)
        return
    message = message.replace(str(drafter_folder), "")
    assert len(message) < 2000
    assert all(unicodedata.category(character) not in ("Cc", "Cs") for character in message)
    keys = {part for name in names for part in (name, name.encode("unicode_escape").decode())}
    assert any(key and key in message for key in keys), (message, names)

"""Masks and caches follow the config, whatever the family: the text is that of ``generate``, or the target is refused.

``-m long`` tries every type of causal language model in transformers with every config of `CONFIGS`.
"""

import re

import pytest
import torch
from baseline import check_answers, greedy, prompt
from examples import examples, is_long
from families import FAMILIES, make_config, make_target
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import dflash

WINDOW, CHUNK = {"sliding_window": 8, "use_sliding_window": True}, {"attention_chunk_size": 8}
CONFIGS = {
    "plain": {},
    "window": WINDOW,
    "chunk": CHUNK,
    "some windows": {**WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "some chunks": {**CHUNK, "layer_types": ["full_attention", "chunked_attention"] * 2},
    "one window": {"sliding_window": None, "per_layer_config": {1: {"sliding_window": 8}}},
    "shared keys": {"kv_sharing_modes": ["own"] * 3 + ["reuse"]},
}
HANDFUL = {  # why it is refused; None if it runs
    (
        "llama",
        "window",
    ): r"llama attends over a window of None in layer 0 .* config to 8 of 13 positions after a prompt",
    ("llama", "some windows"): "llama fails on its own past its window .* layer 1 has a mask of 13 .* for 8 keys",
    ("llama", "shared keys"): "llama fails on its own past its window",
    ("mistral", "window"): None,
    ("mistral", "chunk"): "mistral attends .* to 8 of 13 positions after a prompt",
    ("mistral", "one window"): "mistral fails on its own .* 'sliding_window' is a per-layer attribute",
    ("qwen2", "one window"): None,
    ("qwen3", "some windows"): None,
    ("deepseek_v3", "chunk"): "deepseek_v3 attends .* to 8 of 13 positions after a prompt",
    ("kimi_k25", "window"): "deepseek_v3 attends .* to 8 of 13 positions after a prompt",
    ("phimoe", "window"): "phimoe attends .* to 8 of 16 positions in a prompt",
    ("gemma3_text", "some windows"): None,
    ("gpt_oss", "window"): None,
    ("qwen3_next", "window"): None,
    ("qwen3_next", "some windows"): "qwen3_next fails on its own",
    ("bamba", "chunk"): None,
    ("llama4_text", "some chunks"): "llama4_text has layers of type chunked_attention",
    ("glm_moe_dsa", "plain"): None,
    ("deepseek_v32", "plain"): None,
    ("afmoe", "plain"): None,
}
BY_TYPE = {model_type: name for name, (model_type, _) in reversed(FAMILIES.items())}
MAX_PARAMETERS = 4_000_000  # of a model that is called tiny


def attempt(model, fused="auto", length=21) -> str:
    """Generate past every window; return why the target is refused, or an empty string if the text is right."""
    try:
        generator = dflash.Generator(model, max_length=64, fused=fused)
    except dflash.UnsupportedTargetError as error:
        return str(error)
    p = prompt(length)
    check_answers(generator.generate(p[None], max_new_tokens=12), length, [greedy(model, p, 12)])
    return ""


@pytest.mark.parametrize(("model_type", "config"), HANDFUL)
def test_a_target_runs_or_is_refused_by_what_its_config_says(model_type, config):
    model, refused = make_target(BY_TYPE.get(model_type, model_type), **CONFIGS[config]), HANDFUL[model_type, config]
    for reason in (attempt(model), attempt(model, fused=False)):
        assert re.search(refused, reason) if refused else reason == "", reason


@pytest.mark.long
@pytest.mark.parametrize("config", CONFIGS if is_long() else ["plain"])
@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_long() else ["helium"])
def test_every_type_writes_what_generate_writes_or_is_refused(model_type, config):
    name, changes = BY_TYPE.get(model_type, model_type), CONFIGS[config]
    try:
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(make_config(name, **changes)).num_parameters()
        assert size < MAX_PARAMETERS, f"{size} parameters"
        model = make_target(name, **changes)
    except Exception as error:  # whatever a family's config says of these keys
        pytest.skip(f"{model_type} ({config}) cannot be made tiny: {type(error).__name__}: {error}")
    assert (attempt(model) == "") == (attempt(model, fused=False) == "")


@st.composite
def configs(draw) -> tuple[str, dict]:
    """Draw a tested family and keys that limit what its layers attend to, whether it has such keys or not."""
    family = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3", "deepseek_v3"]))
    sizes, kinds = st.integers(1, 24), st.sampled_from(["full_attention", "sliding_attention"])
    some = {"sliding_window": sizes, "attention_chunk_size": sizes, "use_sliding_window": st.just(True)}
    changes = draw(st.fixed_dictionaries({}, optional=some | {"layer_types": st.lists(kinds, min_size=4, max_size=4)}))
    if draw(st.booleans()):
        window = st.fixed_dictionaries({}, optional={"sliding_window": sizes | st.none()})
        changes["per_layer_config"] = draw(st.dictionaries(st.integers(0, 3), window))
    return family, changes


@pytest.mark.long
@examples(12)
@given(configs(), st.integers(1, 40))
def test_no_window_changes_a_text(config, length):
    family, changes = config
    try:
        model = make_target(family, **changes)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError):  # transformers refuses the config
        return
    assert (attempt(model, length=length) == "") == (attempt(model, fused=False, length=length) == "")

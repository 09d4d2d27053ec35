"""Test that both checkpoint layouts hold the same drafter, and refuse what they cannot express."""

import json

import pytest
import safetensors.torch
import torch
from draft_variants import DFLASH2_VARIANTS, VARIANTS, config_dict, random_tensors, save_checkpoint, sliding

import dflash
from dflash import DraftConfig
from dflash_tools.train.export import export, vllm_causality

EXPRESSIBLE = ["Qwen3-4B", "Kimi-K2.5", "Llama-3.1-8B", "gpt-oss-20b", "one-layer", "dflash_config.causal-false"]


def checkpoint(folder, config):
    return save_checkpoint(folder, config, random_tensors(DraftConfig.from_config(config)))


def read(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def same(a: dflash.Drafter, b: dflash.Drafter) -> bool:
    theirs = dict(b.named_parameters())
    equal = all(torch.equal(tensor, theirs.pop(name)) for name, tensor in a.named_parameters())
    return equal and not theirs and a.config == b.config and a.dtype == b.dtype


@pytest.mark.parametrize("variant", [*EXPRESSIBLE, "DFlash2", "DFlash2-wide-kernel"])
def test_a_round_trip_gives_the_same_drafter(tmp_path, variant):
    drafter = dflash.load_draft(checkpoint(tmp_path / "draft", (VARIANTS | DFLASH2_VARIANTS)[variant]))
    export(tmp_path / "draft", tmp_path / "speculators", "speculators", target="owner/target")
    (tmp_path / "published").mkdir()  # an empty folder is accepted
    export(tmp_path / "speculators", tmp_path / "published", "published")
    for folder in ("speculators", "published"):
        assert same(dflash.load_draft(tmp_path / folder), drafter)
    modes = {path.stat().st_mode for path in (tmp_path / "speculators").iterdir()}
    assert len(modes) == 1, "both files should have the same permissions"
    config = read(tmp_path / "published")
    assert config["architectures"] == ["DFlashDraftModel" if variant in VARIANTS else "DFlash2DraftModel"]
    assert config["dflash_config"]["target_layer_ids"] == list(drafter.config.target_layer_ids)
    assert "transformer_layer_config" not in config


def test_the_speculators_layout_has_the_keys_that_engines_read(tmp_path):
    """VLLM's reader of this layout requires these keys, and counts the taps this way."""
    checkpoint(tmp_path / "draft", config_dict())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.warns(UserWarning, match="this target is a folder"):
        export(tmp_path / "draft", tmp_path / "out", "speculators", target=str(tmp_path / "target"))
    config = read(tmp_path / "out")
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [2, 10, 18, 26, 34]
    assert (config["mask_token_id"], config["block_size"], config["draft_vocab_size"]) == (100, 16, 101)
    assert config["sliding_window_non_causal"] is True, "False would make every layer causal there"
    assert "model_type" not in config, "it would hide that this is a speculators checkpoint"
    methods = config["speculators_config"]["proposal_methods"]
    assert methods[0]["speculative_tokens"] == 15
    verifier = {"name_or_path": str(tmp_path / "target"), "architectures": ["Qwen3ForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("qwen3", 3, 101)
    assert layer["rope_theta"] == 1000000.0


@pytest.mark.parametrize(("key", "value", "effect"), [
    ("input_embedding_scale", 8.0, "it accepts fewer drafts there"),
    ("output_multiplier", 0.5, "greedy drafts are the same"),
    ("final_logit_softcapping", 30.0, "greedy drafts are the same"),
])  # fmt: skip
def test_the_export_warns_of_what_vllm_ignores(tmp_path, key, value, effect):
    checkpoint(tmp_path / "draft", config_dict(**{key: value}))
    with pytest.warns(UserWarning, match=f"vLLM ignores {key} .* this one has {value}: .*{effect}"):
        export(tmp_path / "draft", tmp_path / "out", "published")


def speculators_folder(folder, kinds: str, **changes):
    """Save a checkpoint of the speculators layout whose layers are of these kinds."""
    layer = config_dict(**sliding(kinds, 6), architectures=None, dflash_config=None, block_size=None, auto_map=None)
    layer |= {"is_causal": changes.pop("is_causal")} if "is_causal" in changes else {}
    config = {"speculators_model_type": "dflash", "transformer_layer_config": layer, "block_size": 8}
    config |= {"aux_hidden_state_layer_ids": [2, 3], "mask_token_id": 5, "draft_vocab_size": 101}
    return checkpoint(folder, config | changes)


SPARK = {"speculators_model_type": "dspark", "markov_rank": 4}
KEY = "sliding_window_non_causal"


@pytest.mark.parametrize(("kinds", "given", "theirs", "reason"), [
    ("ff", {KEY: False}, [True, True], "one rule for all layers, and sliding_window_non_causal is false there"),
    ("ss", {}, [False, False], "one rule for all layers, and sliding_window_non_causal is missing there"),
    ("ss", SPARK | {KEY: True}, [True, True], "does not read sliding_window_non_causal of DSpark drafters"),
    ("ss", {KEY: False}, None, None),
    ("sf", SPARK | {KEY: False}, None, None),
])  # fmt: skip
def test_the_export_warns_where_vllm_reads_causality_differently(tmp_path, recwarn, kinds, given, theirs, reason):
    """VLLM reads ``is_causal``, then one rule for all layers, which it does not read for DSpark."""
    export(speculators_folder(tmp_path / "draft", kinds, **given), tmp_path / "out", "published")
    told = [str(one.message) for one in recwarn.list]
    if theirs is None:
        assert not told
    else:
        assert len(told) == 1
        assert f"takes the layers of the original checkpoint for causal {theirs}, because it" in told[0]
        assert reason in told[0]
        assert f"this package read {[not causal for causal in theirs]}" in told[0]


@pytest.mark.parametrize(
    ("kind", "kinds", "causal"), [("dflash", "ss", True), ("dflash2", "ss", False), ("dspark", "sf", False)]
)
def test_vllm_reads_the_causality_of_an_export_as_this_package_does(tmp_path, recwarn, kind, kinds, causal):
    more = {"dflash": {}, "dflash2": {"selector_top_k": 5, "selector_rank": 4}, "dspark": SPARK}[kind]
    more = {KEY: not causal, "speculators_model_type": kind} | more
    folder = speculators_folder(tmp_path / "draft", kinds, is_causal=causal, **more)
    export(folder, tmp_path / "out", "speculators", target="owner/target")
    written = read(tmp_path / "out")
    assert written["transformer_layer_config"]["is_causal"] is causal
    assert written[KEY] is not causal, "the speculators library reads this key only"
    assert vllm_causality(written, 2) == dflash.load_draft(tmp_path / "out").config.causal == (causal, causal)
    assert not recwarn.list


def flat(config: dict) -> dict:
    """Return a config with the keys of its ``dflash_config`` at the top level, where they are read too."""
    return {key: value for key, value in config.items() if key != "dflash_config"} | config["dflash_config"]


@pytest.mark.parametrize(("config", "section"), [
    (flat(DFLASH2_VARIANTS["DFlash2-scaled"]), DFLASH2_VARIANTS["DFlash2-scaled"]["dflash_config"]),
    (config_dict(attention_value_scale=0.7), {"attention_value_scale": 0.7}),
    (config_dict(add_swa_attention_sink_bias=True), {"attention_sink_bias": True}),
], ids=["DFlash 2", "value scale", "sinks"])  # fmt: skip
def test_what_stands_at_the_top_level_is_stated_where_vllm_reads_it(tmp_path, config, section):
    drafter = dflash.load_draft(checkpoint(tmp_path / "draft", config))
    export(tmp_path / "draft", tmp_path / "out", "published")
    written = read(tmp_path / "out")["dflash_config"]
    assert {key: written.get(key) for key in section} == section
    assert same(dflash.load_draft(tmp_path / "out"), drafter)


def test_copies_of_a_key_agree_in_the_export(tmp_path):
    """Readers differ in which of two copies they take. This package takes the inner one."""
    inner = {"mask_token_id": 100, "target_layer_ids": [1, 9], "output_multiplier": 1.0, "input_embedding_scale": None}
    rope = {"rope_theta": 5e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    copies = {"mask_token_id": 7, "target_layer_ids": [0, 3], "output_multiplier": 0.5, "input_embedding_scale": 2.0}
    copies |= {"eagle_aux_hidden_state_layer_ids": [5, 6]}
    drafter = dflash.load_draft(checkpoint(tmp_path / "draft", config_dict(dflash_config=inner, **copies, **rope)))
    with pytest.warns(UserWarning, match="vLLM ignores input_embedding_scale"):
        export(tmp_path / "draft", tmp_path / "out", "published")
    written = read(tmp_path / "out")
    wanted = {"mask_token_id": 100, "target_layer_ids": [1, 9], "output_multiplier": 1.0, "input_embedding_scale": 2.0}
    for level in (written, written["dflash_config"]):
        assert {key: level[key] for key in wanted} == wanted
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e6
    assert "eagle_aux_hidden_state_layer_ids" not in written, "vLLM would take these taps, and not shift them"
    assert same(dflash.load_draft(tmp_path / "out"), drafter)


@pytest.mark.parametrize(("config", "message"), [
    (VARIANTS["Gemma4-31B"], "cannot have input_embedding_scale 8.0"),
    (VARIANTS["is_causal-false-with-window"], "cannot have output_multiplier"),
    (config_dict(vocab_size=None), "cannot have no vocab_size"),
    (VARIANTS["Qwen3.6-27B"], r"one rule of causality, .*\[True, True, False\] with windows \[7, 7, 0\]"),
    (DFLASH2_VARIANTS["DFlash2-causal"], r"one rule of causality, .*\[True, False\]"),
    (VARIANTS["is_causal-true-with-window"], r"causal full layers: .*\[True, True\] with .*\[6, 0\]"),
])  # fmt: skip
def test_a_config_that_the_layout_cannot_express_is_refused(tmp_path, config, message):
    checkpoint(tmp_path / "draft", config)
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "draft", tmp_path / "out", "speculators", target="owner/target")
    assert not (tmp_path / "out").exists()


def speculators(**changes) -> dict:
    layer = {"hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 1, "num_attention_heads": 4}
    layer |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "model_type": "llama"}
    config = {"speculators_model_type": "dflash", "transformer_layer_config": layer, "mask_token_id": 5}
    return config | {"aux_hidden_state_layer_ids": [2, 3], "draft_vocab_size": 101} | changes


def test_a_speculators_config_of_dflash_2_has_defaults_of_its_own():
    layer = speculators()["transformer_layer_config"] | sliding("ss", 6) | {"vocab_size": 300}
    given = {"transformer_layer_config": layer, "draft_vocab_size": 300}
    first, second = (
        DraftConfig.from_config(speculators(speculators_model_type=kind, **given)) for kind in ("dflash", "dflash2")
    )
    assert (first.causal, second.causal) == ((True, True), (False, False))
    assert second.dflash2 == dflash.drafter.DFlash2Config(2, 16, 256, 16)
    given |= {"conv_kernel_size": 3, "selector_rank": 4, "sliding_window_non_causal": False}
    second = DraftConfig.from_config(speculators(speculators_model_type="dflash2", **given))
    assert second.dflash2 == dflash.drafter.DFlash2Config(3, 16, 4, 16)
    assert second.causal == (True, True)


@pytest.mark.parametrize(("changes", "message"), [
    ({"speculators_model_type": "eagle3"}, "drafter: speculators_model_type must be dflash, .* or dspark, got"),
    ({"sample_from_anchor": 1}, "sample_from_anchor must be true or false, got 1"),
    ({"draft_vocab_size": 102}, "draft_vocab_size must be at most vocab_size = 101, got 102"),
    ({"speculators_model_type": "dflash2", "conv_group_size": 48}, "conv_group_size must divide hidden_size 64"),
    ({"speculators_model_type": "dspark", "markov_head_type": "rnn"}, "must be vanilla, got 'rnn'"),
])  # fmt: skip
def test_a_speculators_config_that_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        DraftConfig.from_config(speculators(**changes), "drafter")


def test_a_folder_is_written_atomically(tmp_path, monkeypatch):
    checkpoint(tmp_path / "draft", config_dict())
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes").write_text("mine")
    with pytest.raises(ValueError, match="is not an empty folder"):
        export(tmp_path / "draft", taken, "published")
    with pytest.raises(ValueError, match="must be published, speculators, transformers or gguf, got 'onnx'"):
        export(tmp_path / "draft", tmp_path / "out", "onnx")
    with pytest.raises(ValueError, match=r"give it \(--target\)"):
        export(tmp_path / "draft", tmp_path / "out", "speculators")

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"out could not be written: .*No space left on device"):
        export(tmp_path / "draft", tmp_path / "out", "published")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "taken"]


@pytest.mark.parametrize("config", ["[" * 100_000, "[]", '{"architectures": 5}', ""], ids=lambda config: config[:24])
def test_a_targets_config_that_cannot_be_read_is_named(config, tmp_path):
    checkpoint(tmp_path / "draft", config_dict())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"target/config\.json"):
        export(tmp_path / "draft", tmp_path / "out", "speculators", target=str(tmp_path / "target"))
    assert not (tmp_path / "out").exists()


def test_the_command_writes_a_folder(tmp_path, shell):
    checkpoint(tmp_path / "draft", config_dict())

    export = ("export", "--draft", tmp_path / "draft", "--out")
    out, options = str(tmp_path / "out"), ("--format", "speculators", "--target")
    done = shell(*export, out, *options, "owner/target", "--dtype", "bfloat16", "--json").assert_done()
    assert (done.out, done.err) == (json.dumps({"out": out, "format": "speculators"}) + "\n", "")
    assert dflash.load_draft(out).dtype == torch.bfloat16
    assert read(tmp_path / "out")["dtype"] == "bfloat16"
    shell(*export, out, "--format", "published").assert_refused("is not an empty folder")
    (tmp_path / "config.json").write_text("{}")
    done = shell(*export, tmp_path / "local", *options, tmp_path).assert_done()
    assert done.err.startswith("dflash: vLLM looks for the target of a speculators checkpoint on the hub only")

"""Test ``dflash doctor --model --draft``: each planted fault is named, with the line that repairs it."""

import dataclasses
import json
import shutil
import sys

import pytest
from planted_pairs import FAULTS, PROMPTS, Planted, plant

from dflash import cli
from dflash.doctor import Effort, Wiring, diagnose
from dflash.drafter import DraftConfig, Rope
from dflash.evaluate import PAIR

# These take more anchors to tell from chance.
SUBTLE = {"causal", "healthy", "taps one too low", "two taps swapped", "last tap before the norm"}


def examine(fault: Planted, folder, name: str = ""):
    prompts, effort = (PROMPTS[:8], Effort(64, 16)) if name in SUBTLE else (PROMPTS[:2], Effort(40, 16))
    return diagnose(plant(fault, folder), prompts, effort)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_and_nothing_else(tmp_path, name):
    fault = FAULTS[name]
    found = examine(fault, tmp_path, name)
    assert [finding.fault for finding in found.findings] == [fault.named]
    finding = found.findings[0]
    assert fault.fix in finding.advice
    assert finding.after is None or finding.after > 1.05 * finding.before


def test_nothing_is_said_of_the_healthy_pair(tmp_path):
    found = examine(Planted(""), tmp_path, "healthy")
    assert not found.findings
    assert found.acceptance_length > 10
    assert found.tried > 20


def test_two_faults_are_named_one_after_the_other(tmp_path):
    both = Planted("", {"input_embedding_scale": 40.0}, {"target_layer_ids": [4, 3, 2, 1]})
    found = examine(both, tmp_path)
    assert {finding.fault for finding in found.findings} == {"embedding scale", "tap order"}


def test_another_wiring_shares_the_weights_and_leaves_the_drafter_alone(tmp_path):
    drafter = plant(Planted(""), tmp_path).drafter
    config = dataclasses.replace(drafter.config, rope=Rope(theta=77.0), causal=(True,) * 3)
    before, frequencies = drafter.config, drafter.inv_freq.clone()
    other = drafter.rewired(config)
    assert [p.data_ptr() for p in other.parameters()] == [p.data_ptr() for p in drafter.parameters()]
    assert (other.config, drafter.config) == (config, before)
    assert not other.inv_freq.equal(frequencies)
    assert drafter.inv_freq.equal(frequencies)


@pytest.mark.parametrize(
    ("patch", "speculators"),
    [
        ({"target_layer_ids": [0, 2]}, {"aux_hidden_state_layer_ids": [1, 3]}),
        ({"mask_token_id": 5}, {"mask_token_id": 5}),
        ({"is_causal": False}, {"sliding_window_non_causal": True}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
        ({"layer_types": ["full_attention"] * 2, "is_causal": True}, None),
    ],
    ids=["taps", "mask", "causal", "rope", "types"],
)
def test_the_advised_line_has_the_same_effect_in_the_speculators_layout(patch, speculators):
    layer = {
        **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"head_dim": 32, "vocab_size": 100, "sliding_window": 9, "use_sliding_window": True},
        **{"layer_types": ["sliding_attention"] * 2, "num_key_value_heads": 1},
    }
    config = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 3], "mask_token_id": 4}
    config["transformer_layer_config"] = layer
    wiring = Wiring.read(config)
    line = json.loads("{" + wiring.line(patch, speculators=True) + "}")
    layer |= line.pop("transformer_layer_config", {})
    assert speculators is None or line == speculators
    assert DraftConfig.from_config({**config, **line}) == wiring.patched(patch).config != wiring.config


# ---------------------------------------------------------------------------------------------- the command


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dflash", "doctor", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out = capsys.readouterr()
    return exit.value.code or 0, out.out, out.err


def test_the_command_exits_with_1_and_names_the_fault_in_json(monkeypatch, capsys, tmp_path):
    plant(FAULTS["embeddings scaled"], tmp_path / "draft")
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:2]))
    pair = ("--model", str(PAIR / "target"), "--draft", str(tmp_path / "draft"), "--dtype", "float32")
    code, text, error = call(monkeypatch, capsys, *pair, "--prompts", str(rows), "--max-new-tokens", "32", "--json")
    assert (code, error) == (1, "")
    found = json.loads(text)
    assert [finding["fault"] for finding in found["findings"]] == ["embedding scale"]
    assert found["prompts"] == 2


def test_the_command_exits_with_0_if_nothing_is_found(monkeypatch, capsys, tmp_path):
    for name in ("target", "draft"):
        (tmp_path / name).symlink_to(PAIR / name)
    rows = "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:2])
    (tmp_path / "prompts.jsonl").write_text(rows)  # found next to the target
    pair = ("--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--max-new-tokens", "32")
    code, text, _ = call(monkeypatch, capsys, *pair)
    assert code == 0
    assert "no fault found" in text
    assert "2 prompts" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "a"], "--model needs --draft"),
        (["--draft", "a"], "--draft needs --model"),
        (["--prompts", "a"], "--prompts needs --model and --draft"),
        (["--model", "a", "--draft", "b", "--max-new-tokens", "1"], "at least 4, got 1"),
    ],
    ids=["model", "draft", "prompts", "tokens"],
)
def test_options_that_do_not_go_together_are_refused(monkeypatch, capsys, arguments, words):
    code, _, error = call(monkeypatch, capsys, *arguments)
    assert code == 2
    assert words in error


def test_a_pair_that_does_not_fit_exits_with_2(monkeypatch, capsys, tmp_path):
    shutil.copytree(PAIR / "draft", tmp_path, dirs_exist_ok=True)
    plant(Planted("", dflash={"target_layer_ids": [1, 2, 3, 9]}, config={"num_target_layers": 10}), tmp_path)
    code, _, error = call(monkeypatch, capsys, "--model", str(PAIR / "target"), "--draft", str(tmp_path))
    assert code == 2
    assert "num_target_layers is 10, the target's is 6" in error

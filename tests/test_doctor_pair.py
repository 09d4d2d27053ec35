"""Test ``dflash doctor --model --draft``: each planted fault is named, with the line that repairs it."""

import copy
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from examples import is_long
from planted_pairs import FAULTS, KINDS, PROMPTS, Planted, plant
from tokenizers import processors

from dflash import Generator, cli
from dflash.doctor import Effort, Wiring, diagnose, find_prompts
from dflash.doctor.recording import Answered, record
from dflash.doctor.replay import Replay
from dflash.evaluate import PAIR

# These take more places to tell from chance.
SUBTLE = {"causal", "healthy", "taps one too low", "two taps swapped", "last tap before the norm"}
# Each fault once in every run; the other ways to plant some of them with `-m long`.
MORE = {"taps one too low", "two taps swapped", "another mask id", "a causal window", "scale of embeddings missing"}


def examine(fault: Planted, folder, name: str = ""):
    prompts, effort = (PROMPTS[:8], Effort(64, 16)) if name in SUBTLE else (PROMPTS[:2], Effort(40, 16))
    return diagnose(plant(fault, folder), prompts, effort)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FAULTS if is_long() or name not in MORE])
def test_a_planted_fault_is_named_and_nothing_else(tmp_path, name):
    fault = FAULTS[name]
    found = examine(fault, tmp_path, name)
    assert [finding.fault for finding in found.findings] == [fault.named]
    finding = found.findings[0]
    assert fault.fix in finding.advice
    assert finding.after is None or finding.after > 1.05 * finding.before


def test_every_fault_of_the_documentation_is_planted():
    page = (Path(__file__).parents[1] / "docs" / "doctor.md").read_text()
    table = page.split("## What is looked for")[1].split("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in row.split("`")[1::2]}
    assert documented == {fault.named for fault in FAULTS.values()}


def test_nothing_is_said_of_the_healthy_pair(tmp_path):
    found = examine(Planted(""), tmp_path, "healthy")
    assert not found.findings
    assert not found.notes
    assert found.acceptance_length > 10
    assert found.tried > 20
    assert len(found.acceptance_per_position) == found.block_size - 1
    assert found.acceptance_per_position[0] > 0.8
    assert found.acceptance_length == pytest.approx(1 + sum(found.acceptance_per_position))


def test_two_faults_are_named_one_after_the_other(tmp_path):
    both = Planted("", {"input_embedding_scale": 40.0}, {"target_layer_ids": [4, 3, 2, 1]})
    found = examine(both, tmp_path)
    assert {finding.fault for finding in found.findings} == {"embedding scale", "tap order"}


def test_the_reason_of_low_acceptance_is_not_guessed(tmp_path):
    def forget(weights):  # as if it was trained for another target
        weights["fc.weight"] = weights["fc.weight"].roll(1, 0)

    found = examine(Planted("", weights=forget), tmp_path)
    assert found.acceptance_length < 3
    assert not found.findings
    assert "no other wiring helps" in found.notes[0]


def test_answers_that_are_too_short_are_not_compared(tmp_path):
    found = diagnose(plant(Planted(""), tmp_path), PROMPTS[:1], Effort(8, 16))
    assert not found.findings
    assert "give more prompts" in found.notes[0]


def test_prompts_are_also_tried_with_a_bos_token(tmp_path):
    patient = plant(Planted(""), tmp_path)
    tokenizer = copy.deepcopy(patient.tokenizer)
    tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])  # which puts it there
    without = diagnose(dataclasses.replace(patient, tokenizer=tokenizer), PROMPTS[:2], Effort(40, 16))
    bos = diagnose(dataclasses.replace(patient, tokenizer=tokenizer, bos=True), PROMPTS[:2], Effort(40, 16))
    assert without.acceptance_length < bos.acceptance_length
    assert without.trials["a BOS token before the prompt"] == bos.acceptance_length
    assert "a BOS token before the prompt" not in bos.trials


# ---------------------------------------------------------------------------------------------- kinds of drafters


def decode(patient, prompt: int = 0):
    """Answer a prompt; return its places, what each step emitted there, and the replay over all places."""
    ids = torch.tensor([patient.encode(PROMPTS[prompt])])
    generator = Generator(patient.target, patient.drafter, max_length=ids.shape[1] + 60)
    out = generator.generate(ids, max_new_tokens=60, temperature=0.0, return_dict_in_generate=True)
    wiring = Wiring.read(patient.keys)
    recording = record(
        patient.target, [Answered(out.sequences[0].tolist(), ids.shape[1])], wiring.config.target_layer_ids
    )
    replay = Replay(recording, generator.engine.target, patient.drafter, 1000)
    return out.statistics.acceptance_lengths[0], replay.score(wiring).tokens.long().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_again_accepts_what_decoding_accepts(tmp_path, kind):
    emitted, replayed = decode(plant(KINDS[kind], tmp_path))
    place, walked = 0, []
    while place < len(replayed):
        walked.append(replayed[place])
        place += walked[-1]
    assert walked[:-1] == emitted[:-1]  # the last step may end with the answer
    assert len(walked) == len(emitted)
    assert max(emitted) > 4


@pytest.mark.parametrize("kind", ["DFlash 2", "own parts"])
def test_a_drafter_of_another_kind_is_diagnosed_alike(tmp_path, kind):
    healthy = examine(KINDS[kind], tmp_path / "healthy", "healthy")
    assert not healthy.findings
    assert healthy.replayed > 8
    reversed_taps = KINDS[kind].dflash | {"target_layer_ids": [4, 3, 2, 1]}
    found = examine(dataclasses.replace(KINDS[kind], dflash=reversed_taps), tmp_path / "faulty")
    assert [finding.fault for finding in found.findings] == ["tap order"]
    assert found.findings[0].config == {"dflash_config": {"target_layer_ids": [1, 2, 3, 4]}}


def test_a_dflash_2_drafter_drafts_badly_without_its_selector(tmp_path):
    patient = plant(KINDS["DFlash 2"], tmp_path)
    emitted, _ = decode(patient)
    patient.drafter.candidate_selector.successor_codebook.zero_()
    without, _ = decode(patient)
    assert len(without) > 1.5 * len(emitted), "so the tests above would see a replay without one"


# ---------------------------------------------------------------------------------------------- the command


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dflash", "doctor", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out = capsys.readouterr()
    return exit.value.code or 0, out.out, out.err


def prompts_file(folder, count: int = 2) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:count]))
    return str(path)


# These are documented (docs/doctor.md): scripts read them.
KEYS = {
    *("acceptance_length", "acceptance_per_position", "block_size", "findings", "new_tokens", "notes", "places"),
    *("prompts", "replayed", "seconds", "trials", "tried"),
}
FINDING_KEYS = {"advice", "after", "before", "config", "fault", "found"}


def test_the_command_exits_with_1_and_names_the_fault_in_json(monkeypatch, capsys, tmp_path):
    plant(FAULTS["embeddings scaled"], tmp_path / "draft")
    pair = ("--model", str(PAIR / "target"), "--draft", str(tmp_path / "draft"), "--dtype", "float32")
    arguments = (*pair, "--prompts", prompts_file(tmp_path), "--max-new-tokens", "32", "--json")
    code, text, error = call(monkeypatch, capsys, *arguments)
    assert (code, error) == (1, "")
    found = json.loads(text)
    assert found.keys() == KEYS
    assert found["prompts"] == 2
    (finding,) = found["findings"]
    assert finding.keys() == FINDING_KEYS
    assert finding["fault"] == "embedding scale"
    assert finding["config"] == {"input_embedding_scale": 1.0}
    page = (Path(__file__).parents[1] / "docs" / "doctor.md").read_text()
    assert all(f"`{key}`" in page for key in KEYS | FINDING_KEYS)


def test_the_command_exits_with_0_if_nothing_is_found(monkeypatch, capsys, tmp_path):
    for name in ("target", "draft"):
        (tmp_path / name).symlink_to(PAIR / name)
    prompts_file(tmp_path)  # found next to the target
    pair = ("--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--max-new-tokens", "32")
    code, text, _ = call(monkeypatch, capsys, *pair)
    assert code == 0
    assert "no fault found" in text
    assert "2 prompts" in text
    assert "kept in" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "a"], "--model needs --draft"),
        (["--draft", "a"], "--draft needs --model"),
        (["--prompts", "a"], "--prompts needs --model and --draft"),
        (["--model", "a", "--draft", "b", "--max-new-tokens", "1"], "at least 4, got 1"),
        (["--model", "./a", "--draft", str(PAIR / "draft")], "no folder './a'"),
        (["--model", str(PAIR / "target"), "--draft", "./b"], "draft './b' is neither a folder"),
        (["--model", str(PAIR / "target"), "--draft", str(PAIR / "target")], "architectures must name"),
        (["--model", str(PAIR / "target"), "--draft", str(PAIR)], "config.json is missing"),
        (["--model", str(PAIR / "target"), "--draft", str(PAIR / "draft"), "--bos"], "--bos is for tokenizers without"),
        (["--model", str(PAIR / "target"), "--draft", str(PAIR / "draft"), "--prompts", "./c"], "'c' is not a file"),
    ],
    ids=["model", "draft", "prompts", "tokens", "no model", "no draft", "target twice", "no config", "bos", "no file"],
)
def test_what_cannot_be_examined_is_refused(monkeypatch, capsys, arguments, words):
    code, out, error = call(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', "line 2: prompt must be text"),
        ('{"prompt": "a"\n', "line 1"),
        ('{"answer": "a"}\n', "line 1: a prompt needs"),
        ("[1]\n", "line 1: must be a JSON object"),
    ],
    ids=["nothing", "empty lines", "number", "no JSON", "no prompt", "list"],
)
def test_a_bad_file_of_prompts_is_refused_before_anything_is_loaded(monkeypatch, capsys, tmp_path, content, words):
    (tmp_path / "bad.jsonl").write_text(content)
    arguments = ("--model", "./missing", "--draft", "./missing", "--prompts", str(tmp_path / "bad.jsonl"))
    code, _, error = call(monkeypatch, capsys, *arguments)
    assert code == 2
    assert words in error


def test_prompts_next_to_a_target_are_taken_from_all_over_the_file(tmp_path):
    (tmp_path / "target").mkdir()
    rows = [json.dumps({"prompt": str(number)}) + "\n" for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    found = find_prompts(None, str(tmp_path / "target"))
    assert [prompt["prompt"] for prompt in found] == ["0", "5", "10", "15", "20", "25", "30", "35"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2, 3, 9]}, "num_target_layers": 10}, "is 10"),
        ({"hidden_size": 64}, "its hidden_size is 64, the target's is 192"),
        ({"vocab_size": 2000}, "its vocab_size is 2000, the target's is 1536"),
        (
            {"num_target_layers": None, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [7]}},
            "taps layers [7]",
        ),
        ({"dflash_config": {"mask_token_id": 1, "projector_type": "x"}}, "projector_type = 'x' is not supported"),
    ],
    ids=["layers", "width", "vocabulary", "taps", "projector"],
)
def test_a_pair_that_does_not_fit_is_refused_before_its_weights_are_loaded(
    monkeypatch, capsys, tmp_path, change, words
):
    shutil.copytree(PAIR / "target", tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "draft").mkdir()
    config = json.loads((PAIR / "draft" / "config.json").read_text()) | change
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    pair = ("--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"))
    code, _, error = call(monkeypatch, capsys, *pair)
    assert code == 2
    assert words in error

"""Test ``dflash doctor --model --draft``: each planted fault is named, with the line that repairs it."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from examples import is_long
from families import draft_config, make_draft, make_target
from planted_pairs import (
    DRAFT,
    FAULTS,
    HEALTHY,
    KINDS,
    PROMPTS,
    TAPS,
    Planted,
    healthy_keys,
    merged,
    plant,
    target_and_tokenizer,
)
from tiny_tokenizers import byte_level
from tokenizers import processors

from dflash import Generator, load_draft
from dflash.loading import PAIR
from dflash_tools.doctor import Pair, Prompts, Wiring, diagnose, find_prompts
from dflash_tools.doctor.diagnosis import Answered, DraftReplay, answer, record
from dflash_tools.doctor.wiring import Facts, variants

# These take more places to tell from chance.
SUBTLE = {"taps one too low", "two taps swapped", "last tap before the norm", "causal"}
# With `-m long` only: the search finds others the same way, and every run checks that a variant repairs their config.
MORE = {
    *("taps one too low", "taps reversed", "two taps swapped", "another RoPE theta", "another RoPE scaling"),
    *("another mask id", "the end as mask", "a causal window", "embeddings scaled", "scale of embeddings missing"),
    "too few positions",
}


def examine(fault: Planted, folder, count: int = 1, *effort: int):
    return diagnose(*plant(fault, folder, count), *(effort or (48, 24)))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FAULTS if is_long() or name not in MORE])
def test_a_planted_fault_is_named_and_nothing_else(tmp_path, name):
    fault = FAULTS[name]
    found = examine(fault, tmp_path, *((8, 64, 16) if name in SUBTLE else ()))
    assert [finding.fault for finding in found.findings] == [fault.named]
    finding = found.findings[0]
    assert finding.config == fault.repair
    assert fault.words in finding.advice
    assert finding.after is None or finding.after > 1.05 * finding.before


REPAIRED = {name: fault for name, fault in FAULTS.items() if fault.repair is not None}


@pytest.mark.parametrize("name", REPAIRED)
def test_a_variant_of_each_planted_config_is_its_repair(name):
    fault = REPAIRED[name]
    wiring = Wiring.read(merged(healthy_keys(fault.kind), fault.config | {"dflash_config": fault.dflash}))
    target, tokenizer = target_and_tokenizer()
    keys, rows = target.config.to_dict(), target.config.vocab_size
    facts = Facts(keys, target.config.num_hidden_layers, tokenizer, 200, rows, torch.float32)
    assert any((one.fault, one.config) == (fault.named, fault.repair) for one in variants(wiring, facts))


@pytest.mark.parametrize("name", [name for name, fault in REPAIRED.items() if fault.weights is None])
def test_the_advised_line_repairs_the_planted_drafter(tmp_path, name):
    fault, folder = FAULTS[name], tmp_path / "faulty"
    plant(fault, folder)
    healthy, _ = plant(KINDS[fault.kind], tmp_path / "healthy")
    path = folder / "config.json"
    faulty = json.loads(path.read_text())
    path.write_text(json.dumps(merged(faulty, fault.repair)))
    assert Wiring.read(json.loads(path.read_text())) == Wiring.read(healthy.keys)
    assert Wiring.read(faulty) != Wiring.read(healthy.keys)
    assert load_draft(folder).config == healthy.drafter.config


def test_every_fault_of_the_documentation_is_planted():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    table = page.split("## What is looked for")[1].split("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in row.split("`")[1::2]}
    assert documented == {fault.named for fault in FAULTS.values()}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS if is_long() else ["as it is"])
def test_nothing_is_said_of_a_healthy_pair(tmp_path, kind):
    found = examine(KINDS[kind], tmp_path, 4, 64, 16)
    assert not found.findings
    assert not found.notes
    assert found.acceptance_length > 8
    assert found.tried > 20
    assert len(found.acceptance_per_position) == found.block_size - 1
    assert found.acceptance_per_position[0] > 0.8
    assert found.acceptance_length == pytest.approx(1 + sum(found.acceptance_per_position))


def test_two_faults_are_named_one_after_the_other(tmp_path):
    both = Planted("", {"input_embedding_scale": 40.0}, {"target_layer_ids": TAPS[::-1]})
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
    found = examine(Planted(""), tmp_path, 1, 8, 16)
    assert not found.findings
    assert "give more prompts" in found.notes[0]


def test_prompts_are_also_tried_with_a_bos_token(tmp_path):
    pair, prompts = plant(Planted(""), tmp_path, 2)
    prompts = dataclasses.replace(prompts, tokenizer=copy.deepcopy(prompts.tokenizer))
    prompts.tokenizer.chat_template = None
    prompts.tokenizer.backend_tokenizer.post_processor = processors.Sequence([])  # which puts it there
    without = diagnose(pair, prompts, 40, 16)
    bos = answer(pair, dataclasses.replace(prompts, bos=True), 40, lambda *_: None)
    assert without.acceptance_length < bos.acceptance_length
    assert without.encodings == {"a BOS token before the prompt": bos.acceptance_length}
    assert not set(without.encodings) & set(without.trials), "these have another measure"


def test_an_encoding_that_does_not_fit_the_target_is_left_out(tmp_path):
    thinks = ("'\\n=>\\n' -}}", "'\\n=>\\n' -}}{{- 'long ' * 2000 if enable_thinking is true else '' -}}")
    found = examine(Planted("", template=thinks), tmp_path, 1)
    assert found.trials, "what was found before is kept"
    (note,) = found.notes
    assert note.startswith("the chat template with enable_thinking=True was not tried: a prompt of ")
    assert "does not fit the target's 1024 positions" in note


# ---------------------------------------------------------------------------------------------- kinds of drafters


def decode(pair: Pair, ids: list[int]):
    """Answer a prompt; return what each step emitted, and what drafting again accepts at each place."""
    generator = Generator(pair.target, pair.drafter, max_length=len(ids) + 60)
    out = generator.generate(torch.tensor([ids]), max_new_tokens=60, temperature=0.0, return_dict_in_generate=True)
    wiring = Wiring.read(pair.keys)
    recordings = record(pair.target, [Answered(out.sequences[0].tolist(), len(ids))], wiring.config.target_layer_ids)
    replay = DraftReplay(recordings, generator.engine.target, pair.drafter, 1000)
    return out.statistics.acceptance_lengths[0], replay.score(wiring).tokens.long().tolist()


def expect_equal_steps(emitted: list[int], replayed: list[int]) -> None:
    """Assert that walking from place to place takes the steps of real decoding."""
    place, walked = 0, []
    while place < len(replayed):
        walked.append(replayed[place])
        place += walked[-1]
    assert walked[:-1] == emitted[:-1]  # the last step may end with the answer
    assert len(walked) == len(emitted)


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_again_accepts_what_decoding_accepts(tmp_path, kind):
    pair, prompts = plant(KINDS[kind], tmp_path, 1)
    emitted, replayed = decode(pair, prompts.ids[0])
    expect_equal_steps(emitted, replayed)
    assert max(emitted) > 4


@pytest.mark.long
@pytest.mark.parametrize("kind", [*KINDS][1:] if is_long() else ["needs its selector"])
def test_a_fault_of_a_drafter_of_another_kind_is_named(tmp_path, kind):
    reversed_taps = KINDS[kind].dflash | {"target_layer_ids": TAPS[::-1]}
    found = examine(dataclasses.replace(KINDS[kind], dflash=reversed_taps), tmp_path)
    assert [finding.fault for finding in found.findings] == ["tap order"]
    assert found.findings[0].config == {"dflash_config": {"target_layer_ids": TAPS}}


# ---------------------------------------------------------------------------------------------- kinds of targets


def random_pair(family: str, vocab: int) -> Pair:
    target = make_target(family, vocab_size=vocab)
    return Pair(target, make_draft(target), draft_config(target))


@pytest.mark.parametrize("family", ["nemotron_h", "gemma3", "glm_moe_dsa"])
def test_drafting_again_accepts_what_decoding_accepts_in_other_families(family):
    emitted, replayed = decode(random_pair(family, 8), [5, 3, 7, 1, 4])
    expect_equal_steps(emitted, replayed)
    assert max(emitted) > 1, "of eight tokens a random drafter guesses some"


def test_a_drafter_may_have_another_dtype_than_the_target():
    pair = random_pair("gemma3", 97)
    pair.drafter.to(torch.bfloat16)
    wiring = Wiring.read(pair.keys)
    recordings = record(pair.target, [Answered(list(range(2, 60)), 5)], wiring.config.target_layer_ids)
    replay = DraftReplay(recordings, Generator(pair.target, None, max_length=99).engine.target, pair.drafter, 1000)
    assert replay.score(wiring).tokens.numel() > 0


@pytest.mark.parametrize("family", ["nemotron_h", "qwen4_exp"])
def test_every_wiring_is_tried_on_targets_that_list_no_layers_or_have_streams(family):
    pair = random_pair(family, 97)
    assert ("num_hidden_layers" in pair.target.config.to_dict()) == (family == "qwen4_exp")
    prompts = Prompts([{"prompt": "abc"}, {"prompt": "cab de"}], byte_level())
    found = diagnose(pair, prompts, 16, 16)
    assert found.tried > 20
    assert not found.findings


# ---------------------------------------------------------------------------------------------- the command


def prompts_file(folder, count: int = 2) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:count]))
    return str(path)


# These are documented (docs/doctor.md): scripts read them.
KEYS = {
    *("acceptance_length", "acceptance_per_position", "block_size", "findings", "new_tokens", "notes", "places"),
    *("encodings", "prompts", "prompts_from", "replayed", "seconds", "trials", "tried"),
}
FINDING_KEYS = {"advice", "after", "before", "config", "fault", "found"}


def test_the_command_exits_with_1_and_names_the_fault_in_json(shell, tmp_path):
    plant(FAULTS["embeddings scaled"], tmp_path / "draft")
    pair = ("--model", PAIR / "target", "--draft", tmp_path / "draft", "--dtype", "float32")
    done = shell("doctor", *pair, "--prompts", prompts_file(tmp_path), "--max-new-tokens", "24", "--json")
    assert (done.code, done.err) == (1, "")
    found = json.loads(done.out)
    assert found.keys() == KEYS
    assert found["prompts"] == 2
    assert found["prompts_from"] == f"all 2 in {tmp_path / 'prompts.jsonl'}"
    (finding,) = found["findings"]
    assert finding.keys() == FINDING_KEYS
    assert finding["fault"] == "embedding scale"
    assert finding["config"] == {"input_embedding_scale": 1.0}
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    assert all(f"`{key}`" in page for key in KEYS | FINDING_KEYS)


def test_the_command_exits_with_0_if_nothing_is_found(shell, tmp_path):
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        for file in (PAIR / name).iterdir():
            (tmp_path / name / file.name).symlink_to(file)
    template = tmp_path / "target" / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    template.write_text("{%- set more = 'so ' if enable_thinking is true else '' -%}" + text + "{{- more -}}")
    prompts_file(tmp_path)  # found next to the target
    done = shell("doctor", "--model", tmp_path / "target", "--draft", tmp_path / "draft", "--max-new-tokens", "32")
    assert done.code == 0
    for words in ("no fault found", "2 prompts", f"prompts: all 2 in {tmp_path / 'prompts.jsonl'}", "kept in"):
        assert words in done.out
    assert "enable_thinking=True" in done.out.split("with other ways to encode prompts:")[1]


TARGET = ("--model", PAIR / "target")
BOTH = (*TARGET, "--draft", DRAFT)


@pytest.mark.parametrize(("arguments", "words"), [
    (["--model", "a"], "--model needs --draft"),
    (["--prompts", "a"], "--prompts needs --model and --draft"),
    (["--bos", "--no-thinking"], "--no-thinking, --bos need --model and --draft"),
    (["--model", "a", "--draft", "b", "--max-new-tokens", "1"], "at least 4, got 1"),
    (["--model", "./a", "--draft", DRAFT], "no folder './a'"),
    ([*TARGET, "--draft", "./b"], "draft './b' is neither a folder"),
    ([*TARGET, "--draft", PAIR / "target"], "architectures must name"),
    ([*TARGET, "--draft", PAIR], "config.json is missing"),
    ([*BOTH, "--prompts", "./c"], "'./c' is not a file"),
])  # fmt: skip
def test_what_cannot_be_examined_is_refused(shell, arguments, words):
    shell("doctor", *arguments).assert_refused(words)


def test_more_prompts_than_are_examined_are_taken_from_all_over_the_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    for count, origin in ((64, "32 of the 64"), (32, "all 32")):
        file.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in range(count)))
        found = find_prompts(str(file), "unused")
        assert found[1] == f"{origin} in {file}"
        assert [prompt["prompt"] for prompt in found[0]] == [str(count // 32 * number) for number in range(32)]


def test_an_error_in_the_prompts_next_to_the_target_says_where_they_stand(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"answer": "a"}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl, line 1: .* next to the target; --prompts names another"):
        find_prompts(None, str(tmp_path / "target"))


@pytest.fixture
def no_weights(tmp_path) -> Path:
    """Copy the package's target, so that whoever loads its weights fails."""
    ignored = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(PAIR / "target", tmp_path / "target", ignore=ignored))


@pytest.mark.parametrize(("asked", "changed", "options", "words"), [
    ("", "", (), "is empty"),
    ('{"prompt": "a"}\n{"prompt": 3}\n', "", (), "prompt must be non-empty text"),
    (json.dumps({"prompt": "long " * 2000}), "", (), "does not fit the target's 1024 positions"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "template", (), "this tokenizer has none"),
    ('{"prompt": "a"}', "template and BOS", ("--bos",), "this tokenizer has no BOS token"),
], ids=["nothing", "no text", "length", "no template", "no BOS"])  # fmt: skip
def test_prompts_that_cannot_be_asked_are_refused_before_weights_are_loaded(
    shell, tmp_path, no_weights, asked, changed, options, words
):
    file, settings = tmp_path / "asked.jsonl", no_weights / "tokenizer_config.json"
    if changed:
        (no_weights / "chat_template.jinja").unlink()
    if "BOS" in changed:
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"bos_token": None}))
    file.write_text(asked)
    shell("doctor", "--model", no_weights, "--draft", DRAFT, "--prompts", file, *options).assert_refused(words)


@pytest.mark.parametrize(("change", "words"), [
    ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2, 3, 9]}, "num_target_layers": 10}, "is 10"),
    ({"dflash_config": {"mask_token_id": 1, "projector_type": "x"}}, "projector_type = 'x' is not supported"),
], ids=["layers", "projector"])  # fmt: skip
def test_a_pair_that_does_not_fit_is_refused_before_its_weights_are_loaded(shell, tmp_path, no_weights, change, words):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(HEALTHY | change))
    shell("doctor", "--model", no_weights, "--draft", tmp_path / "draft").assert_refused(words)

"""GGUF files: targets through every door."""

import json
import shutil

import draft_variants
import gguf
import pytest
import torch
from gguf_files import write_llama
from transformers import AutoModelForCausalLM

import dflash
from dflash.loading import Pretrained


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with ``target.gguf``, a drafter for it in ``draft``, prompts, and the model that was written."""
    folder = tmp_path_factory.mktemp("gguf")
    model = write_llama(folder / "target.gguf")
    config = draft_variants.config_dict(
        block_size=4, vocab_size=97, num_target_layers=4, dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 2]}
    )
    weights = draft_variants.random_tensors(dflash.DraftConfig.from_config(config))
    draft_variants.save_checkpoint(folder / "draft", config, weights)
    rows = [{"prompt": "abc de"}, {"prompt": "fa b"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, model


def test_a_target_loaded_in_python_runs_fused_and_writes_transformers_text(pair):
    folder, model = pair
    target = AutoModelForCausalLM.from_pretrained(folder, gguf_file="target.gguf", dtype=torch.float32)
    draft, ids = dflash.load_draft(folder / "draft"), torch.tensor([[5, 6, 7, 20]])
    generator = dflash.Generator(target, draft, max_length=64)
    assert not generator.fused_reason
    ours = generator.generate(ids, max_new_tokens=24)
    assert ours.tolist() == model.generate(ids, max_new_tokens=24, do_sample=False).tolist()


@pytest.mark.parametrize("name", ["target.gguf", "."])
def test_a_file_and_its_folder_are_loaded_with_tokenizer_and_template(pair, tmp_path, name):
    folder, model = pair
    shutil.copy(folder / "target.gguf", tmp_path)
    files = Pretrained(tmp_path / name)
    tokenizer, target = files.load_tokenizer(), files.load_target("auto")
    assert tokenizer.decode(tokenizer.encode("abc de")) == "abc de"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab\n"
    assert files.load_stop_token_ids(target.config) == [0]
    for key, weight in model.state_dict().items():
        assert torch.equal(target.state_dict()[key], weight)
    target.save_pretrained(tmp_path / "saved")  # transformers refuses what it takes for quantized
    assert (tmp_path / "saved" / "model.safetensors").is_file()


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("rope", [
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
], ids=lambda rope: rope["rope_type"])  # fmt: skip
def test_scaled_rope_is_that_of_the_file(tmp_path, rope):
    model, ids = write_llama(tmp_path / "x.gguf", rope=rope), torch.arange(100)[None] % 97
    found = Pretrained(tmp_path / "x.gguf").load_target("auto")
    assert found.config.rope_parameters["rope_type"] == rope["rope_type"]
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)


def test_every_stop_token_of_a_file_counts(tmp_path):
    write_llama(tmp_path / "x.gguf", keys={"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 0})
    files = Pretrained(tmp_path / "x.gguf")
    target = files.load_target("auto")
    assert files.load_stop_token_ids(target.config) == target.generation_config.eos_token_id == [0, 5]


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")])
def test_the_dtype_is_the_files_own_unless_another_is_asked_for(tmp_path, kind, dtype):
    write_llama(tmp_path / "x.gguf", gguf.GGMLQuantizationType[kind])
    files = Pretrained(tmp_path / "x.gguf")
    assert files.load_target("auto").dtype == getattr(torch, dtype)
    assert files.load_target(torch.float32).dtype == torch.float32


def test_a_folder_may_hold_target_drafter_and_projector(pair, tmp_path):
    shutil.copy(pair[0] / "target.gguf", tmp_path)
    (tmp_path / "mmproj-x.gguf").write_bytes(b"")
    broken(tmp_path, "draft")
    assert Pretrained(tmp_path).load_config().num_hidden_layers == 4


def test_commands_take_a_file(pair, shell, tmp_path):
    folder = pair[0]
    models = ["--model", folder / "target.gguf", "--draft", folder / "draft", "--json"]
    done = shell("generate", "abc de", *models, "--max-new-tokens", 8)
    assert done.code == 0, done.err
    assert json.loads(done.out)
    done = shell("doctor", *models, "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 8)
    assert done.code in (0, 1), done.err
    assert json.loads(done.out)["prompts"] == 2
    answers = tmp_path / "answers.jsonl"
    done = shell("regenerate", folder / "prompts.jsonl", *models, "--out", answers, "--max-new-tokens", 8)
    assert done.code == 0, done.err
    assert len(answers.read_text().splitlines()) == 2
    run = ["--data", answers, "--output", tmp_path / "run", "--layers", 1, "--block-size", 4, "--mask-token-id", 1]
    done = shell("train", "--model", folder / "target.gguf", *run, "--cache-features", tmp_path / "f", "--steps", 2)
    assert done.code == 0, done.err


def broken(folder, kind):
    """Return a file, or a folder, that is no target."""
    path, whole = folder / "x.gguf", (folder / "target.gguf").read_bytes()
    if kind == "several":
        path.write_bytes(whole)
        return folder
    if kind in ("llama.rope.scaling.type", "split.count"):
        write_llama(path, keys={kind: "longrope" if "rope" in kind else 3})
        return path
    if kind == "draft":
        writer = gguf.GGUFWriter(path, "dflash")
        writer.add_block_count(1)
        writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    elif kind == "unknown":
        path.write_bytes(whole.replace(b"llama", b"lxama"))
    elif kind != "missing":
        path.write_bytes({"truncated": whole[:-1], "header": whole[:900], "other": b"PK" + whole}[kind])
    return path


@pytest.mark.parametrize(("kind", "message"), [
    ("several", "several GGUF files: name one of .*target.gguf.*x.gguf"),
    ("draft", "is a DFlash drafter .dflash., not a target"),
    ("unknown", "lxama"),
    ("missing", "there is no file"),
    ("truncated", "not a complete GGUF file"),
    ("header", "not a complete GGUF file"),
    ("other", "is not a GGUF file"),
    ("llama.rope.scaling.type", "RoPE is scaled as transformers cannot read it here .rope.scaling.type = longrope"),
    ("split.count", "one of 3 parts of a model: merge them"),
])  # fmt: skip
def test_what_is_no_target_is_refused_by_name(pair, tmp_path, kind, message):
    shutil.copy(pair[0] / "target.gguf", tmp_path)
    path = broken(tmp_path, kind)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Pretrained(path).load_target("auto")


def test_a_missing_package_is_named(pair, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs the gguf package: pip install '.\[gguf\]'"):
        Pretrained(pair[0] / "target.gguf").load_tokenizer()


@pytest.mark.parametrize("name", ["owner/name-GGUF", "owner/name:Q4_K_M", "missing.GGUF"])
def test_a_name_without_a_file_is_refused_by_the_form_that_it_must_have(name):
    with pytest.raises(FileNotFoundError, match=r"one on the hub is owner/name:FILE\.gguf"):
        Pretrained(name).load_config()


def test_a_file_of_a_hub_is_asked_for_by_repository_and_name(pair, monkeypatch):
    asked = []
    download = lambda *names, **_: asked.append(names) or str(pair[0] / "target.gguf")  # noqa: E731
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert Pretrained("owner/name:target.gguf").load_config().num_hidden_layers == 4
    assert asked == [("owner/name", "target.gguf")]

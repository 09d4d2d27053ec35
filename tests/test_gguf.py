"""GGUF files: targets through every door."""

import json
import shutil

import draft_variants
import gguf
import pytest
import torch
from gguf_files import write_header, write_llama
from transformers import AutoModelForCausalLM

import dflash
from dflash.loading import Pretrained
from dflash.loading.gguf import read_gguf
from dflash.loading.gguf_architectures import read_config
from dflash.loading.gguf_tokenizer import load_tokenizer


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
    assert dflash.generate(target, draft, ids, max_new_tokens=8, weights="int8").shape == (1, 12)  # it is dense


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


@pytest.mark.parametrize("flags", [{"attention_bias": True}, {"mlp_bias": True}], ids=str)
def test_biases_of_a_file_are_used(tmp_path, flags):
    model, ids = write_llama(tmp_path / "x.gguf", config=flags), torch.arange(40)[None]
    found = Pretrained(tmp_path / "x.gguf").load_target("auto")
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)


SIZES = {"embedding_length": 96, "context_length": 512, "attention.head_count": 4, "block_count": 2}
YARN = {"type": "yarn", "factor": 32.0, "original_context_length": 4096, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}


@pytest.mark.parametrize(("arch", "keys", "expected"), [
    ("gemma3", {"block_count": 62, "attention.key_length": 32}, {"query_pre_attn_scalar": 24}),
    ("gemma3", {"block_count": 48, "attention.key_length": 32}, {"query_pre_attn_scalar": 32}),
    ("gemma2", {"block_count": 46, "attention.key_length": 32}, {"query_pre_attn_scalar": 24}),
    ("starcoder2", {"rope.freq_base": 999999.4375}, {"rope_parameters.rope_theta": 999999.44}),
    ("qwen3moe", {"expert_feed_forward_length": 96, "expert_count": 4},
     {"moe_intermediate_size": 96, "num_experts": 4}),
    ("qwen2moe", {"expert_shared_feed_forward_length": 40}, {"shared_expert_intermediate_size": 40}),
    ("qwen3", {"attention.key_length": 64}, {"head_dim": 64}),
    ("nemotron", {"attention.layer_norm_epsilon": 0.5, "attention.layer_norm_rms_epsilon": 0.5}, {"norm_eps": 0.5}),
    ("gpt-oss", {f"rope.scaling.{key}": value for key, value in YARN.items()},
     {"rope_parameters.factor": 32.0, "rope_parameters.truncate": False, "rope_parameters.beta_fast": 32.0}),
    ("granite", {"attention.scale": 0.015625, "logit_scale": 8.0},
     {"attention_multiplier": 0.015625, "logits_scaling": 8.0}),
    ("llama", {"expert_count": 8, "expert_used_count": 2}, {"model_type": "mixtral", "num_local_experts": 8}),
], ids=str)  # fmt: skip
def test_keys_of_an_architecture_are_read(tmp_path, arch, keys, expected):
    given = {f"{arch}.{key}": value for key, value in (SIZES | keys).items()}
    config = read_config(read_gguf(write_header(tmp_path / "x.gguf", arch, given)))
    for name, value in expected.items():
        first, _, second = name.partition(".")
        found = getattr(config, first)
        assert (found[second] if second else found) == value


@pytest.mark.parametrize(("arch", "keys", "unread"), [
    ("granite", {"expert_feed_forward_length": 96}, "expert_feed_forward_length"),
    ("lfm2", {"attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
              "attention.head_count_kv": [0, 2]}, "attention.layer_norm_epsilon"),
], ids=str)  # fmt: skip
def test_keys_that_a_model_type_does_not_have_are_refused(tmp_path, arch, keys, unread):
    given = {f"{arch}.{key}": value for key, value in (SIZES | keys).items()}
    with pytest.raises(ValueError, match=f": {arch}.{unread} mean nothing to transformers' {arch}"):
        read_config(read_gguf(write_header(tmp_path / "x.gguf", arch, given)))


def tokenizer(tmp_path, tokens, **keys):
    """Return the tokenizer of a file whose tokens of the form <...> are control tokens."""
    kinds = [3 if token[:1] == "<" and token[-1:] == ">" else 1 for token in tokens]
    given = {"model": "gpt2", "pre": "llama-bpe", "tokens": tokens, "token_type": kinds, **keys}
    keys = {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    return load_tokenizer(read_gguf(write_header(tmp_path / "x.gguf", "llama", keys)))


LETTERS = ["a", "b", "<", ">", "|", "e", "n", "d", "o", "f", "t", "x", "ab"]


def test_each_control_token_of_a_file_is_one_id(tmp_path):
    marks = ["<｜begin▁of▁sentence｜>", "<｜User｜>"]
    made = tokenizer(tmp_path, [*LETTERS, *marks], merges=["a b"], bos_token_id=13, pre="deepseek-r1-qwen")
    assert len(made) == 15
    assert made.bos_token_id == 13
    assert made.encode(f"{marks[0]}ab{marks[1]}", add_special_tokens=False) == [13, 12, 14]
    assert made.decode([13, 12], skip_special_tokens=True) == "ab"


def test_text_that_is_no_token_of_the_file_is_pieces(tmp_path):
    made = tokenizer(tmp_path, [*LETTERS, "<s>"], bos_token_id=13)
    ids = made.encode("<|endoftext|>")
    assert ids[0] == 13  # llama.cpp begins such a text with BOS if the file does not say
    assert max(ids) < 14
    assert made.decode(ids[1:]) == "<|endoftext|>"


@pytest.mark.parametrize(("keys", "expected"), [({}, [4, 6]), ({"add_space_prefix": False}, [6])])
def test_a_text_and_what_follows_a_control_token_begin_with_a_space(tmp_path, keys, expected):
    tokens, scores = ["<unk>", "<s>", "</s>", "b", "▁", "a", "▁a", "▁▁"], [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0]
    made = tokenizer(tmp_path, tokens, model="llama", scores=scores, **keys)
    assert made.encode(" a") == [1, *expected]
    assert made.encode("<s> a", add_special_tokens=False) == [1, *expected]


def test_a_vocabulary_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre must be one of .* got other: take the model's"):
        tokenizer(tmp_path, LETTERS, pre="other")


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


@pytest.mark.parametrize(("keys", "options", "expected", "said"), [
    ({}, [], {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}, "as llama.cpp by default"),
    ({"general.sampling.temp": 0.5, "general.sampling.top_k": -1}, ["--top-p", "0.5"],
     {"temperature": 0.5, "top_k": 0, "top_p": 0.5, "min_p": 0.05}, "by the keys of the file"),
    ({"general.sampling.temp": 0.0}, [], {"temperature": 0.0}, "temperature 0, "),
])  # fmt: skip
def test_a_file_is_sampled_as_by_llama_cpp_unless_options_say_otherwise(shell, tmp_path, keys, options, expected, said):
    write_llama(tmp_path / "target.gguf", keys=keys)
    call = ["generate", tmp_path / "target.gguf", "abc", "--seed", "1", "--max-new-tokens", "12"]
    done = shell(*call, *options)
    given = [word for name, value in expected.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert done.out == shell(*call, *given).out
    assert said in done.err
    assert "sampling" not in shell("doctor", tmp_path / "target.gguf").err


def test_a_files_penalty_of_repeated_tokens_is_applied(shell, tmp_path):
    answers = []
    for penalty in (1.0, 1.5):
        write_llama(
            tmp_path / "target.gguf", keys={"general.sampling.temp": 0.0, "general.sampling.penalty_repeat": penalty}
        )
        answers.append(shell("generate", tmp_path / "target.gguf", "abc", "--max-new-tokens", "12"))
    assert "repetition_penalty 1.5, as llama.cpp by the keys of the file" in answers[1].err
    assert answers[0].out != answers[1].out


def test_a_drafter_next_to_a_file_is_found(pair, shell):
    (pair[0] / "broken.gguf").write_bytes(b"GGUF")  # of a download that was stopped
    done = shell(
        "generate", pair[0] / "target.gguf", "abc", "--draft", "auto", "--max-new-tokens", 8, "--temperature", 0
    )
    assert " of 4, first token" in done.assert_done().err


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
    keys = {
        "llama.rope.scaling.type": "longrope", "split.count": 3, "general.type": "adapter",
        "llama.attention.scale": 0.5,
        "llama.attention.causal": False, "llama.attention.value_length": 8,
    }  # fmt: skip
    if kind in keys:
        write_llama(path, keys={kind: keys[kind]})
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
    ("general.type", "is not a model but of type adapter: merge it into its model"),
    ("llama.attention.scale", "llama.attention.scale mean nothing to transformers' llama"),
    ("llama.attention.causal", "llama.attention.causal must be true"),
    ("llama.attention.value_length", "llama.attention.value_length must be 16, the keys' own, got 8"),
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

"""A target's folder of unknown origin loads, or is refused by name before transformers allocates anything for it."""

import json
import shutil
import struct
import warnings

import pytest
import torch
from checkpoints import assert_refused, load_in_child
from families import make_target
from safetensors.torch import load_file, save_file
from tiny_pair import save_pair
from tiny_tokenizers import byte_fallback, byte_level
from tokenizers import Tokenizer

from dflash.loading import Pretrained
from dflash.loading.folder import check_target_config, check_target_size, check_target_weights

HUGE = 10**400
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": HUGE, "original_max_position_embeddings": 64}

# The key that the error names, and what is changed in config.json.
NAMED = [
    ("num_hidden_layers", {"num_hidden_layers": 10**6, "layer_types": None}),
    ("num_hidden_layers", {"num_hidden_layers": 10**12, "layer_types": None}),
    ("num_hidden_layers", {"num_hidden_layers": 1000, "layer_types": None}),
    ("num_hidden_layers", {"text_config": {"num_hidden_layers": 10**12}}),
    ("num_blocks", {"vision_config": {"num_blocks": 10**7}}), ("num_layers_per_stack", {"num_layers_per_stack": 10**7}),
    ("depth", {"vision_config": {"depth": 10**7}}), ("hidden_size", {"hidden_size": 2**20}),
    ("hidden_size", {"hidden_size": 2**40}), ("hidden_size", {"hidden_size": 2**62}), ("head_dim", {"head_dim": 2**30}),
    ("head_dim", {"head_dim": 2**31}), ("head_dim", {"head_dim": 2**40}),
    ("intermediate_size", {"intermediate_size": 2**30}), ("intermediate_size", {"intermediate_size": 2**63}),
    ("vocab_size", {"vocab_size": 2**30}), ("num_attention_heads", {"num_attention_heads": 2**25}),
    ("rms_norm_eps", {"rms_norm_eps": HUGE}),
    ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": HUGE}}),
    ("factor", {"rope_parameters": YARN}), ("architectures", {"architectures": 7}),
    ("architectures", {"architectures": {"a": 1}}), ("pad_token_id", {"pad_token_id": -HUGE}),
    ("sliding_window", {"sliding_window": {}, "use_sliding_window": True}),
]  # fmt: skip
TEXTS = {
    "nested brackets": "[" * 100_000,
    "nested metadata": '{"model_type": "qwen3", "auto_map": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "an integer of many digits": f'{{"model_type": "qwen3", "hidden_size": {"9" * 100_000}}}',
    "twenty megabytes": '{"model_type": "qwen3"}' + " " * 20_000_000,
    "a list": "[]",
}
LOAD_TARGET = """
from dflash.loading import Pretrained
def load(folder):
    Pretrained(folder).load_tokenizer()
    Pretrained(folder).load_empty_target()
    Pretrained(folder).load_target("auto")
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair")) / "target"


def copies(good, tmp_path, changes):
    """Copies of a good folder, each changed by one of the functions."""
    folders = []
    for number, change in enumerate(changes):
        folders.append(tmp_path / str(number))
        shutil.copytree(good, folders[-1])
        change(folders[-1])
    return folders


def config_of(good, changes):
    return json.dumps(json.loads((good / "config.json").read_text()) | changes)


def test_hostile_configs_are_refused_by_key_within_a_second_and_50_mb(good, tmp_path):
    texts = [config_of(good, changes) for _, changes in NAMED] + list(TEXTS.values())
    writes = [lambda folder, text=text: (folder / "config.json").write_text(text) for text in texts]
    names = [name for name, _ in NAMED] + ["config.json"] * len(TEXTS)
    assert_refused(names, load_in_child(good, copies(good, tmp_path, writes), LOAD_TARGET), 1500)


def hostile_weights(path):
    """Contents of model.safetensors that must be refused."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    data = content[8 + length :]
    pack = lambda text: struct.pack("<Q", len(text)) + text + data  # noqa: E731
    return {
        "nested brackets": pack(b"[" * 100_000),
        "cut": content[:-100],
        "cut in the header": content[:100],
        "nothing": b"",
    }


def test_hostile_weights_are_refused_within_a_second_and_50_mb(good, tmp_path):
    files = hostile_weights(good / "model.safetensors")
    writes = [lambda folder, one=one: (folder / "model.safetensors").write_bytes(one) for one in files.values()]
    names = ["model.safetensors: "] * len(files)
    assert_refused(names, load_in_child(good, copies(good, tmp_path, writes), LOAD_TARGET), 500)


@pytest.mark.parametrize("name", ["x" * 10_000, "../model.safetensors", "\0", ""])
def test_an_index_that_names_no_file_of_the_folder_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"weight_map names .* not a file in the same folder") as caught:
        check_target_weights(tmp_path)
    assert len(str(caught.value)) < 500


def save_with(folder, changes):
    """Save a target with other tensors; those that are None are left out."""
    make_target("qwen3").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(("change", "error"), [
    ({"model.norm.scale": torch.ones(64)}, r"place in Qwen3ForCausalLM, .* none: model\.norm\.scale F32 \[64\]\. "),
    ({"model.norm.weight": torch.ones(65)}, r"shapes than .* says: model\.norm\.weight \[65\] instead of \[64\]"),
    ({"model.norm.weight": None}, r"no weights for model\.norm\.weight: its files are incomplete"),
], ids=["unknown", "mismatched", "missing"])  # fmt: skip
def test_a_tensor_without_its_place_is_refused_by_name(tmp_path, change, error):
    save_with(tmp_path, change)
    with pytest.raises(ValueError, match=error):
        Pretrained(tmp_path).load_target("auto")


def test_tensors_that_change_no_output_are_left_out(tmp_path):
    names = ("layers.0.self_attn.rotary_emb.inv_freq", "visual.patch_embed.weight", "layers.0.self_attn.k_scale")
    save_with(tmp_path, {name: torch.ones(1) for name in ("mtp.fc.weight", *(f"model.{name}" for name in names))})
    assert torch.equal(Pretrained(tmp_path).load_target("auto").lm_head.weight, make_target("qwen3").lm_head.weight)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma3", "deepseek_v3"])
def test_the_folders_of_tested_families_pass(tmp_path, name):
    target = make_target(name)
    target.save_pretrained(tmp_path)
    check_target_config(tmp_path)
    check_target_size(target, check_target_weights(tmp_path))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_size_of_a_download_that_was_interrupted_is_not_judged(tmp_path, kind):
    folder = tmp_path / "snapshot"
    make_target("qwen3").save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    for shard in shards[1:]:
        shard.unlink()
    if kind == "bin":
        shards[0].rename(folder / "pytorch_model-00001-of-00006.bin")
        index = folder / "model.safetensors.index.json"
        index.rename(folder / "pytorch_model.bin.index.json")
    assert check_target_weights(folder) == []  # transformers would download them


def test_a_folder_without_files_is_left_to_transformers(tmp_path):
    check_target_config(tmp_path)
    check_target_weights(tmp_path)


@pytest.mark.parametrize(("make", "name", "warns"), [
    (byte_level, "Qwen2Tokenizer", False), (byte_fallback, "PreTrainedTokenizerFast", False),
    (byte_fallback, "LlamaTokenizer", True), (byte_level, "GemmaTokenizer", True),
])  # fmt: skip
def test_a_tokenizer_whose_class_is_not_that_of_its_file_is_warned_of_with_a_text(tmp_path, make, name, warns):
    make().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokenizer = Pretrained(tmp_path).load_tokenizer()
    said = [str(each.message) for each in caught if "tokenizer_class" in str(each.message)]
    assert len(said) == warns
    if warns:
        file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert f"makes {file.encode('Hello world').ids} of 'Hello world', and the class {name}, which" in said[0]
        assert type(tokenizer).__name__ == name


def adapter_of(name, folder):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": name}))
    return folder


def test_the_config_of_an_adapter_is_that_of_its_base(good, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    adapter = adapter_of(str(good), tmp_path / "adapter")
    assert Pretrained(adapter).load_config().to_dict() == Pretrained(good).load_config().to_dict()


def test_an_adapter_without_a_base_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for number, name in enumerate((None, 7, "\x1b[2J" * 100)):
        with pytest.raises((ValueError, OSError)):
            Pretrained(adapter_of(name, tmp_path / str(number))).load_config()
    itself = str(tmp_path / "itself")
    with pytest.raises(ValueError, match="itself"):
        Pretrained(adapter_of(itself, tmp_path / "itself")).load_config()


def test_an_adapter_without_peft_says_what_to_install(good, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"is an adapter of .*: pip install peft"):
        Pretrained(adapter_of(str(good), tmp_path / "adapter")).load_config()

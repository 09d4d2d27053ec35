"""GGUF drafters: llama.cpp's files and its forks', what is refused, and the export."""

import dataclasses
import json
from pathlib import Path

import draft_variants
import gguf
import pytest
import torch
from draft_variants import DFLASH2_VARIANTS, VARIANTS, config_dict, dflash2_dict, dspark_dict, sliding
from families import make_target
from gguf_files import MASK, draft_keys, draft_tensors, write_draft, write_llama
from tiny_tokenizers import byte_fallback, byte_level
from transformers import LlamaConfig

import dflash
from dflash.loading.gguf import GgufFile
from dflash_tools.doctor.diagnosis import check_file, describe_packed
from dflash_tools.train.export import export

Q8_0, Q4_0, Q5_1, F16, BF16 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q5_1", "F16", "BF16"))
FORKS = ("dflash-draft", "qwen35-dflash-draft", "gemma4-dflash-draft")
SCALES = {"attention_value_scale": 0.5, "input_embedding_scale": 8.0, "output_multiplier": 0.25}
KINDS = {
    "first": config_dict(dflash_config={"mask_token_id": 100, "target_layer_ids": [1, 9]}),
    "windows": config_dict(**sliding("sfs", 24), is_causal=True, rms_norm_eps=3e-5, rope_theta=12345.0),
    "scaled": config_dict(
        dflash_config={"mask_token_id": 100, "target_layer_ids": [0, 3], "final_logit_softcapping": 30.0, **SCALES}
    ),
    "dflash2": dflash2_dict(**sliding("ss", 12), is_causal=False),
    "dspark": dspark_dict(sample_from_anchor=True),
    "dspark-bonus": dspark_dict(sample_from_anchor=False),
}


def make(folder, config, **more):
    """Save a random drafter as safetensors; return it and its tensors, ``more`` among them."""
    tensors = draft_variants.random_tensors(dflash.DraftConfig.from_config(config)) | more
    return dflash.load_draft(draft_variants.save_checkpoint(folder, config, tensors)), tensors


def same(a: dflash.Drafter, b: dflash.Drafter) -> bool:
    """Equal bit for bit; a file says nothing of the number of the target's layers."""
    config, ours, theirs = dataclasses.replace(a.config, num_target_layers=None), a.state_dict(), b.state_dict()
    equal = ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    return equal and config == b.config and a.dtype == b.dtype


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder with the config and the byte-level tokenizer of a target of 40 layers with M-RoPE."""
    folder = tmp_path_factory.mktemp("target")
    byte_level().save_pretrained(folder)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    LlamaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=40, rope_parameters=rope).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("arch", ["dflash", "dflash-draft"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_file_is_the_same_drafter_as_its_safetensors(tmp_path, kind, arch):
    drafter, tensors = make(tmp_path / "draft", KINDS[kind])
    path = write_draft(tmp_path / "x.gguf", draft_keys(KINDS[kind], arch), draft_tensors(tensors), arch=arch)
    assert same(drafter, dflash.load_draft(path))
    assert same(drafter, dflash.load_draft(tmp_path)), "a folder with one file"


@pytest.mark.parametrize("arch", FORKS)
def test_names_of_the_forks_are_read(tmp_path, arch):
    drafter, tensors = make(tmp_path / "draft", KINDS["first"])
    tensors = draft_tensors(tensors)
    tensors["dflash_fc.weight" if arch == FORKS[0] else "dflash.fc.weight"] = tensors.pop("fc.weight")
    tensors["dflash.hidden_norm.weight"] = tensors.pop("enc.output_norm.weight")
    if arch == FORKS[2]:
        tensors["blk.0.post_attention_norm.weight"] = tensors.pop("blk.0.ffn_norm.weight")
    path = write_draft(tmp_path / "x.gguf", draft_keys(KINDS["first"], arch), tensors, arch=arch)
    assert same(drafter, dflash.load_draft(path))


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [*((kind, torch.float32) for kind in (Q8_0, Q4_0, Q5_1)), (F16, torch.float16), (BF16, torch.bfloat16)],
)
def test_quantized_weights_stay_packed_and_plain_types_are_kept(tmp_path, stored, dtype):
    drafter, tensors = make(tmp_path / "draft", KINDS["first"])
    path = write_draft(tmp_path / "x.gguf", draft_keys(KINDS["first"]), draft_tensors(tensors), stored)
    weight = tensors["layers.1.mlp.gate_proj.weight"].numpy()
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, stored), stored))
    kept, read = dflash.load_draft(path), dflash.load_draft(path, keeps_blocks=False)
    assert kept.dtype == read.dtype == dtype
    assert len(kept.packed_weights()) == (0 if stored in (F16, BF16) else 1 + 3 * 6), "88 columns are no whole blocks"
    names = ["fc", *(f"layers.*.self_attn.{name}_proj" for name in "qkvo"), "layers.*.mlp.gate_proj"]
    names = ", ".join(f"{name}.weight" for name in (*names, "layers.*.mlp.up_proj"))
    told = [] if stored in (F16, BF16) else [f"the drafter's weights in {stored.name} stay packed: {names}"]
    assert list(describe_packed(kept)) == told
    for name, tensor in kept.weights().items():
        values = tensor if isinstance(tensor, torch.Tensor) else tensor.dense()
        assert torch.equal(read.get_parameter(name), values)
    other = dflash.load_draft(kept, dtype=torch.float16)
    assert (other.dtype, other.packed_weights()) == (torch.float16, {})
    assert torch.equal(read.layers[1].mlp.gate_proj.weight.float(), expected)
    assert dflash.load_draft(path, dtype=torch.float64).dtype == torch.float64
    assert drafter.config.target_layer_ids == read.config.target_layer_ids == (1, 9)


@pytest.mark.parametrize("options", [{}, {"tree": 16}, {"draft_weights": "int8"}, {"prompt_lookup": 2}], ids=str)
def test_a_packed_drafter_changes_no_text(tmp_path, options):
    taps = {"mask_token_id": 1, "target_layer_ids": [0, 2]}
    config = config_dict(block_size=8, vocab_size=97, num_target_layers=4, **sliding("sf", 20), dflash_config=taps)
    tensors = draft_tensors(make(tmp_path / "draft", config)[1]) | {"token_embd.weight": torch.randn(97, 64)}
    draft = dflash.load_draft(write_draft(tmp_path / "x.gguf", draft_keys(config), tensors, Q4_0, tokens=97))
    kept = draft.packed_weights()
    assert kept["lm_head.weight"].packed is kept["embed_tokens.weight"].packed, "llama.cpp predicts with embeddings"
    target, ids = make_target("qwen3"), torch.randint(2, 97, (2, 30))
    asked = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3}
    expected = dflash.generate(target, None, ids, **asked)
    assert torch.equal(dflash.generate(target, draft, ids, **asked, **options), expected)


def test_parts_of_its_own_are_read(tmp_path):
    """llama.cpp stores the target's ids in d2t, and predicts with the embedding if there is no head."""
    drafter, tensors = make(tmp_path / "draft", KINDS["first"])
    keys, head, table = draft_keys(KINDS["first"]), torch.randn(5, 64), torch.randn(101, 64)
    own = {"output.weight": head, "d2t": torch.tensor([3, 4, 8, 50, 100])}
    reduced = dflash.load_draft(write_draft(tmp_path / "r.gguf", keys, draft_tensors(tensors) | own))
    hidden = torch.randn(2, 64)
    logits = reduced.logits(hidden, None)
    assert logits.isfinite().nonzero()[:5, 1].tolist() == [3, 4, 8, 50, 100]
    torch.testing.assert_close(logits[:, [3, 4, 8, 50, 100]], hidden @ head.T)
    tied = draft_tensors(tensors) | {"token_embd.weight": table}
    tied = dflash.load_draft(write_draft(tmp_path / "t.gguf", keys, tied))
    assert tied.config.own_parts == ("embed_tokens", "lm_head")
    assert torch.equal(tied.lm_head.weight, table)
    assert drafter.config.own_parts == ()


REFUSED = [
    ({"dflash.target_layers": None}, {}, "x.gguf: dflash.target_layers is missing"),
    ({"dflash.target_layers": [0, 5]}, {}, r"dflash.target_layers .counted from 1. must be an integer >= 1"),
    ({"dflash.embedding_length": None}, {}, "x.gguf: dflash.embedding_length is missing"),
    ({"dflash.block_count": [1, 2]}, {}, r"dflash.block_count must be an integer >= 1, got \[1, 2\]"),
    ({MASK: None}, {}, "tokenizer.ggml.mask_token_id is missing"),
    ({"dflash.hidden_activation": "gelu"}, {}, "dflash.hidden_activation = 'gelu' is not supported: only silu"),
    ({"dflash.rope.dimension_count": 8}, {}, "dflash.rope.dimension_count = 8 is not supported: it must be 16"),
    ({"dflash.rope.dimension_sections": [4, 2, 2, 0]}, {}, "dimension_sections = .* is not supported: only one is"),
    ({"dflash.rope.scaling.type": "longrope"}, {}, "RoPE type 'longrope' is not supported"),
    ({"dflash.attention.scale": 0.5}, {}, "dflash.attention.scale = 0.5 is not supported: it must be 0.25"),
    ({"dflash.hyper_connection.count": 4}, {}, "dflash.hyper_connection.count = 4 is not supported"),
    ({"dflash.attention.sliding_window": 9}, {}, "sliding_window_pattern is missing"),
    ({"dflash.attention.sliding_window_pattern": [True, False, False]}, {}, "sliding_window is missing"),
    ({"dflash.attention.sliding_window_pattern": [1, 0, 0]}, {}, "sliding_window_pattern must be 3 booleans"),
    ({"dflash.embedding_length": 32}, {}, r"the config makes tensor .* \[88, 32\], got \[88, 64\]|got \[64, 128\]"),
    ({}, {"blk.1.attn_gate.weight": (4, 64)}, "blk.1.attn_gate.weight is not supported: gated attention"),
    ({}, {"dflash.domino.head.w1": (4, 64)}, "dflash.domino.head.w1 is not supported: a Domino head"),
    ({}, {"blk.0.post_attention_norm.weight": (64,)}, "a norm after attention is not implemented"),
    ({}, {"blk.0.layer_output_scale.weight": (1,)}, "scaled layers is not implemented|scaled layers"),
    ({}, {"rope_freqs.weight": (8,)}, "RoPE with frequencies of its own"),
    ({}, {"blk.0.attn_q.bias": (64,), "blk.3.attn_q.weight": (64, 64)}, "unknown tensors: blk.0.attn_q.bias, blk.3"),
    ({}, {"blk.2.attn_v.weight": None}, "missing tensors: layers.2.self_attn.v_proj.weight"),
    ({}, {"d2t": (101,)}, "missing tensors: lm_head|must map"),
]


@pytest.mark.parametrize(("keys", "tensors", "message"), REFUSED)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, keys, tensors, message):
    stored = draft_tensors(make(tmp_path / "draft", KINDS["first"])[1])
    stored |= {name: shape and torch.ones(shape) for name, shape in tensors.items()}
    stored = {name: tensor.long() if name == "d2t" else tensor for name, tensor in stored.items() if tensor is not None}
    path = write_draft(tmp_path / "x.gguf", draft_keys(KINDS["first"]) | keys, stored)
    with pytest.raises(ValueError, match=message) as raised:
        dflash.load_draft(path)
    assert "x.gguf" in str(raised.value)


def test_other_files_are_refused_by_name(tmp_path):
    write_llama(tmp_path / "llama.gguf")
    with pytest.raises(ValueError, match="architecture llama, not a DFlash drafter: give it as target"):
        dflash.load_draft(tmp_path / "llama.gguf")
    tensors = draft_tensors(make(tmp_path / "draft", KINDS["first"])[1])
    path = write_draft(tmp_path / "x.gguf", draft_keys(KINDS["first"]), tensors)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="not a complete GGUF file"):
        dflash.load_draft(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        dflash.load_draft(tmp_path / "missing.gguf")
    with pytest.raises(ValueError, match=r"revision 'main' is for a hub repository, but .* is a file"):
        dflash.load_draft(path, revision="main")


def test_a_file_of_the_hub_is_downloaded_at_its_revision(tmp_path, monkeypatch):
    drafter, tensors = make(tmp_path / "draft", KINDS["first"])
    path, asked = write_draft(tmp_path / "x.gguf", draft_keys(KINDS["first"]), draft_tensors(tensors)), []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *names, **more: asked.append((names, more)) or path)
    assert same(drafter, dflash.load_draft("owner/name:x.gguf", revision="v1"))
    assert asked == [(("owner/name", "x.gguf"), {"revision": "v1", "local_files_only": False})]


def test_what_changes_nothing_known_is_warned_about(tmp_path, recwarn):
    config = config_dict(**sliding("sfs", 24))  # no rule of causality: the published layout has one by default
    stored = draft_tensors(make(tmp_path / "draft", config)[1])
    path = write_draft(tmp_path / "x.gguf", draft_keys(config) | {"dflash.new_key": 1}, stored)
    assert dflash.load_draft(path).config.causal == (False, False, False)
    texts = [str(warning.message) for warning in recwarn]
    assert any("dflash.attention.causal is missing: no layer is causal" in text for text in texts)
    assert any("unknown keys are ignored: dflash.new_key" in text for text in texts)


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128}
OWN = {"lm_head.weight": torch.randn(9, 64), "d2t": torch.tensor([0, 1, 1, 4, 5, 8, 50, 70, 92])}
WRITTEN = KINDS | {
    "linear": VARIANTS["linear-rope"],
    "yarn": config_dict(rope_scaling=YARN),
    "sinks": config_dict(dflash_config={"mask_token_id": 9, "target_layer_ids": [5], "attention_sink_bias": True}),
    "reduced": config_dict(draft_vocab_size=9),
    "narrow": config_dict(vocab_size=None),
    "dflash2-scaled": DFLASH2_VARIANTS["DFlash2-scaled"],
}


@pytest.mark.filterwarnings("ignore:vLLM")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", WRITTEN)
def test_an_exported_file_is_the_same_drafter(tmp_path, target, kind, dtype):
    make(tmp_path / "draft", WRITTEN[kind], **(OWN if kind == "reduced" else {}))
    export(tmp_path / "draft", tmp_path / "x.gguf", "gguf", target=str(target), dtype=dtype)
    read = dflash.load_draft(tmp_path / "x.gguf")
    expected = dflash.load_draft(tmp_path / "draft", dtype=dtype)
    if kind == "narrow":  # a file has as many tokens as its mask token needs
        expected.config = dataclasses.replace(expected.config, vocab_size=101)
    assert same(expected, read)
    export(tmp_path / "x.gguf", tmp_path / "back", "published")
    assert same(read, dflash.load_draft(tmp_path / "back"))


def fields(path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def test_the_file_has_what_llama_cpp_reads(tmp_path, target):
    make(tmp_path / "draft", KINDS["dspark"])
    export(tmp_path / "draft", tmp_path / "x.gguf", "gguf", target=str(target))
    keys, tokenizer = fields(tmp_path / "x.gguf"), byte_level()
    assert (keys["general.architecture"], keys["dflash.target_layers"]) == ("dflash", [2, 10])
    assert keys["dflash.block_size"] == 7
    assert (keys["dflash.sample_from_anchor"], keys["dflash.has_confidence_head"], keys[MASK]) == (True, False, 100)
    assert keys["dflash.rope.dimension_sections"] == [8, 0, 0, 0], "the target has M-RoPE"
    tokens = keys["tokenizer.ggml.tokens"]
    assert tokens[:97] == tokenizer.convert_ids_to_tokens(list(range(97)))
    assert tokens[97:] == ["[PAD97]", "[PAD98]", "[PAD99]", "[PAD100]"], "a token per row of the Markov head"
    assert keys["tokenizer.ggml.token_type"] == [3, 3, *[1] * 95, *[5] * 4]
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.eos_token_id"]) == ("gpt2", 0)
    shapes = draft_variants.tensor_shapes(dflash.load_draft(tmp_path / "draft").config)
    assert {tensor.name for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors} == draft_tensors(shapes).keys()
    export(tmp_path / "draft", tmp_path / "q.gguf", "gguf", target=str(target), dtype="q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "q.gguf").tensors}
    assert (kinds["fc.weight"], kinds["blk.0.attn_norm.weight"], kinds["markov_w1.weight"]) == ("Q8_0", "F32", "F16")


def test_a_gguf_target_gives_its_tokenizer(tmp_path):
    write_llama(tmp_path / "target.gguf")
    config = config_dict(num_target_layers=4, dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 2]})
    make(tmp_path / "draft", config)
    export(tmp_path / "draft", tmp_path / "x.gguf", "gguf", target=str(tmp_path / "target.gguf"))
    theirs, ours = fields(tmp_path / "target.gguf"), fields(tmp_path / "x.gguf")
    for key in (key for key in theirs if key.startswith("tokenizer.") and not key.endswith(("tokens", "token_type"))):
        assert ours[key] == theirs[key]
    assert "dflash.rope.dimension_sections" not in ours


@pytest.mark.parametrize(("config", "message"), [
    (VARIANTS["gpt-oss-20b"], "cannot have biases"),
    (VARIANTS["Llama-3.1-8B"], "cannot have RoPE of type llama3"),
    (config_dict(rope_scaling=YARN | {"truncate": False}), "cannot have RoPE of type yarn with its own truncate"),
    (config_dict(rope_scaling=YARN | {"attention_factor": 1.5}), "with its own truncate or attention_factor"),
    (VARIANTS["Qwen3.6-27B"], r"cannot have some causal layers .\[True, True, False\]"),
    (DFLASH2_VARIANTS["DFlash2-wide-kernel"], "cannot have selector_top_k 97 at hidden_size 64"),
    (dspark_dict(output_multiplier=0.5), "cannot have scaled logits with a Markov head"),
    (dspark_dict(markov_rank=0), "cannot have drafts from the anchor's row without a Markov head"),
    (VARIANTS["Kimi-K2.5"], "the drafter reads layer 58 of a target that is 64 wide, and this target has 40 layers"),
    (config_dict(vocab_size=90, dflash_config={"mask_token_id": 1, "target_layer_ids": [1]}), "has 97 tokens"),
])  # fmt: skip
def test_what_llama_cpp_cannot_run_is_refused_by_name(tmp_path, target, config, message):
    make(tmp_path / "draft", config)
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "draft", tmp_path / "x.gguf", "gguf", target=str(target))
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_wrong_arguments_and_tokenizers_are_refused_and_nothing_is_left(tmp_path, target, monkeypatch):
    make(tmp_path / "draft", KINDS["first"])
    (tmp_path / "taken.gguf").write_text("mine")
    for out, layout, options, message in [
        ("x.gguf", "gguf", {}, r"carries the target's tokenizer: give .*--target"),
        ("x", "gguf", {"target": str(target)}, "the name of a file.gguf that does not exist"),
        ("taken.gguf", "gguf", {"target": str(target)}, "the name of a file.gguf that does not exist"),
        ("x", "published", {"dtype": "q8_0"}, "q8_0 is for the format gguf"),
        ("x.gguf", "gguf", {"target": str(target), "dtype": torch.float64}, "float32, float16 or bfloat16, got"),
        ("x.gguf", "gguf", {"target": str(tmp_path / "draft")}, "draft has no tokenizer: its files are missing"),
    ]:
        with pytest.raises((ValueError, OSError), match=message):
            export(tmp_path / "draft", tmp_path / out, layout, **options)
    other = tmp_path / "draft" / "target"
    LlamaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=40).save_pretrained(other)
    byte_fallback().save_pretrained(other)
    with pytest.raises(ValueError, match=r"only byte-level BPE tokenizers are written, .* convert the target to GGUF"):
        export(tmp_path / "draft", tmp_path / "x.gguf", "gguf", target=str(other))

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(OSError, match=r"x.gguf could not be written: .*No space left on device"):
        export(tmp_path / "draft", tmp_path / "x.gguf", "gguf", target=str(target))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "taken.gguf"]


def test_the_commands_take_and_write_files(tmp_path, shell):
    write_llama(target := tmp_path / "target.gguf")
    section = {"mask_token_id": 1, "target_layer_ids": [0, 2]}
    config = config_dict(block_size=4, vocab_size=97, num_target_layers=4, dflash_config=section)
    make(tmp_path / "draft", config)
    models = ("--model", target, "--draft")
    arguments = ("--out", tmp_path / "x.gguf", "--format", "gguf", "--target", target, "--dtype", "q8_0")
    done = shell("export", "--draft", tmp_path / "draft", *arguments, "--json")
    assert (done.code, json.loads(done.out)["format"]) == (0, "gguf"), done.err
    texts = [
        json.loads(shell("generate", "abc de", *models, draft, "--max-new-tokens", 8, "--seed", 1, "--json").out)[
            "text"
        ]
        for draft in (tmp_path / "x.gguf", tmp_path / "draft")
    ]
    assert texts[0] == texts[1]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc de"}\n')
    given = ("--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 8, "--json")
    found = json.loads(shell("doctor", *models, tmp_path / "x.gguf", *given).out)
    assert "vocabulary" not in [finding["fault"] for finding in found["findings"]]
    # a drafter of a target with other tokens
    keys, tensors = draft_keys(config), draft_tensors(make(tmp_path / "draft", config)[1])
    write_draft(tmp_path / "other.gguf", keys | {"tokenizer.ggml.token_type": [1] * 97}, tensors, tokens=97)
    done = shell("doctor", *models, tmp_path / "other.gguf", *given)
    finding = next(finding for finding in json.loads(done.out)["findings"] if finding["fault"] == "vocabulary")
    assert (done.code, "97 of 97 tokens" in finding["found"]) == (1, True)


@pytest.mark.parametrize(("changes", "faults"), [
    ({}, []),
    ({"tokens": ["<eos>", "<mask>", "a", "c"]}, ["vocabulary"]),
    ({"token_type": [3, 3, 1, 4], "tokens": ["<eos>", "<mask>", "a", "c"]}, []),  # not an ordinary token
    ({"sections": [8, 0, 0, 0]}, []),
    ({"sections": None}, ["rope sections"]),
])  # fmt: skip
def test_the_doctor_finds_another_tokenizer_and_missing_sections(target, changes, faults):
    tokens = {"tokens": ["<eos>", "<mask>", "a", "b"], "token_type": [3, 3, 1, 1]} | changes
    sections = tokens.pop("sections", [8, 0, 0, 0])
    keys = {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
    keys |= {"general.architecture": "dflash"} | ({"dflash.rope.dimension_sections": sections} if sections else {})
    found = check_file(GgufFile(Path("x.gguf"), keys, {}, {}), LlamaConfig.from_pretrained(target), byte_level())
    assert [finding.fault for finding in found] == faults

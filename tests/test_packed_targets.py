"""Targets whose weights stay as a GGUF file or another library's folder has them."""

import copy
import json
import pickle
import shutil
import warnings

import draft_variants
import gguf
import numpy as np
import pytest
import quantized_folders
import torch
from gguf_files import add_tokenizer, write, write_llama, write_qwen35
from op_checks import Emulated
from quantized_folders import DENSE, PACKED
from safetensors.torch import load_file, save_file
from test_fused import on_ops, run_op_by_op
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import dflash
from dflash import ops
from dflash.loading import Pretrained, pretrained
from dflash.loading.quantized import read_scheme
from dflash.ops import PackedWeight
from dflash.targets import (
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    Target,
    count_weights,
    sample_digest,
    structural_copy,
    weights_digest,
)

KINDS = {name: gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")}


def mixed(name):
    """Return a type for a tensor: q, k and v of a layer differ, as do gate and up."""
    order = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_gate": "Q5_0", "ffn_up": "Q5_1"}
    return KINDS[next((kind for part, kind in order.items() if part in name), "Q8_0")]


@pytest.fixture(scope="module", params=[*KINDS, "mixed"])
def target(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "x.gguf"
    write_llama(path, mixed if request.param == "mixed" else KINDS[request.param], rare=0)
    return Pretrained(path).load_target(torch.float32)


FOLDERS = [
    "awq", "awq, per channel", "gptq", "gptq, by activations", "int8", "int8, groups", "mxfp4", "mlx", "mlx, 8 bits",
    "mlx, mxfp4", "experts", "experts of mlx", "gpt-oss",
]  # fmt: skip


def write_folder(folder, kind):
    """Write a quantized folder, and return the model with its values."""
    if kind == "gpt-oss":
        return quantized_folders.write_gpt_oss(folder)
    if kind.startswith("experts"):
        return quantized_folders.write_mixture(folder, "mlx" if "mlx" in kind else "int4, asymmetric")
    return quantized_folders.write_llama(folder, kind)


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("folder")
    model = write_folder(path, request.param)
    return Pretrained(path).load_target(torch.float32), model


@pytest.fixture(scope="module")
def draft():
    config = draft_variants.config_dict(
        block_size=8, vocab_size=97, num_target_layers=4, dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 2]}
    )
    return draft_variants.random_drafter(config)


def write_mixture(path, kinds):
    """Write a random Qwen3 with experts, and return the model with the file's values."""
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=256, norm_topk_prob=True, tie_word_embeddings=False, initializer_range=0.3,
        eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model, writer = Qwen3MoeForCausalLM(config).eval(), gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(4)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_expert_feed_forward_length(32)
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 4)

    def add(name, weight):
        kind = kinds(name)
        if weight.dim() < 2 or "gate_inp" in name or kind is None:
            writer.add_tensor(name, weight.numpy())
            return weight
        made = gguf.quants.quantize(weight.numpy(), kind)
        writer.add_tensor(name, made, raw_dtype=kind)
        return torch.from_numpy(gguf.quants.dequantize(made, kind))

    for name, weight in model.state_dict().items():
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("gate_up_proj"):
            parts = zip(("gate", "up"), weight.chunk(2, 1), strict=True)
            read = torch.cat([add(f"blk.{layer}.ffn_{part}_exps.weight", half) for part, half in parts], 1)
        elif name.endswith("experts.down_proj"):
            read = add(f"blk.{layer}.ffn_down_exps.weight", weight)
        else:
            read = add(names.get_name(name.removesuffix(".weight")) + ".weight", weight)
        weight.copy_(read)
    write(writer)
    return model


IDS = torch.randint(2, 90, (2, 70), generator=torch.Generator().manual_seed(0))


def test_weights_are_counted_as_in_the_model_and_weighed_as_in_the_file(target):
    dense = LlamaForCausalLM(target.config)
    (count, size), (as_many, floats) = count_weights(target), count_weights(dense)
    assert count == as_many == sum(weight.numel() for weight in dense.parameters())
    assert floats == 4 * count
    assert size < floats / 2


def test_no_dense_weight_of_a_linear_layer_exists(target):
    linears = [module for module in target.modules() if isinstance(module, torch.nn.Linear | PackedLinear)]
    assert len(linears) == 4 * 7 + 1
    assert all(type(module) is PackedLinear for module in linears)


@pytest.mark.parametrize("options", [{"block_size": 8}, {"tree": 24}, {"prompt_lookup": 2}], ids=str)
def test_drafting_changes_no_text(target, draft, options):
    plain = dflash.generate(target, None, IDS, max_new_tokens=40, temperature=1.5, seed=3)
    drafted = dflash.generate(target, draft, IDS, max_new_tokens=40, temperature=1.5, seed=3, **options)
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize("options", [{"block_size": 8}, {"tree": 24}, {"prompt_lookup": 2}], ids=str)
def test_drafting_changes_no_text_of_a_folder(folder, draft, options):
    plain = dflash.generate(folder[0], None, IDS, max_new_tokens=40, temperature=1.5, seed=3)
    drafted = dflash.generate(folder[0], draft, IDS, max_new_tokens=40, temperature=1.5, seed=3, **options)
    assert torch.equal(plain, drafted)


@pytest.fixture(scope="module", params=["gptq, by activations", "int4, by activations", "qwen35"])
def reordered(request, tmp_path_factory):
    """A target whose columns are in another order, in a folder per weight or for all of one input, and its drafter."""
    path, sizes = tmp_path_factory.mktemp("reordered"), {"hidden_size": 64, "num_target_layers": 4}
    if request.param == "qwen35":
        path, sizes = write_qwen35(path / "x.gguf"), {"hidden_size": 256, "num_target_layers": 2}
    else:
        quantized_folders.write_llama(path, request.param)
    own = {"mask_token_id": 1, "target_layer_ids": [0, 1]}
    config = draft_variants.config_dict(block_size=8, vocab_size=97, dflash_config=own, **sizes)
    return Pretrained(path), draft_variants.random_drafter(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_with_reordered_columns_run_fused_and_drafting_changes_no_text(reordered, dtype):
    target, options = reordered[0].load_target(dtype), {"max_length": 64, "batch_size": 2}
    if has_modules := dtype == torch.float32:  # in bfloat16 modules round at other places
        modules = dflash.Generator(target, None, fused=False, **options)
    plain, drafted = (dflash.Generator(target, by, **options) for by in (None, reordered[1].to(dtype)))
    assert (plain.fused_reason, drafted.fused_reason) == ("", "")
    for temperature in (0.0, 1.0):
        call = {"max_new_tokens": 30, "temperature": temperature, "seed": 3}
        text = plain.generate(IDS[:, :20], **call)
        assert torch.equal(text, drafted.generate(IDS[:, :20], **call))
        assert not has_modules or torch.equal(text, modules.generate(IDS[:, :20], **call))


def test_weights_of_one_input_share_the_order_of_their_columns(tmp_path):
    quantized_folders.write_llama(tmp_path, "int4, by activations")
    attention = dflash.load_target(tmp_path).model.layers[0].self_attn
    assert attention.q_proj.weight.order is attention.k_proj.weight.order is attention.v_proj.weight.order


def test_embeddings_are_those_of_the_file(target):
    table = target.get_input_embeddings()
    assert type(table) is PackedEmbedding
    assert torch.equal(table(IDS), table.packed.dense()[IDS])


def test_sessions_caches_and_log_probabilities_are_those_of_one_token_per_step(target, draft):
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 5, "logprobs": 3, "return_dict_in_generate": True}
    plain, drafted = (dflash.generate(target, by, IDS[:1], **options) for by in (None, draft))
    assert torch.equal(plain.sequences, drafted.sequences)
    assert plain.logprobs == drafted.logprobs


def test_weights_may_be_int8_copies_of_the_files(target, tmp_path):
    dense = copy.deepcopy(target)
    for name, module in target.named_modules():
        if type(module) in (PackedLinear, PackedEmbedding):
            is_linear = type(module) is PackedLinear
            made = torch.nn.Linear(1, 1, bias=False) if is_linear else torch.nn.Embedding(1, 1)
            made.weight = torch.nn.Parameter((module.weight if is_linear else module.packed).dense())
            dense.set_submodule(name, made)
    ours, theirs = (dflash.generate(x, None, IDS, max_new_tokens=20, weights="int8") for x in (target, dense))
    assert torch.equal(ours, theirs)


def test_a_tensor_without_a_place_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    write_llama(path, KINDS["Q4_0"], extra={"blk.0.unknown.weight": torch.ones(64)})
    with pytest.raises(ValueError, match=r"tensor blk\.0\.unknown\.weight has no place in LlamaForCausalLM"):
        dflash.load_target(path)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    write_llama(path, KINDS["Q4_0"], width=128)
    with pytest.raises(ValueError, match=r"tensor blk\.0\.ffn_.* must be .*128.* as the file's keys say, got .*96"):
        dflash.load_target(path)


def test_a_partly_packed_target_is_exact_for_few_rows_only(tmp_path):
    write_llama(
        tmp_path / "x.gguf", lambda name: KINDS["Q8_0"] if "attn_v" not in name else gguf.GGMLQuantizationType.F32
    )
    partly = Target(dflash.load_target(tmp_path / "x.gguf", dtype=torch.bfloat16))
    write_llama(tmp_path / "y.gguf", KINDS["Q8_0"])
    packed = Target(dflash.load_target(tmp_path / "y.gguf", dtype=torch.bfloat16))
    assert packed.is_exact_for(4096)
    assert partly.is_exact_for(4096) == ops.skinny(4096, torch.bfloat16)  # on AVX2 all rows are the kernels'


def test_a_factor_of_a_tensor_is_used_and_its_type_named(tmp_path):
    path, blocks = tmp_path / "x.gguf", np.random.default_rng(0).integers(0, 96, (64, 36), np.uint8)
    kind, real = gguf.GGMLQuantizationType.NVFP4, gguf.quants.quantize
    with pytest.MonkeyPatch.context() as patch:  # the package reads this type, and does not write it
        patch.setattr(gguf.quants, "quantize", lambda data, to: blocks if to == kind else real(data, to))
        kinds = lambda name: kind if name == "blk.0.attn_output.weight" else KINDS["Q8_0"]  # noqa: E731
        write_llama(path, kinds, extra={"blk.0.attn_output.scale": torch.tensor([0.25])})
    with pytest.warns(UserWarning, match=r"weights of type NVFP4 take 8\.5 bits each in memory, as Q8_0"):
        packed = dflash.load_target(path, dtype=torch.float32)
    found = packed.model.layers[0].self_attn.o_proj.weight
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind)) * 0.25
    assert found.format == "q8_0"
    torch.testing.assert_close(found.dense(), expected, rtol=0, atol=float(expected.abs().max()) / 100)


def test_scaled_embeddings_stay_packed_and_index_unscaled():
    rows = torch.from_numpy(gguf.quants.quantize(torch.randn(8, 32).numpy(), KINDS["Q8_0"]))
    table = PackedEmbedding(PackedWeight.of_blocks(rows, "q8_0", 32), torch.float32, torch.tensor(4.0))
    ids = torch.tensor([[3, 1]])
    assert torch.equal(table(ids), 4 * table[ids])


@pytest.mark.parametrize("digest", [sample_digest, weights_digest])
def test_files_of_one_model_have_different_digests(digest, tmp_path):
    found = set()
    for kind in KINDS.values():
        write_llama(tmp_path / "x.gguf", kind)
        found.add(digest(dflash.load_target(tmp_path / "x.gguf")))
    assert len(found) == len(KINDS)


def test_the_same_bytes_in_another_format_have_another_digest():
    blocks = torch.zeros(2, 18, dtype=torch.uint8)
    weights = [PackedWeight.of_blocks(blocks, kind, 32) for kind in ("q4_0", "iq4_nl")]
    assert torch.equal(*(weight.packed for weight in weights))
    assert len({weights_digest(PackedLinear(weight)) for weight in weights}) == 2


def test_copies_of_a_target_share_its_weights(target):
    copied = structural_copy(target)
    assert copied.lm_head.blocks is target.lm_head.blocks
    assert pickle.loads(pickle.dumps(target)).lm_head.format == target.lm_head.format


def test_a_packed_target_is_not_saved_in_part(target, tmp_path):
    with pytest.raises(ValueError, match=r"a target with packed weights cannot be saved: its file is .*x\.gguf"):
        target.save_pretrained(tmp_path)


@pytest.mark.parametrize("down", ["MXFP4", "Q8_0", None])
@pytest.mark.parametrize("gate", ["Q5_1", "Q8_0"])
def test_experts_stay_packed_and_drafting_changes_no_text(tmp_path, draft, gate, down):
    def kinds(name):
        chosen = down if "down_exps" in name else gate
        return chosen and KINDS[chosen]

    model = write_mixture(tmp_path / "x.gguf", kinds)
    target = dflash.load_target(tmp_path / "x.gguf", dtype=torch.float32)
    assert any(type(module) is PackedExperts for module in target.modules()) == (down is not None)
    with torch.no_grad():
        error = (target(IDS).logits - model(IDS).logits).abs()
    assert error.median() < 0.1  # a rounded row may choose another expert
    plain = dflash.generate(target, None, IDS, max_new_tokens=30, temperature=1.5, seed=3)
    assert torch.equal(plain, dflash.generate(target, draft, IDS, max_new_tokens=30, temperature=1.5, seed=3))


# ---------------------------------------------------------------------------------------------- folders


def values_of(linear):
    """Return what a linear layer multiplies by."""
    if isinstance(linear, torch.nn.Linear):
        return linear.weight
    return linear.weight.dense()


def assert_same_values(target, model):
    for name, module in target.named_modules():
        if isinstance(module, torch.nn.Linear | PackedLinear):
            assert torch.equal(values_of(module), model.get_submodule(name).weight), name


def test_a_folder_stays_packed_and_computes_what_its_values_do(folder):
    target, model = folder
    quantized = ("mlp.experts",) if "GptOss" in type(target).__name__ else ("_proj", "mlp.experts")
    modules = [module for name, module in target.named_modules() if name.endswith(quantized)]
    assert modules
    assert all(type(module) in (PackedLinear, PackedExperts) for module in modules)
    with torch.no_grad():
        error = (target(IDS).logits - model(IDS).logits).abs()
    assert error.median() < 0.2  # rows are rounded; a rounded row may choose another expert


@pytest.mark.parametrize("kind", [*PACKED, *DENSE])
def test_values_of_a_folder_are_those_that_were_written(tmp_path, kind):
    model = quantized_folders.write_llama(tmp_path, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_values(dflash.load_target(tmp_path), model)


def test_the_older_key_of_mlx_is_read(tmp_path):
    model = quantized_folders.write_llama(tmp_path, "mlx")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same_values(dflash.load_target(tmp_path), model)


# ---------------------------------------------------------------------------------------------- as GPUs read them


@pytest.fixture
def packs_for_gpus(monkeypatch):
    """Have weights packed as for a GPU, which need not be there."""
    monkeypatch.setattr(pretrained, "packed_for", lambda *_: "cuda")


GPU_FORMATS = {
    **dict.fromkeys(("awq", "gptq", "gptq, asymmetric", "gptq v2", "int4", "int4, asymmetric"), "w4a16g32"),
    **{"awq, per channel": "w4a16g128", "int4, per channel": "w4a16g128", "int4, by activations": "w4a16g32"},
    **{"mlx": "w4a16g32m", "mlx, 8 bits": "w8a16g32m"},
}
GPU_FILES = {"Q4_0": "w4a16g32", "Q8_0": "w8a16g32", "MXFP4": "w8a16g32", "Q4_1": "w4a16g32m", "Q5_1": "w8a16g32m"}
GPU_KINDS = [(*each, dtype) for each in (GPU_FORMATS | GPU_FILES).items() for dtype in ("bfloat16", "float16")]
GPU_KINDS.remove(("MXFP4", "w8a16g32", "float16"))  # float16 does not hold all powers of two


def load_for_gpus(path, kind, dtype, **options):
    """Write a target and load it, packed for GPUs unless options say otherwise."""
    if kind in GPU_FILES:
        path = path / "x.gguf"
        write_llama(path, KINDS[kind])
    else:
        quantized_folders.write_llama(path, kind)
    return Pretrained(path, **options).load_target(getattr(torch, dtype))


@pytest.mark.usefixtures("packs_for_gpus")
@pytest.mark.parametrize(("kind", "name", "dtype"), GPU_KINDS)
def test_layers_on_gpus_keep_the_values_that_become_dense_elsewhere(kind, name, dtype, tmp_path):
    packed = load_for_gpus(tmp_path, kind, dtype)
    found = {path: module.format for path, module in packed.named_modules() if type(module) is PackedLinear}
    assert (len(found), set(found.values())) == (28, {name})  # 97 tokens are no tiles of eight
    assert type(packed.get_input_embeddings()) is torch.nn.Embedding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = load_for_gpus(tmp_path, kind, dtype, keeps_blocks=False)
    for path in found:
        assert torch.equal(packed.get_submodule(path).weight.dense(packed.dtype), dense.get_submodule(path).weight)


@pytest.mark.usefixtures("packs_for_gpus")
@pytest.mark.parametrize("kind", ["Q4_0", "experts of mlx"])
def test_experts_on_gpus_keep_the_values_that_become_dense_elsewhere(kind, tmp_path):
    path = tmp_path
    if kind == "Q4_0":
        path = tmp_path / "x.gguf"
        write_mixture(path, lambda name: "exps" in name and KINDS["Q8_0" if "down_exps" in name else kind])
    else:
        write_folder(path, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed, dense = (Pretrained(path, keeps_blocks=keeps).load_target(torch.bfloat16) for keeps in (True, False))
    found = {name: module for name, module in packed.named_modules() if type(module) is PackedExperts}
    assert len(found) == packed.config.num_hidden_layers
    for name, module in found.items():
        assert {ops.FORMATS[format].device for format, _ in module.sizes} == {"cuda"}
        for weight, part in zip(module.weights[:2], ("gate_up_proj", "down_proj"), strict=True):
            assert torch.equal(weight.dense(torch.bfloat16), getattr(dense.get_submodule(name), part))


@torch.no_grad()
@pytest.mark.usefixtures("packs_for_gpus")
@pytest.mark.parametrize(
    ("kind", "dtype"), [("awq", "float16"), ("Q4_0", "bfloat16"), ("Q8_0", "bfloat16"), ("mlx", "bfloat16")]
)
def test_emulated_layers_have_the_bits_of_dense_ones(kind, dtype, tmp_path, emulation, monkeypatch):
    results, ids = [], IDS[:, :16]
    for keeps_blocks in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = load_for_gpus(tmp_path, kind, dtype, keeps_blocks=keeps_blocks)
        layers, cache = on_ops(target, 40, batch=2)
        with monkeypatch.context() as patch:
            run_op_by_op(patch, Emulated(emulation))
            results.append(layers.forward(ids, torch.zeros(2, dtype=torch.int64), cache, 0))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.usefixtures("packs_for_gpus")
def test_drafting_changes_no_text_of_layers_for_gpus(tmp_path, draft):
    target = load_for_gpus(tmp_path, "Q4_0", "bfloat16")
    draft, options = copy.deepcopy(draft).to(torch.bfloat16), {"max_length": 128, "block_size": 8, "batch_size": 2}
    plain, drafted = (dflash.Generator(target, by, **options) for by in (None, draft))
    assert drafted.fused_reason == ""
    call = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3}
    assert torch.equal(plain.generate(IDS, **call), drafted.generate(IDS, **call))


@pytest.mark.usefixtures("packs_for_gpus")
@pytest.mark.parametrize("kind", ["awq", "gptq", "int4", "gptq, by activations"])
def test_folders_of_integers_are_read_for_gpus(kind, tmp_path):
    quantized_folders.write_llama(tmp_path, kind)
    target = Pretrained(tmp_path).load_target("auto", "meta")  # a device that is no CPU, and everywhere
    assert target.dtype == torch.float16
    assert type(target.model.layers[0].mlp.up_proj) is PackedLinear


@pytest.mark.usefixtures("packs_for_gpus")
@pytest.mark.parametrize(
    ("change", "reads"),
    [({}, True), ({"bits": 3}, False), ({"checkpoint_format": "marlin"}, False), ({"quant_method": "fp8"}, False)],
)
def test_what_our_kernels_do_not_read_is_left_to_transformers(change, reads):
    config = LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4, **change})
    found = read_scheme(config, None, None, is_cpu=False, packs=True, is_adapted=False)
    assert (found is not None) == reads
    config = Qwen3MoeConfig(quantization_config=config.quantization_config)
    assert read_scheme(config, None, None, is_cpu=False, packs=True, is_adapted=False) is None


@pytest.mark.usefixtures("packs_for_gpus")
def test_weights_that_no_kernel_of_gpus_reads_are_counted_in_a_warning(tmp_path):
    quantized_folders.write_llama(tmp_path, "mlx")
    with pytest.warns(UserWarning, match=r"2 weights become dense, .* \(embeddings, or shapes and scales that"):
        target = Pretrained(tmp_path).load_target(torch.bfloat16)
    assert len([module for module in target.modules() if type(module) is PackedLinear]) == 28
    assert type(target.get_output_embeddings()) is torch.nn.Linear  # 97 tokens are no tiles of eight


@pytest.mark.parametrize(("kind", "why"), [("fp8 per channel", "FP8"), ("groups of 16", "not multiples of 32")])
def test_weights_that_become_dense_are_counted_in_a_warning(tmp_path, kind, why):
    quantized_folders.write_llama(tmp_path, kind)
    with pytest.warns(UserWarning, match=rf"28 weights become dense, \d+\.\d\d GB in torch.float32 \(.*{why}\)"):
        dflash.load_target(tmp_path)


CHANGES = {
    "gptq": [
        ({"checkpoint_format": "marlin"}, r"the layout of GPTQ must be gptq, gptq_v2, got marlin"),
        ({"quant_method": "other"}, r"quant_method must be one that can be read, got other"),
        ({"weight_block_size": [128]}, r"the block of a scale must be two sizes, got \[128\]"),
    ],
    "awq": [({"version": "gemv"}, r"the layout of AWQ must be gemm, got gemv")],
    "int4": [
        ({"format": "marlin-24"}, r"the format marlin-24 of compressed-tensors cannot be read"),
        ({"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme quantizes keys and values in a cache"),
        ({"transform_config": {"config_groups": {"u": {}}}}, r"transform_config rotates activations"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, r"sparse weights of compressed-tensors \(sparse-bitmask\)"),
    ],
}


@pytest.mark.parametrize(("kind", "change", "error"), [(kind, *each) for kind in CHANGES for each in CHANGES[kind]])
def test_a_scheme_that_cannot_be_read_is_refused_by_name(tmp_path, kind, change, error):
    quantized_folders.write_llama(tmp_path, kind)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=error):
        dflash.load_target(tmp_path)


UP, NORM = "model.layers.0.mlp.up_proj", "model.norm.weight"
LOST = [
    ("gptq", {f"{UP}.scales": None}, r"up_proj\.weight is stored in a way that cannot be read: .*up_proj\.g_idx I32"),
    ("gptq", {f"{UP}.qweight": torch.ones(12, 96).int()}, r"tensors that make \[96, 64\], got .* 4 or 8 bits"),
    (
        "gptq",
        {f"{UP}.scales": torch.ones(2, 95)},
        r"tensors that make \[96, 64\], got .* group of columns needs a scale",
    ),
    ("gptq", {f"{UP}.bias": torch.ones(96)}, r"and these have none: model\.layers\.0\.mlp\.up_proj\.bias F32 \[96\]"),
    ("fp8 of Model-Optimizer", {f"{UP}.weight_scale": None}, r"few bits need scales, and these have none: .* F8_E4M3"),
    ("int8", {f"{UP}.weight_scale": None}, r"weights in few bits need scales, and these have none: .*up_proj"),
    ("int4", {f"{UP}.pre_quant_scale": torch.ones(64)}, r"and these have none: model.*pre_quant_scale F32 \[64\]\. "),
    ("int4", {NORM: None}, r"has no weights for model\.norm\.weight: its files are incomplete"),
    ("int4", {NORM: torch.ones(65)}, r"model\.norm\.weight must be \[64\] as config\.json says, got .*\[65\]"),
]


@pytest.mark.parametrize(("kind", "change", "error"), LOST, ids=range(len(LOST)))
def test_a_folder_whose_tensors_do_not_fit_is_refused_by_name(tmp_path, kind, change, error):
    quantized_folders.write_llama(tmp_path, kind)
    tensors = load_file(tmp_path / "model.safetensors") | change
    save_file({name: x for name, x in tensors.items() if x is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=error):
        dflash.load_target(tmp_path)


def test_biases_of_zeros_in_old_gptq_files_are_left_out(tmp_path):
    model = quantized_folders.write_llama(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors") | {f"{UP}.bias": torch.zeros(96)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_values(dflash.load_target(tmp_path), model)


@pytest.fixture
def modelopt(tmp_path):
    """A folder whose only sign of quantization is hf_quant_config.json, and the model with its values."""
    model = quantized_folders.write_llama(tmp_path / "model", "fp8 of Model-Optimizer")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    say_algorithm(tmp_path / "model", "FP8")
    return tmp_path / "model", model


def say_algorithm(folder, name):
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": name}}))


def test_model_optimizer_may_say_it_in_a_file_of_its_own(modelopt):
    folder, model = modelopt
    with pytest.warns(UserWarning, match="28 weights become dense"):
        assert_same_values(dflash.load_target(folder), model)


def test_a_hub_id_is_judged_by_that_file_before_its_weights_are_downloaded(modelopt, tmp_path, monkeypatch):
    folder, model = modelopt
    config, snapshot, downloads = AutoConfig.from_pretrained(folder), tmp_path / "snapshot", []
    snapshot.mkdir()

    def download_one(name, file, **_):
        if not (folder / file).is_file():
            raise OSError(f"{name} has no {file}")
        return shutil.copy(folder / file, snapshot)

    def download_all(*_, **_options):
        downloads.append(sorted(path.name for path in snapshot.iterdir()))
        return shutil.copytree(folder, snapshot, dirs_exist_ok=True)

    monkeypatch.setattr("transformers.utils.cached_file", download_one)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download_all)
    monkeypatch.setattr(Pretrained, "load_config", lambda _: config)
    source = Pretrained("owner/model", local_files_only=True)
    with pytest.warns(UserWarning, match="28 weights become dense"):
        assert_same_values(source.load_target(torch.float32), model)
    assert downloads == [["config.json", "hf_quant_config.json"]]
    for algorithm in ("W4A8_AWQ", "NVFP4_AWQ", "W8A8_SQ_PER_CHANNEL"):
        say_algorithm(folder, algorithm)
        with pytest.raises(ValueError, match=f"quant_algo must be one of FP8 or FP4, without AWQ, got {algorithm}"):
            source.load_target(torch.float32)
    assert len(downloads) == 1

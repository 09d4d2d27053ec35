import copy
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from draft_variants import (
    DFLASH2_VARIANTS,
    VARIANTS,
    config_dict,
    random_drafter,
    random_tensors,
    save_checkpoint,
    tensor_shapes,
)
from op_checks import OpByOp, assert_as_exact_as_torch
from quantized_folders import DENSE, MODELOPT, PACKED, nvfp4
from safetensors.torch import load_file, save_file

from dflash import DraftConfig, Drafter, decoder, load_draft
from dflash.drafter import drafter
from dflash.ops import reference
from dflash_tools.train.export import export

ODD = config_dict(attention_bias=True, attention_sink_bias=True, num_key_value_heads=1)
KINDS = [VARIANTS["Qwen3-4B"], VARIANTS["gpt-oss-20b"], ODD]


def assert_whole(draft: Drafter) -> None:
    """Check that state dicts have the published names, in one dtype on one device, and frequencies stay float32."""
    assert {name: tuple(t.shape) for name, t in draft.state_dict().items()} == tensor_shapes(draft.config)
    assert {(part.dtype, part.device) for part in draft.parameters()} == {(draft.dtype, draft.device)}
    assert draft.inv_freq.dtype == torch.float32
    assert torch.equal(draft.inv_freq, draft.config.rope.inverse_frequencies(draft.config.head_dim))


def poisoned(draft: Drafter, batch: int, capacity: int):
    cache = draft.new_cache(batch, capacity)
    for buffer in cache.buffers:
        buffer.fill_(float("nan"))
    return cache


def two_passes(draft: Drafter, context, block, lengths, counts):
    """Prefill ``lengths`` rows of ``context``, draft, add ``counts`` rows and draft again."""
    rows, cache = block.shape[1], poisoned(draft, len(context), 64)
    lengths, counts = torch.tensor(lengths), torch.tensor(counts)
    index = torch.arange(context.shape[1])
    positions = torch.where(index < lengths[:, None], index, -1)
    draft.inject_(draft.fuse(context, lengths), positions, cache)
    nothing = torch.zeros_like(counts)
    first = draft(draft.fuse(context[:, :rows], nothing), nothing, block, lengths, cache)
    gather = (lengths[:, None] + torch.arange(rows)).clamp(max=context.shape[1] - 1)
    fresh = context.gather(1, gather[..., None].expand(-1, -1, context.shape[2]))
    second = draft(draft.fuse(fresh, counts), counts, block, lengths + counts, cache)
    return first, second, cache


def inputs(config: DraftConfig, batch: int, rows: int = 40, seed: int = 0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(batch, rows, len(config.target_layer_ids) * config.hidden_size, generator=generator)
    block = torch.randn(batch, config.block_size, config.hidden_size, generator=generator)
    return context.to(dtype), block.to(dtype)


@pytest.mark.parametrize("rows", [16, 528])
def test_a_value_scale_is_as_good_as_scaled_values(rows):
    """Few rows run as one op, many op by op; sinks and biases are there too."""
    scaled, plain = random_drafter(ODD | {"attention_value_scale": 0.7}), random_drafter(ODD)
    for layer in plain.layers:
        layer.self_attn.v_proj.weight.mul_(0.7)
        layer.self_attn.v_proj.bias.mul_(0.7)
    context, block = inputs(plain.config, rows // 16, 8)
    for draft in (scaled, copy.deepcopy(scaled), load_draft(scaled, dtype=torch.float64).float()):
        full = torch.full((len(context),), 8)
        hidden = [
            each(each.fuse(context, full), full, block, full, each.new_cache(len(context), 32))
            for each in (draft, plain)
        ]
        torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)
    for layer in scaled.layers:
        layer.self_attn.o_proj.weight.mul_(2.0)
    scaled.refresh()
    again = scaled(scaled.fuse(context, full), full, block, full, scaled.new_cache(len(context), 32))
    assert not torch.allclose(again, hidden[1], atol=1e-2), "weights that were changed in place are scaled again"


@pytest.mark.parametrize("batch", [9, 70], ids=["one op", "op by op"])
@pytest.mark.parametrize("config", [KINDS[0], DFLASH2_VARIANTS["DFlash2"], ODD], ids=["qwen", "conv", "bias"])
def test_context_without_a_block_is_appended_as_by_a_pass(config, batch):
    draft = random_drafter(config)
    context, block = inputs(draft.config, batch, 8)
    counts = torch.arange(batch) % 9
    alone, by_pass = poisoned(draft, batch, 32), poisoned(draft, batch, 32)
    draft.follow_(context, counts, counts, alone)
    draft(draft.fuse(context, counts), counts, block, counts, by_pass)
    for ours, expected in zip(alone.buffers, by_pass.buffers, strict=True):
        for row, count in enumerate(counts.tolist()):
            assert torch.equal(ours[row, :, :count], expected[row, :, :count])
            assert ours[row, :, count:].isnan().all(), "nothing else is written"


@pytest.mark.parametrize("by", ["one op", "op by op"])
def test_a_sliding_cache_gives_the_bits_of_a_whole_one(by, monkeypatch):
    """Chunks of prompts and steps go through it several times over. It is as large for every length."""
    if by == "op by op":
        monkeypatch.setattr(decoder, "ops", OpByOp(decoder.ops))
    config = VARIANTS["Qwen3-4B"] | {"layer_types": ["sliding_attention"] * 3, "num_hidden_layers": 3}
    draft = random_drafter(config | {"use_sliding_window": True, "sliding_window": 40})
    context, block = inputs(draft.config, 2, 2000)
    whole, sliding = (draft.new_cache(2, 2016, slides=slides) for slides in (False, True))
    assert [x.shape[2] for x in sliding.buffers] == [40 + 512 + 16] * 6
    for buffer in (*whole.buffers, *sliding.buffers):
        buffer.fill_(float("nan"))
    live = torch.full((2,), 300)
    for start in (0, 300, 600, 900):  # the second row's prompt is shorter
        positions = start + torch.arange(300).expand(2, -1)
        positions = torch.where(positions < torch.tensor([[1200], [700]]), positions, -1)
        for cache in (whole, sliding):
            draft.inject_(draft.fuse(context[:, start : start + 300], live), positions, cache)
    length = torch.tensor([1200, 700])
    for step in range(60):
        counts = torch.tensor([step % 16 + 1, 15 - step % 16])
        places = (length[:, None] + torch.arange(16))[..., None].expand(-1, -1, context.shape[2])
        features = draft.fuse(context.gather(1, places), counts)
        length = length + counts
        for cache in (whole, sliding):
            cache.commit_(length, counts)
        hidden = [draft(features, counts, block, length, cache) for cache in (whole, sliding)]
        assert hidden[0].isfinite().all()
        assert torch.equal(*hidden)


def test_injected_context_equals_a_passs_in_bfloat16():
    draft, counts = random_drafter(KINDS[0], dtype=torch.bfloat16), torch.tensor([0, 3, 8])
    context, block = inputs(draft.config, 3, 8, dtype=torch.bfloat16)
    features, index = draft.fuse(context, counts), torch.arange(8)
    injected, by_pass = poisoned(draft, 3, 32), poisoned(draft, 3, 32)
    draft.inject_(features, torch.where(index < counts[:, None], index, -1), injected)
    draft(features, counts, block, counts, by_pass)
    for ours, expected in zip(injected.buffers, by_pass.buffers, strict=True):
        for row, count in enumerate(counts.tolist()):
            torch.testing.assert_close(ours[row, :, :count], expected[row, :, :count])


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "weights"),
    [*((config, None) for config in KINDS), *((config, "int8") for config in (KINDS[0], ODD))],
    ids=["qwen", "bias", "sinks", "qwen in 8 bits", "sinks in 8 bits"],
)
def test_a_pass_op_by_op_is_as_exact_as_torch(config, weights, kernels, dtype, monkeypatch):
    """This is the path on a GPU, where no op takes all layers, and 8 bits have the format of its kernels."""
    monkeypatch.setattr(drafter, "format_of", lambda *_: "w8a16")
    draft = random_drafter(config, dtype=dtype)
    draft = drafter.quantized_draft(weights, draft) if weights else draft
    (context, block), counts = inputs(draft.config, 2, dtype=dtype), [3, draft.config.block_size]

    def passes(place, dtype=dtype):
        monkeypatch.setattr(drafter, "ops", place)
        monkeypatch.setattr(decoder, "ops", OpByOp(place))
        return two_passes(copy.deepcopy(draft).to(dtype), context.to(dtype), block.to(dtype), [17, 3], counts)[:2]

    ours, plain, exact = passes(kernels), passes(reference), passes(reference, torch.float64)
    for out, twin, wanted in zip(ours, plain, exact, strict=True):
        assert_as_exact_as_torch(out, twin, wanted)


def test_sinks_take_a_share_of_the_attention():
    draft = random_drafter(ODD)
    context, block = inputs(draft.config, 1)
    with_sinks = two_passes(draft, context, block, [9], [3])[0]
    for layer in draft.layers:
        layer.self_attn.attention_sink_bias.fill_(-1e9)
    none = two_passes(draft, context, block, [9], [3])[0]
    without = random_drafter(ODD | {"attention_sink_bias": False})
    without.load_state_dict({k: v for k, v in draft.state_dict().items() if "sink" not in k})
    torch.testing.assert_close(none, two_passes(without, context, block, [9], [3])[0], rtol=1e-5, atol=1e-5)
    assert (with_sinks - none).abs().max() > 1e-2


def test_moves_copies_and_loads_keep_a_drafter_whole():
    draft = random_drafter(ODD)
    assert_whole(draft)
    tensors = random_tensors(draft.config)
    for other in (copy.deepcopy(draft), pickle.loads(pickle.dumps(draft))):
        assert_whole(other)
        assert other.fc.weight.data_ptr() != draft.fc.weight.data_ptr()
        assert all(torch.equal(value, tensors[name]) for name, value in other.state_dict().items())
    other.load_state_dict(random_tensors(draft.config, 1), assign=True)
    assert_whole(other)
    name = "layers.1.self_attn.k_proj.weight"
    assert torch.equal(other.get_parameter(name), random_tensors(draft.config, 1)[name])
    before = list(draft.parameters())
    assert draft.to(torch.bfloat16) is draft
    assert draft.dtype == torch.bfloat16
    assert_whole(draft)
    assert all(new is old for new, old in zip(draft.parameters(), before, strict=True))
    assert all(torch.equal(value, tensors[name].bfloat16()) for name, value in draft.state_dict().items())
    address = draft.fc.weight.data_ptr(), draft.inv_freq.data_ptr()
    draft.to("cpu", torch.bfloat16)
    assert (draft.fc.weight.data_ptr(), draft.inv_freq.data_ptr()) == address
    there = copy.deepcopy(draft).to("meta")
    assert there.device.type == there.inv_freq.device.type == "meta"
    back = there.to_empty(device="cpu")
    back.load_state_dict(draft.state_dict())
    assert_whole(back)


def test_replaced_parameters_and_storages_are_read_after_a_refresh():
    draft = random_drafter()
    context, block = inputs(draft.config, 1)

    def run() -> torch.Tensor:
        draft.refresh()
        return two_passes(draft, context, block, [9], [3])[0]

    first = run()
    draft.layers[0].self_attn.v_proj.weight.mul_(2)
    assert not torch.equal(before := two_passes(draft, context, block, [9], [3])[0], first), "written in place"
    draft.norm.weight = torch.nn.Parameter(draft.norm.weight * 2, requires_grad=False)
    normed = run()
    assert not torch.equal(normed, before)
    down = draft.layers[0].mlp.down_proj.weight
    down.data = down * 2
    assert not torch.equal(run(), normed)


@pytest.fixture
def checkpoint(tmp_path):
    """Return a folder with a checkpoint, its config and its tensors."""
    config = config_dict(attention_bias=True)
    tensors = random_tensors(DraftConfig.from_config(config))
    return SimpleNamespace(folder=save_checkpoint(tmp_path / "draft", config, tensors), config=config, tensors=tensors)


def shard(folder, tensors, parts=3) -> None:
    """Replace a checkpoint's file by ``parts`` shards with an index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    mapping = {}
    for part in range(parts):
        name = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        names = list(tensors)[part::parts]
        save_file({key: tensors[key] for key in names}, folder / name)
        mapping |= dict.fromkeys(names, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))


def assert_refused(checkpoint, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message):
        load_draft(checkpoint.folder)


def assert_loaded(draft: Drafter, tensors: dict[str, torch.Tensor]) -> None:
    assert_whole(draft)
    assert not draft.training
    assert not any(parameter.requires_grad for parameter in draft.parameters())
    state = draft.state_dict()
    assert all(torch.equal(state[name], tensors[name].to(draft.dtype)) for name in tensors)


@pytest.mark.parametrize(("sharded", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (False, torch.float16)])
def test_a_folder_round_trips(checkpoint, sharded, dtype, tmp_path):
    tensors = {name: value.to(dtype) for name, value in checkpoint.tensors.items()}
    folder = save_checkpoint(tmp_path / "other", checkpoint.config, tensors)
    if sharded:
        shard(folder, tensors)
    for name in (folder, str(folder)):
        draft = load_draft(name)
        assert (draft.dtype, draft.device.type) == (dtype, "cpu")
        assert_loaded(draft, tensors)
    assert load_draft(folder, dtype=torch.float32, device="cpu").dtype == torch.float32
    save_file(draft.state_dict(), tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_packed_projections_are_split(checkpoint):
    tensors = dict(checkpoint.tensors)
    for i in range(3):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"layers.{i}.self_attn.{name}_proj.{kind}") for name in "qkv"]
            tensors[f"layers.{i}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        parts = [tensors.pop(f"layers.{i}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"layers.{i}.mlp.gate_up_proj.weight"] = torch.cat(parts)
    assert_loaded(load_draft(save_checkpoint(checkpoint.folder, checkpoint.config, tensors)), checkpoint.tensors)
    tensors["layers.1.mlp.up_proj.weight"] = checkpoint.tensors["layers.1.mlp.up_proj.weight"]
    save_checkpoint(checkpoint.folder, checkpoint.config, tensors)
    assert_refused(checkpoint, r"gate_up_proj.weight and layers.1.mlp.up_proj.weight both hold")


def test_other_names_for_the_same_tensors_load(tmp_path):
    config = VARIANTS["one-layer"]
    tensors = random_tensors(DraftConfig.from_config(config))

    def rename(name: str) -> str:
        name = name.replace("layers.0.", "midlayer.").replace("hidden_norm.", "encoder.output_norm_enc.")
        return name.replace("fc.", "encoder.fc.")

    renamed = {rename(name): value for name, value in tensors.items()} | {"rotary_emb.inv_freq": torch.ones(8)}
    assert_loaded(load_draft(save_checkpoint(tmp_path / "a", config, renamed)), tensors)
    prefixed = {f"model.{name}": value for name, value in tensors.items()}
    assert_loaded(load_draft(save_checkpoint(tmp_path / "b", config, prefixed)), tensors)
    twice = renamed | {"fc.weight": tensors["fc.weight"].clone()}
    with pytest.raises(ValueError, match=r"tensors .*fc.weight and .*fc.weight both hold fc.weight"):
        load_draft(save_checkpoint(tmp_path / "c", config, twice))


@pytest.mark.parametrize(("name", "message"), [
    ("layers.0.attention_conv.base_kernel", "tensors attention_conv belong to a DFlash 2 drafter"),
    ("mask_hidden", "tensor mask_hidden is not supported: mask states that are not an embedding"),
    ("layers.3.input_layernorm.weight", "unknown tensors: layers.3.input_layernorm.weight"),
    ("layers.0.self_attn.attention_sink_bias", "unknown tensors: layers.0.self_attn.attention_sink_bias"),
    ("layers.0.self_attn.q_proj.weight_scale", "unknown tensors: layers.0.self_attn.q_proj.weight_scale"),
])  # fmt: skip
def test_extra_tensors_are_refused_by_name(checkpoint, name, message):
    save_checkpoint(checkpoint.folder, checkpoint.config, checkpoint.tensors | {name: torch.zeros(4)})
    assert_refused(checkpoint, message)


def test_missing_and_misshapen_tensors_are_named(checkpoint):
    tensors = dict(checkpoint.tensors)
    del tensors["layers.2.self_attn.o_proj.bias"], tensors["norm.weight"]
    save_checkpoint(checkpoint.folder, checkpoint.config, tensors)
    assert_refused(checkpoint, r"draft: missing tensors: layers.2.self_attn.o_proj.bias, norm.weight")
    tensors = checkpoint.tensors | {"layers.1.self_attn.k_proj.weight": torch.zeros(64, 64)}
    save_checkpoint(checkpoint.folder, checkpoint.config, tensors)
    assert_refused(checkpoint, r"the config makes tensor layers.1.self_attn.k_proj.weight \[32, 64\], got \[64, 64")
    config = checkpoint.config | {"num_hidden_layers": 4, "layer_types": None}
    save_checkpoint(checkpoint.folder, config, checkpoint.tensors)
    assert_refused(checkpoint, r"missing tensors: layers.3.* and \d+ more")


QUANTIZED = (
    *("int4", "packed int8", "int8", "fp8 per channel", "fp8 of Model-Optimizer", "nvfp4", "nvfp4 of Model-Optimizer"),
    "gptq, by activations",
)


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("layout", QUANTIZED)
def test_quantized_weights_become_dense_if_asked_for_or_stay_packed(checkpoint, tmp_path, layout, fused):
    torch.manual_seed(0)
    settings, write = (PACKED | DENSE)[layout]
    names = ["fc.weight", "layers.0.self_attn.o_proj.weight", "layers.1.self_attn.k_proj.weight"]
    tensors = checkpoint.tensors
    if fused:  # as serving engines name them
        names[2] = "model.layers.1.self_attn.qkv_proj.weight"
        rows = [tensors.pop(f"layers.1.self_attn.{each}_proj.weight") for each in "qkv"]
        tensors[names[2]] = torch.cat(rows)
    dense = dict(tensors)
    for name in names:
        parts, dense[name] = write(*tensors.pop(name).shape)
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_checkpoint(checkpoint.folder, checkpoint.config | {"quantization_config": settings}, tensors)
    with pytest.warns(UserWarning, match=r"3 quantized weights become dense in torch.float32: fc.weight, .*o_proj.wei"):
        draft = load_draft(checkpoint.folder, keeps_blocks=False)
    kept, is_packed = load_draft(checkpoint.folder), layout in ("int4", "packed int8", "int8")
    assert len(kept.packed_weights()) == ((5 if fused else 3) if is_packed else 0)
    for name, tensor in kept.weights().items():
        assert torch.equal(draft.get_parameter(name), tensor if isinstance(tensor, torch.Tensor) else tensor.dense())
    with pytest.warns(UserWarning, match="become dense"):
        export(checkpoint.folder, tmp_path / "out", "published")
    again = load_draft(tmp_path / "out").state_dict()
    save_checkpoint(checkpoint.folder, checkpoint.config, dense)
    expected = load_draft(checkpoint.folder).state_dict()
    for name, tensor in draft.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=0)
        assert torch.equal(tensor, again[name])


@pytest.mark.parametrize(("settings", "lost", "message"), [
    (MODELOPT, "weight_scale", "weights in few bits need scales, and these have none: .* fc.weight torch.uint8"),
    (MODELOPT, "weight", "fc.weight is stored in a way that cannot be read: fc.input_scale .* fc.weight_scale"),
    (None, None, "config.json has no quantization_config, which must say how to read .* fc.weight torch.uint8"),
    ({"quant_method": "bitsandbytes"}, None, "quant_method must be one of awq, .* mlx, got bitsandbytes"),
])  # fmt: skip
def test_quantized_weights_that_are_not_whole_are_refused(checkpoint, settings, lost, message):
    parts, _ = nvfp4(*checkpoint.tensors.pop("fc.weight").shape)
    parts = {name: tensor for name, tensor in parts.items() if lost is None or not name.startswith(lost)}
    parts |= {"weight_scale": torch.ones(1)} if lost == "weight" else {}
    tensors = checkpoint.tensors | {f"fc.{part}": tensor for part, tensor in parts.items()}
    config = checkpoint.config | ({} if settings is None else {"quantization_config": settings})
    save_checkpoint(checkpoint.folder, config, tensors)
    assert_refused(checkpoint, message)


def test_missing_files_are_named(checkpoint):
    shard(checkpoint.folder, checkpoint.tensors)
    (checkpoint.folder / "model-00002-of-00003.safetensors").unlink()
    lost = r"shard model-00002-of-00003.safetensors is missing, but .*index.json names it"
    assert_refused(checkpoint, lost, FileNotFoundError)
    index = checkpoint.folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"fc.weight": "../model.safetensors"}}')
    assert_refused(checkpoint, r"'../model.safetensors', not a file in the same folder")
    index.write_text('{"weight_map": []}')
    assert_refused(checkpoint, "weight_map must map tensor names to files")
    index.unlink()
    neither = r"draft has neither model.safetensors nor model.safetensors.index.json"
    assert_refused(checkpoint, neither, FileNotFoundError)
    (checkpoint.folder / "config.json").write_text("{")
    assert_refused(checkpoint, r"config.json: not JSON that can be read")
    (checkpoint.folder / "config.json").unlink()
    assert_refused(checkpoint, r"is not a drafter's folder: config.json is missing", FileNotFoundError)


def test_a_tensor_in_two_shards_is_named(checkpoint):
    shard(checkpoint.folder, checkpoint.tensors)
    path = checkpoint.folder / "model-00002-of-00003.safetensors"
    save_file(load_file(path) | {"fc.weight": checkpoint.tensors["fc.weight"]}, path)
    assert_refused(checkpoint, r"tensor fc.weight is in model-00002.* and in another file")


@pytest.mark.parametrize("error", [OSError("no route to the hub"), ValueError("gated\nmore")])
def test_a_repository_out_of_reach_is_named(monkeypatch, tmp_path, error):
    import huggingface_hub

    def download(name, *, revision, allow_patterns):
        assert "mask_embedding.pt" in allow_patterns
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    first = str(error).splitlines()[0]
    message = f"draft 'z-lab/none' is neither a folder nor a reachable hub repository at revision 'v1': {first}$"
    with pytest.raises(FileNotFoundError, match=message):
        load_draft("z-lab/none", revision="v1")
    with pytest.raises(ValueError, match=r"revision 'v1' is for a hub repository, but .* is a folder"):
        load_draft(tmp_path, revision="v1")


def test_a_repository_is_downloaded(monkeypatch, checkpoint):
    import huggingface_hub

    def download(name, *, revision, allow_patterns):
        assert (name, revision) == ("z-lab/some", "main")
        return str(checkpoint.folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_loaded(load_draft("z-lab/some", revision="main"), checkpoint.tensors)


def test_a_drafter_is_returned_or_copied_and_other_modules_are_refused():
    draft = random_drafter()
    assert load_draft(draft) is draft
    assert load_draft(draft, dtype=torch.float32, device="cpu") is draft
    other = load_draft(draft, dtype=torch.bfloat16)
    assert (draft.dtype, other.dtype) == (torch.float32, torch.bfloat16)
    assert_whole(draft)
    assert_whole(other)
    assert load_draft(torch.compile(draft)) is draft
    for module, message in ((torch.nn.Linear(2, 2), "must be a drafter with a .config, got Linear"), (3, "got int")):
        with pytest.raises(TypeError, match=message):
            load_draft(module)
    for dtype in ("float32", torch.int8):
        with pytest.raises(TypeError, match=f"dtype must be a floating torch.dtype or None, got .*{dtype}"):
            load_draft(draft, dtype=dtype)


def test_the_weights_of_another_module_are_copied():
    draft = random_drafter()

    class Other(torch.nn.Module):
        config = draft.config

        def state_dict(self):
            return draft.state_dict()

    copied = load_draft(Other())
    assert_loaded(copied, draft.state_dict())
    assert copied.fc.weight.data_ptr() != draft.fc.weight.data_ptr()
    tensors = {name: value for name, value in draft.state_dict().items() if name != "fc.weight"}
    Other.state_dict = lambda self: tensors
    with pytest.raises(ValueError, match=r"Other: missing tensors: fc.weight"):
        load_draft(Other())

"""A target with quantized, sharded, offloaded, freed or strangely shaped weights gives its own text, or is refused."""

import copy
import itertools
import warnings
from collections.abc import Iterator

import accelerate
import pytest
import torch
import torch.distributed as dist
from answers import IDS, NEW, answered, one_shot, own
from families import make_draft, make_target
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrizations, parametrize
from transformers import PreTrainedModel

import dflash
from dflash.targets import UnsupportedTargetError

pytestmark = pytest.mark.usefixtures("released")


def in_every_way(model: PreTrainedModel):
    """Yield calls that enter the package in different ways."""
    yield lambda: one_shot(model)
    yield lambda: next(dflash.stream(model, None, IDS[None], max_new_tokens=NEW))
    yield lambda: dflash.Generator(model, max_length=64)
    yield lambda: model.generate(IDS[None], max_new_tokens=2, do_sample=False, custom_generate=dflash.custom_generate)


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize(("family", "whole"), [("llama", True), ("qwen3_moe", True), ("llama", False)])
def test_dynamic_quantization_is_refused(family, whole):
    model = make_target(family)
    if not whole:
        model.model.layers[2].mlp = quantized(model.model.layers[2].mlp)
    for call in in_every_way(quantized(model) if whole else model):
        with pytest.raises(UnsupportedTargetError, match="quantizes activations with one scale for all rows"):
            call()


LAYOUTS = {
    "transposed": lambda weight: weight.t().contiguous().t() if weight.dim() == 2 else weight,
    "every other column": lambda weight: torch.stack([weight, weight], -1)[..., 0],
    "neg bit": lambda weight: torch.view_as_complex(torch.stack([weight, -weight], -1).contiguous()).conj().imag,
    "dense neg bit": lambda weight: torch._neg_view(-weight),
    "one row for all": lambda weight: weight[:1].expand_as(weight),
    "overlapping": lambda weight: weight.flatten().as_strided(weight.shape, (1,) * weight.dim()),
    "at an offset": lambda weight: torch.cat([weight.new_zeros(3), weight.flatten()])[3:].view_as(weight),
}


# With one row for all of the head, every token would have the same logit, up to rounding.
PLACES = [*zip(LAYOUTS, itertools.cycle(["norms", "projections", "embeddings"]), strict=False)]
PLACES += [(layout, where) for layout in LAYOUTS if layout != "one row for all" for where in ("all", "head")]


@pytest.mark.parametrize(("layout", "where"), PLACES)
def test_weights_of_any_layout_give_the_same_text(layout, where):
    model = make_target("llama", num_hidden_layers=2)
    parts = {"norms": "norm.weight", "projections": "proj.weight", "head": "lm_head", "embeddings": "embed_tokens"}
    for name, parameter in list(model.named_parameters()):
        if parts.get(where, "") in name:
            owner = model.get_submodule(name.rpartition(".")[0])
            owner.weight = nn.Parameter(LAYOUTS[layout](parameter.detach()))
    assert one_shot(model, make_draft(model)) == own(model) == answered(dflash.Generator(model, max_length=64))


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.spectral_norm, "registered", "old"])
def test_parametrized_weights_give_the_same_text(make):
    model = make_target("llama", num_hidden_layers=2)
    before = own(model)
    for layer in model.model.layers:
        linear = layer.mlp.up_proj
        if make == "registered":
            parametrize.register_parametrization(linear, "weight", Double())
        elif make == "old":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.nn.utils.weight_norm(linear)
            linear.weight_g.data *= 3
        else:
            make(linear)
    if make == "registered":
        assert own(model) != before
    assert one_shot(model) == own(model) == answered(dflash.Generator(model, max_length=64))


def test_a_module_inside_itself_is_refused():
    model = make_target("llama", num_hidden_layers=2)
    model.model.layers[0].parent = model
    with pytest.raises(UnsupportedTargetError, match="cannot be copied: maximum recursion depth"):
        one_shot(model)


def test_weights_shared_by_all_layers_give_the_same_text():
    model = make_target("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
        layer.self_attn.k_proj.weight = layer.self_attn.v_proj.weight
    assert one_shot(model) == own(model) == answered(dflash.Generator(model, max_length=64))


# ---------------------------------------------------------------------------------------------- without their memory


def small(family: str = "llama") -> PreTrainedModel:
    return make_target(family, num_hidden_layers=2, layer_types=None)


def give_up(tensor: torch.Tensor, size: int = 0) -> None:
    tensor.untyped_storage().resize_(size)


def refused(model: PreTrainedModel, draft: nn.Module | None = None, generator: dflash.Generator | None = None) -> str:
    """Return what a one-shot call says. It must refuse, as a generator does, or one that was made before."""
    with pytest.raises(ValueError):  # noqa: PT011
        answered(generator) if generator else dflash.Generator(model, draft, max_length=64)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        one_shot(model, draft)
    return str(caught.value)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_freed_weights_are_refused_by_name(family):
    names = ("embed_tokens", "layers.1.self_attn.q_proj", "layers.0.mlp.down_proj", "layers.1.input_layernorm", "norm")
    for name in (f"model.{name}.weight" for name in names):
        model = small(family)
        give_up(model.get_parameter(name))
        assert f"{name} has lost its memory: its storage was freed" in refused(model)
    model = small(family)
    give_up(next(model.buffers()))
    refused(model)


def test_weights_that_lost_a_part_of_their_memory_are_refused():
    model = small()
    weight = model.model.layers[0].mlp.up_proj.weight
    give_up(weight, weight.nbytes // 2)
    assert "lost its memory" in refused(model)
    flat = torch.randn(10000)
    model = small()
    model.model.layers[0].mlp.up_proj.weight.data = flat[500 : 500 + 96 * 64].view(96, 64)
    give_up(flat)
    assert "lost its memory" in refused(model)


@pytest.mark.parametrize(("family", "name"), [("llama", "lm_head"), ("gemma3", "model.layers.0.mlp.up_proj")])
def test_weights_freed_after_the_generator_was_made_are_refused(family, name):
    model = small(family)
    draft = make_draft(model)
    generator = dflash.Generator(model, draft, max_length=64)
    assert answered(generator) == one_shot(model, draft)
    give_up(model.get_submodule(name).weight)
    refused(model, draft, generator)


@pytest.mark.parametrize("name", ["fc", "norm", "layers.0.mlp.up_proj", "layers.0.self_attn.k_norm"])
def test_a_drafter_whose_weights_were_freed_is_refused(name):
    model = small()
    draft = make_draft(model)
    give_up(draft.get_submodule(name).weight)
    assert "has lost its memory" in refused(model, draft)


FAKE = FakeTensorMode(allow_non_fake_inputs=True)
WITHOUT_MEMORY = {
    "sparse": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr, "mkldnn": torch.Tensor.to_mkldnn,
    "meta": lambda w: w.to("meta"), "fake": FAKE.from_tensor, "empty": lambda w: w.new_empty(0),
    "quantized": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_tensors_without_memory_are_refused(kind):
    for name in ("lm_head", "model.layers.1.mlp.up_proj"):
        model = small()
        parameters = model.get_submodule(name)._parameters
        weight = WITHOUT_MEMORY[kind](parameters["weight"].detach())
        parameters["weight"] = weight if kind == "quantized" else nn.Parameter(weight, requires_grad=False)
        said = refused(model)
    if kind == "meta":
        assert f"{name}.weight is on the meta device: it was never loaded, or it is offloaded" in said


@pytest.fixture
def mesh(monkeypatch) -> Iterator[DeviceMesh]:
    """Return a mesh of this process alone."""
    monkeypatch.setenv("USE_LIBUV", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_sharded_models_are_refused_by_name(mesh):
    for placement in (Shard(0), Replicate()):
        model = small()
        mlp = model.model.layers[0].mlp
        mlp.up_proj.weight = nn.Parameter(distribute_tensor(mlp.up_proj.weight.detach(), mesh, [placement]))
        assert "one process with plain tensors is needed" in refused(model)
    model = small()
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    assert "it is sharded by torch.distributed" in refused(model)
    model(IDS[None])
    refused(model)
    model = small()
    fully_shard(model.model.layers[0].mlp, mesh=mesh)
    refused(model)


def test_offloaded_models_are_refused_by_name(tmp_path):
    cpu, parts = torch.device("cpu"), {"model": "cpu", "lm_head": "disk"}
    assert "it was never loaded, or it is offloaded" in refused(accelerate.cpu_offload(small(), cpu))
    refused(accelerate.disk_offload(small(), tmp_path / "all", cpu))
    place = {"offload_dir": tmp_path / "head", "main_device": "cpu", "force_hooks": True}
    refused(accelerate.dispatch_model(small(), parts, **place))


def test_a_refused_model_is_left_as_it_was():
    model = quantized(make_target("llama", num_hidden_layers=2))
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    for call in in_every_way(model):
        with pytest.raises(UnsupportedTargetError):
            call()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    after = model.state_dict()
    plain = [name for name, value in before.items() if isinstance(value, torch.Tensor) and not value.is_quantized]
    assert plain
    assert all(torch.equal(after[name], before[name]) for name in plain)

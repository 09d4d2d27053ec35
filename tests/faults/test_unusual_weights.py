"""A target with quantized, sharded, offloaded, freed or strangely shaped weights gives its own text, or is refused."""

import copy
import itertools
import warnings

import pytest
import torch
from answers import IDS, NEW, answered, one_shot, own
from families import make_draft, make_target
from process import python
from torch import nn
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


PARTS = ["all", "norms", "projections", "head", "embeddings"]
ALIKE = {("one row for all", "all"), ("one row for all", "head")}  # every token has the same logit, up to rounding


@pytest.mark.parametrize(("layout", "where"), [pair for pair in itertools.product(LAYOUTS, PARTS) if pair not in ALIKE])
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


FREED = """
import copy, warnings
import torch
from families import make_draft, make_target
import dflash
warnings.simplefilter("ignore")
ids = torch.arange(2, 11)[None]

def attempt(name, call):
    try:
        call()
        print(name, "|", "ran", flush=True)
    except Exception as error:
        print(name, "|", type(error).__name__, "|", error, flush=True)

def give_up(tensor, size=0):
    tensor.untyped_storage().resize_(size)

def small(family="llama"):
    return make_target(family, num_hidden_layers=2, layer_types=None)

def every(name, model, draft=None):
    attempt(name + ", one-shot", lambda: dflash.generate(model, draft, ids, max_new_tokens=4))
    attempt(name + ", generator", lambda: dflash.Generator(model, draft, max_length=64))
"""


AT_ONCE = """
names = ["model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight",
         "model.layers.1.input_layernorm.weight", "model.norm.weight", "lm_head.weight"]
for family in ("llama", "gemma3"):
    for name in names:
        model = small(family)
        give_up(model.get_parameter(name))
        every(f"at once: {family} {name}", model)
    model = small(family)
    give_up(next(model.buffers()))
    every(f"at once: {family} buffer", model)
model = small()
weight = model.model.layers[0].mlp.up_proj.weight
give_up(weight, weight.nbytes // 2)
every("at once: half", model)
flat = torch.randn(10000)
model = small()
model.model.layers[0].mlp.up_proj.weight.data = flat[500 : 500 + 96 * 64].view(96, 64)
give_up(flat)
every("at once: shard at an offset", model)
"""
LATER = """
for family in ("llama", "gemma3"):
    for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"):
        model = small(family)
        draft = make_draft(model)
        generator = dflash.Generator(model, draft, max_length=64)
        generator.generate(ids, max_new_tokens=4)
        dflash.generate(model, draft, ids, max_new_tokens=4)
        give_up(model.get_parameter(name))
        attempt(f"later: {family} {name}, generator", lambda: generator.generate(ids, max_new_tokens=4))
        attempt(f"later: {family} {name}, one-shot", lambda: dflash.generate(model, draft, ids, max_new_tokens=4))
    model = small(family)
    generator = dflash.Generator(model, max_length=64)
    events = generator.stream(ids, max_new_tokens=9)
    next(events)
    give_up(next(model.buffers()))
    attempt(f"later: {family} buffer, generator", lambda: generator.generate(ids, max_new_tokens=4))
"""
DRAFTERS = """
model = small()
for name in [name for name, _ in make_draft(model).named_parameters() if "layers.1" not in name]:
    draft = make_draft(model)
    give_up(draft.get_parameter(name))
    every("drafter: " + name, model, draft)
"""
WITHOUT_MEMORY = """
from torch._subclasses import FakeTensorMode
fake = FakeTensorMode(allow_non_fake_inputs=True)
makers = {
    "sparse": lambda w: w.to_sparse(), "csr": lambda w: w.to_sparse_csr(), "mkldnn": lambda w: w.to_mkldnn(),
    "meta": lambda w: w.to("meta"), "fake": lambda w: fake.from_tensor(w),
    "quantized": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), "empty": lambda w: w.new_empty(0),
}
for kind, make in makers.items():
    for name in ("model.layers.1.mlp.up_proj", "lm_head", "model.embed_tokens"):
        model = small()
        weight = make(model.get_submodule(name)._parameters.pop("weight").detach())
        model.get_submodule(name)._parameters["weight"] = (
            weight if kind == "quantized" else torch.nn.Parameter(weight, requires_grad=False))
        every(f"without memory: {kind} {name}", model)
"""


def lines(done) -> dict[str, str]:
    """What each attempt of a child said."""
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    return dict(line.split(" | ", 1) for line in done.stdout.splitlines() if " | " in line)


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return lines(python(FREED + AT_ONCE + LATER + DRAFTERS + WITHOUT_MEMORY))


def all_refused(said: dict[str, str], group: str, count: int) -> dict[str, str]:
    said = {name: text for name, text in said.items() if name.startswith(group)}
    assert len(said) >= count, said
    ran = {name: text for name, text in said.items() if not text.startswith(("UnsupportedTargetError", "ValueError"))}
    assert ran == {}
    return said


def test_freed_weights_are_refused_by_name(said):
    said = all_refused(said, "at once", 2 * 7 * 2 + 4)
    freed = "model.layers.1.self_attn.q_proj.weight"
    assert f"{freed} has lost its memory: its storage was freed" in said[f"at once: llama {freed}, one-shot"]
    assert "lost its memory" in said["at once: shard at an offset, generator"]


def test_weights_freed_after_the_generator_was_made_are_refused(said):
    all_refused(said, "later", 14)


def test_a_drafter_whose_weights_were_freed_is_refused_by_name(said):
    said = all_refused(said, "drafter", 20)
    assert {name: text for name, text in said.items() if "lost its memory" not in text} == {}


def test_tensors_without_memory_are_refused(said):
    said = all_refused(said, "without memory", 7 * 3 * 2)
    text = said["without memory: meta lm_head, one-shot"]
    assert "lm_head.weight is on the meta device: it was never loaded, or it is offloaded" in text


def test_sharded_and_offloaded_models_are_refused_by_name():
    done = python(FREED + """
import os
import tempfile
os.environ["USE_LIBUV"] = "0"
import accelerate
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh, cpu = DeviceMesh("cpu", [0]), torch.device("cpu")

for placement in (Shard(0), Replicate()):
    model = small()
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = torch.nn.Parameter(distribute_tensor(mlp.up_proj.weight.detach(), mesh, [placement]))
    every(f"DTensor {placement}", model)
model = small()
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
every("FSDP", model)
model(ids)
every("FSDP after a pass", model)
model = small()
fully_shard(model.model.layers[0].mlp, mesh=mesh)
every("FSDP of a part", model)
every("cpu offload", accelerate.cpu_offload(small(), cpu))
every("disk offload", accelerate.disk_offload(small(), tempfile.mkdtemp(), cpu))
model = accelerate.dispatch_model(small(), {"model": "cpu", "lm_head": "disk"}, offload_dir=tempfile.mkdtemp(),
                                  main_device="cpu", force_hooks=True)
every("one part on disk", model)
dist.destroy_process_group()
""")  # fmt: skip
    said = all_refused(lines(done), "", 16)
    assert "one process with plain tensors is needed" in said["DTensor R, one-shot"]
    assert "it is sharded by torch.distributed" in said["FSDP, one-shot"]
    assert "it was never loaded, or it is offloaded" in said["cpu offload, one-shot"]


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

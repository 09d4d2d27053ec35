"""Targets that transformers' tensor parallelism (``tp_plan="auto"``) spreads over processes, the *ranks*.

Each rank runs the whole program: its shard of the target, a copy of the drafter, and a state of its own. All must
branch alike, or the next exchange waits for ever. So rank 0 decides: its blocks are verified, its choices committed and
its seeds used everywhere. An all-reduce usually gives every rank the same bits, but no backend promises it, least of
all for 16-bit sums.
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from .model import config_values, modules_of, shard_of, text_config

_MODULE = "transformers.distributed.tensor_parallel"
_PLANNED = "load it with transformers' own plan, distributed_config=DistributedConfig(tp_size=N)"
_PROJECTIONS = {"q_proj": "attention heads", "k_proj": "key/value heads", "v_proj": "key/value heads"}


# ---------------------------------------------------------------------------------------------- spread modules


def _is_installed(forward: Any) -> bool:
    """Return True for a forward that transformers' tensor parallelism has made."""
    return isinstance(forward, types.FunctionType) and (forward.__module__, forward.__name__) == (_MODULE, "tp_forward")


def _cells(forward: types.FunctionType) -> dict[str, Any]:
    """Return what a forward closes over, by name."""
    cells = forward.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(forward.__code__.co_freevars, cells, strict=True)}


def _spread_modules(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the modules with a forward of transformers' tensor parallelism, and what that closes over."""
    forwards = ((module, module.__dict__.get("forward")) for module in modules_of(model))
    return [(module, _cells(forward)) for module, forward in forwards if _is_installed(forward)]


def forward_of_copy(original: nn.Module, copied: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that transformers would have given to a copy of a module; None if the module has none."""
    forward = original.__dict__.get("forward")
    if not _is_installed(forward):
        return None
    inside = _cells(forward)
    own = inside.get("original_forward")
    if inside.get("module") is not original or getattr(own, "__func__", None) is not type(original).forward:
        return None  # something was replaced before the model was spread
    inside |= {"module": copied, "original_forward": types.MethodType(own.__func__, copied)}
    cells = tuple(types.CellType(inside[name]) for name in forward.__code__.co_freevars)
    return types.FunctionType(forward.__code__, forward.__globals__, closure=cells)


def meshes(module: nn.Module) -> list[Any]:
    """Return the objects by which transformers knows a model's ranks."""
    return [module.__dict__[name] for name in ("_device_mesh", "_mesh_manager") if name in module.__dict__]


def mesh_of(model: nn.Module) -> Any:
    """Return the mesh of the processes that transformers has spread the model over; None for one process."""
    return next((inside["mesh"] for _, inside in _spread_modules(model) if "mesh" in inside), None)


def ranks_in(model: nn.Module) -> int:
    """Return the number of processes that transformers has spread the model over."""
    mesh = mesh_of(model)
    return 1 if mesh is None else mesh.size()


def shards(model: nn.Module) -> dict[int, Tensor]:
    """Return this rank's part of every tensor that transformers has spread, by the ``id`` of the whole."""
    tensors = (tensor for module, _ in _spread_modules(model) for tensor in module._parameters.values())
    return {id(tensor): shard for tensor in tensors if tensor is not None and (shard := shard_of(tensor)) is not None}


# ---------------------------------------------------------------------------------------------- judging


def refusal_of_ranks(model: PreTrainedModel) -> str | None:
    """Return why a model that was spread over processes cannot be run, or None. Looks at the structure only."""
    spread = _spread_modules(model)
    if not spread:
        if (getattr(model, "_tp_size", None) or 1) > 1 and _MODULE not in sys.modules:
            return "this transformers spreads a model as plain tensors (tp_plan): transformers 5.17 or newer is needed"
        return None
    # 1. The kind of parallelism
    mesh = getattr(model, "_device_mesh", None)
    for name, size in zip(getattr(mesh, "mesh_dim_names", None) or (), getattr(mesh, "shape", ()), strict=False):
        if name != "tp" and size > 1:
            return f"it is spread over {size} processes by {name!r}: only tensor parallelism can be run, {_PLANNED}"
    for module in modules_of(model):
        forward = module.__dict__.get("forward")
        source = getattr(forward, "__globals__", {}).get("__name__", "")
        if source.startswith("transformers.distributed.") and not _is_installed(forward):
            return f"{type(module).__name__} runs {source}: only tensor parallelism can be run, {_PLANNED}"
    if not dist.is_initialized():
        return "it is spread over processes whose group was destroyed: load it again"
    # 2. What each rank has of the rows and of the logits
    for module, inside in spread:
        layout = getattr(inside.get("self"), "output_layouts", None)
        if type(inside.get("self")).__name__ == "SequenceParallel":
            return f"{type(module).__name__} is sequence-parallel, so that a rank has only some of the rows: {_PLANNED}"
        if module is model.get_output_embeddings() and not (layout is None or layout.is_replicate()):
            return f'a rank has only its part of the logits: plan the head as "colwise_gather_output", or {_PLANNED}'
    # 3. The layers
    config = text_config(model)
    kinds = set().union(*config_values(config, "layer_types")) - {"full_attention", "sliding_attention"}
    if kinds or getattr(model, "_is_stateful", False):
        return (
            "only attention over the whole past or over a window can be spread over processes yet, "
            f"{config.model_type} has other layers: run it in one process"
        )
    return _refusal_of_heads(model, ranks_in(model))


def _refusal_of_heads(model: PreTrainedModel, size: int) -> str | None:
    """Return why the attention heads cannot be dealt out; layers may have different numbers of them."""
    counts: dict[tuple[int, str], None] = {}  # ordered
    for attention in modules_of(model.get_decoder()):
        width = getattr(attention, "head_dim", None)
        for name, what in _PROJECTIONS.items():
            projection = getattr(attention, name, None)
            if width and isinstance(projection, nn.Module) and _is_installed(projection.__dict__.get("forward")):
                counts[projection.out_features // width, what] = None
    for count, what in counts:
        if count % size:
            fitting = [n for n in range(1, count + 1) if all(other % n == 0 for other, _ in counts)]
            return (
                f"its {count} {what} do not divide by {size} processes: start as many as divide "
                f"{' and '.join(f'{n} {name}' for n, name in counts)} ({', '.join(map(str, fitting))})"
            )
    return None


# ---------------------------------------------------------------------------------------------- running


class Ranks:
    """The processes that a target is spread over. All of them must call each method, in the same order.

    Args:
        mesh: of transformers' tensor parallelism, one-dimensional; None for one process, which agrees with itself.
        device: of this rank.

    Attributes:
        count: of processes.
    """

    agreed_targets = 0  # of this process; made in the same order by every rank

    def __init__(self, mesh: Any, device: torch.device) -> None:
        self._group, self.count = (None, 1) if mesh is None else (mesh.get_group(), mesh.size())
        self._device, self._agreed = device, b""
        self._weight: Tensor | None = None
        self._whole: Tensor | None = None
        self._versions: list[int] = []

    def share_(self, tensor: Tensor) -> Tensor:
        """Return the tensor with rank 0's values, written in place if it is contiguous."""
        if self.count > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def share_rows(self, rows: list[int], like: Tensor) -> list[int]:
        """Return rank 0's ``rows`` of a batch; ``like [batch]`` int64 gives its size and device."""
        if self.count == 1:
            return rows
        flags = torch.zeros_like(like).index_fill_(0, like.new_tensor(rows), 1)
        return self.share_(flags).nonzero()[:, 0].tolist()

    def compare(self, what: str, value: Callable[[], object]) -> None:
        """Raise ValueError on every rank unless ``repr(value())`` is the same on all of them.

        All that was compared before counts too: a rank that uses another target, or another generator, is found out.
        The exchange has one size whatever is compared, so ranks that are at different places find out too.
        """
        if self.count == 1:
            return
        before = self._agreed or b"%d" % Ranks.agreed_targets
        digest = hashlib.sha256(before + f"{what}: {value()!r}".encode()).digest()[:8]
        mine = torch.tensor(int.from_bytes(digest, "big", signed=True), dtype=torch.int64, device=self._device)
        every = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(every, mine, group=self._group)
        first, *others = map(int, every)
        if different := [rank for rank, digest in enumerate(others, 1) if digest != first]:
            raise ValueError(
                f"the target is spread over {self.count} processes, and rank {different[0]} differs from rank 0 in "
                f"{what}. Every rank must load the same model and make the same calls in the same order"
            )
        Ranks.agreed_targets += not self._agreed
        self._agreed = digest

    def all(self, flag: bool) -> bool:
        """Return True if the flag is set on every rank."""
        if self.count == 1:
            return flag
        flags = torch.tensor(int(flag), dtype=torch.int64, device=self._device)
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=self._group)
        return bool(flags)

    def whole(self, weight: Tensor) -> Tensor:
        """Return the whole of a spread weight as a plain tensor, gathered once. Keeps one weight."""
        if shard_of(weight) is None:
            return weight
        if self._whole is None or self._weight is not weight:
            self._weight, self._whole, self._versions = weight, _gathered(weight), _versions(weight)
        return self._whole

    def refresh(self) -> None:
        """Gather the kept weight again, in place, if it was changed in place on any rank."""
        weight, whole = self._weight, self._whole
        if weight is not None and whole is not None and not self.all(self._versions == _versions(weight)):
            self._versions = _versions(weight)
            whole.copy_(_gathered(weight))


@torch.no_grad()
def _gathered(weight: Tensor) -> Tensor:
    return weight.detach().full_tensor()


def _versions(weight: Tensor) -> list[int]:
    """Return what torch counts of changes in place, through the whole and through this rank's part."""
    parts = [part for part in (weight, shard_of(weight)) if part is not None]
    return [0 if part.is_inference() else part._version for part in parts]

"""Weights in 8 bits: the copies that a target's linear layers multiply by, as modules and on the fused path alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.weak import WeakIdKeyDictionary

from .. import ops
from ..decoder import product
from ..ops import NotFiniteError, PackedWeight, Weight, format_of
from .fingerprint import Fingerprint
from .model import KERNEL_DTYPES, PLAIN_TENSORS, UnsupportedTargetError, embedding_table, name_of, weight_of
from .packed import PackedLinear
from .parallel import ranks_in
from .support import is_quantized, replaced_function

if TYPE_CHECKING:
    from .fused import FusedTarget


class Int8Linear(nn.Linear):
    """A linear layer of a target's copy that multiplies by ``packed``, once it is set."""

    packed: PackedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        return product(x, weight_of(self), self.bias)


class _Copy:
    """The copy of a weight, for all targets of it while its values are the same."""

    def __init__(self, weight: Weight) -> None:
        self._version, made = _version_of(weight), format_of("int8", "cpu")
        if not isinstance(weight, PackedWeight):
            self.packed = PackedWeight.of(weight, made)
            return
        # A few tiles of features at a time become dense.
        pieces = [
            PackedWeight.of(ops.unpack_rows(weight.packed, ids, weight.columns, weight.format), made)
            for ids in torch.arange(weight.shape[0], device="cpu").split(1024)
        ]
        packed, scales = torch.cat([x.packed for x in pieces]), torch.cat([x.scales for x in pieces])
        self.packed = PackedWeight(packed, scales, made, weight.columns)

    @classmethod
    def of(cls, weight: Weight, *, anew: bool) -> _Copy:
        """Return the copy that a target has already, unless it is of other values or ``anew`` asks for a new one."""
        tensor = _tensor_of(weight)
        found = _COPIES[tensor]() if tensor in _COPIES else None
        if anew or found is None or found._version is None or found._version != _version_of(weight):
            found = cls(weight)
            _COPIES[tensor] = weakref.ref(found)
        return found


_COPIES = WeakIdKeyDictionary()  # of each weight a weak reference to its `_Copy`


def _tensor_of(weight: Weight) -> Tensor:
    return weight.packed if isinstance(weight, PackedWeight) else weight


def _version_of(weight: Weight) -> tuple[int, int, bytes] | None:
    """Return what changes with a weight's values: what torch counts, and a few of them for writes that it does not.

    None for tensors of which it counts none.
    """
    tensor = _tensor_of(weight).detach()
    if tensor.is_inference():
        return None
    some = tensor.flatten()[:: max(1, tensor.numel() // 64)].float()
    return tensor._version, tensor.data_ptr(), some.numpy().tobytes()


class Int8Weights:
    """The copies of all linear layers of a target, made when they are first needed and after the weights change.

    Targets of one model share them.

    Args:
        model: a copy of the user's model, which has no `int8_obstacle`. Its linear layers become `Int8Linear`.
        fused: its fused form, if it has one.
    """

    def __init__(self, model: nn.Module, fused: FusedTarget | None) -> None:
        self._model, self._fused = model, fused
        self._made_of: Fingerprint | None = None  # of the weights that the copies were made of
        self._trusts_others = True
        self._linears = [module for _, module in _modules_of_text(model) if type(module) in (nn.Linear, PackedLinear)]
        for linear in self._linears:
            if type(linear) is nn.Linear:
                linear.__class__ = Int8Linear

    def forget_values(self) -> None:
        """Make the copies again at the next `refresh`, whether the weights are known to have changed or not."""
        self._made_of, self._trusts_others = None, False

    def refresh(self) -> None:
        """Make the copies if there are none of the weights as they are now.

        Raises:
            UnsupportedTargetError: a value is infinite or NaN. Earlier copies are gone then, and the next call raises
                too until the values are finite.
        """
        if self._made_of is not None and self._made_of.has_same_values(self._model):
            return
        # 1. Free earlier copies, so that no two sets are in memory.
        self._made_of = None
        self._use([None] * len(self._linears))
        # 2. Make all copies before any of them is used.
        try:
            weights = map(weight_of, self._linears)
            self._use([_Copy.of(weight, anew=not self._trusts_others) for weight in weights])
        except NotFiniteError as error:
            raise UnsupportedTargetError(not_finite("weights", self._model, error)) from error
        self._made_of, self._trusts_others = Fingerprint(self._model), True

    def _use(self, copies: Sequence[_Copy | None]) -> None:
        self._copies = copies  # keeps them for other targets
        for linear, copied in zip(self._linears, copies, strict=True):
            linear.packed = None if copied is None else copied.packed
        if self._fused is not None:
            self._fused.read_layers()


def not_finite(option: str, model: nn.Module, error: NotFiniteError) -> str:
    """Return the message for a weight of a target or drafter that is not finite, with ``option`` asking for int8."""
    name = name_of(model, error.weight).removesuffix(".weight")
    return f"{option}='int8' needs finite weights, got {error.value} in {name}: leave it out"


def check_int8(model: nn.Module) -> None:
    """Raise UnsupportedTargetError if there is an `int8_obstacle`."""
    if obstacle := int8_obstacle(model):
        raise UnsupportedTargetError(
            "weights='int8' needs a target on CPU whose products are all plain linear layers of torch (nn.Linear), got "
            f"{type(model).__name__}: {obstacle}. Leave weights out"
        )


def int8_obstacle(model: nn.Module) -> str:
    """Return why the weights of a target cannot be stored as int8; empty if they can, if they are finite.

    Looks only at the structure. Embeddings and convolutions stay as they are; what else multiplies must be a linear
    layer: experts, for example, are not.
    """
    device = embedding_table(model).device
    if device.type != "cpu":
        return f"it is on {device}"
    if is_quantized(model):
        return "its weights are quantized already"
    if (count := ranks_in(model)) > 1:
        return f"it is spread over {count} processes"
    if replaced := replaced_function(model):  # may read a layer's weight without calling it
        return f"{replaced} is not transformers' own"
    found: list[tuple[Tensor, str]] = []
    for name, module in _modules_of_text(model):
        for key, weight in module._parameters.items():
            if weight is None or weight.dim() < 2 or isinstance(module, (nn.Embedding, _ConvNd)):
                continue
            if type(module) is not nn.Linear or key != "weight":
                found.append((weight, f"{name}.{key} is a weight of {type(module).__name__}"))
            elif type(weight) not in PLAIN_TENSORS or weight.dtype not in KERNEL_DTYPES["cpu"]:
                found.append((weight, f"{name}.{key} is a {type(weight).__name__} of {weight.dtype}"))
    return max(found, key=lambda pair: pair[0].numel(), default=(None, ""))[1]  # experts rather than their router


def _modules_of_text(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the decoder and the head with their names: no vision tower, for example."""
    inside = {module for part in (model.get_decoder(), model.get_output_embeddings()) for module in part.modules()}
    return (named for named in model.named_modules() if named[1] in inside)

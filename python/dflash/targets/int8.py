"""Weights in 8 bits: the copies that a target's linear layers and experts multiply by, fused or as modules."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.weak import WeakIdKeyDictionary

from ..decoder import product
from ..ops import NotFiniteError, PackedWeight, Weight, format_of
from .fingerprint import Fingerprint
from .fused import FusedTarget, experts_form, use_experts_op
from .model import (
    KERNEL_DTYPES,
    PLAIN_TENSORS,
    UnsupportedTargetError,
    embedding_table,
    modules_of_text,
    name_of,
    weight_of,
)
from .packed import ExpertWeights, PackedEmbedding, PackedExperts, PackedLinear
from .parallel import ranks_in
from .support import is_quantized, replaced_function

Turn = Callable[[Tensor], Tensor]  # makes [out, in] of a matrix that lies in another way


class Int8Linear(nn.Linear):
    """A linear layer of a target's copy that multiplies by ``packed``, once it is set."""

    packed: PackedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        return product(x, weight_of(self), self.bias)


class _Copy:
    """The copy of a weight, for all targets of it while its values are the same."""

    def __init__(self, weight: Weight, turn: Turn | None) -> None:
        self._version, self.packed = _version_of(weight), _in_8_bits(weight, turn)

    @classmethod
    def of(cls, weight: Weight, turn: Turn | None, *, anew: bool) -> _Copy:
        """Return the copy that a target has already, unless it is of other values or ``anew`` asks for a new one."""
        tensor = _tensor_of(weight)
        found = _COPIES[tensor]() if tensor in _COPIES else None
        if anew or found is None or found._version is None or found._version != _version_of(weight):
            found = cls(weight, turn)
            _COPIES[tensor] = weakref.ref(found)
        return found


_COPIES = WeakIdKeyDictionary()  # of each weight a weak reference to its `_Copy`


def _in_8_bits(weight: Weight, turn: Turn | None) -> PackedWeight:
    """Return a weight ``[..., out, in]`` in 8 bits, itself if it is; ``turn`` makes ``[out, in]`` of each matrix."""
    made = format_of("int8", "cpu")
    if isinstance(weight, PackedWeight) and weight.format == made:
        return weight
    if turn is None:
        return PackedWeight.of(weight, made)
    try:
        experts = [PackedWeight.of(turn(matrix), made) for matrix in _tensor_of(weight).detach()]
    except NotFiniteError as error:
        raise NotFiniteError(_tensor_of(weight), error.value) from error
    packed, scales = torch.stack([x.packed for x in experts]), torch.stack([x.scales for x in experts])
    return experts[0]._replace(packed=packed, scales=scales)


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
    """The copies of a target's linear layers and experts, made when they are first needed and after the weights change.

    Targets of one model share them.

    Args:
        model: a copy of the user's model, which has no `int8_obstacle`. Its linear layers become `Int8Linear`.
        fused: its fused form, if it has one.
    """

    def __init__(self, model: nn.Module, fused: FusedTarget | None) -> None:
        self._model, self._fused = model, fused
        self._made_of: Fingerprint | None = None  # of the weights that the copies were made of
        self._trusts_others = True
        use_experts_op(model)
        self._layers = [module for _, module in modules_of_text(model) if _weights_of(module)]
        for layer in self._layers:
            if type(layer) is nn.Linear:
                layer.__class__ = Int8Linear

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
        self._use([[]] * len(self._layers))
        # 2. Make all copies before any of them is used.
        anew = not self._trusts_others
        try:
            self._use([[_Copy.of(*each, anew=anew) for each in _weights_of(layer)] for layer in self._layers])
        except NotFiniteError as error:
            raise UnsupportedTargetError(not_finite("weights", self._model, error)) from error
        self._made_of, self._trusts_others = Fingerprint(self._model), True

    def _use(self, copies: Sequence[Sequence[_Copy]]) -> None:
        self._copies = copies  # keeps them for other targets
        for layer, copied in zip(self._layers, copies, strict=True):
            layer.packed = _run_by(layer, [x.packed for x in copied]) if copied else None
        if self._fused is not None:
            self._fused.read_layers()


def _weights_of(layer: nn.Module) -> list[tuple[Weight, Turn | None]]:
    """Return the weights of a linear layer or of experts, and how each matrix is turned; none of other modules."""
    if type(layer) in (nn.Linear, Int8Linear, PackedLinear):
        return [(weight_of(layer), None)]
    if (form := experts_form(layer)) is None:
        return []
    turns = (_gate_then_up, _transposed) if form.transposed else (None, None)
    return list(zip((layer.gate_up_proj, layer.down_proj), turns, strict=True))


def _gate_then_up(matrix: Tensor) -> Tensor:
    """Return columns that alternate between gate and up as rows, all of the gate first."""
    return torch.cat([matrix.mT[::2], matrix.mT[1::2]])


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.mT


def _run_by(layer: nn.Module, copies: Sequence[PackedWeight]) -> PackedWeight | ExpertWeights:
    """Return what a layer computes with, given the copies of its weights."""
    if (form := experts_form(layer)) is None:
        return copies[0]
    gate_up_bias, down_bias = (layer.gate_up_proj_bias, layer.down_proj_bias) if layer.has_bias else (None, None)
    if gate_up_bias is not None and form.transposed:
        gate_up_bias = _gate_then_up(gate_up_bias.detach()).mT.contiguous()
    return ExpertWeights(*copies, gate_up_bias, down_bias, *form[:3])


def store_int8_(model: nn.Module) -> None:
    """Put copies in 8 bits in the place of a target's weights, each of which is freed before the next is copied.

    A `Generator` with ``weights="int8"`` then multiplies by these. The model cannot be saved or trained any more.

    Raises:
        UnsupportedTargetError: there is an `int8_obstacle`, or a value is infinite or NaN.
    """
    check_int8(model)
    names = [name for name, module in modules_of_text(model) if _weights_of(module)]
    for name in names:
        layer = model.get_submodule(name)
        try:
            found = _run_by(layer, [_in_8_bits(*each) for each in _weights_of(layer)])
        except NotFiniteError as error:
            raise UnsupportedTargetError(not_finite("weights", model, error)) from error
        made = PackedLinear(found, layer.bias) if isinstance(found, PackedWeight) else PackedExperts(found)
        model.set_submodule(name, made)
    # glibc keeps what was freed in pieces: a quarter of a small model's memory.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def not_finite(option: str, model: nn.Module, error: NotFiniteError) -> str:
    """Return the message for a weight of a target or drafter that is not finite, with ``option`` asking for int8."""
    name = name_of(model, error.weight).removesuffix(".weight")
    return f"{option}='int8' needs finite weights, got {error.value} in {name}: leave it out"


def check_int8(model: nn.Module) -> None:
    """Raise UnsupportedTargetError if there is an `int8_obstacle`."""
    if obstacle := int8_obstacle(model):
        raise UnsupportedTargetError(
            "weights='int8' needs a target on CPU whose products are those of plain linear layers of torch (nn.Linear) "
            f"and of experts that dflash.ops.experts runs, got {type(model).__name__}: {obstacle}. Leave weights out"
        )


_MOST_OTHERS = 1 / 20  # of all weights


def int8_obstacle(model: nn.Module) -> str:
    """Return why the weights of a target cannot be stored as int8; empty if they can, if they are finite.

    Looks only at the structure. Embeddings, convolutions, and a few small weights such as those of routers, stay as
    they are.
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
    stored, others = 0, [(0, "")]
    for name, module in modules_of_text(model):
        is_stored = type(module) in (nn.Linear, PackedLinear, PackedExperts) or experts_form(module) is not None
        for key, weight in (*module._parameters.items(), *module._buffers.items()):
            if weight is None or weight.dim() < 2 or isinstance(module, (nn.Embedding, PackedEmbedding, _ConvNd)):
                continue
            if isinstance(module, nn.Linear) and (type(module) is not nn.Linear or key != "weight"):
                return f"{name}.{key} is a weight of {type(module).__name__}"
            is_plain = type(weight) in PLAIN_TENSORS and weight.dtype in KERNEL_DTYPES["cpu"]
            if type(module) is nn.Linear and not is_plain:
                return f"{name}.{key} is a {type(weight).__name__} of {weight.dtype}"
            if is_stored:
                stored += weight.numel()
            elif key in module._parameters:
                others.append((weight.numel(), f"{name}.{key} is a weight of {type(module).__name__}"))
    return max(others)[1] if sum(size for size, _ in others) > _MOST_OTHERS * stored else ""

"""Folders that another library has quantized: weights stay packed on a CPU, or become dense and a warning says so."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..files import open_tensors, read_json
from ..ops import PackedWeight
from ..targets import experts_layout
from ..targets.packed import CHOSEN_EXPERTS
from ..terminal import listed, named, printable, shortened
from .fill import by_module, fill_module, gate_above_up, set_values, tie_head
from .folder import Header, check_all_used

# ---------------------------------------------------------------------------------------------- what a config says

_METHODS = ("awq", "gptq", "compressed-tensors", "mxfp4", "fp8", "mxfp8")
_OURS = {"modelopt": "Model-Optimizer", "mlx": "MLX"}  # of which transformers leaves tensors out, or knows nothing
_FORMATS = {  # of compressed-tensors, as a whole or per group
    *("dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
}


class Scheme(NamedTuple):
    """What cannot be told from a checkpoint's tensors.

    Attributes:
        method: the library, of `_METHODS` or `_OURS`.
        stores_less: zero points of GPTQ are stored less one (``checkpoint_format`` gptq, not gptq_v2).
        block: rows and columns that share a scale of FP8, if several of both do.
    """

    method: str
    stores_less: bool = True
    block: tuple[int, int] = (128, 128)


def read_scheme(
    config: Any, said: Path | None, folder: Path | None, *, is_cpu: bool, packs: bool, is_adapted: bool
) -> Scheme | None:
    """Return how this package reads a quantized folder; None if it is not quantized, or transformers reads it.

    On GPUs transformers does, by the kernels of the library, except for integers of 4 and 8 bits that our kernels read
    (not those of experts), for Model-Optimizer, whose scales it leaves out, and MLX.

    Args:
        config: of the model.
        said: the ``hf_quant_config.json`` of Model-Optimizer, if there is one.
        folder: for errors.
        is_cpu: the model runs on a CPU.
        packs: weights may stay packed on its device.
        is_adapted: it is the base of a PEFT adapter, which transformers loads.

    Raises:
        ValueError: the library is unknown, or it stores weights in a way that cannot be read.
    """
    # 1. What the folder says of itself
    text, where = config.get_text_config(decoder=True), printable(folder or "config.json")
    given = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if (given := _find_settings(given, said, where)) is None:
        return None
    # 2. Who reads it
    method = _method_of(given)
    if method in _OURS and is_adapted:
        raise ValueError(f"{where}: an adapter cannot be put on weights of {_OURS[method]}: use the plain model")
    algorithm = str(given.get("quant_algo") or "FP8")
    if method == "modelopt" and ("AWQ" in algorithm or not re.search("FP8|FP4|^MIXED", algorithm, re.I)):
        known = "one of FP8 or FP4, without AWQ"
        raise ValueError(f"{where}: Model-Optimizer's quant_algo must be {known}, got {named(algorithm)}")
    has_experts = any(getattr(text, key, None) for key in CHOSEN_EXPERTS)
    stays_packed = packs and _is_in_words(given, method) and not has_experts
    is_read_here = method in _METHODS and (is_cpu or stays_packed) and not is_adapted
    if method not in _OURS and not is_read_here:
        from transformers.quantizers.auto import AutoHfQuantizer

        if AutoHfQuantizer.supports_quant_method(given):
            return None
        raise ValueError(f"{where}: quant_method must be one that can be read, got {named(method)}")
    # 3. How
    try:
        return _read_layout(given, method, where)
    except ValueError:
        if is_cpu or method in _OURS:
            raise
        return None  # transformers may read it


def read_draft_scheme(config: Mapping[str, Any], folder: Path) -> Scheme | None:
    """Return how this package reads a quantized drafter; None if it is not quantized. Raises as `read_scheme` does."""
    where = printable(folder)
    given = config.get("quantization_config") or config.get("compression_config") or config.get("quantization")
    if (given := _find_settings(given, folder / "hf_quant_config.json", where)) is None:
        return None
    method = _method_of(given)
    if method not in (known := [*_METHODS, *_OURS]):
        raise ValueError(f"{where}: quant_method must be one of {listed(known)}, got {named(method)}")
    return _read_layout(given, method, where)


def _find_settings(given: Any, said: Path | None, where: str) -> dict[str, Any] | None:
    """Return the settings of ``config.json``, else those of Model-Optimizer's own file; None if there are none."""
    if given is None and said is not None and said.is_file():
        found = read_json(said).get("quantization")
        if isinstance(found, dict) and found.get("quant_algo"):
            given = {**found, "quant_method": "modelopt"}
    given = given.to_dict() if hasattr(given, "to_dict") else given
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"{where}: quantization_config must be an object, got {shortened(given)}")
    return given


def _method_of(given: Mapping[str, Any]) -> str:
    method = str(given.get("quant_method", "mlx" if "group_size" in given and "bits" in given else ""))
    return "modelopt" if method.startswith("modelopt") else method


def _is_in_words(given: Mapping[str, Any], method: str) -> bool:
    """Return True if a library stores integers of 4 or 8 bits in words of 32 bits. Only weights are quantized then."""
    if method in ("awq", "gptq"):
        return given.get("bits") in (4, 8)
    groups = given.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    return given.get("format") == "pack-quantized" and all(map(_is_of_weights, groups))


def _is_of_weights(group: Any) -> bool:
    """Return True if a group of compressed-tensors quantizes weights to 4 or 8 bits, and nothing else."""
    weights = group.get("weights") if isinstance(group, dict) else None
    return isinstance(weights, dict) and weights.get("num_bits") in (4, 8) and not group.get("input_activations")


def _read_layout(given: Mapping[str, Any], method: str, where: str) -> Scheme:
    groups = given.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    layout = str(given.get("checkpoint_format") or given.get("format") or given.get("version") or "").lower()
    if method == "compressed-tensors":
        _check_compressed(given, {layout, *(str(group.get("format") or "") for group in groups)} - {""}, where)
    elif layout and layout not in (known := {"awq": ["gemm"], "gptq": ["gptq", "gptq_v2"]}.get(method, [layout])):
        raise ValueError(f"{where}: the layout of {method.upper()} must be {listed(known)}, got {named(layout)}")
    blocks = [group["weights"].get("block_structure") for group in groups if isinstance(group.get("weights"), dict)]
    block = next(filter(None, [given.get("weight_block_size"), *blocks]), (128, 128))
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(x, int) and x > 0 for x in block)):
        raise ValueError(f"{where}: the block of a scale must be two sizes, got {shortened(block)}")
    return Scheme(method, layout != "gptq_v2", (block[0], block[1]))


def _check_compressed(given: Mapping[str, Any], formats: set[str], where: str) -> None:
    """Raise ValueError for what compressed-tensors does besides storing weights of linear layers."""
    if unknown := formats - _FORMATS:
        raise ValueError(f"{where}: the format {listed(sorted(unknown))} of compressed-tensors cannot be read")
    sparsity = given.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ValueError(f"{where}: sparse weights of compressed-tensors ({named(sparsity['format'])}) cannot be read")
    for key, what in (
        ("kv_cache_scheme", "quantizes keys and values in a cache of compressed-tensors, which dflash replaces"),
        ("transform_config", "rotates activations while the model runs"),
    ):
        if given.get(key):
            raise ValueError(f"{where}: {key} {what}: use a checkpoint without it")


# ---------------------------------------------------------------------------------------------- what tensors hold


class Integers(NamedTuple):
    """A weight ``(codes - zeros) * scales``, or ``codes * scales + minima``, with numbers per group of columns."""

    codes: Tensor  # [..., out, in] uint8
    scales: Tensor  # [..., out, groups]
    zeros: Tensor | None  # [..., out, groups] uint8; None: half of what codes can be
    bits: int
    groups: Tensor | None = None  # [in], the group of each column; None: as many columns in turn
    minima: Tensor | None = None  # [..., out, groups]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def size(self) -> int:
        """Columns per group."""
        return self.codes.shape[-1] // self.scales.shape[-1]

    @property
    def has_scales_for_all(self) -> bool:
        """True if scales, zero points and minima are of the shape that goes with the codes."""
        is_whole = self.codes.shape[:-1] == self.scales.shape[:-1] and self.codes.shape[-1] % self.scales.shape[-1] == 0
        return is_whole and all(x is None or x.shape == self.scales.shape for x in (self.zeros, self.minima))

    @property
    def obstacle(self) -> str:
        """Why it cannot stay packed; empty if it can."""
        columns, count = self.codes.shape[-1], self.scales.shape[-1]
        if self.bits not in (4, 8):
            return f"{self.bits} bits"
        if columns % 32 or (count > 1 and self.size % 32):
            return "groups that are not multiples of 32"
        uneven = self.groups is not None and (torch.bincount(self.groups, minlength=count) != self.size).any()
        return "groups of several sizes" if uneven else ""

    def dense(self) -> Tensor:
        """Return the values in float32."""
        groups = torch.arange(self.codes.shape[-1]) // self.size if self.groups is None else self.groups
        if self.minima is not None:
            return self.codes.float() * self.scales[..., groups].float() + self.minima[..., groups].float()
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[..., groups].float()
        return (self.codes.float() - zeros) * self.scales[..., groups].float()

    def pack(self) -> PackedWeight | None:
        """Return the weight with the columns of a group side by side."""
        if self.obstacle:
            return None
        order = None if self.groups is None else torch.argsort(self.groups, stable=True)
        order = order if order is None else _ORDERS.setdefault(order.numpy().tobytes(), order)
        codes = self.codes if order is None else self.codes[..., order]
        numbers = self.scales, self.zeros, self.minima
        return PackedWeight.of_integers(codes, *numbers, group=self.size, bits=self.bits)._replace(order=order)


class Floats(NamedTuple):
    """A weight in MXFP4: values of E2M1, and a power of two per 32 columns."""

    codes: Tensor  # [..., out, in] uint8
    exponents: Tensor  # [..., out, in / 32] uint8, 127 for one

    obstacle = ""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dense(self) -> Tensor:
        """Return the values in float32."""
        return _e2m1(self.codes) * _powers(self.exponents).repeat_interleave(32, -1)

    def pack(self) -> PackedWeight:
        return PackedWeight.of_mxfp4(self.codes, self.exponents)


class Values(NamedTuple):
    """A weight that no kernel multiplies by as it is stored."""

    values: Tensor  # [..., out, in] float32
    obstacle: str

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dense(self) -> Tensor:
        return self.values

    def pack(self) -> None:
        return None


# Weights that meet one input share the order of their columns, so that rows are reordered once
_ORDERS = weakref.WeakValueDictionary[bytes, Tensor]()
Quantized = Integers | Floats | Values
Parts = Mapping[str, Tensor]
_AWQ = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibbles of a word in which eight neighbors lie
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _e2m1(codes: Tensor) -> Tensor:
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return table.to(codes.device)[codes.int()]


def _powers(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)


def _nibbles(packed: Tensor) -> Tensor:
    """Return ``[..., 2 * n]`` of ``[..., n]`` uint8, the low half of each byte first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes uint8 that lie along the last dimension of int32 words, the lowest bits first."""
    packed = words.contiguous().view(torch.uint8)
    if bits in (4, 8):
        return _nibbles(packed) if bits == 4 else packed
    first = torch.arange(0, packed.shape[-1] * 8, bits, device=packed.device)  # the lowest bit of each
    wide = torch.nn.functional.pad(packed, (0, 1)).short()
    both = wide[..., first // 8] | wide[..., first // 8 + 1] << 8
    return (both >> (first % 8).short() & 2**bits - 1).to(torch.uint8)


def _bits(words: int, columns: int, known: Sequence[int] = (4, 8)) -> int:
    """Return the bits per value of a row that takes so many words."""
    for bits in known:
        if -(-columns * bits // 32) == words:
            return bits
    some = f"{listed(known[:-1])} or {known[-1]}"
    raise ValueError(f"values must have {some} bits, got {words} words of 32 bits for {columns} values")


def _groups(index: Tensor | None, scales: Tensor) -> Tensor | None:
    """Return the group of each column, None if as many belong to each in turn."""
    if index is None or index.is_meta or int(index.min()) < 0:  # -1 for none
        return None
    if int(index.max()) >= scales.shape[-1]:
        raise ValueError(f"g_idx must name one of {scales.shape[-1]} groups, got {int(index.max())}")
    in_turn = torch.arange(len(index)) // (len(index) // scales.shape[-1])
    return None if torch.equal(index.long(), in_turn) else index.long()


def _read_words(parts: Parts, shape: Sequence[int], scheme: Scheme) -> Quantized:
    """Read AWQ and GPTQ: ``qweight`` and ``qzeros`` int32, ``scales [groups, out]``."""
    words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"].T
    if scheme.method == "awq":
        codes, zeros = (_codes(x, 4).unflatten(-1, (-1, 8))[..., _AWQ].flatten(-2).T for x in (words, zeros))
        return Integers(codes, scales, zeros, 4)
    bits = _bits(len(words), shape[1])
    if scheme.stores_less:  # in whole words, with carries, as GPTQModel writes and reads them
        zeros = zeros + (0x11111111 if bits == 4 else 0x01010101)
    codes, zeros = _codes(words.T, bits)[:, : shape[1]], _codes(zeros, bits)[:, : shape[0]].T
    return Integers(codes, scales, zeros, bits, _groups(parts.get("g_idx"), scales))


def _read_packed(parts: Parts, shape: Sequence[int], _scheme: Scheme) -> Quantized:
    """Read compressed-tensors: ``weight_packed`` int32 for integers, uint8 for FP4."""
    packed, scales, zeros = parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point")
    if packed.dtype == torch.uint8:
        factor = parts.get("weight_global_scale")
        return _read_fp4(packed, scales if factor is None else scales.float() / factor.float())
    bits = _bits(packed.shape[1], shape[1])
    zeros = None if zeros is None else _codes(zeros.T, bits)[:, : shape[0]].T
    scales = scales.expand(len(packed), -1) if scales.dim() == 2 else scales.reshape(-1, 1).expand(len(packed), 1)
    groups = _groups(parts.get("weight_g_idx"), scales)
    return Integers(_codes(packed, bits)[:, : shape[1]], scales, zeros, bits, groups)


def _read_fp4(packed: Tensor, scales: Tensor) -> Quantized:
    codes = _nibbles(packed)
    if scales.dtype == torch.uint8:
        return Floats(codes, scales)
    return Values(_e2m1(codes) * scales.float().repeat_interleave(16, -1), "NVFP4")


def _read_scaled(parts: Parts, _shape: Sequence[int], scheme: Scheme) -> Quantized:
    """Read a ``weight`` in int8 or FP8, or Model-Optimizer's in FP4."""
    weight, zeros = parts["weight"], parts.get("weight_zero_point")
    scales = parts["weight_scale" if "weight_scale" in parts else "weight_scale_inv"]
    if weight.dtype == torch.uint8:
        factor = parts.get("weight_scale_2")
        return _read_fp4(weight, scales if factor is None else scales.float() * factor.float())
    scales = scales if scales.dim() == 2 else scales.reshape(-1, 1)
    if weight.dtype == torch.int8 and len(scales) in (1, len(weight)):
        codes, zeros = (None if x is None else x.view(torch.uint8) ^ 128 for x in (weight, zeros))
        zeros = None if zeros is None else zeros.reshape(scales.shape).expand(len(weight), -1)
        return Integers(cast(Tensor, codes), scales.expand(len(weight), -1), zeros, 8)
    scales = _powers(scales) if scales.dtype == torch.uint8 else scales.float()
    for dim, (length, count, block) in enumerate(zip(weight.shape, scales.shape, scheme.block, strict=True)):
        each = block if -(-length // block) == count else length // count
        scales = scales.repeat_interleave(each, dim).narrow(dim, 0, length)
    return Values(weight.float() * scales, "FP8" if weight.is_floating_point() else "int8 in blocks")


def _read_blocks(parts: Parts, _shape: Sequence[int], _scheme: Scheme) -> Quantized:
    """Read gpt-oss: ``blocks [experts, out, in / 32, 16]`` uint8, ``scales [experts, out, in / 32]``."""
    return Floats(_nibbles(parts["blocks"]).flatten(-2), parts["scales"])


def _read_mlx(parts: Parts, shape: Sequence[int], _scheme: Scheme) -> Quantized:
    """Read MLX: ``weight`` uint32, ``scales`` and ``biases`` per group. Without biases numbers are FP4 or FP8."""
    words, scales, minima = parts["weight"].view(torch.int32), parts["scales"], parts.get("biases")
    bits = _bits(words.shape[-1], shape[-1], (2, 3, 4, 5, 6, 8) if minima is not None else (4, 8))
    if minima is not None:
        return Integers(_codes(words, bits), scales, None, bits, minima=minima)
    numbers, is_mx = words.contiguous().view(torch.uint8), scales.shape[-1] * 32 == shape[-1]
    if bits == 4:
        return _read_fp4(numbers, scales if is_mx else scales.view(torch.float8_e4m3fn))
    return Values(numbers.view(torch.float8_e4m3fn).float() * _powers(scales).repeat_interleave(32, -1), "FP8")


class Layout(NamedTuple):
    """The tensors that a library makes of a weight, all that it needs and what else there may be, and their reader."""

    needs: set[str]
    may_have: set[str]
    read: Callable[[Parts, Sequence[int], Scheme], Quantized]


_LAYOUTS = (
    Layout({"qweight", "qzeros", "scales"}, {"g_idx"}, _read_words),
    Layout(
        {"weight_packed", "weight_scale"}, {"weight_zero_point", "weight_g_idx", "weight_global_scale"}, _read_packed
    ),
    Layout({"weight", "weight_scale"}, {"weight_zero_point", "weight_scale_2"}, _read_scaled),
    Layout({"weight", "weight_scale_inv"}, set(), _read_scaled),
    Layout({"blocks", "scales"}, set(), _read_blocks),
    Layout({"weight", "scales"}, {"biases"}, _read_mlx),
)
# What a model's own shapes say, and scales of its inputs: here rows are rounded by scales of their own, or not at all.
_UNREAD = {"weight_shape", "input_scale", "input_zero_point", "input_global_scale", "activation_scale"}
_NAMES = sorted({"weight"} | _UNREAD | set().union(*(row.needs | row.may_have for row in _LAYOUTS)) - {"blocks"})
_PART = re.compile(rf"(.+)\.({'|'.join(_NAMES)})|(.+)_(blocks|scales)")
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"U32": torch.uint32, "BOOL": torch.bool},
}
FEW_BITS = (torch.int8, torch.uint8, torch.int32, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2)


def _split_name(name: str) -> tuple[str, str]:
    """Return the name of the weight that a tensor is of, and which of its tensors it is; ``weight`` for others."""
    found = _PART.fullmatch(name)
    if found is None:
        return name, "weight"
    return (f"{found[1]}.weight", found[2]) if found[1] else (found[3], found[4])


def _read_weight(
    parts: Parts, shape: Sequence[int] | None, scheme: Scheme | None, where: str, name: str, said: str
) -> Tensor | Quantized:
    """Return a weight of a checkpoint: a tensor if it is stored as it is.

    Args:
        parts: its tensors, perhaps on the meta device.
        shape: ``[..., out, in]``; None if nothing says what it is.
        scheme: None if nothing says how it was quantized.
        where: the folder, for errors.
        name: of the weight, for errors.
        said: what the files say of its tensors, for errors.

    Raises:
        ValueError: scales are missing, the tensors are of no known layout, or they do not make the shape.
    """
    parts = {part: tensor for part, tensor in parts.items() if part not in _UNREAD}
    if parts.keys() == {"weight"}:
        if parts["weight"].dtype in FEW_BITS:
            raise ValueError(f"{where}: weights in few bits need scales, and these have none: {said}")
        return parts["weight"]
    layout = next((row for row in _LAYOUTS if row.needs <= parts.keys() <= row.needs | row.may_have), None)
    if layout is None or shape is None:
        raise ValueError(f"{where}: {named(name)} is stored in a way that cannot be read: {said}")
    if scheme is None:
        raise ValueError(f"{where}: config.json has no quantization_config, which must say how to read {said}")
    try:
        weight = layout.read(parts, shape, scheme)
        if weight.shape != torch.Size(shape):
            raise ValueError(f"it would be {list(weight.shape)}")
        if isinstance(weight, Integers) and not weight.has_scales_for_all:
            raise ValueError("each group of columns needs a scale, and a zero point if there are any")
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        fits = f"{named(name)} needs tensors that make {list(shape)}"
        raise ValueError(f"{where}: {fits}, got {said}: {printable(error)}") from error
    return weight


def read_weights(
    stored: Mapping[str, Tensor], scheme: Scheme | None, shape_of: Callable[[str], Sequence[int] | None], source: str
) -> dict[str, Tensor | Quantized]:
    """Return the weights of a drafter by their names in the files.

    Args:
        stored: its tensors.
        scheme: from `read_draft_scheme`.
        shape_of: the shape of a weight by its name in the files, as the config has it; None for one without a place.
        source: for errors.

    Raises:
        ValueError: scales are missing, or tensors do not make the shape of their weight.
    """
    weights: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        stem, part = _split_name(name)
        weights.setdefault(stem, {})[part] = tensor
    names = {id(tensor): name for name, tensor in stored.items()}
    out = {}
    for stem, parts in weights.items():
        said = ", ".join(f"{named(names[id(x)])} {x.dtype} {list(x.shape)}" for x in parts.values())
        out[stem] = _read_weight(parts, shape_of(stem), scheme, source, stem, said)
    return out


# ---------------------------------------------------------------------------------------------- loading


class _Place(NamedTuple):
    """A weight of the checkpoint on its way into a parameter.

    ``parts`` are the names of its tensors, ``pattern`` the source of the transformers converter that makes several
    weights one parameter; None if it is the parameter.
    """

    parts: dict[str, str]
    pattern: str | None


class QuantizedFolder:
    """A quantized checkpoint, and where in a model its tensors belong. Reads only what the files say of them.

    Args:
        folder: for errors.
        headers: of the safetensors, by their names in the model before transformers' conversions.
        scheme: from `read_scheme`; None if no weight is quantized.
        model: its parameters on the meta device, its buffers real.
        packs: from `packed_for`: leave weights packed where kernels of this device read them.

    Raises:
        ValueError: a tensor has no place, a parameter has no tensor, scales are missing, or shapes do not fit.
    """

    def __init__(
        self, folder: object, headers: Mapping[str, Header], scheme: Scheme | None, model: Any, packs: str
    ) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        self._where, self._scheme, self._model = printable(folder), scheme, model
        self._dtype, self._packs = model.dtype, packs
        self._made_dense: dict[str, list[int]] = {}  # by reason: the bytes of each
        self._headers, self._state = _split_experts(headers), model.state_dict()
        mapping = get_model_conversion_mapping(model)
        converters = [x for x in mapping if isinstance(x, WeightConverter)]
        renamings = [x for x in mapping if not isinstance(x, WeightConverter)]
        self._converters = {pattern: x for x in converters for pattern in x.source_patterns}

        def rename(name: str) -> tuple[str, str | None]:
            return rename_source_key(name, renamings, converters, model.base_model_prefix, self._state)

        # 1. The tensors of each weight
        weights: dict[str, dict[str, str]] = {}
        for name in sorted(self._headers, key=lambda name: re.sub(r"\d+", lambda digits: digits[0].zfill(9), name)):
            stem, part = _split_name(name)
            if part != "weight" and rename(name)[0] in self._state:
                stem, part = name, "weight"
            weights.setdefault(stem, {})[part] = name
        # 2. Their places
        self._places: dict[str, list[_Place]] = {}
        unused: dict[str, object] = {}
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        for stem, parts in weights.items():
            target, pattern = rename(stem)
            if target in self._state:
                self._places.setdefault(target, []).append(_Place(parts, pattern))
            elif not any(re.search(each, stem) for each in ignored):
                unused |= {name: self._headers[name] for name in parts.values()}
        with self._opened() as get:  # old GPTQ files have biases of zeros where the model has none
            for name in [name for name in unused if name.endswith(".bias")]:
                if f"{name.removesuffix('bias')}qweight" in self._headers and not get(self._headers[name]).any():
                    del unused[name]
        check_all_used(model, unused, folder)
        # 3. Shapes, and what is missing
        for target, places in self._places.items():
            for place in places:
                self._read(target, place, _without_memory)
        self._check_complete()

    def _check_complete(self) -> None:
        """Raise ValueError if a parameter has no tensor."""
        made = set(self._places)
        for target, places in self._places.items():
            if places[0].pattern is not None:
                first, *others = self._converters[places[0].pattern].target_patterns
                made |= {target.replace(first, each) for each in others}
        optional = self._model._keys_to_ignore_on_load_missing or ()
        missing = self._state.keys() - made - getattr(self._model, "all_tied_weights_keys", {}).keys()
        if lost := sorted(name for name in missing if not any(re.search(each, name) for each in optional)):
            raise ValueError(f"{self._where} has no weights for {listed(lost)}: its files are incomplete")

    # ------------------------------------------------------------------------------------------ reading

    def _read(self, target: str, place: _Place, get: _Get) -> Quantized | Tensor:
        """Read a weight, by ``get`` of what the files say of a tensor. Raises ValueError if it does not fit."""
        headers, shape = {part: self._headers[name] for part, name in place.parts.items()}, self._shape(target, place)
        said = ", ".join(f"{named(header.name)} {header}" for header in headers.values())
        if "weight" in headers and not self._state[target].is_floating_point():  # a table of numbers
            return get(headers["weight"])
        is_known = all(header.dtype in _DTYPES for header in headers.values())
        parts = {part: get(header) for part, header in headers.items() if part not in _UNREAD} if is_known else {}
        weight = _read_weight(parts, shape, self._scheme, self._where, target, said)
        if isinstance(weight, Tensor) and shape is not None and weight.shape != tuple(shape):
            raise ValueError(f"{self._where}: {named(target)} must be {list(shape)} as config.json says, got {said}")
        return weight

    def _shape(self, target: str, place: _Place) -> Sequence[int] | None:
        """Return the shape ``[..., out, in]`` of one weight of a parameter; None if a converter decides it."""
        shape = self._state[target].shape
        if place.pattern is None:
            return (shape[0], shape[2], shape[1]) if "blocks" in place.parts else shape
        converter = self._converters[place.pattern]
        return (shape[1] // len(converter.source_patterns), shape[2]) if _is_merge(converter) else None

    def load(self) -> None:
        """Give the model its tensors, a module at a time. Warns of weights that become dense."""
        for path, keys in by_module(self._places).items():
            with self._opened() as get:
                self._load(path, keys, get)
        tie_head(self._model)
        for reason, sizes in self._made_dense.items():
            what = f"{len(sizes)} weights become dense, {sum(sizes) / 1e9:.2f} GB"
            warnings.warn(f"{self._where}: {what} in {self._dtype} ({reason})", stacklevel=2)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Callable[[Header], Tensor]]:
        """Yield what reads tensors. The files are closed after it, so that their memory is given back."""
        with contextlib.ExitStack() as stack:
            opened = functools.cache(lambda path: stack.enter_context(open_tensors(path)))

            def get(header: Header) -> Tensor:
                file = opened(header.file)
                whole = header.index is None
                return file.get_tensor(header.name) if whole else file.get_slice(header.name)[header.index]

            yield get

    # ------------------------------------------------------------------------------------------ making modules

    def _load(self, path: str, keys: Mapping[str, Sequence[_Place]], get: _Get) -> None:
        """Give the model the weights of one of its modules."""
        names = {key: f"{path}.{key}" if path else key for key in keys}
        merged = [key for key, places in keys.items() if places[0].pattern is not None]
        # 1. Weights of experts that stay packed are joined; others are merged by transformers' converters
        weights: dict[str, Quantized | Tensor] = {}
        if self._packs and merged and experts_layout(self._model.get_submodule(path)) is not None:
            joined = {key: self._joined(names[key], keys[key], get) for key in merged}
            weights = {key: weight for key, weight in joined.items() if weight is not None}
        if weights.keys() < set(merged):
            weights = {}
            for key in merged:
                self._convert(names[key], keys[key], get)
        # 2. All others
        for key in keys.keys() - set(merged):
            weight = self._read(names[key], keys[key][0], get)
            if isinstance(weight, Floats) and "blocks" in keys[key][0].parts and key == "gate_up_proj":
                weight = Floats(*map(gate_above_up, weight))
            weights[key] = weight
        for weight in fill_module(self._model, path, weights, self._packs):
            self._count(cast(Quantized, weight))

    def _convert(self, target: str, places: Sequence[_Place], get: _Get) -> None:
        """Make parameters of several weights as transformers does."""
        converter = copy.deepcopy(self._converters[cast(str, places[0].pattern)])
        for place in places:
            one = functools.partial(lambda place: self._dense(self._read(target, place, get)), place)
            converter.add_tensor(target, target, place.pattern, one)
        for name, made in converter.convert(target, model=self._model, config=self._model.config).items():
            value, like = made[0] if isinstance(made, list) else made, self._state[name]
            if value.shape != like.shape:
                what = f"{named(name)} must be {list(like.shape)} as config.json says"
                raise ValueError(f"{self._where}: {what}, got {list(value.shape)}")
            set_values(self._model, name, value)

    def _joined(self, target: str, places: Sequence[_Place], get: _Get) -> Integers | Floats | None:
        """Return the weights of all experts as one; None if they differ in kind."""
        first = self._read(target, places[0], _without_memory)
        if isinstance(first, Tensor) or first.obstacle:
            return None
        read = [cast(Integers | Floats, self._read(target, place, get)) for place in places]
        patterns = self._converters[cast(str, places[0].pattern)].source_patterns
        parts = [[one for one, place in zip(read, places, strict=True) if place.pattern == each] for each in patterns]
        experts = list(zip(*parts, strict=False))
        kinds = {(type(one), *(x.shape[1:] if isinstance(x, Tensor) else x for x in one)) for one in read}
        if len(kinds) > 1 or len(experts) != len(self._state[target]) or getattr(read[0], "groups", None) is not None:
            return None

        def join(name: str) -> Tensor:
            return torch.stack([torch.cat([getattr(part, name) for part in expert]) for expert in experts])

        return read[0]._replace(**{name: join(name) for name, x in read[0]._asdict().items() if isinstance(x, Tensor)})

    def _dense(self, weight: Quantized | Tensor) -> Tensor:
        """Return the values of a weight, of experts before they are stacked."""
        if isinstance(weight, Tensor):
            return weight
        self._count(weight)
        return weight.dense().to(self._dtype)

    def _count(self, weight: Quantized) -> None:
        """Count a weight that becomes dense for the warning."""
        asked = _UNPACKED.get(self._packs, "as asked for")
        self._made_dense.setdefault(weight.obstacle or asked, []).append(weight.shape.numel() * self._dtype.itemsize)


_Get = Callable[[Header], Tensor]
_UNPACKED = {
    "cpu": "experts that differ, or modules without a kernel",
    "cuda": "embeddings, or shapes and scales that our CUDA kernels do not take",
}


def _split_experts(headers: Mapping[str, Header]) -> dict[str, Header]:
    """Return the headers, a tensor ``switch_mlp`` of all experts as MLX has it as one per expert."""
    found: dict[str, Header] = {}
    for name, header in headers.items():
        stem, stacked, rest = name.partition(".switch_mlp.")
        if not stacked or not header.shape or 0 in header.shape:  # an empty tensor may claim any number
            found[name] = header
            continue
        for index in range(header.shape[0]):
            found[f"{stem}.experts.{index}.{rest}"] = header._replace(shape=header.shape[1:], index=index)
    return found


def _without_memory(header: Header) -> Tensor:
    """Return a tensor of a file on the meta device."""
    return torch.empty(header.shape, dtype=_DTYPES[header.dtype], device="meta")


def _is_merge(converter: Any) -> bool:
    """Return True if a converter stacks experts, of each the rows of its sources one after another."""
    steps = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])

"""Products of a few rows with one or several weights, and the gates around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from . import reference, switches
from .contract import Scope
from .formats import DENSE, FORMATS, PackedWeight
from .registry import Launcher, on_cpu, op, skinny

# Of the products below: rows of packed weights are padded.
_SIZES = "columns = row_size(format, width)"
_WHERE = "ndim(x) >= 2: x must be [..., rows, width]; has(scales) == (1 <= format <= 2): only int8 has scales apart"


def _plan_linear(launch: Launcher, s: Scope) -> bool:
    return _plan(launch, s, [s.weight], [s.bias])


def _linear_in_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, prefetch: bool, scales: Tensor | None, format: str
) -> Tensor:
    """Compute `linear`; in 16 bits, where no kernel takes it, a packed weight of a GPU becomes a dense one."""
    if format != DENSE.name and not FORMATS[format].row_group and x.dtype in (torch.bfloat16, torch.float16):
        weight = PackedWeight(weight, scales, format, x.shape[-1]).dense(x.dtype)
        scales, format = None, DENSE.name
    return reference.linear(x, weight, bias, False, scales, format)


def _plan_linears(launch: Launcher, s: Scope) -> bool:
    for i, weight in enumerate(s.weights):
        if s.biases and s.biases[i].shape[0] != len(weight):
            raise ValueError(f"linears: biases[{i}] must be [out] = [{len(weight)}], got {list(s.biases[i].shape)}")
    return _plan(launch, s, s.weights, s.biases or [None] * len(s.weights))


def _swiglu(launch: Launcher, s: Scope) -> Tensor:
    if not launch.is_cpu and _plan(launch, s, [s.gate, s.up], [None, None], gated=True):
        launch("linear", s)
        return s.out
    both = linears.op.call(launch, s.x, [s.gate, s.up], (), s.prefetch, s.scales, s.arguments[-1])
    return silu_mul.op.call(launch, both, "silu")


def _plan(
    launch: Launcher, s: Scope, weights: Sequence[Tensor], biases: Sequence[Tensor | None], gated: bool = False
) -> bool:
    """Set the fields of the kernel `linear`; return False if it does not take the call."""
    features, width = [len(weight) for weight in weights], s.x.shape[-1]
    if not _reads(launch, s.arguments[-1]):
        return False
    if launch.is_cpu:
        s.splits, s.workspace = int(s.format > 0 or skinny(s.rows, s.x.dtype)), None
    else:
        shapes = (s.dtype, s.rows, width, weights, features, gated, s.format)
        s.splits, s.workspace = launch.workspace("linear", s.x.device, *shapes)
    if s.splits == 0 or width == 0:
        return False
    s.counters = None if s.workspace is None else launch.counters(s.x.device)
    s.scales = [None] * len(weights) if s.scales is None else s.scales.split(features)
    s.x, s.prefetch, s.gated = launch.aligned(s.x), s.prefetch and switches.PREFETCH, gated
    s.num_weights, s.weights, s.biases, s.features = len(weights), weights, biases, features
    setattr(s, "in", width)  # as the kernel calls it
    return True


def _reads(launch: Launcher, format: str) -> bool:
    """Return True if the launcher's kernels read weights in a format."""
    device = FORMATS[format].device
    return device is None or device == ("cpu" if launch.is_cpu else "cuda")


def _linears_in_torch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], prefetch: bool, scales: Tensor | None, format: str
) -> Tensor:
    """Compute `linears`; weights that lie one after another in one storage take one product."""
    if format == DENSE.name and len(weights) > 1 and all(map(_follows, weights, weights[1:])):
        shape = (sum(map(len, weights)), weights[0].shape[1])
        weights, biases = [weights[0].as_strided(shape, weights[0].stride())], [torch.cat(biases)] if biases else ()
    split = [None] * len(weights) if scales is None else scales.split([len(weight) for weight in weights])
    parts = zip(weights, biases or [None] * len(weights), split, strict=True)
    return torch.cat([_linear_in_torch(x, weight, bias, False, part, format) for weight, bias, part in parts], -1)


def _follows(first: Tensor, second: Tensor) -> bool:
    """Return True if ``second`` begins where ``first`` ends, both contiguous."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    end = first.storage_offset() + first.numel()
    return same and first.is_contiguous() and second.is_contiguous() and second.storage_offset() == end


@op(
    "x[rows.., width] weight[out_features, columns]:W bias[out_features] scales[out_features]:f32",
    "out[rows.., out_features]",
    where=_WHERE,
    derived=_SIZES,
    choices={"format": _C.FORMATS},
    prepare=_plan_linear,
    twin=_linear_in_torch,
)
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, prefetch: bool = False, scales: Tensor | None = None,
    format: str = DENSE.name,
) -> Tensor:  # fmt: skip
    """Compute ``x @ weight.T + bias`` for a few rows, sums in fp32, rounded once.

    A row's bits depend neither on its place nor on how many rows there are: on CPU up to 512 rows in float32 and 64 in
    bfloat16 (128 with AVX-512 BF16 but no AMX, without AVX-512 all), on CUDA up to 256 rows in 16 bits where ``in`` is
    a multiple of 8, and with a packed weight any number. Anything else goes through torch.

    Args:
        x: ``[..., rows, in]``.
        weight: ``[out, in]``, the dtype of ``x``, or what a `PackedWeight` has packed; ``bias`` is ``[out]``.
        prefetch: for CUDA: ``weight`` may be read before what is queued ahead has ended, so nothing under way may write
            it.
        scales: ``[out]`` float32, those of the `PackedWeight`; None if dense.
        format: that of the weight, of `FORMATS`. "w8a8" rounds the rows to 8 bits too: on CPU any number of rows has
            the same bits with every instruction set.

    Returns:
        ``[..., rows, out]``, the dtype of ``x``.
    """


@op(
    "x[rows.., width] weights{count}[*, columns]:W biases{biases_given}[*] scales[total_rows(weights)]:f32",
    "out[rows.., total_rows(weights)]",
    where=f"{_WHERE}; 1 <= count <= {_C.MAX_LINEAR_WEIGHTS}; biases_given == 0 or biases_given == count",
    derived=f"{_SIZES}; out_features = total_rows(weights)",
    choices={"format": _C.FORMATS},
    kernel="linear",
    prepare=_plan_linears,
    twin=_linears_in_torch,
)
def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), prefetch: bool = False,
    scales: Tensor | None = None, format: str = DENSE.name,
) -> Tensor:  # fmt: skip
    """Compute `linear` of the same rows with several weights, the results side by side, in one kernel.

    Args:
        x: ``[..., rows, in]``; ``prefetch`` is as in `linear`.
        weights: one to four of ``[out, in]``, each with an ``out`` of its own.
        biases: ``[out]`` for each weight, or none at all.
        scales: ``[sum of out]`` float32, those of all weights; they and ``format`` are as in `linear`.

    Returns:
        ``[..., rows, sum of out]``, the dtype of ``x``.
    """


@op(
    "x[rows.., width] gate[out_features, columns]:W up[out_features, columns]:W scales[2 * out_features]:f32",
    "out[rows.., out_features]",
    where=_WHERE,
    derived=_SIZES,
    choices={"format": _C.FORMATS},
    kernel="linear",
    body=_swiglu,
)
def swiglu(
    x: Tensor, gate: Tensor, up: Tensor, prefetch: bool = False, scales: Tensor | None = None,
    format: str = DENSE.name,
) -> Tensor:  # fmt: skip
    """Compute ``silu(x @ gate.T) * (x @ up.T)``: the bits of `silu_mul` of `linears`.

    On CUDA it is one kernel, per 256 rows of packed weights.

    Args:
        x: ``[..., rows, in]``; ``prefetch`` is as in `linear`.
        gate, up: ``[out, in]``; ``scales [2 * out]`` and ``format`` are as in `linears`.

    Returns:
        ``[..., rows, out]``, the dtype of ``x``.
    """


@op(
    "gate_up[batch.., columns]",
    "out[batch.., columns // 2]",
    where="ndim(gate_up) >= 2; columns % 2 == 0; gate <= 1: clamped_silu is of experts only",
    derived="width = columns // 2; rows = batch * min(width, 1)",
    choices={"gate": _C.GATES},
)
def silu_mul(gate_up: Tensor, gate: str = "silu") -> Tensor:
    """Compute ``silu(gate) * up [..., width]`` of ``gate_up [..., 2 * width]`` side by side, in fp32, rounded once.

    ``gate="gelu_tanh"`` takes gelu, by the approximation with tanh, in silu's place.
    """


@op(
    "x[rows, heads, width] gate[rows, heads, width]~",
    "out[rows, heads, width]",
    derived="gate_stride_row = stride(gate, 0); gate_stride_head = stride(gate, 1)",
)
def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Compute ``x * sigmoid(gate)`` per head, in fp32, rounded once: attention with an output gate.

    Both are ``[rows, heads, width]``; ``gate`` may have any strides.
    """


def _has_expert_kernel(launch: Launcher, s: Scope) -> bool:
    if not (_reads(launch, s.arguments[-1]) and _reads(launch, s.arguments[-2])):
        return False
    shapes = (s.dtype, s.gate_up, s.down, s.rows, s.top_k, s.hidden, s.width)
    takes, s.workspace = launch.workspace("experts", s.x.device, *shapes)
    s.x = launch.aligned(s.x) if takes else s.x
    return bool(takes)


@op(
    "x[rows, hidden] ids[rows, top_k]:i64 scores[rows, top_k]:T|f32 "
    "gate_up[num_experts, hidden if transposed else 2 * width, 2 * width if transposed else columns]:W "
    "down[num_experts, width if transposed else hidden, hidden if transposed else inner_columns]:W "
    "gate_up_bias[num_experts, 2 * width] down_bias[num_experts, hidden] "
    "gate_up_scales[num_experts, 2 * width]:f32 down_scales[num_experts, hidden]:f32",
    "out[rows, hidden]",
    where="num_experts >= 1 and hidden >= 1 and width >= 1; "
    "has(gate_up_scales) == has(down_scales) == (1 <= format <= 2): only int8 has scales apart; "
    "format == down_format or (format > 2 and down_format > 2): two formats must both have their scales inside; "
    "format == 0 or not transposed: transposed weights must be dense",
    derived="width = size(down, 1) if transposed else size(gate_up, 1) // 2; float_scores = is_float32(scores); "
    "columns = row_size(format, hidden); inner_columns = row_size(down_format, width)",
    choices={"gate": _C.GATES, "format": _C.FORMATS, "down_format": _C.FORMATS},
    prepare=_has_expert_kernel,
)
def experts(
    x: Tensor, ids: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, gate: str = "silu", alpha: float = 1.702, limit: float = 7.0,
    transposed: bool = False, gate_up_scales: Tensor | None = None, down_scales: Tensor | None = None,
    format: str = DENSE.name, down_format: str = DENSE.name,
) -> Tensor:  # fmt: skip
    """Compute the sum over slots of ``scores[row, slot] * down(gate(gate_up(x[row])))`` of expert ``ids[row, slot]``.

    Only the weights of chosen experts are read, each once. Sums are in fp32, over slots in ascending order; only what
    goes into ``down`` and the result are rounded. A row's bits depend on its own ``x``, ``ids`` and ``scores``. An id
    outside the experts adds nothing. On CUDA float32, and a ``hidden`` or ``width`` that is not a multiple of 8, go
    through torch.

    Args:
        x: ``[rows, hidden]``.
        ids: ``[rows, top_k]``; ``scores`` too, the dtype of ``x`` or float32.
        gate_up: ``[num_experts, 2 * width, hidden]``: of each expert the gate, then what it gates.
        down: ``[num_experts, hidden, width]``.
        gate_up_bias: ``[num_experts, 2 * width]``; ``down_bias`` is ``[num_experts, hidden]``.
        gate: ``silu``; ``gelu_tanh``, the approximation of gelu with tanh; or ``clamped_silu``, as in gpt-oss: ``gate *
            sigmoid(alpha * gate) * (up + 1)``, with the gate clamped to at most ``limit`` and up to ``-limit ..
            limit``.
        transposed: as in gpt-oss: ``gate_up [num_experts, hidden, 2 * width]``, whose columns (and biases) alternate
            between gate and up, and ``down [num_experts, width, hidden]``.
        gate_up_scales: ``[num_experts, 2 * width]`` float32, and ``down_scales [num_experts, hidden]``: those of a
            `PackedWeight`; None if dense.
        format, down_format: those of ``gate_up`` and ``down``, as in `linear`. They differ only if both have blocks or
            groups.

    Returns:
        ``[rows, hidden]``.
    """


@op(
    "packed[features, size]:u8 ids[rows..]:i64",
    "out[rows.., columns]:f32",
    where=f"features >= 1; columns >= 1; 2 < format < {_C.FIRST_GROUPS}: unpack_rows reads weights in blocks; "
    "size == row_size(format, columns)",
    choices={"format": _C.FORMATS},
    kernel="unpack_blocks",
    prepare=on_cpu,
)
def unpack_rows(packed: Tensor, ids: Tensor, columns: int, format: str) -> Tensor:
    """Read rows of a weight in the blocks of a file; those of a GGUF file as the gguf package does.

    Args:
        packed: ``[features, size]``, what a `PackedWeight` has packed.
        ids: ``[rows..]`` of any shape. An id outside of it counts as the nearest.
        columns: of the weight.
        format: of `FORMATS`, one with blocks.

    Returns:
        ``[rows.., columns]`` float32.
    """

"""A mixture of experts for a few rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from . import reference
from .checks import dense, expect
from .registry import Launcher, op


@op()
def experts(
    launch: Launcher,
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    transposed: bool = False,
) -> Tensor:
    """Compute the sum over slots of ``scores[row, slot] * down(gate(gate_up(x[row])))`` of expert ``ids[row, slot]``.

    The weights of an expert that some row has chosen are read once, the others never. Sums are in fp32, over slots in
    ascending order. Only what goes into ``down`` and the result are rounded. A row's bits depend on its own ``x``,
    ``ids`` and ``scores`` only. An id that is not in 0 .. num_experts - 1 adds nothing.

    Args:
        x: ``[rows, hidden]``, float32 or bfloat16 (on CUDA float16 too; float32 goes through torch there, and so do
            a ``hidden`` or ``width`` that is not a multiple of 8).
        ids: ``[rows, top_k]`` int64.
        scores: ``[rows, top_k]``, the dtype of ``x`` or float32.
        gate_up: ``[num_experts, 2 * width, hidden]``, the dtype of ``x``: of each expert the gate, then what it gates.
        down: ``[num_experts, hidden, width]``, the dtype of ``x``.
        gate_up_bias: ``[num_experts, 2 * width]``, the dtype of ``x``, or None.
        down_bias: ``[num_experts, hidden]``, the dtype of ``x``, or None.
        gate: ``silu``: ``silu(gate) * up``; ``gelu_tanh``: ``gelu(gate) * up``, by the approximation with tanh;
            ``clamped_silu``, as in gpt-oss: ``gate * sigmoid(alpha * gate) * (up + 1)``, with the gate clamped to at
            most ``limit`` and up to ``-limit .. limit``.
        alpha: of ``clamped_silu``.
        limit: of ``clamped_silu``.
        transposed: as in gpt-oss: ``gate_up [num_experts, hidden, 2 * width]``, whose columns (and biases) are gate and
            up by turns, and ``down [num_experts, width, hidden]``.

    Returns:
        ``[rows, hidden]``, the dtype of ``x``.

    Raises:
        ValueError: a shape does not fit, or there is no such gate. TypeError: a dtype does not fit.
    """
    # 1. Check the operands
    sizes = rows, top_k, num_experts, hidden, width = _check(x, ids, scores, gate_up, down, transposed)
    if gate_up_bias is not None:
        expect("experts", "gate_up_bias", gate_up_bias, (num_experts, 2 * width), x.dtype, "num_experts, 2 * width")
    if down_bias is not None:
        expect("experts", "down_bias", down_bias, (num_experts, hidden), x.dtype, "num_experts, hidden")
    if gate not in _C.GATES:
        raise ValueError(f"experts: gate must be one of {', '.join(_C.GATES)}, got {gate!r}")
    # 2. Leave what the kernel does not take to torch
    dtype, options = launch.dtype("experts", "x", x), (alpha, limit, transposed)
    x, ids, scores, gate_up, down = (tensor.contiguous() for tensor in (x, ids, scores, gate_up, down))
    gate_up_bias, down_bias = dense(gate_up_bias), dense(down_bias)
    weights = (gate_up, down, gate_up_bias, down_bias)
    shapes = (dtype, gate_up, down, rows, top_k, hidden, width)
    takes, workspace = launch.workspace("experts", x.device, *shapes)
    if not takes:
        return reference.experts(x, ids, scores, *weights, gate, *options)
    # 3. Run it
    out, is_float = torch.empty_like(x), scores.dtype == torch.float32
    launch(
        "experts", launch.aligned(x), ids, scores, *weights, out, workspace, *sizes, _C.GATES[gate], *options, is_float,
        dtype,
    )  # fmt: skip
    return out


def _check(
    x: Tensor, ids: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, transposed: bool
) -> tuple[int, int, int, int, int]:
    """Return ``(rows, top_k, num_experts, hidden, width)``, which the tensors must agree on."""
    expect("experts", "x", x, (None, None), x.dtype, "rows, hidden")
    rows, hidden = x.shape
    expect("experts", "ids", ids, (rows, None), torch.int64, "rows, top_k")
    expect("experts", "scores", scores, tuple(ids.shape), scores.dtype, "rows, top_k")
    if scores.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"experts: scores must be {x.dtype} as x is, or float32, got {scores.dtype}")
    names = "num_experts, hidden, 2 * width" if transposed else "num_experts, 2 * width, hidden"
    expect("experts", "gate_up", gate_up, (None, hidden, None) if transposed else (None, None, hidden), x.dtype, names)
    num_experts, columns = gate_up.shape[0], gate_up.shape[2 if transposed else 1]
    if min(num_experts, hidden, columns) == 0 or columns % 2:
        raise ValueError(f"experts: gate_up must be [{names}] with all sizes >= 1, got {list(gate_up.shape)}")
    width = columns // 2
    names = "num_experts, width, hidden" if transposed else "num_experts, hidden, width"
    shape = (num_experts, width, hidden) if transposed else (num_experts, hidden, width)
    expect("experts", "down", down, shape, x.dtype, names)
    return rows, ids.shape[1], num_experts, hidden, width

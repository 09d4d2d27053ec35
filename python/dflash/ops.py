"""The ops of the engine: schema, checks, allocation, fake kernel and docstring, side by side per op.

Every op is registered in the ``dflash`` library of torch (``torch.ops.dflash.*``), so that ``torch.compile`` sees
it whole. On CPU it runs the C++ kernel of the ``_C`` extension (float32 and bfloat16 storage, fp32 accumulation).
On CUDA it runs its kernel where one exists and otherwise its plain-torch twin in :mod:`dflash.reference`.

Ops that end in an underscore write into their arguments and return nothing. None of them records gradients.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import _C, reference

__all__ = [
    "accept_prefix_",
    "add_rms_norm",
    "append_context_kv_",
    "append_kv_",
    "block_attention",
    "cuda_status",
    "fuse_features",
    "has_cuda_kernels",
    "isa",
    "qkv_norm_rope_append_",
    "rms_norm",
    "select_tokens",
    "silu_mul",
]

_LIBRARY = torch.library.Library("dflash", "DEF")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def _register(schema: str, cpu, fake, cuda=None) -> None:
    """Define ``dflash::schema`` with one Python function per dispatch key and a fake kernel, which holds the checks.

    Without a function of its own, CUDA runs the twin of the same name behind the same checks.
    """
    name = schema.split("(", 1)[0]
    if cuda is None:
        twin = getattr(reference, name)

        def cuda(*arguments):
            fake(*arguments)
            return twin(*arguments)

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"dflash::{name}", fake, lib=_LIBRARY)


def _dtype(op: str, name: str, tensor: Tensor) -> int:
    """The storage type's number for the kernels, or a TypeError naming what came."""
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"{op}: {name} must be float32 or bfloat16 on CPU, got {tensor.dtype}")
    return code


def _expect(op: str, name: str, tensor: Tensor, shape: tuple, dtype: torch.dtype, names: str) -> None:
    """Raise unless ``tensor`` has this shape (None: any size) and dtype; ``names`` spells the shape for the message."""
    if tensor.dim() != len(shape):
        raise ValueError(f"{op}: {name} must be [{names}], got {tensor.dim()} dimensions")
    for have, want in zip(tensor.shape, shape, strict=True):
        if want is not None and have != want:
            wanted = ", ".join("*" if size is None else str(size) for size in shape)
            raise ValueError(f"{op}: {name} must be [{names}] = [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def isa() -> str:
    """The instruction set that the CPU kernels run on: ``scalar``, ``avx2`` or ``avx512``.

    Chosen at first use from what the processor has; the environment variable ``DFLASH_ISA`` names another.
    """
    return _C.isa()


def has_cuda_kernels() -> bool:
    """Whether this build holds CUDA kernels at all."""
    return _C.with_cuda()


@functools.cache
def cuda_status(device: int = 0) -> str:
    """Why the CUDA kernels of this build cannot run on CUDA device ``device``; empty when they can.

    No kernels in the build, no driver or one too old for them, or a device that they hold no code for. The ops then
    run their plain-torch twins. Looked up once per device.
    """
    return _C.cuda_status(device)


# ---------------------------------------------------------------------------------------------- rms_norm


def _rms_norm_check(x: Tensor, weight: Tensor, counts: Tensor | None) -> None:
    if x.dim() < 2 or weight.shape != x.shape[-1:] or x.shape[-1] == 0:
        raise ValueError(
            f"rms_norm: weight must be [hidden] for x [..., hidden], got {list(weight.shape)} for {list(x.shape)}"
        )
    if weight.dtype != x.dtype:
        raise TypeError(f"rms_norm: weight must be {x.dtype} as x is, got {weight.dtype}")
    if counts is not None:
        if x.dim() != 3:
            raise ValueError(f"rms_norm: with counts x must be [batch, rows, hidden], got {x.dim()} dimensions")
        _expect("rms_norm", "counts", counts, (x.shape[0],), torch.int64, "batch")


def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, counts: Tensor | None) -> Tensor:
    _rms_norm_check(x, weight, counts)
    dtype = _dtype("rms_norm", "x", x)
    x, weight = x.contiguous(), weight.contiguous()
    counts = counts if counts is None else counts.contiguous()
    out, hidden = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // hidden
    _C.rms_norm(
        x.data_ptr(), 0, weight.data_ptr(), _address(counts), out.data_ptr(), 0,
        rows, hidden, x.shape[-2], eps, dtype, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, counts: Tensor | None) -> Tensor:
    _rms_norm_check(x, weight, counts)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_register(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? counts) -> Tensor",
    _rms_norm_cpu,
    _rms_norm_fake,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, counts: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32, rounded once.

    Args:
        x: ``[..., hidden]``, float32 or bfloat16; ``[batch, rows, hidden]`` with ``counts``.
        weight: ``[hidden]``, the dtype of ``x``.
        eps: added to the mean square.
        counts: ``[batch]`` int64. Rows at or past the count are never read and come back as zeros.

    Returns:
        A tensor like ``x``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    return torch.ops.dflash.rms_norm(x, weight, eps, counts)


# ---------------------------------------------------------------------------------------------- add_rms_norm


def _add_rms_norm_check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    _rms_norm_check(x, weight, None)
    _expect("add_rms_norm", "residual", residual, tuple(x.shape), x.dtype, "as x")


def _add_rms_norm_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _add_rms_norm_check(x, residual, weight)
    dtype = _dtype("add_rms_norm", "x", x)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total, hidden = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    rows = x.numel() // hidden
    _C.rms_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), 0, out.data_ptr(), total.data_ptr(),
        rows, hidden, rows, eps, dtype, torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def _add_rms_norm_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _add_rms_norm_check(x, residual, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, torch.empty_like(out)


_register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _add_rms_norm_cpu,
    _add_rms_norm_fake,
)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``h = x + residual`` and its RMSNorm.

    Args:
        x: ``[..., hidden]``, float32 or bfloat16.
        residual: like ``x``.
        weight: ``[hidden]``, the dtype of ``x``.
        eps: added to the mean square.

    Returns:
        ``(rms_norm(h), h)``, both like ``x``; ``h`` is rounded to the dtype before it is normed.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    return torch.ops.dflash.add_rms_norm(x, residual, weight, eps)


# ---------------------------------------------------------------------------------------------- silu_mul


def _silu_mul_check(gate_up: Tensor) -> None:
    if gate_up.dim() < 2 or gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul: gate_up must be [..., 2 * width], got {list(gate_up.shape)}")


def _silu_mul_cpu(gate_up: Tensor) -> Tensor:
    _silu_mul_check(gate_up)
    dtype = _dtype("silu_mul", "gate_up", gate_up)
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    _C.silu_mul(gate_up.data_ptr(), out.data_ptr(), out.numel() // max(width, 1), width, dtype, torch.get_num_threads())
    return out


def _silu_mul_fake(gate_up: Tensor) -> Tensor:
    _silu_mul_check(gate_up)
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


_register("silu_mul(Tensor gate_up) -> Tensor", _silu_mul_cpu, _silu_mul_fake)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``gate_up = [gate, up]`` side by side, in fp32, rounded once.

    Args:
        gate_up: ``[..., 2 * width]``, float32 or bfloat16.

    Returns:
        ``[..., width]``, the dtype of ``gate_up``.

    Raises:
        ValueError: the last dimension is odd. TypeError: the dtype does not fit.
    """
    return torch.ops.dflash.silu_mul(gate_up)


# ---------------------------------------------------------------------------------------------- fuse_features


def _fuse_features_check(context: Tensor, num_context: Tensor, fc_weight: Tensor, norm_weight: Tensor) -> None:
    if fc_weight.dim() != 2:
        raise ValueError(f"fuse_features: fc_weight must be [hidden, taps * hidden], got {fc_weight.dim()} dimensions")
    hidden, width = fc_weight.shape
    _expect("fuse_features", "context", context, (None, None, width), fc_weight.dtype, "batch, rows, taps * hidden")
    _expect("fuse_features", "num_context", num_context, (context.shape[0],), torch.int64, "batch")
    _expect("fuse_features", "norm_weight", norm_weight, (hidden,), fc_weight.dtype, "hidden")


def _fuse_features_cpu(
    context: Tensor, num_context: Tensor, fc_weight: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    _fuse_features_check(context, num_context, fc_weight, norm_weight)
    _dtype("fuse_features", "context", context)
    return _rms_norm_cpu(torch.nn.functional.linear(context, fc_weight), norm_weight, eps, num_context)


def _fuse_features_fake(
    context: Tensor, num_context: Tensor, fc_weight: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    _fuse_features_check(context, num_context, fc_weight, norm_weight)
    return context.new_empty(*context.shape[:-1], fc_weight.shape[0])


_register(
    "fuse_features(Tensor context, Tensor num_context, Tensor fc_weight, Tensor norm_weight, float eps) -> Tensor",
    _fuse_features_cpu,
    _fuse_features_fake,
)


def fuse_features(context: Tensor, num_context: Tensor, fc_weight: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """Target features for the drafter: ``rms_norm(context @ fc_weight.T)``, rounded once in between.

    Args:
        context: ``[batch, rows, taps * hidden]``, float32 or bfloat16: the tapped states side by side.
        num_context: ``[batch]`` int64. Rows at or past it may hold anything and come back as zeros.
        fc_weight: ``[hidden, taps * hidden]``, the dtype of ``context``.
        norm_weight: ``[hidden]``, the dtype of ``context``.
        eps: added to the mean square.

    Returns:
        ``[batch, rows, hidden]``, the dtype of ``context``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    return torch.ops.dflash.fuse_features(context, num_context, fc_weight, norm_weight, eps)


# ---------------------------------------------------------------------------------------------- K/V appends


def _expect_cache(
    op: str, names: tuple[str, str], k_cache: Tensor, v_cache: Tensor, batch: int, heads: int | None,
    dims: tuple[int | None, int | None], dtype: torch.dtype, mutated: bool = True,
) -> None:  # fmt: skip
    """Raise unless both are caches ``[batch, heads, capacity, dim]`` of this dtype; contiguous where ``mutated``."""
    k_name, v_name = names
    _expect(op, k_name, k_cache, (batch, heads, None, dims[0]), dtype, "batch, num_kv_heads, capacity, head_dim")
    wanted = (batch, k_cache.shape[1], k_cache.shape[2], dims[1])
    _expect(op, v_name, v_cache, wanted, dtype, "batch, num_kv_heads, capacity, v_head_dim")
    if k_cache.shape[2] == 0:
        raise ValueError(f"{op}: {k_name} must have a capacity of at least 1, got {list(k_cache.shape)}")
    for name, cache in ((k_name, k_cache), (v_name, v_cache)):
        if mutated:
            _expect_contiguous(op, name, cache)


def _expect_contiguous(op: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} is written in place and must be contiguous, got strides {tensor.stride()}")


def _expect_rope(op: str, positions: Tensor, cos: Tensor, sin: Tensor, batch: int, rows: int, head_dim: int) -> None:
    _expect(op, "positions", positions, (batch, rows), torch.int64, "batch, rows")
    _expect(op, "cos", cos, (batch, rows, None), torch.float32, "batch, rows, rotary / 2")
    _expect(op, "sin", sin, (batch, rows, cos.shape[-1]), torch.float32, "batch, rows, rotary / 2")
    if 2 * cos.shape[-1] > head_dim:
        raise ValueError(f"{op}: cos may have at most head_dim / 2 = {head_dim // 2} columns, got {cos.shape[-1]}")


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _unit_stride(tensor: Tensor) -> Tensor:
    """The tensor itself when its last dimension is dense, whatever the other strides; else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _qkv_norm_rope_append_check(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None, eps: float, q_out: Tensor, k_cache: Tensor, v_cache: Tensor,
) -> None:  # fmt: skip
    op = "qkv_norm_rope_append_"
    _expect(op, "qkv", qkv, (None, None, None), qkv.dtype, "batch, rows, (num_heads + 2 * num_kv_heads) * head_dim")
    batch, rows, width = qkv.shape
    _expect(op, "q_out", q_out, (batch, None, None, None), qkv.dtype, "batch, q_rows, num_heads, head_dim")
    _, q_rows, num_heads, head_dim = q_out.shape
    _expect_cache(op, ("k_cache", "v_cache"), k_cache, v_cache, batch, None, (head_dim, head_dim), qkv.dtype)
    _expect_contiguous(op, "q_out", q_out)
    num_kv_heads = k_cache.shape[1]
    if width != (num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"{op}: qkv must be [batch, rows, ({num_heads} + 2 * {num_kv_heads}) * {head_dim}] "
            f"as q_out and k_cache say, got {list(qkv.shape)}"
        )
    if q_rows > rows:
        raise ValueError(f"{op}: q_out may have at most the {rows} rows of qkv, got {q_rows}")
    _expect_rope(op, positions, cos, sin, batch, rows, head_dim)
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if weight is not None:
            _expect(op, name, weight, (head_dim,), qkv.dtype, "head_dim")


def _qkv_norm_rope_append_cpu(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None, eps: float, q_out: Tensor, k_cache: Tensor, v_cache: Tensor,
) -> None:  # fmt: skip
    _qkv_norm_rope_append_check(qkv, positions, cos, sin, q_norm_weight, k_norm_weight, eps, q_out, k_cache, v_cache)
    dtype = _dtype("qkv_norm_rope_append_", "qkv", qkv)
    qkv, positions, cos, sin = qkv.contiguous(), positions.contiguous(), cos.contiguous(), sin.contiguous()
    q_norm_weight, k_norm_weight = _dense(q_norm_weight), _dense(k_norm_weight)
    batch, q_rows, num_heads, head_dim = q_out.shape
    _C.qkv_norm_rope_append(
        qkv.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), _address(q_norm_weight),
        _address(k_norm_weight), q_out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), batch, qkv.shape[1], q_rows,
        num_heads, k_cache.shape[1], head_dim, cos.shape[-1], k_cache.shape[2], eps, dtype, torch.get_num_threads(),
    )  # fmt: skip


_register(
    "qkv_norm_rope_append_(Tensor qkv, Tensor positions, Tensor cos, Tensor sin, Tensor? q_norm_weight, "
    "Tensor? k_norm_weight, float eps, Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache) -> ()",
    _qkv_norm_rope_append_cpu,
    _qkv_norm_rope_append_check,
)


def qkv_norm_rope_append_(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    """Split packed QKV rows; norm and rotate q and k; write q of the last rows; append k and v to the cache.

    The norm is RMSNorm over each head. RoPE is the half-split kind ("rotate_half") over the first ``rotary``
    dimensions of a head, in fp32 on the fp32 normed value, rounded once.

    Args:
        qkv: ``[batch, rows, (num_heads + 2 * num_kv_heads) * head_dim]``, float32 or bfloat16: the q heads, the
            k heads, the v heads.
        positions: ``[batch, rows]`` int64, the cache slot of each row, all different within a sequence. A row whose
            position is negative or not below the capacity appends nothing.
        cos, sin: ``[batch, rows, rotary / 2]`` float32; those of rows that are off may hold anything.
        q_norm_weight, k_norm_weight: ``[head_dim]``, the dtype of ``qkv``, or None for no norm.
        eps: added to the mean square.
        q_out: ``[batch, q_rows, num_heads, head_dim]``, contiguous; written. Row j comes from row
            ``rows - q_rows + j`` of ``qkv``.
        k_cache, v_cache: ``[batch, num_kv_heads, capacity, head_dim]``, contiguous; written.

    Raises:
        ValueError: a shape does not fit, or a written tensor is not contiguous. TypeError: a dtype does not fit.
    """
    torch.ops.dflash.qkv_norm_rope_append_(
        qkv, positions, cos, sin, q_norm_weight, k_norm_weight, eps, q_out, k_cache, v_cache
    )


def _append_context_kv_check(
    kv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_norm_weight: Tensor | None, eps: float,
    k_caches: list[Tensor], v_caches: list[Tensor],
) -> None:  # fmt: skip
    op = "append_context_kv_"
    names = "num_layers, batch, rows, 2 * num_kv_heads * head_dim"
    _expect(op, "kv", kv, (None, None, None, None), kv.dtype, names)
    num_layers, batch, rows, width = kv.shape
    if len(k_caches) != num_layers or len(v_caches) != num_layers:
        raise ValueError(f"{op}: kv has {num_layers} layers, got {len(k_caches)} k_caches and {len(v_caches)} v_caches")
    heads = head_dim = None
    for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        at = (f"k_caches[{layer}]", f"v_caches[{layer}]")
        _expect_cache(op, at, k_cache, v_cache, batch, heads, (head_dim, k_cache.shape[-1]), kv.dtype)
        _, heads, _, head_dim = k_cache.shape
        if k_cache.shape != k_caches[0].shape:
            raise ValueError(f"{op}: {at[0]} must be {list(k_caches[0].shape)}, got {list(k_cache.shape)}")
    if num_layers == 0:
        return
    if width != 2 * heads * head_dim:
        raise ValueError(f"{op}: kv must be [{names}] with 2 * {heads} * {head_dim} columns, got {list(kv.shape)}")
    _expect_rope(op, positions, cos, sin, batch, rows, head_dim)
    if k_norm_weight is not None:
        _expect(op, "k_norm_weight", k_norm_weight, (num_layers, head_dim), kv.dtype, "num_layers, head_dim")


def _append_context_kv_cpu(
    kv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_norm_weight: Tensor | None, eps: float,
    k_caches: list[Tensor], v_caches: list[Tensor],
) -> None:  # fmt: skip
    _append_context_kv_check(kv, positions, cos, sin, k_norm_weight, eps, k_caches, v_caches)
    dtype = _dtype("append_context_kv_", "kv", kv)
    if not k_caches:
        return
    kv, positions, cos, sin = kv.contiguous(), positions.contiguous(), cos.contiguous(), sin.contiguous()
    k_norm_weight = _dense(k_norm_weight)
    batch, num_kv_heads, capacity, head_dim = k_caches[0].shape
    _C.append_context_kv(
        kv.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), _address(k_norm_weight),
        [cache.data_ptr() for cache in k_caches], [cache.data_ptr() for cache in v_caches], batch, kv.shape[2],
        num_kv_heads, head_dim, cos.shape[-1], capacity, eps, dtype, torch.get_num_threads(),
    )  # fmt: skip


_register(
    "append_context_kv_(Tensor kv, Tensor positions, Tensor cos, Tensor sin, Tensor? k_norm_weight, float eps, "
    "Tensor(a!)[] k_caches, Tensor(b!)[] v_caches) -> ()",
    _append_context_kv_cpu,
    _append_context_kv_check,
)


def append_context_kv_(
    kv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_norm_weight: Tensor | None,
    eps: float,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
) -> None:
    """Norm and rotate context K and append K and V, for all draft layers at once (prefill).

    Args:
        kv: ``[num_layers, batch, rows, 2 * num_kv_heads * head_dim]``, float32 or bfloat16: the k heads, the v heads.
        positions: ``[batch, rows]`` int64, as in :func:`qkv_norm_rope_append_`.
        cos, sin: ``[batch, rows, rotary / 2]`` float32; those of rows that are off may hold anything.
        k_norm_weight: ``[num_layers, head_dim]``, the dtype of ``kv``, or None for no norm.
        eps: added to the mean square.
        k_caches, v_caches: per layer ``[batch, num_kv_heads, capacity, head_dim]``, contiguous; written.

    Raises:
        ValueError: a shape does not fit, or a cache is not contiguous. TypeError: a dtype does not fit.
    """
    torch.ops.dflash.append_context_kv_(kv, positions, cos, sin, k_norm_weight, eps, k_caches, v_caches)


def _append_kv_check(key: Tensor, value: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    op = "append_kv_"
    _expect(op, "key", key, (None, None, None, None), key.dtype, "batch, num_kv_heads, rows, head_dim")
    batch, heads, rows, head_dim = key.shape
    names = "batch, num_kv_heads, rows, v_head_dim"
    _expect(op, "value", value, (batch, heads, rows, None), key.dtype, names)
    _expect(op, "positions", positions, (batch, rows), torch.int64, "batch, rows")
    _expect_cache(op, ("k_cache", "v_cache"), k_cache, v_cache, batch, heads, (head_dim, value.shape[-1]), key.dtype)


def _append_kv_cpu(key: Tensor, value: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    _append_kv_check(key, value, positions, k_cache, v_cache)
    dtype = _dtype("append_kv_", "key", key)
    key, value, positions = _unit_stride(key), _unit_stride(value), positions.contiguous()
    batch, num_kv_heads, rows, head_dim = key.shape
    _C.append_kv(
        key.data_ptr(), value.data_ptr(), positions.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        key.stride()[:3], value.stride()[:3], batch, rows, num_kv_heads, head_dim, value.shape[-1], k_cache.shape[2],
        dtype, torch.get_num_threads(),
    )  # fmt: skip


_register(
    "append_kv_(Tensor key, Tensor value, Tensor positions, Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()",
    _append_kv_cpu,
    _append_kv_check,
)


def append_kv_(key: Tensor, value: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """``cache[b, :, positions[b, r]] = new[b, :, r]`` for keys and values.

    Args:
        key: ``[batch, num_kv_heads, rows, head_dim]``, float32 or bfloat16, any strides.
        value: ``[batch, num_kv_heads, rows, v_head_dim]``, the dtype of ``key``, any strides.
        positions: ``[batch, rows]`` int64, as in :func:`qkv_norm_rope_append_`.
        k_cache: ``[batch, num_kv_heads, capacity, head_dim]``, contiguous; written.
        v_cache: ``[batch, num_kv_heads, capacity, v_head_dim]``, contiguous; written.

    Raises:
        ValueError: a shape does not fit, or a cache is not contiguous. TypeError: a dtype does not fit.
    """
    torch.ops.dflash.append_kv_(key, value, positions, k_cache, v_cache)


# ---------------------------------------------------------------------------------------------- block_attention


def _block_attention_check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, causal: bool, window: int,
    softcap: float, sinks: Tensor | None, ancestors: Tensor | None,
) -> None:  # fmt: skip
    op = "block_attention"
    _expect(op, "q", q, (None, None, None, None), q.dtype, "batch, rows, num_heads, head_dim")
    batch, rows, num_heads, head_dim = q.shape
    _expect_cache(op, ("k_cache", "v_cache"), k_cache, v_cache, batch, None, (head_dim, None), q.dtype, mutated=False)
    num_kv_heads = k_cache.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"{op}: num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
    _expect(op, "lengths", lengths, (batch,), torch.int64, "batch")
    if head_dim == 0:
        raise ValueError(f"{op}: head_dim must be at least 1, got q {list(q.shape)}")
    if window < 0:
        raise ValueError(f"{op}: window must be positive, or 0 for none, got {window}")
    if softcap < 0:
        raise ValueError(f"{op}: softcap must be positive, or 0 for none, got {softcap}")
    if sinks is not None:
        _expect(op, "sinks", sinks, (num_heads,), sinks.dtype, "num_heads")
    if ancestors is not None:
        _expect(op, "ancestors", ancestors, (rows, -(-rows // 64)), torch.int64, "rows, ceil(rows / 64)")
        if window:
            raise ValueError(f"{op}: ancestors cannot be combined with a window, got window {window}")


def _block_attention_cpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, causal: bool, window: int,
    softcap: float, sinks: Tensor | None, ancestors: Tensor | None,
) -> Tensor:  # fmt: skip
    _block_attention_check(q, k_cache, v_cache, lengths, scale, causal, window, softcap, sinks, ancestors)
    dtype = _dtype("block_attention", "q", q)
    if ancestors is not None:
        raise NotImplementedError("block_attention: ancestors has no CPU kernel yet")
    q, k_cache, v_cache, lengths = _unit_stride(q), k_cache.contiguous(), v_cache.contiguous(), lengths.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    batch, rows, num_heads, head_dim = q.shape
    _, num_kv_heads, capacity, v_head_dim = v_cache.shape
    out = q.new_empty(batch, rows, num_heads, v_head_dim)
    _C.block_attention(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), lengths.data_ptr(), _address(sinks), out.data_ptr(),
        q.stride()[:3], batch, rows, num_heads, num_kv_heads, head_dim, v_head_dim, capacity, min(window, capacity),
        scale, softcap, causal, dtype, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _block_attention_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, causal: bool, window: int,
    softcap: float, sinks: Tensor | None, ancestors: Tensor | None,
) -> Tensor:  # fmt: skip
    _block_attention_check(q, k_cache, v_cache, lengths, scale, causal, window, softcap, sinks, ancestors)
    return q.new_empty(*q.shape[:-1], v_cache.shape[-1])


_register(
    "block_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, float scale, bool causal, int window, "
    "float softcap, Tensor? sinks, Tensor? ancestors) -> Tensor",
    _block_attention_cpu,
    _block_attention_fake,
)


def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Attention of a block of queries against a cache that already holds the block's own K/V.

    Query i of sequence b sits at position ``lengths[b] + i``. The keys are slots ``0 .. lengths[b] + rows - 1``;
    nothing past them is read. Key tiles are aligned to absolute positions and reduced in a fixed order, so that a
    row's bits depend on its query and the keys it sees, not on its place in the block, on ``rows`` or on the batch.

    Args:
        q: ``[batch, rows, num_heads, head_dim]``, float32 or bfloat16, any strides.
        k_cache: ``[batch, num_kv_heads, capacity, head_dim]``, the dtype of ``q``. Query head h uses
            head ``h // (num_heads // num_kv_heads)``.
        v_cache: ``[batch, num_kv_heads, capacity, v_head_dim]``, the dtype of ``q``.
        lengths: ``[batch]`` int64, the position of each sequence's first query.
        scale: the factor on the scores.
        causal: True: a query sees the keys up to its own position. False: all of them.
        window: a query sees keys less than ``window`` positions back and, unless causal, ahead; 0 for no window.
        softcap: the scores become ``softcap * tanh(scores / softcap)`` after scaling; 0 for none.
        sinks: ``[num_heads]``, one more logit per head in the softmax's denominator, not scaled; or None.
        ancestors: ``[rows, ceil(rows / 64)]`` int64 or None: instead of ``causal``, a query sees every key before the
            block, and row j of the block where bit ``j % 64`` of ``ancestors[i, j // 64]`` is set. Not on CPU yet.

    Returns:
        ``[batch, rows, num_heads, v_head_dim]``, the dtype of ``q``; zeros for a query that sees no key.

    Raises:
        ValueError: a shape or a value does not fit. TypeError: a dtype does not fit.
        NotImplementedError: ``ancestors`` on CPU.
    """
    return torch.ops.dflash.block_attention(
        q, k_cache, v_cache, lengths, scale, causal, window, softcap, sinks, ancestors
    )


# ---------------------------------------------------------------------------------------------- select_tokens


def _select_tokens_check(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    sharpness: Tensor,
) -> None:
    op = "select_tokens"
    if logits.dim() != 3 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits must be [batch, rows, vocab] with vocab >= 1, got {list(logits.shape)}")
    batch, rows, _ = logits.shape
    _expect(op, "positions", positions, (batch, rows), torch.int64, "batch, rows")
    for name, tensor, dtype in (
        ("seeds", seeds, torch.int64),
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("sharpness", sharpness, torch.float32),
    ):
        _expect(op, name, tensor, (batch,), dtype, "batch")


def _select_tokens_cpu(logits: Tensor, positions: Tensor, *parameters: Tensor) -> Tensor:
    _select_tokens_check(logits, positions, *parameters)
    dtype = _dtype("select_tokens", "logits", logits)
    inputs = [x.contiguous() for x in (logits, positions, *parameters)]
    ids = positions.new_empty(positions.shape)
    _C.select_tokens(*(x.data_ptr() for x in inputs), ids.data_ptr(), *logits.shape, dtype, torch.get_num_threads())
    return ids


def _select_tokens_fake(logits: Tensor, positions: Tensor, *parameters: Tensor) -> Tensor:
    _select_tokens_check(logits, positions, *parameters)
    return positions.new_empty(positions.shape)


def _select_tokens_cuda(logits: Tensor, positions: Tensor, *parameters: Tensor) -> Tensor:
    _select_tokens_check(logits, positions, *parameters)
    return reference.select_tokens(logits, positions, *parameters)


_register(
    "select_tokens(Tensor logits, Tensor positions, Tensor seeds, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor min_p, Tensor sharpness) -> Tensor",
    _select_tokens_cpu,
    _select_tokens_fake,
    _select_tokens_cuda,
)


def select_tokens(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    sharpness: Tensor,
) -> Tensor:
    """Choose tokens by keyed noise: ``argmax(sharpness * filter(logits / temperature) + gumbel(seed, position, id))``.

    A row's choice is a function of its logits, position and parameters alone, and the same bits on every device:
    a Gumbel-max sample of the filtered softmax when ``sharpness`` is 1, and independent between positions and seeds.
    Ties go to the lowest id. Filters run in the order top-k, top-p, min-p, each on the survivors of the one before;
    every token equal to the threshold is kept, and the best token always is. Probabilities enter top-p as fixed point
    (2^-38 of the best token's), so that their sum has no order. The noise is :func:`dflash.reference.gumbel_noise`.

    Logits may be -inf: such a token is chosen only when all are, and then it is id 0. Of several logits that are +inf,
    or become so when divided by the temperature, the lowest id wins. Nothing is read on the host.

    Args:
        logits: ``[batch, rows, vocab]``, float32 or bfloat16.
        positions: ``[batch, rows]`` int64: the index of the token that each row chooses.
        seeds: ``[batch]`` int64.
        temperature: ``[batch]`` float32, finite and >= 0; 0 is plain argmax of the logits.
        top_k: ``[batch]`` int64; 0 (or at least vocab) is off.
        top_p: ``[batch]`` float32; 1 is off.
        min_p: ``[batch]`` float32: least probability as a fraction of the best token's; 0 is off.
        sharpness: ``[batch]`` float32 >= 0: 1 for a target; a drafter may use more, infinity being plain argmax.

    Returns:
        ``[batch, rows]`` int64; -1 for a row with a NaN logit.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    return torch.ops.dflash.select_tokens(logits, positions, seeds, temperature, top_k, top_p, min_p, sharpness)


# ---------------------------------------------------------------------------------------------- accept_prefix_


def _accept_prefix_check(
    block_ids: Tensor,
    posterior: Tensor,
    stop_token_ids: Tensor,
    limits: Tensor,
    tokens: Tensor,
    length: Tensor,
    num_context: Tensor,
    done: Tensor,
) -> None:
    op = "accept_prefix_"
    if block_ids.dim() != 2 or block_ids.shape[1] == 0:
        raise ValueError(f"{op}: block_ids must be [batch, rows] with rows >= 1, got {list(block_ids.shape)}")
    batch, rows = block_ids.shape
    for name, tensor, shape, names in (
        ("block_ids", block_ids, (batch, rows), "batch, rows"),
        ("posterior", posterior, (batch, rows), "batch, rows"),
        ("stop_token_ids", stop_token_ids, (None,), "n"),
        ("limits", limits, (batch,), "batch"),
        ("tokens", tokens, (batch, None), "batch, capacity"),
        ("length", length, (batch,), "batch"),
        ("num_context", num_context, (batch,), "batch"),
        ("done", done, (batch,), "batch"),
    ):
        _expect(op, name, tensor, shape, torch.int64, names)
        if tensor.device != block_ids.device:
            raise ValueError(f"{op}: {name} must be on {block_ids.device} as block_ids is, got {tensor.device}")
    for name, tensor in (("tokens", tokens), ("length", length), ("num_context", num_context), ("done", done)):
        _expect_contiguous(op, name, tensor)


def _accept_prefix_run(kernel, tensors: tuple[Tensor, ...], *extra: int) -> None:
    block_ids, posterior, stop_token_ids, limits, *state = tensors
    inputs = [x.contiguous() for x in (block_ids, posterior, stop_token_ids, limits)]
    kernel(
        *(x.data_ptr() for x in (*inputs, *state)),
        *block_ids.shape, stop_token_ids.shape[0], state[0].shape[1], *extra,
    )  # fmt: skip


def _accept_prefix_cpu(*tensors: Tensor) -> None:
    _accept_prefix_check(*tensors)
    _accept_prefix_run(_C.accept_prefix, tensors)


def _accept_prefix_cuda(*tensors: Tensor) -> None:
    _accept_prefix_check(*tensors)
    index = tensors[0].device.index
    if cuda_status(index):
        reference.accept_prefix_(*tensors)
    else:
        stream = torch.cuda.current_stream(index).cuda_stream
        _accept_prefix_run(_C.accept_prefix_cuda, tensors, index, stream)


def _accept_prefix_fake(*tensors: Tensor) -> None:
    _accept_prefix_check(*tensors)


_register(
    "accept_prefix_(Tensor block_ids, Tensor posterior, Tensor stop_token_ids, Tensor limits, Tensor(a!) tokens, "
    "Tensor(b!) length, Tensor(c!) num_context, Tensor(d!) done) -> ()",
    _accept_prefix_cpu,
    _accept_prefix_fake,
    _accept_prefix_cuda,
)


def accept_prefix_(
    block_ids: Tensor,
    posterior: Tensor,
    stop_token_ids: Tensor,
    limits: Tensor,
    tokens: Tensor,
    length: Tensor,
    num_context: Tensor,
    done: Tensor,
) -> None:
    """Emit the longest matching prefix and one more token of every running row, and advance its state.

    Before, ``tokens[b, : length + 1]`` are emitted and ``tokens[b, length]`` is the anchor ``block_ids[b, 0]``. With n
    the number of leading proposals ``block_ids[b, j + 1]`` that equal ``posterior[b, j]``, m = n + 1 tokens of the
    posterior are emitted, but none past the first stop token and none past the room that ``limits`` and the capacity of
    ``tokens`` leave. Then ``length += m`` and ``num_context = m``. A row that is done stays as it is, with
    ``num_context`` 0, whatever its ids hold.

    Args:
        block_ids: ``[batch, rows]`` int64: the anchor, then proposals for the positions after it; -1 never matches.
        posterior: ``[batch, rows]`` int64: the target's choice for the position after each row; -1: its logits held
            NaN. Such a choice is never emitted; the row is done where it would have been.
        stop_token_ids: ``[n]`` int64, n may be 0.
        limits: ``[batch]`` int64: how many tokens the row may hold in all.
        tokens: ``[batch, capacity]`` int64, written, contiguous.
        length: ``[batch]`` int64, advanced in place, contiguous.
        num_context: ``[batch]`` int64, written, contiguous: how many tokens were emitted.
        done: ``[batch]`` int64, written, contiguous: 0 running, 1 a stop token was emitted, 2 the limit is reached,
            3 the target's logits were NaN.

    Raises:
        ValueError: a shape or device does not fit, or a written tensor is not contiguous. TypeError: not int64.
        RuntimeError: the CUDA kernel could not be launched.
    """
    torch.ops.dflash.accept_prefix_(block_ids, posterior, stop_token_ids, limits, tokens, length, num_context, done)

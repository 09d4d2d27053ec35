"""The ops of the engine: schema, checks, allocation, fake kernel and docstring, side by side per op.

Every op is registered in the ``dflash`` library of torch (``torch.ops.dflash.*``), so that ``torch.compile`` sees
it whole. On CPU it runs the C++ kernel of the ``_C`` extension (float32 and bfloat16 storage, fp32 accumulation).
On CUDA it runs its kernel where one exists (float16 too) and otherwise its plain-torch twin in
:mod:`dflash.reference`.

Ops that end in an underscore write into their arguments and return nothing. None of them records gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from . import reference

__all__ = [
    "accept_prefix_",
    "add_rms_norm",
    "append_context_kv_",
    "append_kv_",
    "block_attention",
    "cuda_status",
    "decoder_layers",
    "fuse_features",
    "has_cuda_kernels",
    "isa",
    "linear",
    "linears",
    "qkv_norm_rope_append_",
    "rms_norm",
    "select_tokens",
    "silu_mul",
]

_LIBRARY = torch.library.Library("dflash", "DEF")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


_CUDA_DTYPES = {**_DTYPES, torch.float16: 2}


def _register(schema: str, cpu, fake, cuda=None) -> None:
    """Define ``dflash::schema`` with one Python function per dispatch key and a fake kernel, which holds the checks.

    Without a function of its own, CUDA runs the twin of the same name behind the same checks.
    """
    name = schema.split("(", 1)[0]

    def checked(function):
        def run(*arguments):
            _expect_one_device(name, arguments)
            return function(*arguments)

        return run

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, checked(cpu), "CPU")
    _LIBRARY.impl(name, checked(cuda or _twin(name, fake)), "CUDA")
    torch.library.register_fake(f"dflash::{name}", checked(fake), lib=_LIBRARY)


def _twin(name: str, fake):
    twin = getattr(reference, name)

    def run(*arguments):
        fake(*arguments)
        return twin(*arguments)

    return run


def _register_kernel(schema: str, kernel, fake) -> None:
    """The same for an op with a kernel on both devices: ``kernel(place, *arguments)`` runs it on either.

    On CUDA the twin stands in where the kernel cannot run: another dtype, or what :func:`cuda_status` names.
    """
    name = schema.split("(", 1)[0]
    twin = _twin(name, fake)

    def cpu(*arguments):
        _expect_one_device(name, arguments)
        return kernel(_CPU, *arguments)

    def cuda(*arguments):
        first = arguments[0]
        if (first.is_floating_point() and first.dtype not in _CUDA_DTYPES) or cuda_status(first.device.index):
            return twin(*arguments)
        return kernel(_CUDA, *arguments)

    _KERNELS[name] = kernel
    _register(schema, cpu, fake, cuda)


def _expect_one_device(op: str, arguments: tuple) -> None:
    """Raise unless all tensors are where the first is: a kernel would read another device's addresses."""
    device = arguments[0].device
    for argument in arguments:
        for tensor in argument if isinstance(argument, list) else (argument,):
            if isinstance(tensor, Tensor) and tensor.device != device:
                found = f"{list(tensor.shape)} on {tensor.device}"
                raise ValueError(f"{op}: all tensors must be on {device} as the first is, got {found}")


class _Cpu:
    """Where a kernel runs: what it stores, how it is called, what it needs. The tests add an emulated GPU."""

    @staticmethod
    def dtype(op: str, name: str, tensor: Tensor) -> int:
        return _dtype(op, name, tensor)

    @staticmethod
    def run(op: str, device: torch.device, *arguments) -> None:
        getattr(_C, op)(*arguments, torch.get_num_threads())

    @staticmethod
    def scratch(size: int, device: torch.device) -> Tensor | None:
        return None


class _Cuda:
    @staticmethod
    def dtype(op: str, name: str, tensor: Tensor) -> int:
        return _CUDA_DTYPES[tensor.dtype]

    @staticmethod
    def run(op: str, device: torch.device, *arguments) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        getattr(_C, f"{op}_cuda")(*arguments, device.index, stream)

    @staticmethod
    def scratch(size: int, device: torch.device) -> Tensor | None:
        return torch.empty(size, dtype=torch.uint8, device=device)


_CPU, _CUDA = _Cpu(), _Cuda()
_KERNELS: dict = {}  # by name, those that run on both

_NUM_COUNTERS = 128
_counters_of: dict[tuple, Tensor] = {}


def _counters(device: torch.device) -> Tensor:
    """``[128]`` int32, zeros before and after every kernel: where blocks that share a result count themselves.

    One tensor for each stream, and one for each graph under capture, which zeroes its own at every replay: kernels
    that run at the same time never share one.
    """
    key: tuple = ()
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        key = (device.index, stream, _C.capture_id(stream))
    counters = _counters_of.get(key)
    if counters is None:
        if len(_counters_of) >= 256:
            _counters_of.pop(next(iter(_counters_of)))
        counters = _counters_of[key] = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
    return counters


def _aligned(*tensors: Tensor) -> bool:
    """Whether 16-byte accesses may start where each tensor does."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _direct(op: str, first: Tensor, *others: Tensor | None) -> bool:
    """Whether an op may call its CPU kernel without torch's dispatcher, which costs more than small kernels do.

    Raises:
        ValueError: ``first`` is on the CPU and another tensor is not.
    """
    if type(first) not in (Tensor, torch.nn.Parameter) or not first.is_cpu or torch.compiler.is_compiling():
        return False
    for other in others:
        if other is not None and not other.is_cpu:
            _expect_one_device(op, (first, *others))
    return True


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


def _fit(*wanted: tuple[Tensor, tuple, torch.dtype]) -> bool:
    """Whether every tensor has its shape and dtype: the short way past :func:`_expect`, which names what does not."""
    for tensor, shape, dtype in wanted:  # noqa: SIM110, a generator costs more than the checks
        if tensor.shape != shape or tensor.dtype is not dtype:
            return False
    return True


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


def _rms_norm_on(place, x: Tensor, weight: Tensor, eps: float, counts: Tensor | None) -> Tensor:
    _rms_norm_check(x, weight, counts)
    dtype = place.dtype("rms_norm", "x", x)
    x, weight = x.contiguous(), weight.contiguous()
    counts = counts if counts is None else counts.contiguous()
    out, hidden = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // hidden
    place.run(
        "rms_norm", x.device, x.data_ptr(), 0, weight.data_ptr(), _address(counts), out.data_ptr(), 0, 0, 0,
        rows, hidden, x.shape[-2], eps, dtype,
    )  # fmt: skip
    return out


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, counts: Tensor | None) -> Tensor:
    _rms_norm_check(x, weight, counts)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_register_kernel(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? counts) -> Tensor",
    _rms_norm_on,
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
    if _direct("rms_norm", x, weight, counts):
        return _rms_norm_on(_CPU, x, weight, eps, counts)
    return torch.ops.dflash.rms_norm(x, weight, eps, counts)


# ---------------------------------------------------------------------------------------------- add_rms_norm


def _add_rms_norm_check(x: Tensor, residual: Tensor, weight: Tensor, tap: Tensor | None) -> None:
    _rms_norm_check(x, weight, None)
    _expect("add_rms_norm", "residual", residual, tuple(x.shape), x.dtype, "as x")
    if tap is not None:
        _expect("add_rms_norm", "tap", tap, tuple(x.shape), x.dtype, "as x")
        _row_stride("add_rms_norm", "tap", tap)


def _row_stride(op: str, name: str, tensor: Tensor) -> int:
    """The stride between the rows of a written tensor ``[..., hidden]``, which must be the same for all."""
    sizes, strides = tensor.shape[:-1], tensor.stride()
    stride = next((strides[i] for i in reversed(range(len(sizes))) if sizes[i] > 1), tensor.shape[-1])
    expected, even = stride, strides[-1] == 1 or tensor.shape[-1] == 1
    for size, have in zip(reversed(sizes), reversed(strides[:-1]), strict=True):
        even &= size <= 1 or have == expected
        expected *= size
    if not even:
        raise ValueError(f"{op}: the rows of {name} must be dense and evenly spaced, got strides {strides}")
    return stride


def _add_rms_norm_on(
    place, x: Tensor, residual: Tensor, weight: Tensor, eps: float, tap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _add_rms_norm_check(x, residual, weight, tap)
    dtype = place.dtype("add_rms_norm", "x", x)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total, hidden = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    rows = x.numel() // hidden
    place.run(
        "rms_norm", x.device, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), 0, out.data_ptr(),
        total.data_ptr(), _address(tap), 0 if tap is None else _row_stride("add_rms_norm", "tap", tap), rows, hidden,
        rows, eps, dtype,
    )  # fmt: skip
    return out, total


def _add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, tap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _add_rms_norm_check(x, residual, weight, tap)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, torch.empty_like(out)


_register_kernel(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, Tensor(a!)? tap=None) -> (Tensor, Tensor)",
    _add_rms_norm_on,
    _add_rms_norm_fake,
)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, tap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``h = x + residual`` and its RMSNorm.

    Args:
        x: ``[..., hidden]``, float32 or bfloat16.
        residual: like ``x``.
        weight: ``[hidden]``, the dtype of ``x``.
        eps: added to the mean square.
        tap: like ``x``, or None; written with ``h``. Its rows may lie any one stride apart, as the columns of one tap
            among several do.

    Returns:
        ``(rms_norm(h), h)``, both like ``x``; ``h`` is rounded to the dtype before it is normed.

    Raises:
        ValueError: a shape does not fit, or the tap's rows are unevenly spaced. TypeError: a dtype does not fit.
    """
    if _direct("add_rms_norm", x, residual, weight, tap):
        return _add_rms_norm_on(_CPU, x, residual, weight, eps, tap)
    return torch.ops.dflash.add_rms_norm(x, residual, weight, eps, tap)


# ---------------------------------------------------------------------------------------------- silu_mul


def _silu_mul_check(gate_up: Tensor) -> None:
    if gate_up.dim() < 2 or gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul: gate_up must be [..., 2 * width], got {list(gate_up.shape)}")


def _silu_mul_on(place, gate_up: Tensor) -> Tensor:
    _silu_mul_check(gate_up)
    dtype = place.dtype("silu_mul", "gate_up", gate_up)
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    rows = out.numel() // max(width, 1)
    place.run("silu_mul", gate_up.device, gate_up.data_ptr(), out.data_ptr(), rows, width, dtype)
    return out


def _silu_mul_fake(gate_up: Tensor) -> Tensor:
    _silu_mul_check(gate_up)
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


_register_kernel("silu_mul(Tensor gate_up) -> Tensor", _silu_mul_on, _silu_mul_fake)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``gate_up = [gate, up]`` side by side, in fp32, rounded once.

    Args:
        gate_up: ``[..., 2 * width]``, float32 or bfloat16.

    Returns:
        ``[..., width]``, the dtype of ``gate_up``.

    Raises:
        ValueError: the last dimension is odd. TypeError: the dtype does not fit.
    """
    if _direct("silu_mul", gate_up):
        return _silu_mul_on(_CPU, gate_up)
    return torch.ops.dflash.silu_mul(gate_up)


# ---------------------------------------------------------------------------------------------- fuse_features


def _fuse_features_check(context: Tensor, num_context: Tensor, fc_weight: Tensor, norm_weight: Tensor) -> None:
    if fc_weight.dim() != 2:
        raise ValueError(f"fuse_features: fc_weight must be [hidden, taps * hidden], got {fc_weight.dim()} dimensions")
    hidden, width = fc_weight.shape
    _expect("fuse_features", "context", context, (None, None, width), fc_weight.dtype, "batch, rows, taps * hidden")
    _expect("fuse_features", "num_context", num_context, (context.shape[0],), torch.int64, "batch")
    _expect("fuse_features", "norm_weight", norm_weight, (hidden,), fc_weight.dtype, "hidden")


def _fuse_features_on(
    place, context: Tensor, num_context: Tensor, fc_weight: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    _fuse_features_check(context, num_context, fc_weight, norm_weight)
    place.dtype("fuse_features", "context", context)
    return _rms_norm_on(place, _linear_on(place, context, fc_weight, None), norm_weight, eps, num_context)


def _fuse_features_fake(
    context: Tensor, num_context: Tensor, fc_weight: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    _fuse_features_check(context, num_context, fc_weight, norm_weight)
    return context.new_empty(*context.shape[:-1], fc_weight.shape[0])


_register_kernel(
    "fuse_features(Tensor context, Tensor num_context, Tensor fc_weight, Tensor norm_weight, float eps) -> Tensor",
    _fuse_features_on,
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
    if _direct("fuse_features", context, num_context, fc_weight, norm_weight):
        return _fuse_features_on(_CPU, context, num_context, fc_weight, norm_weight, eps)
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


def _qkv_norm_rope_append_on(
    place, qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None, eps: float, q_out: Tensor, k_cache: Tensor, v_cache: Tensor,
) -> None:  # fmt: skip
    _qkv_norm_rope_append_check(qkv, positions, cos, sin, q_norm_weight, k_norm_weight, eps, q_out, k_cache, v_cache)
    dtype = place.dtype("qkv_norm_rope_append_", "qkv", qkv)
    qkv, positions, cos, sin = qkv.contiguous(), positions.contiguous(), cos.contiguous(), sin.contiguous()
    q_norm_weight, k_norm_weight = _dense(q_norm_weight), _dense(k_norm_weight)
    batch, q_rows, num_heads, head_dim = q_out.shape
    place.run(
        "qkv_norm_rope_append", qkv.device, qkv.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        _address(q_norm_weight), _address(k_norm_weight), q_out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        batch, qkv.shape[1], q_rows, num_heads, k_cache.shape[1], head_dim, cos.shape[-1], k_cache.shape[2], eps, dtype,
    )  # fmt: skip


_register_kernel(
    "qkv_norm_rope_append_(Tensor qkv, Tensor positions, Tensor cos, Tensor sin, Tensor? q_norm_weight, "
    "Tensor? k_norm_weight, float eps, Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache) -> ()",
    _qkv_norm_rope_append_on,
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


def _append_context_kv_on(
    place, kv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_norm_weight: Tensor | None, eps: float,
    k_caches: list[Tensor], v_caches: list[Tensor],
) -> None:  # fmt: skip
    _append_context_kv_check(kv, positions, cos, sin, k_norm_weight, eps, k_caches, v_caches)
    dtype = place.dtype("append_context_kv_", "kv", kv)
    if not k_caches:
        return
    kv, positions, cos, sin = kv.contiguous(), positions.contiguous(), cos.contiguous(), sin.contiguous()
    k_norm_weight = _dense(k_norm_weight)
    batch, num_kv_heads, capacity, head_dim = k_caches[0].shape
    place.run(
        "append_context_kv", kv.device, kv.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        _address(k_norm_weight), [cache.data_ptr() for cache in k_caches], [cache.data_ptr() for cache in v_caches],
        batch, kv.shape[2], num_kv_heads, head_dim, cos.shape[-1], capacity, eps, dtype,
    )  # fmt: skip


_register_kernel(
    "append_context_kv_(Tensor kv, Tensor positions, Tensor cos, Tensor sin, Tensor? k_norm_weight, float eps, "
    "Tensor(a!)[] k_caches, Tensor(b!)[] v_caches) -> ()",
    _append_context_kv_on,
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
    op, dtype = "append_kv_", key.dtype
    if key.dim() == v_cache.dim() == 4 and k_cache.is_contiguous() and v_cache.is_contiguous():
        (batch, heads, rows, head_dim), (_, _, capacity, v_head_dim) = key.shape, v_cache.shape
        if capacity > 0 and _fit(
            (value, (batch, heads, rows, v_head_dim), dtype),
            (positions, (batch, rows), torch.int64),
            (k_cache, (batch, heads, capacity, head_dim), dtype),
            (v_cache, (batch, heads, capacity, v_head_dim), dtype),
        ):
            return
    _expect(op, "key", key, (None, None, None, None), key.dtype, "batch, num_kv_heads, rows, head_dim")
    batch, heads, rows, head_dim = key.shape
    names = "batch, num_kv_heads, rows, v_head_dim"
    _expect(op, "value", value, (batch, heads, rows, None), key.dtype, names)
    _expect(op, "positions", positions, (batch, rows), torch.int64, "batch, rows")
    _expect_cache(op, ("k_cache", "v_cache"), k_cache, v_cache, batch, heads, (head_dim, value.shape[-1]), key.dtype)


def _append_kv_on(place, key: Tensor, value: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    _append_kv_check(key, value, positions, k_cache, v_cache)
    dtype = place.dtype("append_kv_", "key", key)
    key, value, positions = _unit_stride(key), _unit_stride(value), positions.contiguous()
    batch, num_kv_heads, rows, head_dim = key.shape
    _, _, capacity, v_head_dim = v_cache.shape
    place.run(
        "append_kv", key.device, key.data_ptr(), value.data_ptr(), positions.data_ptr(), k_cache.data_ptr(),
        v_cache.data_ptr(), key.stride()[:3], value.stride()[:3], batch, rows, num_kv_heads, head_dim, v_head_dim,
        capacity, dtype,
    )  # fmt: skip


_register_kernel(
    "append_kv_(Tensor key, Tensor value, Tensor positions, Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()",
    _append_kv_on,
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
    if _direct("append_kv_", key, value, positions, k_cache, v_cache):
        _append_kv_on(_CPU, key, value, positions, k_cache, v_cache)
    else:
        torch.ops.dflash.append_kv_(key, value, positions, k_cache, v_cache)


# ---------------------------------------------------------------------------------------------- block_attention


def _block_attention_check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, causal: bool, window: int,
    softcap: float, sinks: Tensor | None, ancestors: Tensor | None,
) -> None:  # fmt: skip
    op = "block_attention"
    if q.dim() == v_cache.dim() == 4 and sinks is None and ancestors is None and window >= 0 and softcap >= 0:
        (batch, _, num_heads, head_dim), (_, num_kv_heads, capacity, v_head_dim) = q.shape, v_cache.shape
        if (
            num_kv_heads > 0
            and num_heads % num_kv_heads == 0
            and capacity > 0
            and head_dim > 0
            and _fit(
                (k_cache, (batch, num_kv_heads, capacity, head_dim), q.dtype),
                (v_cache, (batch, num_kv_heads, capacity, v_head_dim), q.dtype),
                (lengths, (batch,), torch.int64),
            )
        ):
            return
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


_TILE_ROWS, _MAX_HEAD_DIM, _FIRST_CHUNK, _CHUNKS_PER_OCTAVE = 64, 256, 256, 4  # as in csrc/cuda/block_attention.cu


def _chunks(capacity: int) -> int:
    """How many chunks the CUDA kernel cuts a cache into: 256 slots each up to 1024, then four to an octave."""
    first = (capacity - 1) // _FIRST_CHUNK
    if first < _CHUNKS_PER_OCTAVE:
        return first + 1
    octave = (first // _CHUNKS_PER_OCTAVE).bit_length() - 1
    return _CHUNKS_PER_OCTAVE * (octave + 1) + (first >> octave) % _CHUNKS_PER_OCTAVE + 1


def _attention_workspace(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[int, int]:
    """``(splits, bytes)`` for the CUDA kernel, from shapes alone: 0 splits for the plain kernel, 1 where tiles of rows
    fill a GPU by themselves, else one a chunk of the capacity."""
    batch, rows, num_heads, head_dim = q.shape
    _, num_kv_heads, capacity, v_head_dim = v_cache.shape
    dim = max(head_dim, v_head_dim)
    fits = q.dtype != torch.float32 and head_dim % 8 == v_head_dim % 8 == 0 and dim <= _MAX_HEAD_DIM
    if not fits or not _aligned(k_cache, v_cache):
        return 0, 0
    tiles = -(-rows * (num_heads // num_kv_heads) // _TILE_ROWS) * batch * num_kv_heads
    splits = _chunks(capacity) if tiles <= _NUM_COUNTERS else 1
    width = 64 if dim <= 64 else 128 if dim <= 128 else 256
    return splits, tiles * splits * _TILE_ROWS * (width + max(8, width // 16)) * 4  # out, top and sum of each thread


def _block_attention_on(
    place, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, causal: bool, window: int,
    softcap: float, sinks: Tensor | None, ancestors: Tensor | None,
) -> Tensor:  # fmt: skip
    _block_attention_check(q, k_cache, v_cache, lengths, scale, causal, window, softcap, sinks, ancestors)
    dtype = place.dtype("block_attention", "q", q)
    if place is _CPU and ancestors is not None:
        raise NotImplementedError("block_attention: ancestors has no CPU kernel yet")
    q, k_cache, v_cache, lengths = _unit_stride(q), k_cache.contiguous(), v_cache.contiguous(), lengths.contiguous()
    sinks, ancestors = None if sinks is None else sinks.float().contiguous(), _dense(ancestors)
    batch, rows, num_heads, head_dim = q.shape
    _, num_kv_heads, capacity, v_head_dim = v_cache.shape
    if v_head_dim == head_dim:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # half the time of new_empty
    else:
        out = q.new_empty(batch, rows, num_heads, v_head_dim)
    splits, workspace, counters = 0, None, None
    if place is not _CPU:
        splits, size = _attention_workspace(q, k_cache, v_cache)
        if splits:
            workspace, counters = place.scratch(size, q.device), _counters(q.device)
            if any(stride % 8 for stride in q.stride()[:3]) or not _aligned(q):
                q = q.clone(memory_format=torch.contiguous_format)
    place.run(
        "block_attention", q.device, q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), lengths.data_ptr(),
        _address(sinks), out.data_ptr(), q.stride()[:3], batch, rows, num_heads, num_kv_heads, head_dim, v_head_dim,
        capacity, min(window, capacity), scale, softcap, causal, _address(ancestors), _address(workspace),
        _address(counters), splits, dtype,
    )  # fmt: skip
    return out


def _block_attention_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, causal: bool, window: int,
    softcap: float, sinks: Tensor | None, ancestors: Tensor | None,
) -> Tensor:  # fmt: skip
    _block_attention_check(q, k_cache, v_cache, lengths, scale, causal, window, softcap, sinks, ancestors)
    return q.new_empty(*q.shape[:-1], v_cache.shape[-1])


_register_kernel(
    "block_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, float scale, bool causal, int window, "
    "float softcap, Tensor? sinks, Tensor? ancestors) -> Tensor",
    _block_attention_on,
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
        q: ``[batch, rows, num_heads, head_dim]``, float32 or bfloat16 (on CUDA float16 too), any strides.
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

    On CUDA tensor cores do the work in bfloat16 and float16 where both head dimensions are multiples of 8 up to 256,
    and a plain kernel does elsewhere.

    Returns:
        ``[batch, rows, num_heads, v_head_dim]``, the dtype of ``q``; zeros for a query that sees no key.

    Raises:
        ValueError: a shape or a value does not fit. TypeError: a dtype does not fit.
        NotImplementedError: ``ancestors`` on CPU.
    """
    if _direct("block_attention", q, k_cache, v_cache, lengths, sinks, ancestors):
        return _block_attention_on(_CPU, q, k_cache, v_cache, lengths, scale, causal, window, softcap, sinks, ancestors)
    return torch.ops.dflash.block_attention(
        q, k_cache, v_cache, lengths, scale, causal, window, softcap, sinks, ancestors
    )


# ---------------------------------------------------------------------------------------------- linear

_SKINNY = {torch.float32: 256, torch.bfloat16: 64}  # rows up to which the kernel beats torch's GEMM


def skinny(rows: int, dtype: torch.dtype) -> bool:
    """Whether a product of this many rows goes through the kernel of :func:`linear` on CPU, or through torch."""
    return rows <= _SKINNY.get(dtype, 0)


def _linear_check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _one_linear_check("linear", x, "weight", weight, "bias", bias)


def _linears_check(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> None:
    if not 1 <= len(weights) <= _MAX_WEIGHTS:
        raise ValueError(f"linears: weights must be 1 to {_MAX_WEIGHTS} tensors, got {len(weights)}")
    if len(biases) not in (0, len(weights)):
        raise ValueError(f"linears: biases must be none or one for each of {len(weights)} weights, got {len(biases)}")
    for i, weight in enumerate(weights):
        bias = biases[i] if biases else None
        _one_linear_check("linears", x, f"weights[{i}]", weight, f"biases[{i}]", bias)


def _one_linear_check(op: str, x: Tensor, name: str, weight: Tensor, bias_name: str, bias: Tensor | None) -> None:
    if weight.dim() != 2:
        raise ValueError(f"{op}: {name} must be [out, in], got {weight.dim()} dimensions")
    if x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{op}: x must be [..., rows, {weight.shape[1]}] as {name} says, got {list(x.shape)}")
    if weight.dtype != x.dtype:
        raise TypeError(f"{op}: {name} must be {x.dtype} as x is, got {weight.dtype}")
    if bias is not None:
        _expect(op, bias_name, bias, (weight.shape[0],), x.dtype, "out")


_FEATURES, _INNER, _MAX_ROWS = 128, 64, 64  # as in csrc/cuda/linear.cu
_MAX_WEIGHTS = 4  # kMaxLinearWeights of csrc/params.h


def _slices(tiles: int, width: int) -> int:
    """How many slices the CUDA kernel cuts the inner dimension into, none of them empty; about 256 blocks in all.

    Args:
        tiles: of 128 output features.
        width: the inner dimension.
    """
    steps = -(-width // _INNER)
    slices = max(1, min(256 // tiles, steps // 4))
    return -(-steps // -(-steps // slices))


def _linear_on(place, x: Tensor, weight: Tensor, bias: Tensor | None, prefetch: bool = False) -> Tensor:
    _linear_check(x, weight, bias)
    return _products(place, "linear", x, [weight], [bias], prefetch)


def _linears_on(place, x: Tensor, weights: list[Tensor], biases: list[Tensor], prefetch: bool = False) -> Tensor:
    _linears_check(x, weights, biases)
    return _products(place, "linears", x, weights, biases or [None] * len(weights), prefetch)


def _products(place, op: str, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], prefetch: bool) -> Tensor:
    """``x @ weight.T + bias`` of each, side by side, ``[..., rows, sum of out]``; the operands fit."""
    dtype = place.dtype(op, "x", x)
    width, rows = x.shape[-1], x.shape[:-1].numel()
    features = [weight.shape[0] for weight in weights]
    if place is _CPU:
        fits = width > 0 and skinny(rows, x.dtype)
    else:
        fits = x.dtype != torch.float32 and 0 < rows <= _MAX_ROWS and width > 0 and width % 8 == 0 and sum(features) > 0
        fits = fits and all(weight.is_contiguous() for weight in weights) and _aligned(*weights)
    if not fits:
        out = [torch.nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return out[0] if len(out) == 1 else torch.cat(out, -1)
    x, weights, biases = x.contiguous(), [w.contiguous() for w in weights], [_dense(bias) for bias in biases]
    out = x.new_empty(*x.shape[:-1], sum(features))
    slices, workspace, counters = 1, None, None
    if place is not _CPU:
        x = x if _aligned(x) else x.clone()
        tiles = sum(-(-count // _FEATURES) for count in features)
        slices = _slices(tiles, width)
        if slices > 1:
            padded = 16 if rows <= 16 else 32 if rows <= 32 else 64
            size = tiles * slices * _FEATURES * padded * 4
            workspace, counters = place.scratch(size, x.device), _counters(x.device)
    flat = [word for w, b, n in zip(weights, biases, features, strict=True) for word in (w.data_ptr(), _address(b), n)]
    place.run(
        "linear", x.device, x.data_ptr(), flat, out.data_ptr(), rows, width, _address(workspace), _address(counters),
        slices, prefetch, dtype,
    )  # fmt: skip
    return out


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, prefetch: bool) -> Tensor:
    _linear_check(x, weight, bias)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _linears_fake(x: Tensor, weights: list[Tensor], biases: list[Tensor], prefetch: bool) -> Tensor:
    _linears_check(x, weights, biases)
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


_register_kernel("linear(Tensor x, Tensor weight, Tensor? bias, bool prefetch) -> Tensor", _linear_on, _linear_fake)
_register_kernel(
    "linears(Tensor x, Tensor[] weights, Tensor[] biases, bool prefetch) -> Tensor", _linears_on, _linears_fake
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, prefetch: bool = False) -> Tensor:
    """``x @ weight.T + bias`` for a few rows, sums in fp32, rounded once.

    A row's bits depend neither on its place nor on how many rows there are: on CPU up to 256 rows in float32 and 64 in
    bfloat16, on CUDA up to 64 rows in bfloat16 and float16 where ``in`` is a multiple of 8. Anything else goes through
    torch.

    Args:
        x: ``[..., rows, in]``, float32 or bfloat16 (on CUDA float16 too).
        weight: ``[out, in]``, the dtype of ``x``.
        bias: ``[out]``, the dtype of ``x``, or None.
        prefetch: start to read ``weight`` before what was queued ahead on the stream has ended, on CUDA from compute
            capability 9.0. For weights at rest alone: one that an operation still under way writes may be read too
            early, and nothing would say so.

    Returns:
        ``[..., rows, out]``, the dtype of ``x``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    if _direct("linear", x, weight, bias):
        return _linear_on(_CPU, x, weight, bias)
    return torch.ops.dflash.linear(x, weight, bias, prefetch)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), prefetch: bool = False) -> Tensor:
    """:func:`linear` of the same rows with several weights, the results side by side, in one kernel.

    Args:
        x: ``[..., rows, in]``, as for :func:`linear`.
        weights: one to four of ``[out, in]``, each with an ``out`` of its own, the dtype of ``x``.
        biases: ``[out]`` for each weight, or none at all.
        prefetch: as for :func:`linear`.

    Returns:
        ``[..., rows, sum of out]``, the dtype of ``x``.

    Raises:
        ValueError: a shape or a number of tensors does not fit. TypeError: a dtype does not fit.
    """
    weights, biases = list(weights), list(biases)
    if _direct("linears", x, *weights, *biases):
        return _linears_on(_CPU, x, weights, biases)
    return torch.ops.dflash.linears(x, weights, biases, prefetch)


# ---------------------------------------------------------------------------------------------- decoder_layers

_LAYER_WEIGHTS = ("input_norm", "q", "k", "v", "o", "post_norm", "gate", "up", "down")
_plans: dict[tuple, list[int]] = {}  # what was checked once for these addresses and shapes
_MAX_PLANS = 64


def _decoder_layers_check(
    hidden: Tensor, context: Tensor | None, num_context: Tensor | None, lengths: Tensor, cos: Tensor, sin: Tensor,
    weights: list[Tensor], head_norms: list[Tensor], biases: list[Tensor], sinks: list[Tensor], norm: Tensor,
    eps: float, scale: float, causal: list[int], windows: list[int], taps: list[int], k_caches: list[Tensor],
    v_caches: list[Tensor],
) -> None:  # fmt: skip
    op = "decoder_layers"
    layers, dtype = len(k_caches), hidden.dtype
    _expect(op, "hidden", hidden, (None, None, None), dtype, "batch, rows, hidden")
    batch, _, size = hidden.shape
    if (context is None) != (num_context is None):
        raise ValueError(f"{op}: context and num_context come together, got one of them")
    if context is not None:
        _expect(op, "context", context, (batch, None, size), dtype, "batch, context_rows, hidden")
        _expect(op, "num_context", num_context, (batch,), torch.int64, "batch")
    _expect(op, "lengths", lengths, (batch,), torch.int64, "batch")
    if layers == 0:
        raise ValueError(f"{op}: k_caches must have one tensor a layer, got none")
    for name, given, wanted in (
        ("v_caches", v_caches, (layers,)),
        ("weights", weights, (layers * len(_LAYER_WEIGHTS),)),
        ("head_norms", head_norms, (0, 2 * layers)),
        ("biases", biases, (0, 4 * layers)),
        ("sinks", sinks, (0, layers)),
        ("causal", causal, (layers,)),
        ("windows", windows, (layers,)),
    ):
        if len(given) not in wanted:
            raise ValueError(f"{op}: {name} must have {' or '.join(map(str, wanted))} entries, got {len(given)}")
    if bad := [tap for tap in taps if not 0 <= tap < layers] or len(set(taps)) != len(taps):
        raise ValueError(f"{op}: taps must be different layers in 0 .. {layers - 1}, got {taps}: {bad}")
    if min(windows) < 0:
        raise ValueError(f"{op}: windows must be positive, or 0 for none, got {windows}")
    _, kv_heads, _, head_dim = k_caches[0].shape if k_caches[0].dim() == 4 else (0, 0, 0, 0)
    for index, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        at = (f"k_caches[{index}]", f"v_caches[{index}]")
        _expect_cache(op, at, k_cache, v_cache, batch, kv_heads, (head_dim, head_dim), dtype)
        if k_cache.shape != k_caches[0].shape:
            raise ValueError(f"{op}: {at[0]} must be {list(k_caches[0].shape)}, got {list(k_cache.shape)}")
    _expect(op, "weights[1]", weights[1], (None, size), dtype, "num_heads * head_dim, hidden")
    _expect(op, "weights[6]", weights[6], (None, size), dtype, "width, hidden")
    q_size, kv_size, width = weights[1].shape[0], kv_heads * head_dim, weights[6].shape[0]
    if not kv_size or q_size % head_dim or q_size // head_dim % kv_heads:
        raise ValueError(
            f"{op}: weights[1] must have a multiple of {kv_heads} heads of {head_dim}, got {list(weights[1].shape)}"
        )
    shapes = (
        (size,), (q_size, size), (kv_size, size), (kv_size, size), (size, q_size), (size,), (width, size),
        (width, size), (size, width),
    )  # fmt: skip
    for index, weight in enumerate(weights):
        layer, part = divmod(index, len(shapes))
        _expect(op, f"weights[{index}]", weight, shapes[part], dtype, f"{_LAYER_WEIGHTS[part]} of layer {layer}")
    for index, weight in enumerate(head_norms):
        _expect(op, f"head_norms[{index}]", weight, (head_dim,), dtype, "head_dim")
    for index, bias in enumerate(biases):
        size_of = (q_size, kv_size, kv_size, size)[index % 4]
        if bias.numel():
            _expect(op, f"biases[{index}]", bias, (size_of,), dtype, "out, or empty for none")
    for index, sink in enumerate(sinks):
        _expect(op, f"sinks[{index}]", sink, (q_size // head_dim,), sink.dtype, "num_heads")
    _expect(op, "norm", norm, (size,), dtype, "hidden")
    _expect(op, "cos", cos, (None, None), torch.float32, "positions, rotary / 2")
    _expect(op, "sin", sin, tuple(cos.shape), torch.float32, "positions, rotary / 2")
    if cos.shape[0] == 0 or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"{op}: cos must be [positions, at most head_dim / 2 = {head_dim // 2}], got {list(cos.shape)}"
        )
    for name, given in (("weights", weights), ("head_norms", head_norms), ("biases", biases)):
        for index, tensor in enumerate(given):
            if not tensor.is_contiguous():
                raise ValueError(f"{op}: {name}[{index}] must be contiguous, got strides {tensor.stride()}")
    if not (cos.is_contiguous() and sin.is_contiguous() and norm.is_contiguous()):
        raise ValueError(f"{op}: cos, sin and norm must be contiguous")


def _decoder_layers_cpu(
    hidden: Tensor, context: Tensor | None, num_context: Tensor | None, lengths: Tensor, cos: Tensor, sin: Tensor,
    weights: list[Tensor], head_norms: list[Tensor], biases: list[Tensor], sinks: list[Tensor], norm: Tensor,
    eps: float, scale: float, causal: list[int], windows: list[int], taps: list[int], k_caches: list[Tensor],
    v_caches: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # A model's weights and caches stay where they are: what was checked for these addresses is not checked again.
    tensors = (cos, sin, norm, *weights, *head_norms, *biases, *k_caches, *v_caches)
    varying = (hidden, context, num_context, lengths, cos, sin, norm, *weights[1:7:5], *k_caches[:1])
    key = (
        tuple(map(Tensor.data_ptr, tensors)), tuple(None if t is None else (t.shape, t.dtype) for t in varying),
        len(weights), len(head_norms), len(biases), len(sinks), len(k_caches), tuple(causal), tuple(windows),
        tuple(taps),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        _decoder_layers_check(
            hidden, context, num_context, lengths, cos, sin, weights, head_norms, biases, sinks, norm, eps, scale,
            causal, windows, taps, k_caches, v_caches,
        )  # fmt: skip
        _dtype("decoder_layers", "hidden", hidden)
        plan = []
        for i in range(len(k_caches)):
            plan += [t.data_ptr() for t in weights[9 * i : 9 * i + 9]]
            plan += [t.data_ptr() for t in head_norms[2 * i : 2 * i + 2]] or [0, 0]
            plan += [t.data_ptr() for t in biases[4 * i : 4 * i + 4]] or [0, 0, 0, 0]
            tap = taps.index(i) if i in taps else -1
            plan += [0, k_caches[i].data_ptr(), v_caches[i].data_ptr(), causal[i]]
            plan += [min(windows[i], k_caches[i].shape[2]), tap]
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    wide = [sink.float().contiguous() for sink in sinks]
    if wide:
        plan = plan.copy()
        for i, sink in enumerate(wide):
            plan[21 * i + 15] = sink.data_ptr()
    hidden, lengths = hidden.contiguous(), lengths.contiguous()
    context, num_context = _dense(context), _dense(num_context)
    batch, rows, size = hidden.shape
    _, kv_heads, capacity, head_dim = k_caches[0].shape
    out, tapped = torch.empty_like(hidden), hidden.new_empty(batch, rows, len(taps) * size)
    _C.decoder_layers(
        plan, hidden.data_ptr(), _address(context), _address(num_context), lengths.data_ptr(), cos.data_ptr(),
        sin.data_ptr(), norm.data_ptr(), out.data_ptr(), tapped.data_ptr(),
        (
            batch, rows, 0 if context is None else context.shape[1], size, weights[6].shape[0],
            weights[1].shape[0] // head_dim, kv_heads, head_dim, cos.shape[1], cos.shape[0], capacity, len(taps),
            len(k_caches),
        ),
        scale, eps, _DTYPES[hidden.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out, tapped


def _decoder_layers_fake(hidden: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    _decoder_layers_check(hidden, *arguments)
    taps = arguments[14]
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return out, hidden.new_empty(*hidden.shape[:2], len(taps) * hidden.shape[2])


_register(
    "decoder_layers(Tensor hidden, Tensor? context, Tensor? num_context, Tensor lengths, Tensor cos, Tensor sin, "
    "Tensor[] weights, Tensor[] head_norms, Tensor[] biases, Tensor[] sinks, Tensor norm, float eps, float scale, "
    "int[] causal, int[] windows, int[] taps, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches) -> (Tensor, Tensor)",
    _decoder_layers_cpu,
    _decoder_layers_fake,
)


def decoder_layers(
    hidden: Tensor,
    context: Tensor | None,
    num_context: Tensor | None,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: list[Tensor],
    head_norms: list[Tensor],
    biases: list[Tensor],
    sinks: list[Tensor],
    norm: Tensor,
    eps: float,
    scale: float,
    causal: list[int],
    windows: list[int],
    taps: list[int],
    k_caches: list[Tensor],
    v_caches: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """The pre-norm decoder layers of a model (Qwen3, Qwen2, Llama, Mistral) and its final norm, in one call.

    Per layer: RMSNorm, q, k, v, head norms, RoPE, append, attention over the cache, output projection, residual,
    RMSNorm, ``silu(gate) * up``, down projection, residual. K and V also come from the live context rows, as they are
    and without the input norm; those rows have no query. A row's bits depend neither on its place nor on the others.

    Args:
        hidden: ``[batch, rows, hidden]``, float32 or bfloat16; row i of sequence b is at ``lengths[b] + i``.
        context: ``[batch, context_rows, hidden]`` or None: row i is at ``lengths[b] - num_context[b] + i``.
        num_context: ``[batch]`` int64; rows at or past it are never read.
        lengths: ``[batch]`` int64.
        cos, sin: ``[positions, rotary / 2]`` float32, one row a position; positions past the end take the last.
        weights: per layer ``input_norm [hidden]``, ``q [num_heads * head_dim, hidden]``, ``k`` and ``v
            [num_kv_heads * head_dim, hidden]``, ``o [hidden, num_heads * head_dim]``, ``post_norm [hidden]``, ``gate``
            and ``up [width, hidden]``, ``down [hidden, width]``; contiguous.
        head_norms: per layer ``q_norm`` and ``k_norm [head_dim]``, or an empty list.
        biases: per layer those of q, k, v and o, an empty tensor for none; or an empty list.
        sinks: per layer ``[num_heads]``, or an empty list.
        norm: ``[hidden]``, the final norm.
        eps: of every norm.
        scale: the factor on the scores.
        causal: per layer, 1 or 0.
        windows: per layer, as in :func:`block_attention`; 0 for none.
        taps: the layers whose outputs are returned; the last layer's is past the final norm.
        k_caches, v_caches: per layer ``[batch, num_kv_heads, capacity, head_dim]``, contiguous; written.

    Returns:
        ``(out [batch, rows, hidden], tapped [batch, rows, taps * hidden])``, ``out`` past the final norm.

    Raises:
        ValueError: a shape does not fit, or a tensor is not contiguous. TypeError: a dtype does not fit.
    """
    if _direct("decoder_layers", hidden, context, num_context, lengths, cos, sin, *weights, *k_caches, *v_caches):
        return _decoder_layers_cpu(
            hidden, context, num_context, lengths, cos, sin, weights, head_norms, biases, sinks, norm, eps, scale,
            causal, windows, taps, k_caches, v_caches,
        )  # fmt: skip
    return torch.ops.dflash.decoder_layers(
        hidden, context, num_context, lengths, cos, sin, weights, head_norms, biases, sinks, norm, eps, scale, causal,
        windows, taps, k_caches, v_caches,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- select_tokens


_SELECT_SLICE = 8192  # kSelectSlice of csrc/params.h


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
    one, real, whole = (batch,), torch.float32, torch.int64
    if _fit(
        (positions, (batch, rows), whole), (seeds, one, whole), (temperature, one, real), (top_k, one, whole),
        (top_p, one, real), (min_p, one, real), (sharpness, one, real),
    ):  # fmt: skip
        return
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


def _select_tokens_on(place, logits: Tensor, positions: Tensor, *parameters: Tensor) -> Tensor:
    _select_tokens_check(logits, positions, *parameters)
    dtype = place.dtype("select_tokens", "logits", logits)
    inputs = (logits, positions, *parameters)
    if not all(map(Tensor.is_contiguous, inputs)):
        inputs = [x.contiguous() for x in inputs]
    ids = torch.empty_like(positions, memory_format=torch.contiguous_format)
    partial = place.scratch(ids.numel() * -(-logits.shape[-1] // _SELECT_SLICE) * 16, logits.device)
    place.run(
        "select_tokens", logits.device, *map(Tensor.data_ptr, inputs), ids.data_ptr(), _address(partial),
        *logits.shape, dtype,
    )  # fmt: skip
    return ids


def _select_tokens_fake(logits: Tensor, positions: Tensor, *parameters: Tensor) -> Tensor:
    _select_tokens_check(logits, positions, *parameters)
    return positions.new_empty(positions.shape)


_register_kernel(
    "select_tokens(Tensor logits, Tensor positions, Tensor seeds, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor min_p, Tensor sharpness) -> Tensor",
    _select_tokens_on,
    _select_tokens_fake,
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
    if _direct("select_tokens", logits, positions, seeds, temperature, top_k, top_p, min_p, sharpness):
        return _select_tokens_on(_CPU, logits, positions, seeds, temperature, top_k, top_p, min_p, sharpness)
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


def _accept_prefix_on(place, *tensors: Tensor) -> None:
    _accept_prefix_check(*tensors)
    block_ids, posterior, stop_token_ids, limits, *state = tensors
    inputs = [x.contiguous() for x in (block_ids, posterior, stop_token_ids, limits)]
    place.run(
        "accept_prefix", block_ids.device, *(x.data_ptr() for x in (*inputs, *state)),
        *block_ids.shape, stop_token_ids.shape[0], state[0].shape[1],
    )  # fmt: skip


def _accept_prefix_fake(*tensors: Tensor) -> None:
    _accept_prefix_check(*tensors)


_register_kernel(
    "accept_prefix_(Tensor block_ids, Tensor posterior, Tensor stop_token_ids, Tensor limits, Tensor(a!) tokens, "
    "Tensor(b!) length, Tensor(c!) num_context, Tensor(d!) done) -> ()",
    _accept_prefix_on,
    _accept_prefix_fake,
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
    if _direct("accept_prefix_", block_ids, posterior, stop_token_ids, limits, tokens, length, num_context, done):
        _accept_prefix_on(_CPU, block_ids, posterior, stop_token_ids, limits, tokens, length, num_context, done)
    else:
        torch.ops.dflash.accept_prefix_(block_ids, posterior, stop_token_ids, limits, tokens, length, num_context, done)

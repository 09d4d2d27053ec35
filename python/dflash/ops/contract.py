"""The contract of an op: the shapes, dtypes, layouts and numbers that its arguments must have, in one line per op.

    "x[batch.., rows, hidden] weight[hidden] counts[batch]:i64 tap[batch.., rows, hidden]!="

A name is bound where it first stands and must be the same everywhere else; an expression of names and integer arguments
must come out; ``*`` is any size. ``batch..`` stands for any number of leading dimensions and is their product,
``key_dim?`` for a last dimension that may be missing, ``caches{layers}`` for a list. After the brackets:

    :i64, :f32, :u8   the dtype. Without one it is the op's storage type, which the first such tensor decides.
    :T|f32            the storage type or another; :any is any dtype, :float a floating one that becomes float32.
    :W                that of the values of the call's ``format`` of weights: the storage type or bytes.
    !                 the op writes it: it must be contiguous and share no memory with another argument.
    ~ or ~2           only the last dimension or two must be dense; without it, what is read is made contiguous.
    =                 only its rows must be dense and evenly spaced.

A tensor may be None if the op's signature says so. Matching in C++ (csrc/binding/contract.h) takes about two
microseconds and answers yes or no; `Contract.check` says what is wrong, and makes contiguous what has to be.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from .. import _C

_TENSOR = re.compile(r"(\w+)(?:\{(\w+)\})?\[([^\]]*)\](?::([\w|]+))?([!~=\d]*)")
_DTYPES = {"i64": torch.int64, "f32": torch.float32, "float": torch.float32, "u8": torch.uint8}
_CODES = {"W": -2, "any": -1, "": 0, "T": 0, "i64": 0x040, "f32": 0x220, "float": 0x220, "u8": 0x108}  # of contract.h
_OPERATIONS = (  # as in contract.h
    "constant", "slot", "has", "total_rows", "at_least", "at_most", "Not",
    "ndim", "size", "stride", "row_stride", "itemsize", "is_float32",
    "Add", "Sub", "Mult", "FloorDiv", "Mod", "min", "max", "Eq", "NotEq", "Lt", "LtE", "And", "Or", "row_size",
)  # fmt: skip
_LETTERS = {float: "f", int: "i", bool: "b", str: "o"}  # as in contract.h; all others are tensors, "t"


class Scope(SimpleNamespace):
    """A call's arguments by name, what was read made contiguous, and the names that the contract gives."""


class Spec:
    """One tensor, or list of tensors, of a contract, from the groups of `_TENSOR`.

    Attributes:
        leading: the name of the leading dimensions, if there may be any number.
        sizes: those after the leading ones.
        last_may_miss: a tensor may lack the last dimension.
        layout: 0: dense; -1: evenly spaced rows; else so many last dimensions are dense.
        codes: the dtype and the one that it may be instead, as contract.h has them.
        words: the shape as errors spell it.
    """

    def __init__(self, name: str, count: str, dims: str, dtype: str, flags: str) -> None:
        self.name, self.count, self.dtype = name, count or None, dtype or None
        self.sizes = [dim.strip() for dim in dims.split(",") if dim.strip()]
        self.leading = self.sizes.pop(0)[:-2] if dims.partition(",")[0].endswith("..") else None
        self.last_may_miss = dims.endswith("?")
        words = [dim[:-1] + " or none" if dim.endswith("?") else dim for dim in self.sizes]
        self.words = ", ".join([*(["..."] if self.leading else []), *words])
        first, _, other = dtype.partition("|")
        self.codes = _CODES[first], _CODES[other]
        digits = re.sub(r"\D", "", flags)
        self.layout = -1 if "=" in flags else int(digits or "1") if "~" in flags else 0
        self.is_written, self.is_optional = "!" in flags, False


class Contract:
    """A parsed contract.

    Args:
        op: the op's name.
        parameters: of its signature.
        tensors: the tensors among the arguments.
        returns: new tensors, written in the same way.
        where: conditions, ``;`` between them, each with the words of its error after ``:``, or its own.
        derived: ``name = expression``, ``;`` between them: fields of the kernel's params.
        kernel: the kernel to run, whose fields have the names of the contract.
        choices: the integers that strings stand for, of each argument that has some.
    """

    def __init__(
        self, op: str, parameters: Sequence[inspect.Parameter], tensors: str, returns: str = "", where: str = "",
        derived: str = "", kernel: str = "", choices: dict[str, dict[str, int]] | None = None,
    ) -> None:  # fmt: skip
        # 1. Parse
        self.op, self.kernel, self.choices = op, kernel, choices or {}
        self.parameters = {p.name: p for p in parameters}
        self.tensors, self.outputs = ([Spec(*found) for found in _TENSOR.findall(x)] for x in (tensors, returns))
        for spec in self.tensors:
            spec.is_optional = self.parameters[spec.name].annotation == Tensor | None
        self.storage = next((spec.name for spec in self.tensors if spec.dtype is None), None)
        rules = [map(str.strip, rule.partition(":")) for rule in where.split(";") if rule.strip()]
        self.rules = [(rule, words or f"{rule} must hold", _code(rule)) for rule, _, words in rules]
        pairs = [pair.split("=", 1) for pair in derived.split(";") if pair.strip()]
        self.derived = {name.strip(): (text.strip(), _code(text)) for name, text in pairs}
        sizes = [dim for spec in (*self.tensors, *self.outputs) for dim in spec.sizes]
        self.expressions = {dim: _code(dim) for dim in sizes if not _plain(dim)}
        self.writes = [spec.name for spec in self.tensors if spec.is_written]
        # 2. Give each name that has a number a slot
        names = [name for name, p in self.parameters.items() if p.annotation in (int, bool) or name in self.choices]
        for spec in self.tensors:
            names += [name for name in (spec.leading, spec.count) if name]
            names += [dim.rstrip("?") for dim in spec.sizes if _plain(dim) and dim != "*"]
        self.slots = {name: i for i, name in enumerate(dict.fromkeys([*names, *self.derived]))}
        # 3. Hand it to C++. ``run`` is None if the CPU has no kernel for the whole op
        self.run, self.match, self.has_dtype = _C.contract(op, self._compiled())

    def _compiled(self) -> dict[str, object]:
        """Return the contract as contract.h reads it."""
        names = [*self.parameters]
        arguments = []
        for name, p in self.parameters.items():
            letter = "c" if name in self.choices else _LETTERS.get(p.annotation, "t")
            arguments.append((letter, self.slots[name] if letter in "ibc" else -1))
        sources = {spec.name: ("t", i) for i, spec in enumerate(self.tensors)}
        sources |= {name: ("f", i) for i, name in enumerate(names) if arguments[i][0] == "f"}
        sources |= {name: ("s", slot) for name, slot in self.slots.items()}
        sources |= {spec.name: ("o", i) for i, spec in enumerate(self.outputs)} | {"dtype": ("d", 0)}
        return {
            "arguments": arguments,
            "tensors": [
                (
                    names.index(spec.name), *spec.codes, spec.layout, self.slots.get(spec.leading, -1),
                    self.slots.get(spec.count, -1), spec.is_optional, spec.is_written, spec.last_may_miss,
                    *self._shape(spec),
                )
                for spec in self.tensors
            ],
            "rules": [self._program(text) for text, _, _ in self.rules],
            "derived": [(self.slots[name], self._program(text)) for name, (text, _) in self.derived.items()],
            "outputs": [
                (spec.codes[0], _DTYPES.get(spec.dtype), spec.leading is not None, [*map(self._program, spec.sizes)])
                for spec in self.outputs
            ],
            "parameters": names, "names": [*self.slots], "kernel": self.kernel, "sources": sources,
            "choices": [self.choices.get(name, {}) for name in names], "format": self.slots.get("format", -1),
        }  # fmt: skip

    def _shape(self, spec: Spec) -> tuple[list[int], list[tuple[int, list]]]:
        """Return the slot that each dimension gives its size to, or -1, and programs for the sizes of others."""
        dims = [dim.rstrip("?") for dim in spec.sizes]
        names = [-1 if dim in self.derived else self.slots.get(dim, -1) for dim in dims]
        programs = [(i, self._program(dim)) for i, dim in enumerate(dims) if dim != "*" and names[i] < 0]
        return names, programs

    def _program(self, text: str) -> list[tuple[int, int, int]]:
        """Compile an expression for the stack machine of contract.h."""
        places = {spec.name: i for i, spec in enumerate(self.tensors)}

        def step(name: str, place: int = 0, number: int = 0) -> list[tuple[int, int, int]]:
            return [(_OPERATIONS.index(name), place, number)]

        def apply(name: str, *programs: list) -> list[tuple[int, int, int]]:
            first, *rest = programs
            return first + [x for program in rest for x in (*program, *step(name))]

        def emit(node: ast.expr) -> list[tuple[int, int, int]]:
            match node:
                case ast.Constant():
                    return step("constant", number=int(node.value))
                case ast.Name():
                    return step("slot", self.slots[node.id])
                case ast.BinOp():
                    return apply(type(node.op).__name__, emit(node.left), emit(node.right))
                case ast.UnaryOp(op=ast.Not()):
                    return emit(node.operand) + step("Not")
                case ast.BoolOp():
                    return apply(type(node.op).__name__, *map(emit, node.values))
                case ast.IfExp():
                    test = emit(node.test)
                    first, other = apply("Mult", test, emit(node.body)), emit(node.orelse)
                    return apply("Add", first, apply("Mult", test + step("Not"), other))
                case ast.Compare():
                    sides = [emit(side) for side in (node.left, *node.comparators)]
                    names = [type(operation).__name__ for operation in node.ops]
                    pairs = zip(names, sides, sides[1:], strict=False)
                    tests = [apply("L" + n[1:], b, a) if n[0] == "G" else apply(n, a, b) for n, a, b in pairs]
                    return apply("And", *tests)
                case ast.Call(func=ast.Name(id=("min" | "max" | "row_size") as name)):
                    return apply(name, *map(emit, node.args))
                case ast.Call(func=ast.Name(id=("at_least" | "at_most") as name), args=[ast.Name(id=number), bound]):
                    return emit(bound) + step(name, [*self.parameters].index(number))
                case ast.Call(func=ast.Name(id=name), args=[ast.Name(id=tensor), *dim]):
                    return step(name, places[tensor], dim[0].value if dim else 0)
            raise ValueError(f"{self.op}: a contract cannot say {ast.unparse(node)!r}")

        return emit(ast.parse(text.strip(), mode="eval").body)

    # ------------------------------------------------------------------------------------------ a call

    def check(self, arguments: Sequence[object], at: str = "") -> Scope:
        """Raise for the first thing that is wrong; return the scope of the call. ``at`` stands before the names.

        Raises:
            ValueError: a shape, a number, a layout or memory does not fit. TypeError: a dtype does not fit.
        """
        # 1. Tensors, their devices, and choices
        given = dict(zip(self.parameters, arguments, strict=True))
        env = _FUNCTIONS | dict.fromkeys(self.slots, 0) | given
        found = [(spec, at + name, tensor) for spec, name, tensor in self._tensors(arguments)]
        for _, _, tensor in found:
            if tensor.device != (device := found[0][2].device):  # a kernel would read another device's addresses
                came = f"{list(tensor.shape)} on {tensor.device}"
                raise ValueError(f"{self.op}: all tensors must be on {device} as the first is, got {came}")
        for name, codes in self.choices.items():
            if given[name] not in codes:
                raise ValueError(f"{self.op}: {name} must be one of {', '.join(codes)}, got {given[name]!r}")
            env[name] = codes[given[name]]
        # 2. Dimensions, and the sizes that names stand for
        bound = {name for name, p in self.parameters.items() if p.annotation in (int, bool)}
        for spec in self.tensors:
            if spec.count:
                name, size = spec.count, len(given[spec.name])
                if name in bound and env[name] != size:
                    raise ValueError(f"{self.op}: {spec.name} must have {name} = {env[name]} tensors, got {size}")
                env[name] = size
                bound.add(name)
        leading = None
        for spec, name, tensor in found:
            shape, missing = tensor.shape, len(spec.sizes) - tensor.dim()
            if missing > 0 if spec.leading else missing and not (missing == 1 and spec.last_may_miss):
                raise ValueError(f"{self.op}: {name} must be [{spec.words}], got {len(shape)} dimensions")
            if spec.leading:
                first, shape = shape[:-missing] if missing else (), shape[-missing:] if missing else shape
                leading = first if leading is None else leading
                env[spec.leading] = math.prod(leading)
                bound.add(spec.leading)
            for dim, size in zip(spec.sizes, shape, strict=False):
                if _plain(dim) and dim != "*" and (dim := dim.rstrip("?")) not in bound:
                    env[dim] = size
                    bound.add(dim)
        self._derive(env)  # sizes may be among the derived
        # 3. All sizes, and dtypes
        storage = next((tensor.dtype for spec, _, tensor in found if spec.dtype is None), None)
        dtypes = _DTYPES | {"T": storage, "W": torch.uint8 if env.get("format") else storage}
        for spec, name, tensor in found:
            wanted = [*(leading if spec.leading else ()), *(self.size_of(dim, env) for dim in spec.sizes)]
            wanted = wanted[: tensor.dim() if spec.last_may_miss else None]
            differ = (want is not None and have != want for have, want in zip(tensor.shape, wanted, strict=False))
            if tensor.dim() != len(wanted) or any(differ):
                sizes = ", ".join("*" if size is None else str(size) for size in wanted)
                raise ValueError(f"{self.op}: {name} must be [{spec.words}] = [{sizes}], got {list(tensor.shape)}")
            self._check_dtype(spec, name, tensor, dtypes)
        # 4. Conditions and layouts
        self._check_rules(env, at)
        for spec, name, tensor in found:
            if spec.is_written and spec.layout == 0 and not tensor.is_contiguous():
                raise ValueError(f"{self.op}: {name} is written and must be contiguous, got strides {tensor.stride()}")
            if spec.is_written and spec.layout == -1 and row_stride(tensor) < 0:
                raise ValueError(f"{self.op}: {name} needs dense, evenly spaced rows, got strides {tensor.stride()}")
        # 5. Make dense what is read, and derive the fields from that
        for spec in self.tensors:
            if not spec.is_written and (value := env[spec.name]) is not None:
                env[spec.name] = [_dense(x, spec) for x in value] if spec.count else _dense(value, spec)
        self._derive(env)
        return Scope(arguments=arguments, **{name: env[name] for name in (*given, *self.slots)})

    def _check_rules(self, env: dict[str, object], at: str) -> None:
        for text, words, code in self.rules:
            if not eval(code, env):
                terms = dict.fromkeys(re.findall(r"\w+\(\w+\)|\w+", text))
                came = {term: eval(term, env) for term in terms if term in self.slots or "(" in term}
                came |= {term: env[term] for term in terms if isinstance(env.get(term), float)}
                at_layer = f"{at[:-1]}: " if at else ""
                found = ", ".join(f"{term} = {value}" for term, value in came.items())
                raise ValueError(f"{self.op}: {at_layer}{words}, got {found}")

    def _derive(self, env: dict[str, object]) -> None:
        for name, (_, code) in self.derived.items():
            env[name] = eval(code, env)

    def _check_dtype(self, spec: Spec, name: str, tensor: Tensor, dtypes: dict[str, torch.dtype | None]) -> None:
        if spec.dtype == "any" or (spec.dtype == "float" and tensor.is_floating_point()):
            return
        want, _, other = (spec.dtype or "T").partition("|")
        want = dtypes[want]
        if tensor.dtype not in (want, _DTYPES.get(other)):
            also = f" or {_DTYPES[other]}" if other else ""
            raise TypeError(f"{self.op}: {name} must be {want}{also}, got {tensor.dtype}")

    def _tensors(self, arguments: Sequence[object]) -> list[tuple[Spec, str, Tensor]]:
        found, given = [], dict(zip(self.parameters, arguments, strict=True))
        for spec in self.tensors:
            value = given[spec.name]
            if spec.count:
                found += [(spec, f"{spec.name}[{i}]", tensor) for i, tensor in enumerate(value)]
            elif value is not None:
                found.append((spec, spec.name, value))
            elif not spec.is_optional:
                raise TypeError(f"{self.op}: {spec.name} must be a tensor, got None")
        return found

    def size_of(self, dim: str, env: dict[str, object]) -> int | None:
        """Return the size that a dimension of the contract has where names stand for ``env``; None for any."""
        if dim == "*":
            return None
        return env[dim.rstrip("?")] if _plain(dim) else eval(self.expressions[dim], env)

    def allocate(self, scope: Scope) -> list[Tensor]:
        """Make the results, uninitialized, and put them into the scope."""
        env, made = _FUNCTIONS | vars(scope), []
        like = getattr(scope, self.storage or self.tensors[0].name)
        leading: Sequence[int] = ()
        for spec in self.tensors:
            if spec.leading and (value := getattr(scope, spec.name)) is not None:
                tensor = value[0] if spec.count else value
                leading = tensor.shape[: tensor.dim() - len(spec.sizes)]
                break
        for spec in self.outputs:
            shape = [*(leading if spec.leading else ()), *(self.size_of(dim, env) for dim in spec.sizes)]
            out = like.new_empty(shape, dtype=_DTYPES.get(spec.dtype, like.dtype))
            setattr(scope, spec.name, out)
            made.append(out)
        return made

    # ------------------------------------------------------------------------------------------ memory

    def check_memory(self, arguments: Sequence[object]) -> None:
        """Raise for a tensor that is not in memory, and for one that is written and shares memory with another."""
        found = self._tensors(arguments)
        for _, name, tensor in found:
            expect_memory(self.op, name, tensor)
        for i, (spec, name, tensor) in enumerate(found):
            for j, (_, other_name, other) in enumerate(found if spec.is_written else ()):
                if i != j and _share_memory(tensor, other):
                    raise ValueError(
                        f"{self.op}: {name} is written in place and must not share memory with {other_name}. Pass a "
                        "copy of one of them"
                    )


def _plain(dim: str) -> bool:
    return dim == "*" or dim.rstrip("?").isidentifier()


def _code(text: str) -> object:
    return compile(text.strip(), "<contract>", "eval")


# ---------------------------------------------------------------------------------------------- tensors


def expect_memory(op: str, name: str, tensor: Tensor) -> None:
    """Raise unless the tensor's storage holds all its elements. Storages are freed by FSDP and by offloading."""
    held = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    if (needed := bytes_reached(tensor)) > held:
        raise ValueError(
            f"{op}: {name} must be in memory, but its storage holds {held} of the "
            f"{needed} bytes that {list(tensor.shape)} of {tensor.dtype} reaches: it was freed or cut (by FSDP "
            f"or offloading?). Gather or load it before the call"
        )


def expect_strided(op: str, name: str, tensor: Tensor) -> None:
    """Raise for a tensor that is not plain dense memory with strides."""
    found = "a nested tensor" if tensor.is_nested else "a quantized one" if tensor.is_quantized else tensor.layout
    if found != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor (torch.strided), got {found}. Convert it first")


def bytes_reached(tensor: Tensor) -> int:
    """Return how many bytes of its storage a tensor needs."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + count) * tensor.element_size() if count else 0


def row_stride(tensor: Tensor | None) -> int:
    """Return the stride between the rows of ``[..., hidden]`` if it is the same for all and they are dense; else -1."""
    if tensor is None:
        return 0
    sizes, strides = tensor.shape[:-1], tensor.stride()
    stride = next((strides[i] for i in reversed(range(len(sizes))) if sizes[i] > 1), tensor.shape[-1])
    expected, is_even = stride, strides[-1] == 1 or tensor.shape[-1] == 1
    for size, have in zip(reversed(sizes), reversed(strides[:-1]), strict=True):
        is_even &= size <= 1 or have == expected
        expected *= size
    overlap = stride < tensor.shape[-1] and sizes.numel() > 1
    return -1 if tensor.numel() and (not is_even or overlap) else stride


def _dense(tensor: Tensor, spec: Spec) -> Tensor:
    """Return the tensor itself if its layout is as the contract wants it, else a contiguous copy."""
    if spec.dtype == "float":
        tensor = tensor.float()
    if spec.layout == 0 or tensor.is_contiguous():
        return tensor.contiguous()
    if spec.layout == -1:
        return tensor if row_stride(tensor) >= 0 else tensor.contiguous()
    is_dense = tensor[(0,) * (tensor.dim() - spec.layout)].is_contiguous()
    return tensor if is_dense else tensor.contiguous()


def _share_memory(first: Tensor, second: Tensor) -> bool:
    """Return True if the spans from the first to the last byte of the two have memory in common."""
    begin, other_begin = first.data_ptr(), second.data_ptr()
    end = begin + bytes_reached(first) - first.storage_offset() * first.element_size()
    other_end = other_begin + bytes_reached(second) - second.storage_offset() * second.element_size()
    return bool(first.numel() and second.numel() and begin < other_end and other_begin < end)


_FUNCTIONS = {
    "__builtins__": {},
    "min": min,
    "max": max,
    "has": lambda tensor: tensor is not None,
    "total_rows": lambda tensors: sum(len(tensor) for tensor in tensors),
    "ndim": lambda tensor: 0 if tensor is None else tensor.dim(),
    "size": lambda tensor, dim: tensor.shape[dim],
    "stride": lambda tensor, dim: 0 if tensor is None else tensor.stride(dim),
    "row_stride": row_stride,
    "itemsize": lambda tensor: 0 if tensor is None else tensor.element_size(),
    "is_float32": lambda tensor: tensor is not None and tensor.dtype == torch.float32,
    "row_size": _C.row_size,
    "at_least": lambda number, bound: number >= bound,
    "at_most": lambda number, bound: number <= bound,
}

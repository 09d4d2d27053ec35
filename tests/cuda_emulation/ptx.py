"""PTX for the emulation: reads what nvcc made of each kernel into the instructions that ptx.cpp executes.

``use(emulation, path)`` makes every launch run the PTX of its kernel, which is in a library such as ``_C`` or in a
folder of files made by ``nvcc -ptx -arch=compute_90``. ``python tests/cuda_emulation/ptx.py PATH RECORD`` prints the
kernels that never ran; its exit code is 1 if there are any.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "machine_code"))
from cubins import functions_of, readable, tool  # noqa: E402

_ENTRY = re.compile(r"^(?:\.visible )?\.entry (\w+)\((.*?)\)[^{]*", re.DOTALL | re.MULTILINE)
_SHARED = re.compile(r"\.shared (?:\.align (\d+) )?\.(\w+) (\w+)(?:\[(\d*)\])?;")
_PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.(\w+) (?:\.ptr[^,]*? )?(\w+)(?:\[(\d+)\])?")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+)<(\d+)>")
_STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[$\w]+):(?!:)|(?P<text>[^;{}]*(?:\{[^}]*\}[^;{}]*)*);)")
_INSTRUCTION = re.compile(
    r"(?:@(?P<negated>!?)(?P<guard>[%$\w]+)\s+)?(?P<opcode>[\w.:]+)\s*(?P<operands>.*)", re.DOTALL
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_WIDTH = {"pred": 4, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4,
          "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip
_DYNAMIC_ALIGNMENT = 128


class Program(NamedTuple):
    """A kernel, as the emulation takes it (``Program`` of ptx.h)."""

    static_shared: int  # bytes of shared memory ahead of the dynamic ones
    slots: bytes  # the registers and constants of a thread as it begins
    named: list[tuple[int, str]]  # slots of special registers by name, and of parameters' addresses by offset
    # Per instruction: opcode, slot of the predicate or -1, negated, operands as (slot, width, extra).
    lines: list[tuple[str, int, bool, list[tuple[int, int, int]]]]


def use(emulation: ModuleType, path: Path, edit: Callable[[str], str] = str) -> None:
    """Run the PTX of a library or folder at every launch from now on; a kernel without PTX fails.

    ``edit`` plants a test's faults in the body of each kernel. The names of kernels that ran are added to the file that
    DFLASH_PTX_RAN names, if it does.
    """
    kernels, names = _kernels(path), functions_of(emulation.__file__)

    def find(offset: int) -> Program:
        if (name := names[offset]) not in kernels:
            raise LookupError(f"{path} has no PTX of {name}")
        if record := os.environ.get("DFLASH_PTX_RAN"):
            with open(record, "a") as file:
                file.write(name + "\n")
        module, parameters, body = kernels[name]
        return _Reader(module, parameters, edit(body)).program()

    emulation.use_ptx(find)


def _kernels(path: Path) -> dict[str, tuple[str, str, str]]:
    """Return the module, the parameters and the body of each kernel by its readable name."""
    with tempfile.TemporaryDirectory() as folder:
        if not path.is_dir():
            subprocess.run(
                [tool("cuobjdump"), "-xptx", "all", str(path.resolve())], cwd=folder, check=True, capture_output=True
            )
            path = Path(folder)
        modules = [file.read_text() for file in sorted(path.glob("*.ptx"))]
    modules = [re.sub(r"//.*", "", module) for module in modules if ".target sm_90" in module]
    if not modules:
        raise FileNotFoundError("no PTX for sm_90 there: build the kernels with CMAKE_CUDA_ARCHITECTURES=90")
    found = [
        (entry[1], (module, entry[2], _block(module, entry.end())))
        for module in modules for entry in _ENTRY.finditer(module)
    ]  # fmt: skip
    return dict(zip(readable([name for name, _ in found]), (kernel for _, kernel in found), strict=True))


def _block(text: str, start: int) -> str:
    """Return what the braces that open at ``start`` hold."""
    depth = 0
    for brace in re.compile("[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : brace.start()]
    raise ValueError("a kernel's PTX does not end")


class _Reader:
    """Reads one kernel."""

    def __init__(self, module: str, parameters: str, body: str) -> None:
        self._body = body
        self._size = 0
        self._constants: dict[bytes, int] = {}
        self._named: dict[str, int] = {}
        self._registers: dict[str, tuple[int, int]] = {}  # the first slot of each bank, and their width
        self._scopes: list[dict[str, tuple[int, int]]] = []
        self._parameters: dict[str, int] = {}
        end = 0
        for align, kind, name, size in _PARAMETER.findall(parameters):
            width = _WIDTH[kind] * int(size or 1)
            offset = _aligned(end, int(align or width))
            self._parameters[name], end = offset, offset + width
        self._shared: dict[str, int] = {}
        self._static = 0
        for align, kind, name, size in _SHARED.findall(module):
            if size == "":  # of one element, or dynamic and so without one
                size = "1"
            if re.search(rf"\b{re.escape(name)}\b", self._body):
                self._shared[name] = _aligned(self._static, int(align or _WIDTH[kind]))
                self._static = self._shared[name] + int(size) * _WIDTH[kind]
        self._static = _aligned(self._static, _DYNAMIC_ALIGNMENT)
        for name in re.findall(r"\.extern \.shared [^;]*?(\w+)\[\];", module):
            self._shared[name] = self._static

    def program(self) -> Program:
        labels: dict[str, int] = {}
        lines = []
        for text in self._statements(labels, lines):
            if match := _REGISTERS.match(text):
                self._registers[match[2]] = self._take(8 if _WIDTH[match[1]] == 8 else 4, int(match[3]))
            elif text.startswith(".reg"):
                kind, names = re.match(r"\.reg \.(\w+)\s+(.*)", text, re.DOTALL).groups()
                for name in names.split(","):
                    self._scopes[-1][name.strip()] = self._take(8 if _WIDTH[kind] == 8 else 4)
            elif text.startswith((".local", ".global", ".const")):
                raise NotImplementedError(f"PTX declares {text}: add this kind of memory to ptx.cpp")
            elif text and text[0] != ".":
                lines.append(self._instruction(text))
        slots = bytearray(b"\xff" * self._size)  # poison: NaN
        for value, slot in self._constants.items():
            slots[slot : slot + 8] = value
        for _, _, _, operands in lines:
            for at, operand in enumerate(operands):
                if isinstance(operand, str):
                    operands[at] = (0, 8, labels[operand])
        named = [(slot, name) for name, slot in self._named.items()]
        return Program(self._static, bytes(slots), named, lines)

    def _statements(self, labels: dict[str, int], lines: list) -> Iterator[str]:
        at = 0
        while match := _STATEMENT.match(self._body, at):
            at = match.end()
            if match["brace"] == "{":
                self._scopes.append({})
            elif match["brace"]:
                self._scopes.pop()
            elif match["label"]:
                labels[match["label"]] = len(lines)
            else:
                yield match["text"].strip()
        if self._body[at:].strip():
            raise NotImplementedError(f"PTX goes on with {self._body[at : at + 80]!r}")

    def _instruction(self, text: str) -> tuple:
        match = _INSTRUCTION.fullmatch(text)
        opcode, words = match["opcode"], _OPERAND.findall(match["operands"])
        if opcode.startswith("mov.") and any(word.startswith("{") for word in words):
            opcode = opcode.replace("mov.", "mov.pack." if words[1].startswith("{") else "mov.unpack.")
        parts = [part.strip() for word in words for part in re.split(r"[,|]", word.strip("{} "))]
        if re.match(r"bar(rier)?(\.cta)?\.(sync|red)", opcode) and (parts[1] if ".red" in opcode else parts[0]) != "0":
            raise NotImplementedError(f"PTX has {text}: only barrier 0 is known")
        operands = [part if opcode.startswith("bra") else self._operand(part) for part in parts]
        guard = self._operand(match["guard"])[0] if match["guard"] else -1
        return opcode, guard, match["negated"] == "!", operands

    def _operand(self, text: str) -> tuple[int, int, int]:
        if text.startswith("!"):
            return *self._operand(text[1:].strip())[:2], 1
        if text.startswith("["):
            base, _, offset = text[1:-1].partition("+")
            return *self._operand(base.strip())[:2], int(offset or 0)
        for scope in reversed(self._scopes):
            if text in scope:
                return *scope[text], 0
        if (match := re.fullmatch(r"(%[a-z]+)(\d+)", text)) and match[1] in self._registers:
            first, width = self._registers[match[1]]
            return first + width * int(match[2]), width, 0
        if text == "_":
            return *self._take(8), 0
        if text in self._parameters:
            return self._slot_of(str(self._parameters[text])), 8, 0
        if text in self._shared:
            return self._constant(struct.pack("<q", self._shared[text]))
        if text.startswith("%"):
            if not re.fullmatch(r"%laneid|%n?(tid|ctaid)\.[xyz]", text):
                raise NotImplementedError(f"PTX names {text}: add this register to ptx.cpp")
            return self._slot_of(text), 8, 0
        if text.startswith(("0f", "0d")):  # bits of a float or a double
            return self._constant(struct.pack("<Q", int(text[2:], 16)))
        if "." in text:
            return self._constant(struct.pack("<d", float(text)))
        return self._constant(struct.pack("<Q", int(text.rstrip("U"), 0) & (1 << 64) - 1))

    def _take(self, width: int, many: int = 1) -> tuple[int, int]:
        self._size = _aligned(self._size, width)
        slot, self._size = self._size, self._size + width * many
        return slot, width

    def _constant(self, value: bytes) -> tuple[int, int, int]:
        if value not in self._constants:
            self._constants[value] = self._take(8)[0]
        return self._constants[value], 8, 0

    def _slot_of(self, name: str) -> int:
        if name not in self._named:
            self._named[name] = self._take(8)[0]
        return self._named[name]


def _aligned(at: int, to: int) -> int:
    return (at + to - 1) // to * to


def main(path: str, record: str) -> int:
    """Print which kernels of a library or folder a record lacks."""
    kernels, ran = _kernels(Path(path)).keys(), set(Path(record).read_text().splitlines())
    missing = sorted(kernels - ran - {"probe_kernel"})  # which is asked about, and never launched
    print(*(f"never ran: {name}" for name in missing), f"{len(kernels) - len(missing)} of {len(kernels)} kernels ran",
          sep="\n")  # fmt: skip
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

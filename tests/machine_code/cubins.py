"""Kernels as the GPU runs them: instructions with their control flow, registers and shared memory. Needs no GPU.

The tools are looked for in the environment of this Python, where requirements.txt puts them, and then on PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_SECTION = re.compile(r"^\.text\.(\S+):\n(.*?)(?=^\.text\.|\Z)", re.DOTALL | re.MULTILINE)
_LINE = re.compile(
    r"^\s*(?P<label>[.$\w]+):\s*$|^\s*/\*[0-9a-f]{4,}\*/\s+(?P<predicate>@!?U?P\w+ )?\s*(?P<text>\S.*?)\s*;",
    re.MULTILINE,
)
_RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:\d+ SHARED:(\d+)")


def tool(name: str) -> str:
    """Return the path of one of NVIDIA's tools."""
    here = [str(path) for path in Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin")]
    found = shutil.which(name, path=":".join(here)) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is missing: pip install -r tests/machine_code/requirements.txt")
    return found


# Barrier registers, and the instructions at which the threads that share them meet again.
Meetings = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    text: str  # opcode and operands, without the predicate
    conditional: bool  # True if a predicate may skip it

    @property
    def opcode(self) -> str:
        """The opcode with its modifiers, ``LDG.E.128`` for one."""
        return self.text.split()[0]

    def is_a(self, *names: str) -> bool:
        """Return True if the opcode without modifiers is one of ``names``."""
        return self.opcode.split(".")[0] in names


class Kernel:
    """The instructions of a kernel, in the order of their addresses, from what nvdisasm prints of its body.

    Its name is mangled, and its target is 90 for sm_90.
    """

    def __init__(self, name: str, body: str, target: int) -> None:
        self.name, self.target = name, target
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for match in _LINE.finditer(body):
            if match["label"]:
                self._labels[match["label"]] = len(self.instructions)
            else:
                self.instructions.append(Instruction(match["text"], bool(match["predicate"])))
        self._meetings = {place for i in self.instructions if i.is_a("BSSY") for place in self._targets(i)}

    def before(self, *stops: str) -> list[Instruction]:
        """Return what a thread may run before its first instruction of ``stops``, on any path from the entry."""
        seen, ahead = set[tuple[int, Meetings]](), [(0, Meetings())]
        while ahead:
            at, meetings = place = ahead.pop()
            if place in seen or at >= len(self.instructions):
                continue
            if self.instructions[at].is_a(*stops) and not self.instructions[at].conditional:
                continue
            seen.add(place)
            ahead += self._next(at, meetings)
        return [self.instructions[at] for at in sorted({at for at, _ in seen})]

    def _next(self, at: int, meetings: Meetings) -> Iterable[tuple[int, Meetings]]:
        """Return where a thread may be after the instruction at index ``at``: rather too much than too little."""
        instruction, targets = self.instructions[at], self._targets(self.instructions[at])
        if instruction.is_a("BSSY", "BMOV"):  # BMOV keeps a barrier elsewhere, or brings one back: it is unknown then
            others = [(name, place) for name, place in meetings if name != _barrier(instruction)]
            return [(at + 1, tuple(sorted([*others, *((_barrier(instruction), target) for target in targets)])))]
        if instruction.is_a("BSYNC"):
            places = {place for name, place in meetings if name == _barrier(instruction)} or self._meetings
            return [(place, meetings) for place in (places | {at + 1} if instruction.conditional else places)]
        if instruction.is_a("EXIT", "RET", "KILL"):
            targets = set()
        ends = instruction.is_a("EXIT", "RET", "KILL", "BRA", "BRX", "JMP", "JMX") and "," not in instruction.text
        if instruction.conditional or not ends:
            targets = targets | {at + 1}
        return [(target, meetings) for target in targets]

    def _targets(self, instruction: Instruction) -> set[int]:
        words = re.findall(r"[.$]?[$\w.]+", instruction.text)
        return {self._labels[word] for word in words if word in self._labels}


def _barrier(instruction: Instruction) -> str:
    return re.search(r"\bB\d+\b", instruction.text)[0]


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor, before its launch adds dynamic shared memory."""

    registers: int
    shared: int


def kernels_of(path: Path) -> list[Kernel]:
    """Disassemble a cubin, or every cubin of a shared library or an object file."""
    with tempfile.TemporaryDirectory() as folder:
        cubins = [path]
        if path.suffix != ".cubin":
            subprocess.run([tool("cuobjdump"), "-xelf", "all", str(path.resolve())], cwd=folder, check=True, **_QUIET)
            cubins = sorted(Path(folder).glob("*.cubin"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            texts = list(pool.map(lambda cubin: _output(tool("nvdisasm"), "-c", str(cubin)), cubins))
    targets = [int(re.search(r"\.target\s+sm_(\d+)", text)[1]) for text in texts]
    return [
        Kernel(*found, target) for text, target in zip(texts, targets, strict=True) for found in _SECTION.findall(text)
    ]


def resources_of(path: Path) -> dict[str, Resources]:
    """Return registers and static shared memory by mangled name."""
    found = _RESOURCES.findall(_output(tool("cuobjdump"), "-res-usage", str(path)))
    return {name: Resources(int(registers), int(shared)) for name, registers, shared in found}


def readable(names: list[str]) -> list[str]:
    """Demangle kernels' names, without their parameters."""
    done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [name.removeprefix("dflash::") for name in done.stdout.splitlines()]


def functions_of(library: str) -> dict[int, str]:
    """Return the functions of a library, with readable names, by their offset in it."""
    symbols = [line.split() for line in _output("nm", library).splitlines() if " t " in line or " T " in line]
    return dict(zip((int(s[0], 16) for s in symbols), readable([s[2] for s in symbols]), strict=True))


_QUIET = {"stdout": subprocess.DEVNULL}


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

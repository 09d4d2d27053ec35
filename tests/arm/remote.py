"""A plugin of pytest: the CPU kernels of a test run are those for aarch64, under qemu. DFLASH_ARM_ISA names their set.

PYTHONPATH=tests/arm DFLASH_ARM_ISA=i8mm pytest -p remote -m op
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence

import build
import torch

from dflash import _C, ops
from dflash.ops import registry

AT, SIZE = 0x200000000000, 1 << 30  # of the memory that both processes map, as the program has it


class Remote:
    """Runs kernels in the program, on copies of the tensors that a call names."""

    def __init__(self, isa: str) -> None:
        self.isa = isa
        self._one_at_a_time = threading.Lock()  # tests call from several threads
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.truncate(SIZE)
            self._memory = mmap.mmap(file.fileno(), SIZE)
            self._at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            command = [build.EMULATOR, str(build.build()), file.name]
            self._program = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"DFLASH_ISA": isa}
            )
            self._call("", {})  # it has mapped the file

    def run(self, kernel: str, fields: Mapping[str, object], threads: int) -> None:
        """Run a kernel as `_C.run` does."""
        self._call(kernel, {**fields, "threads": threads})

    def _call(self, kernel: str, fields: Mapping[str, object]) -> None:
        storages: dict[int, tuple[int, int]] = {}  # by address: their size, and where they are in the memory
        call = kernel.encode() + b"\n" + self._written(fields, storages)
        with self._one_at_a_time:
            for address, (size, offset) in storages.items():
                ctypes.memmove(self._at + offset, address, size)
            self._program.stdin.write(call)
            self._program.stdin.flush()
            if self._program.stdout.read(1) != b".":
                raise RuntimeError(f"{kernel} ended the program with {self._program.wait()}")
            for address, (size, offset) in storages.items():
                ctypes.memmove(address, self._at + offset, size)

    def _written(self, value: object, storages: dict[int, tuple[int, int]]) -> bytes:
        match value:
            case None:
                return b"n"
            case torch.Tensor():
                storage = value.untyped_storage()
                if storage.data_ptr() not in storages:
                    end = max((size + offset for size, offset in storages.values()), default=0)
                    offset = -(-end // 4096) * 4096 + storage.data_ptr() % 4096
                    if offset + storage.nbytes() > SIZE:
                        raise MemoryError(f"the tensors of a call are larger than {SIZE} bytes")
                    storages[storage.data_ptr()] = storage.nbytes(), offset
                offset = storages[storage.data_ptr()][1] + value.data_ptr() - storage.data_ptr()
                return b"i" + struct.pack("q", AT + offset)
            case Layers():
                return self._written(value.records, storages)
            case bool() | int():
                return b"i" + struct.pack("q", value)
            case float():
                return b"f" + struct.pack("d", value)
            case Mapping():
                items = (f"{name}\n".encode() + self._written(item, storages) for name, item in value.items())
                return b"d" + struct.pack("q", len(value)) + b"".join(items)
            case Sequence() if not isinstance(value, str):
                return b"l" + struct.pack("q", len(value)) + b"".join(self._written(x, storages) for x in value)
        return b"?"


class Layers(type(_C.DecoderLayers([], []))):
    """The records of layers as they were given, beside those of this process."""

    def __init__(self, records: Sequence[dict], weights: Sequence[torch.Tensor]) -> None:
        super().__init__(records, weights)
        self.records = records


def install(isa: str) -> None:
    """Put the program in the place of this process's kernels."""
    remote = Remote(isa)
    _C.run, _C.DecoderLayers = remote.run, Layers
    _C.isa = ops.isa = lambda: isa
    registry.dispatches_all = True
    for op in registry.OPS.values():
        op.op.direct = lambda *_: NotImplemented


def pytest_configure() -> None:
    """Do so for the tests."""
    install(os.environ["DFLASH_ARM_ISA"])

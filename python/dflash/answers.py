"""Answers in a folder, of which the oldest make room for new ones; and what is known of the drafters made from them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from .files import UNFINISHED, read_json, write_atomically
from .receipts import RecordedSettings
from .targets import describe_config, sample_digest
from .terminal import printable

_MARK, _STATE, _SUFFIX = "store.json", "drafters.json", ".safetensors"
_TENSORS, _NUMBERS = ("features", "top_ids", "top_logits"), ("prompt_length", "seed", "draft_sharpness", "drafter")


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as it was written, and what replays it.

    Attributes:
        ids: ``[n]`` int64, the prompt, then the answer.
        prompt_length: tokens of the prompt.
        features: ``[n - 1, taps * hidden]``, as in `dflash.outputs.FinishedAnswer`.
        top_ids: ``[n - prompt_length, 16]`` int32, the target's best tokens at each place of the answer.
        top_logits: like ``top_ids``, float32: their logits.
        settings: of the call.
        seed: of the noise.
        draft_sharpness: of the call.
        steps: the tokens that each step emitted when it was written.
        drafter: the number of the drafter that was served then.
    """

    ids: Tensor
    prompt_length: int
    features: Tensor
    top_ids: Tensor
    top_logits: Tensor
    settings: RecordedSettings
    seed: int
    draft_sharpness: float
    steps: Sequence[int]
    drafter: int = 0

    def to_bytes(self) -> bytes:
        """Return a safetensors file of it."""
        tensors = {"ids": self.ids.int()} | {name: getattr(self, name) for name in _TENSORS}
        about = {name: getattr(self, name) for name in _NUMBERS}
        about |= {"settings": self.settings.to_json(), "steps": list(self.steps)}
        return save({name: x.contiguous() for name, x in tensors.items()}, {"answer": json.dumps(about)})

    @classmethod
    def from_bytes(cls, content: bytes, vocab_size: int) -> StoredAnswer:
        """Read what `to_bytes` wrote; raises ValueError if it is something else."""
        try:
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            about, tensors = json.loads(header["__metadata__"]["answer"]), load(content)
            about["settings"] = RecordedSettings.parse(about["settings"], vocab_size)
            tensors["ids"] = ids = tensors["ids"].long()
            length = len(ids)
            if not (0 < about["prompt_length"] < length and len(tensors["features"]) == length - 1):
                raise ValueError(f"{length} tokens do not fit the features {list(tensors['features'].shape)}")
            if not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError(f"a token is outside 0 .. {vocab_size - 1}, the vocabulary")
            return cls(**tensors, **about)
        except (LookupError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"not an answer that dflash kept: {printable(error)}") from error


@dataclass
class Drafters:
    """Which drafter is served, by number; 0 is the one that the server was started with.

    Attributes:
        adopted: the one to serve.
        before: the one that it replaced.
        refused: those that were rolled back.
        last: the highest number that was given to a candidate.
    """

    adopted: int = 0
    before: int = 0
    refused: list[int] = dataclasses.field(default_factory=list)
    last: int = 0


class Store:
    """A folder of answers, the oldest first. Only its owner can read it.

    Args:
        folder: made if it is missing.
        max_bytes: of all answers; the oldest go.

    Raises:
        ValueError: the folder holds something else.
    """

    def __init__(self, folder: str | os.PathLike, max_bytes: int = 2**30) -> None:
        self.folder, self.max_bytes = Path(folder), max_bytes
        self._sizes: dict[Path, int] | None = None  # of the answers, the oldest first, once one was added
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{printable(self.folder)} is a file: name a folder for the answers")
        has_others = self.folder.is_dir() and not all(map(_is_begun, self.folder.iterdir()))
        if has_others and not (self.folder / _MARK).exists():  # in this order: another process may begin it just now
            raise ValueError(f"{printable(self.folder)} holds something else than answers: name a folder of its own")

    def open_for(self, target: nn.Module, taps: Sequence[int]) -> None:
        """Make the folder, or check that its answers are of this target, in this dtype, and have these taps.

        Raises:
            ValueError: they are others.
        """
        facts = {"target": f"{describe_config(target)} {sample_digest(target)}", "taps": list(taps)}
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        with self._lock("store") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes may begin it at once
            if not (self.folder / _MARK).exists():
                self.write(self.folder / _MARK, json.dumps(facts).encode())
        if read_json(self.folder / _MARK) != facts:
            raise ValueError(
                f"{printable(self.folder)} holds answers of another target, dtype or taps: name another folder, "
                f"or delete them with dflash learn forget {printable(self.folder)}"
            )

    # ------------------------------------------------------------------------------------------ answers

    def answers(self) -> list[Path]:
        """Return the files of all answers, the oldest first."""
        return sorted(path for path in self.folder.glob(f"answers/*{_SUFFIX}") if path.stem.isdecimal())

    def add(self, answer: StoredAnswer) -> None:
        """Write an answer, then drop the oldest ones until all fit. One that is too large by itself is not kept.

        Raises:
            OSError: it cannot be written. Nothing is dropped for it.
        """
        content = answer.to_bytes()
        if len(content) > self.max_bytes:
            return
        if self._sizes is None:
            self._sizes = {path: path.stat().st_size for path in self.answers()}
        sizes = self._sizes
        number = int(next(reversed(sizes)).stem) + 1 if sizes else 0
        path = self.folder / "answers" / f"{number:012d}{_SUFFIX}"
        path.parent.mkdir(mode=0o700, exist_ok=True)  # it may have been removed by hand
        self.write(path, content)
        sizes[path] = len(content)
        while sum(sizes.values()) > self.max_bytes:
            oldest = next(iter(sizes))
            oldest.unlink(missing_ok=True)
            del sizes[oldest]

    @staticmethod
    def read(path: Path, vocab_size: int) -> StoredAnswer:
        """Return an answer; raises ValueError for a file that is damaged."""
        try:
            return StoredAnswer.from_bytes(path.read_bytes(), vocab_size)
        except (OSError, ValueError) as error:
            raise ValueError(f"{printable(path)}: {error}") from error

    def forget(self) -> int:
        """Delete the folder, drafters too; return how many answers there were.

        Raises:
            ValueError: a server or a learner uses it.
        """
        with self.used_by("server"), self.used_by("learner"):
            count = len(self.answers())
            # What says that this is a store goes last, or a second try would be refused.
            for path in self.folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != _MARK:
                    path.unlink()
            shutil.rmtree(self.folder)
        return count

    # ------------------------------------------------------------------------------------------ drafters

    def drafters(self) -> Drafters:
        """Return which drafter is to be served; raises ValueError for a file that this version did not write."""
        if not (path := self.folder / _STATE).exists():
            return Drafters()
        found, wanted = read_json(path), dataclasses.asdict(Drafters())
        if {name: type(value) for name, value in found.items()} != {name: type(x) for name, x in wanted.items()}:
            what = f"{printable(path)} must have {', '.join(wanted)}, got {printable(json.dumps(found)[:200])}"
            raise ValueError(f"{what}: use the version that wrote it, or delete it to serve the first drafter again")
        return Drafters(**found)

    @contextlib.contextmanager
    def changing_drafters(self) -> Iterator[Drafters]:
        """Yield what is to be served, and write it; a server that reads the folder takes it up."""
        with self._lock("drafters") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            drafters = self.drafters()
            yield drafters
            self.write(self.folder / _STATE, json.dumps(dataclasses.asdict(drafters)).encode())

    def drafter_folder(self, number: int) -> Path:
        """Return where a drafter is, or will be."""
        return self.folder / "drafters" / f"{number:04d}"

    @property
    def run_folder(self) -> Path:
        """Where a run of `learn` keeps what it needs to go on."""
        return self.folder / "run"

    # ------------------------------------------------------------------------------------------ who uses it

    @contextlib.contextmanager
    def used_by(self, who: str) -> Iterator[None]:
        """Use the folder as the only one of a kind, "server" or "learner".

        Raises:
            ValueError: there is one already.
        """
        with self._lock(who) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"a {who} uses {printable(self.folder)} already: end it first") from None
            yield

    @contextlib.contextmanager
    def requests(self) -> Iterator[RunningRequests]:
        """Yield what tells other processes whether requests run. Open it once in a process."""
        with self._lock("requests") as lock:
            yield RunningRequests(lock.fileno())

    def _lock(self, name: str) -> BinaryIO:
        return open(os.open(self.folder / f"{name}.lock", os.O_CREAT | os.O_RDWR, 0o600), "r+b")

    @staticmethod
    def write(path: Path, content: bytes) -> None:
        """Write a file that only its owner can read, all of it or nothing."""

        def fill(unfinished: Path) -> None:
            with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(content)

        write_atomically(path, fill)


def _is_begun(path: Path) -> bool:
    """True for what is left of a start that could not write all of its files, such as on a full disk."""
    if path.name == "answers" and path.is_dir():
        return not any(path.iterdir())
    return path.suffix == ".lock" or path.name.startswith(UNFINISHED)


class RunningRequests:
    """A lock of a file that a server holds while requests run. Who looks at it takes nothing, and holds up nobody."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def hold(self, are_running: bool) -> None:
        """Say whether requests of this process run."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX if are_running else fcntl.LOCK_UN)

    @property
    def run_elsewhere(self) -> bool:
        """True while requests of another process run."""
        is_mac, lock = sys.platform == "darwin", (fcntl.F_WRLCK, os.SEEK_SET)
        fields = (0, 0, 0, *lock) if is_mac else (*lock, 0, 0, 0)  # struct flock
        layout = "qqihh" if is_mac else "hhqqi"
        answer = struct.unpack(layout, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, struct.pack(layout, *fields)))
        kind: int = answer[fields.index(fcntl.F_WRLCK)]
        return kind != fcntl.F_UNLCK

"""Two releases of dflash timed in turns: this one, and another that is installed elsewhere (``--against FOLDER``).

Each release has a process of its own and does one piece of work per request, so that both meet the same state of the
machine. A bench that can be compared defines

    def works(arguments: argparse.Namespace) -> dict[str, Callable[[], list[Work]]]

which returns, by name, what prepares a work and returns its pieces (prompts, or a single piece). It may use nothing of
dflash that one of the two releases does not have; a work that fails in one of them is left out, by name.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import NamedTuple

_WORKER = Path(__file__).with_name("release_worker.py")


class Result(NamedTuple):
    """Result of a piece of work: seconds for so many units (calls, tokens, steps), and its answer if it has one."""

    seconds: float
    units: int = 1
    answer: list[int] | None = None


Work = Callable[[], Result]


@dataclass
class Comparison:
    """A work's medians over rounds and pieces.

    Attributes:
        name: of the work.
        seconds: per unit, this release.
        other_seconds: per unit, the other.
        ratio: the other's time over this one's, median of the pairs; above 1, this release is faster.
        identical: pieces whose answers are equal in both.
        pieces: that the work has.
    """

    name: str
    seconds: float
    other_seconds: float
    ratio: float
    identical: int
    pieces: int


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--against``."""
    parser.add_argument(
        "--against",
        type=_site_packages,
        metavar="FOLDER",
        help="take turns with another release of this package: the site-packages folder that holds it",
    )


def _site_packages(text: str) -> Path:
    folder = Path(text).resolve()
    if not (folder / "dflash" / "__init__.py").exists():
        raise argparse.ArgumentTypeError(f"{folder} does not hold dflash/__init__.py")
    return folder


def compare(module: str, arguments: argparse.Namespace, rounds: int) -> Iterator[Comparison]:
    """Compare this release with ``arguments.against`` in every work of bench ``module``.

    Args:
        module: name of the bench file.
        arguments: its options, which both processes get.
        rounds: how often each piece runs.
    """
    with contextlib.ExitStack() as stack:
        here, there = (stack.enter_context(Release(module, arguments, at)) for at in (None, arguments.against))
        for name in here.works:
            try:
                yield _compare(name, (here, there), rounds)
            except WorkFailed as error:
                print(f"{name} is left out: {error}", file=sys.stderr)


def _compare(name: str, releases: tuple["Release", "Release"], rounds: int) -> Comparison:
    # 1. Prepare and warm up
    pieces, _ = (release.ask("prepare", name) for release in releases)
    for release in releases:
        release.ask("run", 0)
    # 2. Take turns
    times: list[tuple[float, float]] = []
    identical = 0
    for number in range(rounds):
        for piece in range(pieces):
            order = (0, 1) if (number + piece) % 2 == 0 else (1, 0)
            results = {index: Result(*releases[index].ask("run", piece)) for index in order}
            times.append(tuple(results[index].seconds / results[index].units for index in (0, 1)))
            identical += number == 0 and results[0].answer == results[1].answer
    # 3. Medians
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    return Comparison(name, ours, theirs, statistics.median(b / a for a, b in times), identical, pieces)


class WorkFailed(Exception):
    """A work that one of the releases cannot do."""


class Release:
    """A process with one release loaded. Use as a context manager.

    Args:
        module: name of the bench file that defines the works.
        arguments: its options.
        folder: holds the release to load; None for the one that this process would import.
    """

    def __init__(self, module: str, arguments: argparse.Namespace, folder: Path | None) -> None:
        self._name = "this release" if folder is None else "the other release"
        self._connection, theirs = Pipe()
        command = [sys.executable, _WORKER, str(theirs.fileno()), str(folder or "")]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=sys.stderr)
        theirs.close()
        self._connection.send((module, arguments))
        self.works: list[str] = self._answer()

    def ask(self, request: str, argument: str | int) -> object:
        """Send a request and wait for its answer."""
        self._connection.send((request, argument))
        return self._answer()

    def _answer(self) -> object:
        try:
            is_done, answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self._name} ended; its error is above") from None
        if not is_done:
            raise WorkFailed(f"{self._name}: {answer}")
        return answer

    def __enter__(self) -> "Release":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.wait()

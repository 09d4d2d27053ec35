"""A pytest plugin for a machine that may be gone soon: ``python -m pytest -p bench.gpu.pytest_lines --lines FILE``.

FILE gets the names of all tests, then a line of JSON per test as soon as it has ended. A process of pytest-xdist ends
with a test that hangs or breaks CUDA's context, which would fail every later test of that process. xdist then reports
that test as the crash and starts another process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", required=True, help="where the lines go")
    parser.addoption("--test-seconds", type=float, default=120, help="how long a test may take")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(
        _Watch(config.option.test_seconds) if is_worker else _Lines(Path(config.option.lines))
    )


class _Lines:
    """Writes the lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._named = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._name([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._name(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            why = "" if report.passed else report.longreprtext[-2000:]
            if isinstance(report.longrepr, tuple):  # a skipped test's place, line and reason
                why = report.longrepr[2]
            why = why.replace(f"{Path.cwd()}/", "").replace(sys.executable, "python3")
            self._write({"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "why": why})

    def _name(self, tests: list[str]) -> None:
        if not self._named:
            self._named = True
            self._write({"tests": list(tests)})

    def _write(self, line: dict) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class _Watch:
    """Ends the process with a test that hangs or breaks the GPU's context."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def pytest_runtest_logstart(self) -> None:
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=sys.__stderr__)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if _gpu_is_broken():
            os._exit(1)


def _gpu_is_broken() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False

"""Run code that may crash, hang or be killed in a Python process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def python(code: str, *arguments: object, stdin: str = "", seconds: float = 900, **environment: str):
    """Run ``code`` with the tests' helpers importable; return what it printed and its exit code.

    A crash is a negative ``returncode``. A process that takes longer than ``seconds`` hangs: it is killed, and
    ``subprocess.TimeoutExpired`` is raised.
    """
    path = os.pathsep.join([str(TESTS), str(TESTS / "faults"), *sys.path])
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )

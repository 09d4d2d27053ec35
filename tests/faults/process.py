"""Run code that may crash, hang or be killed in a Python process of its own. It imports for about five seconds."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def python(code: str, *arguments: object, stdin: str = "", seconds: float = 900) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with the tests' helpers importable; return what it printed and its exit code.

    A crash is a negative ``returncode``. A process that takes longer than ``seconds`` hangs: it is killed, and
    ``subprocess.TimeoutExpired`` is raised.
    """
    path = os.pathsep.join([str(TESTS), str(TESTS / "faults"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds, env=environment)

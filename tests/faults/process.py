"""Run code that may crash, hang or be killed in a Python process of its own.

A new Python imports for five seconds before it does anything. So one process imports, and each piece of code runs in a
fork of it, which ends and crashes as a new Python does. The environment and the path are those of the first call.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import types
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
WARM = ("dflash_tools.train", "families", "transformers.models.qwen3.modeling_qwen3")  # what most of the code imports


def python(code: str, *arguments: object, stdin: str = "", seconds: float = 900) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with the tests' helpers importable; return what it printed and its exit code.

    A crash is a negative ``returncode``. A process that takes longer than ``seconds`` hangs: it is killed, and
    ``subprocess.TimeoutExpired`` is raised.
    """
    command = ["-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        for path, text in zip(streams, (stdin, "", ""), strict=True):
            path.write_text(text)
        request = {"code": textwrap.dedent(code), "argv": command, "cwd": os.getcwd(), "streams": [*map(str, streams)]}
        returncode = forked(server(), request, seconds)
        return subprocess.CompletedProcess(command, returncode, *(path.read_text() for path in streams[1:]))


@functools.cache
def server() -> subprocess.Popen:
    """Start the process that forks for each request. It ends with this one."""
    path = os.pathsep.join([str(TESTS), str(TESTS / "faults"), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # a line that Python has read ahead would be hidden from `select`
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    atexit.register(process.communicate)  # closes its input
    return process


def forked(parent: subprocess.Popen, request: dict, seconds: float) -> int:
    """Send a request, and return the exit code of the process that ran it."""
    with open(parent.stdin.fileno(), "w", closefd=False) as requests:
        print(json.dumps(request), file=requests)
    process = int(parent.stdout.readline())
    is_late = not select.select([parent.stdout], [], [], seconds)[0]
    if is_late:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(process, signal.SIGKILL)
    returncode = int(parent.stdout.readline())
    if is_late:
        raise subprocess.TimeoutExpired(request["code"], seconds)
    return returncode


def serve() -> dict | None:
    """Fork for each request. Returns the request in a fork, None in the server once its input is closed."""
    # Streams of its own: some settings of a program's standard streams may only be made before their first use.
    with open(0, closefd=False) as requests, open(1, "w", closefd=False) as replies:
        while line := requests.readline():
            if (process := os.fork()) == 0:
                return json.loads(line)
            print(process, file=replies, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=replies, flush=True)
    return None


def run(request: dict) -> None:
    """Become the program ``python -c code``."""
    os.chdir(request["cwd"])
    for descriptor, path in enumerate(request["streams"]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    sys.argv = request["argv"]
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(compile(request["code"], "<string>", "exec"), vars(program))


if __name__ == "__main__":
    for name in WARM:
        importlib.import_module(name)
    gc.freeze()  # its forks need not go through what is imported
    if request := serve():
        run(request)

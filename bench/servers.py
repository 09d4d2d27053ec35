"""A server in a process of its own."""

import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[str]:
    """Run a server; yield its address once ``/health`` answers. If it ends before, so does the bench, with its log."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            while not _is_up(url):
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"a server ended: {log.read()}")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def _is_up(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health").close()
    except OSError:  # not listening, or 503 while it loads
        return False
    return True

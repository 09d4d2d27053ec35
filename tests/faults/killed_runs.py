"""Runs that are killed or find the disk full, and continue. This is a program of its own, which forks for each run."""

import functools
import json
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
from families import VOCAB, make_draft, make_target
from tiny_tokenizers import spoken

from dflash_tools.config import RegenerateConfig
from dflash_tools.train import TrainConfig, Trainer, draft_config, new_drafter, save_draft
from dflash_tools.train.export import export
from dflash_tools.train.regenerate import LocalWriter, regenerate

TARGET = make_target("qwen3")
TARGET.generation_config.eos_token_id = 1
COUNTER = mmap.mmap(-1, 1)  # of file operations, at most 255; shared with the processes that are forked


def _regenerate(folder: Path) -> None:
    prompts = [{"line": line, "prompt": " ".join(f"w{word}" for word in range(7, 8 + line))} for line in range(1, 8)]
    writer = LocalWriter(TARGET, spoken(), name="tiny", batch_size=2, raw=True)
    regenerate(prompts, writer, folder / "out.jsonl", RegenerateConfig((0.0, 1.0), max_new_tokens=6))


def _train(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(7, VOCAB, (24,), generator=generator).tolist() for _ in range(8)]
    rows = datasets.Dataset.from_list([{"input_ids": ids, "loss_mask": [0] * 4 + [1] * 20} for ids in rows])
    sizes = {"steps": 6, "batch_tokens": 60, "anchors": 4, "eval_rows": 0}
    config = TrainConfig(**sizes, mixed_precision="no", log_every=1, save_every=2)
    drafter = new_drafter(draft_config(TARGET, mask_token_id=2, num_layers=1, block_size=4, target_layer_ids=(0, 2)))
    run = Trainer(TARGET, drafter, rows, config, folder / "run", quiet=True)
    run.resume()
    run.train()


def _export(folder: Path) -> None:
    if not (folder / "out").exists():
        export(DRAFT, folder / "out", "published")


WORKS = {"regenerate": _regenerate, "train": _train, "export": _export}
DRAFT = Path(sys.argv[2]) / "draft"
CHANCE = random.Random(0)


def _fork(work: Callable[[Path], None], folder: Path, fault: Callable[[], object] = lambda: None) -> str | None:
    """Run ``work`` with a fault in a process of its own. Returns its error, "" if it has none, None if it is killed."""
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        try:
            fault()
            work(folder)
        except Exception as error:
            os.write(writer, f"{'OSError' if isinstance(error, OSError) else repr(error)}: {error}".encode()[:4000])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitpid(process, 0)[1]
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL, -signal.SIGALRM), os.waitstatus_to_exitcode(status)
    return said if os.WIFEXITED(status) else None


def _kill_at(folder: Path, number: int) -> Callable[[], None]:
    """Return a fault: the process is killed before it opens, renames or removes a file of the run for that time."""
    COUNTER[0] = 0

    def count(event: str, arguments: tuple) -> None:
        if event.startswith(("open", "os.", "shutil.")) and str(folder) in str(arguments[:1]):
            COUNTER[0] += 1
            if COUNTER[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(count)


def _without_times(value: object) -> object:
    if isinstance(value, dict):
        times = ("seconds", "tokens_per_second")
        return {key: _without_times(inner) for key, inner in value.items() if key not in times}
    return value


def _contents(folder: Path) -> dict[str, object]:
    """Return the content of every file of a run, without times; answers are written in the order in which they end."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.name in ("trainer.json", "metrics.jsonl"):
            lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
            found[name] = [_without_times(json.loads(line)) for line in lines]
        elif path.name == "out.jsonl":
            found[name] = sorted(path.read_bytes().splitlines(keepends=True))
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def _say(folder: Path, whole: dict[str, object], what: str) -> None:
    ours = _contents(folder)
    different = sorted({*ours} ^ {*whole}) + sorted(name for name in {*ours} & {*whole} if ours[name] != whole[name])
    print("the same" if not different else f"{what}: {different}", flush=True)
    shutil.rmtree(folder)


def _is_refusal(said: str | None, folder: Path) -> bool:
    return said is not None and said.startswith("OSError: ") and str(folder) in said and "\n" not in said


def _kill(name: str, folder: Path, operations: int, seconds: float, share: float) -> str:
    """Kill a run up to three times, first after ``share`` of its file operations."""
    number, is_time, what = 1 + int(share * operations), False, []
    for _ in range(3):
        after = seconds * CHANCE.random()
        alarm = functools.partial(signal.setitimer, signal.ITIMER_REAL, after)  # SIGALRM ends a process at once
        said = _fork(WORKS[name], folder, alarm if is_time else _kill_at(folder, number))
        what.append(f"after {after:.2f} s" if is_time else f"at operation {number} of {operations}")
        assert not said, (name, what, said)
        if said == "":
            break
        number, is_time = CHANCE.randint(1, operations), CHANCE.random() < 0.5
    return ", ".join(what)


def _fill(name: str, folder: Path, size: int) -> str:
    """Run on a disk that takes no file above ``size`` bytes."""
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    said = _fork(WORKS[name], folder, limit)
    assert said == "" or _is_refusal(said, folder), (name, size, said)
    return f"{size} bytes"


def attempts(kind: str, root: Path, count: int) -> None:
    """Print a line per attempt: ``the same`` if the files after continuing are those of a whole run.

    They are killed, or limited as by a full disk: no file above a size. ``root`` is empty, ``count`` is per work.
    """
    for name, work in WORKS.items():
        # 1. A run without a fault
        (root / name).mkdir()
        began = time.monotonic()
        assert _fork(work, root / name, _kill_at(root / name, -1)) == ""
        seconds, operations, whole = time.monotonic() - began, COUNTER[0], _contents(root / name)
        sizes = [path.stat().st_size for path in (root / name).rglob("*") if path.is_file()]
        for attempt in range(count):
            # 2. A run with a fault, and one without that continues
            folder = root / f"{name}{attempt}"
            folder.mkdir()
            share = (attempt + CHANCE.random()) / count
            if kind == "killed":
                what = _kill(name, folder, operations, seconds, share)
            else:
                what = _fill(name, folder, int(share * max(sizes)))
            assert _fork(work, folder) == "", (name, what)
            _say(folder, whole, f"{name}, {what}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    save_draft(make_draft(TARGET), DRAFT)
    attempts(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

"""Two servers and two learners on one folder of answers, killed at any moment. A program of its own, which forks."""

import hashlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
from baseline import prompt
from families import VOCAB, make_draft, make_target
from served import Reader

import dflash
from dflash.answers import Store
from dflash_serve.adopt import Adopter
from dflash_serve.record import AnswerRecorder
from dflash_serve.scheduler import Scheduler
from dflash_tools.learn import LearnOptions, learn, learning

TARGET = make_target("qwen3")
DRAFT = make_draft(TARGET)
CHANCE = random.Random(0)
OPTIONS = LearnOptions(steps=3, batch_tokens=100)
ANSWERS = "answers/*.safetensors"


def _general_answers() -> datasets.Dataset:
    rows = [prompt(20, seed=seed).tolist() for seed in range(2 * learning._GENERAL)]
    return datasets.Dataset.from_dict({"input_ids": rows, "loss_mask": [[0] * 3 + [1] * 17] * len(rows)})


def _serve(folder: Path, pipe: int, seed: int) -> None:
    """Keep answers, and swap drafters, as ``dflash serve --learn``. Writes a line per answer that is on the disk."""
    recorder = AnswerRecorder(folder, TARGET, DRAFT)
    scheduler = Scheduler(dflash.Generator(TARGET, DRAFT, max_length=32, batch_size=2, on_answer=recorder))
    adopter, known = Adopter(recorder, scheduler, poll=0), {path.name for path in folder.glob(ANSWERS)}
    for number in itertools.count(seed):
        adopter.look()
        for _ in Reader(scheduler, prompt(9, seed=number), max_new_tokens=16, temperature=1.0, seed=number):
            pass
        recorder.flush()
        for path in folder.glob(ANSWERS):
            if path.name not in known:
                known.add(path.name)
                os.write(pipe, f"kept {path.name} {_digest(path)}\n".encode())
        time.sleep(0.05)  # learners wait while requests run


def _learn(folder: Path, pipe: int, _: int) -> None:
    learn(Store(folder), TARGET, DRAFT, BASE, OPTIONS)
    os.write(pipe, b"learned\n")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _start(work: Callable[[Path, int, int], None], folder: Path, pipe: int, seconds: float, at: int) -> int:
    """Run ``work`` in a process that is killed after ``seconds``, or before its file operation number ``at``."""
    seed, count = CHANCE.randrange(10**6), itertools.count(1)

    def look(event: str, arguments: tuple) -> None:
        if event.startswith(("open", "os.", "shutil.")) and str(folder) in str(arguments[:1]) and next(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    if (process := os.fork()) == 0:
        try:
            if at:
                sys.addaudithook(look)
            signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends a process at once
            work(folder, pipe, seed)
        except BaseException as error:
            os.write(pipe, f"failed {error!r}\n".encode())
        os._exit(0)
    return process


def _was_killed(process: int) -> bool:
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, -signal.SIGKILL, -signal.SIGALRM), status
    return status != 0


def _is_refusal(line: str) -> bool:
    words = ("server uses ", "learner uses ", f"at least {learning.LEAST_ANSWERS} answers")
    return line.startswith("failed ValueError") and any(each in line for each in words)


def _check(folder: Path, kept: dict[str, str]) -> None:
    """Nothing that was kept is lost, and all of it can be read."""
    for name, digest in kept.items():
        assert _digest(folder / "answers" / name) == digest, name
    if not (folder / "store.json").exists():
        assert not kept
        return
    store = Store(folder)
    for path in store.answers():
        store.read(path, VOCAB)
    drafters = store.drafters()
    for number in {drafters.adopted, drafters.before} - {0}:
        dflash.load_draft(store.drafter_folder(number))
    reports = folder / "reports.jsonl"
    found = [json.loads(line)["drafter"] for line in reports.read_text().splitlines()] if reports.exists() else []
    assert found == sorted(set(found)), found


def attempts(folder: Path, kills: int) -> str:
    """Kill so many processes, and check the folder whenever none runs; then let a server and a learner work."""
    reader, pipe = os.pipe()
    kept: dict[str, str] = {}
    done, learned = 0, 0

    def listen() -> None:
        nonlocal learned
        os.write(pipe, b".\n")  # there is something to read
        for line in os.read(reader, 2**20).decode().splitlines():
            word, *rest = line.split(" ")
            if word == "kept":
                kept[rest[0]] = rest[1]
            learned += word == "learned"
            assert word != "failed" or _is_refusal(line), line
        _check(folder, kept)

    while done < kills:
        works = [_serve, _serve, _learn, _learn]
        CHANCE.shuffle(works)
        started = []
        for work in works:
            limit, at = CHANCE.uniform(0, 8), CHANCE.choice([0, CHANCE.randrange(1, 320)])
            started.append(_start(work, folder, pipe, limit, at))
            time.sleep(CHANCE.choice([0, 0.3 * CHANCE.random()]))
        done += sum([_was_killed(process) for process in started])
        listen()
    before, server = learned, _start(_serve, folder, pipe, 60.0, 0)
    while len(list(folder.glob(ANSWERS))) < learning.LEAST_ANSWERS:
        time.sleep(0.1)
    assert not _was_killed(_start(_learn, folder, pipe, 60.0, 0))
    os.kill(server, signal.SIGKILL)
    assert _was_killed(server)
    listen()
    assert learned == before + 1
    return f"{done} kills, {len(kept)} answers kept, {learned} runs of learning ended"


if __name__ == "__main__":
    torch.set_num_threads(1)
    learning.LEAST_GAIN, learning.MOST_LOSS = -9.0, 9.0  # each candidate is adopted
    learning.SAVE_EVERY, learning.LEAST_ANSWERS, learning._GENERAL = 0.0, 10, 8
    BASE = _general_answers()
    for number in range(int(sys.argv[2])):
        print(attempts(Path(sys.argv[1], str(number)), 20), file=sys.stderr)
    print("nothing is lost")

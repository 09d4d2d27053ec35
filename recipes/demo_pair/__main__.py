"""Train the package's demo pair from scratch: ``python -m recipes.demo_pair FOLDER``.

The stages are the target; its greedy and sampled answers to prompts; a DFlash 2 drafter and one of the first
generation; and the packaged pair in ``FOLDER/pair``, with its evaluation on held-out prompts and the training curves.
Each stage but the last is skipped if FOLDER already has its result. An interrupted stage continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dflash import load_draft
from dflash.drafter import DFlash2Config
from dflash.files import write_atomically
from dflash.loading import FIRST_GENERATION, load_target_of
from dflash_tools.config import RegenerateConfig
from dflash_tools.measure.progress import bars
from dflash_tools.train import TrainConfig, Trainer, draft_config, new_drafter, save_draft
from dflash_tools.train.data import load_prompts, load_rows
from dflash_tools.train.files import write_json
from dflash_tools.train.regenerate import LocalWriter, regenerate

from .evaluate import evaluate, evaluate_sums, held_out_examples
from .plot import plot
from .pretrain import MASK, pretrain
from .tasks import Example, examples

PROMPT_SEED, WATCHED_SEED = 2_000_003, 3_000_003
# The drafters by their folder. The published rank of 256 is more than this target is wide.
DRAFTERS = {"draft": DFlash2Config(selector_rank=64), FIRST_GENERATION: None}
_TARGET_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
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
_DECODINGS = (("T=0", 0.0), ("T=1", 1.0))


def watched_examples(count: int) -> list[Example]:
    """Return held-out examples to answer during training. The evaluation draws its own."""
    return list(itertools.islice(examples(WATCHED_SEED, held=True), count))


def writer_name(target: Path) -> str:
    """Return the target's name in answer rows. It holds a hash, so that answers of an older target are refused."""
    return "demo-pair-" + hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()[:16]


def check_options(folder: Path, options: dict[str, int]) -> None:
    """Record ``folder``'s options; raise ``ValueError`` if it was begun with others, as finished stages are reused."""
    path = folder / "options.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, functools.partial(write_json, options))
    for name, begun in json.loads(path.read_text()).items():
        if options[name] != begun:
            raise ValueError(f"{folder} was begun with {name} = {begun}, not {options[name]}: choose another folder")


class _StageSeconds(dict[str, float]):
    """Seconds of each stage, added up over the runs that finished it."""

    def __init__(self, path: Path) -> None:
        super().__init__(json.loads(path.read_text()) if path.exists() else {})
        self.path = path

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, and save the seconds of all stages."""
        began = time.perf_counter()
        yield
        self[name] = self.get(name, 0.0) + time.perf_counter() - began
        write_atomically(self.path, functools.partial(write_json, self))


def _lines(rows: Iterable[dict[str, str | None]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def main(
    folder: Annotated[Path, typer.Argument(help="Output folder.")],
    target_steps: Annotated[int, typer.Option(help="Training steps of the target.")] = 4500,
    prompts: Annotated[int, typer.Option(help="Prompts that the target answers for its drafter, twice each.")] = 6000,
    draft_steps: Annotated[int, typer.Option(help="Training steps of each drafter.")] = CONFIG.steps,
    evaluated: Annotated[int, typer.Option(help="Held-out prompts of the evaluation.")] = 192,
) -> None:
    """Train the demo pair from scratch, evaluate it, and lay it out as the package ships it."""
    options = {"target_steps": target_steps, "prompts": prompts, "draft_steps": draft_steps}
    check_options(folder, options)
    seconds = _StageSeconds(folder / "seconds.json")
    # 1. Train the target
    with seconds.stage("target"):
        if not (folder / "target" / "model.safetensors").exists():
            pretrain(folder / "target", steps=target_steps)
    # 2. Let the target answer prompts
    target, tokenizer = load_target_of(folder)
    with seconds.stage("answers"):
        _write_answers(folder, target, tokenizer, prompts)
    # 3. Train the drafters on the answers
    for name in DRAFTERS:
        with seconds.stage(name):
            if not (folder / name / "model.safetensors").exists():
                _train_drafter(folder, name, target, tokenizer, draft_steps)
    # 4. Lay the pair out and evaluate it
    _write_pair(folder)
    plot(folder, folder / "curves.png")
    report: dict[str, Any] = {"options": options, "seconds": seconds, "sums": evaluate_sums(folder / "pair")}
    for name in DRAFTERS:
        report[name] = {}
        for label, temperature in _DECODINGS:
            report[name][label] = evaluate(folder / "pair", name, prompts=evaluated, temperature=temperature)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    typer.echo(json.dumps(report, indent=1))


def _write_answers(folder: Path, target: Any, tokenizer: Any, prompts: int) -> None:
    """Write the target's own answers to training prompts, greedy and sampled, to ``responses.jsonl``."""
    asked = folder / "prompts.jsonl"
    drawn = itertools.islice(examples(PROMPT_SEED, held=False), prompts)
    asked.write_text(_lines({"prompt": example.prompt} for example in drawn))
    with bars(["answers"]) as show:
        regenerate(
            load_prompts(asked),
            LocalWriter(target, tokenizer, name=writer_name(folder / "target"), batch_size=128, bos=True),
            folder / "responses.jsonl",
            RegenerateConfig(temperatures=(0.0, 1.0), max_new_tokens=256),
            progress=lambda summary, total: show("answers", summary.written, total),
        )


def _train_drafter(folder: Path, name: str, target: Any, tokenizer: Any, steps: int) -> None:
    """Train a drafter on ``responses.jsonl``, and write it to the folder ``name``."""
    config = draft_config(target, mask_token_id=MASK, num_layers=3, block_size=16, target_layer_ids=(1, 2, 3, 4))
    config = dataclasses.replace(config, dflash2=DRAFTERS[name])
    rows = load_rows(folder / "responses.jsonl", tokenizer, max_length=640)
    watched = folder / "watched.jsonl"
    drawn = watched_examples(CONFIG.eval_rows)
    watched.write_text(_lines({"prompt": example.prompt, "response": example.answer} for example in drawn))
    heldout = load_rows(watched, tokenizer, max_length=640, bos=True)
    settings = dataclasses.replace(CONFIG, steps=steps)
    trainer = Trainer(target, new_drafter(config), rows, settings, folder / name, heldout=heldout)
    trainer.resume()
    trainer.train()


def _write_pair(folder: Path) -> None:
    """Write ``pair`` as the package ships it: target, drafters in bfloat16, prompts."""
    pair = folder / "pair"
    for name in ("target", *DRAFTERS):
        (pair / name).mkdir(parents=True, exist_ok=True)
    for file in _TARGET_FILES:
        shutil.copy(folder / "target" / file, pair / "target" / file)
    for name in DRAFTERS:
        save_draft(load_draft(folder / name, dtype=torch.bfloat16), pair / name)
    rows = (
        {
            "prompt": example.prompt,
            "answer": None if example.kind == "letters" else example.answer,
            "kind": example.kind,
        }
        for example in held_out_examples(48)
    )
    (pair / "prompts.jsonl").write_text(_lines(rows))


if __name__ == "__main__":
    typer.run(main)

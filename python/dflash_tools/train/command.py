"""The work of ``dflash train``: from its options, which are checked, to a trained drafter."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from dflash import Drafter, load_draft
from dflash.internals import check_config, drafter_config, sources, targets
from dflash.light import options, terminal

from ..config import TrainConfig, is_first_process, numbers
from ..measure.progress import bars
from . import model as models
from .data import load_rows
from .features import FeatureCache, cache_features, cache_size
from .trainer import Trainer, make_accelerator, multiplies_in_bf16


def run_training(run: Any, given: dict[str, Any], parts: dict[str, Any], config: TrainConfig, device: str) -> None:
    """Do what ``dflash train`` is asked: ``given`` is the shape, ``parts`` are the sizes of what DFlash 2 adds."""
    # 1. Create the drafter and read the rows, checked against the target without its weights
    quiet = run.as_json or not is_first_process()
    source = sources.Source(run.model, run.trust_remote_code, quiet=quiet)
    tokenizer = sources.load_tokenizer(source)
    empty_target = targets.check_target(source.load_empty_target(), loaded=False)
    rows, heldout = (_rows(data, source, empty_target, tokenizer, run) for data in (run.data, run.heldout))
    if run.init is None:
        drafter = _new_drafter(empty_target, tokenizer, rows, given, config.seed)
    else:
        drafter = _load_drafter(empty_target, run.init, given)
    drafter = _of_type(drafter, run.type, parts, config.seed)
    if drafter.config.dflash2 is None and config.selector_weight != TrainConfig.selector_weight:
        raise ValueError("--selector-weight is for DFlash 2 drafters, and this one has no selector: leave it out")

    # 2. Load the target's weights
    tracker = None if run.dry_run else run.tracker
    accelerator = make_accelerator(config, run.output, cpu=device == "cpu", tracker=tracker)
    source = dataclasses.replace(source, keeps_blocks=False)  # gradients pass through the head
    is_emulated = accelerator.mixed_precision == "no" and not multiplies_in_bf16(accelerator.device)
    dtype = "float32" if run.dtype == "auto" and is_emulated else run.dtype
    target = sources.load_target(source, dtype, accelerator.device).requires_grad_(False)
    if run.init is None:
        if models.adopt_layers_(drafter, target) and not quiet:
            print(f"dflash: the drafter starts as the target's last {len(drafter.layers)} layers", file=sys.stderr)
        if drafter.config.draft_vocab_size is not None:
            models.adopt_head_(drafter, target, rows)
    others = {"heldout": heldout, "accelerator": accelerator, "tracker": tracker}
    trainer = Trainer(target, drafter, rows, config, run.output, **others)
    if run.dry_run:
        _print_plan(trainer, run)
        return

    # 3. Train
    if run.cache_features is not None:
        trainer.features = _cached_features(trainer, run.cache_features)
    if run.resume and not trainer.resume() and accelerator.is_main_process:
        print(f"dflash: no checkpoint under {run.output}: starting from the beginning", file=sys.stderr)
    last = trainer.train()
    if run.as_json and accelerator.is_main_process:
        typer.echo(json.dumps(last))
    elif accelerator.is_main_process:
        _print_end(trainer, run)


def _print_end(trainer: Any, run: Any) -> None:
    """Say where the draft is, how it came about, and what to run next."""
    minutes = f"{trainer.seconds / 60:.1f} minutes" if trainer.seconds >= 60 else f"{trainer.seconds:.0f} seconds"
    lines = [f"the draft is in {terminal.printable(run.output)}: {trainer.steps} steps in {minutes}"]
    metrics = [json.loads(line) for line in trainer.metrics.path.read_text().splitlines()]
    for name, key in (("loss", "loss"), ("accepted", "train_acceptance"), ("held-out", "acceptance_length")):
        if values := [line[key] for line in metrics if line.get(key) is not None]:
            lines.append(f"{name:<9} {_drawn(values)}  {values[0]:.2f} to {values[-1]:.2f}")
    pair = shlex.join([str(run.model), "--draft", str(run.output)])
    lines.append(f"next: dflash generate {pair} 'PROMPT', or dflash benchmark {pair} --dataset PROMPTS.jsonl")
    typer.echo("\n".join(lines), err=True)


def _drawn(values: Sequence[float], width: int = 40) -> str:
    """Draw numbers as a line of bars, at most ``width``."""
    count = min(width, len(values))
    chosen = [values[place * (len(values) - 1) // max(1, count - 1)] for place in range(count)]
    low, high = min(chosen), max(chosen)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in chosen)


def _new_drafter(target: Any, tokenizer: Any, rows: Any, given: dict[str, Any], seed: int) -> Drafter:
    names = {"taps": "target_layer_ids", "layers": "num_layers"}
    given = {names.get(name, name): value for name, value in given.items()}
    if "target_layer_ids" in given:
        given["target_layer_ids"] = numbers("--taps", given["target_layer_ids"], int)
    mask = models.choose_mask_id(target, tokenizer, given.pop("mask_token_id", None), rows)
    return models.new_drafter(models.draft_config(target, mask_token_id=mask, **given), seed=seed)


def _load_drafter(target: Any, init: str, given: dict[str, Any]) -> Drafter:
    """Load the drafter of ``--init``, whose shape is fixed."""
    _expect_not_given(given)
    drafter = load_draft(init, dtype=torch.float32, keeps_blocks=False)
    check_config(target, drafter.config)
    try:
        models.check_trainable(drafter.config)
    except ValueError as error:
        raise ValueError(f"--init {init!r}: {error}") from None
    return drafter


def _of_type(drafter: Drafter, kind: str | None, sizes: dict[str, Any], seed: int) -> Drafter:
    """Return the drafter as one of the generation that is asked for."""
    if kind == "dspark" and not drafter.config.predicts_from_anchor:
        raise ValueError(
            "--type dspark must start from a DSpark drafter, or without --init: its rows are other tokens'"
        )
    if drafter.config.dflash2 is None:
        parts = drafter_config.DFlash2Config(**sizes)
        return models.add_dflash2(drafter, parts, seed=seed) if kind == "dflash2" else drafter
    if kind == "dflash":
        raise ValueError("--type dflash cannot start from a DFlash 2 drafter: leave it out, or choose another --init")
    _expect_not_given(sizes)
    return drafter


def _expect_not_given(given: dict[str, Any]) -> None:
    if given:
        raise ValueError(f"{options.option_of(next(iter(given)))} is fixed by --init: leave it out")


def _rows(data: str | None, source: sources.Source, target: Any, tokenizer: Any, run: Any) -> Any:
    if data is None:
        return None
    config = target.config.get_text_config(decoder=True)
    encoding: dict[str, Any] = {name: getattr(run, name) for name in ("raw", "bos", "skip_long")}
    encoding |= {"template": {"enable_thinking": False} if run.no_thinking else None, "vocab_size": config.vocab_size}
    encoding |= {"stop_token_ids": source.load_stop_token_ids(config)}
    return load_rows(data, tokenizer, sources.room_of(target, run.max_length), **encoding)


def _cached_features(trainer: Any, folder: Path) -> Any:
    """Open the feature cache of the trainer's rows. All processes compute its missing shards together."""
    accelerator, taps = trainer.accelerator, trainer.layer_ids
    share = {"rank": accelerator.process_index, "world": accelerator.num_processes}
    with bars(["features"], shown=accelerator.is_main_process) as show, accelerator.autocast():

        def shown(rows: int, total: int, speed: float) -> None:
            show("features", rows, total, f"{speed:,.0f} tokens/s")

        cache_features(trainer.target, trainer.online, trainer.rows, taps, folder, progress=shown, **share)
    accelerator.wait_for_everyone()
    return FeatureCache(folder)


def _print_plan(trainer: Any, run: Any) -> None:
    """Print what the run would do. Every process measures, the first prints."""
    plan = trainer.plan(cached=run.cache_features is not None)
    if run.cache_features is not None:
        width = len(trainer.layer_ids) * targets.text_config(trainer.target).hidden_size
        plan["features_bytes"] = cache_size(trainer.rows, width, torch.bfloat16)
    if trainer.accelerator.is_main_process:
        typer.echo(json.dumps(plan) if run.as_json else _plan_text(plan))


def _plan_text(plan: dict[str, Any]) -> str:
    def size(count: float) -> str:
        return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

    total = sum(plan["stage_seconds"].values())
    lines = {
        "train": f"{plan['draft_parameters']:,} parameters, for a target of {plan['target_parameters']:,}",
        "on": f"{plan['device']}, {plan['processes']} process{'es' * (plan['processes'] > 1)}",
        "data": f"{plan['rows']:,} rows, {plan['row_tokens']:,} tokens; {plan['heldout_prompts']} held-out prompts, "
        f"{plan['heldout_rows']} rows of theirs left out",
        "run": f"{plan['steps']:,} steps of about {plan['tokens_per_step']:,} tokens, {plan['tokens']:,} in all, "
        f"{plan['epochs']:.2f} epochs",
        "speed": f"{plan['seconds_per_step']:.2f} s per step, {plan['tokens_per_second']:,.0f} tokens/s: the mean of "
        f"{plan['measured_steps']} steps on this data",
        "stages": ", ".join(f"{name} {lap / total:.0%}" for name, lap in plan["stage_seconds"].items()),
        "faster": "; ".join(f"{name}: about {left:.2f} of the time" for name, left in plan["faster_options"].items()),
        "time": f"{plan['hours']:.2f} hours at that speed, evaluations and checkpoints not counted",
        "memory": f"{size(plan['memory_bytes'])} at most in those steps",
        "disk": f"{plan['checkpoints']} checkpoints of {size(plan['checkpoint_bytes'])}, the draft "
        f"{size(plan['draft_bytes'])}"
        + (f", features {size(plan['features_bytes'])}" if "features_bytes" in plan else ""),
    }
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items() if text)

"""``dflash train``, which is also ``python -m dflash.train`` for ``accelerate launch``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..progress import bars
from .loading import check_device, existing, load_target, load_tokenizer, stop_token_ids
from .shell import set_debug

__all__ = ["train"]


def train(
    model: Annotated[str, typer.Option(help="The target: a folder or a hub id.")],
    data: Annotated[str, typer.Option(help="Training rows: JSONL of chats, texts or tokens, or a data set's name.")],
    output: Annotated[Path, typer.Option(help="Folder for the draft, its checkpoints and metrics.jsonl.")],
    heldout: Annotated[str | None, typer.Option(help="Held-out rows; default: some of the data's prompts.")] = None,
    init: Annotated[str | None, typer.Option(help="Start from this drafter: a folder or a hub id.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")] = False,
    layers: Annotated[int | None, typer.Option(help="Draft layers.  [default: 5]")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block, the anchor counted.  [default: 16]")
    ] = None,
    taps: Annotated[
        str | None, typer.Option(help="Tapped target layers, as in 1,9,17; default: evenly spaced.")
    ] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="Default: the tokenizer's, or an unused row.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Width of the MLP; default: the target's.")] = None,
    sliding_window: Annotated[
        int | None, typer.Option(help="Window of all draft layers but the last; default: none.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompts were continued without a chat template.")] = False,
    bos: Annotated[bool, typer.Option("--bos", help="The tokenizer's BOS token was put before raw prompts.")] = False,
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Tell the chat template enable_thinking=False.")
    ] = False,
    max_length: Annotated[int, typer.Option(help="Tokens of a row at most; the target's positions, if fewer.")] = 3072,
    skip_long: Annotated[bool, typer.Option("--skip-long", help="Leave out rows whose prompt is longer.")] = False,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 6,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch, padding counted.")] = 4096,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a process for each step.")] = 1,
    anchors: Annotated[int, typer.Option(help="Blocks a row at most.")] = 512,
    gamma: Annotated[float | None, typer.Option(help="Decay of the weights in a block; default: by its size.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, or muon for matrices and AdamW for the rest.")] = "adamw",
    learning_rate: Annotated[float, typer.Option(help="The highest.")] = 6e-4,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Norm that gradients are clipped to.")] = 1.0,
    warmup: Annotated[float, typer.Option(help="Share of the run in which the rate rises.")] = 0.04,
    constant: Annotated[float, typer.Option(help="Share of the run after which the rate falls.")] = 1 / 3,
    distill: Annotated[float, typer.Option(help="Share of the distance to the target's distribution.")] = 0.0,
    feature_noise: Annotated[float, typer.Option(help="Uniform noise on the features, relative.")] = 0.05,
    cache_features: Annotated[
        Path | None, typer.Option(help="Keep the target's features in this folder, and read them from there.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed trains the same drafter.")] = 0,
    mixed_precision: Annotated[str, typer.Option(help="bf16 or no.")] = "bf16",
    threads: Annotated[int | None, typer.Option(help="CPU threads of a process.")] = None,
    log_every: Annotated[int, typer.Option(help="Steps between lines of metrics.")] = 10,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: at the end.")] = 500,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: at the end.")] = 500,
    eval_rows: Annotated[int, typer.Option(help="Held-out prompts that are answered.")] = 32,
    eval_tokens: Annotated[int, typer.Option(help="New tokens for each.")] = 128,
    eval_temperatures: Annotated[str, typer.Option(help="How they are decoded, as in 0,1.")] = "0",
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.")] = 3,
    tracker: Annotated[str | None, typer.Option(help="tensorboard or trackio.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the target: float32, bfloat16, float16 or auto.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; a few steps are timed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last metrics, or the plan, as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train a drafter for the target MODEL on rows of DATA, and write it to OUTPUT in the published layout.

    On several devices or machines: accelerate launch -m dflash.train with the same options.
    """
    if debug:
        set_debug(True)
    import torch

    from ..train.config import TrainConfig

    config = TrainConfig(
        epochs=epochs, steps=steps, batch_tokens=batch_tokens, accumulate=accumulate, anchors=anchors, gamma=gamma,
        optimizer=optimizer, learning_rate=learning_rate, weight_decay=weight_decay, clip=clip, warmup=warmup,
        constant=constant, distill=distill, feature_noise=feature_noise, seed=seed, mixed_precision=mixed_precision,
        log_every=log_every, eval_every=eval_every, save_every=save_every, eval_rows=eval_rows,
        eval_tokens=eval_tokens, eval_temperatures=_numbers("--eval-temperatures", eval_temperatures, float), keep=keep,
    )  # fmt: skip
    if dry_run and resume:
        raise ValueError("--dry-run plans a whole run: leave out --resume")
    if cache_features is not None and distill:
        raise ValueError("--distill needs the target's own distribution, which --cache-features does not keep")
    device = check_device(dtype, device)
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {device!r}")
    if os.environ.get("RANK", "0") == "0":
        _check_output(output, resume)
    _need("accelerate", "datasets")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)

    from ..train import data as source
    from ..train.data.features import cache_size
    from ..train.loop import Trainer, make_accelerator

    quiet = as_json or os.environ.get("RANK", "0") != "0"
    tokenizer = load_tokenizer(model, quiet)
    shell = _shell(model)
    chosen = {"layers": layers, "block_size": block_size, "taps": taps, "mask_token_id": mask_token_id}
    chosen |= {"intermediate_size": intermediate_size, "sliding_window": sliding_window}
    drafter = _drafter(shell, tokenizer, init, chosen, seed)
    text = shell.config.get_text_config(decoder=True)
    stops = stop_token_ids(model, text)
    longest = min(max_length, getattr(text, "max_position_embeddings", None) or max_length)

    def rows_of(name: str) -> Any:
        options = {"raw": raw, "bos": bos, "vocab_size": text.vocab_size, "skip_long": skip_long}
        options["stop_token_ids"] = stops
        template = {"enable_thinking": False} if no_thinking else None
        return source.load_rows(name, tokenizer, longest, template=template, **options)

    rows = rows_of(data)
    held = None if heldout is None else rows_of(heldout)
    tracker = None if dry_run else tracker
    accelerator = make_accelerator(config, output, cpu=device == "cpu", tracker=tracker)
    target = load_target(model, dtype, accelerator.device, quiet).requires_grad_(False)
    arguments = {"heldout": held, "accelerator": accelerator, "tracker": tracker}
    if dry_run:
        plan = Trainer(target, drafter, rows, config, output, **arguments).plan()
        if cache_features is not None:
            width = len(drafter.config.target_layer_ids) * text.hidden_size
            plan["features_bytes"] = cache_size(rows, width, _features_dtype(config, target))
        if accelerator.is_main_process:
            typer.echo(json.dumps(plan) if as_json else _described(plan))
        return
    trainer = Trainer(target, drafter, rows, config, output, **arguments)
    if cache_features is not None:
        trainer.features = _cache(trainer, cache_features)
    if resume and not trainer.resume() and accelerator.is_main_process:
        print(f"dflash: no checkpoint under {output}: starting anew", file=sys.stderr)
    last = trainer.train()
    if as_json and accelerator.is_main_process:
        typer.echo(json.dumps(last))


def _shell(model: str) -> Any:
    """The target without its weights, which says what is refused before they are loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..target import UnsupportedTargetError, refusal

    config = AutoConfig.from_pretrained(existing(model))
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)
    if reason := refusal(shell, loaded=False):
        raise UnsupportedTargetError(f"this target is not supported: {reason}")
    return shell


def _drafter(shell: Any, tokenizer: Any, init: str | None, chosen: dict[str, Any], seed: int) -> Any:
    """The drafter to start from, checked against the target."""
    import torch

    import dflash

    from ..generator import check_config
    from ..train.model import choose_mask_id, draft_config, new_drafter

    given = {name: value for name, value in chosen.items() if value is not None}
    if init is not None:
        if given:
            raise ValueError(f"--{next(iter(given)).replace('_', '-')} is that of --init: leave it out")
        drafter = dflash.load_draft(init, dtype=torch.float32)
        check_config(shell, drafter.config)
        return drafter
    mask = choose_mask_id(shell, tokenizer, given.pop("mask_token_id", None))
    if "taps" in given:
        given["target_layer_ids"] = _numbers("--taps", given.pop("taps"), int)
    if "layers" in given:
        given["num_layers"] = given.pop("layers")
    return new_drafter(draft_config(shell, mask_token_id=mask, **given), seed=seed)


def _features_dtype(config: Any, target: Any) -> Any:
    import torch

    return torch.bfloat16 if config.mixed_precision == "bf16" else next(target.parameters()).dtype


def _cache(trainer: Any, folder: Path) -> Any:
    """The features of the trainer's rows on disk; what is missing is computed, by all processes."""
    from ..train.data.features import FeatureCache, FeatureProgress, cache_features

    accelerator, taps = trainer.accelerator, trainer.drafter.config.target_layer_ids

    def compute(ids: Any) -> Any:
        with accelerator.autocast():
            return trainer.online(ids)[0]

    dtype = _features_dtype(trainer.config, trainer.target)
    place = {"rank": accelerator.process_index, "world": accelerator.num_processes}
    with bars(["features"], shown=accelerator.is_main_process) as show:

        def shown(state: FeatureProgress) -> None:
            show("features", state.rows, state.total_rows, f"{state.tokens_per_second:,.0f} tokens/s")

        cache_features(trainer.target, compute, trainer.rows, taps, folder, dtype=dtype, progress=shown, **place)
    accelerator.wait_for_everyone()
    return FeatureCache(folder)


def _described(plan: dict[str, Any]) -> str:
    """A plan as text, a line for each thing to know."""

    def size(count: float) -> str:
        return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

    lines = {
        "train": f"{plan['draft_parameters']:,} parameters, for a target of {plan['target_parameters']:,}",
        "on": f"{plan['device']}, {plan['processes']} process{'es' * (plan['processes'] > 1)}",
        "data": f"{plan['rows']:,} rows, {plan['row_tokens']:,} tokens; {plan['heldout_prompts']} held-out prompts, "
        f"{plan['heldout_rows']} rows of theirs left out",
        "run": f"{plan['steps']:,} steps of about {plan['tokens_per_step']:,} tokens, {plan['tokens']:,} in all, "
        f"{plan['epochs']:.2f} epochs",
        "speed": f"{plan['seconds_per_step']:.2f} s a step, {plan['tokens_per_second']:,.0f} tokens/s: the mean of "
        f"{plan['measured_steps']} steps on this data",
        "time": f"{plan['hours']:.2f} hours at that speed, evaluations and checkpoints not counted",
        "memory": f"{size(plan['memory_bytes'])} at most in those steps",
        "disk": f"{plan['checkpoints']} checkpoints of {size(plan['checkpoint_bytes'])}, the draft "
        f"{size(plan['draft_bytes'])}",
    }
    if "features_bytes" in plan:
        lines["disk"] += f", features {size(plan['features_bytes'])}"
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items())


def _numbers(option: str, text: str, kind: type) -> tuple:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be numbers between commas, got {text!r}") from None


def _check_output(output: Path, resume: bool) -> None:
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {str(output)!r} is a file")
    if not resume and output.is_dir() and any(output.iterdir()):
        raise ValueError(f"--output {str(output)!r} is not empty: name another folder, or --resume the run in it")


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"training needs {', '.join(missing)}: pip install '.[train]'")

"""``dflash train``, which is also ``python -m dflash.train`` for ``accelerate launch``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["train"]


def train(
    model: Annotated[str, typer.Option(help="The target: a folder or a hub id.")],
    data: Annotated[str, typer.Option(help="Training rows: JSONL of chats, texts or tokens, or a data set's name.")],
    output: Annotated[Path, typer.Option(help="Folder for the draft, its checkpoints and metrics.jsonl.")],
    heldout: Annotated[str | None, typer.Option(help="Held-out rows; default: some of the data.")] = None,
    init: Annotated[str | None, typer.Option(help="Start from this drafter: a folder or a hub id.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")] = False,
    layers: Annotated[int, typer.Option(help="Draft layers.")] = 5,
    block_size: Annotated[int, typer.Option(help="Tokens of a block, the anchor counted.")] = 16,
    taps: Annotated[
        str | None, typer.Option(help="Tapped target layers, as in 1,9,17; default: evenly spaced.")
    ] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="Default: the tokenizer's, or an unused row.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Width of the MLP; default: the target's.")] = None,
    sliding_window: Annotated[int, typer.Option(help="Window of all draft layers but the last; 0 is off.")] = 0,
    max_length: Annotated[int, typer.Option(help="Tokens of a row at most.")] = 3072,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 6,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch, padding counted.")] = 4096,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a process for each step.")] = 1,
    anchors: Annotated[int, typer.Option(help="Blocks a row at most.")] = 512,
    gamma: Annotated[float | None, typer.Option(help="Decay of the weights in a block; default: by its size.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 6e-4,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Norm that gradients are clipped to.")] = 1.0,
    warmup: Annotated[float, typer.Option(help="Share of the run in which the rate rises.")] = 0.04,
    constant: Annotated[float, typer.Option(help="Share of the run after which the rate falls.")] = 1 / 3,
    distill: Annotated[float, typer.Option(help="Share of the distance to the target's distribution.")] = 0.0,
    feature_noise: Annotated[float, typer.Option(help="Uniform noise on the features, relative.")] = 0.05,
    features: Annotated[Path | None, typer.Option(help="Folder of features computed before.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed trains the same drafter.")] = 0,
    mixed_precision: Annotated[str, typer.Option(help="bf16 or no.")] = "bf16",
    compile: Annotated[bool, typer.Option("--compile", help="Run the drafter through torch.compile.")] = False,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the last metrics as JSON.")] = False,
) -> None:
    """Train a drafter for the target MODEL on rows of DATA, and write it to OUTPUT in the published layout.

    On several devices or machines: accelerate launch -m dflash.train with the same options.
    """
    import torch

    from .loop import TrainConfig

    config = TrainConfig(
        epochs=epochs, steps=steps, batch_tokens=batch_tokens, accumulate=accumulate, anchors=anchors, gamma=gamma,
        learning_rate=learning_rate, weight_decay=weight_decay, clip=clip, warmup=warmup, constant=constant,
        distill=distill, feature_noise=feature_noise, seed=seed, mixed_precision=mixed_precision, compile=compile,
        log_every=log_every, eval_every=eval_every, save_every=save_every, eval_rows=eval_rows,
        eval_tokens=eval_tokens, eval_temperatures=_numbers("--eval-temperatures", eval_temperatures, float), keep=keep,
    )  # fmt: skip
    if tracker not in (None, "tensorboard", "trackio"):
        raise ValueError(f"--tracker must be tensorboard or trackio, got {tracker!r}")
    if threads is not None:
        torch.set_num_threads(threads)
    _check_output(output, resume)
    _need("accelerate", "datasets")
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import dflash

    from .draft import choose_mask_id, draft_config, new_drafter
    from .loop import Trainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = _load_rows(data, tokenizer, max_length)
    held = None if heldout is None else _load_rows(heldout, tokenizer, max_length)
    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision=mixed_precision, log_with=tracker, project_dir=str(output)
    )
    if tracker:
        accelerator.init_trackers("dflash")
    target = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(accelerator.device).eval()
    target.requires_grad_(False)
    if init is not None:
        drafter = dflash.load_draft(init, dtype=torch.float32)
    else:
        mask = choose_mask_id(target, tokenizer, mask_token_id)
        drafter = new_drafter(
            draft_config(
                target, mask_token_id=mask, num_layers=layers, block_size=block_size,
                target_layer_ids=None if taps is None else _numbers("--taps", taps, int),
                intermediate_size=intermediate_size, sliding_window=sliding_window,
            ),
            seed=seed,
        )  # fmt: skip
    cache = None
    if features is not None:
        from .features import FeatureCache

        cache = FeatureCache(features)
    trainer = Trainer(
        target, drafter, rows, config, output,
        heldout=held, features=cache, accelerator=accelerator, tracker=tracker,
    )  # fmt: skip
    if resume and not trainer.resume() and accelerator.is_main_process:
        print(f"dflash: no checkpoint under {output}: starting anew", file=sys.stderr)
    last = trainer.train()
    if as_json and accelerator.is_main_process:
        typer.echo(json.dumps(last))


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
    import importlib.util

    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"training needs {', '.join(missing)}: pip install 'dflash-engine[train]'")


def _load_rows(name: str, tokenizer: Any, max_length: int) -> Any:
    try:
        from .data import load_rows
    except ModuleNotFoundError:
        from datasets import Dataset

        return Dataset.from_list([json.loads(line) for line in Path(name).read_text().splitlines()])
    return load_rows(name, tokenizer, max_length)

"""Train a drafter for SmolLM2-135M-Instruct, which a package's wheel holds: ``python recipes/smollm2 FOLDER``.

The stages are the model; prompts, which it writes itself; its greedy and sampled answers; its features of these; the
drafter; and its evaluation on held-out files. A stage is skipped if FOLDER has its result, and continues if it was
interrupted. To repeat a stage, remove its result and those of later stages.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dflash.cli.running import run
from dflash.cli.sources import check_device

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]  # without -m, Python finds only what is in this folder
from recipes.smollm2.stages import PACKAGE, RESULTS, ROWS, Recipe  # noqa: E402


def main(  # noqa: PLR0913 - options, each with its help
    folder: Annotated[Path, typer.Argument(help="Folder of all results.")],
    only: Annotated[str | None, typer.Option(help=f"Run one stage: {', '.join(RESULTS)}.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of answers to train on, about.")] = 2_000_000,
    prompts: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="JSONL of more prompts; may be repeated.")
    ] = None,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="JSONL to evaluate on, not to train on; repeated."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help=f"The model as GGUF; default: {PACKAGE}'s.")
    ] = None,
    evaluated: Annotated[int | None, typer.Option(min=1, help="Held-out prompts per category; default: all.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, print what it will take, and stop.")] = False,
) -> None:
    """Train a drafter for SmolLM2-135M-Instruct in FOLDER, in stages. What is there already is not done again."""
    if only is not None and only not in RESULTS:
        raise ValueError(f"--only must be {', '.join(RESULTS)}, got {only!r}")
    device = check_device("auto", device)
    if device not in ROWS:
        raise ValueError(f"--device must be cpu or cuda, got {device!r}")
    recipe = Recipe(folder, tokens, prompts or [], held_out or [], model, evaluated, device)
    if only is not None:
        recipe.check(only)
    if only in (None, "model"):
        recipe.run("model")
    if only != "model":
        print(recipe.plan(), flush=True)
    stages = [only] if only else [name for name in RESULTS if name != "evaluation" or held_out]
    for stage in stages * (not dry_run):
        recipe.run(stage)
    if recipe.is_done("evaluation"):
        print(recipe.result("evaluation").with_suffix(".md").read_text(), end="")


if __name__ == "__main__":
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(main)
    run(command)

"""``dflash learn``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.light import OPTIONS, options, terminal

from ..config import LearnOptions

if TYPE_CHECKING:
    from dflash.internals import Store


@options.command(models=("tree", "weights"), learning=("batch_tokens", "replay"))
def learn(
    models: options.ModelOptions,
    words: Annotated[
        list[str], typer.Argument(metavar="[status|forget] FOLDER", help="The folder of dflash serve --learn.")
    ],
    base: Annotated[
        Path | None, "General answers of the target (dflash regenerate), half of what is learned from."
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    *,
    learning: LearnOptions,
) -> None:
    """Make the drafter of a server better with the answers that it has kept, or show them, or delete them.

    With --base it trains at idle priority while no request runs, replays
    the newest answers with the drafter before and after, and has the server adopt it if it is better.

    dflash learn status FOLDER shows what there is, dflash learn forget FOLDER deletes all of it.

    Example: dflash learn answers --model Qwen/Qwen3-4B --draft ./draft --base general.jsonl
    """
    action, folder = words if len(words) == 2 else ("", words[0])
    if len(words) > 2 or action not in ("", "status", "forget"):
        given = " ".join(map(terminal.printable, words))
        raise ValueError(f"name a folder, or status or forget and a folder, got {given}")
    from dflash.internals import Store

    store, name = Store(folder), terminal.printable(folder)
    if not store.folder.is_dir():
        raise ValueError(f"there is no folder {name}: start a server with --learn {name}")
    if action == "forget":
        count = store.forget()
        typer.echo(f"{count} answers and all that was learned from them are deleted")
    elif action == "status":
        _show(store)
    else:
        if base is None:
            raise ValueError(
                "--base needs general answers of the target, so that the drafter forgets nothing: write some with "
                "dflash regenerate PROMPTS --model MODEL --out answers.jsonl --temperature 0"
            )
        from dflash.internals import sources, targets

        from ..learn.learning import learn as learn_from
        from ..train.data import load_rows

        models = models.resolve(needs_draft=True)
        if models.draft == options.MTP:
            raise ValueError("a head in the target's own files cannot learn: name another drafter with --draft")
        _yield_the_machine(threads)
        source = dataclasses.replace(models.source(), keeps_blocks=False)  # it is trained with
        tokenizer = sources.load_tokenizer(source)
        target, draft, _ = models.load(source)
        rows = load_rows(base, tokenizer, min(3072, targets.max_positions(target) or 3072))
        # As dflash serve has them by default; the widths that "auto" chooses follow measured times.
        replay = {name: value for name, value in models.generator(draft).items() if OPTIONS[name].of_drafts}
        replay["block_size"] = None if models.block_size == "auto" else models.block_size
        replay["prefill_chunk"] = 64 if target.device.type == "cpu" else 128
        chosen = dataclasses.replace(learning, replay=replay)
        typer.echo(str(learn_from(store, target, draft, rows, chosen, say=lambda line: print(line, file=sys.stderr))))


def _yield_the_machine(threads: int) -> None:
    """Run at the lowest priority, in few threads."""
    import torch

    torch.set_num_threads(threads)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _show(store: Store) -> None:
    """Print how many answers and drafters there are."""
    from rich.console import Console
    from rich.table import Table

    files, drafters = store.answers(), store.drafters()
    size = sum(path.stat().st_size for path in files)
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime)) for path in files[:1] + files[-1:]]
    span = f", from {' to '.join(days)}" if days else ""
    served = f"drafter {drafters.adopted}" if drafters.adopted else "the drafter that it was started with"
    typer.echo(f"{len(files)} answers, {size / 1e6:.1f} MB{span}; a server serves {served}")
    reports = store.folder / "reports.jsonl"
    if not reports.exists():
        return
    table = Table("drafter", "learned from", "new answers", "general", "")
    for report in map(json.loads, reports.read_text().splitlines()):
        state = "adopted" if report["adopted"] else "not adopted"
        state = "rolled back" if report["drafter"] in drafters.refused else state
        gains = [f"{report[kind]['gain']:+.1%}" for kind in ("own", "general")]
        table.add_row(str(report["drafter"]), f"{report['answers']} answers", *gains, state)
    Console().print(table)

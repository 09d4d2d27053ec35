"""Progress bars on standard error, if that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from .terminal import printable

__all__ = ["bars"]


@contextlib.contextmanager
def bars(names: Iterable[str], *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar for each name; yields ``show(name, done, total, text)``, which writes ``text`` next to the bar.

    Args:
        names: of the things that are counted.
        shown: False hides the bars on a terminal too.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    # Names and texts may come from files, so neither rich's markup nor control characters in them do anything.
    name_column, text_column = (
        TextColumn(part, markup=False) for part in ("{task.description}", "{task.fields[text]}")
    )
    columns = (name_column, BarColumn(), MofNCompleteColumn(), text_column)
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
    ) as progress:
        tasks = {name: progress.add_task(printable(name), total=None, text="") for name in names}

        def show(name: str, done: int, total: int, text: str = "") -> None:
            progress.update(tasks[name], completed=done, total=total, text=printable(text))

        yield show

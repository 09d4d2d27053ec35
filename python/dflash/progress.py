"""Progress on standard error, where that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

__all__ = ["bars"]


@contextlib.contextmanager
def bars(names: Iterable[str], *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """A bar for each of ``names``; yields ``show(name, done, total, text)``, ``text`` being what is said beside it.

    Args:
        names: of what is counted.
        shown: False for no bars on a terminal either.
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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
    ) as progress:
        tasks = {name: progress.add_task(name, total=None, text="") for name in names}

        def show(name: str, done: int, total: int, text: str = "") -> None:
            progress.update(tasks[name], completed=done, total=total, text=text)

        yield show

"""Progress bars."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from rich import progress
from rich.console import Console

from dflash.light import terminal


@contextlib.contextmanager
def bars(names: Iterable[str], *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar per name on standard error, if that is a terminal.

    Yields:
        ``show(name, done, total, text)``, which writes ``text`` next to the bar.
    """
    console = Console(stderr=True)
    # Names and texts may come from files, so neither rich's markup nor control characters in them do anything.
    name, text = (progress.TextColumn(part, markup=False) for part in ("{task.description}", "{task.fields[text]}"))
    columns = (
        name,
        progress.BarColumn(bar_width=12),
        progress.MofNCompleteColumn(),
        text,
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as running:
        tasks = {name: running.add_task(terminal.printable(name), total=None, text="") for name in names}

        def show(name: str, done: int, total: int, text: str = "") -> None:
            running.update(tasks[name], completed=done, total=total, text=terminal.printable(text))

        yield show

"""Terminal output: results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

Update = Callable[[int, int], None]  # how much is done, and of how much

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str) -> None:
    """One red sentence on stderr."""
    err.print(f"error: {message}", style="bold red", markup=False)


def note(message: str) -> None:
    """One line about what is going on."""
    err.print(message, style="dim", markup=False)


def print_json(report: dict[str, Any]) -> None:
    """One line of JSON on stdout."""
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


@contextmanager
def progress(description: str, *, size_in_bytes: bool = False) -> Iterator[Update]:
    """A bar on a terminal, a line per quarter elsewhere; nothing until the first update."""
    if not err.is_terminal:
        yield _lines(description)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = [TextColumn("{task.description}"), BarColumn()]
    amount = [DownloadColumn(), TransferSpeedColumn()] if size_in_bytes else [MofNCompleteColumn()]
    bar = Bar(*columns, *amount, TimeRemainingColumn(), console=err, transient=True)
    task = bar.add_task(description, total=None)

    def update(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()


def _lines(description: str) -> Update:
    shown = -1

    def update(done: int, total: int) -> None:
        nonlocal shown
        quarter = 4 * done // total if total else 4
        if quarter > shown:
            shown = quarter
            note(f"{description}: {25 * quarter}%")

    return update

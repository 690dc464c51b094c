"""Terminal output: results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Update = Callable[[int, int], None]  # how much is done, and of how much

_MARKUP = re.compile(r"\[/?(?:bold|dim)\]")


class PlainConsole:
    """The part of rich's Console that this package uses, for when rich is not installed."""

    is_terminal = False  # no colours and no bars

    def __init__(self, *, stderr: bool = False) -> None:
        self._stderr = stderr

    def print(self, text: str = "", *, markup: bool = True, style: str = "") -> None:
        """One line; `style` is a terminal's matter."""
        stream = sys.stderr if self._stderr else sys.stdout
        stream.write((without_markup(text) if markup else text) + "\n")
        stream.flush()


def without_markup(text: str) -> str:
    """The text without [bold] and [dim]."""
    return _MARKUP.sub("", text)


def _console(stderr: bool) -> Any:
    try:
        from rich.console import Console
    except ImportError:
        return PlainConsole(stderr=stderr)
    return Console(stderr=stderr, highlight=False, soft_wrap=True)


out = _console(stderr=False)
err = _console(stderr=True)


def fail(message: str) -> None:
    """Print an error in red to stderr."""
    err.print(f"error: {message}", style="bold red", markup=False)


def note(message: str) -> None:
    """Print one line of progress to stderr."""
    err.print(message, style="dim", markup=False)


def print_json(report: Mapping[str, Any]) -> None:
    """One line of JSON on stdout."""
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns on stdout: the first one to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        out.print("  ".join(cells).rstrip(), markup=False)


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


def fetch(name: str) -> Path:
    """The local path of a model, downloaded or made first if need be."""
    from tokenmill.models.checkpoints import store

    with progress(f"Downloading {name}", size_in_bytes=True) as update:
        path = store.resolve(name, update)
    if about := store.about_made(path):
        note(f"{path.name} {about}")
    return path

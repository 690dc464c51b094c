"""Terminal output: results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from tokenmill.core.config import PROGRESS, SILENT

Update = Callable[[int, int], None]  # how much is done, and of how much


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    console.soft_wrap = not console.is_terminal  # lines of a pipe are whole
    return console


out = _console(stderr=False)
err = _console(stderr=True)


def fail(message: str) -> None:
    """Print an error in red to stderr; the program goes on where stderr takes no more."""
    with suppress(OSError):
        err.print(f"error: {message}", style="bold red", markup=False)


def note(message: str) -> None:
    """Print one line of progress to stderr; the program goes on where stderr takes no more."""
    with suppress(OSError):
        err.print(message, style="dim", markup=False)


def print_json(report: Mapping[str, Any], wanted: bool = True) -> None:
    """One line of JSON on stdout; on a terminal only where it is wanted."""
    if wanted or not sys.stdout.isatty():
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns on stdout: the first one to the left, the others to the right.

    On a terminal that is narrower, what does not fit follows below, beside the first column again.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    room = out.width if out.is_terminal else sum(widths) + 2 * len(widths)
    for number, block in enumerate(_blocks(widths, room)):
        if number:
            out.print()
        for first, *others in zip(columns[0], *(columns[i] for i in block), strict=True):
            cells = [first.ljust(widths[0])]
            cells += [cell.rjust(widths[i]) for cell, i in zip(others, block, strict=True)]
            out.print("  ".join(cells).rstrip(), markup=False)


def _blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """The columns after the first, cut into blocks that fit into the room beside it."""
    blocks: list[list[int]] = [[]]
    left = room - widths[0]
    for index, width in enumerate(widths[1:], 1):
        if blocks[-1] and left < width + 2:
            blocks.append([])
            left = room - widths[0]
        blocks[-1].append(index)
        left -= width + 2
    return blocks


@contextmanager
def progress(description: str, *, size_in_bytes: bool = False) -> Iterator[Update]:
    """A bar on a terminal, a line per quarter elsewhere; nothing until the first update."""
    others = os.environ.get(PROGRESS, "")
    if others == SILENT:
        yield lambda done, total: None
        return
    description += others
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

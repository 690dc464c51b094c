"""tokenmill bench verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.workload import BenchError
from tokenmill.settings import Settings
from tokenmill.settings.shared import JsonOption

PANELS = {"Report": JsonOption}
BROKEN: tuple[Literal["changed", "missing", "extra"], ...] = ("changed", "missing", "extra")


def verify(
    settings: Settings,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a result.")],
) -> None:
    """Check that the files of a result are unchanged since the run.

    Every file is compared with manifest.json. This shows accidental edits; it
    is not a signature.

    tokenmill bench verify results
    """
    from tokenmill.bench.results.manifest import verify as check
    from tokenmill.bench.results.reports import as_json

    report = check(folder)
    broken = {key: getattr(report, key) for key in BROKEN}
    if not settings.get("json"):
        for label, names in broken.items():
            for name in names:
                console.out.print(f"{label}: {name}", markup=False)
        if report.ok:
            text = f"{folder}: all {report.num_files} files are as the run wrote them"
            console.out.print(text, markup=False)
    console.print_json(as_json(report), settings.get("json"))
    if not report.ok:
        counts = ", ".join(f"{len(names)} {label}" for label, names in broken.items())
        raise BenchError(f"{folder} is not as the run wrote it: {counts}")


COMMANDS = (BenchCommand("verify", verify, PANELS),)

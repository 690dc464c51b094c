"""The folder that --output-dir names."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tokenmill import console
from tokenmill.bench.results.manifest import MANIFEST
from tokenmill.bench.workload import BenchError


class ResultFolder:
    """The folder of a result: made before the run, so that a wrong path fails at once.

    It never has two results, nor other files, which the manifest would list as parts of it.
    """

    def __init__(self, name: str) -> None:
        folder = Path(name).expanduser()
        self.path, number = folder, 1
        while self.path.is_dir() and any(self.path.iterdir()):
            if not (self.path / MANIFEST).is_file():
                raise BenchError(
                    f"--output-dir {name}: the folder has other files and no {MANIFEST}; give a "
                    "new or an empty one"
                )
            number += 1
            self.path = folder.with_name(f"{folder.name}-{number}")
        self.path.mkdir(parents=True, exist_ok=True)
        if number > 1:
            console.note(f"{folder} has a result already; this one goes to {self.path}")

    def write(self, fill: Callable[[Path], None]) -> bool:
        """Fill the folder, or a temporary one where its disk fails; False: neither took it."""
        try:
            fill(self.path)
        except OSError as error:
            console.fail(f"{self.path}: {error.strerror or error}")
            try:
                other = Path(tempfile.mkdtemp(prefix="tokenmill-result-"))
                shutil.copytree(self.path, other, dirs_exist_ok=True)
                fill(other)
            except OSError as error:
                console.fail(f"the result is not kept: {error.strerror or error}")
                return False
            console.note(f"the result is in {other} instead")
            self.path = other
        return True

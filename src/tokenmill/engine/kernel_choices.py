"""Kernels that a stopwatch chooses: once for a kind of GPU and of engine, and kept in a file.

Two ways of one product round differently, so replicas that chose differently would not answer token
for token alike. The first engine of a kind holds the trials; those that start meanwhile wait for
it, and all later ones take what it found. The file lies beside the models; who deletes it has the
trials held anew.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

WAIT_S = 120.0  # for another engine that captures its graphs, which takes 30 s by default
POLL_S = 0.2

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class KernelChoices:
    """What trials found; an engine that has them holds no more."""

    products: dict[str, bool]  # as kernels/product_trials.py names them
    most_prompts: dict[int, int]  # as SplitExecutor has them


@dataclass(slots=True)
class ChoiceFile:
    """The choices of one kind of engine, while its lock is held."""

    path: Path
    known: KernelChoices | None = None

    def keep(self, choices: KernelChoices) -> None:
        """Write what was found, whole or not at all."""
        try:
            part, name = tempfile.mkstemp(dir=self.path.parent)  # hosts may share the folder
            with open(part, "w", encoding="utf-8") as file:
                json.dump(asdict(choices), file)
            os.replace(name, self.path)
        except OSError as error:
            _log.warning("%s: choices of kernels are not kept: %s", self.path, error.strerror)


@contextmanager
def opened(
    folder: Path,
    key: object,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[ChoiceFile]:
    """The file of a kind of engine, whose `key` says all that its choices depend on.

    Where nothing is known yet, no other engine of this kind passes here until the block has ended.
    """
    file = ChoiceFile(folder / f"{blake2b(repr(key).encode(), digest_size=16).hexdigest()}.json")
    lock: TextIO | None = None
    held: TextIO | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = file.path.with_suffix(".lock").open("a")
        held = lock if _wait_for(lock, file.path, clock, sleep) else None
    except OSError as error:  # a folder that cannot be written, or a file system without locks
        _log.warning("%s: choices of kernels are not kept: %s", folder, error.strerror)
    try:
        file.known = _read(file.path)
        if held is not None and file.known is not None:
            fcntl.flock(held, fcntl.LOCK_UN)  # those that wait need not wait for the capture
        yield file
    finally:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_UN)  # a process forked meanwhile has it open, too
        if lock is not None:
            lock.close()


def _wait_for(
    lock: TextIO, path: Path, clock: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    """Take the lock, unless the choices are there first or it takes too long."""
    deadline = clock() + WAIT_S
    while not path.exists():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        if clock() >= deadline:
            _log.warning("%s: another engine holds trials for over %.0f s; this one holds its own",
                         path, WAIT_S)  # fmt: skip
            return False
        sleep(POLL_S)
    return False


def _read(path: Path) -> KernelChoices | None:
    """None where nothing is known, or what is written cannot be read."""
    try:
        fields = json.loads(path.read_text())
        products = {str(name): bool(second) for name, second in fields["products"].items()}
        prompts = {int(size): int(most) for size, most in fields["most_prompts"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("%s is not readable (%s): kernels are chosen anew", path, error)
        return None
    return KernelChoices(products, prompts)

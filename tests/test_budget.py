"""Lines are a budget: what each room of the package may have, and what its modules are like."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import tokenmill

PACKAGE = Path(tokenmill.__file__).parent
ROOT = PACKAGE.parents[1]
# Lines of Python. A commit that raises one says why.
ROOMS = {
    "api": 13200,
    "bench": 15450,
    "cli": 4650,
    "core": 4600,
    "engine": 9000,
    "engine_events": 650,
    "kernels": 12200,
    "kv": 2000,
    "layers": 850,
    "models": 5300,
    "plan": 6450,
    "proxy": 2550,
    "ranking": 2700,
    "routing": 2300,
    "sched": 3800,
    "settings": 1050,
    "text": 2600,
    "video": 1400,
    "vision": 1250,
    "workers": 6700,
    "": 1550,  # the modules beside the rooms
}
MAX_FILES = 581
MIN_MEDIAN = 149
MAX_OUTSIDE = 7625  # of benchmarks/ and scripts/; 924 of them train the draft module that ships


def lines(*folders: Path) -> int:
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    return sum(path.read_bytes().count(b"\n") for path in paths)


def test_rooms_are_known() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert rooms == ROOMS.keys() - {""}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_its_budget(room: str) -> None:
    rooms = [lines(PACKAGE / name) for name in ROOMS if name]
    found = lines(PACKAGE / room) - (0 if room else sum(rooms))
    assert found <= ROOMS[room], "delete something, or say in the commit why the room is raised"


def test_benchmarks_and_scripts_keep_theirs() -> None:
    assert lines(ROOT / "benchmarks", ROOT / "scripts") <= MAX_OUTSIDE


def test_modules_are_not_small() -> None:
    modules = [path.read_bytes().count(b"\n") for path in PACKAGE.rglob("*.py")]
    assert len(modules) <= MAX_FILES and statistics.median(modules) >= MIN_MEDIAN

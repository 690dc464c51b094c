"""Thousands of calls, a quarter of them abandoned, leave nothing behind: files, sockets, memory.

`pytest -s tests/soak --soak-calls 20000` is the long form, which holds memory to a bound. In the
short form records that are bounded (the latest receipts, times of the last minutes, cached blocks)
are still filling, so it only tells whole bodies and answers that stay.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from soak.kinds import CALLS, arguments, forget
from soak.soaked import Held, soak, soaked

LONG_FORM = 10_000  # calls from which records of the latest calls are full half-way
HISTORY_S = 310.0  # after which those of the last minutes are of an idle server
MOST_BYTES = 1.0  # of memory that a call may leave in the long form: 1 kB per 1,000 calls
# What the server's own records may differ by, however many calls there were: a sample for each of
# the last 300 seconds, the latest 1,000 receipts, and at most 2,048 times of each kind.
RECORDS_BYTES = 128 * 1024
MOST_FILLING = 3_000.0  # as MOST_BYTES, while bounded records are filling


def growth(before: Held, after: Held, count: int) -> dict[int, float]:
    """Bytes a call that each process keeps; one that has come meanwhile has none of before."""
    return {
        pid: (size - before.memory[pid]) / count
        for pid, size in after.memory.items()
        if pid in before.memory
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, so that the sockets of the server are in the folder that is watched."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        yield Path(name)


@pytest.mark.parametrize("kind", CALLS)
def test_calls_leave_nothing_behind(
    kind: str,
    request: pytest.FixtureRequest,
    folder: Path,
    record_property: Callable[[str, object], None],
) -> None:
    count: int = request.config.getoption("--soak-calls")
    with soaked(folder, arguments(kind, folder)) as server:
        looks: list[Held] = []
        for seed, share in enumerate((4, 4, 2)):  # the first look begins to count memory
            soak(server, CALLS[kind], count // share, seed)
            forget(kind, server)
            if seed and count >= LONG_FORM:
                time.sleep(HISTORY_S)
            looks.append(server.held(looks[-1].files if looks else None))
        _, before, after = looks
        kept = growth(before, after, count // 2)
        record_property("figures", {"bytes_per_call": list(kept.values()), "calls": count})
        assert server.process.pid in kept and len(kept) >= 2, kept
        assert after.temporary == before.temporary
        assert after.files <= before.files
        most = MOST_BYTES if count >= LONG_FORM else MOST_FILLING
        kept[server.process.pid] -= RECORDS_BYTES / (count // 2)
        assert max(kept.values()) < most, kept

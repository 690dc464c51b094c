"""Fixtures that many tests share."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tokenmill.models.checkpoints import store


def pytest_configure(config: pytest.Config) -> None:
    """Commands under test hear Ctrl-C, even where the tests themselves run in the background.

    torch computes in one thread: teams of several test processes would wait for each other.
    Run folders of servers are of this run alone.
    Hypothesis draws the same examples in every run, and a slow machine is no failure.
    No garbage is looked for among the modules of the tests, neither now nor later.
    A ZeroMQ context that a failed test leaves is not waited for: its sockets may never be closed.
    """
    gc.disable()
    if hasattr(config, "workerinput") and config.args == config.getini("testpaths"):
        config.args = own_order(config.workerinput)
    with suppress(ModuleNotFoundError):  # a GPU host may be without it
        from hypothesis import HealthCheck, settings

        checks = [HealthCheck.too_slow]
        settings.register_profile(
            "same", derandomize=True, deadline=None, suppress_health_check=checks
        )
        settings.load_profile("same")
    with suppress(ModuleNotFoundError):
        import zmq

        zmq.Context.__del__ = lambda self: None  # type: ignore[method-assign]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["XDG_RUNTIME_DIR"] = runtime = tempfile.mkdtemp(prefix="tokenmill-")
    config.add_cleanup(lambda: shutil.rmtree(runtime, ignore_errors=True))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def own_order(process: dict[str, Any]) -> list[str]:
    """All tests, begun elsewhere by each process of xdist: the others find them compiled then."""
    paths = sorted(Path(__file__).parent.glob("[!_]*/")) + sorted(
        Path(__file__).parent.glob("test_*.py")
    )
    number = int(process["workerid"].removeprefix("gw"))
    first = len(paths) * number // process["workercount"]
    return [str(path) for path in paths[first:] + paths[:first]]


# Files that take long, the longest first: begun late they would leave one process alone at the end.
LONG = (
    "workers/test_chaos.py",
    "kernels/test_triton.py",
    "e2e/test_parity.py",
    "engine/test_fp8_perplexity.py",
    "engine/test_golden_ways.py",
    "test_docs.py",
    "workers/test_placement.py",
    "e2e/",
    "test_ranks.py",
    "sched/test_scheduler_machine.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[int, Path]:
        number = next((i for i, name in enumerate(LONG) if name in item.nodeid), len(LONG))
        return number, item.path

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, pulled on first use."""
    return store.resolve("smollm2")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schema-cases",
        type=int,
        default=20,
        help="Calls that schemathesis makes of each route with a body, in each of two modes.",
    )
    parser.addoption(
        "--chaos-s", type=float, default=30.0, help="Seconds that workers are killed under load."
    )
    parser.addoption(
        "--soak-calls", type=int, default=160, help="Calls to each kind of server in tests/soak."
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests have measured, wherever they ran."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "figures" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid}: {json.dumps(value)}")

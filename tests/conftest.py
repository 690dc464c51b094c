"""Fixtures that many tests share."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tokenmill.models import store


def pytest_configure() -> None:
    """Commands under test hear Ctrl-C, even where the tests themselves run in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take long, most of it waiting: begun first, they leave no process alone at the end.
LONG = ("serve/test_chaos.py", "serve/test_supervisor.py", "e2e/", "engine/test_ranks.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, pulled on first use."""
    return store.resolve("smollm2")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chaos-s", type=float, default=120.0, help="Seconds that workers are killed under load."
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests have measured, wherever they ran."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "figures" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid}: {json.dumps(value)}")

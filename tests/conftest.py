"""Fixtures that many tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.models import store


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, pulled on first use."""
    return store.resolve("smollm2")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chaos-s", type=float, default=8.0, help="Seconds that workers are killed under load."
    )

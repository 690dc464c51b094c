"""Fixtures that many tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.models import store


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, pulled on first use."""
    return store.resolve("smollm2")

"""Versions where nothing was installed."""

import tomllib
from pathlib import Path

from tokenmill import __version__
from tokenmill.core.installation import package_version

ROOT = Path(__file__).parents[2]


def test_the_package_knows_its_version() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__


def test_a_package_without_metadata_has_none() -> None:
    assert package_version("no-such-package") is None
    assert package_version("pytest") is not None


def test_metadata_are_asked_for_in_one_place() -> None:
    files = (ROOT / "src").rglob("*.py")
    asking = {file.name for file in files if "importlib.metadata" in file.read_text()}
    assert asking == {"installation.py"}

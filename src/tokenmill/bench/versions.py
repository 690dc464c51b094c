"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version(name: str) -> str | None:
    """The installed version of a distribution; None where its metadata are not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None

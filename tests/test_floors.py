"""The least versions of packages with a fault that strangers can use: none older is installed."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]

# Package, the first version without the fault, its advisory, and what a stranger could do.
FLOORS = [
    ("jinja2", "3.1.6", "GHSA-cpwx-vrp4-4pq7", "a chat template leaves the sandbox by |attr"),
    ("starlette", "0.49.1", "GHSA-7f5h-v6xp-fcq8", "a Range header takes quadratic time"),
    ("starlette", "1.0.1", "CVE-2026-48710", "a Host header changes the path that is checked"),
    ("starlette", "1.3.0", "PYSEC-2026-248", "a path changes the host of request.url"),
    ("pillow", "12.1.1", "GHSA-cfh3-3jmp-rvhc", "an image writes outside of its memory"),
    ("pillow", "13.0.0", "GHSA-v9pv-5gc8-w2m6", "frames of an image reuse memory of another size"),
    ("xgrammar", "0.1.32", "GHSA-7rgv-gqhr-fxg3", "a nested grammar ends the process"),
    ("ray", "2.52.0", "GHSA-q279-jhrf-cc6v", "a web page runs code by the dashboard"),
    ("ray", "2.54.0", "CVE-2026-27482", "a web page deletes jobs by the dashboard"),
    ("ray", "2.56.0", "CVE-2026-57516", "a dataset runs code where it is read"),
    ("torch", "2.10.0", "GHSA-63cw-57p8-fm3p", "a file of latents runs code where it is read"),
]


def required() -> dict[str, Requirement]:
    """What the package and its extras require, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    found = map(Requirement, [*project["dependencies"], *extras])
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def constrained() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(name): exact for name, exact in (line.split("==") for line in lines)}


@pytest.mark.parametrize(("name", "least", "advisory"), [row[:3] for row in FLOORS])
def test_no_version_with_a_known_fault_is_taken(name: str, least: str, advisory: str) -> None:
    requirement = required()[name]
    floors = [spec.version for spec in requirement.specifier if spec.operator == ">="]
    assert floors and Version(floors[0]) >= Version(least), f"{advisory}: {requirement}"
    assert Version(constrained()[name]) >= Version(least), f"{advisory}: constraints.txt"
    assert Version(version(name)) >= Version(least), f"{advisory}: what is installed"


def test_every_constraint_is_an_exact_version_that_the_requirements_allow() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    pinned = constrained()
    for name, requirement in required().items():
        if name in pinned:
            assert requirement.specifier.contains(pinned[name]), f"{requirement}: {pinned[name]}"

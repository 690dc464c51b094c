"""A model file out of a wheel: an installed package has it, or pip or uv fetches the wheel."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tokenmill.core.types import ModelLoadError

if TYPE_CHECKING:
    from tokenmill.models.checkpoints.store import CatalogEntry

Progress = Callable[[int, int], None]  # bytes so far, and in all

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_NO_INSTALLER = (
    "is in the wheel {}, and neither pip nor uv is there to download it; type "
    "'python -m ensurepip', or install uv, or install that wheel into this environment"
)


def model_file(entry: CatalogEntry, folder: Path, progress: Progress | None) -> Path:
    """The model's file in `folder`, its hash checked."""
    target = folder / entry.file_name
    if installed := _installed(entry):
        with installed.open("rb") as source:
            _copy(source, target, entry)
        return target
    wheel = folder / "wheel"
    wheel.mkdir()
    _run(_command(entry, wheel), wheel, entry, progress)
    if found := sorted(wheel.glob("*.whl")):
        _copy_from_wheel(found[0], target, entry)
    else:
        with (wheel / "site" / entry.member).open("rb") as source:
            _copy(source, target, entry)
    if progress is not None:
        progress(entry.wheel_bytes, entry.wheel_bytes)
    return target


def _installed(entry: CatalogEntry) -> Path | None:
    """The file where the wheel is installed beside this package, or None."""
    package, _, file = entry.member.partition("/")
    spec = find_spec(package)
    for place in (spec and spec.submodule_search_locations) or ():
        if (path := Path(place) / file).is_file():
            return path
    return None


def _command(entry: CatalogEntry, folder: Path) -> list[str]:
    """pip's command, or uv's where pip is missing: each keeps to its own settings."""
    if find_spec("pip"):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
        return [*command, "--dest", str(folder), entry.requirement]
    if uv := os.environ.get("UV") or shutil.which("uv"):
        command = [uv, "pip", "install", "--no-deps", "--only-binary=:all:", "--no-progress"]
        command += ["--python", sys.executable, "--target", str(folder / "site")]
        # What uv has so far can be measured in a cache of its own.
        return [*command, "--cache-dir", str(folder / "uv"), entry.requirement]
    raise ModelLoadError(f"{entry.name} {_NO_INSTALLER.format(entry.requirement)}")


def _run(command: list[str], folder: Path, entry: CatalogEntry, progress: Progress | None) -> None:
    """Run an installer, reporting how far its files have grown; quote it where it fails."""
    environment = os.environ | {"TMPDIR": str(folder)}  # what pip has so far can be measured here
    with (folder / "log").open("w+", encoding="utf-8") as log:
        with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
            try:
                _wait(process, folder, entry.wheel_bytes, progress)
            except BaseException:
                process.kill()
                raise
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    if process.returncode:
        tool = "uv pip install" if "--target" in command else "pip download"
        said = _reason(lines) or f"exit status {process.returncode}"
        raise ModelLoadError(f"{entry.name}: {tool} {entry.requirement} failed: {said}")


def _reason(lines: list[str]) -> str:
    """pip's last words; all of uv's, which tells an error, its causes and a hint."""
    told = [line.strip("×├╰│─▶ ") for line in lines if not line.startswith("Using ")]
    first = next((index for index, line in enumerate(told) if line.startswith("error: ")), -1)
    return " ".join(told[first:])


def _wait(
    process: subprocess.Popen[bytes], folder: Path, total: int, progress: Progress | None
) -> None:
    done = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return
        done = max(done, min(_folder_bytes(folder), total))
        if progress is not None:
            progress(done, total)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):  # moved meanwhile
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _copy_from_wheel(wheel: Path, target: Path, entry: CatalogEntry) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _check_hash(wheel.name, digest, entry.wheel_sha256)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as member:
            _copy(member, target, entry)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name}: cannot unpack {entry.member}: {error}") from error


def _copy(source: IO[bytes], target: Path, entry: CatalogEntry) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
    _check_hash(entry.file_name, digest.hexdigest(), entry.sha256)


def _check_hash(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelLoadError(f"{name}: sha256 is {found}, expected {expected}; nothing was kept")

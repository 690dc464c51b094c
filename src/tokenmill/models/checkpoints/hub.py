"""Models of the Hugging Face hub: what cannot work is refused before its weights are downloaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenmill.core.gpus import visible_gpus
from tokenmill.core.types import ModelLoadError

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHTS = (".safetensors", ".gguf")
_SMALLEST = 0.5  # of the bytes of a file: int8 of what is published in bf16

Say = Callable[[str], None]


def download(repository: str, file_name: str | None, ignored: list[str], say: Say) -> Path:
    """A repository's model files without those that `ignored` matches, or one GGUF file."""
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError as error:
        raise ModelLoadError("hub names need the huggingface_hub package") from error
    if file_name:
        _check_room(repository, [hf_hub_download(repository, file_name, dry_run=True)], say)
        return Path(hf_hub_download(repository, file_name))
    options: dict[str, Any] = {"allow_patterns": _FILES, "ignore_patterns": ignored}
    files = snapshot_download(repository, dry_run=True, **options)
    if any(file.filename == "config.json" for file in files):
        _check_config(repository, Path(hf_hub_download(repository, "config.json")))
    _check_room(repository, files, say)
    return Path(snapshot_download(repository, **options))


def cached_repositories() -> Iterator[tuple[str, Path, int, Callable[[], None]]]:
    """Name, folder and bytes of each model in the hub's cache, and what removes it."""
    try:
        from huggingface_hub import CacheNotFound, scan_cache_dir
    except ImportError:
        return
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in cache.repos:
        if repo.repo_type == "model":
            removal = cache.delete_revisions(*(r.commit_hash for r in repo.revisions))
            yield repo.repo_id, repo.repo_path, repo.size_on_disk, removal.execute


def _check_config(repository: str, path: Path) -> None:
    """Refuse an architecture that no family of this package computes."""
    from tokenmill.models import spec_of  # imports torch

    try:
        spec_of(json.loads(path.read_text(encoding="utf-8")))
    except ModelLoadError as error:
        raise ModelLoadError(f"model {repository!r}: config.json: {error}") from None


def _check_room(repository: str, files: Iterable[Any], say: Say) -> None:
    """Say how much is to come; refuse what does not fit onto the disk or into memory."""
    from huggingface_hub.constants import HF_HUB_CACHE

    weights = sum(f.file_size or 0 for f in files if f.filename.endswith(_WEIGHTS))
    missing = sum(f.file_size or 0 for f in files if f.will_download)
    folder = _existing(Path(HF_HUB_CACHE))
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ModelLoadError(
            f"model {repository!r}: {_gb(missing)} are to be downloaded to {HF_HUB_CACHE}, and "
            f"{_gb(free)} are free; HF_HOME chooses another folder"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not visible_gpus() and weights * _SMALLEST > memory:
        raise ModelLoadError(
            f"model {repository!r}: weights of {_gb(weights)} do not fit into the {_gb(memory)} of "
            "memory of this machine, which has no GPU; choose a smaller model"
        )
    if missing:
        say(f"{repository}: {_gb(missing)} to download to {HF_HUB_CACHE}, {_gb(free)} are free")


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"

"""manifest.json of a result folder: software, hardware and settings of the run, and file digests.

The digests show accidental edits. They are not a signature: whoever changes a file can change the
manifest as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tokenmill
from tokenmill.bench.results.reports import Facts, VerifyReport, as_json
from tokenmill.bench.workload import BenchError
from tokenmill.core.installation import package_version

MANIFEST = "manifest.json"
FORMAT = 1
PACKAGES = (
    *("torch", "triton", "numpy", "numba", "safetensors", "gguf", "tokenizers", "transformers"),
    *("mlcommons-loadgen", "msgspec", "pyzmq", "uvloop", "httptools", "fastapi", "uvicorn"),
    "xgrammar",
)
SECRETS = ("api-key", "api_key", "api_keys")
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
GPU_TIMEOUT_S = 10.0
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
HIDDEN = "(not recorded)"


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def make_facts(benchmark: str, configuration: Mapping[str, Any], started_at: str) -> Facts:
    """The manifest without its files: software, hardware, settings and times of the run."""
    return Facts(
        format=FORMAT,
        benchmark=benchmark,
        started_at=started_at,
        ended_at=utc_now(),
        software=software(),
        hardware=hardware(),
        configuration=public(configuration),
    )


def public(values: Any) -> Any:
    """The same values without keys and passwords, as JSON knows them."""
    if isinstance(values, Mapping):
        return {
            str(name): HIDDEN if name in SECRETS and value else public(value)
            for name, value in values.items()
        }
    if isinstance(values, list | tuple):
        return [public(value) for value in values]
    return values if isinstance(values, str | int | float | bool | None) else str(values)


def software() -> dict[str, str]:
    """Versions of what is installed; nothing is imported for it."""
    found = {
        "tokenmill": tokenmill.__version__,
        "tokenmill_source_sha256": source_digest(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for name in PACKAGES:
        if version := package_version(name):
            found[name] = version
    return found


def source_digest() -> str:
    """SHA-256 over the package's own sources: two of one version may differ."""
    root = Path(tokenmill.__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def hardware() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "num_usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": gpus(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU; its name alone without nvidia-smi."""
    if shutil.which(GPU_QUERY[0]):
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                GPU_QUERY, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True
            )
            return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    lines = [
        line
        for path in sorted(GPU_FOLDER.glob("*/information"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def write_manifest(folder: Path, facts: Facts) -> None:
    """The last file of a result: it has the digests of all the others."""
    manifest = as_json(facts) | {"files": file_digests(folder)}
    manifest["digest"] = _digest(manifest)
    text = json.dumps(manifest, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def file_digests(folder: Path) -> dict[str, dict[str, Any]]:
    """SHA-256 and size of every file of a folder, but of its manifest."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = {"sha256": digest, "bytes": path.stat().st_size}
    return found


def _digest(manifest: Mapping[str, object]) -> str:
    """SHA-256 over everything in the manifest but itself."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, or one sentence on why there is none."""
    if not folder.is_dir():
        raise BenchError(f"{folder} is not a folder")
    path = folder / MANIFEST
    if not path.is_file():
        below = next(folder.rglob(MANIFEST), None)
        hint = f"; {below.parent} is one" if below else ""
        raise BenchError(f"{folder} has no {MANIFEST}: it is not the folder of a result{hint}")
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{path} is not JSON ({error}): the file was edited") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise BenchError(f"{path} lists no files: it was edited, or is not a result's manifest")
    return dict(manifest)


def verify(folder: Path) -> VerifyReport:
    """Find files that differ from the manifest; the manifest itself is checked as well."""
    manifest = read_manifest(folder)
    listed, found = manifest["files"], file_digests(folder)
    changed = [name for name in listed if name in found and listed[name] != found[name]]
    if manifest.get("digest") != _digest(manifest):
        changed.append(MANIFEST)
    missing, extra = _without(listed, found), _without(found, listed)
    return VerifyReport(
        ok=not (changed or missing or extra),
        num_files=len(listed),
        changed=changed,
        missing=missing,
        extra=extra,
    )


def _without(names: Iterable[str], others: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in names if name not in others)

"""Reads a round from a path: finds the result file of a folder, and the tool that wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmill.bench.mlperf import loadgen
from tokenmill.bench.results import external_results
from tokenmill.bench.results import native_results as own
from tokenmill.bench.results.manifest import MANIFEST
from tokenmill.bench.results.result import ToolResult, flat
from tokenmill.bench.workload import BenchError

# What the tools call their result in a folder.
FILES = (
    "summary.json",
    "profile_export_aiperf.json",
    "benchmarks.json",
    "performance/result_summary.json",
    "result_summary.json",
)
KNOWN = ", ".join(
    [
        "tokenmill bench (summary.json or the last line)",
        *(name for *_, name in external_results.READERS),
    ]
)


def read_round(path: Path) -> ToolResult:
    """The result in a file or a folder; BenchError says what is wrong with it."""
    if not path.exists():
        raise BenchError(f"{path}: no such file or folder")
    if path.is_dir():
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if file is None:
            return _read_logs(path)
        path = file
    data = _load(path)
    try:
        found = _read(data, path)
    except BenchError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"{type(error).__name__} {error}"
        raise BenchError(f"{path}: looks like a result but is broken: {what}") from None
    if not any(point.values for point in found.points):
        raise BenchError(f"{path}: the result has no figures")
    return found


def _read_logs(folder: Path) -> ToolResult:
    if not next(folder.rglob(loadgen.DETAIL), None):
        raise BenchError(
            f"{folder}: has none of {', '.join(FILES)} nor LoadGen's {loadgen.DETAIL}; "
            f"bench compare reads {KNOWN}"
        )
    try:
        return own.read_loadgen(folder)
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{folder}: broken LoadGen logs: {error}") from None


def _load(path: Path) -> dict[str, Any]:
    """The JSON of a file, or of its last line: a saved output has text before it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: cannot be read: {error}") from None
    last = text.rstrip().rpartition("\n")[2]
    for candidate in (text, last):
        try:
            data = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(data, dict):
            return data
    raise BenchError(f"{path}: is not a JSON object; bench compare reads {KNOWN}")


def _machine(manifest: Path) -> dict[str, Any]:
    """Software and hardware of a result folder, where it has a manifest."""
    if not manifest.is_file():
        return {}
    data = _load(manifest)
    return flat({key: data.get(key) for key in ("software", "hardware")})


def _read(data: dict[str, Any], path: Path) -> ToolResult:
    if read := own.READERS.get(str(data.get("benchmark"))):
        found = read(data, path)
        found.config |= _machine(path.with_name(MANIFEST)) if path.name == FILES[0] else {}
        return found
    for matches, read, _ in external_results.READERS:
        if matches(data):
            return read(data, path)
    raise BenchError(f"{path}: is not a result of a known tool; bench compare reads {KNOWN}")

"""Reads the facts of an MLPerf Endpoints submission that only the submitter knows.

They are in one TOML file: [submission] names the folders, [point] and [seeds] fill point.yaml, and
[system] fills system_desc.json. [point] and [system] may have more keys of the rules' schema.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.bench.workload import BenchError

REQUIRED: dict[str, dict[str, str]] = {
    "submission": {
        "organization": "folder of the submitting organization",
        "submission_id": "folder of this submission",
        "system": "folder of the system, below results/",
        "src": "folder of the implementation with its README.md; copied to src/",
        "docs": "folder of the documentation; copied to docs/",
    },
    "point": {
        "model_name": "as the rules spell it, such as llama3_1-8b",
        "model_precision": "lowest precision of the weights",
        "link_to_model": "",
        "dataset": "key of the dataset, such as cnn_dailymail",
        "dataset_name": "",
        "dataset_type": "Performance, Accuracy or Accuracy + Performance",
        "dataset_link": "",
        "seed_set": "published seed set, such as A",
        "target_cohort": "YYYY-MM-C0 or YYYY-MM-C1",
    },
    "seeds": {
        "scheduler_rng_seed": "of that set",
        "sample_index_rng_seed": "of that set; decides the order of the samples",
        "model_seed": "of that set",
    },
    "system": {
        "system_name": "",
        "shortened_system_name": "20 characters at most",
        "division": "Standardized, Serviced or RDI",
        "system_availability_status": "Available, Preview or RDI",
        "system_size": "",
        "system_node_ensemble_count": "different kinds of nodes",
        "system_node_ensemble_total": "nodes in all",
    },
    "system.node_types": {
        "system_node_ensemble_id": "",
        "number_of_nodes": "",
        "host_processor_core_count": "",
        "host_memory_configuration": "",
        "host_network_card_count": "",
        "driver": "",
        "filesystem": "",
    },
}
INTEGERS = frozenset(
    (
        *REQUIRED["seeds"],
        *("system_node_ensemble_count", "system_node_ensemble_total"),
        *("system_node_ensemble_id", "number_of_nodes", "host_processor_core_count"),
    )
)
MEASURED = ("max_supported_concurrency", "tps_utilization")  # written by the campaign
_PLACEHOLDER = re.compile(r"\s*|.*\b(todo|tbd|fixme|placeholder)\b.*|<.*>|\?+|x{3,}", re.I | re.S)
_FOLDER = re.compile(r"[A-Za-z0-9][\w.\-]*")


@dataclass(frozen=True, slots=True)
class Disclosure:
    """The checked tables."""

    submission: dict[str, Any]
    point: dict[str, Any]
    seeds: dict[str, int]
    system: dict[str, Any]

    @property
    def src(self) -> Path:
        return Path(self.submission["src"])

    @property
    def docs(self) -> Path:
        return Path(self.submission["docs"])

    @property
    def power(self) -> Path | None:
        """system_power.json, where one is given."""
        return Path(self.submission["power"]) if "power" in self.submission else None


def template() -> str:
    """The file with every value left open."""
    lines = ["# MLPerf Endpoints: what only the submitter knows. An empty value is refused."]
    for table, keys in REQUIRED.items():
        lines += ["", f"[[{table}]]" if table == "system.node_types" else f"[{table}]"]
        for key, text in keys.items():
            kind = "a number" if key in INTEGERS else ""
            remark = ": ".join(part for part in (kind, text) if part)
            lines.append(f'{key} = ""' + (f"  # {remark}" if remark else ""))
        if table == "submission":
            lines.append('# power = ""  # system_power.json; needed in division Standardized')
        if table == "system":
            lines.append('# availability_url = ""  # if Available')
            lines.append('# target_availability_date = ""  # if Preview')
    return "\n".join(lines) + "\n"


def read_disclosure(path: Path) -> Disclosure:
    """Every required value is there, has its type and is no placeholder; folders exist."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"--disclosure {path}: cannot read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"--disclosure {path}: not a TOML file: {error}") from None
    where = f"--disclosure {path}"
    tables = {name: _table(found, name, where) for name in ("submission", "point", "seeds")}
    system = _table(found, "system", where)
    nodes = system.get("node_types")
    if not isinstance(nodes, list) or not nodes:
        raise BenchError(
            f"{where}: [[system.node_types]] is missing: give one for each kind of node"
        )
    for node in nodes:
        _check(node, "system.node_types", where)
    for key in MEASURED:
        if key in system or key in tables["point"]:
            raise BenchError(f"{where}: {key} is measured by the campaign: leave it out")
    for key in ("organization", "submission_id", "system"):
        if not _FOLDER.fullmatch(tables["submission"][key]):
            raise BenchError(f"{where}: [submission] {key} must be the name of a folder")
    disclosure = Disclosure(**tables, system=system)
    _check_files(disclosure, where)
    return disclosure


def _table(found: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    table = found.get(name)
    if not isinstance(table, dict):
        raise BenchError(f"{where}: [{name}] is missing")
    _check(table, name, where)
    return table


def _check(table: Any, name: str, where: str) -> None:
    for key in REQUIRED[name]:
        if not isinstance(table, dict) or key not in table:
            raise BenchError(f"{where}: [{name}] {key} is missing")
    for key, value in table.items():
        if isinstance(value, str) and _PLACEHOLDER.fullmatch(value):
            raise BenchError(f"{where}: [{name}] {key} is not filled in yet, it is {value!r}")
        wanted = int if key in INTEGERS else str
        if key in REQUIRED[name] and (isinstance(value, bool) or not isinstance(value, wanted)):
            kind = "a whole number" if wanted is int else "a text"
            raise BenchError(f"{where}: [{name}] {key} must be {kind}, got {value!r}")


def _check_files(disclosure: Disclosure, where: str) -> None:
    if not (disclosure.src / "README.md").is_file():
        raise BenchError(f"{where}: [submission] src = {disclosure.src}: there is no README.md")
    if not disclosure.docs.is_dir():
        raise BenchError(f"{where}: [submission] docs = {disclosure.docs}: no such folder")
    if disclosure.power is not None and not disclosure.power.is_file():
        raise BenchError(f"{where}: [submission] power = {disclosure.power}: no such file")

"""Results in the folder layout of an MLPerf Inference v6.0 submission."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.bench.loadgen import ACCURACY, DETAIL, SUMMARY

MAX_ACCURACY_LOG = 10 * 1024  # the checker refuses longer ones
KEPT = 4096  # bytes that a truncated log keeps of each end
ACCURACY_TEXT = "accuracy.txt"

# Fields that the checker requires of systems/*.json (SYSTEM_DESC_REQUIRED_FIELDS). What this
# machine does not tell is left empty for the submitter.
SYSTEM_FIELDS = (
    *("division", "submitter", "status", "system_name", "number_of_nodes"),
    *("host_processor_model_name", "host_processors_per_node", "host_processor_core_count"),
    *("host_memory_capacity", "host_storage_capacity", "host_storage_type"),
    *("accelerators_per_node", "accelerator_model_name", "accelerator_memory_capacity"),
    *("framework", "operating_system", "system_type", "other_software_stack"),
    *("host_processor_frequency", "host_processor_caches", "host_memory_configuration"),
    *("host_processor_interconnect", "host_networking", "host_networking_topology"),
    *("accelerator_frequency", "accelerator_host_interconnect", "accelerator_interconnect"),
    *("accelerator_interconnect_topology", "accelerator_memory_configuration"),
    *("accelerator_on-chip_memories", "cooling", "hw_notes", "sw_notes"),
    *("host_network_card_count", "system_type_detail"),
)
# Those of them that it refuses when they are empty.
MEANINGFUL_FIELDS = (
    *("division", "submitter", "system_type", "status", "system_name", "number_of_nodes"),
    *("host_processor_model_name", "host_processors_per_node", "host_processor_core_count"),
    *("host_memory_capacity", "host_memory_configuration", "host_storage_capacity"),
    *("host_storage_type", "host_networking", "host_network_card_count"),
    *("host_networking_topology", "accelerators_per_node", "accelerator_model_name"),
    *("accelerator_memory_capacity", "accelerator_host_interconnect"),
    *("accelerator_memory_configuration", "accelerator_interconnect", "cooling", "framework"),
    *("operating_system", "other_software_stack"),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a submission are, below one folder."""

    root: Path
    division: str
    submitter: str
    system: str
    benchmark: str
    scenario: str

    @property
    def submitter_folder(self) -> Path:
        return self.root / self.division / self.submitter

    @property
    def system_file(self) -> Path:
        return self.submitter_folder / "systems" / f"{self.system}.json"

    @property
    def scenario_folder(self) -> Path:
        results = self.submitter_folder / "results"
        return results / self.system / self.benchmark / self.scenario

    @property
    def performance(self) -> Path:
        return self.scenario_folder / "performance" / "run_1"

    @property
    def accuracy(self) -> Path:
        return self.scenario_folder / "accuracy"


def write_system(layout: Layout, known: Mapping[str, Any]) -> list[str]:
    """systems/<system>.json with every required field; those that the submitter must still fill.

    What the submitter has filled in an earlier one stays.
    """
    own = {
        "division": layout.division,
        "submitter": layout.submitter,
        "system_name": layout.system,
        "status": "available",
        "system_type": "datacenter",
        "number_of_nodes": "1",
    }
    filled = {name: value for name, value in _read_json(layout.system_file).items() if value}
    fields = dict.fromkeys(SYSTEM_FIELDS, "") | filled | own | dict(known)
    _write_json(layout.system_file, fields)
    return [name for name in MEANINGFUL_FIELDS if not fields[name]]


def write_measurements(
    layout: Layout,
    user_conf: str,
    weights: str,
    dtype: str,
    transformation: str,
    notices: list[str],
) -> None:
    """user.conf and measurements.json beside the results."""
    folder = layout.scenario_folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "user.conf").write_text(user_conf, encoding="utf-8")
    fields = {
        "input_data_types": "int32",
        "retraining": "No",
        "starting_weights_filename": weights,
        "weight_data_types": dtype,
        "weight_transformations": transformation,
        "notes": notices,
    }
    _write_json(folder / "measurements.json", fields)


def write_texts(layout: Layout, notices: list[str], command: str) -> None:
    """README.md of the results and of the sources."""
    lines = [f"# {layout.benchmark}, {layout.scenario}", "", *notices, "", "```", command, "```"]
    text = "\n".join(lines) + "\n"
    for folder in (
        layout.scenario_folder,
        layout.submitter_folder / "src" / layout.benchmark,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "README.md").write_text(text, encoding="utf-8")


def copy_performance(layout: Layout, logs: Path) -> None:
    """The two logs of a performance run."""
    layout.performance.mkdir(parents=True, exist_ok=True)
    for name in (SUMMARY, DETAIL):
        shutil.copyfile(logs / name, layout.performance / name)


def copy_accuracy(layout: Layout, logs: Path, scores: Mapping[str, float]) -> None:
    """The logs of an accuracy run, the answers truncated, and accuracy.txt with their hash."""
    layout.accuracy.mkdir(parents=True, exist_ok=True)
    for name in (SUMMARY, DETAIL):
        shutil.copyfile(logs / name, layout.accuracy / name)
    answers = (logs / ACCURACY).read_bytes()
    (layout.accuracy / ACCURACY).write_bytes(truncated(answers))
    digest = hashlib.sha256(answers).hexdigest()
    text = f"\nResults\n\n{dict(scores)}\n\nhash={digest}\n"
    (layout.accuracy / ACCURACY_TEXT).write_text(text, encoding="utf-8")


def truncated(log: bytes) -> bytes:
    """Both ends of a log that is too long."""
    if len(log) <= MAX_ACCURACY_LOG:
        return log
    return log[:KEPT] + b"\n\n...\n\n" + log[-KEPT:]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

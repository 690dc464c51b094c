"""Results in the folder layout of an MLPerf Inference submission (v6.0 and v6.1 alike)."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill import __version__
from tokenmill.bench.mlperf.loadgen import ACCURACY, DETAIL, SUMMARY, read_answers

MAX_ACCURACY_LOG = 10 * 1024  # the checker refuses longer ones
KEPT = 4096  # bytes that a truncated log keeps of each end
ACCURACY_TEXT = "accuracy.txt"
VIDEOS = "videos"  # the folder of an accuracy run's videos, beside its logs

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
# What holds for every system of one node without the submitter's word; theirs wins.
SINGLE_NODE = {
    "status": "available",
    "system_type": "datacenter",
    "number_of_nodes": "1",
    "host_networking_topology": "N/A",
}
# Of a machine without accelerators.
NO_ACCELERATOR = {
    "accelerators_per_node": "0",
    **dict.fromkeys((name for name in SYSTEM_FIELDS if name.startswith("accelerator_")), "N/A"),
}


@dataclass(frozen=True, slots=True)
class SubmissionLayout:
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


def write_system(
    layout: SubmissionLayout, known: Mapping[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """systems/<system>.json with every required field.

    What stands in an earlier one stays, but for what the folder's name says. Returned are the
    fields that the submitter must still fill, and what `known` has different from a kept one.
    """
    place = {
        "division": layout.division,
        "submitter": layout.submitter,
        "system_name": layout.system,
    }
    found = SINGLE_NODE | dict(known)
    kept = {name: value for name, value in _read_json(layout.system_file).items() if value != ""}
    fields = dict.fromkeys(SYSTEM_FIELDS, "") | found | kept | place
    _write_json(layout.system_file, fields)
    empty = [name for name in MEANINGFUL_FIELDS if fields[name] == ""]
    return empty, {name: ours for name, ours in found.items() if fields[name] != ours}


def describe_machine() -> dict[str, str]:
    """What this machine tells of itself; no field is guessed."""
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    sockets = {line for line in lines if line.startswith("physical id")}
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    cards = [card for card in _folders(Path("/sys/class/net")) if (card / "device").exists()]
    return {
        "host_processor_model_name": names[0] if names else platform.machine(),
        "host_processors_per_node": str(max(len(sockets), 1)),
        "host_processor_core_count": str(os.cpu_count()),
        "host_memory_capacity": f"{pages * size / 2**30:.0f} GiB",
        "host_storage_capacity": f"{shutil.disk_usage('/').total / 2**30:.0f} GiB",
        "host_storage_type": _storage_type(),
        "host_network_card_count": str(len(cards)),
        "host_networking": _networking(cards),
        "operating_system": f"{platform.system()} {platform.release()}",
        "framework": f"tokenmill {__version__}",
        "other_software_stack": f"Python {platform.python_version()}",
    }


def _storage_type() -> str:
    """SSD or HDD as the kernel sees the disks; empty where they differ or none is there."""
    disks = [disk / "queue" / "rotational" for disk in _folders(Path("/sys/block"))]
    kinds = {_text(flag).strip() for flag in disks if not flag.parts[3].startswith(("loop", "ram"))}
    return {frozenset("0"): "SSD", frozenset("1"): "HDD"}.get(frozenset(kinds), "")


def _networking(cards: Sequence[Path]) -> str:
    """The speeds of the cards; "N/A" without any, empty where the kernel does not know."""
    if not cards:
        return "N/A"
    speeds = [_text(card / "speed").strip() for card in cards]
    known = [int(speed) for speed in speeds if speed.isdigit()]
    return ", ".join(f"Ethernet {speed / 1000:g} Gbit/s" for speed in known)


def _folders(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def write_measurements(
    layout: SubmissionLayout,
    user_conf: str,
    weights: str,
    dtype: str,
    transformation: str,
    notices: list[str],
) -> None:
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


def write_texts(layout: SubmissionLayout, notices: list[str], command: str) -> None:
    """README.md of the results and of the sources."""
    lines = [f"# {layout.benchmark}, {layout.scenario}", "", *notices, "", "```", command, "```"]
    text = "\n".join(lines) + "\n"
    for folder in (
        layout.scenario_folder,
        layout.submitter_folder / "src" / layout.benchmark,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "README.md").write_text(text, encoding="utf-8")


def copy_logs(logs: Path, folder: Path) -> None:
    """LoadGen's two logs of any run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SUMMARY, DETAIL):
        shutil.copyfile(logs / name, folder / name)


def copy_accuracy(layout: SubmissionLayout, logs: Path, scores: Mapping[str, float | None]) -> None:
    """The logs of an accuracy run, the answers truncated, and accuracy.txt with their hash."""
    copy_logs(logs, layout.accuracy)
    answers = (logs / ACCURACY).read_bytes()
    (layout.accuracy / ACCURACY).write_bytes(truncated(answers))
    digest = hashlib.sha256(answers).hexdigest()
    text = f"\nResults\n\n{dict(scores)}\n\nhash={digest}\n"
    (layout.accuracy / ACCURACY_TEXT).write_text(text, encoding="utf-8")


def copy_answers(layout: SubmissionLayout, logs: Path) -> Path:
    """All answers of an accuracy run, outside the submission: its copy is truncated."""
    name = f"{layout.system}_{layout.benchmark}_{layout.scenario}_{ACCURACY}"
    path = layout.root / "answers" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(logs / ACCURACY, path)
    return path


def move_videos(layout: SubmissionLayout, videos: Path, shown: Sequence[int]) -> Path:
    """Videos of an accuracy run to a folder outside the submission, which has some of them.

    `shown` are indices of samples: their mp4 files are copied under that number.
    """
    files = answer_files(videos.parent)
    kept = layout.root / VIDEOS / f"{layout.system}_{layout.benchmark}_{layout.scenario}"
    if kept.exists():
        shutil.rmtree(kept)
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(videos, kept)
    for index in shown:
        if files[index].endswith(".mp4"):
            (layout.accuracy / VIDEOS).mkdir(exist_ok=True)
            shutil.copyfile(kept / files[index], layout.accuracy / VIDEOS / f"{index}.mp4")
    return kept


def answer_files(logs: Path) -> dict[int, str]:
    """Names of the files that the answers of an accuracy run are in, by sample."""
    return {index: json.loads(data)["file"] for index, (data, _) in read_answers(logs).items()}


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

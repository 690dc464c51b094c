"""The files of a submission: what the checker's rules ask of them, and whose word stays."""

from __future__ import annotations

import json
from pathlib import Path

from tokenmill.bench.mlperf.submission import (
    MEANINGFUL_FIELDS,
    NO_ACCELERATOR,
    SYSTEM_FIELDS,
    SubmissionLayout,
    describe_machine,
    write_system,
)

# Rules of the official checker (submission_checker, v6.0) about systems/*.json.
NUMERIC = ("number_of_nodes", "host_processors_per_node", "host_processor_core_count")
NUMERIC += ("accelerators_per_node", "host_network_card_count")


def layout_in(folder: Path, scenario: str = "Offline") -> SubmissionLayout:
    return SubmissionLayout(folder, "closed", "me", "box", "llama3.1-8b", scenario)


def read(layout: SubmissionLayout) -> dict[str, str]:
    found: dict[str, str] = json.loads(layout.system_file.read_text())
    return found


def test_edits_survive_the_next_scenario(tmp_path: Path) -> None:
    known = describe_machine() | NO_ACCELERATOR
    empty, kept = write_system(layout_in(tmp_path), known)
    assert "cooling" in empty and not kept
    edited = read(layout_in(tmp_path)) | {
        "cooling": "air",
        "status": "preview",
        "system_type": "edge",
        "number_of_nodes": "2",
        "framework": "ours",
        "hw_notes": "a note",
    }
    layout_in(tmp_path).system_file.write_text(json.dumps(edited))
    empty, kept = write_system(layout_in(tmp_path, "Server"), known)
    assert read(layout_in(tmp_path)) == edited and "cooling" not in empty
    assert kept["framework"] == known["framework"] and set(kept) >= {"status", "number_of_nodes"}


def test_the_folder_decides_whose_system_it_is(tmp_path: Path) -> None:
    layout = layout_in(tmp_path)
    layout.system_file.parent.mkdir(parents=True)
    layout.system_file.write_text(json.dumps({"submitter": "you", "division": "open"}))
    write_system(layout, {})
    assert read(layout)["submitter"] == "me" and read(layout)["division"] == "closed"


def test_no_field_is_empty_that_is_known_or_does_not_apply(tmp_path: Path) -> None:
    """On a machine without accelerators only what no program can know is left."""
    layout = layout_in(tmp_path)
    empty, _ = write_system(layout, describe_machine() | NO_ACCELERATOR)
    fields = read(layout)
    assert set(fields) >= set(SYSTEM_FIELDS)
    unknowable = {"cooling", "host_memory_configuration", "host_storage_type", "host_networking"}
    assert set(empty) <= unknowable and set(empty) == {
        n for n in MEANINGFUL_FIELDS if not fields[n]
    }
    assert all(fields[name].isdigit() for name in NUMERIC)
    assert fields["status"] in ("available", "preview", "rdi") and fields["submitter"] == "me"

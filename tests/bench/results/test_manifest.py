"""manifest.json, and `tokenmill bench verify` on folders that were left alone and that were not."""

from __future__ import annotations

import errno
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tokenmill import __version__
from tokenmill.__main__ import run
from tokenmill.bench.report.result_folder import ResultFolder
from tokenmill.bench.results.manifest import (
    MANIFEST,
    file_digests,
    make_facts,
    public,
    utc_now,
    write_manifest,
)
from tokenmill.bench.workload import BenchError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "result"
    (root / "logs").mkdir(parents=True)
    (root / "summary.json").write_text("{}")
    (root / "logs/detail.txt").write_text("all is well")
    write_manifest(root, make_facts("endpoint", {"api-key": ["k"], "rate": (1.0,)}, utc_now()))
    return root


def verified(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, dict[str, Any]]:
    status = run(["bench", "verify", str(folder)])
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return status, report


def test_manifest_says_with_what_and_how(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["software"]["tokenmill"] == __version__
    assert {"python", "torch", "numpy", "mlcommons-loadgen"} <= manifest["software"].keys()
    assert manifest["hardware"]["cpu"] and manifest["hardware"]["num_cores"] >= 1
    assert manifest["hardware"]["memory_bytes"] > 2**28
    assert manifest["configuration"] == {"api-key": "(not recorded)", "rate": [1.0]}
    times = [manifest["started_at"], manifest["ended_at"]]
    assert times == sorted(times) and all(text.endswith("+00:00") for text in times)
    detail = manifest["files"]["logs/detail.txt"]
    assert detail["bytes"] == 11 and manifest["files"].keys() == {"summary.json", "logs/detail.txt"}
    # printf 'all is well' | sha256sum
    assert detail["sha256"].startswith("f70579cce37a17bd1c4c4061b0beff0f")


def test_untouched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "verify", str(folder)]) == 0
    *said, last = capsys.readouterr().out.splitlines()
    assert said == [f"{folder}: all 2 files are as the run wrote them"]
    none: list[str] = []
    expected = {"ok": True, "num_files": 2, "changed": none, "missing": none, "extra": none}
    assert json.loads(last) == expected


def test_edited_missing_and_extra(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "logs/detail.txt").write_text("all is fine")  # as long as before
    (folder / "summary.json").unlink()
    (folder / "more.txt").write_text("")
    assert run(["bench", "verify", str(folder)]) == 1
    captured = capsys.readouterr()
    *said, last = captured.out.splitlines()
    assert said == ["changed: logs/detail.txt", "missing: summary.json", "extra: more.txt"]
    report = json.loads(last)
    assert not report["ok"] and report["changed"] == ["logs/detail.txt"]
    assert captured.err.count("\n") == 1 and "1 changed, 1 missing, 1 extra" in captured.err


@pytest.mark.parametrize("label", ["changed", "missing", "extra"])
def test_one_fault_is_enough(label: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / ("new" if label == "extra" else "summary.json")
    if label == "missing":
        path.unlink()
    else:
        path.write_text("[]")
    status, report = verified(capsys, folder)
    assert status == 1 and not report["ok"] and report[label] == [path.name]


def test_edited_manifest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"rate": [', '"rate": [ 2.0,'))
    status, report = verified(capsys, folder)
    assert status == 1 and report["changed"] == [MANIFEST]


def test_manifest_with_another_layout_is_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert verified(capsys, folder)[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no manifest.json"),
        ("{", "is not JSON"),
        ("[]", "lists no files"),
        ('{"files": 3}', "lists no files"),
        ("\xff", "is not JSON"),
    ],
)
def test_no_manifest(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
    assert run(["bench", "verify", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_not_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "verify", str(tmp_path / "gone")]) == 1
    assert capsys.readouterr().err.endswith("gone is not a folder\n")


def test_folder_of_something_else_is_refused(folder: Path, tmp_path: Path) -> None:
    assert ResultFolder(str(tmp_path / "new/one")).path == tmp_path / "new/one"
    assert (tmp_path / "new/one").is_dir()
    with pytest.raises(BenchError, match=r"--output-dir .* has other files"):
        ResultFolder(str(tmp_path))


def test_a_second_result_has_a_folder_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file_digests(folder)
    second = ResultFolder(str(folder))
    assert second.write(lambda path: write_manifest(path, make_facts("x", {}, utc_now())))
    assert ResultFolder(str(folder)).path.name == "result-3"
    assert second.path.name == "result-2" and file_digests(folder) == before
    told = f"{folder} has a result already; this one goes to {second.path}"
    assert told in capsys.readouterr().err.replace("\n", "")


def test_a_disk_that_fails_costs_the_folder_and_not_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = ResultFolder(str(tmp_path / "result"))

    def fill(path: Path) -> None:
        (path / "early").write_text("x")
        if path == tmp_path / "result":
            raise OSError(errno.ENOSPC, "No space left on device")
        (path / "late").write_text("y")

    assert folder.write(fill)
    assert {path.name for path in folder.path.iterdir()} == {"early", "late"}
    said = capsys.readouterr().err.replace("\n", "")
    assert "result: No space left on device" in said and f"{folder.path} instead" in said

    def never(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert not folder.write(never)
    assert "the result is not kept: No space left" in capsys.readouterr().err.replace("\n", " ")


def test_public_hides_keys_at_any_depth() -> None:
    found = public({"target": {"api_key": "secret", "api-key": None}, "path": Path("a/b")})
    assert found == {"target": {"api_key": "(not recorded)", "api-key": None}, "path": "a/b"}

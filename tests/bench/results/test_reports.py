"""The declared fields of reports are those that runs write: none is missing, none is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.sample_runs import FACTS, endpoint_run
from bench.scripted_server import scripted_server
from tokenmill.__main__ import run
from tokenmill.bench.client.summary import Price
from tokenmill.bench.report.endpoint_report import write_result
from tokenmill.bench.results.manifest import read_manifest, verify
from tokenmill.bench.results.reports import CompareReport, EndpointReport, Facts, as_json
from tokenmill.core.metrics import Slo


def check(line: dict[str, Any], declared: type[msgspec.Struct]) -> None:
    """Fail where a field does not have the declared form, or is not declared."""
    assert as_json(msgspec.convert(line, declared)) == line


@pytest.mark.parametrize("stream", [True, False])
def test_points_have_the_declared_fields(stream: bool) -> None:
    slo, price = Slo(ttft_ms=50.0), Price(8, 3.0)
    run, _ = endpoint_run((1, 4), fails=True, slo=slo, price=price, stream=stream)
    for point in run.points:
        check(as_json(point), type(point))
        assert ("ttft_ms" in as_json(point)) is stream and "server" not in as_json(point)


def test_the_lines_of_commands_have_the_declared_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def last_line() -> Any:
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    load = ("--num-requests", "4", "--warmup-requests", "1", "--goodput", "ttft:9000")
    with scripted_server() as server:
        line = ["bench", "endpoint", "--url", server.url, *load]
        assert run([*line, "--concurrency", "2", "--output-dir", str(tmp_path / "one")]) == 0
        check(last_line(), EndpointReport)
        assert run([*line, "--saturate", "--output-dir", str(tmp_path / "two")]) == 0
        check(last_line(), EndpointReport)
    assert run(["bench", "compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    check(last_line(), CompareReport)


def test_manifests_have_the_declared_fields(tmp_path: Path) -> None:
    report, every = endpoint_run()
    write_result(tmp_path, report, every, FACTS)
    manifest = read_manifest(tmp_path)
    assert manifest.pop("files").keys() >= {"summary.json"} and manifest.pop("digest")
    check(manifest, Facts)
    assert verify(tmp_path).ok

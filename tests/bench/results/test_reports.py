"""The declared fields of reports are those that runs write: none is missing, none is unknown."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import (
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import pytest

from bench.sample_runs import FACTS, endpoint_run
from bench.scripted_server import scripted_server
from tokenmill.__main__ import run
from tokenmill.bench.client.summary import Price
from tokenmill.bench.report.endpoint_report import write_result
from tokenmill.bench.results import reports
from tokenmill.bench.results.manifest import read_manifest, verify
from tokenmill.core.metrics import Slo


def check(value: Any, declared: Any, where: str = "report") -> None:
    """Fail where a value does not have the declared form; Any has every form."""
    if get_origin(declared) is NotRequired:
        declared = get_args(declared)[0]
    if get_origin(declared) in (Union, types.UnionType):
        if value is None:
            assert type(None) in get_args(declared), where
            return
        (declared, *others) = (kind for kind in get_args(declared) if kind is not type(None))
        assert not others, where
    if is_typeddict(declared):
        hints = get_type_hints(declared, include_extras=True)
        required = {name for name in hints if get_origin(hints[name]) is not NotRequired}
        assert required <= value.keys() <= hints.keys(), f"{where}: {sorted(value)}"
        for name in value:
            check(value[name], hints[name], f"{where}.{name}")
    elif get_origin(declared) is Literal:
        assert value in get_args(declared), where
    elif get_origin(declared) is list:
        for item in value:
            check(item, get_args(declared)[0], where + "[]")
    elif get_origin(declared) is dict:
        for name, item in value.items():
            check(item, get_args(declared)[1], f"{where}.{name}")
    elif isinstance(declared, type) and declared is not Any:
        kinds = (int, float) if declared is float else (declared,)
        assert isinstance(value, kinds) and isinstance(value, bool) == (declared is bool), where


@pytest.mark.parametrize("stream", [True, False])
def test_points_have_the_declared_fields(stream: bool) -> None:
    slo, price = Slo(ttft_ms=50.0), Price(8, 3.0)
    run, _ = endpoint_run((1, 4), fails=True, slo=slo, price=price, stream=stream)
    for point in run["points"]:
        check(point, reports.PointReport)


def test_the_lines_of_commands_have_the_declared_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def last_line() -> Any:
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    load = ("--num-requests", "4", "--warmup-requests", "1", "--goodput", "ttft:9000")
    with scripted_server() as server:
        line = ["bench", "endpoint", "--url", server.url, *load]
        assert run([*line, "--concurrency", "2", "--output-dir", str(tmp_path / "one")]) == 0
        check(last_line(), reports.EndpointReport)
        assert run([*line, "--saturate", "--output-dir", str(tmp_path / "two")]) == 0
        check(last_line(), reports.EndpointReport)
    assert run(["bench", "compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    check(last_line(), reports.CompareReport)


def test_manifests_have_the_declared_fields(tmp_path: Path) -> None:
    report, every = endpoint_run()
    write_result(tmp_path, report, every, FACTS)
    check(read_manifest(tmp_path), reports.Manifest)
    check(verify(tmp_path), reports.VerifyReport)

"""The published table: its figures, its filters, and a result's place in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.sample_runs import mlperf_run
from tokenmill.__main__ import run
from tokenmill.bench.results.published_results import (
    Ours,
    choose,
    of_round,
    overview,
    place,
    read_table,
)
from tokenmill.bench.results.result import ResultPoint, ToolResult
from tokenmill.bench.workload import BenchError

TABLE = read_table()


def test_the_table_is_whole() -> None:
    assert len(TABLE) == 836
    assert overview(TABLE)["deepseek-r1"] == {"Interactive": 3, "Offline": 28, "Server": 26}
    # The label of v5.1 is wrong; its logs have tokens.
    assert {e.unit for e in choose(TABLE, "llama3.1-8b", "Interactive")} == {"Tokens/s"}


def test_rows_are_sorted_per_accelerator() -> None:
    entries = choose(TABLE, "deepseek-r1", "Server")
    best = entries[0]
    assert (best.submitter, best.accelerators, best.result) == ("Nebius", 8, 64_510)
    values = [e.per_accelerator or 0.0 for e in entries]
    assert values == sorted(values, reverse=True) and round(values[0], 1) == 8063.8
    offline = choose(TABLE, "llama3.1-8b", "Offline")
    assert offline[-1].accelerators == 0  # without accelerators: after all others
    streams = choose(TABLE, "wan-2.2-t2v-a14b", "SingleStream")
    assert [e.result for e in streams] == sorted(e.result for e in streams)


def test_filters() -> None:
    entries = choose(TABLE, "llama3.1-8b", "server", round="v5.1", accelerator="h200-sxm")
    assert {e.round for e in entries} == {"v5.1"} and {"HPE"} <= {e.submitter for e in entries}
    (hpe,) = choose(TABLE, "llama3.1-8b", "Server", submitter="hpe", accelerator="H200-SXM")
    assert hpe.result == pytest.approx(64_914.6)
    assert choose(TABLE, "llama2-70b", "Offline") == choose(TABLE, "llama2-70b-99", "Offline")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"benchmark": "gpt-5"}, "--benchmark gpt-5: no rows; there are deepseek-r1, dlrm-v3"),
        ({"scenario": "MultiStream"}, "--scenario MultiStream: no rows; there are Interactive,"),
        ({"round": "v4"}, "--round v4: no row; there are v5.1, v6.0"),
        ({"accelerator": "TPU"}, "--accelerator TPU: no row; there are NVIDIA B200"),
    ],
)
def test_what_does_not_exist_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        choose(TABLE, **{"benchmark": "deepseek-r1", "scenario": "Server"} | arguments)


def test_places_by_hand() -> None:
    entries = choose(TABLE, "deepseek-r1", "Server")
    first = place(entries, Ours(2 * 8064.0, 2))
    assert (first.rank, first.of) == (1, 27) and first.share_of_best == 1.0
    gb300 = place(entries, Ours(209_328.0, 72))
    assert gb300.share_of_best == pytest.approx(1 / 2.77, abs=0.001)
    with pytest.raises(BenchError, match="--gpus"):
        place(entries, Ours(1.0, None))
    stream = place(choose(TABLE, "wan-2.2-t2v-a14b", "SingleStream"), Ours(30.0, None))
    assert (stream.rank, stream.per_accelerator) == (6, None)


def test_a_round_is_placed_with_what_must_be_said() -> None:
    entry = choose(TABLE, "llama3.1-8b", "Server")[0]
    points = [ResultPoint(str(n), ("concurrency", n), {"output_tok_s": 10.0 * n}) for n in (1, 2)]
    ours = of_round(ToolResult("x", "tokenmill", points, {}, 1), entry, 4)
    assert (ours.result, ours.accelerators) == (20.0, 4)
    assert "the best of 2 loads" in ours.notices and "not an MLPerf run" in ours.notices[-1]
    config = {"mlperf_benchmark": "llama3.1-8b", "scenario": "Offline"}
    offline = of_round(ToolResult("x", "tokenmill", points[:1], config, 1), entry, None)
    assert offline.notices == ("a run of Offline, not of Server",) and offline.accelerators == 1
    with pytest.raises(BenchError, match="has no figure in Latency"):
        of_round(
            ToolResult("x", "t", points, {}),
            choose(TABLE, "wan-2.2-t2v-a14b", "SingleStream")[0],
            1,
        )


def last_line(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    printed = capsys.readouterr().out
    return printed, json.loads(printed.splitlines()[-1])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "published"]) == 0
    assert "deepseek-r1" in last_line(capsys)[0]
    table = ["bench", "published", "--benchmark", "deepseek-r1", "--scenario", "Server"]
    assert run([*table, "--limit", "3", "--tok-s", "5561.6", "--gpus", "1"]) == 0
    printed, report = last_line(capsys)
    assert "<- yours" in printed and "and 23 more" in printed
    assert report["placed"]["of"] == 27 and len(report["rows"]) == 26
    result = tmp_path / "mlperf.json"
    quick = mlperf_run(valid=False)
    quick.scenario, quick.reasons = "Server", ["late"]
    result.write_bytes(msgspec.json.encode(quick))
    assert run(["bench", "published", "--result", str(result), "--gpus", "1"]) == 0
    printed, report = last_line(capsys)
    assert "quick run and not a valid submission" in printed and "INVALID: late" in printed
    assert report["mlperf_benchmark"] == "llama3.1-8b" and report["scenario"] == "Server"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--benchmark", "x"], "--benchmark x: no rows; there are deepseek-r1"),
        (["--tok-s", "5"], "--benchmark is missing"),
        (["--benchmark", "deepseek-r1", "--tok-s", "5"], "--tok-s needs --gpus"),
        (["--tok-s", "5", "--result", "x"], "give --result or --tok-s, not both"),
        (["--result", "x"], "x: no such file or folder"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "published", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err

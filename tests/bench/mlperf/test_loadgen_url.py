"""MLPerf against a server: its latencies by LoadGen, its faults, and one that is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.mlperf.known_latencies import about, drive, near, report_of
from bench.scripted_server import FIRST_S, NEXT_S, NUM_TOKENS, ScriptedServer, scripted_server
from tokenmill.__main__ import run

pytestmark = pytest.mark.usefixtures("clean_folder")
QUICK = ("--quick", "--quick-samples", "6", "--length-scale", "0.05")


def options(server: ScriptedServer, model: str, **more: Any) -> dict[str, Any]:
    return {"url": server.url, "model": model, "num_tokens": NUM_TOKENS} | more


def test_server_scenario_has_the_servers_latencies(server: ScriptedServer, tmp_path: Path) -> None:
    report = report_of(tmp_path, "Server", **options(server, "ok", qps=60))
    assert report["result"] == "VALID" and report["failed"] == 0
    assert report["num_output_tokens"] == NUM_TOKENS * report["num_queries"]
    assert near(report["ttft_ms"]["p50"], 1e3 * FIRST_S, late_ms=20)
    assert about(report["tpot_ms"]["p50"], 1e3 * NEXT_S)
    rate = report["log"]["result_completed_samples_per_sec"]
    assert report["metric"]["value"] == pytest.approx(NUM_TOKENS * rate, rel=0.02)


@pytest.mark.parametrize(
    ("model", "error"),
    [("drop", "dropped"), ("http500", "http_500"), ("malformed", "malformed_sse")],
)
def test_failed_queries_are_completed(
    model: str, error: str, server: ScriptedServer, tmp_path: Path
) -> None:
    report = report_of(tmp_path, "Offline", **options(server, model, num_samples=8))
    assert report["failed"] == report["errors"][error]["count"] == 8
    assert report["result"] == "INVALID" and report["num_queries"] == 0
    assert any("record 0 as number of tokens" in reason for reason in report["reasons"])


def test_a_usage_that_lies_is_not_counted(server: ScriptedServer, tmp_path: Path) -> None:
    report = report_of(tmp_path, "Offline", **options(server, "lies-high", num_samples=4))
    assert report["doubts"]["usage_inconsistent"]["count"] == 4
    assert report["num_output_tokens"] == 4 * NUM_TOKENS


def test_no_more_are_open_than_allowed(server: ScriptedServer, tmp_path: Path) -> None:
    report = report_of(tmp_path, "Offline", **options(server, "ok", num_samples=6, max_in_flight=2))
    assert report["latency_ms"]["p50"] >= 2 * 1e3 * (FIRST_S + (NUM_TOKENS - 1) * NEXT_S)


def test_a_server_that_answers_nothing_is_given_up(server: ScriptedServer, tmp_path: Path) -> None:
    result = drive(tmp_path, "Offline", **options(server, "http500", num_samples=40))
    assert result.returncode == 1 and result.stderr.startswith(
        "error: given up after 32 failed queries in a row, http_500: broken: http500"
    )


def test_answers_of_an_accuracy_run(server: ScriptedServer, tmp_path: Path) -> None:
    more = {"num_samples": 3, "accuracy": True}
    report = report_of(tmp_path, "Offline", **options(server, "ok", **more))
    text = (" abcdef" * NUM_TOKENS).encode().hex()
    assert report["answers"] == {str(index): [text, NUM_TOKENS] for index in range(3)}


def mlperf(
    capfd: pytest.CaptureFixture[str], server: ScriptedServer, *flags: str, status: int = 0
) -> tuple[dict[str, Any], str]:
    line = ["bench", "mlperf", "--url", server.url, *QUICK, *flags]
    assert run(line) == status
    captured = capfd.readouterr()
    return json.loads(captured.out.splitlines()[-1]), captured.err


def test_command_sends_token_ids(
    server: ScriptedServer, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = len(server.seen)
    report, _ = mlperf(capfd, server, "--api-key", "secret", "--submission-dir", "sub")
    assert report["result"] == "VALID" and report["prompts"] == "token ids"
    assert report["model"] == "listed" and report["num_failed"] == 0
    assert report["quick"] and "not a valid submission" in report["notices"][0]
    asked = [seen.body for seen in server.seen[before:] if seen.body][1:]  # after the probe
    assert len(asked) == 6 and all(isinstance(body["prompt"][0], int) for body in asked)
    assert {body["ignore_eos"] for body in asked} == {True}
    assert {body["temperature"] for body in asked} == {0.0}
    files = [path for path in (tmp_path / "sub").rglob("*") if path.is_file()]
    assert files and not any(b"secret" in path.read_bytes() for path in files)
    readme = next(path for path in files if path.parent.name == "Offline" and path.suffix == ".md")
    assert "--url" in readme.read_text()


@pytest.mark.parametrize("flags", [("--model", "no-ids"), ("--api", "chat")])
def test_command_sends_text_otherwise(
    flags: tuple[str, str], server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    report, _ = mlperf(capfd, server, *flags, "--no-ignore-eos")
    assert report["result"] == "VALID" and report["prompts"] == "text"
    body = server.seen[-1].body
    assert isinstance(body.get("prompt") or body["messages"][0]["content"], str)
    assert "ignore_eos" not in body


def test_command_reports_failures_as_invalid(
    server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    report, _ = mlperf(capfd, server, "--model", "drop-later", "--api", "chat")
    assert report["result"] == "INVALID" and report["num_failed"] == 6
    assert report["reasons"][0].startswith("6 queries failed, dropped: ")


def test_forbidden_cache_hits_are_invalid(
    server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """As answers tell it, and where they do not, as the server's counters do."""
    report, _ = mlperf(capfd, server, "--model", "prefix-cache", "--api", "chat")
    assert report["quick"] and report["result"] == "INVALID" and report["num_cached"] > 0
    assert "used the server's prefix cache, which the rules forbid" in report["reasons"][0]
    assert "--no-prefix-cache" in report["reasons"][0]
    server.hits_each = 3
    try:
        report, _ = mlperf(capfd, server)
    finally:
        server.hits_each = 0
    assert report["result"] == "INVALID" and report["num_cached"] == 0
    assert "by the server's /metrics 30.0% of the prompt tokens" in report["reasons"][0]


def test_command_gives_up_on_a_server_that_dies(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--model", "drop-later", "--api", "chat", "--quick-samples", "40")
    with scripted_server() as server:
        report, err = mlperf(capfd, server, *flags, "--submission-dir", "sub", status=1)
    assert report["given_up"] and report["result"] == "INVALID" and report["metric"] is None
    assert "given up after 32 failed queries in a row, dropped" in report["reasons"][0]
    assert err.splitlines()[-1] == f"error: {report['reasons'][0]}"
    assert not (tmp_path / "sub").exists()


def test_submission_on_a_dataset(
    server: ScriptedServer, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"input": "The alphabet?", "output": " abcdef" * NUM_TOKENS}] * 2
    (tmp_path / "data.json").write_text(json.dumps(rows))
    line = ["bench", "mlperf", "--url", server.url, "--quick", "--dataset", "data.json"]
    line += ["--test-mode", "submission", "--submission-dir", "sub", "--benchmark", "llama2-70b"]
    assert run(line) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["accuracy"]["rouge1"] == 100 and report["accuracy"]["gen_tok_len"] == 12
    assert report["reasons"] == ["tokens_per_sample misses the accuracy gate"]
    assert report["metric"]["value"] > 0 and not report["synthetic"]
    results = tmp_path / "sub/open/tokenmill/results/system/llama2-70b-99/Offline"
    assert "'rouge1': 100.0" in (results / "accuracy/accuracy.txt").read_text()
    assert (results / "performance/run_1/mlperf_log_detail.txt").exists()
    assert json.loads((results / "measurements.json").read_text())["weight_data_types"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dtype", "fp32"), "--dtype is for an engine of this process, not for --url"),
        (("--model", "http500"), "the performance run failed: "),
    ],
)
def test_errors_are_one_sentence(
    flags: tuple[str, str],
    message: str,
    server: ScriptedServer,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(["bench", "mlperf", "--url", server.url, *QUICK, *flags])
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.splitlines()[-1].startswith(f"error: {message}")

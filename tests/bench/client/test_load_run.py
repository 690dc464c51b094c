"""tokenmill bench endpoint from the command line to its files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.scripted_server import (
    FIRST_S,
    NUM_TOKENS,
    TEMPLATE_TOKENS,
    Broken,
    ScriptedServer,
)
from tokenmill.__main__ import run
from tokenmill.bench.client import client_process as issue
from tokenmill.bench.client.arrivals import ClientLoad
from tokenmill.bench.client.datasets import Synthetic
from tokenmill.bench.client.load_run import measure_client_baseline, run_load
from tokenmill.bench.client.records import Endpoint
from tokenmill.bench.results.manifest import verify
from tokenmill.bench.workload import BenchError

GENEROUS_S = 180.0
pytestmark = pytest.mark.usefixtures("clean_folder")


def bench(capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0) -> dict[str, Any]:
    assert run(["bench", "endpoint", *flags]) == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


def test_sweep_with_files(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = len(server.seen)
    report = bench(
        *(capsys, "--url", server.url, "--concurrency", "1,3", "--num-requests", "6"),
        *("--output-dir", "results", "--gpus", "2", "--price-per-gpu-hour", "3.5", "--no-audit"),
        *("--goodput", "ttft:10000", "--goodput", "tpot:10000", "--warmup-requests", "2"),
    )
    assert report["model"] == "listed"  # the server's own name
    assert [point["concurrency"] for point in report["points"]] == [1, 3]
    for point in report["points"]:
        assert point["num_completed"] == 6 and point["num_output_tokens"] == 6 * NUM_TOKENS
        assert point["ttft_ms"]["p50"] >= FIRST_S * 1e3 - 1
        assert point["goodput"]["num_good"] == 6
        tok_s = point["output_tok_s"]
        price = point["price"]["usd_per_million_output"]
        assert price == pytest.approx(7 / (tok_s * 3600) * 1e6, rel=1e-3)
        assert point["audit"]["floor"] is None and point["audit"]["lag_ms"]["p50"] >= 0
    assert len(server.seen) - before == 1 + 2 * (6 + 2)  # /models, and warm-ups beside the rest
    assert json.loads((tmp_path / "results/summary.json").read_text()) == report
    lines = (tmp_path / "results/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["point"] for event in events] == [0] * 6 + [1] * 6
    assert "Throughput against interactivity" in (tmp_path / "results/report.html").read_text()
    assert {"summary.csv", "events.csv", "manifest.json"} <= set(os.listdir(tmp_path / "results"))
    assert report["settings"]["input-len"] == 128 and "concurrency" not in report["settings"]
    assert verify(tmp_path / "results").ok
    assert sorted(event["session"] for event in events) == sorted([*range(6)] * 2)


def test_prompt_tokens_as_asked_for_and_as_counted(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's template adds to each prompt; --exact-input-len leaves room for it."""
    words = ("--url", server.url, "--model", "prefix-cache", "--concurrency", "2", "--no-audit")
    for flags, counted, hint in (
        ((), 64 + TEMPLATE_TOKENS, " (--exact-input-len leaves room for its chat template)"),
        (("--exact-input-len",), 64, ""),
    ):
        command = ["bench", "endpoint", *words, "--num-requests", "4", "--input-len", "64", *flags]
        assert run(command) == 0
        *text, last = capsys.readouterr().out.splitlines()
        (point,) = json.loads(last)["points"]
        assert (point["num_asked_tokens"], point["num_prompt_tokens"]) == (4 * 64, 4 * counted)
        said = f"prompt tokens: 64 asked for, {counted} by the server's count{hint}"
        assert said in " ".join(" ".join(text).split())
    exact = ["bench", "endpoint", *words, "--exact-input-len", "--input-len"]
    assert run([*exact, str(TEMPLATE_TOKENS)]) == 1
    assert f"the server adds {TEMPLATE_TOKENS} to each" in " ".join(capsys.readouterr().err.split())
    assert run([*exact, "64", "--model", "ok"]) == 1  # it counts 7 tokens of any prompt
    assert "32 more words are 0 more tokens here" in " ".join(capsys.readouterr().err.split())


def test_table_and_audit(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--url", server.url, "--model", "drop", "--concurrency", "2", "--num-requests", "4"]
    assert run(["bench", "endpoint", *flags]) == 1
    captured = capsys.readouterr()
    assert "no request was answered: dropped" in captured.err
    assert "concurrency 2: 4 x dropped: the connection closed after 3 outputs" in captured.out
    (point,) = json.loads(captured.out.splitlines()[-1])["points"]
    assert point["num_failed"] == 4 and point["output_tok_s"] == 0
    assert point["audit"]["floor"]["request_s"] > 0
    assert point["audit"]["floor"]["latency_ms"]["p50"] > 0


def test_saturation_and_the_server_beside(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--num-requests", "4", "--warmup-requests", "0", "--no-audit")
    flags = ("--url", server.url, "--model", "ok", *few)
    assert run(["bench", "endpoint", *flags, "--saturate"]) == 0
    out = capsys.readouterr().out.splitlines()
    report = json.loads(out[-1])
    found = report["saturation"]
    assert found["by"] == "concurrency" and found["found"] in (3, 4)
    assert found["stopped"].startswith("4 is the highest load allowed")
    # Never more users than requests.
    assert [p["concurrency"] for p in report["points"]][:3] == [1, 2, 4]
    for point in report["points"]:
        assert point["server"]["num_requests"] == 4 and point["doubts"] == {}
        assert point["server"]["num_output_tokens"] == 4 * NUM_TOKENS
    assert any(line.startswith("saturation: ") and "users at once" in line for line in out)
    assert any(line.startswith("the server says") for line in out)
    server.tokens_each = 2 * NUM_TOKENS
    try:
        report = bench(capsys, *flags, "--saturate", "--rate", "4", "--goodput", "e2e:9000")
    finally:
        server.tokens_each = NUM_TOKENS
    found = report["saturation"]
    assert found["by"] == "rate" and found["found"] == 4 and found["above"] is None
    assert report["points"][0]["doubts"]["server_tokens_differ"]["count"] == 1


def test_a_point_can_end_with_a_whole_pass(server: ScriptedServer) -> None:
    target = Endpoint(server.url + "/chat/completions", "ok")
    load = ClientLoad(concurrency=3, duration_s=0.05, pass_size=7)
    outcome = run_load(target, load, Synthetic(((8, 8),)), 2, num_warmup=2)
    assert sorted(record.session for record in outcome.records) == list(range(7))
    assert len(outcome.warmup) == 2 and all(r.error is None for r in outcome.warmup)


def test_no_request_is_sent_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep

    async def early(seconds: float) -> None:
        await sleep(max(0.0, seconds - 0.003))

    async def lateness() -> int:
        planned_ns = time.monotonic_ns() + 10_000_000
        await issue._sleep_until(planned_ns)
        return time.monotonic_ns() - planned_ns

    monkeypatch.setattr(asyncio, "sleep", early)
    assert asyncio.run(lateness()) >= -issue.EARLY_NS


def test_open_loop_sends_when_planned(server: ScriptedServer) -> None:
    """Arrivals do not wait for answers."""
    target = Endpoint(server.url + "/chat/completions", "ok")
    load = ClientLoad(rate=40.0, arrival="constant", num_sessions=8)
    outcome = run_load(target, load, Synthetic(((8, 8),)), 1)
    planned = [record.planned_ns for record in outcome.records]
    gaps = [round((b - a) / 1e6, 3) for a, b in pairwise(planned)]
    assert gaps == [25.0] * 7
    assert outcome.records[1].sent_ns < outcome.records[0].end_ns
    assert all(r.error is None and r.sent_ns > r.planned_ns - 1_000_000 for r in outcome.records)


def test_several_processes_share_the_load(server: ScriptedServer) -> None:
    target = Endpoint(server.url + "/chat/completions", "ok")
    load = ClientLoad(concurrency=3, num_sessions=7)
    outcome = run_load(target, load, Synthetic(((8, 8),)), 2)
    assert sorted(record.session for record in outcome.records) == list(range(7))
    assert len(outcome.health) == 2 and all(h.wall_s > 0 for h in outcome.health)


def test_conversations_carry_their_answers(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(server.seen)
    flags = ("--turns", "3", "--num-requests", "3", "--concurrency", "1", "--shared-prefix", "9")
    report = bench(
        *(capsys, "--url", server.url, "--model", "ok", *flags),
        *("--no-audit", "--warmup-requests", "0", "--input-len", "8"),
    )
    assert report["points"][0]["num_completed"] == 3
    messages = [seen.body["messages"] for seen in server.seen[before:]]
    roles = [[message["role"] for message in turn] for turn in messages]
    said = ["user", "assistant"]
    assert roles == [["system", *said * n, "user"] for n in range(3)]
    assert messages[1][:2] == messages[0] and messages[2][:4] == messages[1]
    assert messages[1][2]["content"] == " abcdef" * NUM_TOKENS


def test_trace_goes_out_with_its_prefixes(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [(0, 600, [1, 2]), (10, 700, [1, 3])]
    lines = [
        json.dumps({"timestamp": t, "input_length": n, "output_length": 9, "hash_ids": ids})
        for t, n, ids in rows
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    before = len(server.seen)
    report = bench(
        *(capsys, "--url", server.url, "--model", "ok", "--trace", "t.jsonl"),
        *("--no-audit", "--warmup-requests", "0", "--no-ignore-eos"),
    )
    assert report["points"][0]["load"] == "trace" and report["points"][0]["num_completed"] == 2
    bodies = sorted((seen.body for seen in server.seen[before:]), key=lambda body: len(str(body)))
    one, two = (body["messages"][0]["content"].split() for body in bodies)
    assert (len(one), len(two)) == (600, 700)
    assert one[:512] == two[:512] and one[512:] != two[512:600]
    assert all(b["max_tokens"] == 9 and "ignore_eos" not in b for b in bodies)


@pytest.mark.parametrize(
    "load", [ClientLoad(concurrency=1, num_sessions=1), ClientLoad(rate=9, num_sessions=1)]
)
def test_a_client_that_breaks_is_an_error(
    server: ScriptedServer, load: ClientLoad, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BenchError, match="a client process died"):
        run_load(Endpoint(server.url + "/chat/completions", "ok"), load, Broken(((8, 8),)), 1)
    assert "no such session" in capfd.readouterr().err


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_floor(api: Any, stream: bool) -> None:
    target = Endpoint("http://127.0.0.1:9/v1", "m", api=api, stream=stream)
    baseline = measure_client_baseline(target, ClientLoad(concurrency=4, num_sessions=1), 1)
    for outcome in (baseline.alone, baseline.full):
        assert outcome.records and not [r for r in outcome.records if r.error]
        assert {r.completion_tokens for r in outcome.records} == {32}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_reports_what_has_finished(
    server: ScriptedServer, tmp_path: Path, number: signal.Signals
) -> None:
    flags = ["--url", server.url, "--model", "ok", "--concurrency", "2", "--duration", "600"]
    command = [sys.executable, "-m", "tokenmill", "bench", "endpoint", *flags]
    before = len(server.seen)
    process = subprocess.Popen(
        [*command, "--output-dir", "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline_s = time.monotonic() + GENEROUS_S
        while len(server.seen) < before + 20:  # warm-up and some more
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, number)  # as a terminal does
        out, err = process.communicate(timeout=GENEROUS_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "Traceback" not in err, err
    report = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "out/summary.json").read_text()) == report
    (point,) = report["points"]
    assert report["interrupted"] and point["num_completed"] > 0 and point["num_failed"] == 0
    assert point["num_unfinished"] <= 2
    events = (tmp_path / "out/events.jsonl").read_text().splitlines()
    assert len(events) == point["num_completed"] + point["num_unfinished"]
    assert "Interrupted" in (tmp_path / "out/report.html").read_text()
    assert verify(tmp_path / "out").ok


def test_failures_beyond_a_share_are_the_exit_status(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two of eight fail: more than the default of 1 % and than a fifth, not more than a quarter."""
    flags = ["--url", server.url, "--model", "fails-some", "--num-requests", "8", "--no-audit"]
    flags += ["--warmup-requests", "0", "--concurrency", "1", "--no-server-metrics"]
    for number, (limit, status) in enumerate([((), 1), (("0.2",), 1), (("0.25",), 0)]):
        more = [part for value in limit for part in ("--max-error-rate", value)]
        folder = f"out{number}"
        assert run(["bench", "endpoint", *flags, *more, "--output-dir", folder]) == status
        captured = capsys.readouterr()
        report = json.loads(captured.out.splitlines()[-1])
        assert report["points"][0]["num_failed"] == 2
        assert verify(tmp_path / folder).ok  # the files are there
        told = "error: 2 of 8 requests failed at concurrency 1, more than --max-error-rate "
        assert (told in captured.err) == bool(status)
        assert ("http_500: broken: http500" in captured.err) == bool(status)


def test_too_little_goodput_is_the_exit_status(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", server.url, "--concurrency", "1", "--num-requests", "4", "--no-audit"]
    flags += ["--goodput", "e2e:0.001", "--no-server-metrics"]
    for least, status in ((None, 0), ("0", 0), ("0.5", 1)):
        more = ["--fail-below-goodput", least] if least else []
        assert run(["bench", "endpoint", *flags, *more]) == status
        said = capsys.readouterr()
        told = "error: 0.0% of the requests at concurrency 1 were within --goodput, less than"
        assert (told in said.err) == bool(status)
        assert json.loads(said.out.splitlines()[-1])["points"][0]["num_completed"] == 4


URL = ("--url", "http://127.0.0.1:9", "--model", "m")


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ((), 2, "--url is missing"),
        (("--url", "nonsense", "--model", "m"), 1, "--url must be http://HOST:PORT"),
        (("--url", "http://127.0.0.1:9"), 1, "http://127.0.0.1:9/v1/models does not name a model"),
        ((*URL, "--concurrency", "4,x"), 2, "--concurrency must be numbers of at least 1"),
        ((*URL, "--rate", "0"), 2, "--rate must be numbers of at least 1e-06"),
        ((*URL, "--rate", "1", "--concurrency", "1"), 2, "--rate and --concurrency do not go"),
        ((*URL, "--trace", "t", "--prompts", "p"), 2, "--prompts and --trace do not go"),
        ((*URL, "--trace", "gone.jsonl"), 1, "--trace gone.jsonl: cannot read"),
        ((*URL, "--gpus", "2"), 2, "a price needs both --gpus and --price-per-gpu-hour"),
        ((*URL, "--goodput", "tftt:5"), 1, "--goodput takes NAME:MS"),
        ((*URL, "--turns", "2", "--api", "completions"), 2, "--turns are turns of a chat"),
        ((*URL, "--extra-body", "{"), 2, "--extra-body is not JSON"),
        ((*URL, "--max-error-rate", "5"), 2, "--max-error-rate must be a number from 0 to 1"),
        ((*URL, "--fail-below-goodput", "0.9"), 2, "--fail-below-goodput needs the limits of"),
        ((*URL, "--burst-size", "3"), 2, "--burst-size goes with --arrival burst"),
        ((*URL, "--arrival", "burst", "--duration", "1"), 1, "requests that arrive at once need"),
        ((*URL, "--output-dir", "."), 1, "--output-dir .: the folder has other files"),
        ((*URL, "--lengths", "gone"), 1, "--lengths gone: no such file"),
        ((*URL, "--saturate", "--rate", "1,2"), 2, "--saturate starts at a single --rate"),
        ((*URL, "--saturate", "--trace", "t"), 2, "--saturate and --trace do not go"),
        ((*URL, "--saturate", "--slo-percentile", "9"), 2, "--slo-percentile needs the limits"),
    ],
)
def test_bad_flags(
    flags: tuple[str, ...],
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "of-another").write_text("")
    assert run(["bench", "endpoint", *flags]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert captured.err.startswith(f"error: {message}")


def test_environment_and_file_set_it_too(
    server: ScriptedServer,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "tokenmill.toml").write_text(
        f'url = "{server.url}"\nmodel = "ok"\nconcurrency = [1, 2]\naudit = false\n'
        "num-requests = 2\nwarmup-requests = 0\n"
    )
    monkeypatch.setenv("TOKENMILL_CONCURRENCY", "2")
    monkeypatch.setenv("TOKENMILL_GOODPUT", "ttft:1,tpot:1")
    report = bench(capsys, "--json")
    assert [point["concurrency"] for point in report["points"]] == [2]
    assert report["points"][0]["goodput"]["num_good"] == 0

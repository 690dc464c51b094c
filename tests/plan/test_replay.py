"""A trace in virtual time: hand-computed times, policies, and traces that cannot be read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tokenmill.__main__ import run
from tokenmill.bench.results.mooncake import TraceError, TraceRequest, read_trace
from tokenmill.core.config import RouterConfig
from tokenmill.plan.replay import Replay, ReplayConfig, StepTiming

TIMING = StepTiming(prefill=(0.0, 1.0, 10.0), decode=(0.0, 0.0, 5.0))


def play(trace: list[TraceRequest], policy: Any = "kv", **pool: Any) -> dict[str, Any]:
    config = ReplayConfig(
        **({"num_blocks": 64, "block_size": 4, "timing": TIMING, "trace_block_tokens": 8} | pool)
    )
    return Replay(trace, config, RouterConfig(policy=policy, block_size=config.block_size)).run()


def sessions(num_sessions: int, turns: int, gap_ms: float = 100.0) -> list[TraceRequest]:
    """Each session asks again with its whole past; the sessions take turns."""
    requests = []
    for turn in range(turns):
        for session in range(num_sessions):
            ids = [1000 * session + block for block in range(2 * turn + 2)]
            arrival_ms = (turn * num_sessions + session) * gap_ms
            requests.append(TraceRequest(arrival_ms, 8 * len(ids), 3, ids))
    return requests


def test_times_of_one_request() -> None:
    report = play([TraceRequest(0, 16, 3, [1, 2])], num_workers=1, max_num_batched_tokens=12)
    assert report["ttft_ms"]["mean"] == 22 + 14, "a step of 12 tokens and one of 4"
    assert report["itl_ms"] == {key: 5.0 for key in ("mean", "p50", "p90", "p99", "max")}
    assert report["duration_s"] == 0.046 and report["output_tok_s"] == round(3 / 0.046, 1)
    assert report["prefix_reuse"] == 0 and report["num_finished"] == {"length": 1}


def test_a_request_waits_for_the_step_that_runs() -> None:
    trace = [TraceRequest(0, 16, 1, [1, 2]), TraceRequest(6, 17, 2, [1, 2, 3])]
    report = play(trace, num_workers=1)
    assert report["ttft_ms"]["max"] == 20 + 11, "20 to wait, one token is not cached"
    assert report["ttft_ms"]["p50"] == (26 + 31) / 2
    assert report["prefix_reuse"] == round(16 / 33, 4)


def test_kv_keeps_sessions_where_they_are() -> None:
    trace = sessions(num_sessions=3, turns=6)
    kv = play(trace, "kv", num_workers=4)
    others = [play(trace, name, num_workers=4) for name in ("round-robin", "random")]
    assert kv["num_finished"] == {"length": 18}
    for other in others:
        assert kv["ttft_ms"]["mean"] < other["ttft_ms"]["mean"]
        assert kv["prefix_reuse"] > other["prefix_reuse"]


def test_without_events_sessions_stay_too() -> None:
    config = ReplayConfig(4, num_blocks=64, block_size=4, timing=TIMING, trace_block_tokens=8)
    router = RouterConfig(block_size=4, events=False, approximate_blocks=64)
    blind = Replay(sessions(3, 6), config, router).run()
    assert blind["prefix_reuse"] == play(sessions(3, 6), num_workers=4)["prefix_reuse"] > 0


def test_a_floor_that_is_full_preempts_and_ends() -> None:
    trace = [TraceRequest(0, 16, 20, [i, i + 1]) for i in range(0, 20, 2)]
    report = play(trace, num_workers=1, num_blocks=16)
    assert report["num_preemptions"] > 0 and report["num_finished"] == {"length": 10}
    refused = play([TraceRequest(0, 80, 1, list(range(10)))], num_workers=1, num_blocks=16)
    assert refused["num_finished"] == {"reject": 1} and refused["ttft_ms"] == {}


def lines(path: Path, trace: list[TraceRequest]) -> str:
    rows = [
        {
            "timestamp": request.arrival_ms,
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": request.hash_ids,
        }
        for request in trace
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(tmp_path / "trace.jsonl", sessions(2, 2))
    flags = ["--trace-block-tokens", "8", "--block-size", "4", "--prefill-ms", "0,1,10"]
    for policy in ("kv", "round-robin", "least-loaded", "random"):
        status = run(
            ["plan", "replay", "--trace", path, "--workers", "2", "--router", policy, *flags]
        )
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert status == 0 and report["router"] == policy and report["workers"] == 2
        assert {"mean", "p50", "p99"} <= report["ttft_ms"].keys()
    assert run(["plan", "replay"]) == 2
    assert "--trace is needed" in capsys.readouterr().err


def test_published_events_keep_sessions_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = sessions(num_sessions=5, turns=8, gap_ms=60.0)
    own, told = (play(trace, num_workers=4, by_events=by_events) for by_events in (False, True))
    assert told["prefix_reuse"] >= 0.99 * own["prefix_reuse"] > 0.5
    path = lines(tmp_path / "trace.jsonl", trace)
    flags = ["--trace-block-tokens", "8", "--block-size", "4", "--workers", "4", "--by-events"]
    assert run(["plan", "replay", "--trace", path, *flags]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert report["plan"] == "replay-events" and report["hits_ratio"] >= 0.99
    assert report["serve"]["num_finished"] == report["events"]["num_finished"] == {"length": 40}
    assert "a simulation" in captured.err
    assert run(["plan", "replay", "--trace", path, *flags, "--fronts", "2"]) == 2
    assert "--by-events compares one front" in capsys.readouterr().err


@pytest.mark.parametrize("delay_ms", [0.0, 100.0])
def test_fronts_share_the_workers_and_every_request_ends(delay_ms: float) -> None:
    trace = sessions(num_sessions=3, turns=6)
    one = play(trace, num_workers=4)
    many = play(trace, num_workers=4, num_fronts=4, report_delay_ms=delay_ms)
    assert many["num_finished"] == {"length": 18}
    if not delay_ms:
        assert many["prefix_reuse"] == one["prefix_reuse"], "events reach every front"


def steady(num_requests: int, per_s: float) -> list[TraceRequest]:
    """Prompts that share nothing, at random times."""
    source, now_ms, trace = random.Random(1), 0.0, []
    for number in range(num_requests):
        now_ms += 1000 * source.expovariate(per_s)
        trace.append(TraceRequest(now_ms, 16, 3, [2 * number, 2 * number + 1]))
    return trace


@pytest.mark.parametrize("delay_ms", [100.0, 1000.0])
def test_fronts_that_hear_late_make_no_herd(delay_ms: float) -> None:
    """About a hundred requests come in a second, 25 for each worker, 30 at most by one router."""
    trace = steady(600, 100.0)
    one = play(trace, num_workers=4, num_blocks=256)["most_sent_1s"]
    many = play(trace, num_workers=4, num_blocks=256, num_fronts=8, report_delay_ms=delay_ms)[
        "most_sent_1s"
    ]
    assert 25 <= one <= many <= 1.25 * one, "without estimates of what others sent: 1.6"


def test_the_command_with_fronts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(tmp_path / "trace.jsonl", sessions(2, 2))
    flags = ["--trace", path, "--workers", "2", "--trace-block-tokens", "8", "--block-size", "4"]
    assert run(["plan", "replay", *flags, "--fronts", "3", "--report-delay", "0.1s"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["fronts"] == 3 and report["report_delay_ms"] == 100.0
    assert report["num_finished"] == {"length": 4}
    assert run(["plan", "replay", *flags, "--report-delay", "100"]) == 2
    assert "--report-delay must be a time such as 100ms or 1.5s" in capsys.readouterr().err
    assert run(["plan", "replay", *flags, "--fronts", "0"]) == 2
    assert "--fronts must be a whole number from 1 to 1024" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no request"),
        ("{", "line 1"),
        ("[1]", "expected a JSON object"),
        ('{"timestamp": 0}', "'input_length' is missing"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "positive"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}', "needs 2"),
        ('{"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": ["x"]}', "hash_ids"),
    ],
)
def test_bad_traces(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=message) as error:
        read_trace(str(path), 8)
    assert str(path) in str(error.value)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(str(tmp_path / "none"), 8)

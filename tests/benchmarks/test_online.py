"""Benchmarks of whole servers, with stand-ins for the servers and for what loads them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import itl_ratio, online
from benchmarks.harness import Report


class StandIn:
    """A server that has one model."""

    url, start_s = "http://stand-in/v1", 2.0

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words
        self.bodies: list[Any] = []

    def call(self, path: str, body: Any = None, key: str = "") -> io.BytesIO:
        self.bodies.append(body)
        return io.BytesIO(json.dumps({"data": [{"id": "folder"}]}).encode())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """The servers that were started; each is slower than the one before."""
    found: list[StandIn] = []

    @contextlib.contextmanager
    def serve(*words: Any) -> Iterator[StandIn]:
        found.append(StandIn(words))
        yield found[-1]

    class Load:
        def __init__(self, url: str, *flags: str) -> None:
            self.flags = flags

        def point(self) -> Report:
            slower = len(found)
            times = {name: 10.0 * slower for name in ("mean", "p50", "p90", "p99", "max")}
            return {
                **{f"{name}_ms": times for name in ("itl", "ttft", "tpot")},
                "output_tok_s": 100.0 / slower,
                "num_completed": 3,
                "num_failed": 0,
                "prefix_hits": None,
            }

    monkeypatch.setattr(itl_ratio, "serve", serve)
    monkeypatch.setattr(online, "served", serve)
    for module in (itl_ratio, online):
        monkeypatch.setattr(module, "EndpointLoad", Load)
    return found


def test_long_prompts_beside_streams_on_three_pools(
    started: list[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    report = itl_ratio.BENCHMARK.call(["--rounds", "1", "--", "--device", "cpu"])
    assert [server.words[2:-2] for server in started] == list(itl_ratio.POOLS.values())
    assert all(server.words[-2:] == ("--device", "cpu") for server in started)
    assert report["long_per_s"] == pytest.approx(0.5 * 1000 / 10)
    assert report["ratios"]["two_workers"]["itl_ms_p99"] == pytest.approx(1 / 3, abs=1e-3)
    assert report["ratios"]["one_worker"]["output_tok_s"] == 2.0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(json.dumps(report))


def test_a_server_beside_vllms(started: list[StandIn], capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--shape smollm2 --site DIR --users 2,4 --requests 3,5 --input-len 8"
    report = online.BENCHMARK.call(flags.split())
    ours, theirs = started
    assert "serve" in ours.words[0] and "--load-format" in theirs.words[0]
    assert theirs.words[1]["PYTHONPATH"] == "DIR" and "HF_HUB_OFFLINE" in theirs.words[1]
    prompts = [body["prompt"] for body in ours.bodies if body]
    assert len(set(prompts)) == 1 + online.WARM_UP and {len(p.split()) for p in prompts} == {8}
    assert report["ratios"]["4"] == {
        "output_tok_s": 2.0, **dict.fromkeys(online.COMPARED[1:], 0.5)
    }  # fmt: skip
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(json.dumps(report))

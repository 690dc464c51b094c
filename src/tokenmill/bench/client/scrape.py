"""Reads the server's Prometheus metrics before, during and after a point.

A thread of the parent process reads them, never a client process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from tokenmill.bench.client.connections import call_once
from tokenmill.bench.client.records import Endpoint, LoadRecord
from tokenmill.bench.results.reports import Occurrence, PointReport, ServerReport

EVERY_S, TIMEOUT_S = 1.0, 5.0
FIRST_S = 0.05  # until the first reading of a point; twice as long to each next one
SETTLE_S, NUM_SETTLE = 0.2, 10  # counters may come a moment after the last byte
MAX_BYTES = 16 * 2**20
TOLERANCE = 0.01  # between the server's tokens and the client's
TOKENS_DIFFER, REQUESTS_DIFFER = "server_tokens_differ", "server_requests_differ"
RESTARTED = "server_restarted"

MOST_DRAFTS = 8  # positions that are looked for
# What tokenmill, vLLM (newer and older) and SGLang call it; the first one that is there counts.
COUNTERS: dict[str, tuple[str, ...]] = {
    "num_requests": (
        *("tokenmill_request_success_total", "vllm:request_success_total"),
        "sglang:num_requests_total",
    ),
    "num_output_tokens": (
        *("tokenmill_generation_tokens_total", "vllm:generation_tokens_total"),
        "sglang:generation_tokens_total",
    ),
    "num_prompt_tokens": (
        *("tokenmill_prompt_tokens_total", "vllm:prompt_tokens_total"),
        "sglang:prompt_tokens_total",
    ),
    "prefix_queries": (
        *("tokenmill_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
        *("vllm:gpu_prefix_cache_queries_total", "sglang:prompt_tokens_total"),
    ),
    "prefix_hits": (
        *("tokenmill_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
        *("vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total"),
    ),
    "num_preemptions": ("tokenmill_num_preemptions_total", "vllm:num_preemptions_total"),
    "draft_runs": ("tokenmill_mtp_runs_total", "vllm:spec_decode_num_drafts_total"),
    "drafts_accepted": (
        *("tokenmill_mtp_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
    ),
    # Samples of one position alone; vLLM counts from 0 and drafts as often for each.
    **{
        f"accepted_{place}": (
            f"tokenmill_mtp_accepted_tokens_total[{place + 1}]",
            f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{place}]",
        )
        for place in range(MOST_DRAFTS)
    },
    **{
        f"drafted_{place}": (
            f"tokenmill_mtp_drafted_tokens_total[{place + 1}]",
            "vllm:spec_decode_num_drafts_total",
        )
        for place in range(MOST_DRAFTS)
    },
    **{
        f"{name}_{part}": tuple(f"{server}{metric}_seconds_{part}" for server, metric in metrics)
        for name, metrics in {
            "ttft": [(p, "time_to_first_token") for p in ("tokenmill_", "vllm:", "sglang:")],
            "queue": [
                *((p, "request_queue_time") for p in ("tokenmill_", "vllm:")),
                ("sglang:", "queue_time"),
            ],
        }.items()
        for part in ("sum", "count")
    },
}
SUMMED_GAUGES: dict[str, tuple[str, ...]] = {
    "running": (
        *("tokenmill_num_requests_running", "vllm:num_requests_running"),
        "sglang:num_running_reqs",
    ),
    "waiting": (
        *("tokenmill_num_requests_waiting", "vllm:num_requests_waiting"),
        "sglang:num_queue_reqs",
    ),
}
SHARES: dict[str, tuple[str, ...]] = {
    "kv_cache_usage": (
        *("tokenmill_kv_cache_usage", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "sglang:token_usage",
    )
}
_GAUGES = (*SUMMED_GAUGES, *SHARES)
_FIELDS = COUNTERS | SUMMED_GAUGES | SHARES
_WANTED = frozenset(name.partition("[")[0] for names in _FIELDS.values() for name in names)


Reading = dict[str, float]  # by field; what the server does not tell is missing


def read_exposition(text: str, model: str | None = None) -> Reading:
    """The fields of one scrape: sums over engines, the fullest cache; of `model` if named."""
    from prometheus_client.parser import text_string_to_metric_families as parse

    samples: dict[str, list[tuple[str | None, float]]] = {}
    lines = [line for line in text.splitlines() if _name(line) in _WANTED]
    for sample in (sample for family in parse("\n".join(lines)) for sample in family.samples):
        if not math.isnan(sample.value):
            for name in (sample.name, f"{sample.name}[{sample.labels.get('position')}]"):
                owner = sample.labels.get("model_name")
                samples.setdefault(name, []).append((owner, sample.value))
    reading = {}
    for name, candidates in _FIELDS.items():
        metric = next((metric for metric in candidates if metric in samples), None)
        if metric is not None:
            found = samples[metric]
            mine = [value for owner, value in found if owner == model] or [v for _, v in found]
            reading[name] = max(mine) if name in SHARES else sum(mine)
    return reading


def _name(line: str) -> str:
    """Of a sample; that of a comment is "#"."""
    return line.partition("{")[0].partition(" ")[0]


def metrics_url(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(path="/metrics", query="", fragment="").geturl()


@dataclass(slots=True)
class Scraper:
    url: str
    target: Endpoint
    every_s: float = EVERY_S
    fault: str | None = None  # why there is nothing to read
    num_during: int = 0  # readings of the last point between its first and its end
    _readings: list[Reading] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        """The first reading of a point; more follow until `end`. A server without is left alone."""
        if self.fault is not None:
            return
        try:
            self._readings = [self._scrape()]
        except (OSError, ValueError, HTTPException) as error:
            self.fault = f"{self.url}: {error}"
            return
        except ModuleNotFoundError:
            self.fault = "prometheus-client is not installed: pip install prometheus-client"
            return
        if not self._readings[0]:
            self.fault = f"{self.url}: no metric that is known"
            return
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> list[Reading]:
        """All readings of the point, the last one taken when the counters stood still."""
        if self._thread is None:
            return []
        self._over.set()
        self._thread.join()
        self._thread = None
        self.num_during = len(self._readings) - 1
        for _ in range(NUM_SETTLE):
            before = _counters(self._readings[-1])
            self._over.clear()
            self._over.wait(SETTLE_S)
            if not self._try() or _counters(self._readings[-1]) == before:
                break
        return self._readings

    def _watch(self) -> None:
        wait_s = FIRST_S
        while not self._over.wait(min(wait_s, self.every_s)):
            self._try()
            wait_s *= 2

    def _try(self) -> bool:
        """A server too busy to answer this time is asked again later."""
        try:
            reading = self._scrape()
        except (OSError, ValueError, HTTPException):
            return False
        if reading:
            self._readings.append(reading)
        return bool(reading)

    def _scrape(self) -> Reading:
        _, body = call_once(self.target, self.url, timeout_s=TIMEOUT_S, max_bytes=MAX_BYTES)
        return read_exposition(body.decode(errors="replace"), self.target.model)


def _counters(reading: Reading) -> Reading:
    return {name: value for name, value in reading.items() if name in COUNTERS}


def server_report(readings: Sequence[Reading], num_during: int | None = None) -> ServerReport:
    """What the server says of one point; a figure that it does not have is None.

    Peaks are of the `num_during` readings after the first; one that is 0 although requests ended
    was not seen: the point was too short.
    """
    first, last = readings[0], readings[-1]
    during = readings if num_during is None else readings[1 : 1 + num_during]

    def grown(name: str) -> float | None:
        return last[name] - first.get(name, 0.0) if name in last else None

    def ratio(part: str, whole: str) -> float | None:
        number = grown(whole)
        return (grown(part) or 0.0) / number if number else None

    def in_ms(name: str) -> float | None:
        mean_s = ratio(f"{name}_sum", f"{name}_count")
        return None if mean_s is None else 1e3 * mean_s

    accepted = ratio("drafts_accepted", "draft_runs")
    counts = {name: grown(name) for name in COUNTERS if name.startswith("num_")}
    peaks = {name: max((r[name] for r in during if name in r), default=None) for name in _GAUGES}
    if not peaks["running"] and grown("num_requests"):
        peaks = dict.fromkeys(_GAUGES)
    report: dict[str, Any] = {
        "num_readings": len(readings),
        "num_readings_during": len(during),
        **{name: None if value is None else round(value) for name, value in counts.items()},
        **{f"peak_{name}": value for name, value in peaks.items()},
        "prefix_hit_rate": ratio("prefix_hits", "prefix_queries"),
        "acceptance_length": None if accepted is None else 1 + accepted,
        "acceptance_positions": [
            share
            for place in range(MOST_DRAFTS)
            if f"accepted_{place}" in last
            and (share := ratio(f"accepted_{place}", f"drafted_{place}")) is not None
        ],
        "ttft_mean_ms": in_ms("ttft"),
        "queue_mean_ms": in_ms("queue"),
    }
    return ServerReport(**report)


def server_doubts(
    server: ServerReport, point: PointReport, records: Sequence[LoadRecord]
) -> dict[str, Occurrence]:
    """Doubts where the server's counts differ from the client's: {class: {count, first}}.

    What was cut off or failed may have cost the server tokens that never came.
    """
    broken = [record for record in records if record.error is not None]
    tokens, requests = server.num_output_tokens, server.num_requests
    if min(tokens or 0, requests or 0) < 0:
        return _doubt(RESTARTED, "the server's counters went backwards during the point")
    doubts: dict[str, Occurrence] = {}
    if tokens is not None:
        least = point.num_output_tokens
        most = least + sum(max(r.num_outputs, r.max_tokens or 0) for r in broken)
        if not least * (1 - TOLERANCE) <= tokens <= most * (1 + TOLERANCE):
            text = f"the server generated {tokens:,} tokens, {least:,} came here"
            doubts |= _doubt(TOKENS_DIFFER, text)
    if requests is not None:
        done = point.num_completed
        if not done <= requests <= done + len(broken):
            text = f"the server finished {requests:,} requests, {done:,} were answered here"
            doubts |= _doubt(REQUESTS_DIFFER, text)
    if doubts and (tokens or 0) > point.num_output_tokens:
        next(iter(doubts.values())).first += ": does somebody else use it?"
    return doubts


def _doubt(name: str, text: str) -> dict[str, Occurrence]:
    return {name: Occurrence(first=text)}

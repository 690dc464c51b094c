"""OpenTelemetry: one trace follows a call through front, router, workers and other servers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from api.sim import make_tokenizer
from api.streams import Spawner
from tiny_configs import write_config
from tokenmill.__main__ import run
from tokenmill.api.keys import Keys
from tokenmill.api.openai_routes import create_app
from tokenmill.api.telemetry.tracing import NO_TRACING, OtelTracing, open_tracing
from tokenmill.core.config import PoolConfig, ServerConfig
from tokenmill.workers.pool import WorkerPool
from workers.pools import KVSpawner, kill, prompt

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
STAGES = ["parse", "tokenize", "route", "route", "queue", "prefill", "kv_transfer", "decode"]
GENEROUS_S = 180.0


class Traced:
    """A prefill and a decode worker behind an app whose spans stay in memory."""

    def __init__(self, runner: asyncio.Runner, pool: WorkerPool, decode: Spawner) -> None:
        self._runner = runner
        self.pool = pool
        self.decode = decode
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        config = ServerConfig()
        self._app = create_app(
            pool, make_tokenizer(), Keys.of(config, "t", b"s"), "tiny", OtelTracing(provider)
        )

    def run(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._exporter.clear()
        self._runner.run(asyncio.wait_for(scenario(), GENEROUS_S))

    async def call(self, body: dict[str, Any]) -> bytes:
        """A completion by ASGI; returns the answer's body."""
        parts: list[bytes] = []
        gone = asyncio.Event()
        inbox = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if not inbox:
                await gone.wait()
            return inbox.pop() if inbox else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            parts.append(message.get("body", b""))

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"traceparent", TRACEPARENT.encode()), (b"x-request-id", b"mine")],
        }
        await self._app(scope, receive, send)
        return b"".join(parts)

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def call_span(self) -> ReadableSpan:
        (span,) = [span for span in self.spans() if span.kind.name == "SERVER"]
        return span


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("tiny")
    write_config(folder, max_position_embeddings=1024)
    prefill, decode = KVSpawner(folder, "--budget", "32"), KVSpawner(folder)
    config = PoolConfig(prefill=1, decode=1, remote_prefill_tokens=40, backoff_s=0.05)
    with asyncio.Runner() as runner:
        pool = runner.run(make_pool(decode, config, prefill))
        yield Traced(runner, pool, decode)
        runner.run(pool.close())


async def make_pool(decode: Spawner, config: PoolConfig, prefill: Spawner) -> WorkerPool:
    pool = WorkerPool(decode, config, prefill_spawn=prefill)
    await pool.start()
    return pool


def completion(length: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return {"model": "tiny", "prompt": prompt(length, 5), **sampling, **more}


def test_one_trace_through_prefill_transfer_and_decode(traced: Traced) -> None:
    async def scenario() -> None:
        answer = json.loads(await traced.call(completion(200, 8)))
        assert answer["usage"]["completion_tokens"] == 8

    traced.run(scenario)
    call = traced.call_span()
    stages = [span for span in traced.spans() if span is not call]
    assert sorted(span.name for span in stages) == sorted(STAGES)
    for span in (call, *stages):
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.start_time is not None and span.end_time is not None
        assert call.start_time <= span.start_time <= span.end_time <= call.end_time  # type: ignore[operator]
    assert f"{call.parent.span_id:016x}" == PARENT_ID  # type: ignore[union-attr]
    assert call.attributes is not None and call.attributes["gen_ai.request.id"] == "mine"
    assert {span.parent.span_id for span in stages if span.parent} == {call.context.span_id}
    by_name = {span.name: span for span in stages}
    order = [by_name[name] for name in ("parse", "tokenize", "queue", "prefill", "decode")]
    for before, after in pairwise(order):
        assert before.end_time <= after.start_time, (before.name, after.name)  # type: ignore[operator]
    transfer, prefill = by_name["kv_transfer"], by_name["prefill"]
    assert prefill.start_time <= transfer.start_time  # type: ignore[operator]
    assert transfer.end_time <= by_name["decode"].start_time  # type: ignore[operator]
    attributes = dict(call.attributes or {})
    assert call.name == "text_completion tiny"
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["gen_ai.usage.input_tokens"] == 200
    assert attributes["gen_ai.usage.output_tokens"] == 8
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    roles = {s.attributes["tokenmill.router.role"] for s in stages if s.name == "route"}  # type: ignore[index]
    assert roles == {"prefill", "decode"}
    assert any("cost" in key for key in dict(by_name["route"].attributes or {}))


def test_a_short_prompt_has_no_transfer_and_choices_are_told_apart(traced: Traced) -> None:
    async def scenario() -> None:
        await traced.call(completion(10, 3, n=2))

    traced.run(scenario)
    facts = [(span.name, dict(span.attributes or {})) for span in traced.spans()]
    stages = [(name, f["tokenmill.choice"]) for name, f in facts if "tokenmill.choice" in f]
    want = [(name, n) for name in ("route", "queue", "prefill", "decode") for n in (0, 1)]
    assert sorted(stages) == sorted(want)


def test_errors_and_migrations_are_told(traced: Traced) -> None:
    async def refused() -> None:
        assert b"unknown_field" in await traced.call(completion(10, 3, nope=1))

    traced.run(refused)
    call = traced.call_span()
    assert not call.status.is_ok and "nope" in (call.status.description or "")
    assert dict(call.attributes or {})["error.type"] == "unknown_field"

    async def killed() -> None:
        answering = asyncio.create_task(traced.call(completion(10, 300)))
        while not any(e.token_ids for e in traced.pool.open_requests.values()):
            await asyncio.sleep(0.001)
        kill(traced.decode)
        assert json.loads(await answering)["usage"]["completion_tokens"] == 300

    traced.run(killed)
    call = traced.call_span()
    (event,) = [event for event in call.events if event.name == "migrated"]
    assert dict(event.attributes or {})["tokenmill.choice"] == 0
    names = [span.name for span in traced.spans()]
    assert names.count("decode") == names.count("route") == 2
    assert dict(call.attributes or {})["gen_ai.usage.output_tokens"] == 300


# What is asked for, and what is missing.


def test_nothing_is_imported_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert open_tracing(None, "x") is NO_TRACING


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--otlp-endpoint", "http://127.0.0.1:1"), "pip install 'opentelemetry-"),
        (("--otlp-endpoint", "localhost:4318"), "--otlp-endpoint must be http://HOST:PORT"),
    ],
)
def test_what_is_missing_is_named(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert run(["route", "--backend", "http://127.0.0.1:1", "--port", "0", *arguments]) == 1
    assert message in capsys.readouterr().err

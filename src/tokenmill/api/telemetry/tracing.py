"""OpenTelemetry: one trace per call, sent to a collector by OTLP over HTTP.

The library is imported when tracing is asked for. Times are those of the monotonic clock, in
nanoseconds, as everywhere else; names and attributes are those of the GenAI conventions where
there are such.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from tokenmill import __version__
from tokenmill.core.installation import install_command
from tokenmill.core.types import TokenmillError

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
Kind = Literal["SERVER", "CLIENT", "INTERNAL"]
Attributes = Mapping[str, Any]


class TracingError(TokenmillError):
    """Traces were asked for and cannot be made; the message says what is missing."""


class Span:
    """A span that nobody asked for: it takes everything and keeps nothing."""

    __slots__ = ()
    recording = False

    def child(
        self,
        name: str,
        attributes: Attributes,
        start_ns: int | None = None,
        end_ns: int | None = None,
        kind: Kind = "INTERNAL",
    ) -> Span:
        """A part of this span; with `end_ns` it is over already."""
        return self

    def rename(self, name: str) -> None: ...

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes, at_ns: int | None = None) -> None: ...

    def headers(self) -> list[tuple[bytes, bytes]]:
        """W3C trace context for whom this span calls."""
        return []

    def end(self, error: str | None = None, end_ns: int | None = None) -> None:
        """End the span; an error is its status, and the word before its colon error.type."""


class Tracing:
    """Makes the spans of a process; this base class makes none."""

    def begin(
        self, path: str, headers: Iterable[tuple[bytes, bytes]], start_ns: int | None = None
    ) -> Span:
        """The span of a call; its parent is the one that the caller's traceparent names."""
        return NO_SPAN

    def close(self) -> None:
        """Send what is left."""


NO_SPAN = Span()
NO_TRACING = Tracing()


def open_tracing(endpoint: str | None, service: str) -> Tracing:
    """Tracing to `endpoint`, or to what OpenTelemetry's own variables say; else NO_TRACING."""
    if endpoint is None and not any(os.environ.get(name) for name in VARIABLES):
        return NO_TRACING
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise TracingError(f"--otlp-endpoint must be http://HOST:PORT, got {endpoint!r}")
    try:
        return OtelTracing(_provider(endpoint, service))
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        asked = "--otlp-endpoint" if endpoint is not None else "OTEL_EXPORTER_OTLP_ENDPOINT"
        raise TracingError(f"{asked} needs OpenTelemetry: {install_command('otel')}") from None


def _provider(endpoint: str | None, service: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if endpoint is not None and not endpoint.rstrip("/").endswith("/v1/traces"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    facts = {"service.version": __version__}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        facts["service.name"] = service
    provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class OtelTracing(Tracing):
    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self.api = trace
        self.tracer = provider.get_tracer("tokenmill", __version__)
        self.propagator = TraceContextTextMapPropagator()

    def begin(
        self, path: str, headers: Iterable[tuple[bytes, bytes]], start_ns: int | None = None
    ) -> Span:
        names = (b"traceparent", b"tracestate")
        carrier = {k.decode(): v.decode("latin-1") for k, v in headers if k in names}
        context = self.propagator.extract(carrier)
        operation = OPERATIONS.get(path, path)
        facts = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "tokenmill",
            "http.request.method": "POST",
            "url.path": path,
        }
        offset_ns = time.time_ns() - time.monotonic_ns()
        return OtelSpan(self, operation, facts, "SERVER", context, start_ns, offset_ns)

    def close(self) -> None:
        self._provider.shutdown()


class OtelSpan(Span):
    """A span and its children; `end` is called once."""

    __slots__ = ("_offset_ns", "_otel", "_tracing")
    recording = True

    def __init__(
        self,
        tracing: OtelTracing,
        name: str,
        attributes: Attributes,
        kind: Kind,
        context: Any,
        start_ns: int | None,
        offset_ns: int,
    ) -> None:
        self._tracing = tracing
        self._offset_ns = offset_ns  # of the clock on the wall; one for a whole call
        self._otel = tracing.tracer.start_span(
            name,
            context,
            getattr(tracing.api.SpanKind, kind),
            attributes,
            start_time=self._wall(start_ns),
        )

    def child(
        self,
        name: str,
        attributes: Attributes,
        start_ns: int | None = None,
        end_ns: int | None = None,
        kind: Kind = "INTERNAL",
    ) -> Span:
        context = self._tracing.api.set_span_in_context(self._otel)
        span = OtelSpan(self._tracing, name, attributes, kind, context, start_ns, self._offset_ns)
        if end_ns is not None:
            span.end(end_ns=end_ns)
        return span

    def rename(self, name: str) -> None:
        self._otel.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._otel.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes, at_ns: int | None = None) -> None:
        self._otel.add_event(name, attributes, self._wall(at_ns))

    def headers(self) -> list[tuple[bytes, bytes]]:
        carrier: dict[str, str] = {}
        context = self._tracing.api.set_span_in_context(self._otel)
        self._tracing.propagator.inject(carrier, context)
        return [(name.encode(), value.encode()) for name, value in carrier.items()]

    def end(self, error: str | None = None, end_ns: int | None = None) -> None:
        if error is not None:
            status = self._tracing.api.StatusCode.ERROR
            self._otel.set_status(self._tracing.api.Status(status, error))
            self._otel.set_attribute("error.type", error.partition(":")[0])
        self._otel.end(self._wall(end_ns))

    def _wall(self, monotonic_ns: int | None) -> int:
        return self._offset_ns + (time.monotonic_ns() if monotonic_ns is None else monotonic_ns)


def terms_of(terms: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """A routing decision's terms as attributes, by worker."""
    return {
        f"tokenmill.router.{worker}.{name}": value
        for worker, each in terms.items()
        for name, value in each.items()
    }

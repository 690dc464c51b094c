"""How a connection reads requests, case by case, with h11 as the second opinion."""

from __future__ import annotations

from typing import Any

import pytest
import uvicorn

from api.fed_connection import feed
from api.framing_cases import CASES, Case, read_by_h11
from tokenmill.api.connection import MAX_PIPELINED


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case(case: Case) -> None:
    for parts in ([case.data], [bytes([byte]) for byte in case.data]):
        app, transport = feed(*parts)
        if case.calls:
            assert tuple(app.calls) == case.calls
            assert transport.statuses == [204] * len(case.calls)
        else:
            assert not app.calls and transport.is_closed
            assert transport.statuses == [case.status], transport.written


@pytest.mark.parametrize("case", CASES, ids=str)
def test_h11_reads_the_same_or_the_case_says_why_not(case: Case) -> None:
    calls, status = read_by_h11(case.data)
    theirs, ours = status or calls, list(case.calls) or case.status
    if isinstance(theirs, int) and isinstance(ours, int):  # refused by both
        assert not case.why_not_h11
        return
    assert (theirs == ours) is not bool(case.why_not_h11)


def test_trailers_are_no_headers() -> None:
    (case,) = [case for case in CASES if case.name == "trailers"]
    app, _ = feed(case.data)
    assert {name for name, _ in app.headers[0]} == {b"host", b"content-type", b"transfer-encoding"}
    head, trailers = case.data[: case.data.index(b"0\r\n")], b"X-Api-Key: k\r\n" * 5000
    _, transport = feed(head + b"0\r\n" + trailers)
    assert transport.statuses == [431]


def test_the_host_of_a_whole_url_takes_precedence() -> None:
    for target, host in ((b"http://a:81/x", b"a:81"), (b"http://[::1]/x", b"[::1]")):
        app, _ = feed(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        assert [value for name, value in app.headers[0] if name == b"host"] == [host]


def test_calls_that_wait_on_a_connection_and_headers_are_bounded() -> None:
    call = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    app, _ = feed(call * (MAX_PIPELINED + 1))
    assert len(app.calls) > 1
    app, transport = feed(call * (MAX_PIPELINED + 3))
    assert transport.is_closed and len(app.calls) == 1
    _, transport = feed(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 3000)
    assert transport.statuses == [431]


def test_chunks_of_one_byte_come_to_the_call_together(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    on_body = uvicorn.protocols.http.httptools_impl.HttpToolsProtocol.on_body

    def counted(self: Any, body: bytes) -> None:
        taken.append(len(body))
        on_body(self, body)

    monkeypatch.setattr(uvicorn.protocols.http.httptools_impl.HttpToolsProtocol, "on_body", counted)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    app, _ = feed(head + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n")
    assert app.calls == [("POST", "/", b"x" * 1000)] and taken == [1000]

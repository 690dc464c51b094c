"""Calls over TLS, and keys and certificates that change while streams run.

The certificates are signed by themselves for localhost; their private keys are known to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.sim import MODEL
from api.sim_server import GENEROUS_S, SimServer, sim_server, wait_until
from tokenmill.__main__ import run
from tokenmill.api.keys import Keys
from tokenmill.api.server import Signals
from tokenmill.core.config import ServerConfig
from tokenmill.core.keys.key_ring import KeyFileError

ONE, TWO = (Path(__file__).with_name("certificates") / f"{name}.pem" for name in ("one", "two"))
CALL = {"model": MODEL, "prompt": "count: 40", "stream": True}


def trusting(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificate))
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    shutil.copy(ONE, folder / "own.pem")
    (folder / "keys").write_text("first = old\n")
    (folder / "keys").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[SimServer]:
    own = str(files / "own.pem")
    config = ServerConfig(port=0, fronts=2, api_key_file=str(files / "keys"), tls_cert=own)
    with open(files / "log", "w") as log, sim_server(config, step_ms=10.0, log=log) as running:
        yield running


def connect(server: SimServer, certificate: Path) -> http.client.HTTPSConnection:
    host, port = server.address
    connection = http.client.HTTPSConnection(
        host, port, context=trusting(certificate), timeout=GENEROUS_S
    )
    connection.connect()
    return connection


def ask(server: SimServer, certificate: Path, key: str, **fields: Any) -> int:
    with contextlib.closing(connect(server, certificate)) as connection:
        send(connection, key, **fields)
        return connection.getresponse().status


def send(connection: http.client.HTTPConnection, key: str, **fields: Any) -> None:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(CALL | fields), headers)


def test_calls_are_encrypted(
    server: SimServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    with contextlib.closing(connect(server, ONE)) as connection:
        for stream in (False, True):
            send(connection, "old", stream=stream)
            answer = connection.getresponse()
            assert answer.status == 200 and b"fox" in answer.read()
        assert connection.sock.selected_alpn_protocol() == "http/1.1"
        assert connection.sock.version() in ("TLSv1.2", "TLSv1.3")
        connection.request("POST", "/v1/completions", b"x" * (17 << 20))  # refused, and read on
        assert connection.getresponse().status in (401, 413, 415)
    plain = http.client.HTTPConnection(*server.address, timeout=GENEROUS_S)
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.request("GET", "/health")
        plain.getresponse()
    monkeypatch.setenv("SSL_CERT_FILE", str(ONE))
    assert run(["status", "--url", server.url]) == 0, capsys.readouterr().err


def test_keys_and_certificates_change_while_streams_run(server: SimServer, files: Path) -> None:
    keys, own, log = files / "keys", files / "own.pem", files / "log"
    running = [connect(server, ONE) for _ in range(6)]
    for connection in running:
        send(connection, "old", prompt="count: 200")
    answers = [connection.getresponse() for connection in running]  # their first tokens are there
    keys.write_text("first = new\nsecond = other\n")
    shutil.copy(TWO, own)
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(lambda: "2 API keys of 2 accounts" in log.read_text(), "it says so")

    def is_new() -> bool:
        try:
            return ask(server, TWO, "new", max_tokens=1) == 200
        except OSError:  # a front that has the old certificate
            return False

    wait_until(lambda: all(is_new() for _ in range(8)), "all fronts have heard of it")
    assert {ask(server, TWO, "old") for _ in range(4)} == {401}
    with pytest.raises(ssl.SSLError):
        connect(server, ONE)
    assert all(answer.read().rstrip().endswith(b"[DONE]") for answer in answers), "streams go on"
    own.write_text("no certificate")  # and what is wrong changes nothing
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(lambda: "stay as they were" in log.read_text(), "it says so")
    assert {ask(server, TWO, "new", max_tokens=1) for _ in range(4)} == {200}


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for cert, key, why in (
        (str(tmp_path / "gone"), None, "gone: must be PEM files .*No such file"),
        (str(tmp_path / "empty"), None, "empty: must be PEM files"),
        (str(ONE), str(TWO), "--tls-key .*two.pem: must be .*KEY_VALUES_MISMATCH"),
        (None, str(ONE), "--tls-key needs --tls-cert"),
    ):
        with pytest.raises(KeyFileError, match=why):
            Keys.of(ServerConfig(tls_cert=cert, tls_key=key), "t", b"s")


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hang_up_that_was_ignored_stays_so(
    ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminals = iter([True, True, False])  # at the start, at the first signal, at the second
    monkeypatch.setattr("tokenmill.api.server._has_terminal", lambda: next(terminals))
    reloads: list[None] = []

    async def main() -> None:
        signals = Signals(lambda: reloads.append(None))
        for _ in range(1 if ignored else 2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
        assert (len(reloads), signals.count) == ((0, 0) if ignored else (1, 1))

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGHUP, before)

"""The worker's side: it joins a server's pool, and leaves in order when it is told to end."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from typing import IO, Any

from tokenmill import __version__
from tokenmill.workers.joining.protocol import (
    HANDSHAKE_S,
    LEAVE,
    MAX_LINE,
    Admitted,
    Challenge,
    Hello,
    JoinError,
    Line,
    Proofs,
    Refused,
    Terms,
    decode_terms,
    line_of,
    read_line,
    split_address,
)

POLL_S, TELL_S = 1.0, 30.0  # between two tries to connect, and two lines about it
EXIT_S = 5.0  # that a worker has to end in order once the server has closed the connection

_log = logging.getLogger(__name__)


class Membership:
    """A worker's place in a pool. `address` ends with "#" and the key, as that of a link."""

    def __init__(self, where: str, token: bytes, wait_s: float) -> None:
        """Join the server at HOST:PORT; raises JoinError."""
        self._where = where
        self._socket = _connect(where, wait_s)
        with self._socket.makefile("rb") as lines:
            try:
                terms, key = self._handshake(lines, token)
            except TimeoutError:
                raise JoinError(
                    f"{where} says nothing: no server listens there with --join-listen"
                ) from None
            except OSError as error:
                raise JoinError(f"{where} ended the connection: {error.strerror}") from None
        self.address = f"{terms.address}#{key.hex()}"
        self.settings: dict[str, Any] = terms.settings
        self.model = terms.model
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        threading.Thread(target=self._watch, daemon=True).start()

    def leave(self) -> None:
        """Ask to be let go; the server says when."""
        _log.info("leaving: running requests finish here, or go on at other workers")
        self._socket.sendall(LEAVE)

    def check_model(self, ours: dict[str, str]) -> None:
        """Raise JoinError where the model here is not that of the pool."""
        for name, expected in self.model.items():
            if ours[name] != expected and ours[name] and expected:
                raise JoinError(
                    f"{name}: the pool at {self._where} has {expected}, this worker has "
                    f"{ours[name]}: both must have the same model"
                )

    def _handshake(self, lines: IO[bytes], token: bytes) -> tuple[Terms, bytes]:
        who = f"the server at {self._where}"
        challenge = self._read(lines, who)
        if not isinstance(challenge, Challenge):
            raise JoinError(f"{who} speaks another protocol")
        nonce = secrets.token_bytes(32)
        proofs = Proofs(token, challenge.nonce, nonce)
        self._socket.sendall(line_of(Hello(__version__, nonce, proofs.of_worker())))
        answer = self._read(lines, who)
        if isinstance(answer, Refused):
            raise JoinError(f"{who} refuses this worker: {answer.reason}")
        if not isinstance(answer, Admitted) or not proofs.is_server(answer):
            raise JoinError(f"{who} does not have the token of --token-file")
        terms = decode_terms(answer.terms)
        return terms, proofs.mask(terms.masked_key)

    def _read(self, lines: IO[bytes], who: str) -> Line:
        return read_line(lines.readline(MAX_LINE), who)

    def _watch(self) -> None:
        """End the process when the server gives this worker up, or is gone."""
        with contextlib.suppress(OSError):
            self._socket.recv(1)
        time.sleep(EXIT_S)
        _log.error("error: the server at %s is gone, or has given this worker up", self._where)
        os._exit(1)


def _connect(where: str, wait_s: float) -> socket.socket:
    """A connection to a server that may still have to start."""
    address = split_address(where, "--join")
    began_s, told_s = time.monotonic(), -TELL_S
    while True:
        try:
            return socket.create_connection(address, HANDSHAKE_S)
        except OSError as error:
            passed_s = time.monotonic() - began_s
            why = f"no server answers at {where}: {error.strerror or error}"
        if passed_s >= wait_s:
            raise JoinError(f"{why}; waited {wait_s:g} s (--wait-s)")
        if passed_s - told_s >= TELL_S:
            told_s = passed_s
            _log.info("%s; waiting up to %g s (--wait-s)", why, wait_s)
        time.sleep(min(POLL_S, wait_s))

"""How a worker and a server prove to each other that they have the same token.

Both send lines of JSON over TCP:

1. The server sends Challenge with a nonce.
2. The worker sends Hello with a nonce of its own and an HMAC of both nonces, keyed by the token.
3. The server sends Admitted with an HMAC of all that it says, or Refused.

Admitted has the address of the worker's link (link.py) and its CURVE key under a pad that follows
from token and nonces, so whoever reads along can neither connect there nor read the link. From then
on the worker sends LEAVE when it is told to end, and the connection ends with the worker.
"""

from __future__ import annotations

import hmac
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tokenmill.core.types import TokenmillError

PORT = 7001
HANDSHAKE_S = 10.0
MAX_HELLO, MAX_LINE = 2**12, 2**20
MIN_TOKEN = 32
LEAVE = b"L"
LEADER, GROUP_SIZE, INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"
ANY_ADDRESS = ("0.0.0.0", "::")


class JoinError(TokenmillError):
    """A worker cannot join; the message says why."""


class Challenge(msgspec.Struct, tag=True):
    version: str
    nonce: bytes


class Hello(msgspec.Struct, tag=True):
    version: str
    nonce: bytes
    proof: bytes


class Terms(msgspec.Struct):
    """What a worker is given: its link, the settings of the pool's workers, and their model."""

    address: str
    masked_key: bytes
    settings: dict[str, Any]
    model: dict[str, str]


class Admitted(msgspec.Struct, tag=True):
    terms: bytes  # encoded
    proof: bytes


class Refused(msgspec.Struct, tag=True):
    reason: str


Line = Challenge | Hello | Admitted | Refused
encode_terms, decode_terms = msgspec.json.Encoder().encode, msgspec.json.Decoder(Terms).decode
_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Line).decode


def line_of(message: Line) -> bytes:
    return _encode(message) + b"\n"


def read_line(data: bytes, who: str) -> Line:
    """A message; JoinError where `who` says something else."""
    try:
        message: Line = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = repr(data[:40]) if data else "nothing"
        raise JoinError(f"{who} speaks another protocol: it says {said}") from None
    return message


class Proofs:
    """What follows from a token and the nonces of one handshake."""

    def __init__(self, token: bytes, server_nonce: bytes, worker_nonce: bytes) -> None:
        self._token, self._nonces = token, server_nonce + worker_nonce

    def _hmac(self, purpose: bytes, data: bytes = b"") -> bytes:
        said = b"tokenmill " + purpose + b"\0" + self._nonces + data
        return hmac.digest(self._token, said, "sha512")

    def of_worker(self) -> bytes:
        return self._hmac(b"worker")

    def of_server(self, terms: bytes) -> bytes:
        return self._hmac(b"server", terms)

    def is_worker(self, hello: Hello) -> bool:
        return hmac.compare_digest(hello.proof, self.of_worker())

    def is_server(self, admitted: Admitted) -> bool:
        return hmac.compare_digest(admitted.proof, self.of_server(admitted.terms))

    def mask(self, key: bytes) -> bytes:
        """A key of at most 64 bytes under the pad of this handshake, or that of a masked one."""
        pad = self._hmac(b"key")
        return bytes(a ^ b for a, b in zip(key, pad, strict=False))


def read_token(path: str | None) -> bytes:
    """The token in a file that nobody but its user may read."""
    if path is None:
        raise JoinError("--token-file is needed: a file with the token that both ends share")
    file = Path(path).expanduser()
    try:
        mode = file.stat().st_mode
        token = file.read_bytes().strip()
    except OSError as error:
        raise JoinError(
            f"--token-file {path}: {error.strerror}; "
            f"`(umask 077; openssl rand -hex 32 > {path})` makes one"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise JoinError(
            f"--token-file {path}: others than its owner may use it (mode "
            f"{stat.S_IMODE(mode):04o}), expected 0600: chmod 600 {path}"
        )
    if len(token) < MIN_TOKEN:
        raise JoinError(
            f"--token-file {path}: the token must have at least {MIN_TOKEN} characters, "
            f"it has {len(token)}"
        )
    return token


def split_address(text: str, flag: str) -> tuple[str, int]:
    """Host and port of HOST[:PORT]; an IPv6 address stands in brackets."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.path or parts.query or "@" in text:
        raise JoinError(f"{flag} must be HOST:PORT, such as 10.0.0.1:{PORT}, got {text!r}")
    return host, PORT if port is None else port


def link_host(listen: str) -> str:
    """The address at which fronts are reached by workers that join; JoinError without one."""
    host, port = split_address(listen, "--join-listen")
    if host in ANY_ADDRESS:
        raise JoinError(
            f"--join-listen {listen}: with --fronts it must be an address of this machine that "
            "workers reach, not that of all"
        )
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])


def join_address(given: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Where to join: as given, or at the leader of a LeaderWorkerSet's group."""
    if environ.get(INDEX) == "0":
        raise JoinError(
            f"this pod is the leader of its group ({INDEX}=0): it runs `tokenmill serve "
            "--workers 0 --join-listen`, and the other pods run `tokenmill worker`"
        )
    if given is None and not environ.get(LEADER):
        raise JoinError(f"--join is needed: the address of --join-listen of a server ({LEADER})")
    return given or environ[LEADER]


def num_expected(environ: Mapping[str, str] = os.environ) -> int:
    """Workers that must have joined before a server without own workers answers calls."""
    size = environ.get(GROUP_SIZE, "2")
    if not size.isdecimal() or int(size) < 2:
        raise JoinError(f"{GROUP_SIZE} must be at least 2, a leader and a worker, got {size!r}")
    return int(size) - 1

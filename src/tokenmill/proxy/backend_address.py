"""What --backend says: the URL of a server, and where it publishes its KV cache events."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tokenmill.core.types import TokenmillError

FORM = "--backend must be URL, or URL,events=tcp://HOST:PORT and perhaps replay=tcp://HOST:PORT"


class BackendError(TokenmillError):
    """A backend's address cannot be used; the message names the flag."""


@dataclass(frozen=True, slots=True)
class EventAddress:
    """Where events are published, and where earlier ones can be asked for."""

    events: str
    replay: str | None = None


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """A server, and its streams of events: one for each data-parallel rank, or for all of them."""

    url: str
    streams: tuple[EventAddress, ...] = ()

    @property
    def name(self) -> str:
        return self.url.partition("://")[2]


def read_backends(values: tuple[str, ...]) -> list[BackendAddress]:
    """The backends; raises BackendError when there is none or one stands there twice."""
    if not values:
        raise BackendError(
            "--backend is missing: give the URL of each server, such as http://10.0.0.1:8000"
        )
    found: dict[str, BackendAddress] = {}
    for value in values:
        address = _read(value)
        if address.name in found:
            raise BackendError(f"--backend {value} is given twice")
        found[address.name] = address
    return list(found.values())


def _read(value: str) -> BackendAddress:
    url, *parts = value.split(",")
    streams: list[EventAddress] = []
    for part in parts:
        key, _, given = part.partition("=")
        if key == "events":
            streams.append(EventAddress(_tcp(given, part)))
        elif key == "replay" and streams and streams[-1].replay is None:
            streams[-1] = EventAddress(streams[-1].events, _tcp(given, part))
        elif key == "replay":
            raise BackendError(f"--backend: {part!r} must stand behind the events= that it is for")
        else:
            raise BackendError(f"{FORM}, got {part!r}")
    return BackendAddress(base_url(url), tuple(streams))


def _tcp(address: str, part: str) -> str:
    try:
        parts = urlsplit(address)
        usable = parts.scheme == "tcp" and parts.hostname not in (None, "*") and parts.port
    except ValueError:
        usable = None
    if not usable or parts.path or parts.query:
        raise BackendError(f"{FORM}, got {part!r}")
    return address


def base_url(url: str) -> str:
    """A backend's URL without /v1 and what may follow it; raises BackendError."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username is not None:
        raise BackendError(f"--backend must be http://HOST:PORT or https://..., got {url!r}")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"

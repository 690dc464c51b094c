"""Which images may be fetched: allowed hosts, and addresses that are public."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from tokenmill.core.types import ImageError, TokenmillError

_PORTS = {"https": 443, "http": 80}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class FetchTarget:
    url: SplitResult
    host: str
    port: int
    may_be_private: bool  # the operator has named this very origin

    @property
    def is_tls(self) -> bool:
        return self.url.scheme == "https"

    @property
    def path(self) -> str:
        query = f"?{self.url.query}" if self.url.query else ""
        return (self.url.path or "/") + query

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.url.scheme] else f"{host}:{self.port}"


class AllowedHosts:
    def __init__(self, hosts: Sequence[str]) -> None:
        self._origins = {_origin(host) for host in hosts if "://" in host}
        self._names = {host.lower().rstrip(".") for host in hosts if "://" not in host}
        wrong = [name for name in self._names if _is_no_name(name)]
        if wrong:
            raise TokenmillError(
                f"--image-host must be a host name, *.example.com, * or an origin such as "
                f"http://10.0.0.5:9000, got {wrong[0]!r}"
            )

    def check(self, url: str) -> FetchTarget:
        """What a URL refers to; ImageError where it may not be fetched."""
        parts = _split(url)
        host = (parts.hostname or "").rstrip(".").lower()
        port = parts.port or _PORTS.get(parts.scheme, 0)
        if (parts.scheme, host, port) in self._origins:
            return FetchTarget(parts, host, port, may_be_private=True)
        if not self._origins and not self._names:
            name = host or "HOST"
            wanted = name if parts.scheme == "https" else f"{parts.scheme}://{name}:{port}"
            raise ImageError(
                "this server fetches no images; send a data: URL, or start it with --image-host "
                + wanted
            )
        if parts.scheme != "https":
            raise ImageError(f"{parts.scheme}: URLs are not fetched; send https: or data:")
        if not self._is_allowed(host):
            raise ImageError(
                f"the host {host[:80]!r} is not one of those that images are fetched from "
                "(--image-host); send a data: URL"
            )
        return FetchTarget(parts, host, port, may_be_private=False)

    def _is_allowed(self, host: str) -> bool:
        if not host:
            return False
        parents = [f"*.{host.split('.', n)[-1]}" for n in range(1, host.count(".") + 1)]
        return not self._names.isdisjoint(("*", host, *parents))


def check_address(target: FetchTarget, address: str) -> None:
    """ImageError for an address that is not public, unless the operator has named the origin."""
    if target.may_be_private or is_public(address):
        return
    raise ImageError(
        f"the host {target.host[:80]!r} has an address that is not public, from which images are "
        "not fetched"
    )


def is_public(address: str) -> bool:
    """True for an address of the internet: not private, loopback, link-local or multicast."""
    try:
        ip: Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        ip = _embedded(ip) or ip
    return ip.is_global and not ip.is_multicast


def _embedded(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that packets to an IPv6 address end at."""
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    teredo = ip.teredo
    return ip.ipv4_mapped or ip.sixtofour or (teredo[1] if teredo else None)


def _split(url: str) -> SplitResult:
    if not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
        raise ImageError("its URL has spaces or characters that are not ASCII; quote them by %")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises where it is no number
    except ValueError as error:
        raise ImageError(f"its URL is not valid: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ImageError("its URL has a user name; leave it out")
    return parts


def _origin(text: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(text)
        port = parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError):
        raise TokenmillError(f"--image-host: {text!r} is no origin of http or https") from None
    if not parts.hostname or parts.path not in ("", "/"):
        raise TokenmillError(f"--image-host: {text!r} is no origin such as http://10.0.0.5:9000")
    return parts.scheme, parts.hostname.rstrip(".").lower(), port


def _is_no_name(name: str) -> bool:
    return name != "*" and (not name or "*" in name.removeprefix("*.") or "/" in name)

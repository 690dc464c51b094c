"""Which calls of web pages are taken: a server without keys trusts whoever reaches it.

A page in a browser of this machine or network reaches it, too. A name that an attacker's DNS points
here comes as the Host, another page's call as its Origin, and a form, unlike JSON, is sent without
asking first.
"""

from __future__ import annotations

import ipaddress

from tokenmill.api.errors import VIDEOS_PATH, ApiError
from tokenmill.api.keys import Keys

# Of what pages elsewhere may call: never WORKERS_PATHS, which change the server.
CORS_PATHS = ("/v1/", "/tokenize", "/detokenize", "/health", "/ping", "/version")
WORKERS_PATHS = ("/workers", "/reset_prefix_cache")  # have guards of their own
JSON = "application/json"
FORM = "multipart/form-data"
MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
# Routes that take files, here or at the backends of a router.
FORM_PATHS = (VIDEOS_PATH, "/v1/audio/", "/v1/images/", "/v1/files")
READING = frozenset({"GET", "HEAD", "OPTIONS"})
_WANTED = frozenset(
    b"host origin sec-fetch-site content-type content-length transfer-encoding".split()
)


class SiteGuard:
    """Refuses calls that a page of another site may have sent."""

    def __init__(self, keys: Keys) -> None:
        config, self._keys = keys.config, keys
        self._names = frozenset(name.lower() for name in (config.host, *config.allowed_hosts))
        self._origins = frozenset(config.cors_origins)

    def check(self, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> None:
        given = {name: value.decode("latin-1") for name, value in headers if name in _WANTED}
        if not (self._keys.ring.is_needed or path.startswith(WORKERS_PATHS)):
            self._check_host(given.get(b"host"))
            if method not in READING:
                self._check_origin(path, given)
        if method == "POST":
            _check_kind(path, given)

    def check_page(self, headers: list[tuple[bytes, bytes]]) -> None:
        """ApiError for a call of any method that a page of another site may have sent."""
        given = {name: value.decode("latin-1") for name, value in headers if name in _WANTED}
        self._check_host(given.get(b"host"))
        self._check_origin("", given)

    def _check_host(self, host: str | None) -> None:
        """Refuse a name that is not ours; HTTP/1.0, which no browser speaks, may have none."""
        name = "" if host is None else _name_of(host)
        if host is None or _is_own(name) or not self._names.isdisjoint(("*", name)):
            return
        message = f"this server does not answer to the Host {host[:100]!r}: call it by localhost "
        message += f"or an address, or start it with --allowed-hosts {name[:100] or 'NAME'}"
        raise ApiError(403, message, code="unknown_host")

    def _check_origin(self, path: str, given: dict[bytes, str]) -> None:
        """Refuse the call of a page elsewhere, unless it is named by --cors-origin."""
        origin, host = given.get(b"origin"), given.get(b"host", "")
        if path.startswith(CORS_PATHS) and not self._origins.isdisjoint(("*", origin)):
            return
        if origin is None:
            is_foreign = given.get(b"sec-fetch-site", "none") not in ("none", "same-origin")
        else:
            is_foreign = origin.partition("://")[2].lower() != host.lower()
        if is_foreign:
            message = f"this server does not answer to web pages of the origin {origin or '?':.100}"
            message += "; name it by --cors-origin, or call from a page of this server"
            raise ApiError(403, message, code="foreign_origin")


def _check_kind(path: str, given: dict[bytes, str]) -> None:
    """415 for a body of a kind that browsers send to other sites without asking them."""
    if given.get(b"content-length", "0") == "0" and b"transfer-encoding" not in given:
        return
    kind = kind_of(given.get(b"content-type", ""))
    takes_form = path.startswith(FORM_PATHS)
    if kind == JSON or kind in MSGPACK or (takes_form and kind == FORM):
        return
    wanted = f"{JSON} or {FORM}" if takes_form else JSON
    shown = f"{kind[:60]!r} is not taken" if kind else "the header is missing"
    raise ApiError(415, f"Content-Type: {shown}; send {wanted}", code="unsupported_media_type")


def kind_of(content_type: str) -> str:
    """A media type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def _name_of(host: str) -> str:
    """A Host header without its port, the brackets of an address and the dot at its end."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_own(name: str) -> bool:
    """Loopback's names, and addresses: nobody's DNS decides where these lead."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

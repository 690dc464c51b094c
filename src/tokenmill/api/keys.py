"""Who calls: a key's account, the operator by the control token, or somebody on this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import ssl
from collections.abc import Awaitable, Callable, Iterator

from fastapi import Request

from tokenmill.api.call import record_of
from tokenmill.api.errors import ApiError
from tokenmill.core.config import ServerConfig
from tokenmill.core.keys.key_ring import KeyFileError, KeyRing, digest_of, make_ring
from tokenmill.core.keys.run_folder import TOKEN, key_salt, open_run_folder, write_private
from tokenmill.core.requests import Request as InferenceRequest
from tokenmill.core.types import TokenmillError

# A proxy on this machine makes everybody a local caller; it says so in one of these.
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
SECRETS = ("TOKENMILL_API_KEY", "TOKENMILL_CONTROL_TOKEN")

_log = logging.getLogger(__name__)
Guard = Callable[[Request], Awaitable[None]]  # FastAPI would call plain functions on a thread


class Keys:
    """The keys of a server, which may be replaced while it runs."""

    def __init__(self, config: ServerConfig, ring: KeyRing) -> None:
        self.config, self.ring = config, ring
        self.tls = _tls_context(config)

    @classmethod
    def of(cls, config: ServerConfig, token: str, salt: bytes) -> Keys:
        control = digest_of(salt, token)
        return cls(config, make_ring(config.api_keys, config.api_key_file, salt, control))

    def reload(self, ring: KeyRing | None = None) -> bool:
        """Read the files of keys, unless a ring is given, and of certificates again.

        False: one of them is wrong, and nothing has changed.
        """
        config, old = self.config, self.ring
        try:
            new = ring or make_ring(config.api_keys, config.api_key_file, old.salt, old.control)
            if self.tls is not None:
                _tls_context(config)  # it fails before the one in use is damaged
                _load_certificate(self.tls, config)
        except TokenmillError as error:
            _log.error(f"SIGHUP: keys and certificates stay as they were: {error}")
            return False
        self.ring, accounts = new, set(new.accounts.values())
        if ring is None:
            _log.info(f"SIGHUP: {len(new.accounts)} API keys of {len(accounts)} accounts are known")
        return True

    def account(self, request: Request) -> str:
        """Who pays for a call; 401 without a known key."""
        account = self.ring.account_of(_key_of(request))
        if account is None:
            raise wrong_key()
        if self.ring.is_needed and self.config.log_requests:
            record_of(request.scope).account = account
        return account

    def salted(self, requests: list[InferenceRequest], account: str) -> list[InferenceRequest]:
        """The requests of an account; only those of one account share cached prefixes."""
        if self.config.share_prefix_cache or not self.ring.is_needed:
            return requests
        return [r.with_task(cache_salt=f"{account}\0{r.task.cache_salt}") for r in requests]

    def is_operator(self, request: Request) -> bool:
        return self.ring.is_control(_key_of(request))


@contextlib.contextmanager
def open_keys(config: ServerConfig, port: int, salt: bytes = b"") -> Iterator[Keys]:
    """The keys of a server that listens at a port, while the block runs.

    Where no control token is given, one is made, and lies in the server's run folder.
    """
    token = config.control_token or secrets.token_hex(32)
    for name in SECRETS:  # children have no use for them
        os.environ.pop(name, None)
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(open_run_folder(config.host, port))
            salt = salt or key_salt()
            if config.control_token is None:
                write_private(folder / TOKEN, token)
        except (OSError, RuntimeError) as error:
            _log.warning(
                f"there can be no run folder ({error}): commands need --control-token, which the "
                "server has to be given, too, and keys without a name get another one at each start"
            )
        keys = Keys.of(config, token, salt or secrets.token_bytes(32))
        if not keys.ring.is_needed and not _is_loopback(config.host):
            _log.warning(
                f"--host {config.host} without API keys: whoever reaches port {port} may use the "
                "model; --api-key-file FILE asks for keys"
            )
        yield keys


def caller(keys: Keys) -> Guard:
    """A dependency that wants a known key, and notes who pays in request.state.account."""

    async def check(request: Request) -> None:
        request.state.account = keys.account(request)

    return check


def operator(keys: Keys) -> Guard:
    """A dependency that wants the control token: being on this machine is no right."""

    async def check(request: Request) -> None:
        if not keys.is_operator(request):
            raise wrong_token()

    return check


def wrong_key() -> ApiError:
    message = "missing or wrong API key; send the header 'Authorization: Bearer KEY' or "
    return ApiError(401, message + "'x-api-key: KEY'", code="invalid_api_key")


def wrong_token() -> ApiError:
    message = "missing or wrong control token; send it in the header 'Authorization: Bearer TOKEN':"
    message += " that of --control-token, or the one in the server's run folder"
    return ApiError(401, message, code="invalid_token")


def overseer(keys: Keys) -> Guard:
    """A dependency of figures over all keys: they are for the operator, or an only key."""

    async def check(request: Request) -> None:
        if keys.is_operator(request):
            return
        keys.account(request)
        if keys.ring.has_tenants:
            message = "these are figures of all keys; send the control token instead of a key"
            raise ApiError(403, message, code="not_operator")

    return check


def _tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        if config.tls_key is not None:
            raise KeyFileError("--tls-key needs --tls-cert")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, config)
    return context


def _load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    cert, key = config.tls_cert or "", config.tls_key
    try:
        context.load_cert_chain(cert, key, password=lambda: "-")  # nobody is asked for one
    except OSError as error:  # ssl's are OSErrors, too
        where = f"--tls-cert {cert}" + ("" if key is None else f" --tls-key {key}")
        reason = getattr(error, "reason", None) or error.strerror
        raise KeyFileError(
            f"{where}: must be PEM files of a certificate and its private key, without a "
            f"password ({reason})"
        ) from None


def _key_of(request: Request) -> str:
    """The key of a request, where OpenAI's clients or Anthropic's send it."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def is_local(request: Request) -> bool:
    """The caller is on this machine, and not by way of a proxy that says so."""
    if request.client is None or any(name in request.headers for name in PROXY_HEADERS):
        return False
    return _is_loopback(request.client.host)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback

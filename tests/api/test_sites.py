"""Which calls of web pages are taken, by servers without keys and with them."""

from __future__ import annotations

import pytest

from tokenmill.api.errors import ApiError
from tokenmill.api.keys import Keys
from tokenmill.api.sites import SiteGuard
from tokenmill.core.config import ServerConfig

CHAT, VIDEO = "/v1/chat/completions", "/v1/videos"
JSON = {"content-type": "application/json; charset=utf-8", "content-length": "2"}
FORM = JSON | {"content-type": "multipart/form-data; boundary=x"}
EVIL = {"origin": "https://evil.example"}
PAGE = {"origin": "https://chat.example"}


def refusal(config: ServerConfig, method: str, path: str, headers: dict[str, str]) -> str | None:
    """The code of the error that a call gets, if any."""
    given = {"host": "localhost:8000"} | headers
    raw = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    try:
        SiteGuard(Keys.of(config, "t", b"s")).check(method, path, raw)
    except ApiError as error:
        assert error.status == {"unsupported_media_type": 415}.get(error.code or "", 403)
        return error.code
    return None


@pytest.mark.parametrize(
    ("host", "code"),
    [
        *[(name, None) for name in ("localhost", "LOCALHOST:1", "a.localhost:80", "localhost.")],
        *[(name, None) for name in ("127.0.0.1:8000", "[::1]:8000", "192.0.2.7", "mill.internal")],
        *[(name, None) for name in ("Own.Name:8000", "own.name.")],
        *[(name, "unknown_host") for name in ("evil.example", "localhost.evil.example", "")],
        *[(name, "unknown_host") for name in ("127.0.0.1.evil.example", "[evil.example]:1", "1.2")],
        *[(name, "unknown_host") for name in ("x.mill.internal", "localhost@evil", "\xff")],
    ],
)
def test_hosts(host: str, code: str | None) -> None:
    config = ServerConfig(host="own.name", allowed_hosts=("Mill.internal",))
    for method, path in (("GET", "/v1/models"), ("GET", "/dashboard/data"), ("POST", CHAT)):
        assert refusal(config, method, path, {"host": host}) == code
    for open_to in (ServerConfig(api_keys=("k",)), ServerConfig(allowed_hosts=("*",))):
        assert refusal(open_to, "GET", "/v1/models", {"host": host}) is None


def test_the_workers_may_be_called_by_any_name() -> None:
    """Their routes want the control token, or look at Host and Origin themselves."""
    for method, path in (("GET", "/workers"), ("POST", "/workers/scale")):
        assert refusal(ServerConfig(), method, path, {"host": "head.cluster"} | EVIL) is None
    assert refusal(ServerConfig(), "GET", "/v1/models", {"host": "x.cluster"}) == "unknown_host"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, None),
        ({"origin": "http://localhost:8000"}, None),
        ({"sec-fetch-site": "same-origin"}, None),
        ({"host": "[::1]:1", "origin": "http://[::1]:1"}, None),
        (EVIL, "foreign_origin"),
        ({"origin": "http://localhost:3000"}, "foreign_origin"),
        ({"origin": "null"}, "foreign_origin"),
        ({"origin": ""}, "foreign_origin"),
        ({"sec-fetch-site": "cross-site"}, "foreign_origin"),
        ({"sec-fetch-site": "same-site"}, "foreign_origin"),
    ],
)
def test_origins(headers: dict[str, str], code: str | None) -> None:
    for kind, path in ((JSON, CHAT), (FORM, VIDEO), ({}, "/v1/responses/x/cancel")):
        assert refusal(ServerConfig(), "POST", path, kind | headers) == code
    assert refusal(ServerConfig(), "DELETE", "/v1/videos/x", headers) == code
    # The browser keeps answers from the page that asked, and a key is not sent by itself.
    assert refusal(ServerConfig(), "GET", "/v1/models", headers) is None
    assert refusal(ServerConfig(api_keys=("k",)), "POST", CHAT, JSON | headers) is None


def test_pages_that_cors_names_may_call_the_api_and_nothing_else() -> None:
    for origins in (("https://chat.example",), ("*",)):
        config = ServerConfig(cors_origins=origins)
        assert refusal(config, "POST", CHAT, JSON | PAGE) is None
        assert refusal(config, "POST", "/dashboard", JSON | PAGE) == "foreign_origin"
        assert refusal(config, "OPTIONS", CHAT, PAGE) is None
    assert refusal(config, "POST", CHAT, JSON | EVIL) is None
    one = ServerConfig(cors_origins=("https://chat.example",))
    assert refusal(one, "POST", CHAT, JSON | EVIL) == "foreign_origin"


@pytest.mark.parametrize("config", [ServerConfig(), ServerConfig(api_keys=("k",))], ids=str)
def test_bodies_have_a_kind_that_no_form_has(config: ServerConfig) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"):
        for length in ({"content-length": "2"}, {"transfer-encoding": "chunked"}):
            headers = length | ({"content-type": kind} if kind else {})
            for path in (CHAT, "/tokenize", VIDEO, "/workers/scale"):
                assert refusal(config, "POST", path, headers) == "unsupported_media_type"
    assert refusal(config, "POST", CHAT, FORM) == "unsupported_media_type"
    assert refusal(config, "POST", VIDEO, FORM) is None
    assert (
        refusal(config, "POST", "/v1/rank", JSON | {"content-type": "application/msgpack"}) is None
    )
    assert refusal(config, "POST", "/ping", {"content-length": "0"}) is None

"""What each route answers to whom: docs/security.md is fresh, and nobody gets what is another's."""

from __future__ import annotations

import asyncio

import isolation_matrix
import pytest
from isolation_matrix import CALLERS, PAGE, Outcome

from tokenmill.api.sites import WORKERS_PATHS

# What anybody may ask of a server with keys: that it is there, and pages without figures.
PUBLIC = {
    *("/", "/health", "/ping", "/version", "/docs", "/openapi.json"),
    *("/dashboard", "/dashboard/FILE"),
}
OPERATORS = {"/metrics", "/workers", "/workers/receipts", "/dashboard/data"}  # of several keys
KEYED, OPEN = ([caller.name for caller in CALLERS[keyed]] for keyed in (True, False))
Found = dict[tuple[str, bool], list[isolation_matrix.Row]]


@pytest.fixture(scope="module")
def found() -> Found:
    return asyncio.run(isolation_matrix.measure())


def rows(found: Found, keyed: bool) -> list[tuple[str, str, dict[str, Outcome]]]:
    """Server, route and outcomes by caller."""
    names = KEYED if keyed else OPEN
    return [
        (server, isolation_matrix.shown(route), dict(zip(names, outcomes, strict=True)))
        for (server, with_keys), table in found.items()
        for route, outcomes in table
        if with_keys == keyed
    ]


def test_the_page_is_fresh(found: Found) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == isolation_matrix.render(page, found), "run python scripts/isolation_matrix.py"


def test_without_a_key_nothing_but_public_pages_is_answered(found: Found) -> None:
    for server, route, by in rows(found, keyed=True):
        is_public = route.split()[1] in PUBLIC
        for caller in ("no key", "no key, by a proxy"):
            assert by[caller].status == (200 if is_public else 401), (server, route)


def test_no_key_gets_what_another_has_stored(found: Found) -> None:
    about = 0
    for server, route, by in rows(found, keyed=True):
        assert not any(outcome.tells for outcome in by.values()), (server, route)
        if "_id}" in route.replace("{model_id}", "") or "of A" in route:
            about += 1
            assert by["key A"].status in (200, 400), (server, route)
            token = 401 if server == "router" else 404  # a router passes no control token on
            assert (by["key B"].status, by["control token"].status) == (404, token), (server, route)
    assert about >= 15


def test_keys_change_nothing_of_the_server_and_see_no_figures_of_others(found: Found) -> None:
    for server, route, by in rows(found, keyed=True):
        method, path = route.replace(",", "").split()[:2]
        ours = [by[name].status for name in KEYED if name.startswith("key")]
        if method == "POST" and path.startswith(WORKERS_PATHS):
            assert set(ours) == {401} and by["control token"].status in (200, 400), (server, route)
        elif path in OPERATORS and (server, path) != ("video", "/dashboard/data"):
            assert set(ours) == {403} and by["control token"].status == 200, (server, route)
        else:
            assert not {401, 403} & set(ours), (server, route)


def test_pages_of_other_sites_get_no_server_without_keys(found: Found) -> None:
    for server, route, by in rows(found, keyed=False):
        method, path = route.replace(",", "").split()[:2]
        if path.startswith(WORKERS_PATHS):
            refused = {401} if method == "POST" else {403}
            names = ("foreign Host", "foreign Origin", "by a proxy")
            assert {by[name].status for name in names} == refused, (server, route)
            continue
        assert by["foreign Host"].status == 403, (server, route)
        assert by["foreign Origin"].status == (200 if method == "GET" else 403), (server, route)
        assert by["this machine"].status in (200, 400), (server, route)

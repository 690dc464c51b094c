"""How often a router sends a call: what kills backends reaches few, and a video begins once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from api.sim_server import GENEROUS_S, SimServer, wait_until
from proxy.route_server import MODEL, Behaviour, Handler, Scripted, ask, router_process, say
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig

QUICK = RouteConfig(health_interval_s=0.2, forward=("/begin",))
NUM_BACKENDS = 6
VIDEOS = ("/v1/videos", "/v1/videos/sync", "/v1/videos/generations", "/begin")


@contextlib.contextmanager
def routed(num_backends: int, route: RouteConfig) -> Iterator[tuple[SimServer, list[Scripted]]]:
    """A router by turns."""
    backends = [Scripted(MODEL) for _ in range(num_backends)]
    urls = tuple(backend.url for backend in backends)
    try:
        with router_process(urls, ServerConfig(), RouterConfig("round-robin"), route) as router:
            yield router, backends
    finally:
        for backend in backends:
            backend.stop()


@pytest.fixture(scope="module")
def group() -> Iterator[tuple[SimServer, list[Scripted]]]:
    with routed(NUM_BACKENDS, QUICK) as running:
        yield running


def all_do(backends: list[Scripted], behaviour: Behaviour) -> None:
    """Have all backends do the same, and forget their calls."""
    for backend in backends:
        backend.behaviour = behaviour
        backend.calls.clear()


def num_calls(backends: list[Scripted]) -> int:
    return sum(len(backend.calls) for backend in backends)


def check_limit(router: SimServer, backends: list[Scripted], limit: int) -> None:
    all_do(backends, Handler.cut)
    answer = ask(router)
    assert (answer.status, answer.error["code"]) == (502, "backend_lost")
    assert f"{limit + 1} backends have failed with it" in answer.error["message"]
    assert num_calls(backends) == limit + 1
    all_do(backends, say(500, b'{"error": "theirs"}'))
    assert (ask(router).status, num_calls(backends)) == (500, limit + 1)
    all_do(backends, say(503, b"{}"))
    assert (ask(router).status, num_calls(backends)) == (503, len(backends)), "busy: none began"


def test_a_call_that_kills_backends_reaches_few_of_them(
    group: tuple[SimServer, list[Scripted]],
) -> None:
    check_limit(*group, limit=2)
    with routed(3, replace(QUICK, max_migrations=0)) as (router, backends):
        check_limit(router, backends, limit=0)


def test_suspects_run_one_at_a_time(group: tuple[SimServer, list[Scripted]]) -> None:
    router, backends = group
    lock, tries, alone, most = threading.Lock(), Counter[bytes](), Counter[str](), 0

    def behave(handler: Handler) -> None:
        nonlocal most
        with lock:
            tries[handler.body] += 1
            is_suspect = tries[handler.body] == 3
            alone["now"] += is_suspect
            most = max(most, alone["now"])
        time.sleep(0.15 if is_suspect else 0.0)
        with lock:
            alone["now"] -= is_suspect
        if b"innocent" in handler.body and is_suspect:
            handler.reply(200, b'{"ok": 1}')
        else:
            handler.cut()

    all_do(backends, behave)
    with ThreadPoolExecutor(4) as threads:
        names = ["a", "b", "innocent", "c"]
        answers = list(threads.map(lambda name: ask(router, user=name), names))
        assert [answer.status for answer in answers] == [502, 502, 200, 502]
        assert list(tries.values()) == [3] * 4 and most == 1


def test_a_suspect_that_waits_ends_with_its_client(
    group: tuple[SimServer, list[Scripted]],
) -> None:
    router, backends = group
    tries, over = Counter[bytes](), threading.Event()

    def behave(handler: Handler) -> None:
        tries[handler.body] += 1
        if tries[handler.body] == 3:
            over.wait(GENEROUS_S)
        handler.cut()

    all_do(backends, behave)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(ask, router, user="first")
        wait_until(lambda: num_calls(backends) == 3, "the first suspect is tried alone")
        with router.open_call("/v1/chat/completions", {"model": MODEL, "messages": []}):
            wait_until(lambda: num_calls(backends) == 5, "the second one waits")
            assert len(tries) == 2
        wait_until(lambda: aborted(router) == 1, "the second one has ended")
        over.set()
        assert first.result().status == 502 and num_calls(backends) == 5


def aborted(router: SimServer) -> float:
    return router.metric("request_failure_total", 'finished_reason="abort"')


@pytest.mark.parametrize("path", VIDEOS)
def test_what_begins_something_is_never_sent_twice(
    group: tuple[SimServer, list[Scripted]], path: str
) -> None:
    router, backends = group
    all_do(backends, Handler.cut)
    answer = router.call("POST", path, {"model": MODEL})
    assert (answer.status, answer.error["code"]) == (502, "backend_lost")
    assert "is not sent again" in answer.error["message"] and num_calls(backends) == 1
    for status in (500, 404):
        all_do(backends, say(status, b"{}"))
        assert router.call("POST", path, {"item_reference": 1}).status == status
        assert num_calls(backends) == 1

    def busy_once(handler: Handler) -> None:
        say(429 if num_calls(backends) == 1 else 200, b"{}")(handler)

    all_do(backends, busy_once)
    assert router.call("POST", path, {}).status == 200
    assert num_calls(backends) == 2, "who is busy has begun nothing"


def test_a_connection_that_may_be_stale_is_not_used_for_a_video(
    group: tuple[SimServer, list[Scripted]],
) -> None:
    router, backends = group
    addresses: list[str] = []

    def behave(handler: Handler) -> None:
        addresses.append(str(handler.client_address))
        handler.reply(200, b"{}")

    all_do(backends, behave)
    for _ in range(2 * NUM_BACKENDS):
        assert ask(router).status == 200
    assert len(set(addresses)) < len(addresses), "connections are kept"
    known = set(addresses)
    for path in VIDEOS:
        assert router.call("POST", path, {"model": MODEL}).status == 200
        assert addresses[-1] not in known

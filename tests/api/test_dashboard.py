"""The live page: its routes, and in headless Chromium over a simulated pool of two workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page, Route

from api.sim import BLOCK_SIZE, MAX_MODEL_LEN, MODEL
from api.sim_server import GENEROUS_S, SimServer, sim_server, wait_until
from pages import DARK, LIGHT, Opened, open_browser
from tokenmill.api.telemetry import prometheus as metrics
from tokenmill.api.telemetry.dashboard import FILES, HEADERS
from tokenmill.api.telemetry.dashboard_view import NUM_SAMPLES, DashboardView, History
from tokenmill.api.telemetry.prometheus import Recent
from tokenmill.core.config import PoolConfig, ServerConfig
from tokenmill.core.images import VisionConfig
from vision.pictures import file_of, photo

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>alert(1)</script>"
PREFIX = "a prompt that begins alike, " * 8
KEY = "secret-key"
STEP_MS = 10.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    pool = PoolConfig(workers=2, heartbeat_s=0.2, backoff_s=0.01)
    with sim_server(step_ms=STEP_MS, pool=pool) as running:
        yield running


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[SimServer]:
    with sim_server(ServerConfig(port=0, api_keys=("other", KEY))) as running:
        yield running


def opened(browser: Browser, server: SimServer) -> Opened:
    return Opened(browser, f"{server.url}/dashboard", 1280)


def text(page: Page, selector: str) -> str:
    return page.locator(selector).inner_text().replace("\xa0", " ")


def tile(page: Page, name: str) -> tuple[str, str]:
    """What a tile shows: the value and the line below it."""
    _, value, below = text(page, f".tile[data-key='{name}']").split("\n")
    return value.strip(), below


def wait(page: Page, condition: str) -> None:
    """Poll from outside: the page's policy forbids eval, which wait_for_function needs."""
    deadline_s = monotonic() + GENEROUS_S
    while not page.evaluate(condition):
        assert monotonic() < deadline_s, condition
        page.wait_for_timeout(20)


def data_of(server: SimServer, key: str = "") -> Any:
    return server.call("GET", "/dashboard/data", headers={"Authorization": f"Bearer {key}"})


# Over plain HTTP.


@pytest.mark.parametrize(("path", "kind"), [("/dashboard", "text/html"), *FILES.items()])
def test_the_files_of_the_page(server: SimServer, path: str, kind: str | tuple[str, str]) -> None:
    answer = server.call("GET", path)
    expected = kind if isinstance(kind, str) else kind[1]
    assert answer.status == 200
    assert answer.headers["content-type"] == f"{expected}; charset=utf-8"
    assert answer.headers.items() >= HEADERS.items()
    policy = dict(part.split(" ", 1) for part in HEADERS["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert b"innerHTML" not in answer.body and b"{needs_key}" not in answer.body
    assert server.call("POST", path).status == 405


def test_the_data_tell_of_requests(server: SimServer) -> None:
    before = data_of(server).json
    for turn in range(3):
        assert server.chat(f"{PREFIX} {turn} count: 8").status == 200
    answer = data_of(server)
    data = answer.json
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    assert (data["model"], data["max_model_len"]) == (MODEL, MAX_MODEL_LEN)
    assert data["block_size"] == BLOCK_SIZE
    assert data["output_tokens"] - before["output_tokens"] == 3 * 9  # with the end of sequence
    assert data["finished"]["stop"] - before["finished"].get("stop", 0) == 3
    assert 0 < data["tpot_ms"]["p50"] <= data["tpot_ms"]["p99"]
    assert 0 < data["ttft_ms"]["p50"] <= data["ttft_ms"]["p99"] and data["uptime_s"] > 0
    assert [w["name"] for w in data["pool"]["workers"]] == ["w0", "w1"]
    assert data["pool"]["decisions"][-1]["terms"].keys() == {"w0", "w1"}
    assert data["engine"]["num_kv_blocks"] == sum(w["kv_blocks"] for w in data["pool"]["workers"])


def test_the_data_want_a_key_and_the_page_does_not(keyed_server: SimServer) -> None:
    page = keyed_server.call("GET", "/dashboard")
    assert page.status == 200 and b'name="needs-key" content="yes"' in page.body
    for path in FILES:
        assert keyed_server.call("GET", path).status == 200
    for key in ("", "wrong"):
        refused = data_of(keyed_server, key)
        assert refused.status == 401 and refused.error["code"] == "invalid_api_key"
    assert data_of(keyed_server, KEY).error["code"] == "not_operator"  # of two keys
    assert data_of(keyed_server, keyed_server.token).json["model"] == MODEL


def test_recent_values_end_with_their_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now_s)
    recent = Recent(window_s=60.0)
    assert recent.summary() == {}
    for value in (1.0, 3.0):
        recent.add(value)
    now_s = 50.0
    recent.add(8.0)
    assert recent.summary() | {"mean": 4.0, "p50": 3.0, "max": 8.0} == recent.summary()
    now_s = 61.0
    assert recent.summary()["p50"] == recent.summary()["mean"] == 8.0
    now_s = 111.0
    assert recent.summary() == {}
    for value in range(metrics.NUM_RECENT + 5):
        recent.add(float(value))
    assert recent.summary()["mean"] == 5 + (metrics.NUM_RECENT - 1) / 2


def test_the_server_keeps_the_history(server: SimServer) -> None:
    wait_until(lambda: len(data_of(server).json["history"]) > 2, "three samples")
    whole = data_of(server).json["history"]
    times = [sample["time_s"] for sample in whole]
    assert times == sorted(set(times)) and whole[-1]["workers"].keys() == {"w0", "w1"}
    later = server.call("GET", f"/dashboard/data?since={times[1]}").json["history"]
    assert [sample["time_s"] for sample in later][: len(times) - 2] == times[2:]
    refused = server.call("GET", "/dashboard/data?since=yesterday")
    assert refused.status == 400 and "since: must be a Unix time" in refused.error["message"]


def test_the_history_is_bounded_and_notes_what_changed(server: SimServer) -> None:
    empty: dict[str, Any] = {"history": [], "events": [], "rejected": {}}
    view = msgspec.convert(data_of(server).json | empty, DashboardView)
    pool, workers = view.pool, view.pool.workers
    failed = msgspec.structs.replace(workers[0], failures=9, last_failure=HOSTILE, restarts=9)
    later = msgspec.structs.replace(pool, workers=[failed], migrations=pool.migrations + 1)
    views = [view] * (NUM_SAMPLES + 5)
    views += [
        msgspec.structs.replace(
            view,
            time_s=view.time_s + 2,
            output_tokens=view.output_tokens + 30,
            rejected={"max_concurrency": 2},
            pool=later,
        )
    ]
    history = History(iter(views).__next__)
    for _ in views:
        history.sample()
    samples = history.since(0.0)
    assert len(samples) == NUM_SAMPLES and history.since(view.time_s) == samples[-1:]
    assert (samples[-1].output_tok_s, samples[-1].rejected_per_s) == (15.0, 1.0)
    assert [event.text for event in history.events] == [
        f"w0 failed: {HOSTILE}",
        "w0 was restarted",
        "w1 left the pool",
        "1 request went on at another worker",
        "the first call was refused: max_concurrency",
    ]


def test_refused_calls_are_in_the_data() -> None:
    with sim_server(ServerConfig(port=0, max_concurrency=1), step_ms=STEP_MS) as server:
        with contextlib.closing(server.open_stream("count: 400")) as running:
            running.recv(1)
            assert server.chat("count: 1").status == 429
        data = data_of(server).json
        assert data["rejected"] == {"max_concurrency": 1}
        wait_until(lambda: bool(data_of(server).json["events"]), "a sample later")
        (event,) = data_of(server).json["events"]
        assert event["text"] == "the first call was refused: max_concurrency"


# In a browser.


def test_the_page_stands_alone_and_fits(browser: Browser, server: SimServer) -> None:
    server.chat(f"{PREFIX} count: 2")
    with opened(browser, server) as live:
        page = live.page
        page.locator("details.decision").first.locator("summary").click()
        assert page.locator("details[open] tr.chosen").count() == 1
        for width in (390, 900, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") == width
        for scheme, color in (("light", LIGHT), ("dark", DARK)):
            page.emulate_media(color_scheme=scheme)
            back = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert back == color
        assert page.title() == f"{MODEL} · tokenmill" and text(page, "#live") == "live"
        assert page.locator(".chart").count() == 8 and page.locator(".worker").count() == 2
        assert page.locator("#transfers").is_hidden()
        assert live.said == []
        assert all(url.startswith((server.url, "data:,")) for url in live.asked)


def test_figures_follow_the_requests(browser: Browser, server: SimServer) -> None:
    with opened(browser, server) as live:
        page = live.page
        wait(page, "document.querySelectorAll('.tile').length === 8")
        tokens, routed = tile(page, "Output")[1], text(page, "#workers")
        for turn in range(4):
            server.chat(f"{PREFIX} {turn} count: 30")
        newest = data_of(server).json["pool"]["decisions"][-1]
        page.locator(f"details[data-key^='{newest['request_id']}']").wait_for()
        wait(page, "document.querySelector('.tile .value').textContent !== '0'")
        assert tile(page, "Output")[1] != tokens and text(page, "#workers") != routed
        assert tile(page, "TTFT, median")[0].endswith(" ms")
        assert float(tile(page, "TPOT, median")[0].removesuffix(" ms")) > 0
        first = page.locator("details.decision").first
        assert f"{newest['prompt_tokens']} tokens" in first.inner_text()
        assert newest["worker"] in first.inner_text()
        assert "M" in (page.locator(".chart path.line").first.get_attribute("d") or "")
        plot = page.locator(".plot").first
        plot.focus()
        page.keyboard.press("End")
        assert "tok/s" in plot.locator(".tip").inner_text() and plot.locator(".tip").is_visible()
        page.keyboard.press("Escape")
        assert not plot.locator(".tip").is_visible() and live.said == []


def test_the_chat_box_streams(browser: Browser, server: SimServer) -> None:
    with opened(browser, server) as live:
        page = live.page
        page.fill("#say", f"hi {HOSTILE} count: 150")
        page.keyboard.press("Enter")
        answer = page.locator(".said.model p").last
        wait(page, "document.querySelector('.said.model p')?.textContent")
        early, busy = answer.inner_text(), page.locator("#talk").get_attribute("aria-busy")
        page.locator(".said.model small").wait_for()
        whole = answer.inner_text()
        assert busy == "true" and whole.startswith(early) and len(early) < len(whole)
        assert text(page, ".said.model small").startswith("151 tokens · first after ")
        assert HOSTILE in text(page, ".said.user p") and page.locator("img").count() == 0
        page.click("#chat-clear")
        page.fill("#say", "count: 400")
        page.click("#chat-send")
        page.click("#chat-stop")
        page.get_by_text("stopped").wait_for()
        page.fill("#max-tokens", "100000")
        page.fill("#say", "too much")
        page.click("#chat-send")
        page.locator(".said small.wrong").wait_for()
        assert "max_tokens" in text(page, ".said small.wrong")
        page.click("#chat-clear")
        assert page.locator(".said").count() == 0
        assert all("400" in line for line in live.said) and len(live.said) == 1


def test_the_chat_box_takes_an_image(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(file_of(photo(128, 96), "PNG"))
    with sim_server(vision=VisionConfig()) as server, opened(browser, server) as live:
        page = live.page
        page.locator("#picture").wait_for()
        page.set_input_files("#picture", path)
        for index, words in enumerate(("say: a cat", "say: a dog")):
            page.fill("#say", words)
            page.click("#chat-send")
            page.locator(".said.model small", has_text="12 image tokens").nth(index).wait_for()
        assert [p.inner_text() for p in page.locator(".said.model p").all()] == ["a cat", "a dog"]
        assert text(page, ".said.user small") == "cat.png" and live.said == []


def test_a_killed_worker_is_seen(browser: Browser, server: SimServer) -> None:
    with opened(browser, server) as live:
        page = live.page
        wait(page, "document.querySelectorAll('.worker').length === 2")
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        page.locator("#events li.bad").first.wait_for()
        assert "failed: the worker process exited" in text(page, "#events")
        page.locator("#events li.good").first.wait_for(timeout=20_000)
        assert "was restarted" in text(page, "#events")
        assert "Last failure: the worker process exited" in text(page, "#workers")
        assert text(page, "#counts div[data-key='workers restarted'] dd") == "1"
        assert live.said == []


def altered(server: SimServer, alter: Callable[[Any], None]) -> Callable[[Route], None]:
    """Answers for the page: the server's data, changed."""

    def fulfill(route: Route) -> None:
        data = data_of(server).json
        alter(data)
        route.fulfill(body=json.dumps(data), content_type="application/json")

    return fulfill


def test_texts_stay_texts_and_transfers_are_shown(browser: Browser, server: SimServer) -> None:
    def alter(data: Any) -> None:
        data["model"] = data["pool"]["workers"][0]["last_failure"] = HOSTILE
        data["pool"]["workers"][0]["role"] = "prefill"
        data["pool"]["workers"][1]["state"] = "draining"
        data["engine"] |= {"num_kv_blocks_received": 1234, "num_leases_expired": 2}

    with opened(browser, server) as live:
        page = live.page
        page.route("**/dashboard/data*", altered(server, alter))
        page.locator("#transfers").wait_for()
        assert text(page, "#model") == HOSTILE and HOSTILE in text(page, "#workers")
        assert page.locator(".role").all_inner_texts() == ["prefill", "prefill + decode"]
        assert text(page, "#live") == "1 of 2 ready"
        assert "1234" in text(page, "#transfers")
        assert page.locator("img").count() == 0 and page.locator("script").count() == 1
        assert live.said == []
        with pytest.raises(Exception, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<p>'")


def test_times_terms_and_refusals_have_their_units(browser: Browser, server: SimServer) -> None:
    terms = {"w0": {"wait_ms": 10700.0, "cost_ms": 10700.0}, "w1": {"wait_ms": 2.5, "cost_ms": 2.5}}
    decision = {"request_id": HOSTILE, "time_s": 1.0, "worker": "w1", "terms": terms}
    decision |= {"prompt_tokens": 7, "cached_tokens": 0, "resumed_tokens": 0, "note": HOSTILE}

    def alter(data: Any) -> None:
        data["ttft_ms"] = {"p50": 10700.0, "p90": 999.4, "p99": 3.6e6}
        data["rejected"] = {"max_concurrency": 3, HOSTILE: 2}
        data["pool"]["decisions"] = [decision | {"role": "both"}]
        data["events"] = [{"number": 999, "time_s": 1.0, "tone": "bad", "text": HOSTILE}]

    with opened(browser, server) as live:
        page = live.page
        page.route("**/dashboard/data*", altered(server, alter))
        page.locator("#counts div[data-key='refused: max_concurrency']").wait_for()
        value, below = tile(page, "TTFT, median")
        assert value == "10.7 s" and below.startswith("p90 999 ms · p99 60 min")
        assert tile(page, "Refused")[0] == "5" and HOSTILE in text(page, "#counts")
        page.locator("details.decision summary").click()
        shown = text(page, "details.decision")
        assert "cost 2.50 ms against 10.7 s at w0: 10.7 s less wait" in shown
        heads = page.locator("details.decision th").all_inner_texts()
        assert heads == ["worker", "wait", "cost"] and HOSTILE in shown
        assert HOSTILE in text(page, "#events") and page.locator("img").count() == 0
        assert live.said == []


def test_figures_without_a_connection_say_so_and_come_back(
    browser: Browser, server: SimServer
) -> None:
    wait_until(lambda: len(data_of(server).json["history"]) > 2, "three samples")
    with opened(browser, server) as live:
        page = live.page
        page.locator("#pool").wait_for()
        points = "document.querySelector('.chart path.line').getAttribute('d').split('L').length"
        assert page.evaluate(points) > 1, "the history of before the page"
        assert page.locator("#lost").is_hidden()
        page.route("**/dashboard/data*", lambda route: route.abort())
        page.locator("#lost").wait_for()
        assert "No figures since" in text(page, "#lost") and text(page, "#live") == "no connection"
        assert page.evaluate("getComputedStyle(document.querySelector('.figures')).opacity") < "1"
        page.unroute("**/dashboard/data*")
        page.locator("#lost").wait_for(state="hidden")
        assert text(page, "#live") == "live"
        assert page.evaluate("getComputedStyle(document.querySelector('.figures')).opacity") == "1"


def test_prefill_and_decode_workers_show_their_decisions(browser: Browser) -> None:
    pool = PoolConfig(prefill=1, decode=1, remote_prefill_tokens=32, heartbeat_s=0.2)
    with sim_server(pool=pool) as server, opened(browser, server) as live:
        page = live.page
        page.get_by_text("no request has come yet").wait_for()
        assert server.chat(f"{PREFIX} count: 4").status == 200
        assert server.chat("count: 4").status == 200
        wait(page, "document.querySelectorAll('details.decision').length === 3")
        short, prefill, decode = page.locator("details.decision").all_inner_texts()
        assert "computes the prompt, too" in short and "the only decode worker" in short
        assert "p0" in prefill and "hands over to d0 · the only prefill worker" in prefill
        assert "d0" in decode and "p0 computes the prompt" in decode
        assert text(page, "#transfers div[data-key='prompts handed over'] dd") == "1"
        wait(page, "!['0', '–'].includes(document.querySelector('.worker .value').textContent)")
        assert "prompt tok/s" in text(page, ".worker[data-key=p0] .rate")
        assert live.said == []


def test_the_page_asks_for_the_key(browser: Browser, keyed_server: SimServer) -> None:
    with opened(browser, keyed_server) as live:
        page = live.page
        assert page.locator("#key-form").is_visible() and page.locator("#pool").is_hidden()
        assert live.said == [] and not any("data" in u for u in live.asked if u != "data:,")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.get_by_text("does not know this key").wait_for()
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.get_by_text("figures of all keys").wait_for()
        page.fill("#key", keyed_server.token)
        page.keyboard.press("Enter")
        page.locator("#pool").wait_for()
        assert page.locator("#key-form").is_hidden()
        page.fill("#say", "say: with a key")
        page.click("#chat-send")
        page.locator(".said.model small").wait_for()
        assert text(page, ".said.model p") == "with a key"
        assert "nothing to choose" in text(page, "#decisions-hint")
        kept = "[localStorage.length, sessionStorage.length, document.cookie, key.value]"
        assert page.evaluate(kept) == [0, 0, "", ""]
        assert [said for said in live.said if "401" not in said and "403" not in said] == []
        assert len(live.said) == 2

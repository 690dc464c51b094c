"""The live page of a video server, in headless Chromium."""

from __future__ import annotations

import asyncio
from pathlib import Path

from playwright.sync_api import expect

from api.video_app import MODEL, VideoApp, in_loop, video_app
from pages import Opened, open_browser
from tokenmill.api.telemetry.dashboard import FILES, HEADERS
from tokenmill.core.config import ServerConfig
from tokenmill.video.video_files import png_file

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
KEY = "secret"
LATENTS, FRAME = png_file(2, 1, b"\0" * 6), png_file(4, 2, b"\0" * 24)


def look(url: str, running: str, done: str) -> None:
    """All that the page shows of two jobs; the running one is deleted."""
    with open_browser() as browser, Opened(browser, f"{url}/dashboard", 1280) as opened:
        page = opened.page
        page.fill("#key", "wrong")
        page.click("#key-form button")
        expect(page.locator("#key-wrong")).to_have_text("The server does not know this key.")
        page.fill("#key", KEY)
        page.click("#key-form button")
        expect(page.locator("#model")).to_have_text(MODEL)
        first, second = (page.locator(f"[data-key={name}]") for name in (running, done))
        expect(first.locator(".pill")).to_have_text("in progress")
        expect(first.locator(".prompt")).to_have_text(HOSTILE)
        expect(first.locator(".steps")).to_contain_text("step 2 of 4")
        expect(first.locator(".of")).to_have_text("latents, three channels as colours")
        expect(second.locator(".of")).to_have_text("middle frame")
        for job, width in ((first, 2), (second, 4)):
            expect(job.locator("img")).to_have_js_property("naturalWidth", width)
        expect(first.locator("meter")).to_have_js_property("value", 40)
        expect(page.locator("#tiles")).to_contain_text("1 step since the start")
        page.fill("#prompt", "a fox")
        page.fill("#size", "33x16")
        page.click("#make button")
        expect(page.locator("#make-wrong")).to_contain_text("multiples of 16")
        first.get_by_role("button", name="Delete").click()
        expect(first).to_have_count(0)
        # The browser itself says so of answers that are errors; the page says nothing.
        own = [text for text in opened.said if not text.startswith("Failed to load resource")]
        assert own == [] and page.title() == f"{MODEL} · tokenmill"
        assert all(asked.startswith((url, "data:")) for asked in opened.asked)


async def prepared(app: VideoApp) -> tuple[str, str]:
    app.pool.picture = FRAME
    done, running = await app.create(KEY), await app.create(KEY, prompt=HOSTILE)
    await app.finish(done)
    await app.until(lambda: running in app.pool.open)
    app.pool.step(running, 0.4, LATENTS)
    return running, done


@in_loop
async def test_the_page_shows_jobs_with_their_progress_and_pictures(tmp_path: Path) -> None:
    async with video_app(tmp_path, ServerConfig(port=0, api_keys=(KEY, "other"))) as app:
        running, done = await prepared(app)
        await asyncio.to_thread(look, app.url, running, done)
        assert app.pool.aborted == [running]
        other = (await app.call("GET", "/dashboard/data", key="other")).json
        assert (other["jobs"], other["counts"]["completed"]) == ([], 1)
        for path in ("/dashboard", *FILES):
            answer = await app.call("GET", path)
            assert answer.status == 200 and HEADERS.items() <= answer.headers.items()

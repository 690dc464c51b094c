"""Pages in headless Chromium, and all that they said and asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from browser import FLAGS, MISSING, find_browser

WAIT_MS = 60_000  # at most, for what takes milliseconds on an idle machine
LIGHT, DARK = "rgb(244, 246, 248)", "rgb(14, 18, 22)"


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    path = find_browser()
    assert path is not None, MISSING
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield running
        running.close()


class Opened:
    """A page, and all that it said and asked for."""

    def __init__(self, browser: Browser, url: str, width: int, scheme: Any = "light") -> None:
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page.set_default_timeout(WAIT_MS)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.page.close()

"""The browser of the report page's tests: found, or installed by `python tests/browser.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
APT = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
MISSING = "no Chromium: install chromium or google-chrome, or run `playwright install chromium`"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def _candidates() -> Iterator[str]:
    yield from (path for name in NAMES if (path := shutil.which(name)))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    if Path(path).is_file():
        yield path


def find_browser() -> str | None:
    """A browser that starts, or None."""
    return next((path for path in _candidates() if _runs([path, "--version"])), None)


def _runs(command: list[str]) -> bool:
    quiet = subprocess.DEVNULL
    try:
        return not subprocess.run(command, stdout=quiet, stderr=quiet, check=False).returncode
    except OSError:
        return False


def install() -> str | None:
    """Playwright's own, else Debian's."""
    print("Installing Chromium for the tests of the report page", flush=True)
    _runs([sys.executable, "-m", "playwright", "install", "chromium"])
    if (found := find_browser()) is not None:
        return found
    if os.geteuid() == 0 and shutil.which("apt-get") and not _runs(APT):
        _runs(["apt-get", "update"])
        _runs(APT)
    return find_browser()


if __name__ == "__main__" and not (find_browser() or install()):
    sys.exit(MISSING)

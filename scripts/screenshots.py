"""The pictures of the pages, in light colours: a dashboard under load, and the report of a sweep.

    python scripts/screenshots.py        # writes dashboard.png and report.png of docs/images

The dashboard is that of the tests' simulated server (two workers, the real router and schedulers,
steps of 10 ms) under `tokenmill bench endpoint`; the report is that of the tests' sample run.
Chromium is found as by the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from playwright.sync_api import Browser, Page  # noqa: E402

from api.sim_server import SimServer, sim_server  # noqa: E402
from bench.sample_runs import FACTS, endpoint_run  # noqa: E402
from pages import Opened, open_browser  # noqa: E402
from tokenmill.bench.client.summary import Price  # noqa: E402
from tokenmill.bench.report.endpoint_report import write_result  # noqa: E402
from tokenmill.core.config import PoolConfig, SchedulerConfig  # noqa: E402
from tokenmill.core.metrics import Slo  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT = 1280, 1060
STEP_MS = 10.0
LOAD_S, SHOWN_AFTER_S = 34, 24
LOAD = ("--concurrency", "24", "--duration", str(LOAD_S), "--output-len", "96", "--no-ignore-eos")
QUESTION = "Tell me a sentence that has all letters."


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    pool = PoolConfig(workers=2)
    limits = SchedulerConfig(max_model_len=2048, max_num_seqs=64)
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        with sim_server(None, limits, step_ms=STEP_MS, pool=pool) as server:
            _dashboard(server, browser, Path(folder) / "prompts.jsonl")
        report, records = endpoint_run(
            (1, 4, 16, 64), 400, slo=Slo(ttft_ms=250, tpot_ms=25), price=Price(8, 3.0)
        )
        write_result(Path(folder), report, records, FACTS)
        with Opened(browser, (Path(folder) / "report.html").as_uri(), WIDTH, "light") as opened:
            _shoot(opened.page, "report.png")


def _dashboard(server: SimServer, browser: Browser, prompts: Path) -> None:
    """The page after some seconds of load, with a question in its chat."""
    prompts.write_text("".join(_prompts()), encoding="utf-8")
    command = [sys.executable, "-m", "tokenmill", "bench", "endpoint", "--url", f"{server.url}/v1"]
    load = subprocess.Popen([*command, *LOAD, "--prompts", str(prompts)], stdout=subprocess.DEVNULL)
    time.sleep(SHOWN_AFTER_S)
    with Opened(browser, f"{server.url}/dashboard", WIDTH, "light") as opened:
        opened.page.fill("#say", QUESTION)
        opened.page.click("#chat-send")
        opened.page.wait_for_timeout(3_000)
        _shoot(opened.page, "dashboard.png")
    if load.wait() != 0:
        sys.exit("the load ended with an error")


def _prompts() -> Iterator[str]:
    """Questions about six texts; the simulated model answers `count: N` with N tokens."""
    for index in range(2000):
        text = f"Text {index % 6}: " + "the sea is wide and the wind is strong. " * 4
        yield json.dumps({"prompt": f"{text} Question {index}. count: {40 + index % 50}"}) + "\n"


def _shoot(page: Page, name: str) -> None:
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    page.wait_for_timeout(500)
    page.screenshot(path=IMAGES / name)
    print(f"{IMAGES / name}: {(IMAGES / name).stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()

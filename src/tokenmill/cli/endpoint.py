"""tokenmill bench endpoint."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.bench.workload import BenchError
from tokenmill.cli import console
from tokenmill.cli.load import fresh, make_dataset, make_loads, make_target, token_counter
from tokenmill.cli.progress import Goal, watching
from tokenmill.cli.saturation import (
    check_saturation,
    note_client,
    print_saturation,
    search_saturation,
)
from tokenmill.core.config import EndpointConfig
from tokenmill.settings import (
    ENDPOINT_DATA,
    ENDPOINT_LOAD,
    ENDPOINT_REPORT,
    ENDPOINT_REQUESTS,
    SETTINGS,
    Setting,
    Settings,
    SettingsError,
)

if TYPE_CHECKING:
    from tokenmill.bench.datasets import Dataset
    from tokenmill.bench.endpoint import Run
    from tokenmill.bench.load import Load

Report = dict[str, Any]


def here(key: str, help: str) -> Setting:
    """A setting that other commands have too, in the words of this one and without a default."""
    return replace(SETTINGS[key], help=help, owner=None, default=None)


PANELS = {
    "Endpoint": (
        here("url", "Base URL, such as http://127.0.0.1:8000/v1."),
        here("model", "Name that the server knows; the first one that it lists."),
        here("api-key", "Key to send."),
        *ENDPOINT_REQUESTS,
        here("ignore-eos", "Ask for answers of full length; on by default, not all servers know."),
        here("temperature", "Sent where given."),
    ),
    "Load": ENDPOINT_LOAD,
    "Data": (
        here("lengths", "CSV of lengths, a name of this package, or uniform:100-1024."),
        here("input-len", "Prompt tokens (128), about: a token is a short word."),
        here("output-len", "Output tokens (64, or what the data say)."),
        *ENDPOINT_DATA,
        here("bench-seed", "Seed of arrivals and prompts."),
    ),
    "Report": (*ENDPOINT_REPORT, SETTINGS["json-only"]),
}
CLASHES = (
    ("rate", "concurrency"),
    ("rate", "trace"),
    ("prompts", "trace"),
    *((one, other) for one in ("prompts", "trace") for other in ("lengths", "input-len")),
    *((one, other) for one in ("prompts", "trace") for other in ("turns", "shared-prefix")),
)


def endpoint(settings: Settings) -> None:
    """Latency, throughput and price of an OpenAI-compatible server.

    Requests are stamped at the socket; token counts come from the server's
    usage and are checked. Every report says what the client itself could do,
    and warns where the client was the limit. Ctrl-C reports what has finished.

    tokenmill bench endpoint --url http://127.0.0.1:8000/v1 --concurrency 1,4,16
    tokenmill bench endpoint --url URL --rate 4 --duration 60 --goodput ttft:500,tpot:50
    tokenmill bench endpoint --url URL --saturate --goodput ttft:500,tpot:50
    tokenmill bench endpoint --url URL --trace mooncake.jsonl --output-dir results
    tokenmill bench endpoint --url URL --gpus 8 --price-per-gpu-hour 3
    """
    config = settings.build(EndpointConfig)
    check_flags(settings, config)
    bench = EndpointBench(settings, config)
    with terminated_as_interrupted():
        report = bench.run()
    bench.write(report)
    if not settings.get("json-only"):
        print_report(report)
    console.print_json(report)
    if report["interrupted"]:
        raise KeyboardInterrupt
    if not any(point["num_completed"] for point in report["points"]):
        raise BenchError(f"no request was answered: {first_error(report['points'])}")


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM too ends the run with a report."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_flags(settings: Settings, config: EndpointConfig) -> None:
    """What cannot go together is refused in one sentence."""
    if not settings.get("url"):
        raise SettingsError("--url is missing: the server to measure")
    for one, other in CLASHES:
        if one in settings and other in settings:
            raise SettingsError(f"--{one} and --{other} do not go together")
    if (config.gpus is None) != (config.price_per_gpu_hour is None):
        raise SettingsError("a price needs both --gpus and --price-per-gpu-hour")
    if config.turns > 1 and config.api != "chat":
        raise SettingsError("--turns are turns of a chat: they need --api chat")
    if config.burst_size > 1 and config.arrival != "burst":
        raise SettingsError("--burst-size goes with --arrival burst")
    if config.saturate:
        check_saturation(settings, config)


class EndpointBench:
    """One run of the command: its points, its records, its files."""

    def __init__(
        self, settings: Settings, config: EndpointConfig, dataset: Dataset | None = None
    ) -> None:
        from tokenmill.bench.events import Price, parse_slo
        from tokenmill.bench.scrape import Scraper, metrics_url

        self._config = config
        self.slo = parse_slo(config.goodput)
        self._price = None
        if config.gpus and config.price_per_gpu_hour is not None:
            self._price = Price(config.gpus, config.price_per_gpu_hour)
        self._folder = make_folder(config.output_dir)
        self._dataset = dataset or make_dataset(settings, config)
        self._loads = make_loads(config, self._dataset, settings.get("bench-seed") or 0)
        self._count = token_counter(config.tokenizer)
        self.target = make_target(settings, config)
        self._by_rate = bool(config.rate) or "arrival" in settings
        self._scraper = None
        if config.server_metrics:
            url = config.metrics_url or metrics_url(self.target.url)
            self._scraper = Scraper(url, self.target)
        self._runs: list[Run] = []
        self._points: list[Report] = []

    def run(self) -> Report:
        """Every point in turn; Ctrl-C leaves out the rest."""
        saturation = None
        if self._config.saturate:
            saturation = search_saturation(self, self._loads[0], self._config, self._by_rate)
        else:
            for load in self._loads:
                self.measure(load)
                if self.interrupted:
                    break
        if self._config.audit and not self.interrupted:
            self.add_floor(self._points)
        if saturation is None:
            return self.report(self._points)
        note_client(saturation, self._points)
        return self.report(self._points) | {"saturation": saturation}

    def report(self, points: list[Report]) -> Report:
        """What the JSON line has around the points."""
        target, scraper = self.target, self._scraper
        return {
            "benchmark": "endpoint",
            "url": target.url,
            "model": target.model,
            "api": target.api,
            "stream": target.stream,
            "interrupted": self.interrupted,
            "server_metrics": scraper and {"url": scraper.url, "fault": scraper.fault},
            "points": points,
            "config": asdict(self._config),
        }

    def write(self, report: Report) -> None:
        """summary.json and events.jsonl, where a folder is given."""
        if self._folder is None:
            return
        from tokenmill.bench.wire import write_records

        summary = json.dumps(report, indent=2) + "\n"
        (self._folder / "summary.json").write_text(summary, encoding="utf-8")
        records = [record for run in self._runs for record in run.records]
        write_records(self._folder / "events.jsonl", records)
        console.note(f"written: {self._folder / 'summary.json'}, {len(records)} events beside it")

    @property
    def last_run(self) -> Run:
        return self._runs[-1]

    @property
    def interrupted(self) -> bool:
        """By Ctrl-C, in the last point."""
        return bool(self._runs) and self._runs[-1].interrupted

    def measure(self, load: Load) -> Report:
        """The figures of one more point, its audit without the floor, and what the server says."""
        run = self._run_point(load)
        readings = self._scraper.end() if self._scraper else []
        self._finish_records(run)
        self._runs.append(run)
        point = self._summarize(run, readings)
        self._points.append(point)
        return point

    def _run_point(self, load: Load) -> Run:
        from tokenmill.bench import endpoint as bench

        num_processes = self._config.processes or bench.choose_processes(load)
        console.note(f"{load.name}: {self.target.url}")
        scraper = self._scraper
        num_requests = load.num_sessions and load.num_sessions * self._config.turns
        with watching(Goal(load.name, num_requests, load.duration_s)) as watch:
            run = bench.run_load(
                self.target,
                load,
                fresh(self._dataset, len(self._runs)),
                min(num_processes, load.concurrency or num_processes),
                self._config.warmup_requests,
                watch,
                scraper.begin if scraper else lambda: None,
            )
        if scraper and scraper.fault and not self._runs:
            console.note(f"no server metrics: {scraper.fault}")
        return run

    def _finish_records(self, run: Run) -> None:
        """Number them, count their tokens where asked to, and let the texts go."""
        from tokenmill.bench.events import count_tokens

        if self._count is not None:
            count_tokens(run.records, self._count)
        for record in run.records:
            record.point, record.text = len(self._runs), None

    def add_floor(self, points: Sequence[Report]) -> None:
        """Join the client alone, as the largest point had it, to the audits."""
        from tokenmill.bench.audit import add_floor
        from tokenmill.bench.endpoint import measure_floor

        console.note("Measuring the client against a server that answers at once")
        largest = max(self._runs, key=lambda run: run.load.concurrency or 0)
        floor = measure_floor(self.target, largest.load, len(largest.health))
        if floor.alone.interrupted or floor.full.interrupted:
            return
        for point in points:
            point["audit"] = add_floor(point["audit"], point, floor, self.target.stream)

    def _summarize(self, run: Run, readings: list[dict[str, float]]) -> Report:
        from tokenmill.bench.audit import audit
        from tokenmill.bench.events import rounded, summarize_point
        from tokenmill.bench.scrape import server_doubts, server_report

        stream = self.target.stream
        point = summarize_point(
            run.load, run.records, stream=stream, slo=self.slo, price=self._price
        )
        if readings:
            point["server"] = rounded(server_report(readings))
            point["doubts"] |= server_doubts(point["server"], point, run.records)
        return point | {"audit": audit(run, point, None, stream)}


def make_folder(name: str | None) -> Path | None:
    """Made before the run: what cannot be written should fail at once."""
    if name is None:
        return None
    folder = Path(name).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def print_report(report: Report) -> None:
    """The table of the points, the details of a single one, and the client's part in it."""
    points = report["points"]
    streamed = "streamed" if report["stream"] else "not streamed"
    state = "; interrupted, so of what had finished" if report["interrupted"] else ""
    console.out.print(f"{report['model']} at {report['url']}, {streamed}{state}", markup=False)
    console.print_table(_points_table(points))
    if len(points) == 1 and points[0]["num_completed"]:
        console.out.print()
        console.print_table(_latency_table(points[0]))
    print_points(points)
    if "saturation" in report:
        print_saturation(report["saturation"])


def print_points(points: Sequence[Report]) -> None:
    """Errors and doubts, the server's figures and the client's part."""
    from tokenmill.bench.audit import all_warnings

    for point in points:
        for label in ("errors", "doubts"):
            for name, entry in point[label].items():
                hint = " (--no-ignore-eos leaves it out)" if "ignore_eos" in entry["first"] else ""
                text = f"{point['load']}: {entry['count']} x {name}: {entry['first']}{hint}"
                console.out.print(text, markup=False)
    if any("server" in point for point in points):
        console.out.print()
        console.print_table(_server_table(points))
    console.out.print(_audit_line(points), markup=False)
    for text in all_warnings(points):
        console.out.print(f"warning: {text}", markup=False)


def _server_table(points: Sequence[Report]) -> list[list[str]]:
    """What the server says of itself, a row per point."""
    columns = {
        "requests": ("num_requests", ",.0f"),
        "tokens": ("num_output_tokens", ",.0f"),
        "most running": ("peak_running", ",.0f"),
        "most waiting": ("peak_waiting", ",.0f"),
        "most of KV cache": ("peak_kv_cache_usage", ".0%"),
        "prefix hits": ("prefix_hit_rate", ".0%"),
        "mean TTFT": ("ttft_mean_ms", ",.2f"),
    }
    rows = [["the server says", *columns]]
    for point in points:
        if server := point.get("server"):
            values = ((server[key], form) for key, form in columns.values())
            shown = ["-" if value is None else format(value, form) for value, form in values]
            rows.append([point["load"], *shown])
    return rows


def _points_table(points: Sequence[Report]) -> list[list[str]]:
    columns: dict[str, Callable[[Report], str]] = {
        "load": lambda p: str(p["load"]),
        "done": lambda p: f"{p['num_completed']:,}",
        "failed": lambda p: f"{p['num_failed']:,}",
        "req/s": lambda p: f"{p['request_s']:,.2f}",
        "out tok/s": lambda p: f"{p['output_tok_s']:,.1f}",
        "total tok/s": lambda p: f"{p['total_tok_s']:,.1f}",
        "tok/s/user": lambda p: cell(p.get("tok_s_user", {}).get("p50")),
    }
    if any("goodput" in point for point in points):
        columns["good"] = lambda p: f"{p['goodput']['good_share']:.1%}"
        columns["good req/s"] = lambda p: f"{p['goodput']['request_s']:,.2f}"
    if any("price" in point for point in points):
        columns["$/M out"] = lambda p: cell(p["price"]["usd_per_million_output"], 3)
        columns["$/M total"] = lambda p: cell(p["price"]["usd_per_million_total"], 3)
    for key in ("ttft_ms", "tpot_ms") if len(points) > 1 else ():
        for percent in ("p50", "p99"):
            label = f"{key.removesuffix('_ms').upper()} {percent}"
            columns[label] = _latency_column(key, percent)
    return [list(columns), *([show(point) for show in columns.values()] for point in points)]


def _latency_column(key: str, percent: str) -> Callable[[Report], str]:
    return lambda point: cell(point.get(key, {}).get(percent))


def _latency_table(point: Report) -> list[list[str]]:
    names = ("mean", "p50", "p90", "p99", "max")
    rows = [["ms", *names, "95% of p50"]]
    for key in ("ttft_ms", "ttft_from_schedule_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        if summary := point.get(key):
            low, high = summary.get("ci95", {}).get("p50", (None, None))
            bounds = "-" if low is None else f"{low:.2f} to {high:.2f}"
            label = key.removesuffix("_ms").replace("_", " ").replace("ttft", "TTFT")
            label = label.upper() if len(label) <= 4 and label != "e2e" else label
            rows.append([label, *(cell(summary[name]) for name in names), bounds])
    return rows


def cell(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _audit_line(points: Sequence[Report]) -> str:
    audits = [point["audit"] for point in points]
    lag = max((a["lag_ms"].get("p99", 0.0) for a in audits), default=0.0)
    cpu, stall = max(a["cpu_share"] for a in audits), max(a["max_stall_ms"] for a in audits)
    line = (
        f"client: {audits[-1]['num_processes']} process(es), {cpu:.0%} of a core at most, sent "
        f"{lag:.2f} ms late (p99), longest stall {stall:.0f} ms"
    )
    floor = audits[-1]["floor"]
    if floor is None:
        return line
    own = floor["latency_ms"].get("p50", 0.0)
    return f"{line}; alone it does {floor['request_s']:,.0f} req/s and adds {own:.2f} ms"


def first_error(points: Sequence[Report]) -> str:
    found = [f"{name}: {e['first']}" for p in points for name, e in p["errors"].items()]
    return found[0] if found else "nothing was sent"

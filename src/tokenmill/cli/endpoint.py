"""tokenmill bench endpoint."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.bench.workload import BenchError, make_cells
from tokenmill.cli import console
from tokenmill.core.config import BenchConfig, EndpointConfig
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
    from tokenmill.bench.endpoint import Floor, Run
    from tokenmill.bench.load import Load
    from tokenmill.bench.wire import Target

Report = dict[str, Any]

DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = 16, 100
INPUT_LEN, OUTPUT_LEN = 128, 64
UNIFORM_ROWS = 1024
MODELS_TIMEOUT_S = 10.0
LINE_EVERY_S = 5.0


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
    tokenmill bench endpoint --url URL --trace mooncake.jsonl --output-dir results
    tokenmill bench endpoint --url URL --gpus 8 --price-per-gpu-hour 3
    """
    config = settings.build(EndpointConfig)
    check_flags(settings, config)
    bench = EndpointBench(settings, config)
    with _terminated_as_interrupted():
        report = bench.run()
    bench.write(report)
    if not settings.get("json-only"):
        print_report(report)
    console.print_json(report)
    if report["interrupted"]:
        raise KeyboardInterrupt
    if not any(point["num_completed"] for point in report["points"]):
        raise BenchError(f"no request was answered: {_first_error(report['points'])}")


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
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


class EndpointBench:
    """One run of the command: its points, its records, its files."""

    def __init__(self, settings: Settings, config: EndpointConfig) -> None:
        from tokenmill.bench.events import Price, parse_slo

        self._config = config
        self._slo = parse_slo(config.goodput)
        self._price = None
        if config.gpus and config.price_per_gpu_hour is not None:
            self._price = Price(config.gpus, config.price_per_gpu_hour)
        self._folder = _make_folder(config.output_dir)
        self._dataset = make_dataset(settings, config)
        self._loads = make_loads(config, self._dataset, settings.get("bench-seed") or 0)
        self._count = token_counter(config.tokenizer)
        self._target = make_target(settings, config)
        self._runs: list[Run] = []

    def run(self) -> Report:
        """Every point in turn; Ctrl-C leaves out the rest."""
        for load in self._loads:
            run = self._run_point(load)
            self._runs.append(run)
            if run.interrupted:
                break
        interrupted = self._runs[-1].interrupted
        floor = self._floor() if self._config.audit and not interrupted else None
        target = self._target
        return {
            "benchmark": "endpoint",
            "url": target.url,
            "model": target.model,
            "api": target.api,
            "stream": target.stream,
            "interrupted": interrupted,
            "points": [self._point(run, floor) for run in self._runs],
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

    def _run_point(self, load: Load) -> Run:
        from tokenmill.bench import endpoint as bench

        num_processes = self._config.processes or bench.choose_processes(load)
        console.note(f"{load.name}: {self._target.url}")
        run = bench.run_load(
            self._target,
            load,
            self._dataset,
            min(num_processes, load.concurrency or num_processes),
            self._config.warmup_requests,
            progress_lines(),
        )
        self._finish_records(run)
        return run

    def _finish_records(self, run: Run) -> None:
        """Number them, count their tokens where asked to, and let the texts go."""
        from tokenmill.bench.events import count_tokens

        if self._count is not None:
            count_tokens(run.records, self._count)
        for record in run.records:
            record.point, record.text = len(self._runs), None

    def _floor(self) -> Floor | None:
        from tokenmill.bench.endpoint import measure_floor

        console.note("Measuring the client against a server that answers at once")
        largest = max(self._runs, key=lambda run: run.load.concurrency or 0)
        floor = measure_floor(self._target, largest.load, len(largest.health))
        return None if floor.alone.interrupted or floor.full.interrupted else floor

    def _point(self, run: Run, floor: Floor | None) -> Report:
        from tokenmill.bench.audit import audit
        from tokenmill.bench.events import summarize_point

        stream = self._target.stream
        point = summarize_point(
            run.load, run.records, stream=stream, slo=self._slo, price=self._price
        )
        return point | {"audit": audit(run, point, floor, stream)}


def make_loads(config: EndpointConfig, dataset: Dataset, seed: int) -> list[Load]:
    """One load per point of the sweep."""
    from tokenmill.bench.datasets import Trace
    from tokenmill.bench.load import Load

    num_requests = config.num_requests
    if num_requests is None and config.duration_s is None:
        num_requests = dataset.size or DEFAULT_REQUESTS
    if num_requests is not None and isinstance(dataset, Trace):
        num_requests = min(num_requests, len(dataset.rows))
    common: dict[str, Any] = {
        "num_sessions": None if num_requests is None else -(-num_requests // config.turns),
        "duration_s": config.duration_s,
        "ramp_s": config.ramp_s,
        "seed": seed,
    }
    if config.concurrency:
        return [Load(concurrency=value, **common) for value in config.concurrency]
    if isinstance(dataset, Trace):
        offsets = tuple(row.offset_s for row in dataset.rows)
        return [Load(arrival="trace", offsets_s=offsets, **common)]
    common |= {"arrival": config.arrival, "burst_size": config.burst_size}
    if config.rate:
        return [Load(rate=value, **common) for value in config.rate]
    if config.arrival == "burst":
        return [Load(**common)]
    return [Load(concurrency=DEFAULT_CONCURRENCY, **common)]


def make_dataset(settings: Settings, config: EndpointConfig) -> Dataset:
    """The data that the flags ask for."""
    from tokenmill.bench.datasets import Synthetic, read_prompts, read_trace

    seed, output_len = settings.get("bench-seed") or 0, settings.values.get("output-len")
    if config.trace is not None:
        return read_trace(Path(config.trace).expanduser(), config.trace_speed, seed)
    if config.prompts is not None:
        return read_prompts(Path(config.prompts).expanduser(), output_len)
    lengths: tuple[tuple[int, int], ...]
    lengths = ((settings.values.get("input-len", INPUT_LEN), output_len or OUTPUT_LEN),)
    if source := settings.values.get("lengths"):
        rows = UNIFORM_ROWS if source.startswith("uniform:") else None
        wanted = BenchConfig(lengths=source, num_prompts=rows, output_len=output_len)
        lengths = make_cells(wanted)[0].lengths
    return Synthetic(lengths, seed, config.turns, config.shared_prefix, config.num_prefixes)


def make_target(settings: Settings, config: EndpointConfig) -> Target:
    """Whom to ask, and what every request says."""
    from tokenmill.bench.client import route_url
    from tokenmill.bench.wire import Target

    key = next(iter(settings.values.get("api-key", ())), None)
    url = route_url(settings.get("url"), config.api)
    fields: Report = {"ignore_eos": True} if settings.values.get("ignore-eos", True) else {}
    if "temperature" in settings:
        fields["temperature"] = settings.get("temperature")
    return Target(
        url=url,
        model=settings.values.get("model") or first_model(url, key),
        api=config.api,
        stream=config.stream,
        api_key=key,
        timeout_s=config.timeout_s,
        insecure=config.insecure,
        keep_text=config.turns > 1 or config.tokenizer is not None,
        fields=fields | _extra_body(config.extra_body),
    )


def _extra_body(text: str | None) -> Report:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise SettingsError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"--extra-body must be a JSON object, got {text}")
    return found


def first_model(url: str, api_key: str | None) -> str:
    """The first name of the server's /models."""
    from urllib.request import Request, urlopen

    base = url.removesuffix("/completions").removesuffix("/chat")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(base + "/models", headers=headers), timeout=MODELS_TIMEOUT_S) as got:
            return str(json.load(got)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(
            f"{base}/models does not name a model ({error}): give --model, or check --url"
        ) from None


def token_counter(name: str | None) -> Callable[[str], int] | None:
    """Counts the tokens of a text as the model's tokenizer does."""
    if name is None:
        return None
    from tokenmill.cli.pull import fetch
    from tokenmill.serve.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(fetch(name))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _make_folder(name: str | None) -> Path | None:
    """Made before the run: what cannot be written should fail at once."""
    if name is None:
        return None
    folder = Path(name).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def progress_lines() -> Callable[[float, Sequence[int]], None]:
    """A line every few seconds: done, failed, in flight and rates since the last line."""
    shown = (0.0, 0, 0)

    def watch(seconds: float, counters: Sequence[int]) -> None:
        nonlocal shown
        done, failed, tokens, in_flight = counters
        passed = seconds - shown[0]
        if passed < LINE_EVERY_S:
            return
        rates = (
            f"{(done - shown[1]) / passed:,.1f} req/s, {(tokens - shown[2]) / passed:,.0f} tok/s"
        )
        console.note(
            f"{seconds:6.1f} s: {done:,} done, {failed:,} failed, {in_flight:,} in flight, {rates}"
        )
        shown = (seconds, done, tokens)

    return watch


def print_report(report: Report) -> None:
    """The table of the points, the details of a single one, and the client's part in it."""
    from tokenmill.bench.audit import all_warnings

    points = report["points"]
    streamed = "streamed" if report["stream"] else "not streamed"
    state = "; interrupted, so of what had finished" if report["interrupted"] else ""
    console.out.print(f"{report['model']} at {report['url']}, {streamed}{state}", markup=False)
    console.print_table(_points_table(points))
    if len(points) == 1 and points[0]["num_completed"]:
        console.out.print()
        console.print_table(_latency_table(points[0]))
    for point in points:
        for label in ("errors", "doubts"):
            for name, entry in point[label].items():
                hint = " (--no-ignore-eos leaves it out)" if "ignore_eos" in entry["first"] else ""
                text = f"{point['load']}: {entry['count']} x {name}: {entry['first']}{hint}"
                console.out.print(text, markup=False)
    console.out.print(_audit_line(points), markup=False)
    for text in all_warnings(points):
        console.out.print(f"warning: {text}", markup=False)


def _points_table(points: Sequence[Report]) -> list[list[str]]:
    columns: dict[str, Callable[[Report], str]] = {
        "load": lambda p: str(p["load"]),
        "done": lambda p: f"{p['num_completed']:,}",
        "failed": lambda p: f"{p['num_failed']:,}",
        "req/s": lambda p: f"{p['request_s']:,.2f}",
        "out tok/s": lambda p: f"{p['output_tok_s']:,.1f}",
        "total tok/s": lambda p: f"{p['total_tok_s']:,.1f}",
        "tok/s/user": lambda p: _cell(p.get("tok_s_user", {}).get("p50")),
    }
    if any("goodput" in point for point in points):
        columns["good"] = lambda p: f"{p['goodput']['good_share']:.1%}"
        columns["good req/s"] = lambda p: f"{p['goodput']['request_s']:,.2f}"
    if any("price" in point for point in points):
        columns["$/M out"] = lambda p: _cell(p["price"]["usd_per_million_output"], 3)
        columns["$/M total"] = lambda p: _cell(p["price"]["usd_per_million_total"], 3)
    for key in ("ttft_ms", "tpot_ms") if len(points) > 1 else ():
        for percent in ("p50", "p99"):
            label = f"{key.removesuffix('_ms').upper()} {percent}"
            columns[label] = _latency_column(key, percent)
    return [list(columns), *([show(point) for show in columns.values()] for point in points)]


def _latency_column(key: str, percent: str) -> Callable[[Report], str]:
    return lambda point: _cell(point.get(key, {}).get(percent))


def _latency_table(point: Report) -> list[list[str]]:
    names = ("mean", "p50", "p90", "p99", "max")
    rows = [["ms", *names, "95% of p50"]]
    for key in ("ttft_ms", "ttft_from_schedule_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        if summary := point.get(key):
            low, high = summary.get("ci95", {}).get("p50", (None, None))
            bounds = "-" if low is None else f"{low:.2f} to {high:.2f}"
            label = key.removesuffix("_ms").replace("_", " ").replace("ttft", "TTFT")
            label = label.upper() if len(label) <= 4 and label != "e2e" else label
            rows.append([label, *(_cell(summary[name]) for name in names), bounds])
    return rows


def _cell(value: float | None, digits: int = 2) -> str:
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


def _first_error(points: Sequence[Report]) -> str:
    found = [f"{name}: {e['first']}" for p in points for name, e in p["errors"].items()]
    return found[0] if found else "nothing was sent"

"""tokenmill bench endpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.bench.client.live_progress import PointGoal, watching
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.endpoint_load import (
    INPUT_LEN,
    OUTPUT_LEN,
    PromptSource,
    make_dataset,
    make_loads,
    make_target,
    token_counter,
    with_template,
)
from tokenmill.bench.endpoint_saturation import (
    check_saturation,
    note_client,
    print_saturation,
    search_saturation,
)
from tokenmill.bench.options import (
    AnswerOptions,
    EndpointConfig,
    PromptOptions,
    SyntheticOptions,
    TemperatureOption,
    UrlOptions,
)
from tokenmill.bench.workload import BenchError
from tokenmill.settings import Panel, Setting, Settings, SettingsError, settings_of
from tokenmill.settings.shared import JsonOption

if TYPE_CHECKING:
    from tokenmill.bench.client.arrivals import ClientLoad
    from tokenmill.bench.client.datasets import Dataset
    from tokenmill.bench.client.load_run import Run
    from tokenmill.bench.results.reports import EndpointReport, PointReport, PromptsReport


_KEYS = [setting.key for setting in settings_of(EndpointConfig)]


def _between(first: str, last: str) -> tuple[Setting, ...]:
    return settings_of(EndpointConfig)[_KEYS.index(first) : _KEYS.index(last) + 1]


PANELS: dict[str, Panel] = {
    "Endpoint": (
        UrlOptions,
        *_between("api", "extra-body"),
        AnswerOptions,
        TemperatureOption,
    ),
    "Load": _between("concurrency", "slo-percentile"),
    "Data": (SyntheticOptions, *_between("prompts", "tokenizer"), PromptOptions),
    "Report": (*_between("goodput", "output-dir"), JsonOption),
}
CLASHES = (
    ("rate", "concurrency"),
    ("rate", "trace"),
    ("prompts", "trace"),
    *((one, other) for one in ("prompts", "trace") for other in ("lengths", "input-len")),
    *((one, other) for one in ("prompts", "trace") for other in ("turns", "shared-prefix")),
    *((one, other) for one in ("prompts", "trace") for other in ("images", "image-size")),
    *(("exact-input-len", other) for other in ("prompts", "trace", "turns", "shared-prefix")),
    ("exact-input-len", "images"),
)


def endpoint(settings: Settings) -> None:
    """Latency, throughput and price of an OpenAI-compatible server.

    Requests are stamped at the socket; token counts come from the server's
    usage and are checked. Every report says how fast the client itself is, and
    warns where the client was the limit. Every run and every point sends new
    prompts, so that no prefix cache has them; --seed repeats a run's prompts.
    After Ctrl-C the finished requests are reported.

    tokenmill bench endpoint --url http://127.0.0.1:8000/v1 --concurrency 1,4,16
    tokenmill bench endpoint --url URL --rate 4 --duration 60 --goodput ttft:500,tpot:50
    tokenmill bench endpoint --url URL --saturate --goodput ttft:500,tpot:50
    tokenmill bench endpoint --url URL --trace mooncake.jsonl --output-dir results
    tokenmill bench endpoint --url URL --images 1 --image-size 1024x1024
    tokenmill bench endpoint --url URL --gpus 8 --price-per-gpu-hour 3
    """
    config = settings.build(EndpointConfig)
    check_flags(settings, config)
    bench = EndpointBench(settings, config)
    with terminated_as_interrupted():
        report = bench.run()
    kept = bench.write(report)
    conclude(settings, report, print_report, kept)


def conclude(
    settings: Settings,
    report: EndpointReport,
    print_report: Callable[[EndpointReport], None],
    kept: bool,
) -> None:
    """Print a report, then say if it was interrupted, not kept, or too few requests succeeded."""
    from tokenmill.bench.results.reports import as_json

    if not settings.get("json"):
        print_report(report)
    console.print_json(as_json(report), settings.get("json"))
    if report.interrupted:
        raise KeyboardInterrupt
    if not any(point.num_completed for point in report.points):
        raise BenchError(f"no request was answered: {first_error(report.points)}")
    if too_many := failed_too_often(report):
        raise BenchError(too_many)
    if too_few := below_goodput(report):
        raise BenchError(too_few)
    if not kept:
        raise BenchError("the result above is not in all of its folders")


def _counted(report: EndpointReport) -> list[PointReport]:
    """The points that decide on the exit status: of a search only the load that it found."""
    if search := report.saturation:
        return [p for p in report.points if getattr(p, search.by) == search.found]
    return report.points


def below_goodput(report: EndpointReport) -> str:
    """The worst point of those below --fail-below-goodput, in a sentence."""
    least = report.config.get("fail_below_goodput")
    points = [p for p in _counted(report) if p.goodput]
    if least is None or not points:
        return ""
    worst = min(points, key=lambda point: point.goodput.good_share)
    share = worst.goodput.good_share
    if share >= least:
        return ""
    return (
        f"{share:.1%} of the requests at {worst.load} were within --goodput, less than "
        f"--fail-below-goodput {least:g}"
    )


def failed_too_often(report: EndpointReport) -> str:
    """The worst point of those that failed more often than allowed, in a sentence."""
    points, most = _counted(report), report.config["max_error_rate"]
    if not points:
        return ""
    worst = max(points, key=_failed_share)
    if _failed_share(worst) <= most:
        return ""
    sent = worst.num_failed + worst.num_completed
    return (
        f"{worst.num_failed} of {sent} requests failed at {worst.load}, more than "
        f"--max-error-rate {most:g} allows: {first_error([worst])}"
    )


def _failed_share(point: PointReport) -> float:
    return float(point.num_failed / max(point.num_failed + point.num_completed, 1))


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the run with a report, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_flags(settings: Settings, config: EndpointConfig) -> None:
    if not settings.get("url"):
        raise SettingsError(
            "--url is missing: give the server to measure, such as http://127.0.0.1:8000/v1"
        )
    for one, other in CLASHES:
        if one in settings and other in settings:
            raise SettingsError(f"--{one} and --{other} do not go together: leave one out")
    if (config.gpus is None) != (config.price_per_gpu_hour is None):
        raise SettingsError("a price needs both --gpus and --price-per-gpu-hour")
    if config.fail_below_goodput is not None and not config.goodput:
        raise SettingsError("--fail-below-goodput needs the limits of --goodput")
    if config.turns > 1 and config.api != "chat":
        raise SettingsError("--turns are turns of a chat: they need --api chat")
    if config.images and config.api != "chat":
        raise SettingsError("--images are parts of a chat: they need --api chat")
    if config.burst_size > 1 and config.arrival != "burst":
        raise SettingsError("--burst-size goes with --arrival burst")
    if config.saturate:
        check_saturation(settings, config)


class EndpointBench:
    def __init__(
        self, settings: Settings, config: EndpointConfig, dataset: Dataset | None = None
    ) -> None:
        from tokenmill.bench.client.datasets import Synthetic
        from tokenmill.bench.client.scrape import Scraper, metrics_url
        from tokenmill.bench.client.summary import Price, parse_slo
        from tokenmill.bench.report.result_folder import ResultFolder
        from tokenmill.bench.results.manifest import public, utc_now

        self._config = config
        self._settings = public(other_settings(settings, config))
        self.started_at = utc_now()
        self.slo = parse_slo(config.goodput)
        self._price = None
        if config.gpus and config.price_per_gpu_hour is not None:
            self._price = Price(config.gpus, config.price_per_gpu_hour)
        self.folder = ResultFolder(config.output_dir) if config.output_dir else None
        self._count = token_counter(config.tokenizer)
        dataset = dataset or make_dataset(settings, config)
        self.target = make_target(settings, config)
        if config.exact_input_len and isinstance(dataset, Synthetic):
            dataset = with_template(dataset, self.target)
        self._prompts = PromptSource.of(settings, config, dataset, self._count)
        self._loads = make_loads(config, dataset, self._prompts.seed)
        self._settings["seed"] = self._prompts.seed
        self._by_rate = bool(config.rate) or "arrival" in settings
        self._scraper = None
        if config.server_metrics:
            url = config.metrics_url or metrics_url(self.target.url)
            self._scraper = Scraper(url, self.target)
        self._runs: list[Run] = []
        self._points: list[PointReport] = []

    def run(self) -> EndpointReport:
        """Measure the points in turn; after Ctrl-C the rest is left out."""
        saturation = None
        if self._config.saturate:
            saturation = search_saturation(self, self._loads[0], self._config, self._by_rate)
        else:
            for load in self._loads:
                self.measure(load)
                if self.interrupted:
                    break
        if self._config.audit and not self.interrupted:
            self.add_client_baseline(self._points)
        report = self.report(self._points)
        if saturation is None:
            return report
        note_client(saturation, self._points)
        saturation.doubts = self.doubts_about_hits()
        report.saturation = saturation
        return report

    def report(self, points: list[PointReport]) -> EndpointReport:
        """The JSON report around these points."""
        from tokenmill.bench.client.arrivals import as_run
        from tokenmill.bench.client.prefix_hits import note_differences
        from tokenmill.bench.results.reports import EndpointReport, MetricsSource

        note_differences(points)
        target, scraper = self.target, self._scraper
        return EndpointReport(
            benchmark="endpoint",
            url=target.url,
            model=target.model,
            api=target.api,
            stream=target.stream,
            interrupted=self.interrupted,
            server_metrics=MetricsSource(url=scraper.url, fault=scraper.fault) if scraper else None,
            prompts=self._prompts.report(),
            points=points,
            config=as_run(asdict(self._config), [point.concurrency for point in points]),
            settings=self._settings,
        )

    def doubts_about_hits(self) -> list[str]:
        """Points, those of a search too, whose figures a prefix cache may have improved."""
        from tokenmill.bench.client.prefix_hits import hit_sentences, note_differences

        note_differences(self._points)
        return hit_sentences(self._points)

    def write(self, report: EndpointReport) -> bool:
        """Write the files of the result, if --output-dir is given; False if no disk takes them."""
        if self.folder is None:
            console.note("--output-dir DIR keeps a run: report.html, summary.json, CSV, events")
            return True
        from tokenmill.bench.report.endpoint_report import PAGE, write_result
        from tokenmill.bench.results.manifest import make_facts

        records = [record for run in self._runs for record in run.records]
        configuration = report.config | report.settings
        facts = make_facts("endpoint", configuration, self.started_at)
        kept = self.folder.write(lambda folder: write_result(folder, report, records, facts))
        if kept:
            console.note(f"written: {self.folder.path / PAGE}, {len(records)} events beside it")
        return kept

    @property
    def last_run(self) -> Run:
        return self._runs[-1]

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C ended the last point."""
        return bool(self._runs) and self._runs[-1].interrupted

    def measure(self, load: ClientLoad) -> PointReport:
        run = self._run_point(load)
        readings = self._scraper.end() if self._scraper else []
        self._finish_records(run)
        self._runs.append(run)
        point = self._summarize(run, readings)
        self._points.append(point)
        return point

    def _run_point(self, load: ClientLoad) -> Run:
        from tokenmill.bench.client import load_run as bench

        num_processes = self._config.processes or bench.choose_processes(load)
        console.note(f"{load.name}: {self.target.url}")
        scraper = self._scraper
        num_requests = load.num_sessions and load.num_sessions * self._config.turns
        with watching(PointGoal(load.name, num_requests, load.duration_s)) as watch:
            run = bench.run_load(
                self.target,
                load,
                self._prompts.point(len(self._runs)),
                min(num_processes, load.concurrency or num_processes),
                self._config.warmup_requests,
                watch,
                scraper.begin if scraper else lambda: None,
            )
        if scraper and scraper.fault and not self._runs:
            console.note(f"no server metrics: {scraper.fault}")
        return run

    def _finish_records(self, run: Run) -> None:
        """Number the records, count their tokens with --tokenizer, and drop the texts."""
        from tokenmill.bench.client.summary import count_tokens

        if self._count is not None:
            count_tokens(run.records, self._count)
        for record in run.records:
            record.point, record.text = len(self._runs), None

    def add_client_baseline(self, points: Sequence[PointReport]) -> None:
        """Measure the client alone at the largest point, and add it to the audits."""
        from tokenmill.bench.client.audit import add_client_baseline
        from tokenmill.bench.client.load_run import measure_client_baseline

        console.note("Measuring the client against a server that answers at once")
        largest = max(self._runs, key=lambda run: run.load.concurrency or 0)
        baseline = measure_client_baseline(self.target, largest.load, len(largest.health))
        if baseline.alone.interrupted or baseline.full.interrupted:
            return
        for point in points:
            point.audit = add_client_baseline(point.audit, point, baseline, self.target.stream)

    def _summarize(self, run: Run, readings: list[dict[str, float]]) -> PointReport:
        from tokenmill.bench.client.audit import audit
        from tokenmill.bench.client.prefix_hits import asked_tokens, hit_doubts, prefix_hits
        from tokenmill.bench.client.scrape import server_doubts, server_report
        from tokenmill.bench.client.summary import rounded, summarize_point

        stream = self.target.stream
        point = summarize_point(
            *(run.load, run.records),
            stream=stream,
            slo=self.slo,
            price=self._price,
            stall_s=self._config.stall_s,
        )
        if readings:
            num_during = self._scraper.num_during if self._scraper else None
            point.server = rounded(server_report(readings, num_during))
            point.doubts |= server_doubts(point.server, point, run.records)
        dataset = self._prompts.point(len(self._runs) - 1)
        if self._config.turns == 1 and (asked := asked_tokens(dataset, run.records)) is not None:
            point.num_asked_tokens = asked
        by_server = point.server.prefix_hit_rate if point.server else None
        hits = prefix_hits(dataset, run.records, run.warmup, by_server)
        point.prefix_hits = rounded(hits)
        point.doubts |= hit_doubts(hits)
        point.audit = audit(run, point)
        return point


def other_settings(settings: Settings, config: EndpointConfig) -> dict[str, Any]:
    """What shapes the requests beside `config`: what was given, and defaults that hold."""
    held: dict[str, Any] = {"ignore-eos": True}
    if not (config.prompts or config.trace or "lengths" in settings):
        held |= {"input-len": INPUT_LEN, "output-len": OUTPUT_LEN}
    given = {k: v for k, v in settings.values.items() if k not in _KEYS}
    return held | {key: value for key, value in given.items() if key != "json"}


def print_report(report: EndpointReport) -> None:
    """The table of the points, the details of a single one, and the client's part in it."""
    from tokenmill.bench.report.tables import latency_table, points_table

    points = report.points
    streamed = "streamed" if report.stream else "not streamed"
    if points and all(point.concurrency is not None for point in points):
        streamed += ", closed loop"
    state = "; interrupted, so of what had finished" if report.interrupted else ""
    console.out.print(f"{report.model} at {report.url}, {streamed}{state}", markup=False)
    console.out.print(prompts_line(report.prompts), markup=False)
    console.print_table(points_table(points))
    if words := asked_line(points):
        console.out.print(words)
    if len(points) == 1 and points[0].num_completed:
        console.out.print()
        console.print_table(latency_table(points[0]))
    print_points(points)
    if report.saturation:
        print_saturation(report.saturation)


def prompts_line(prompts: PromptsReport) -> str:
    seed = f"seed {prompts.seed}" + (" (drawn)" if prompts.seed_drawn else "")
    if prompts.same_at_every_point:
        return f"prompts: the same at every point (--same-prompts), {seed}"
    salt = f"; salt: {prompts.salt}" if prompts.salt else ""
    return f"prompts: fresh at every point, {seed}{salt}"


def asked_line(points: Sequence[PointReport]) -> str:
    """Prompt tokens as asked for and as the server counts them, at the mean of all points."""
    told = [p for p in points if p.num_asked_tokens and p.num_prompt_tokens]
    if not (num := sum(p.num_completed for p in told)):
        return ""
    asked = sum(p.num_asked_tokens for p in told) / num
    counted = sum(p.num_prompt_tokens for p in told) / num
    hint = "" if asked == counted else " (--exact-input-len leaves room for its chat template)"
    return f"prompt tokens: {asked:,.6g} asked for, {counted:,.6g} by the server's count{hint}"


def print_points(points: Sequence[PointReport]) -> None:
    from tokenmill.bench.client.audit import all_warnings
    from tokenmill.bench.report.tables import FEW, audit_line, cautions, server_table
    from tokenmill.bench.results.reports import OCCURRENCES

    for text in cautions(points):
        console.out.print(f"{FEW} {text}", markup=False)
    for point in points:
        for label in OCCURRENCES:
            for name, entry in getattr(point, label).items():
                hint = " (--no-ignore-eos leaves it out)" if "ignore_eos" in entry.first else ""
                text = f"{point.load}: {entry.count} x {name}: {entry.first}{hint}"
                console.out.print(text, markup=False)
    if any(point.server for point in points):
        console.out.print()
        console.print_table(server_table(points))
    console.out.print(audit_line(points), markup=False)
    for text in all_warnings(points):
        console.out.print(f"warning: {text}", markup=False)


def first_error(points: Sequence[PointReport]) -> str:
    found = [f"{name}: {e.first}" for p in points for name, e in p.errors.items()]
    return found[0] if found else "nothing was sent"


COMMANDS = (BenchCommand("endpoint", endpoint, PANELS),)

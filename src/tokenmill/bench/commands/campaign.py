"""tokenmill bench campaign."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill import __version__, console
from tokenmill.bench.commands import BenchCommand, endpoint
from tokenmill.bench.commands.endpoint import EndpointBench
from tokenmill.bench.endpoint_load import make_dataset
from tokenmill.bench.endpoint_saturation import print_saturation, search_saturation
from tokenmill.bench.mlperf.regions import (
    ULTRA_LOW_MAX,
    Regions,
    choose_points,
    compute_regions,
    min_duration_s,
    official_metrics,
    pareto_front,
)
from tokenmill.bench.options import CampaignOptions, EndpointConfig
from tokenmill.bench.workload import BenchError
from tokenmill.settings import Settings, SettingsError, only, without

if TYPE_CHECKING:
    from tokenmill.bench.client.datasets import Dataset
    from tokenmill.bench.mlperf.endpoints_submission import Disclosure, MeasuredPoint
    from tokenmill.bench.results.reports import (
        EndpointReport,
        PointReport,
        SaturationReport,
        SubmissionReport,
    )

QUICK_S = 5.0  # of a point up to 32 users; twice as much above
SEARCH_S = 30.0  # of a point of the search for C_max
# The rules: streamed single requests.
_DROPPED = ("stream", "trace", "trace-speed", "trace-block-tokens", "turns")
_RUN_AS = frozenset(("timeout_s", "warmup_requests", "prompts", "shared_prefix", "tokenizer"))
PANELS = {
    "Campaign": CampaignOptions,
    **{
        name: without(group, *_DROPPED) for name, group in endpoint.PANELS.items() if name != "Load"
    },
    "Load": only(EndpointConfig, "warmup-requests", "slo-percentile"),
}


def campaign(settings: Settings) -> None:
    """The curve of MLPerf Endpoints: tokens/s of the system over tokens/s of a user.

    It measures points of fixed concurrency in every region of the rules. A
    point takes ten minutes (up to 32 users) or twenty, and whole passes over
    the data; with --quick it takes seconds. --submission-dir writes the files
    of a submission, and --disclosure has what only the submitter knows.

    tokenmill bench campaign --url http://127.0.0.1:8000/v1 --quick
    tokenmill bench campaign --url URL --max-concurrency 256 --prompts cnn.jsonl
    --tokenizer MODEL --gpus 8 --price-per-gpu-hour 3 --output-dir results
    tokenmill bench campaign --write-disclosure disclosure.toml
    """
    if "write-disclosure" in settings:
        _write_template(Path(settings.get("write-disclosure")).expanduser())
        return
    config = settings.build(EndpointConfig)
    check_flags(settings, config)
    run = Campaign(settings, config)
    with endpoint.terminated_as_interrupted():
        report = run.run()
    kept = run.write(report)
    endpoint.conclude(settings, report, print_report, kept)


def _write_template(path: Path) -> None:
    from tokenmill.bench.mlperf.endpoints_submission import TEMPLATE

    if path.exists():
        raise BenchError(f"--write-disclosure {path}: the file exists already; give a new name")
    try:
        path.write_bytes(TEMPLATE.read_bytes())
    except OSError as error:
        raise BenchError(f"--write-disclosure {path}: {error.strerror}") from None
    console.note(f"written: {path}")
    console.print_json({"benchmark": "campaign", "written": str(path)}, wanted=False)


def check_flags(settings: Settings, config: EndpointConfig) -> None:
    endpoint.check_flags(settings, config)
    if "duration" in settings and not settings.get("quick"):
        raise SettingsError("--duration needs --quick: otherwise the rules set the duration")
    if ("submission-dir" in settings) != ("disclosure" in settings):
        raise SettingsError(
            "--submission-dir and --disclosure go together: the files name the system and the "
            "model, and only you know them (--write-disclosure FILE asks for all that is needed)"
        )
    if "slo-percentile" in settings and not config.goodput:
        raise SettingsError("--slo-percentile needs the limits of --goodput")
    if "max-concurrency" in settings:
        points = settings.get("points")
        choose_points(settings.get("max-concurrency"), settings.get("min-concurrency"), points)


class Campaign:
    def __init__(self, settings: Settings, config: EndpointConfig) -> None:
        self._is_synthetic = config.prompts is None
        # Synthetic answers have the length asked for, those of a dataset their own.
        settings = {"ignore-eos": self._is_synthetic} | settings
        self._settings, self._config = settings, config
        self._quick = bool(settings.get("quick"))
        self._disclosure = self._read_disclosure()
        dataset = make_dataset(settings, config)
        self._pass_size = dataset.size or len(getattr(dataset, "lengths", (0,)))
        self._bench = EndpointBench(settings, config, self._ordered(dataset))
        self._points: list[PointReport] = []
        self._measured: list[MeasuredPoint] = []

    def _read_disclosure(self) -> Disclosure | None:
        from tokenmill.bench.mlperf.endpoints_submission import check_root, read_disclosure

        if "disclosure" not in self._settings:
            return None
        found = read_disclosure(Path(self._settings.get("disclosure")).expanduser())
        names = found.submission
        check_root(self._submission_dir / names["organization"] / names["submission_id"])
        return found

    @property
    def _submission_dir(self) -> Path:
        return Path(self._settings.get("submission-dir")).expanduser()

    def _ordered(self, dataset: Dataset) -> Dataset:
        """A finite dataset in the order of the seed set."""
        from tokenmill.bench.client.datasets import Shuffled

        if self._disclosure is None or dataset.size is None:
            return dataset
        return Shuffled(dataset, dataset.size, self._disclosure.seeds["sample_index_rng_seed"])

    def run(self) -> EndpointReport:
        """Find C_max and measure the points; after Ctrl-C the rest is left out."""
        c_min = self._settings.get("min-concurrency")
        c_max = self._settings.values.get("max-concurrency")
        search = None
        if c_max is None:
            search = self._search()
            c_max = max(ULTRA_LOW_MAX + 1, int(search.found or 0))
        if not self._bench.interrupted:
            for concurrency in choose_points(c_max, c_min, self._settings.get("points")):
                self._measure(concurrency)
                if self._bench.interrupted:
                    break
        if self._config.audit and self._points and not self._bench.interrupted:
            self._bench.add_client_baseline(self._points)
        return self._report(compute_regions(c_max, c_min), search)

    def _search(self) -> SaturationReport:
        from tokenmill.bench.client.arrivals import ClientLoad

        console.note("--max-concurrency is not given: searching for it")
        seconds = self._seconds(1) if self._quick else SEARCH_S
        load = ClientLoad(concurrency=1, duration_s=seconds)
        report = search_saturation(self._bench, load, self._config)
        report.duration_s, report.doubts = seconds, self._bench.doubts_about_hits()
        return report

    def _seconds(self, concurrency: int) -> float:
        """How long a point takes at least."""
        if not self._quick:
            return min_duration_s(concurrency)
        return (self._config.duration_s or QUICK_S) * (1 if concurrency <= ULTRA_LOW_MAX else 2)

    def _measure(self, concurrency: int) -> None:
        from tokenmill.bench.client.arrivals import ClientLoad
        from tokenmill.bench.client.records import write_records
        from tokenmill.bench.client.summary import rounded
        from tokenmill.bench.mlperf.endpoints_submission import measured_point

        load = ClientLoad(
            concurrency=concurrency,
            duration_s=self._seconds(concurrency),
            pass_size=None if self._quick else self._pass_size,
        )
        point = self._bench.measure(load)
        run = self._bench.last_run
        for name, value in rounded(official_metrics(point)).items():
            setattr(point, name, value)
        self._points.append(point)
        if not run.interrupted:
            self._measured.append(measured_point(run, point))
        if self._bench.folder is not None:
            name = f"events/r{concurrency}.jsonl"
            self._bench.folder.write(lambda folder: write_records(folder / name, run.records))
        run.records.clear()  # the next point may have millions of its own

    def _reasons(self) -> list[str]:
        from tokenmill.bench.client.prefix_hits import hit_sentences

        reasons = [
            "measured by tokenmill's client: the rules ask for the reference client of "
            "mlcommons/endpoints, unmodified",
            "no accuracy results: the rules ask for them at four regions and the Offline point",
            "no steady-state window: the figures are of whole runs",
        ]
        if self._quick:
            reasons.insert(0, "--quick: every point is shorter than the rules allow")
        if self._is_synthetic:
            reasons.append("synthetic prompts, not the benchmark's dataset")
        if self._config.tokenizer is None:
            reasons.append("tokens are the server's usage: the rules count with a tokenizer")
        if self._config.same_prompts:
            reasons.append("--same-prompts: a server's prefix cache may know the prompts")
        if self._bench.interrupted:
            reasons.append("interrupted before the last point")
        return reasons + hit_sentences(self._points)

    def _report(self, regions: Regions, search: SaturationReport | None) -> EndpointReport:
        from msgspec.structs import replace

        curve = [
            (point.tps_per_user, point.system_tps)
            for point in self._points
            if point.tps_per_user and point.system_tps
        ]
        front = set(pareto_front(curve))
        for point in self._points:
            point.region = regions.region_of(point.concurrency or 0)
            point.on_front = (point.tps_per_user, point.system_tps) in front
        return replace(
            self._bench.report(self._points),
            benchmark="campaign",
            quick=self._quick,
            valid_submission=False,
            not_valid_because=self._reasons(),
            max_concurrency=regions.c_max,
            max_concurrency_source="given" if search is None else "saturation search",
            search=search,
            regions={name: list(bound) for name, bound in regions.bounds.items()},
            submission=None,
        )

    def write(self, report: EndpointReport) -> bool:
        """The submission and the result, where folders are given; False if no disk takes it."""
        from tokenmill.bench.report.endpoint_report import PAGE, write_result
        from tokenmill.bench.results.manifest import make_facts

        has_room = True
        try:
            if self._disclosure is not None and self._measured:
                report.submission = self._write_submission(report)
        except OSError as error:
            has_room = False
            console.fail(f"--submission-dir {self._submission_dir}: {error.strerror or error}")
        folder = self._bench.folder
        if folder is None:
            console.note("--output-dir DIR keeps a run: report.html, summary.json, CSV, events")
            return has_room
        configuration = report.config | report.settings
        facts = make_facts("campaign", configuration, self._bench.started_at)
        kept = folder.write(lambda path: write_result(path, report, None, facts))
        if kept:
            console.note(f"written: {folder.path / PAGE}, events beside it")
        return kept and has_room

    def _write_submission(self, report: EndpointReport) -> SubmissionReport:
        from tokenmill.bench.mlperf import endpoints_submission as files
        from tokenmill.bench.results.reports import SubmissionReport, as_json

        assert self._disclosure is not None
        c_max, c_min = report.max_concurrency, self._settings.get("min-concurrency")
        config = {
            "client": f"tokenmill {__version__}",
            "endpoint": self._bench.target.url,
            "model": self._bench.target.model,
            "api": self._bench.target.api,
            "request_fields": self._bench.target.fields,
            "samples_of_a_pass": self._pass_size,
            "whole_passes": not self._quick,
            "seeds_used": [] if self._is_synthetic else ["sample_index_rng_seed"],
            "prompts": as_json(report.prompts),
            **{key: value for key, value in asdict(self._config).items() if key in _RUN_AS},
        }
        common = files.CampaignFacts(
            self._disclosure,
            compute_regions(c_max, c_min),
            {point.concurrency: self._seconds(point.concurrency) for point in self._measured},
            config,
            report.not_valid_because,
        )
        root, names = files.write_submission(self._submission_dir, common, self._measured)
        console.note(f"written: {root}: check it with endpoints-submission-cli check-submission")
        return SubmissionReport(folder=str(root), num_files=len(names))


def _quick_word(report: EndpointReport) -> str:
    return ": a quick run" if report.quick else ""


def print_report(report: EndpointReport) -> None:
    """The table of the curve, what the client and the server say, and what is missing."""
    from tokenmill.bench.report.tables import curve_table

    points = report.points
    c_max, source = report.max_concurrency, report.max_concurrency_source
    found = "" if source == "given" else ", found by a search"
    title = f"{report.model} at {report.url}, C_max {c_max}{found}"
    console.out.print(title + ("; interrupted" if report.interrupted else ""), markup=False)
    console.out.print(endpoint.prompts_line(report.prompts), markup=False)
    if report.search is not None:
        print_saturation(report.search)
    if points:
        console.print_table(curve_table(points))
        endpoint.print_points(points)
    console.out.print(f"not a valid submission{_quick_word(report)}:", markup=False)
    for reason in report.not_valid_because:
        console.out.print(f"- {reason}", markup=False)


COMMANDS = (BenchCommand("campaign", campaign, PANELS),)

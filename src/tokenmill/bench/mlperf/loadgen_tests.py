"""Runs the LoadGen tests of `bench mlperf` and joins what they found.

Each has a process of its own, which sends its result over a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from tokenmill import console
from tokenmill.bench.mlperf import compliance, loadgen, submission
from tokenmill.bench.mlperf.language import EngineLanguage, UrlLanguage
from tokenmill.bench.mlperf.presets import COMPLIANCE_TESTS, REQUIRED_VIDEOS, TaskName
from tokenmill.bench.mlperf.ranking import EngineRanking, UrlRanking
from tokenmill.bench.mlperf.runs import (
    KEYS,
    MlperfRun,
    find_peak,
    invalid_reasons,
    latencies_of,
    metric,
)
from tokenmill.bench.mlperf.under_test import BenchmarkTask, GivenUp
from tokenmill.bench.mlperf.video import SCORED_BY, EngineVideo, UrlVideo
from tokenmill.bench.report import mlperf_report
from tokenmill.bench.results import manifest
from tokenmill.bench.results.mlperf_reports import (
    Fields,
    MetricReport,
    MlperfReport,
    PeakRun,
    fields_of,
)
from tokenmill.bench.workload import BenchError
from tokenmill.core.config import ModelConfig
from tokenmill.core.metrics import RequestTimes, summarize
from tokenmill.settings import Settings

MODES = {"submission": ("performance", "accuracy")}  # the others are themselves
SPAWN = multiprocessing.get_context("spawn")
Load = Callable[[Settings, MlperfRun, str, Path], BenchmarkTask]
TASKS: dict[TaskName, tuple[Load, Load]] = {  # for an engine of this process, and for a server
    "language": (EngineLanguage, UrlLanguage),
    "images": (EngineLanguage, UrlLanguage),
    "ranking": (EngineRanking, UrlRanking),
    "video": (EngineVideo, UrlVideo),
}


class LoadGenResult(msgspec.Struct, tag=True):
    """What a test gave; a compliance test has a verdict."""

    logs: str
    report: MlperfReport
    verdict: compliance.Verdict | None = None


class FailedTest(msgspec.Struct, tag=True):
    reason: str


Results = dict[str, LoadGenResult]  # by the test's name
_decode = msgspec.msgpack.Decoder(LoadGenResult | FailedTest).decode


def run_in_process(settings: Settings, run: MlperfRun, mode: str, folder: Path) -> LoadGenResult:
    """A test in a process of its own; its logs stay in `folder`."""
    folder.mkdir(parents=True)
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_serve, args=(theirs, settings, run, mode, folder))
    process.start()
    theirs.close()
    try:
        result: LoadGenResult | FailedTest = _decode(ours.recv_bytes())
    except EOFError:
        process.join()
        result = FailedTest(f"exit status {process.exitcode}")
    except BaseException:
        process.terminate()
        raise
    process.join()
    if isinstance(result, FailedTest):
        raise BenchError(f"the {mode} run failed: {result.reason}")
    return result


def _serve(pipe: Connection, settings: Settings, run: MlperfRun, mode: str, folder: Path) -> None:
    os.dup2(2, 1)  # stdout is the parent's, for its own report
    threading.Thread(target=_end_with_parent, daemon=True).start()
    result: LoadGenResult | FailedTest
    try:
        result = execute(settings, run, mode, folder)
    except KeyboardInterrupt:
        os._exit(1)
    except BaseException as error:
        result = FailedTest(str(error) or type(error).__name__)
    pipe.send_bytes(msgspec.msgpack.encode(result))
    if isinstance(result, FailedTest) or result.report.given_up:
        os._exit(1)  # LoadGen's threads wait for answers that never come


def _end_with_parent() -> None:
    """Nobody would read the report of a test of ten minutes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def execute(settings: Settings, run: MlperfRun, mode: str, folder: Path) -> LoadGenResult:
    """Run the test in this process; its logs are in `folder` afterwards."""
    task = _load(settings, run, mode, folder)
    try:
        loadgen.run_test(task.sut, task.num_samples, run, folder, mode)
    except GivenUp as error:
        fields = given_up_fields(run, str(error), task.sut.times)
        return LoadGenResult(str(folder), _report(run, mode, task, fields))
    mlperf_report.write_times(folder / mlperf_report.EVENTS, task.sut.times)
    failures, verdict = task.failures(), None
    if mode == "accuracy":
        fields = task.score(folder)
    elif mode in ("performance", "TEST04"):
        values, errors = loadgen.read_detail(folder)
        fields = performance_fields(run, values, errors, task.sut.times)
        fields |= task.figures(fields)
    else:
        verdict = task.verify(folder)
        why = "; ".join(verdict.text.splitlines())
        fields = {"reasons": [] if verdict.passed else [f"{mode} failed: {why}"]}
    fields["reasons"] = [*failures, *fields["reasons"]]
    return LoadGenResult(str(folder), _report(run, mode, task, fields), verdict)


def _load(settings: Settings, run: MlperfRun, mode: str, folder: Path) -> BenchmarkTask:
    if mode == "TEST07" and "compliance-dataset" in settings:
        settings = settings | {"dataset": settings.get("compliance-dataset")}
    for_engine, for_server = TASKS[run.preset.task]
    return (for_server if settings.get("url") else for_engine)(settings, run, mode, folder)


def _report(run: MlperfRun, mode: str, task: BenchmarkTask, fields: Fields) -> MlperfReport:
    return MlperfReport(
        mlperf_benchmark=run.preset.name,
        round=run.round,
        scenario=run.scenario,
        test_mode=mode,
        target_qps=run.target_qps,
        quick=run.quick,
        result="INVALID" if fields["reasons"] else "VALID",
        **task.facts(),
        **fields,
    )


def performance_fields(
    run: MlperfRun, values: Mapping[str, Any], errors: Sequence[str], times: Sequence[RequestTimes]
) -> Fields:
    """Figures of a performance run, from LoadGen's detail log.

    LoadGen has no token latencies in Offline; there they are the adapter's, from the issue.
    """
    found = {name: latencies_of(values, *keys) for name, keys in KEYS.items()}
    if run.preset.task in ("ranking", "video"):  # answers are no tokens
        found |= {"ttft": {}, "tpot": {}}
        num_tokens = 0
    else:
        if run.scenario == "Offline":
            found |= token_latencies(times)
        num_tokens = sum(t.num_tokens for t in times)
    return {
        "reasons": invalid_reasons(run, values, errors, found),
        "metric": MetricReport(*metric(run, values)),
        "num_queries": len(times),
        "num_output_tokens": num_tokens,
        "samples_per_s": values.get("result_completed_samples_per_sec")
        or values.get("result_samples_per_second")
        or values.get("result_qps_without_loadgen_overhead"),
        **{f"{name}_ms": latencies for name, latencies in found.items()},
        "limits_ms": run.preset.limits_ms(run.scenario),
        "percentile": run.percentile,
        "min_duration_s": run.min_duration_ms / 1000,
    }


def given_up_fields(run: MlperfRun, why: str, times: Sequence[RequestTimes]) -> Fields:
    """What is known of a test that was left before its end: LoadGen has given no figures."""
    return {
        "reasons": [why],
        "given_up": True,
        "metric": None,
        "num_queries": len(times),
        "num_output_tokens": sum(t.num_tokens for t in times),
        **{f"{name}_ms": latencies for name, latencies in token_latencies(times).items()},
        "percentile": run.percentile,
    }


def token_latencies(times: Sequence[RequestTimes]) -> dict[str, dict[str, float]]:
    return {
        "ttft": summarize((t.ttft_ms for t in times), 3),
        "tpot": summarize((t.tpot_ms for t in times), 3),
    }


def run_tests(settings: Settings, run: MlperfRun, scratch: Path) -> Results:
    """The tests of the mode in turn; one that was given up is the last."""
    if settings.get("find-peak"):
        return {"performance": _peak(settings, run, scratch)}
    mode = settings.get("test-mode")
    results: Results = {}
    names = MODES.get(mode, (mode,))
    if settings.get("compliance"):
        names = (*names, *(name for name in run.preset.compliance if name not in names))
    for name in names:
        results[name] = _test(settings, run, name, scratch / name)
        if results[name].report.given_up:
            break
    if "TEST04" in results:
        _compare_same_sample(run, results["performance"].report, results["TEST04"])
    return results


def _test(settings: Settings, run: MlperfRun, name: str, folder: Path) -> LoadGenResult:
    console.note(f"MLPerf {name} run at {run.target_qps:g} queries/s")
    return run_in_process(settings, run, name, folder)


def _compare_same_sample(run: MlperfRun, measured: MlperfReport, same: LoadGenResult) -> None:
    """The verdict of TEST04 beside the performance run."""
    rates = [1 / report.s_per_video for report in (measured, same.report) if report.s_per_video]
    same.verdict = compliance.verify_same_sample(run.scenario, *rates)
    if not same.verdict.passed:
        same.report.reasons.append("TEST04 failed: one sample again and again is faster")


def _peak(settings: Settings, run: MlperfRun, scratch: Path) -> LoadGenResult:
    """The result of the highest valid rate, or of the last one where none is."""
    tried: list[LoadGenResult] = []

    def is_valid(target_qps: float) -> bool:
        at_rate = replace(run, target_qps=target_qps)
        tried.append(_test(settings, at_rate, "performance", scratch / f"run_{len(tried)}"))
        report = tried[-1].report
        why = "; ".join([report.result, *report.reasons])
        console.note(f"{target_qps:g} queries/s: {why}")
        if report.given_up:
            raise BenchError(report.reasons[0])
        return report.result == "VALID"

    peak = find_peak(is_valid, run.target_qps)
    best = next((r for r in tried if r.report.target_qps == peak), tried[-1])
    reports = [result.report for result in tried]
    best.report.peak_qps = peak
    best.report.runs = [PeakRun(r.target_qps, r.result, r.reasons) for r in reports]
    return best


def joined(mode: str, results: Results) -> MlperfReport:
    """One report: the performance run, the scores beside it, and the compliance tests."""
    verdicts = {name: results[name].verdict for name in results if name in COMPLIANCE_TESTS}
    measured = [result for name, result in results.items() if name not in verdicts]
    fields: dict[str, Any] = {}
    for result in measured or results.values():
        fields |= fields_of(result.report)
    if verdicts:
        fields["compliance"] = {n: v.passed for n, v in verdicts.items() if v is not None}
    reasons = [reason for result in results.values() for reason in result.report.reasons]
    fields |= {"reasons": reasons, "result": "INVALID" if reasons else "VALID"}
    return MlperfReport(**fields | {"test_mode": mode})


@dataclass(frozen=True, slots=True)
class RunSeries:
    """What the files of a submission are made of; `command` and `configuration` go into them."""

    settings: Settings
    run: MlperfRun
    report: MlperfReport
    results: Results
    started_at: str
    command: str
    configuration: dict[str, Any]


def keep(series: RunSeries, scratch: Path) -> bool:
    """Write the submission; where its disk does not take it, keep LoadGen's logs where they are."""
    try:
        write_submission(series)
    except OSError as error:
        folder = series.settings.get("submission-dir")
        console.fail(f"--submission-dir {folder}: {error.strerror or error}")
        logs = scratch.rename(scratch.with_name(f"{scratch.name}-kept"))
        console.note(f"LoadGen's logs stay in {logs}")
        return False
    return True


def write_submission(series: RunSeries) -> None:
    """The result folder, as a submission has it; SingleStream's is like the others."""
    settings, run, report = series.settings, series.run, series.report
    layout = submission.SubmissionLayout(
        root=Path(settings.get("submission-dir")),
        division=settings.get("division"),
        submitter=settings.get("submitter"),
        system=settings.get("system-name"),
        benchmark=run.preset.folder or run.preset.name,
        scenario=run.scenario,
    )
    first = Path(next(iter(series.results.values())).logs)
    known = {}
    if not settings.get("url"):
        known = submission.describe_machine() | (report.accelerator or {})
    empty, kept = submission.write_system(layout, known)
    _write_measurements(layout, series, first)
    submission.write_texts(layout, report.notices, series.command)
    for name, result in series.results.items():
        logs = Path(result.logs)
        if result.verdict is not None:
            compliance.write_result(layout, name, logs, result.verdict.text)
        elif name == "performance":
            submission.copy_logs(logs, layout.performance)
        else:
            _write_accuracy(layout, run, report, logs)
    facts = manifest.make_facts("mlperf", series.configuration, series.started_at)
    folder = layout.scenario_folder
    mlperf_report.write_result(folder, report, first, facts)
    console.note(f"Written: {folder / mlperf_report.PAGE}, LoadGen's logs beside it")
    for name, ours in kept.items():
        console.note(f"{layout.system_file} keeps its {name}; this machine says {ours!r}")
    if empty:
        console.note(f"Fill in these fields of {layout.system_file}: {', '.join(empty)}")
    missing = [name for name in run.preset.compliance if name not in series.results]
    if layout.division == "closed" and missing and not run.quick:
        console.note(f"A closed submission also needs {', '.join(missing)}: add --compliance")


def _write_measurements(layout: submission.SubmissionLayout, series: RunSeries, logs: Path) -> None:
    settings, report = series.settings, series.report
    named = settings.get("url") or series.run.preset.task == "video"
    weights = report.model if named else settings.build(ModelConfig).model
    plain = report.dtype in ("fp32", "bf16")
    change = f"cast to {report.dtype}" if plain else f"quantized to {report.dtype}"
    if settings.get("url"):
        change = "as served"
    conf = (logs / loadgen.USER_CONF).read_text(encoding="utf-8")
    submission.write_measurements(layout, conf, weights, report.dtype, change, report.notices)


def _write_accuracy(
    layout: submission.SubmissionLayout, run: MlperfRun, report: MlperfReport, logs: Path
) -> None:
    scores = report.accuracy or {}
    submission.copy_accuracy(layout, logs, scores)
    if scores.get("num_unscored"):
        console.note(f"The full log of answers: {submission.copy_answers(layout, logs)}")
    if run.preset.task == "video":
        shown = () if run.quick else REQUIRED_VIDEOS[run.round]
        videos = submission.move_videos(layout, logs / submission.VIDEOS, shown)
        console.note(f"Score the videos by {SCORED_BY} {videos}")


def print_report(report: MlperfReport) -> None:
    say = console.out.print
    say(f"{report.headline}: {report.verdict}", style="bold", markup=False)
    for reason in report.reasons:
        say(f"  {reason}", markup=False)
    _print_figures(report)
    for name, gate in (report.accuracy_gates or {}).items():
        say(f"{name}: {gate.value:,.4f}, required {gate.required}")
    scores = {} if report.accuracy_gates else report.accuracy or {}
    for name in ("ne", "accuracy", "gauc"):
        if name in scores:
            value = scores[name]
            say(f"{name}: {'not defined' if value is None else f'{value:,.4f}'}")
    for name, passed in (report.compliance or {}).items():
        say(f"{name}: {'passed' if passed else 'failed'}")
    for notice in report.notices:
        say(notice, markup=False)


def _print_figures(report: MlperfReport) -> None:
    """The scenario's metric, the peak of a search, the price of a video, and the latencies."""
    say, limits = console.out.print, report.limits
    if metric := report.metric:
        digits = 2 if metric.unit != "samples/s" else 4
        say(f"{metric.name}: {metric.value:,.{digits}f} {metric.unit}")
    if report.runs is not None:
        say(f"highest valid rate: {report.peak_qps or 'none'} queries/s")
    if report.s_per_video is not None:
        price = f"${report.usd_per_video:,.4f} at ${report.usd_per_hour:g} an hour"
        say(f"{report.s_per_video:,.2f} s a video, {price} (--gpu-price)")
    for name, figures in report.latencies.items():
        if name != "latency" or name in limits:
            shown = ", ".join(f"{k} {v:,.1f}" for k, v in figures.items())
            limit = f"; limit at p{report.percentile} {limits[name]}" if limits else ""
            say(f"{name.upper()} ms: {shown}{limit}")

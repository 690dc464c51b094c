"""tokenmill bench mlperf."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenmill import console
from tokenmill.bench.child_process import run_benchmark
from tokenmill.bench.commands import BenchCommand, endpoint, throughput
from tokenmill.bench.endpoint_load import make_target
from tokenmill.bench.mlperf import accuracy as scoring
from tokenmill.bench.mlperf import compliance, loadgen, ranking_test, submission, video_test
from tokenmill.bench.mlperf import runs as bench
from tokenmill.bench.mlperf import test_process as mlperf_child
from tokenmill.bench.mlperf.presets import (
    DLRM_V3,
    PRESETS,
    QWEN3_VL,
    REQUIRED_VIDEOS,
    ROUNDS,
    WAN,
    Preset,
)
from tokenmill.bench.report import mlperf_report
from tokenmill.bench.results import manifest
from tokenmill.bench.results.mlperf_reports import MlperfReport, required
from tokenmill.bench.workload import BenchError
from tokenmill.core.bench_config import EndpointConfig
from tokenmill.core.config import ModelConfig
from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MODEL,
    SCHEDULER,
    SETTINGS,
    Setting,
    Settings,
    SettingsError,
)
from tokenmill.settings.commands import MLPERF

CHILD = "mlperf-test"
SERVER = (
    endpoint.here(
        "url",
        "An OpenAI-compatible server as the system under test; for dlrm-v3 `serve --task rank`, "
        "for wan-2.2 `serve --task video`.",
    ),
    endpoint.here("api-key", "Key to send."),
    endpoint.here("api", "Route to call (completions); chat gets texts, not token ids."),
    endpoint.here("tokenizer", "Model whose tokenizer the server has: datasets go as token ids."),
    endpoint.here(
        "ignore-eos",
        "Ask for answers of full length (on; some servers lack it).",
    ),
    SETTINGS["timeout"],
    SETTINGS["insecure"],
    SETTINGS["extra-body"],
    SETTINGS["max-in-flight"],
)
PANELS = {
    "MLPerf": (*(s for s in MLPERF if s.key != "max-in-flight"), SETTINGS["json-only"]),
    "Server (--url)": SERVER,
    "Model": MODEL,
    "KV cache": tuple(s for s in CACHE if s.key != "prefix-cache"),  # the rules forbid it
    "Scheduler": SCHEDULER,
    "Execution": EXECUTION,
    "Ranking (--benchmark dlrm-v3)": ranking_test.PANEL,
    "Video (--benchmark wan-2.2-t2v-a14b)": video_test.PANEL,
}
OFFERED = tuple(setting for group in PANELS.values() for setting in group)
SHOWN = tuple(setting for setting in OFFERED if setting.key != "api-key")  # a key is no argument
REMOTE = ("model", "max-model-len")  # what of an engine's settings a server has too
MODES = {"submission": ("performance", "accuracy")}  # the others are themselves

Reports = dict[str, MlperfReport]  # by the test's name


def mlperf(settings: Settings) -> None:
    """Run an MLPerf Inference scenario with the official LoadGen.

    The system under test is an engine of this package, or with --url any
    OpenAI-compatible server. Samples are synthesised to the benchmark's
    published lengths unless --dataset gives its own. Without --quick the
    rules' minimums hold: ten minutes and the whole dataset. Every test runs in
    a process of its own.

    tokenmill bench mlperf --quick --length-scale 0.1
    tokenmill bench mlperf --scenario Server --target-qps 4 --quick
    tokenmill bench mlperf --scenario Server --target-qps 4 --url http://127.0.0.1:8000/v1
    tokenmill bench mlperf --scenario Interactive --find-peak --quick
    tokenmill bench mlperf --benchmark dlrm-v3 --quick --model demo/model
    --dataset demo/requests.jsonl
    tokenmill bench mlperf --benchmark wan-2.2-t2v-a14b --scenario SingleStream --quick
    tokenmill bench mlperf --benchmark wan-2.2-t2v-a14b --url http://127.0.0.1:8000/v1
    tokenmill bench mlperf --dataset cnn_eval.json --test-mode submission --compliance
    --model meta-llama/Llama-3.1-8B-Instruct --submission-dir results
    """
    run, started_at = run_of(settings), manifest.utc_now()
    loadgen.load_library()
    if settings.get("test-mode") == "TEST04":
        raise SettingsError("TEST04 compares two runs: use --test-mode performance --compliance")
    values = settings.values | {"json-only": True}
    if run.preset.name != WAN.name:  # its default depends on the device, which the test sees
        values["model"] = _model(settings)
    with tempfile.TemporaryDirectory(prefix="mlperf-") as scratch:
        if settings.get("find-peak"):
            reports = {"performance": _peak(run, values, Path(scratch))}
        else:
            reports = _tests(settings, run, values, Path(scratch))
        if "submission-dir" in settings:
            if not _given_up(reports):
                write_submission(settings, run, reports, started_at)
        elif run.preset.name != DLRM_V3.name:
            console.note("--submission-dir DIR keeps a run: LoadGen's logs and report.html")
    report = _joined(settings, run, reports)
    if not settings.get("json-only"):
        _print(report)
    console.print_json(report)
    if _given_up(reports):
        raise BenchError(report["reasons"][0])


def _model(settings: Settings) -> str:
    """The model's path, or the name that the server knows it by."""
    if settings.get("benchmark") == DLRM_V3.name:
        return str(settings.values.get("model", ""))
    if not settings.get("url"):
        return str(throughput.model_path(settings.build(ModelConfig)))
    config = settings.build(EndpointConfig, api="completions")
    return make_target(settings, config).model


def _tests(settings: Settings, run: bench.Run, values: dict[str, Any], scratch: Path) -> Reports:
    """The tests of the mode in turn; one that was given up is the last."""
    mode = settings.get("test-mode")
    reports: Reports = {}
    names = MODES.get(mode, (mode,))
    if settings.get("compliance"):
        names = (*names, *(name for name in run.preset.compliance if name not in names))
    for name in names:
        given = values
        if name == "TEST07":
            given = values | {"dataset": settings.get("compliance-dataset")}
        reports[name] = _test(given, name, run.target_qps, scratch / name)
        if _given_up(reports):
            break
    if "TEST04" in reports:
        reports["TEST04"] |= _same_sample(run, reports["performance"], reports["TEST04"])
    return reports


def _same_sample(run: bench.Run, measured: MlperfReport, same: MlperfReport) -> MlperfReport:
    """The verdict of TEST04 beside the performance run."""
    reference, score = (1 / report["s_per_video"] for report in (measured, same))
    verdict = compliance.verify_same_sample(run.scenario, reference, score)
    reasons = [] if verdict.passed else ["TEST04 failed: one sample again and again is faster"]
    return {
        "passed": verdict.passed,
        "verified": verdict.text,
        "reasons": [*same["reasons"], *reasons],
    }


def _given_up(reports: Reports) -> bool:
    return any(report.get("given_up") for report in reports.values())


def run_of(settings: Settings) -> bench.Run:
    """The run that the settings ask for; what does not go together is refused."""
    quick, scenario = settings.get("quick"), settings.get("scenario")
    for key in ("quick-samples", "length-scale"):
        if key in settings and not quick:
            raise SettingsError(f"--{key} shapes a quick run: add --quick")
    if "length-scale" in settings and "dataset" in settings:
        raise SettingsError(
            "--length-scale is for synthetic samples and does not go with --dataset"
        )
    mode = settings.get("test-mode")
    if mode in ("accuracy", "submission") and "dataset" not in settings:
        raise SettingsError(f"--test-mode {mode} needs --dataset")
    _check_benchmark(settings)
    _check_speculative(settings)
    _check_compliance(settings)
    _check_server(settings)
    _check_images(settings)
    if settings.get("find-peak"):
        if scenario not in bench.LATENCY_BOUND:
            raise SettingsError(
                "--find-peak needs --scenario Server or Interactive: the others have no rate to "
                "search, Offline measures the highest one itself"
            )
        if settings.get("test-mode") != "performance":
            raise SettingsError("--find-peak goes with --test-mode performance only")
    preset = _preset(settings)
    return bench.Run(
        preset,
        scenario,
        settings.values.get("target-qps") or preset.target_qps or settings.get("target-qps"),
        settings.get("quick-samples") if quick else None,
        settings.get("length-scale"),
        settings.get("round"),
    )


def _check_benchmark(settings: Settings) -> None:
    """Settings of one benchmark go with it alone."""
    own: dict[str, tuple[Any, tuple[Setting, ...]]] = {
        DLRM_V3.name: (ranking_test.check_settings, ranking_test.PANEL),
        WAN.name: (video_test.check_settings, video_test.PANEL),
    }
    benchmark = settings.get("benchmark")
    for name, (check, panel) in own.items():
        given = [setting.key for setting in panel if setting.key in settings]
        if benchmark == name:
            check(settings)
        elif given:
            raise SettingsError(f"--{given[0]} goes with --benchmark {name}")


def _preset(settings: Settings) -> Preset:
    """The benchmark by the rules of --round."""
    try:
        known = {**PRESETS, **{preset.name: preset for preset in (DLRM_V3, QWEN3_VL, WAN)}}
        return known[settings.get("benchmark")].of_round(settings.get("round"))
    except ValueError as error:
        raise SettingsError(f"--benchmark with --round: {error}") from None


def _check_speculative(settings: Settings) -> None:
    """Drafts may be submitted in few scenarios; the open division may try them anywhere."""
    benchmark, scenario = settings.get("benchmark"), settings.get("scenario")
    allowed = ROUNDS[settings.get("round")].speculative
    closed = settings.get("division") == "closed"
    if closed and settings.get("mtp") and (benchmark, scenario) not in allowed:
        names = " and ".join(f"{name} {where}" for name, where in sorted(allowed))
        raise SettingsError(
            f"--mtp: {settings.get('round')} allows speculative decoding in the closed division "
            f"for {names} only, not for {benchmark} {scenario}; leave it out or use --division open"
        )


def _check_compliance(settings: Settings) -> None:
    """A test that the benchmark does not have, or that lacks what it checks, is refused."""
    preset, mode = _preset(settings), settings.get("test-mode")
    asked = set(preset.compliance) if settings.get("compliance") else set()
    if mode in compliance.NAMES:
        if mode not in preset.compliance:
            known = ", ".join(preset.compliance) or "no compliance tests here"
            raise SettingsError(
                f"--test-mode {mode} is not a test of {preset.name}: it has {known}"
            )
        asked.add(mode)
    if settings.get("compliance") and not preset.compliance:
        raise SettingsError(f"--compliance: {preset.name} has no compliance tests here")
    if asked - {"TEST04"} and settings.get("url"):
        raise SettingsError(
            "compliance tests compare token ids, which a server's answers do not carry: run them "
            "without --url"
        )
    if asked and settings.get("find-peak"):
        raise SettingsError("--compliance does not go with --find-peak: run it at the rate found")
    given = "compliance-dataset" in settings
    if "TEST07" in asked and not given and not (mode == "TEST07" and "dataset" in settings):
        raise SettingsError(f"TEST07 of {preset.name} needs --compliance-dataset")
    if given and "TEST07" not in asked:
        raise SettingsError("--compliance-dataset goes with --compliance or --test-mode TEST07")


def _check_images(settings: Settings) -> None:
    """Where samples have images, an engine of this process answers them, in some scenarios."""
    preset, scenario = _preset(settings), settings.get("scenario")
    if preset.images and scenario not in ("Offline", "Server"):
        problem = f"has no {scenario} scenario here; use Offline or Server"
        raise SettingsError(f"--scenario {scenario}: {preset.name} {problem}")
    if preset.images and settings.get("url"):
        problem = "runs on an engine of this process; bench endpoint --images measures a server"
        raise SettingsError(f"--url: {preset.name} {problem}")


def _check_server(settings: Settings) -> None:
    """A server has its engine's settings already; an engine has no use for a server's."""
    if settings.get("url"):
        groups: tuple[tuple[Setting, ...], ...] = (MODEL, CACHE, SCHEDULER, EXECUTION)
        for key in (s.key for group in groups for s in group if s.key not in REMOTE):
            if key in settings:
                raise SettingsError(f"--{key} is for an engine of this process, not for --url")
        return
    for setting in SERVER:
        if setting.key in settings and setting.key != "api-key":  # may be in the environment
            raise SettingsError(f"--{setting.key} goes with --url")


def _test(values: dict[str, Any], mode: str, target_qps: float, folder: Path) -> MlperfReport:
    """One test in a process of its own; its logs stay in `folder`."""
    folder.mkdir(parents=True)
    changed = {"test-mode": mode, "target-qps": target_qps, "submission-dir": str(folder)}
    flags = Settings(values | changed).flags(SHOWN)
    given = values.get("api-key")
    keys = {SETTINGS["api-key"].variable: ",".join(given)} if given else {}
    console.note(f"MLPerf {mode} run at {target_qps:g} queries/s")
    command = [sys.executable, "-P", "-m", "tokenmill", "bench", CHILD, *flags]
    report: MlperfReport
    report, error = run_benchmark(command, keys)
    if error:
        raise BenchError(f"the {mode} run failed: {error}")
    report["logs"] = str(folder)
    return report


def _peak(run: bench.Run, values: dict[str, Any], scratch: Path) -> MlperfReport:
    """The report of the highest valid rate, or of the last one where none is."""
    tried: list[MlperfReport] = []

    def is_valid(target_qps: float) -> bool:
        folder = scratch / f"run_{len(tried)}"
        report = _test(values, "performance", target_qps, folder)
        report["target_qps"] = target_qps
        tried.append(report)
        why = "; ".join([report["result"], *report["reasons"]])
        console.note(f"{target_qps:g} queries/s: {why}")
        if report.get("given_up"):
            raise BenchError(report["reasons"][0])
        return report["result"] == "VALID"

    peak = bench.find_peak(is_valid, run.target_qps)
    best = next((r for r in tried if r["target_qps"] == peak), tried[-1])
    best["peak_qps"] = peak
    best["runs"] = [
        {"target_qps": r["target_qps"], "result": r["result"], "reasons": r["reasons"]}
        for r in tried
    ]
    return best


def run_child(settings: Settings) -> None:
    """One test of LoadGen in this process; logs go to --submission-dir."""
    mlperf_child.watch_parent()
    try:
        run = run_of(settings)
        tests = {DLRM_V3.name: ranking_test.child_report, WAN.name: video_test.child_report}
        if settings.get("url"):
            from tokenmill.bench.mlperf.video_url import server_report

            tests[WAN.name] = server_report
        report = tests.get(run.preset.name, mlperf_child.child_report)(settings, run)
    except BaseException as error:
        # LoadGen's threads wait for answers that never come: the interpreter cannot shut down.
        if not isinstance(error, KeyboardInterrupt):
            console.fail(str(error) or type(error).__name__)
        sys.stderr.flush()
        os._exit(1)
    if report.get("given_up"):
        mlperf_child.leave(report)
    console.print_json(report)


def _joined(settings: Settings, run: bench.Run, reports: Reports) -> MlperfReport:
    """One object: what was asked for, the performance run, and the scores beside it."""
    tests = {name: report for name, report in reports.items() if name in compliance.NAMES}
    measured = [report for name, report in reports.items() if name not in tests]
    joined: MlperfReport = {
        "benchmark": "mlperf",
        "mlperf_benchmark": run.preset.name,
        "round": run.round,
        "scenario": run.scenario,
        "test_mode": settings.get("test-mode"),
        "target_qps": run.target_qps,
    }
    for report in measured or tests.values():
        joined |= report
    if tests:
        joined["compliance"] = {name: report["passed"] for name, report in tests.items()}
    reasons = _reasons(reports)
    joined["reasons"], joined["result"] = reasons, "INVALID" if reasons else "VALID"
    joined.pop("logs", None)
    joined.pop("passed", None)
    joined.pop("verified", None)
    return joined


def _reasons(reports: Reports) -> list[str]:
    """Why a run is INVALID, test by test."""
    found: list[str] = []
    for report in reports.values():
        found += report.get("reasons", [])
        if "accuracy" in report:
            num_unscored = report["accuracy"].get("num_unscored")
            found += scoring.missed_gates(report["accuracy_gates"], num_unscored)
    return found


def write_submission(settings: Settings, run: bench.Run, reports: Reports, started_at: str) -> None:
    """The result folder, as a submission has it; SingleStream's is like the others."""
    layout = submission.Layout(
        root=Path(settings.get("submission-dir")),
        division=settings.get("division"),
        submitter=settings.get("submitter"),
        system=settings.get("system-name"),
        benchmark=run.preset.folder or run.preset.name,
        scenario=run.scenario,
    )
    report = next(iter(reports.values()))
    known = {} if settings.get("url") else submission.describe_machine() | report["accelerator"]
    empty, kept = submission.write_system(layout, known)
    conf = (Path(report["logs"]) / bench.USER_CONF).read_text(encoding="utf-8")
    named = settings.get("url") or run.preset.name == WAN.name
    weights = report["model"] if named else settings.build(ModelConfig).model
    plain = report["dtype"] in ("fp32", "bf16")
    change = f"cast to {report['dtype']}" if plain else f"quantized to {report['dtype']}"
    if settings.get("url"):
        change = "as served"
    notices = report["notices"]
    submission.write_measurements(layout, conf, weights, report["dtype"], change, notices)
    command = ["tokenmill", "bench", "mlperf", *settings.flags(SHOWN)]
    submission.write_texts(layout, notices, shlex.join(command))
    if "performance" in reports:
        submission.copy_performance(layout, Path(reports["performance"]["logs"]))
    if "accuracy" in reports:
        scores, logs = reports["accuracy"]["accuracy"], Path(reports["accuracy"]["logs"])
        submission.copy_accuracy(layout, logs, scores)
        if scores.get("num_unscored"):
            console.note(f"The full log of answers: {submission.copy_answers(layout, logs)}")
        if not run.preset.tokens:
            videos = submission.move_videos(layout, logs / submission.VIDEOS, _shown_videos(run))
            console.note(f"Score the videos by {video_test.SCORED_BY} {videos}")
    for name in compliance.NAMES:
        if name in reports:
            logs, text = Path(reports[name]["logs"]), reports[name]["verified"]
            compliance.write_result(layout, name, logs, text)
    facts = manifest.make_facts("mlperf", _configuration(settings, report), started_at)
    joined, folder = _joined(settings, run, reports), layout.scenario_folder
    mlperf_report.write_result(folder, joined, Path(report["logs"]), facts)
    console.note(f"Written: {folder / mlperf_report.PAGE}, LoadGen's logs beside it")
    for name, ours in kept.items():
        console.note(f"{layout.system_file} keeps its {name}; this machine says {ours!r}")
    if empty:
        console.note(f"Fill in these fields of {layout.system_file}: {', '.join(empty)}")
    missing = [name for name in run.preset.compliance if name not in reports]
    if layout.division == "closed" and missing and not run.quick:
        console.note(f"A closed submission also needs {', '.join(missing)}: add --compliance")


def _shown_videos(run: bench.Run) -> tuple[int, ...]:
    """Samples whose videos are part of the submission."""
    return () if run.quick else REQUIRED_VIDEOS[run.round]


def _configuration(settings: Settings, report: MlperfReport) -> dict[str, Any]:
    """The settings that the run had; those of an engine say nothing of a server, and vice versa."""
    if not settings.get("url"):
        return {s.key: settings.get(s.key) for s in OFFERED if s not in SERVER}
    kept = (*PANELS["MLPerf"], *SERVER, *(SETTINGS[key] for key in REMOTE))
    given = {setting.key: settings.get(setting.key) for setting in kept}
    return given | {"model": report["model"], "api": report["api"]}


def _print(report: MlperfReport) -> None:
    title = f"MLPerf {report['mlperf_benchmark']}, {report['scenario']}: {report['result']}"
    console.out.print(f"[bold]{title}[/bold]")
    for reason in report["reasons"]:
        console.out.print(f"  {reason}", markup=False)
    _print_figures(report)
    limits = report.get("limits_ms") or {}
    measured = {"ttft": report.get("ttft_ms"), "tpot": report.get("tpot_ms")}
    if "latency" in limits:
        measured["latency"] = report.get("latency_ms")
    for name, figures in measured.items():
        if figures:
            shown = ", ".join(f"{k} {v:,.1f}" for k, v in figures.items())
            limit = f"; limit at p{report['percentile']} {limits[name]}" if limits else ""
            console.out.print(f"{name.upper()} ms: {shown}{limit}")
    for name, gate in report.get("accuracy_gates", {}).items():
        console.out.print(f"{name}: {gate['value']:,.4f}, required {required(gate)}")
    for name in () if report.get("accuracy_gates") else ("ne", "accuracy", "gauc"):
        if name in report.get("accuracy", {}):
            value = report["accuracy"][name]
            console.out.print(f"{name}: {'not defined' if value is None else f'{value:,.4f}'}")
    for name, passed in report.get("compliance", {}).items():
        console.out.print(f"{name}: {'passed' if passed else 'failed'}")
    for notice in report["notices"]:
        console.out.print(notice, markup=False)


def _print_figures(report: MlperfReport) -> None:
    """The scenario's metric, the peak of a search, the price of a video."""
    if metric := report.get("metric"):
        digits = 2 if metric["unit"] != "samples/s" else 4
        console.out.print(f"{metric['name']}: {metric['value']:,.{digits}f} {metric['unit']}")
    if "peak_qps" in report:
        console.out.print(f"highest valid rate: {report['peak_qps'] or 'none'} queries/s")
    if "s_per_video" in report:
        price = f"${report['usd_per_video']:,.4f} at ${report['usd_per_hour']:g} an hour"
        console.out.print(f"{report['s_per_video']:,.2f} s a video, {price} (--gpu-price)")


COMMANDS = (
    BenchCommand("mlperf", mlperf, PANELS),
    BenchCommand(CHILD, run_child, PANELS, hidden=True),
)

"""tokenmill bench mlperf."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.bench.commands import BenchCommand, throughput
from tokenmill.bench.endpoint_load import make_target
from tokenmill.bench.mlperf.presets import (
    BENCHMARKS,
    COMPLIANCE_TESTS,
    INEXACT_VIDEOS,
    ROUNDS,
    Preset,
    TaskName,
)
from tokenmill.bench.mlperf.runs import LATENCY_BOUND, SCENARIOS, MlperfRun
from tokenmill.bench.options import EndpointConfig, GpuPrice, MlperfOptions, MlperfServer
from tokenmill.bench.workload import BenchError
from tokenmill.core.config import ModelConfig
from tokenmill.core.video import VideoParams
from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MODEL,
    SCHEDULER,
    VIDEO_PARALLEL,
    Panel,
    Setting,
    Settings,
    SettingsError,
    by_key,
    only,
    settings_in,
    settings_of,
    without,
)
from tokenmill.settings.shared import JsonOption, RankBatches, RankTables, VideoModel

if TYPE_CHECKING:
    from tokenmill.bench.results.mlperf_reports import MlperfReport

SERVER = settings_of(MlperfServer)
VIDEO_SHAPE = ("size", "frames", "steps")  # what a quick run may have smaller
VIDEO_ENGINE = (*INEXACT_VIDEOS, "attention-dtype", "offload", *(s.key for s in VIDEO_PARALLEL))
OF_VIDEO = (*VIDEO_SHAPE, "latent", *INEXACT_VIDEOS, "attention-dtype", "offload", "gpu-price")
OWN: dict[TaskName, tuple[Setting, ...]] = {  # settings of one task alone
    "ranking": settings_in((RankBatches, RankTables)),
    "video": (*only((VideoParams, VideoModel, GpuPrice), *OF_VIDEO), *VIDEO_PARALLEL),
}
PANELS: dict[str, Panel] = {
    "MLPerf": (MlperfOptions, JsonOption),
    "Server (--url)": SERVER,
    "Model": MODEL,
    "KV cache": without(CACHE, "prefix-cache"),  # the rules forbid it
    "Scheduler": SCHEDULER,
    "Execution": EXECUTION,
    "Ranking (--benchmark dlrm-v3)": OWN["ranking"],
    "Video (--benchmark wan-2.2-t2v-a14b)": OWN["video"],
}
OFFERED = tuple(by_key(*PANELS.values()).values())
SHOWN = without(OFFERED, "api-key")  # a key is no argument
ENGINE = tuple(by_key(MODEL, CACHE, SCHEDULER, EXECUTION))
REMOTE = ("model", "max-model-len")  # what of an engine's settings a server has too
NO_AUDIT = "its audit, TEST08, needs the queries of MLCommons' dataset in the order of their time"
NO_FOLDER = "a submission needs TEST08, which is not there"


@dataclass(frozen=True, slots=True)
class TaskRules:
    """What a task has of the settings; None: all."""

    scenarios: tuple[str, ...] = SCENARIOS
    modes: tuple[str, ...] | None = None
    why_modes: str = ""
    engine: tuple[str, ...] | None = None  # what it takes of the settings of a language engine
    of_engine: tuple[str, ...] = ()  # its own settings that say nothing of a server
    refused: Mapping[str, str] = field(default_factory=dict)  # settings, and why


RULES: dict[TaskName, TaskRules] = {
    "language": TaskRules(),
    "images": TaskRules(
        scenarios=("Offline", "Server"),
        refused={
            "url": "it runs on an engine of this process; bench endpoint --images measures a server"
        },
    ),
    "ranking": TaskRules(
        scenarios=("Offline", "Server"),
        modes=("performance", "accuracy"),
        why_modes=NO_FOLDER,
        engine=("model", "dtype", "device", "random-weights"),
        of_engine=tuple(setting.key for setting in OWN["ranking"]),
        refused={
            "compliance": NO_AUDIT,
            "compliance-dataset": NO_AUDIT,
            "submission-dir": NO_FOLDER,
        },
    ),
    "video": TaskRules(
        scenarios=("Offline", "SingleStream"),
        modes=("performance", "accuracy", "submission", "TEST04"),
        engine=tuple(setting.key for setting in settings_of(VideoModel)),
        of_engine=VIDEO_ENGINE,
        refused=dict.fromkeys(
            ("length-scale", "compliance-dataset", "api", "tokenizer", "ignore-eos", "extra-body"),
            "its samples are prompts of videos",
        ),
    ),
}


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
    run = run_of(settings)
    if settings.get("test-mode") == "TEST04":
        raise SettingsError("TEST04 compares two runs: use --test-mode performance --compliance")
    from tokenmill.bench.mlperf import loadgen_tests as tests
    from tokenmill.bench.mlperf.loadgen import load_library
    from tokenmill.bench.results.manifest import utc_now
    from tokenmill.bench.results.reports import as_json

    load_library()
    resolved, kept, started_at = settings, True, utc_now()
    if run.preset.task != "video":  # its default depends on the device, which the test sees
        resolved = settings | {"model": _model(settings, run.preset.task)}
    with tempfile.TemporaryDirectory(prefix="mlperf-", ignore_cleanup_errors=True) as scratch:
        results = tests.run_tests(resolved, run, Path(scratch))
        report = tests.joined(settings.get("test-mode"), results)
        if "submission-dir" in settings:
            line = shlex.join(["tokenmill", "bench", "mlperf", *settings.flags(SHOWN)])
            configuration = _configuration(settings, report)
            series = tests.RunSeries(
                settings, run, report, results, started_at, line, configuration
            )
            kept = report.given_up or tests.keep(series, Path(scratch))
        elif run.preset.task != "ranking":
            console.note("--submission-dir DIR keeps a run: LoadGen's logs and report.html")
    if not settings.get("json"):
        tests.print_report(report)
    console.print_json(as_json(report), settings.get("json"))
    if report.given_up:
        raise BenchError(report.reasons[0])
    if not kept:
        raise BenchError("--submission-dir: the result above is not in it")


def _model(settings: Settings, task: TaskName) -> str:
    """The model's path, or the name that the server knows it by."""
    if task == "ranking":
        return str(settings.values.get("model", ""))
    if not settings.get("url"):
        return str(throughput.model_path(settings.build(ModelConfig)))
    config = settings.build(EndpointConfig, api="completions")
    return make_target(settings, config).model


def run_of(settings: Settings) -> MlperfRun:
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
    task = BENCHMARKS[settings.get("benchmark")].task
    _check_task(settings, task, RULES[task])
    if task == "video":
        _check_video(settings)
    _check_speculative(settings)
    preset = _preset(settings)
    _check_compliance(settings, preset)
    _check_server(settings)
    if settings.get("find-peak"):
        if scenario not in LATENCY_BOUND:
            raise SettingsError(
                "--find-peak needs --scenario Server or Interactive: the others have no rate to "
                "search, Offline measures the highest one itself"
            )
        if mode != "performance":
            raise SettingsError("--find-peak goes with --test-mode performance only")
    return MlperfRun(
        preset,
        scenario,
        settings.values.get("target-qps") or preset.target_qps or settings.get("target-qps"),
        settings.get("quick-samples") if quick else None,
        settings.get("length-scale"),
        settings.get("round"),
    )


def _check_task(settings: Settings, task: TaskName, rules: TaskRules) -> None:
    """Refuse what the benchmark does not have, and settings of another one."""
    name, scenario, mode = (settings.get(key) for key in ("benchmark", "scenario", "test-mode"))
    benchmark = f"--benchmark {name}"
    for other, own in OWN.items():
        if other != task and (given := [s.key for s in own if s.key in settings]):
            owner = next(p.name for p in BENCHMARKS.values() if p.task == other)
            raise SettingsError(f"--{given[0]} goes with --benchmark {owner}")
    if scenario not in rules.scenarios:
        has = " and ".join(rules.scenarios)
        raise SettingsError(f"--scenario {scenario}: {benchmark} has {has} only")
    if rules.modes is not None and mode not in rules.modes:
        why = f": {rules.why_modes}" if rules.why_modes else ""
        has = ", ".join(rules.modes)
        raise SettingsError(f"--test-mode {mode}: {benchmark} has {has} only{why}")
    for key, reason in rules.refused.items():
        if settings.values.get(key):
            raise SettingsError(f"--{key} does not go with {benchmark}: {reason}")
    for key in rules.of_engine if settings.get("url") else ():
        if key in settings:
            raise SettingsError(f"--{key} is for an engine of this process, not for --url")
    for key in ENGINE if rules.engine is not None else ():
        if key in settings and key not in (rules.engine or ()):
            raise SettingsError(f"--{key} is for language models and does not go with {benchmark}")
    if task == "ranking" and not settings.values.get("model"):
        raise SettingsError(
            f"{benchmark} needs --model DIR: examples/rank_train.py writes one, and with "
            "--random-weights a folder with config.json is enough"
        )


def _check_video(settings: Settings) -> None:
    """The rules' videos, unless the run is quick, and exact ones in the closed division."""
    for key in VIDEO_SHAPE:
        if not settings.get("quick") and settings.get(key) != settings.defaults[key]:
            raise SettingsError(f"--{key} other than MLPerf's is for a quick run: add --quick")
    for key in INEXACT_VIDEOS:
        if settings.get(key) and settings.get("division") == "closed":
            problem = "is not exact, which the closed division does not allow: use --division open"
            raise SettingsError(f"--{key} {problem}")
    mode = settings.get("test-mode")
    if mode in ("accuracy", "submission") and "submission-dir" not in settings:
        raise SettingsError(
            f"--test-mode {mode} needs --submission-dir: the videos to score are written there"
        )


def _preset(settings: Settings) -> Preset:
    try:
        return BENCHMARKS[settings.get("benchmark")].of_round(settings.get("round"))
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


def _check_compliance(settings: Settings, preset: Preset) -> None:
    """A test that the benchmark does not have, or that lacks what it checks, is refused."""
    mode = settings.get("test-mode")
    asked = set(preset.compliance) if settings.get("compliance") else set()
    if mode in COMPLIANCE_TESTS:
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


def _check_server(settings: Settings) -> None:
    """A server has its engine's settings already; an engine has no use for a server's."""
    if settings.get("url"):
        for key in ENGINE:
            if key in settings and key not in REMOTE:
                raise SettingsError(f"--{key} is for an engine of this process, not for --url")
        return
    for setting in SERVER:
        if setting.key in settings and setting.key != "api-key":  # may be in the environment
            raise SettingsError(f"--{setting.key} goes with --url")


def _configuration(settings: Settings, report: MlperfReport) -> dict[str, Any]:
    """The settings that the run had; those of an engine say nothing of a server, and vice versa."""
    if not settings.get("url"):
        return {s.key: settings.get(s.key) for s in OFFERED if s not in SERVER}
    kept = settings_in((MlperfOptions, JsonOption, MlperfServer, *only(MODEL, *REMOTE)))
    given = {setting.key: settings.get(setting.key) for setting in kept}
    return given | {"model": report.model, "api": report.api}


COMMANDS = (BenchCommand("mlperf", mlperf, PANELS),)

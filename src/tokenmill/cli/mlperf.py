"""tokenmill bench mlperf."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import __version__
from tokenmill.bench import accuracy as scoring
from tokenmill.bench import loadgen, manifest, mlperf_report, submission
from tokenmill.bench import mlperf as bench
from tokenmill.bench.child import run_benchmark
from tokenmill.bench.throughput import OurEngine
from tokenmill.bench.workload import BenchError, Cell, make_prompts
from tokenmill.cli import console, throughput
from tokenmill.core.config import BenchConfig, ModelConfig
from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MLPERF,
    MODEL,
    SCHEDULER,
    SETTINGS,
    Settings,
    SettingsError,
)

if TYPE_CHECKING:
    from tokenmill.core.spec import ModelSpec
    from tokenmill.engine.build import BuiltEngine
    from tokenmill.serve.tokenizer import Tokenizer

CHILD = "mlperf-test"
PANELS = {
    "MLPerf": (*MLPERF, SETTINGS["json-only"]),
    "Model": MODEL,
    "KV cache": tuple(s for s in CACHE if s.key != "prefix-cache"),  # the rules forbid it
    "Scheduler": SCHEDULER,
    "Execution": EXECUTION,
}
OFFERED = tuple(setting for group in PANELS.values() for setting in group)
PARENT_POLL_S = 1.0
UNBOUNDED = 2**31
MODES = {"submission": ("performance", "accuracy")}  # the others are themselves

Report = dict[str, Any]


def mlperf(settings: Settings) -> None:
    """An MLPerf Inference scenario, by the official LoadGen.

    Samples are synthesised to the benchmark's published lengths unless
    --dataset gives its own. Without --quick the rules' minimums hold: ten
    minutes and the whole dataset. Every test runs in a process of its own.

    tokenmill bench mlperf --quick --length-scale 0.1
    tokenmill bench mlperf --scenario Server --target-qps 4 --quick
    tokenmill bench mlperf --scenario Interactive --find-peak --quick
    tokenmill bench mlperf --dataset cnn_eval.json --test-mode submission
    --model meta-llama/Llama-3.1-8B-Instruct --submission-dir results
    """
    run, started_at = run_of(settings), manifest.utc_now()
    loadgen.load_library()
    path = throughput.model_path(settings.build(ModelConfig))
    values = settings.values | {"model": str(path), "json-only": True}
    with tempfile.TemporaryDirectory(prefix="mlperf-") as scratch:
        if settings.get("find-peak"):
            reports = {"performance": _peak(run, values, Path(scratch))}
        else:
            mode = settings.get("test-mode")
            reports = {
                name: _test(values, name, run.target_qps, Path(scratch) / name)
                for name in MODES.get(mode, (mode,))
            }
        if "submission-dir" in settings:
            _write(settings, run, reports, started_at)
        else:
            console.note("--submission-dir DIR keeps a run: LoadGen's logs and report.html")
    report = _joined(settings, run, reports)
    if not settings.get("json-only"):
        _print(report)
    console.print_json(report)


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
    if settings.get("test-mode") != "performance" and "dataset" not in settings:
        raise SettingsError(f"--test-mode {settings.get('test-mode')} needs --dataset")
    if settings.get("find-peak"):
        if scenario not in bench.LATENCY_BOUND:
            raise SettingsError("--find-peak needs --scenario Server or Interactive")
        if settings.get("test-mode") != "performance":
            raise SettingsError("--find-peak goes with --test-mode performance only")
    return bench.Run(
        bench.PRESETS[settings.get("benchmark")],
        scenario,
        settings.get("target-qps"),
        settings.get("quick-samples") if quick else None,
        settings.get("length-scale"),
    )


def _test(values: dict[str, Any], mode: str, target_qps: float, folder: Path) -> Report:
    """One test in a process of its own; its logs stay in `folder`."""
    folder.mkdir(parents=True)
    changed = {"test-mode": mode, "target-qps": target_qps, "submission-dir": str(folder)}
    flags = Settings(values | changed).flags(OFFERED)
    console.note(f"MLPerf {mode} run at {target_qps:g} queries/s")
    command = [sys.executable, "-P", "-m", "tokenmill", "bench", CHILD, *flags]
    report, error = run_benchmark(command)
    if error:
        raise BenchError(f"the {mode} run failed: {error}")
    return report | {"logs": str(folder)}


def _peak(run: bench.Run, values: dict[str, Any], scratch: Path) -> Report:
    """The report of the highest valid rate, or of the last one where none is."""
    tried: list[Report] = []

    def is_valid(target_qps: float) -> bool:
        folder = scratch / f"run_{len(tried)}"
        report = _test(values, "performance", target_qps, folder) | {"target_qps": target_qps}
        tried.append(report)
        why = "; ".join([report["result"], *report["reasons"]])
        console.note(f"{target_qps:g} queries/s: {why}")
        return bool(report["result"] == "VALID")

    peak = bench.find_peak(is_valid, run.target_qps)
    best = next((r for r in tried if r["target_qps"] == peak), tried[-1])
    runs = [{key: r[key] for key in ("target_qps", "result", "reasons")} for r in tried]
    return best | {"peak_qps": peak, "runs": runs}


def run_child(settings: Settings) -> None:
    """One test of LoadGen in this process; logs go to --submission-dir."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        report = _child_report(settings, run_of(settings))
    except BaseException as error:
        # LoadGen's threads wait for answers that never come: the interpreter cannot shut down.
        if not isinstance(error, KeyboardInterrupt):
            console.fail(str(error) or type(error).__name__)
        sys.stderr.flush()
        os._exit(1)
    console.print_json(report)


def _end_with(parent: int) -> None:
    """End when the parent has: nobody would read the report of a test of ten minutes."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def _child_report(settings: Settings, run: bench.Run) -> Report:
    folder = Path(settings.get("submission-dir"))
    is_accuracy = settings.get("test-mode") == "accuracy"
    model = settings.build(ModelConfig)
    path = throughput.model_path(model)
    spec = _spec(path, model)
    context = min(model.max_model_len or spec.max_position, spec.max_position)
    rows: list[scoring.Row] = []
    scale, tokenizer = 1.0, None
    if "dataset" in settings:
        tokenizer = _tokenizer(path)
        rows, samples = _dataset(settings, run, tokenizer, context)
    else:
        lengths, scale = bench.synthetic_lengths(run, context)
        samples = bench.synthetic_samples(run.preset, lengths, spec.vocab_size)
    built = _build(settings, samples)
    times = bench.execute(built.engine, samples, run, folder, is_accuracy)
    mlperf_report.write_times(folder / mlperf_report.EVENTS, times)
    facts = _facts(built, run, samples, not rows, scale)
    if is_accuracy:
        assert tokenizer is not None
        return facts | _accuracy_report(run, rows, tokenizer, folder)
    values, errors = loadgen.read_detail(folder)
    return facts | bench.performance_report(run, values, errors, times)


def _dataset(
    settings: Settings, run: bench.Run, tokenizer: Tokenizer, context: int
) -> tuple[list[scoring.Row], list[loadgen.Sample]]:
    """The rows that are run, and their samples."""
    is_accuracy = settings.get("test-mode") == "accuracy"
    rows = scoring.read_dataset(Path(settings.get("dataset")))
    if is_accuracy:
        scoring.check_targets(rows)
    prompts = scoring.prompts(rows, tokenizer.encode, tokenizer.decode)
    chosen = bench.choose_samples(run, [len(p) for p in prompts], context, is_accuracy)
    samples = bench.dataset_samples(run, [prompts[i] for i in chosen], context, is_accuracy)
    return [rows[i] for i in chosen], samples


def _spec(path: Path, model: ModelConfig) -> ModelSpec:
    from tokenmill.models.weights import open_checkpoint

    return open_checkpoint(path, random_weights=model.random_weights).spec


def _tokenizer(path: Path) -> Tokenizer:
    from tokenmill.serve.tokenizer import load_tokenizer

    return load_tokenizer(path)


def _build(settings: Settings, samples: list[loadgen.Sample]) -> BuiltEngine:
    """An engine with room for all samples at once, warmed up."""
    lengths = tuple((len(s.prompt_token_ids), s.sampling.max_tokens or 1) for s in samples)
    cell = Cell("mlperf", lengths)
    unbounded = Settings({"max-queue": UNBOUNDED} | settings.values)  # a sample may come often
    built, _ = throughput.build(unbounded, BenchConfig(lengths="mlperf"), [cell])
    warmup = cell.warmup()
    prompts = make_prompts(warmup, -1, 0, built.spec.vocab_size)
    OurEngine(built.engine).run(warmup, prompts)
    return built


def _facts(
    built: BuiltEngine,
    run: bench.Run,
    samples: list[loadgen.Sample],
    synthetic: bool,
    scale: float,
) -> Report:
    from tokenmill.cli.ceiling import accelerator

    return {
        "model": built.description,
        "dtype": built.dtype,
        "kv_dtype": built.kv_dtype,
        "device": built.device,
        "accelerator": accelerator(built.device),
        "num_samples": len(samples),
        "num_input_tokens": sum(len(s.prompt_token_ids) for s in samples),
        "synthetic": synthetic,
        "quick": run.quick,
        "length_scale": round(scale, 6),
        "notices": bench.notices(run, synthetic, scale),
    }


def _accuracy_report(
    run: bench.Run, rows: list[scoring.Row], tokenizer: Tokenizer, folder: Path
) -> Report:
    by_index = loadgen.read_answers(folder)
    token_ids = [by_index[index] for index in range(len(rows))]
    answers = [tokenizer.decode(ids) for ids in token_ids]
    targets = [row.target or "" for row in rows]
    scores = scoring.score(answers, targets, [len(ids) for ids in token_ids])
    return {"accuracy": scores, "accuracy_gates": scoring.gates(run.preset, scores)}


def _joined(settings: Settings, run: bench.Run, reports: dict[str, Report]) -> Report:
    """One object: what was asked for, the performance run, and the scores beside it."""
    joined: Report = {
        "benchmark": "mlperf",
        "mlperf_benchmark": run.preset.name,
        "scenario": run.scenario,
        "test_mode": settings.get("test-mode"),
        "target_qps": run.target_qps,
    }
    for report in reports.values():
        joined |= report
    gates = joined.get("accuracy_gates", {})
    missed = [name for name, gate in gates.items() if not gate["passed"]]
    reasons = [*joined.get("reasons", []), *(f"{name} misses the accuracy gate" for name in missed)]
    joined |= {"reasons": reasons, "result": "INVALID" if reasons else "VALID"}
    del joined["logs"]
    return joined


def _write(settings: Settings, run: bench.Run, reports: dict[str, Report], started_at: str) -> None:
    """The submission's folders; SingleStream is no datacenter scenario but has the same ones."""
    layout = submission.Layout(
        root=Path(settings.get("submission-dir")),
        division=settings.get("division"),
        submitter=settings.get("submitter"),
        system=settings.get("system-name"),
        benchmark=run.preset.name,
        scenario=run.scenario,
    )
    report = next(iter(reports.values()))
    submission.write_system(layout, _system() | report["accelerator"])
    conf = (Path(report["logs"]) / bench.USER_CONF).read_text(encoding="utf-8")
    weights = settings.build(ModelConfig).model
    plain = report["dtype"] in ("fp32", "bf16")
    change = f"cast to {report['dtype']}" if plain else f"quantized to {report['dtype']}"
    submission.write_measurements(layout, conf, weights, report["dtype"], change)
    command = ["tokenmill", "bench", "mlperf", *settings.flags(OFFERED)]
    submission.write_texts(layout, report["notices"], shlex.join(command))
    if "performance" in reports:
        submission.copy_performance(layout, Path(reports["performance"]["logs"]))
    if "accuracy" in reports:
        scores = reports["accuracy"]["accuracy"]
        submission.copy_accuracy(layout, Path(reports["accuracy"]["logs"]), scores)
    configuration = {setting.key: settings.get(setting.key) for setting in OFFERED}
    facts = manifest.make_facts("mlperf", configuration, started_at)
    joined, folder = _joined(settings, run, reports), layout.scenario_folder
    mlperf_report.write_result(folder, joined, Path(report["logs"]), facts)
    console.note(f"Written: {folder / mlperf_report.PAGE}, LoadGen's logs beside it")


def _system() -> dict[str, str]:
    """What this machine tells of itself."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "host_processor_model_name": names[0] if names else platform.machine(),
        "host_processors_per_node": "1",
        "host_processor_core_count": str(os.cpu_count()),
        "host_memory_capacity": f"{pages * size / 2**30:.0f} GiB",
        "operating_system": f"{platform.system()} {platform.release()}",
        "framework": f"tokenmill {__version__}",
        "other_software_stack": f"Python {platform.python_version()}",
    }


def _print(report: Report) -> None:
    title = f"MLPerf {report['mlperf_benchmark']}, {report['scenario']}: {report['result']}"
    console.out.print(f"[bold]{title}[/bold]")
    for reason in report["reasons"]:
        console.out.print(f"  {reason}", markup=False)
    if metric := report.get("metric"):
        console.out.print(f"{metric['name']}: {metric['value']:,.2f} {metric['unit']}")
    if "peak_qps" in report:
        console.out.print(f"highest valid rate: {report['peak_qps'] or 'none'} queries/s")
    limits = report.get("limits_ms") or {}
    for name in ("ttft", "tpot"):
        if figures := report.get(f"{name}_ms"):
            shown = ", ".join(f"{k} {v:,.1f}" for k, v in figures.items())
            limit = f"; limit at p{report['percentile']} {limits[name]}" if limits else ""
            console.out.print(f"{name.upper()} ms: {shown}{limit}")
    for name, gate in report.get("accuracy_gates", {}).items():
        console.out.print(f"{name}: {gate['value']:,.4f}, required {gate['min']:,.4f}")
    for notice in report["notices"]:
        console.out.print(notice, markup=False)

"""tokenmill plan predict, and plan validate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.bench.options import BenchConfig
from tokenmill.cli.plan.plan_options import (
    BenchmarkOptions,
    ConfigurationOptions,
    DemandOptions,
    SystemOptions,
    TableOptions,
    WorkOptions,
)
from tokenmill.settings import Settings, SettingsError, only
from tokenmill.settings.shared import JsonOption

if TYPE_CHECKING:
    from tokenmill.plan.predict.benchmarks import Benchmark
    from tokenmill.plan.predict.lengths import Lengths
    from tokenmill.plan.predict.prediction import Question
    from tokenmill.plan.predict.search import SearchSpace

CONFIGURATION = "Configuration (searched for where not given)"
PREDICT = {
    "Benchmark": BenchmarkOptions,
    "Model, in place of a benchmark": (WorkOptions, *only(DemandOptions, "ttft", "tpot")),
    "System": SystemOptions,
    CONFIGURATION: ConfigurationOptions,
    "Output": JsonOption,
}
VALIDATE = {"Output": (TableOptions, JsonOption)}
DEFAULTS = {"gpus": 8}


def predict(settings: Settings) -> None:
    """Throughput and latency of a benchmark or model on GPUs that you do not have.

    The time of a step is a sum of rooflines times efficiencies that were
    fitted to published rows; limits are held by a queueing model over the
    dataset's lengths. The configuration is searched for, or given by flags
    or by the file of --config.

    tokenmill plan predict --benchmark gpt-oss-120b --gpu h200 --gpus 8
    tokenmill plan predict --model ./config.json --lengths uniform:100-1024 --round tokenmill
    """
    from tokenmill.plan.fit.job_rows import with_job_error
    from tokenmill.plan.hardware import find_gpu
    from tokenmill.plan.predict import prediction
    from tokenmill.plan.predict.benchmarks import ROUNDS, find_benchmark
    from tokenmill.plan.predict.efficiencies import OWN, find_fit
    from tokenmill.plan.predict.jobs import JOBS, predict_job

    gpu, round = (
        find_gpu(settings.get("gpu"), own_file(settings, "hardware")),
        settings.get("round"),
    )
    if round not in (*ROUNDS, OWN):
        raise SettingsError(f"--round {round}: expected one of {', '.join((*ROUNDS, OWN))}")
    fit = find_fit(round, own_file(settings, "efficiencies"))
    scenario, gpus = settings.get("scenario"), settings.get("gpus")
    gpu = fit.peaks(gpu)
    if "model" not in settings and settings.get("benchmark") in JOBS:
        name = settings.get("benchmark")
        report = predict_job(name, scenario, gpu, gpus, round, with_job_error(name, fit))
    else:
        own = own_case(settings)
        benchmark = own or find_benchmark(settings.get("benchmark"), round)
        question = prediction.Question(benchmark, scenario, gpu, gpus, round)
        report = prediction.predict(question, fit, choice_of(settings, question))
    if not settings.get("json"):
        _print(report)
    console.print_json(report, settings.get("json"))


def own_case(settings: Settings) -> Benchmark | None:
    """The model, lengths and limits that are given in place of a benchmark."""
    from tokenmill.bench.mlperf.presets import TokenLimits
    from tokenmill.plan.predict.benchmarks import Benchmark

    given = [key for key in ("model", "lengths", "output-len", "ttft", "tpot") if key in settings]
    if "model" in given and "benchmark" in settings:
        raise SettingsError("--model and --benchmark do not go together: leave one out")
    if given and "model" not in given:
        raise SettingsError(f"--{given[0]} needs --model: a benchmark has its own")
    if not given:
        return None
    name = settings.get("model")
    limits = {"Server": TokenLimits(settings.get("ttft"), settings.get("tpot"))}
    return Benchmark(name, name, limits, own_lengths=named_lengths(settings))


def named_lengths(settings: Settings) -> Lengths:
    """Those of a benchmark as runs emit them, or of a file."""
    from tokenmill.bench.workload import make_cells
    from tokenmill.plan.predict.benchmarks import BENCHMARKS, benchmark_lengths
    from tokenmill.plan.predict.lengths import represent

    name, output = settings.get("lengths"), settings.get("output-len")
    if name is None:
        raise SettingsError("--lengths is needed: a benchmark, a CSV file or uniform:LOW-HIGH")
    if name in BENCHMARKS and output is None:
        return benchmark_lengths(name)
    return represent(name, make_cells(BenchConfig(lengths=name, output_len=output))[0].lengths)


def own_file(settings: Settings, key: str) -> Path | None:
    path = settings.get(key)
    return Path(path).expanduser() if path else None


def choice_of(settings: Settings, question: Question) -> SearchSpace:
    """What of the configuration is given; the rest is what a submission would choose among."""
    return given_choice(settings, question.choice())


def given_choice(settings: Settings, base: SearchSpace) -> SearchSpace:
    given: dict[str, Any] = {"acceptance": settings.get("acceptance")}
    if settings.get("precision"):
        given["precision"] = settings.get("precision")
    if "attention-dp" in settings and settings.get("attention-dp"):
        if "ep" not in settings:
            raise SettingsError("--attention-dp needs --ep N: the GPUs of a replica")
        given |= {"attention_dp": settings.get("ep"), "tensor_parallel": 1}
    elif "tp" in settings:
        given |= {"tensor_parallel": settings.get("tp"), "attention_dp": 1}
    if "mtp" in settings:
        given["mtp_depths"] = (settings.get("mtp"),)
    if settings.get("max-num-seqs"):
        given["max_sequences"] = settings.get("max-num-seqs")
    return replace(base, **given)


def _print(report: dict[str, Any]) -> None:
    low, high = report["interval"]
    console.out.print(
        f"{report['output_tok_s']:,.0f} tokens/s ({low:,.0f} to {high:,.0f}), "
        f"{report['samples_s']:,.2f} samples/s, {report['tok_s_per_gpu']:,.0f} tokens/s per GPU"
        if report["output_tok_s"] is not None
        else f"{report['samples_s']:,.4f} samples/s ({low:,.4f} to {high:,.4f})"
    )
    if report.get("configuration"):
        console.out.print(describe(report["configuration"]))
    for name, values in (("first token", report["ttft_ms"]), ("per token", report["tpot_ms"])):
        if values:
            figures = ", ".join(f"{key} {value:,.1f} ms" for key, value in values.items())
            console.out.print(f"{name}: {figures}")
    parts = sorted(report["step_ms"].items(), key=lambda item: -item[1])
    console.out.print(
        "step: " + ", ".join(f"{name} {value:,.1f} ms" for name, value in parts if value >= 0.05)
    )
    used = ", ".join(f"{name} {value:g}" for name, value in report["efficiencies"].items())
    console.out.print(f"efficiencies ({_origin(report)}): {used}")


def _origin(report: dict[str, Any]) -> str:
    name, round = report["efficiencies_of"], report["round"]
    return name if name == round else f"{name}'s, since {round} has no results to fit on yet"


def describe(configuration: dict[str, Any]) -> str:
    line = f"{configuration['replicas']} x {_replica(configuration)}"
    if "prefill" in configuration:
        prefill = configuration["prefill"]
        line = f"{prefill['replicas']} prefill x {_replica(prefill)}, decode {line}"
    return f"{line}; {configuration['sequences_per_gpu']:,.0f} sequences per GPU"


def _replica(replica: dict[str, Any]) -> str:
    kind = f"{replica['tp']} GPUs by --tp" if replica["tp"] > 1 else "1 GPU"
    if replica["attention_dp"] > 1:
        kind = f"{replica['attention_dp']} GPUs by --attention-dp"
    drafts = f", {replica['mtp']} drafts" if replica["mtp"] else ""
    return f"{kind} ({replica['precision']}, KV {replica['kv']}{drafts})"


def validate(settings: Settings) -> None:
    """Compare predictions with published rows and with our own measured runs.

    Rows that the efficiencies were fitted on stand apart from those that
    they never saw.

    tokenmill plan validate --rows
    """
    from tokenmill.plan.fit import validation

    checked = validation.validate(own_file(settings, "efficiencies"))
    report = validation.summary(checked)
    if settings.get("markdown"):
        Path(settings.get("markdown")).write_text(validation.markdown(checked), encoding="utf-8")
    if not settings.get("json"):
        if settings.get("rows"):
            console.print_table(validation.row_table(checked))
        console.print_table(validation.summary_table(report))
    console.print_json(report, settings.get("json"))

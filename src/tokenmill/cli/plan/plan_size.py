"""tokenmill plan size, and plan calibrate."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import console
from tokenmill.cli.plan.plan_options import (
    CalibrateOptions,
    ConfigurationOptions,
    CostOptions,
    DemandOptions,
    SizeOptions,
    StartOptions,
    SystemOptions,
    TraceOptions,
    WorkOptions,
)
from tokenmill.cli.plan.plan_predict import (
    CONFIGURATION,
    describe,
    given_choice,
    named_lengths,
    own_file,
)
from tokenmill.settings import Settings, SettingsError, only
from tokenmill.settings.shared import JsonOption

if TYPE_CHECKING:
    from tokenmill.plan.hardware import Accelerator
    from tokenmill.plan.predict.lengths import Lengths
    from tokenmill.plan.predict.search import SearchSpace, System
    from tokenmill.plan.predict.sizing import Size, Traffic

SIZE = {
    "Demand": (WorkOptions, DemandOptions, *only(TraceOptions, "trace", "trace-block-tokens")),
    "System": (SystemOptions, CostOptions, StartOptions),
    CONFIGURATION: ConfigurationOptions,
    "Output": (SizeOptions, JsonOption),
}
SIZE_DEFAULTS = {"gpu": "gb300", "gpus": 4096}
CALIBRATE = {
    "What was measured": WorkOptions,
    "System": (SystemOptions, *only(CostOptions, "round")),
    CONFIGURATION: ConfigurationOptions,
    "Output": (CalibrateOptions, JsonOption),
}
CALIBRATE_DEFAULTS = {"gpus": 1}


def size(settings: Settings) -> None:
    """The cheapest systems that take a demand within limits.

    It writes a TOML file that `serve --config` takes, and prints the
    benchmark that tests the plan.

    tokenmill plan size --model deepseek-r1 --gpu gb300 --rate 60
    --lengths deepseek-r1 --ttft 2000 --tpot 80
    """
    from tokenmill.plan.predict import size_cases, sizing
    from tokenmill.plan.predict.jobs import JOBS

    if "model" in settings and settings.get("model") in JOBS:
        return _size_job(settings)
    begin = time.process_time()
    system, choice, traffic = _demand(settings)
    sizes = sizing.cheapest(system, choice, traffic)
    best = sizes[0]
    shown = _distinct(sizes)[: settings.get("alternatives")]
    report: dict[str, Any] = {
        "plan": "size",
        "model": settings.get("model"),
        "gpu": system.gpu.key,
        "software": whose(settings.get("round")),
        "rate": traffic.rate,
        "lengths": system.lengths.name,
        "cache_hits": system.cached,
        "price_per_gpu_hour": traffic.price_per_gpu_hour,
        **sizing.describe(system, choice, traffic, best),
        **_intervals(settings, best, sizing.describe(system, choice, traffic, best)),
        "breaks_first": size_cases.breaks_first(system, choice, traffic, best),
        "what_if": size_cases.what_if(system, choice, traffic, best),
        "while_a_worker_starts": size_cases.while_starting(best, traffic, settings.get("start-s")),
        "alternatives": [sizing.describe(system, choice, traffic, one) for one in shown[1:]],
        "bench": bench_command(settings, system, traffic),
    }
    if not report["within_gpus"]:
        report["max_rate_within_gpus"] = round(size_cases.within(system, choice, traffic), 3)
    ours = settings.get("round") == "tokenmill"
    report["written"] = write_settings(settings, system.spec, best) if ours else None
    report["cpu_s"] = round(time.process_time() - begin, 2)
    if not settings.get("json"):
        _print(report)
    console.print_json(report, settings.get("json"))


def whose(name: str) -> str:
    if name == "tokenmill":
        return "tokenmill (efficiencies measured on one H200)"
    return f"the software of the best MLPerf submissions of {name}"


def _size_job(settings: Settings) -> None:
    """Video, recommender and captions: a sample is a job, without times of tokens."""
    from tokenmill.plan.fit.job_rows import with_job_error
    from tokenmill.plan.hardware import find_gpu
    from tokenmill.plan.predict.efficiencies import find_fit
    from tokenmill.plan.predict.jobs import size_job

    if "rate" not in settings:
        raise SettingsError("--rate is needed: samples per second")
    gpu, name = find_gpu(settings.get("gpu"), own_file(settings, "hardware")), settings.get("model")
    fit = find_fit(settings.get("round"), own_file(settings, "efficiencies"))
    price = price_of(settings, gpu)
    report = size_job(
        name,
        fit.peaks(gpu),
        settings.get("rate"),
        price,
        settings.get("gpus"),
        with_job_error(name, fit),
    )
    if not settings.get("json"):
        low, high = report["interval_gpus"]
        lost = report["what_if"]["one node lost"]
        console.out.print(
            f"{report['gpus']} x {gpu.key} ({low} to {high}) for {report['rate']:g} samples/s: "
            f"{report['latency_s']:,.3g} s and ${report['usd_per_sample']:,.3g} a sample, "
            f"${report['usd_per_hour']:,.2f} an hour; {report['bottleneck']}\n"
            f"run by {whose(settings.get('round'))}; {report['headroom']:.0%} more "
            f"would fit; one node lost: {lost['gpus']} GPUs take "
            f"{lost['max_rate']:g} samples/s, {lost['needs_gpus']} GPUs would hold"
        )
    console.print_json(report, settings.get("json"))


def price_of(settings: Settings, gpu: Accelerator) -> float:
    """Dollars per GPU and hour: given, or of the GPU's table."""
    given = settings.get("price-per-gpu-hour")
    price = gpu.price_per_hour if given is None else float(given)
    if price is None:
        raise SettingsError(
            f"--price-per-gpu-hour is needed: {gpu.name} has no known price; "
            "or give price-per-gpu-hour in its table of --hardware"
        )
    return price


def _demand(settings: Settings) -> tuple[System, SearchSpace, Traffic]:
    from tokenmill.plan.hardware import find_gpu
    from tokenmill.plan.predict.catalog import find_model
    from tokenmill.plan.predict.efficiencies import find_fit
    from tokenmill.plan.predict.search import SearchSpace, System
    from tokenmill.plan.predict.sizing import Traffic
    from tokenmill.plan.predict.steady_state import Limit

    if "model" not in settings:
        raise SettingsError("--model is needed: a shipped shape such as deepseek-r1")
    gpu = find_gpu(settings.get("gpu"), own_file(settings, "hardware"))
    lengths, rate, cached = _load(settings)
    fit = find_fit(settings.get("round"), own_file(settings, "efficiencies"))
    gpu = fit.peaks(gpu)
    spec = find_model(settings.get("model"))
    limit = Limit(
        settings.get("ttft") / 1e3, settings.get("tpot") / 1e3, settings.get("percentile")
    )
    depths = (0, 1, 2, 3) if spec.num_mtp_layers else (0,)
    choice = given_choice(settings, SearchSpace(mtp_depths=depths, disaggregates=True))
    system = System(spec, gpu, settings.get("gpus"), lengths, fit.efficiency, cached)
    return system, choice, Traffic(rate, limit, price_of(settings, gpu))


def _load(settings: Settings) -> tuple[Lengths, float, float]:
    """Lengths, requests per second and cached share: of flags, or of a trace."""
    from tokenmill.bench.results.mooncake import read_trace
    from tokenmill.plan.predict.lengths import from_trace

    rate = settings.get("rate") if "rate" in settings else None
    cached = settings.get("cache-hits")
    if settings.get("trace"):
        block_tokens = settings.get("trace-block-tokens")
        trace = read_trace(settings.get("trace"), block_tokens, ordered=True)
        lengths, own_rate, hits = from_trace(settings.get("trace"), trace, block_tokens)
        return lengths, rate or own_rate, hits if cached is None else cached
    if rate is None:
        raise SettingsError("--rate is needed: requests per second; or --trace")
    return named_lengths(settings), rate, cached or 0.0


def _distinct(sizes: list[Size]) -> list[Size]:
    """The best of each kind: precision, replica, and whether prefill is apart."""
    found: dict[Any, Size] = {}
    for one in sizes:
        found.setdefault((one.precision, one.plan.replica.gpus, one.plan.prefill is None), one)
    return list(found.values())


def _intervals(settings: Settings, best: Size, described: dict[str, Any]) -> dict[str, Any]:
    """Where the prediction is as wrong as 90 % of those before: GPUs, rate, times and prices."""
    import math

    from tokenmill.plan.predict.efficiencies import find_fit

    error = find_fit(settings.get("round"), own_file(settings, "efficiencies")).error
    unit = best.plan.replica.gpus

    def about(value: float, digits: int) -> list[float]:
        return [round(value * math.exp(sign * error), digits) for sign in (-1, 1)]

    low, high = about(best.gpus / unit, 6)
    prices = ("usd_per_million_input", "usd_per_million_cached", "usd_per_million_output")
    return {
        "interval_gpus": [max(1, math.floor(low)) * unit, math.ceil(high) * unit],
        "intervals": {
            "max_rate": about(described["max_rate"], 3),
            "tok_s_per_user": about(described["tok_s_per_user"], 1),
            "tpot_ms": about(described["tpot_ms"]["mean"], 2),
            "ttft_ms": about(described["ttft_ms"]["p50"], 2),
            **{name: about(described[name], 4) for name in prices},
        },
    }


def _print(report: dict[str, Any]) -> None:
    from tokenmill.plan.predict.size_cases import case_words

    low, high = report["interval_gpus"]
    console.out.print(
        f"{report['gpus']} x {report['gpu']} in {report['workers']} workers for "
        f"{report['rate']:g} requests/s, run by {report['software']}\n"
        f"{low} to {high} GPUs by the error of 90 % of such predictions; "
        f"${report['price_per_gpu_hour']:g} per GPU and hour (--price-per-gpu-hour)"
    )
    rows = [
        ["", "GPUs", "tok/s per GPU", "per user", "TTFT", "TPOT", "$/h", "$/M in", "cached", "out"]
    ]
    for name, one in (("cheapest", report), *((f"or {n}", a) for n, a in _numbered(report))):
        ttft, tpot = list(one["ttft_ms"].values())[-1], list(one["tpot_ms"].values())[-1]
        rows.append(
            [
                name,
                str(one["gpus"]),
                f"{one['tok_s_per_gpu']:,.0f}",
                f"{one['tok_s_per_user']:,.0f}",
                f"{ttft:,.0f} ms",
                f"{tpot:,.1f} ms",
                f"{one['usd_per_hour']:,.2f}",
                f"{one['usd_per_million_input']:,.3f}",
                f"{one['usd_per_million_cached']:,.3f}",
                f"{one['usd_per_million_output']:,.3f}",
            ]
        )
    console.print_table(rows)
    for name, one in (("cheapest", report), *((f"or {n}", a) for n, a in _numbered(report))):
        console.out.print(f"{name}: {describe(one['configuration'])}; {one['bottleneck']}")
    console.out.print(
        f"{report['headroom']:.0%} more requests would fit; "
        f"the first limit above that: {report['breaks_first']}"
    )
    if not report["within_gpus"]:
        console.out.print(
            f"--gpus: so few take {report['max_rate_within_gpus']:g} requests/s within the limits"
        )
    for name, case in report["what_if"].items():
        console.out.print(f"{name}: {case_words(case)}")
    console.out.print(f"while a worker starts: {report['while_a_worker_starts']['words']}")
    written = report["written"] or "nothing; --round tokenmill writes settings for tokenmill serve"
    console.out.print(f"written: {written}\ntest it with: {report['bench']}")


def _numbered(report: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    return list(enumerate(report["alternatives"], 2))


def calibrate(
    settings: Settings,
    results: Annotated[list[Path], typer.Argument(metavar="RESULT...", help="Result folders.")],
) -> None:
    """Fit efficiencies to results of yours: ours, AIPerf's, guidellm's, vllm bench's.

    The file that it writes is what --efficiencies takes.

    tokenmill plan calibrate results/monday --model llama3.1-8b --gpu h200
    """
    from tokenmill.plan.fit import calibration
    from tokenmill.plan.hardware import find_gpu
    from tokenmill.plan.predict.catalog import find_model
    from tokenmill.plan.predict.efficiencies import find_fit, write_fits
    from tokenmill.plan.predict.search import SearchSpace

    if "model" not in settings:
        raise SettingsError("--model is needed: the model that was measured")
    base = find_fit(settings.get("round"), own_file(settings, "efficiencies"))
    gpu = base.peaks(find_gpu(settings.get("gpu"), own_file(settings, "hardware")))
    target = calibration.CalibrationTarget(
        find_model(settings.get("model")),
        gpu,
        settings.get("gpus"),
        given_choice(settings, SearchSpace()),
        named_lengths(settings) if settings.get("lengths") else None,
    )
    found = calibration.calibrate(results, target, base, time.strftime("%Y-%m-%d"))
    path = Path(settings.get("write")).expanduser()
    write_fits(path, {found.fit.name: found.fit}, "Written by tokenmill plan calibrate.")
    if not settings.get("json"):
        console.print_table(found.table())
        console.out.print(f"written: {path}; use it with --efficiencies {path}")
    console.print_json(found.report() | {"written": str(path)}, settings.get("json"))


if TYPE_CHECKING:
    from tokenmill.core.specs.spec import ModelSpec
    from tokenmill.plan.predict.search import System
    from tokenmill.plan.predict.sizing import Size, Traffic

MARK = "# Written by tokenmill plan size."
SERVED = ("fp8", "int8")  # types that `serve` rounds weights to; others are the checkpoint's


def bench_command(settings: Settings, system: System, traffic: Traffic) -> str:
    """The benchmark that tests the plan, with the lengths that it was made for."""
    limit = traffic.limit
    return " ".join(
        (
            "tokenmill bench endpoint --url http://127.0.0.1:8000/v1",
            *_load_words(settings, system, traffic),
            f"--goodput ttft:{limit.ttft_s * 1e3:g},tpot:{limit.tpot_s * 1e3:g}",
            f"--slo-percentile {limit.percentile:g}",
        )
    )


def _load_words(settings: Settings, system: System, traffic: Traffic) -> list[str]:
    """A trace brings its own times; lengths come with the answers that the plan assumes."""
    from tokenmill.bench.mlperf.presets import PRESETS
    from tokenmill.plan.predict.benchmarks import GPT_OSS_OUTPUT

    if settings.get("trace"):
        return [
            f"--trace {settings.get('trace')}",
            f"--trace-block-tokens {settings.get('trace-block-tokens')}",
        ]
    words = [f"--rate {traffic.rate:g} --duration 600"]
    if system.cached:  # a shared prefix comes before prompts of their own
        shared = round(system.cached * system.lengths.mean_input)
        own = max(1, round(system.lengths.mean_input) - shared)
        answer = round(system.lengths.mean_output)
        return [*words, f"--shared-prefix {shared} --input-len {own} --output-len {answer}"]
    words.append(f"--lengths {settings.get('lengths')}")
    preset = PRESETS.get(settings.get("lengths"))
    output = settings.get("output-len") or (preset.output_len if preset else None)
    if preset and preset.name == "gpt-oss-120b" and not settings.get("output-len"):
        output = GPT_OSS_OUTPUT
    if output:
        words.append(f"--output-len {output}")
    return words


def write_settings(settings: Settings, spec: ModelSpec, best: Size) -> str:
    """A TOML file for `serve --config`; a file of the user's is not written over."""
    path = Path(settings.get("write")).expanduser()
    if path.exists() and not path.read_text(encoding="utf-8").startswith(MARK):
        raise SettingsError(f"--write {path}: is there and was not written by plan size")
    lines = serve_lines(settings.get("model"), spec, best)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def serve_lines(model: str, spec: ModelSpec, best: Size) -> list[str]:
    plan, replica = best.plan, best.plan.replica
    lines = [MARK, *_model_lines(model), *_type_lines(spec, best)]
    if replica.attention_dp > 1:
        lines += [f"ep = {replica.attention_dp}", "attention-dp = true"]
    elif replica.tensor_parallel > 1:
        lines.append(f"tp = {replica.tensor_parallel}")
    if replica.mtp_depth:
        lines.append(f"mtp = {replica.mtp_depth}")
    if plan.prefill is not None:
        lines += [f"prefill = {plan.prefill_replicas}", f"decode = {plan.replicas}"]
    else:
        lines.append(f"workers = {plan.replicas}")
    # Running requests fluctuate by the root of their number: four times that is seldom exceeded.
    running = plan.operation.sequences / replica.attention_dp
    lines.append(f"max-num-seqs = {math.ceil(1.25 * running + 4 * math.sqrt(running))}")
    return lines


def _model_lines(model: str) -> list[str]:
    """The checkpoint of a shape where it is known; a shape alone has no weights."""
    from tokenmill.bench.mlperf.presets import PRESETS
    from tokenmill.plan.predict.catalog import known_models

    if model in PRESETS:
        return [f'model = "{PRESETS[model].model}"']
    if model in known_models() and model != "smollm2":
        return [
            "# This is the name of a shape: put the folder or hub name of its checkpoint here.",
            f'model = "{model}"',
        ]
    return [f'model = "{model}"']


def _type_lines(spec: ModelSpec, best: Size) -> list[str]:
    """Weights in bf16, and MXFP4 as published, are what `serve` takes without being told."""
    kv, lines = best.plan.replica.precision.kv, []
    if best.precision in SERVED:
        lines.append(f'dtype = "{best.precision}"')
    elif best.precision == "fp4":
        lines.append("# The plan is for fp4 weights: give a checkpoint in it.")
    if kv == "fp8" and spec.mla:
        lines.append("# The plan has KV in fp8, which serve lacks for latent attention.")
    elif kv == "fp8":
        lines.append('kv-cache-dtype = "fp8"')
    return lines

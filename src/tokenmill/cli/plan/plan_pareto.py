"""tokenmill plan pareto."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.cli.plan.plan_options import (
    WEIGHTS,
    BenchmarkOptions,
    ConfigurationOptions,
    CostOptions,
    ParetoFiles,
    ParetoOptions,
    ParetoSystems,
    SystemOptions,
    WorkOptions,
)
from tokenmill.cli.plan.plan_predict import named_lengths, own_file
from tokenmill.cli.plan.plan_size import price_of
from tokenmill.core.flags import split_list
from tokenmill.settings import Settings, SettingsError, only
from tokenmill.settings.shared import JsonOption

if TYPE_CHECKING:
    from tokenmill.plan.pareto.curves import Curve, ParetoCase
    from tokenmill.plan.pareto.pareto_page import Result

PARETO = {
    "Demand": (*only(BenchmarkOptions, "benchmark"), WorkOptions, ParetoOptions),
    "Systems": (
        ParetoSystems,
        CostOptions,
        *only(ConfigurationOptions, "acceptance"),
        *only(SystemOptions, "hardware", "efficiencies"),
    ),
    "Output": (ParetoFiles, JsonOption),
}
DEFAULTS = {"benchmark": "gpt-oss-120b", "round": "v6.0"}


def pareto(settings: Settings) -> None:
    """Throughput and price against interactivity, of several GPUs and precisions.

    Every line is a prediction with its interval; published MLPerf results are
    drawn in. It writes one HTML page that needs no network, and a CSV file.

    tokenmill plan pareto --benchmark deepseek-r1 --gpu h200,b200,gb300
    """
    from tokenmill.bench.report.page import render
    from tokenmill.plan.pareto.pareto_page import pareto_csv, pareto_page

    page, table = (Path(settings.get(key)).expanduser() for key in ("html", "csv"))
    _check_files(page, table)
    result = _result(settings)
    page.write_text(render(pareto_page(result)), encoding="utf-8")
    table.write_text(pareto_csv(result), encoding="utf-8")
    if not settings.get("json"):
        _print(result)
        console.out.print(f"written: {page} and {table}")
    console.print_json(
        _report(result) | {"html": str(page), "csv": str(table)}, settings.get("json")
    )


def _check_files(page: Path, table: Path) -> None:
    """Refuse files that cannot be written before anything is predicted."""
    for flag, path, suffix in (("--html", page, ".html"), ("--csv", table, ".csv")):
        if path.suffix != suffix:
            raise SettingsError(f"{flag} {path}: expected a file that ends in {suffix}")
        if not path.parent.is_dir():
            raise SettingsError(f"{flag} {path}: there is no folder {path.parent}")


def _result(settings: Settings) -> Result:
    from tokenmill.plan.pareto.pareto_page import Result
    from tokenmill.plan.pareto.published_points import published_points

    case = _case(settings)
    xs = _interactivities(settings, case)
    curves, left_out = _curves(settings, case, xs)
    keys = dict.fromkeys(curve.gpu.key for curve in curves)
    published = (
        published_points(case.benchmark.name, keys, case.round, case.fit) if case.benchmark else []
    )
    return Result(case, xs, tuple(curves), tuple(published), tuple(left_out))


def _case(settings: Settings) -> ParetoCase:
    """A benchmark, or a model with lengths of the user's own."""
    from tokenmill.plan.pareto.curves import ParetoCase
    from tokenmill.plan.predict.benchmarks import benchmark_lengths, find_benchmark
    from tokenmill.plan.predict.efficiencies import find_fit

    round = settings.get("round")
    fit = find_fit(round, own_file(settings, "efficiencies"))
    ttft_s = settings.get("ttft") / 1e3 if "ttft" in settings else None
    common = (settings.get("percentile"), settings.get("acceptance"))
    if "model" in settings:
        lengths = named_lengths(settings)
        limit_s = 2.0 if ttft_s is None else ttft_s
        return ParetoCase(settings.get("model"), lengths, fit, round, None, limit_s, *common)
    if settings.get("lengths") or settings.get("output-len"):
        raise SettingsError("--lengths and --output-len need --model: a benchmark has its own")
    benchmark = find_benchmark(settings.get("benchmark"), round)
    lengths = benchmark_lengths(benchmark.name)
    return ParetoCase(benchmark.model, lengths, fit, round, benchmark, ttft_s, *common)


def _interactivities(settings: Settings, case: ParetoCase) -> tuple[float, ...]:
    """Offline, those asked for, and those of the benchmark's limits."""
    from tokenmill.plan.pareto.curves import OFFLINE

    limits = case.benchmark.limits.values() if case.benchmark else ()
    published = (1 / (limit.tpot_ms * 1e-3) for limit in limits)
    return tuple(sorted({OFFLINE, *settings.get("interactivity"), *published}))


def _curves(
    settings: Settings, case: ParetoCase, xs: tuple[float, ...]
) -> tuple[list[Curve], list[str]]:
    """A curve of each GPU and precision; what cannot be drawn is named with its reason."""
    from tokenmill.plan.hardware import PlanError, find_gpu
    from tokenmill.plan.pareto.curves import draw_curve, precisions_for
    from tokenmill.plan.predict.catalog import find_model
    from tokenmill.plan.predict.search import System

    given = _precisions(settings)
    curves, left_out = [], []
    for name in dict.fromkeys(split_list(settings.get("gpu"))):
        gpu = case.fit.peaks(find_gpu(name, own_file(settings, "hardware")))
        gpus, price = settings.get("gpus") or gpu.domain_gpus, price_of(settings, gpu)
        spec = find_model(case.model)
        system = System(spec, gpu, gpus, case.lengths, case.fit.efficiency)
        known = precisions_for(system, given)
        if not known:
            left_out.append(f"{gpu.key}: does not compute {case.model} in {', '.join(given)}")
        for precision in known:
            try:
                curves.append(draw_curve(case, system, precision, price, xs))
            except PlanError as error:
                left_out.append(f"{gpu.key} {precision}: {error}")
    if not curves:
        raise PlanError("no curve can be drawn: " + "; ".join(left_out))
    return curves, left_out


def _precisions(settings: Settings) -> list[str]:
    given = list(dict.fromkeys(split_list(settings.get("precision") or [])))
    for name in given:
        if name not in WEIGHTS:
            raise SettingsError(f"--precision {name}: expected some of {', '.join(WEIGHTS)}")
    return given


def _report(result: Result) -> dict[str, Any]:
    from tokenmill.plan.pareto.curves import point_report

    case = result.case
    return {
        "plan": "pareto",
        "prediction": True,
        "model": case.model,
        "benchmark": case.benchmark.name if case.benchmark else None,
        "lengths": case.lengths.name,
        "round": case.round,
        "efficiencies_of": case.fit.name,
        "fitted_on": list(case.fit.fitted_on),
        "percentile": case.percentile,
        "curves": [
            {
                "gpu": curve.gpu.key,
                "gpus": curve.gpus,
                "precision": curve.precision,
                "price_per_gpu_hour": curve.price,
                "points": [point_report(curve, point) for point in filter(None, curve.points)],
            }
            for curve in result.curves
        ],
        "published": [point.report() for point in result.published],
        "left_out": list(result.left_out),
    }


def _print(result: Result) -> None:
    console.out.print(f"predicted output tokens/s per GPU of {result.case.model}")
    rows = [["tok/s/user", *(curve.name for curve in result.curves), "published"]]
    for index, x in enumerate(result.xs):
        points = [curve.points[index] for curve in result.curves]
        dots = [f"{p.gpu} {p.per_gpu:,.0f}" for p in result.published if p.per_user == x]
        cells = [f"{point.per_gpu:,.0f}" if point else "-" for point in points]
        rows.append([f"{x:.3g}" if x else "no limit", *cells, ", ".join(dots)])
    console.print_table(rows)
    for text in result.left_out:
        console.out.print(f"left out: {text}")

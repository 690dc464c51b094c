"""tokenmill bench ladder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tokenmill import console
from tokenmill.bench import rungs as bench
from tokenmill.bench.commands import BenchCommand, throughput
from tokenmill.bench.report.ladder_chart import check_plot, write_plot
from tokenmill.bench.workload import BenchError, make_cells
from tokenmill.core.config import BenchConfig, ModelConfig
from tokenmill.settings import LADDER, Settings

NOT_OFFERED = bench.CHANGED | {"cell", "peers", "skip-peer"}
BENCHMARK = {
    panel: tuple(s for s in group if s.key not in NOT_OFFERED)
    for panel, group in throughput.PANELS.items()
}
PANELS = {"Ladder": LADDER, **BENCHMARK}


def ladder(settings: Settings) -> None:
    """The same workload with one optimisation more each time, and what each is worth.

    On a GPU: eager torch, fused kernels, CUDA graphs, overlap, fp8, fp8 KV.
    On a CPU: eager torch, fused kernels, overlap, int8. Where the model has an
    MTP module, multi-token prediction comes last. Each rung runs in a process
    of its own; without --lengths it is the batch cell.

    tokenmill bench ladder --plot ladder.html
    tokenmill bench ladder --model llama3.1-8b --random-weights --device cuda
    --lengths llama3.1-8b --output-len 128 --num-prompts 2000 --gpu-price 2.5
    tokenmill bench ladder --rungs overlap,fp8
    """
    throughput.check_flags(settings)
    names = (settings.get("rungs") or "").split(",")
    rungs = bench.choose([name.strip() for name in names if name.strip()])
    plot = Path(settings.get("plot")) if "plot" in settings else None
    if plot:
        check_plot(plot)
    model = settings.build(ModelConfig)
    make_cells(settings.build(BenchConfig, cells=("batch",)))  # wrong lengths end here
    path = throughput.model_path(model)
    device, features = _device(model, path)
    values = settings.values | {"model": str(path), "device": device, "json-only": True}
    attempts = _climb(rungs, values, device, features)
    rows = bench.ladder_rows(attempts, settings.get("gpu-price"))
    title = f"{model.model} on {device}, {_workload(settings)}"
    if plot:
        write_plot(plot, title, rows)
    if not settings.get("json-only"):
        _print(title, rows, device, settings.get("gpu-price"))
    console.print_json(
        {
            "benchmark": "ladder",
            "model": model.model,
            "device": device,
            "workload": _workload(settings),
            "usd_per_hour": settings.get("gpu-price"),
            "rungs": rows,
        }
    )
    if failed := [attempt.rung.name for attempt in attempts if attempt.error]:
        raise BenchError(f"{len(failed)} of {len(attempts)} rungs failed: {', '.join(failed)}")


def _device(model: ModelConfig, path: Path) -> tuple[str, frozenset[str]]:
    """Where it runs, and what is there to be switched on."""
    from tokenmill.bench.ceiling import device_features
    from tokenmill.engine.build import has_mtp
    from tokenmill.engine.choices import choose_device

    device = choose_device(model)
    return device, device_features(device) | ({"mtp"} if has_mtp(model, path) else set())


def _climb(
    rungs: list[bench.Rung], values: dict[str, Any], device: str, features: frozenset[str]
) -> list[bench.Attempt]:
    """Run rung after rung; Ctrl-C ends the climb, and what was measured is reported."""
    attempts: list[bench.Attempt] = []
    for rung in rungs:
        try:
            attempts.append(_attempt(rung, values, device, features))
        except KeyboardInterrupt:
            return [*attempts, bench.Attempt(rung, error="interrupted")]
        if figures := attempts[-1].figures:
            console.note(f"Rung: {rung.name}: {figures['tok_s']:,.1f} tok/s")
    return attempts


def _attempt(
    rung: bench.Rung, values: dict[str, Any], device: str, features: frozenset[str]
) -> bench.Attempt:
    if reason := bench.missing(rung, features):
        return bench.Attempt(rung, skipped=reason)
    console.note(f"Rung: {rung.name}")
    switched = bench.settings_of(rung, device, features)
    idle = () if "mtp" in switched else ("draft", "mtp-relaxed")
    kept = {key: value for key, value in values.items() if key not in idle}
    return bench.run_rung(rung, _command(kept | switched))


def _command(values: dict[str, Any]) -> list[str]:
    """The throughput benchmark of one cell with these settings."""
    cells = {} if "lengths" in values else {"cell": ("batch",)}
    offered = [setting for group in throughput.PANELS.values() for setting in group]
    flags = Settings(values | cells).flags(offered)
    return [sys.executable, "-P", "-m", "tokenmill", "bench", "throughput", *flags]


def _workload(settings: Settings) -> str:
    (cell,) = make_cells(settings.build(BenchConfig, cells=("batch",)))
    return f"{cell.name} {cell.shape}"


def _print(title: str, rows: list[dict[str, Any]], device: str, usd_per_hour: float) -> None:
    console.out.print(f"[bold]{title}[/bold]")
    rate = "tok/s/GPU" if device == "cuda" else "tok/s"
    head = ["rung", rate, "speed-up", "cumulative", "$/M output", "of its roofline"]
    console.print_table([head, *(_cells(row) for row in rows if "tok_s" in row)])
    for row in rows:
        for word in ("skipped", "error"):
            if word in row:
                console.out.print(f"{row['name']}: {word}: {row[word]}", markup=False)
    console.out.print(f"at ${usd_per_hour:g} an hour (--gpu-price)")


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row['tok_s']:,.1f}",
        f"{row['speedup']:.2f}x",
        f"{row['cumulative']:.2f}x",
        f"{row['usd_per_million']:.3f}",
        f"{row['share_of_ceiling']:.0%}",
    ]


COMMANDS = (BenchCommand("ladder", ladder, PANELS),)

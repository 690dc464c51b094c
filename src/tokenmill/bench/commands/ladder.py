"""tokenmill bench ladder: one workload, each time with one more optimisation switched on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.bench.commands import BenchCommand, throughput
from tokenmill.bench.offline import OURS
from tokenmill.bench.options import BenchConfig, GpuPrice, LadderOptions
from tokenmill.bench.workload import BenchError, make_cells
from tokenmill.core.config import ModelConfig
from tokenmill.core.metrics import usd_per_million_tokens
from tokenmill.settings import Settings, by_key, without

if TYPE_CHECKING:
    from tokenmill.bench.results.reports import CellReport, RungReport

Values = dict[str, Any]  # settings by their keys


@dataclass(frozen=True, slots=True)
class LadderRung:
    """What one step of the ladder changes; it keeps all that the steps before it changed."""

    key: str
    name: str
    settings: Values
    needs: str = ""  # a feature of the device, one of NEEDS


EAGER: Values = {
    "fused-kernels": False,
    "cuda-graphs": False,
    "overlap": False,
    "kv-cache-dtype": "auto",
}
BASE: dict[str, Values] = {"cuda": {"dtype": "bf16"}, "cpu": {"dtype": "fp32"}}
RUNGS = (
    LadderRung("eager", "eager torch", EAGER),
    LadderRung("fused", "fused kernels", {"fused-kernels": True}, "compiled"),
    LadderRung("graphs", "CUDA graphs", {"cuda-graphs": True}, "cuda"),
    LadderRung("overlap", "overlap", {"overlap": True}),
    LadderRung("int8", "int8", {"dtype": "int8"}, "cpu"),
    LadderRung("fp8", "fp8", {"dtype": "fp8"}, "fp8"),
    LadderRung("fp8-kv", "fp8 KV", {"kv-cache-dtype": "fp8"}, "fp8"),
    LadderRung("mtp", "multi-token prediction", {"mtp": 3}, "mtp"),
)
NEEDS = {
    "compiled": "there are no compiled kernels for this machine",
    "cuda": "needs a GPU",
    "cpu": "only on a CPU",
    "fp8": "needs a GPU with fp8 arithmetic",
    "mtp": "the model has no MTP module (--draft)",
}
CHANGED = frozenset().union(*BASE.values(), *(rung.settings for rung in RUNGS))


@dataclass(frozen=True, slots=True)
class RungAttempt:
    rung: LadderRung
    figures: CellReport | None = None  # ours in the only cell
    skipped: str = ""
    error: str = ""


def choose(names: Sequence[str], rungs: Sequence[LadderRung] = RUNGS) -> list[LadderRung]:
    """The rungs of these keys or names, in the ladder's order; all where there is none."""
    known = {name: rung for rung in rungs for name in (rung.key, rung.name)}
    unknown = [name for name in names if name not in known]
    if unknown:
        keys = ", ".join(rung.key for rung in rungs)
        raise BenchError(f"--rungs {unknown[0]}: no such rung; there are {keys}")
    wanted = {known[name].key for name in names}
    return [rung for rung in rungs if not names or rung.key in wanted]


def settings_of(
    rung: LadderRung, device: str, features: Collection[str], rungs: Sequence[LadderRung] = RUNGS
) -> Values:
    """All that is on at a rung: the changes of the rungs up to it that the device supports."""
    values = dict(BASE[device])
    for earlier in rungs[: rungs.index(rung) + 1]:
        if not missing(earlier, features):
            values |= earlier.settings
    return values


def missing(rung: LadderRung, features: Collection[str]) -> str:
    """Why a device cannot run a rung; empty where it can."""
    return NEEDS[rung.needs] if rung.needs and rung.needs not in features else ""


def run_benchmark(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[Any, str]:
    """The report and no error, or {} and the error; what the child writes to stderr passes on.

    `environ` joins the environment: what a process list must not show, such as keys.
    """
    last_line = ""
    environment = os.environ | dict(environ or {})
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stdout:
        with subprocess.Popen(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                last_line = line.strip() or last_line
        if process.returncode:
            reason = last_line.removeprefix("error: ")
            return {}, reason or f"exit status {process.returncode}"
        stdout.seek(0)
        return json.loads(stdout.read().splitlines()[-1]), ""


def run_rung(rung: LadderRung, command: Sequence[str]) -> RungAttempt:
    """Run a throughput benchmark in a process of its own; what it writes to stderr passes on."""
    import msgspec

    from tokenmill.bench.results.reports import CellReport

    found, error = run_benchmark(command)
    if error:
        return RungAttempt(rung, error=error)
    (cell,) = msgspec.convert(found["cells"], dict[str, dict[str, CellReport]]).values()
    return RungAttempt(rung, figures=cell[OURS])


def ladder_rows(attempts: Sequence[RungAttempt], usd_per_hour: float) -> list[RungReport]:
    """One dict per rung; speed-ups are over the last and the first rung that ran."""
    from tokenmill.bench.results.reports import RungReport

    rows: list[RungReport] = []
    rates: list[float] = []
    for attempt in attempts:
        row = RungReport(rung=attempt.rung.key, name=attempt.rung.name)
        if attempt.figures:
            rates.append(attempt.figures.tok_s)
            _add_figures(row, attempt.figures, rates, usd_per_hour)
        elif attempt.skipped:
            row.skipped = attempt.skipped
        else:
            row.error = attempt.error
        rows.append(row)
    return rows


def _add_figures(
    row: RungReport, figures: CellReport, rates: Sequence[float], usd_per_hour: float
) -> None:
    row.tok_s = rates[-1]
    row.speedup = round(rates[-1] / rates[max(0, len(rates) - 2)], 3)
    row.cumulative = round(rates[-1] / rates[0], 3)
    row.usd_per_million = round(usd_per_million_tokens(usd_per_hour, rates[-1]), 6)
    for name in ("ceiling_tok_s", "share_of_ceiling", "mfu", "mbu"):
        setattr(row, name, getattr(figures, name))


NOT_OFFERED = CHANGED | {"cell"}
BENCHMARK = {panel: without(group, *NOT_OFFERED) for panel, group in throughput.PANELS.items()}
PANELS = {"Ladder": (LadderOptions, GpuPrice), **BENCHMARK}


def ladder(settings: Settings) -> None:
    """Speed-up of each optimisation: the same workload, with one more switched on each time.

    On a GPU: eager torch, fused kernels, CUDA graphs, overlap, fp8, fp8 KV.
    On a CPU: eager torch, fused kernels, overlap, int8. Where the model has an
    MTP module, multi-token prediction comes last. Each rung runs in its own
    process. Without --lengths the workload is the batch cell.

    tokenmill bench ladder --plot ladder.html
    tokenmill bench ladder --model llama3.1-8b --random-weights --device cuda
    --lengths llama3.1-8b --output-len 128 --num-prompts 2000 --gpu-price 2.5
    tokenmill bench ladder --rungs overlap,fp8
    """
    from tokenmill.bench.report.page import render
    from tokenmill.bench.report.table_pages import check_page, ladder_page
    from tokenmill.bench.results.reports import LadderReport, as_json

    throughput.check_flags(settings)
    names = (settings.get("rungs") or "").split(",")
    rungs = choose([name.strip() for name in names if name.strip()])
    plot = Path(settings.get("plot")) if "plot" in settings else None
    if plot:
        check_page("plot", plot)
    model = settings.build(ModelConfig)
    make_cells(settings.build(BenchConfig, cells=("batch",)))  # wrong lengths end here
    path = throughput.model_path(model)
    device, features = _device(model, path)
    values = settings.values | {"model": str(path), "device": device, "json": True}
    attempts = _measure_ladder(rungs, values, device, features)
    rows = ladder_rows(attempts, settings.get("gpu-price"))
    title = f"{model.model} on {device}, {_workload(settings)}"
    if not settings.get("json"):
        _print(title, rows, device, settings.get("gpu-price"))
    report = LadderReport(
        model=model.model,
        device=device,
        workload=_workload(settings),
        usd_per_hour=settings.get("gpu-price"),
        rungs=rows,
    )
    console.print_json(as_json(report), settings.get("json"))
    if plot:  # after the figures, which are lost to nobody where its disk is full
        plot.write_text(render(ladder_page(title, rows)), encoding="utf-8")
    if failed := [attempt.rung.name for attempt in attempts if attempt.error]:
        raise BenchError(f"{len(failed)} of {len(attempts)} rungs failed: {', '.join(failed)}")


def _device(model: ModelConfig, path: Path) -> tuple[str, frozenset[str]]:
    from tokenmill.bench.ceiling import device_features
    from tokenmill.engine.choices import choose_device
    from tokenmill.engine.drafts.open_drafts import has_mtp

    device = choose_device(model)
    return device, device_features(device) | ({"mtp"} if has_mtp(model, path) else set())


def _measure_ladder(
    rungs: list[LadderRung], values: Values, device: str, features: frozenset[str]
) -> list[RungAttempt]:
    """Run rung after rung; Ctrl-C ends it, and what was measured is reported."""
    attempts: list[RungAttempt] = []
    for rung in rungs:
        try:
            attempts.append(_attempt(rung, values, device, features))
        except KeyboardInterrupt:
            return [*attempts, RungAttempt(rung, error="interrupted")]
        if figures := attempts[-1].figures:
            console.note(f"Rung: {rung.name}: {figures.tok_s:,.1f} tok/s")
    return attempts


def _attempt(
    rung: LadderRung, values: Values, device: str, features: frozenset[str]
) -> RungAttempt:
    if reason := missing(rung, features):
        return RungAttempt(rung, skipped=reason)
    console.note(f"Rung: {rung.name}")
    switched = settings_of(rung, device, features)
    idle = () if "mtp" in switched else ("draft",)
    kept = {key: value for key, value in values.items() if key not in idle}
    return run_rung(rung, _command(kept | switched))


def _command(values: Values) -> list[str]:
    cells = {} if "lengths" in values else {"cell": ("batch",)}
    offered = by_key(*throughput.PANELS.values())
    flags = Settings(values | cells).flags(offered.values())
    return [sys.executable, "-P", "-m", "tokenmill", "bench", "throughput", *flags]


def _workload(settings: Settings) -> str:
    (cell,) = make_cells(settings.build(BenchConfig, cells=("batch",)))
    return f"{cell.name} {cell.shape}"


def _print(title: str, rows: Sequence[RungReport], device: str, usd_per_hour: float) -> None:
    console.out.print(f"[bold]{title}[/bold]")
    rate = "tok/s/GPU" if device == "cuda" else "tok/s"
    head = ["rung", rate, "speed-up", "cumulative", "$/M output", "of its roofline"]
    console.print_table([head, *(_cells(row) for row in rows if row.tok_s)])
    for row in rows:
        if row.skipped:
            console.out.print(f"{row.name}: skipped: {row.skipped}", markup=False)
        if row.error:
            console.out.print(f"{row.name}: error: {row.error}", markup=False)
    console.out.print(f"at ${usd_per_hour:g} an hour (--gpu-price)")


def _cells(row: RungReport) -> list[str]:
    return [
        row.name,
        f"{row.tok_s:,.1f}",
        f"{row.speedup:.2f}x",
        f"{row.cumulative:.2f}x",
        f"{row.usd_per_million:.3f}",
        f"{row.share_of_ceiling:.0%}",
    ]


COMMANDS = (BenchCommand("ladder", ladder, PANELS),)

"""The published MLPerf Inference results, and the rank of a result among them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.bench.results.native_results import LOADGEN
from tokenmill.bench.results.reports import PlacedReport, PublishedEntry
from tokenmill.bench.results.result import ToolResult
from tokenmill.bench.workload import BenchError

TABLE = Path(__file__).parent / "mlperf_inference_datacenter.csv"
NOTE = "A value per accelerator is derived, result / accelerators: it is no metric of MLPerf."
TOKENS, LATENCY = "Tokens/s", "Latency (s)"
FIGURES = {  # of a round, in the unit of the table
    TOKENS: ("output_tok_s", 1.0),
    "Samples/s": ("request_s", 1.0),
    "Queries/s": ("request_s", 1.0),
    LATENCY: ("e2e_ms.p90", 1e-3),
}
MISLABELED = ("v5.1", "llama3.1-8b", "Interactive")  # as Queries/s; the logs have tokens


def read_table(path: Path = TABLE) -> list[PublishedEntry]:
    with path.open(encoding="utf-8", newline="") as file:
        return [_entry(row) for row in csv.DictReader(file)]


def _entry(row: dict[str, str]) -> PublishedEntry:
    mislabeled = (row["round"], row["benchmark"], row["scenario"]) == MISLABELED
    texts = {name: text.strip() for name, text in row.items()}
    entry = msgspec.convert(
        texts | ({"unit": TOKENS} if mislabeled else {}),
        PublishedEntry,
        strict=False,
    )
    if entry.unit != LATENCY and entry.accelerators:
        entry.per_accelerator = entry.result / entry.accelerators
    return entry


def overview(table: Iterable[PublishedEntry]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for entry in table:
        scenarios = found.setdefault(entry.benchmark, {})
        scenarios[entry.scenario] = scenarios.get(entry.scenario, 0) + 1
    return {name: dict(sorted(found[name].items())) for name in sorted(found)}


def choose(
    table: Sequence[PublishedEntry],
    benchmark: str,
    scenario: str,
    *,
    round: str | None = None,
    accelerator: str | None = None,
    submitter: str | None = None,
) -> list[PublishedEntry]:
    """The rows of a benchmark's scenario, the best first; whatever does not exist is an error."""
    known = overview(table)
    name = _known("--benchmark", benchmark, known)
    scenario = _known("--scenario", scenario, known[name])
    entries = [e for e in table if (e.benchmark, e.scenario) == (name, scenario)]
    for flag, text, field in (
        ("--round", round, "round"),
        ("--accelerator", accelerator, "accelerator"),
        ("--submitter", submitter, "submitter"),
    ):
        if text is None:
            continue
        values = sorted({getattr(e, field) for e in entries} - {""})
        wanted = text.lower()
        entries = [e for e in entries if wanted in getattr(e, field).lower()]
        if not entries:
            raise BenchError(f"{flag} {text}: no row; there are {', '.join(values)}")
    return sorted(entries, key=_order)


def _known(flag: str, text: str, names: Iterable[str]) -> str:
    """The name that is meant, whatever its case; llama2-70b is the 99 % variant."""
    by_name = {name.lower(): name for name in names}
    found = by_name.get(text.lower()) or by_name.get(f"{text.lower()}-99")
    if found is None:
        raise BenchError(f"{flag} {text}: no rows; there are {', '.join(by_name.values())}")
    return found


def _order(entry: PublishedEntry) -> tuple[int, float]:
    """Best first: latencies upwards, rates per accelerator downwards, the rest after them."""
    if entry.unit == LATENCY:
        return 0, entry.result
    each = entry.per_accelerator
    return (0, -each) if each is not None else (1, -entry.result)


@dataclass(frozen=True, slots=True)
class Ours:
    """A result to rank, its accelerators, and notices that must be shown with it."""

    result: float
    accelerators: int | None
    notices: tuple[str, ...] = ()


def of_round(one: ToolResult, entry: PublishedEntry, accelerators: int | None) -> Ours:
    """A result in the unit of rows such as `entry`; its best load counts."""
    lower = entry.unit == LATENCY
    name, scale = FIGURES[entry.unit]
    values = [p.values[name] * scale for p in one.points if name in p.values]
    if not values:
        raise BenchError(f"{one.source}: has no figure in {entry.unit}, as {entry.benchmark} needs")
    notices = list(one.notices)
    if len(values) > 1:
        notices.append(f"the best of {len(values)} loads")
    run = one.config.get("mlperf_benchmark"), one.config.get("scenario")
    if run == (None, None) and one.tool != LOADGEN:
        notices.append("not an MLPerf run: its lengths, limits and duration are its own")
    elif run[0] and not entry.benchmark.startswith(run[0]):
        notices.append(f"a run of {run[0]}, not of {entry.benchmark}")
    elif run[1] and run[1] != entry.scenario:
        notices.append(f"a run of {run[1]}, not of {entry.scenario}")
    return Ours(min(values) if lower else max(values), accelerators or one.gpus, tuple(notices))


def place(entries: Sequence[PublishedEntry], ours: Ours) -> PlacedReport:
    """Rank and share of the best among the rows: per accelerator, but latencies as they are."""
    latency = bool(entries) and entries[0].unit == LATENCY
    if latency:
        values, value = [e.result for e in entries], ours.result
        better = sum(other < value for other in values)
        share = min(values) / value
    else:
        if not ours.accelerators:
            raise BenchError("--gpus is missing: results are compared per accelerator")
        values = [each for e in entries if (each := e.per_accelerator) is not None]
        if not values:
            raise BenchError("none of the chosen rows has accelerators to compare with")
        value = ours.result / ours.accelerators
        better = sum(other > value for other in values)
        share = value / max(values)
    return PlacedReport(
        result=ours.result,
        accelerators=ours.accelerators,
        per_accelerator=None if latency else value,
        rank=better + 1,
        of=len(values) + 1,
        share_of_best=round(share, 4),
        notices=list(ours.notices),
    )

"""tokenmill plan replay --record."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.core.metrics import RequestTimes, percentile, summarize
from tokenmill.settings import Settings, SettingsError

if TYPE_CHECKING:
    from tokenmill.plan.recorded import Reproduction, RunRecord

# What may differ from the recorded run: the setting, and the scheduler's field.
FIELDS = {
    "max-num-batched-tokens": "max_num_batched_tokens",
    "max-num-seqs": "max_num_seqs",
    "policy": "policy",
    "chunked-prefill": "chunked_prefill",
}
Report = dict[str, Any]


def replay_record(settings: Settings) -> None:
    """Reproduce a recorded run, then play it in virtual time, as it was and as it might be."""
    from tokenmill.plan.recorded import Reproducer, read_record, simulate

    record = read_record(Path(settings.get("record")).expanduser())
    found = Reproducer(record).run()
    if not found.steps:
        raise SettingsError(f"--record {record.path}: no step of it has ended")
    rates = found.rates()
    changed = {key: settings.values[key] for key in FIELDS if key in settings}
    config = replace(record.config, **{FIELDS[key]: value for key, value in changed.items()})
    num_blocks = settings.values.get("num-blocks", record.num_blocks)
    changed |= {"num-blocks": num_blocks} if num_blocks != record.num_blocks else {}
    report: Report = {
        "plan": "replay-record",
        "num_requests": len(record.requests),
        **_agreement(found),
        "recorded": _figures(found.times.values()),
        "changed": changed,
    }
    if _has_drafts(record):
        console.note("The record has drafts: their acceptance is not simulated, so no what-if")
    else:
        as_it_was = simulate(record, rates, record.config, record.num_blocks)
        report["simulated"] = _figures(as_it_was.values())
        if changed:
            report["what_if"] = _figures(simulate(record, rates, config, num_blocks).values())
    if not settings.get("json"):
        _print(report)
    console.print_json(report, settings.get("json"))


def _has_drafts(record: RunRecord) -> bool:
    return any(event[0] == "update" and event[5] and any(event[5]) for event in record.events)


def _agreement(found: Reproduction) -> Report:
    """How many batches were chosen again, and how far the formula is from the recorded steps."""
    rates = found.rates()
    errors = [abs(step.predicted_ms(rates) / step.time_ms - 1) for step in found.steps]
    return {
        "num_steps": found.num_steps,
        "num_equal_steps": found.num_equal,
        "first_difference": found.first_difference,
        "step_time_error": {
            "p50": round(percentile(errors, 50), 4),
            "p90": round(percentile(errors, 90), 4),
        },
    }


def _figures(times: Collection[RequestTimes]) -> Report:
    """Latencies of the requests that were answered, and the rate of their tokens."""
    answered = [t for t in times if t.num_tokens]
    begin_ns = min(t.arrival_ns for t in times)
    duration_s = (max((t.last_ns for t in answered), default=begin_ns) - begin_ns) / 1e9
    num_tokens = sum(t.num_tokens for t in answered)
    return {
        "ttft_ms": _rounded(summarize(t.ttft_ms for t in answered)),
        "tpot_ms": _rounded(summarize(t.tpot_ms for t in answered)),
        "duration_s": round(duration_s, 3),
        "output_tok_s": round(num_tokens / duration_s, 1) if duration_s > 0 else None,
    }


def _rounded(summary: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 2) for key, value in summary.items()}


def _print(report: Report) -> None:
    equal, steps = report["num_equal_steps"], report["num_steps"]
    console.out.print(f"{equal} of {steps} batches are chosen as they were recorded")
    if report["first_difference"]:
        console.out.print(report["first_difference"])
    error = report["step_time_error"]
    console.out.print(
        f"The formula of a step is off by {error['p50']:.1%} (p50) and {error['p90']:.1%} (p90)"
    )
    rows = [["", "TTFT ms mean", "p99", "TPOT ms mean", "p99", "s", "tokens/s"]]
    names = {"recorded": "recorded", "simulated": "simulated", "what_if": _changes(report)}
    for key, name in names.items():
        if (figures := report.get(key)) is None:
            continue
        latencies = [
            f"{figures[kind].get(column, 0.0):.1f}"
            for kind in ("ttft_ms", "tpot_ms")
            for column in ("mean", "p99")
        ]
        rows.append(
            [name, *latencies, f"{figures['duration_s']:.1f}", f"{figures['output_tok_s']}"]
        )
    console.print_table(rows)


def _changes(report: Report) -> str:
    return ", ".join(f"{key} {value}" for key, value in report["changed"].items())

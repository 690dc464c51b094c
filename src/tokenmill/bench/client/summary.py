"""Computes the summary of a point from its records; the same records give the same figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from tokenmill.bench.client.arrivals import ClientLoad
from tokenmill.bench.client.connections import CANCELLED
from tokenmill.bench.client.records import LoadRecord
from tokenmill.bench.results.intervals import interval_95, summarize_with_intervals
from tokenmill.bench.results.reports import (
    GoodputReport,
    Occurrence,
    PointReport,
    PriceReport,
    TooFew,
)
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import (
    NS_PER_MS,
    RequestTimes,
    Slo,
    summarize,
    tok_s_user,
    too_few_for,
    usd_per_million_tokens,
)

T = TypeVar("T")
Partial = dict[str, Any]  # some of the fields of a point

USAGE_MISSING, USAGE_INCONSISTENT, EMPTY = "usage_missing", "usage_inconsistent", "empty"
STALLED, NO_DONE, NO_FINISH = "stalled", "no_done", "no_finish_reason"
DOUBLE = "tokens_per_output"
STALL_S = 5.0  # a pause of a stream
DOUBLED_SHARE, MIN_OUTPUTS = (
    0.9,
    4,
)  # answers with two tokens an output; those of fewer tell nothing
MIN_BYTES_PER_TOKEN, SEVERAL = 1.5, 1.5  # where outputs carry several tokens by usage
COUNT_TOLERANCE = 0.1  # between usage and a tokenizer, at least TOLERATED_TOKENS
TOLERATED_TOKENS = 2
NUM_WINDOWS = 40
_LIMITS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}


@dataclass(frozen=True, slots=True)
class Price:
    num_gpus: int
    usd_per_gpu_hour: float

    @property
    def usd_per_hour(self) -> float:
        return self.num_gpus * self.usd_per_gpu_hour


def parse_slo(texts: Iterable[str]) -> Slo | None:
    """Limits in ms such as "ttft:500 tpot:50"; None where there are none."""
    limits: dict[str, float] = {}
    for part in " ".join(texts).replace(",", " ").split():
        name, _, text = part.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in _LIMITS or not 0 < limit < math.inf:
            known = ", ".join(_LIMITS)
            raise BenchError(f"--goodput takes NAME:MS with a name of {known}, got {part!r}")
        limits[_LIMITS[name]] = limit
    return Slo(**limits) if limits else None


def usage_fault(record: LoadRecord) -> tuple[str, str] | None:
    """(class, reason) if the token counts of a complete answer cannot be trusted."""
    tokens = record.completion_tokens
    if tokens is None:
        return USAGE_MISSING, "the answer has no usage"
    if tokens < record.num_outputs:
        return USAGE_INCONSISTENT, f"usage has {tokens} tokens, {record.num_outputs} outputs came"
    if record.max_tokens is not None and tokens > record.max_tokens:
        return USAGE_INCONSISTENT, f"usage has {tokens} tokens, {record.max_tokens} were allowed"
    total = (record.prompt_tokens or 0) + tokens
    if record.total_tokens not in (None, total):
        return USAGE_INCONSISTENT, f"usage has {record.total_tokens} tokens in all, not {total}"
    if tokens > record.num_bytes + TOLERATED_TOKENS:
        return USAGE_INCONSISTENT, f"usage has {tokens} tokens, the text {record.num_bytes} bytes"
    counted = record.counted_tokens
    slack = max(TOLERATED_TOKENS, COUNT_TOLERANCE * (counted or 0))
    if counted is not None and abs(counted - tokens) > slack:
        return USAGE_INCONSISTENT, f"usage has {tokens} tokens, the tokenizer counts {counted}"
    return None


def num_tokens(record: LoadRecord, stream: bool) -> int:
    """Output tokens by the usage if it can be trusted, otherwise as counted here."""
    if usage_fault(record) is None:
        return record.completion_tokens or 0
    if record.counted_tokens is not None:
        return record.counted_tokens
    return record.num_outputs if stream else 0


def times_of(record: LoadRecord, stream: bool, arrival_ns: int | None = None) -> RequestTimes:
    """The stamps of a record; its first output is taken to carry as many tokens as the others."""
    tokens = num_tokens(record, stream)
    num_first = max(1, round(tokens / record.num_outputs)) if record.num_outputs else 0
    return RequestTimes(
        record.sent_ns if arrival_ns is None else arrival_ns,
        record.first_ns,
        record.last_ns,
        num_first,
        tokens,
    )


def summarize_point(
    load: ClientLoad,
    records: Sequence[LoadRecord],
    *,
    stream: bool = True,
    slo: Slo | None = None,
    price: Price | None = None,
    stall_s: float = STALL_S,
) -> PointReport:
    """All figures of one point; failed requests are counted by class and are in no average."""
    whole = [r for r in records if r.error is None]
    failed = [r for r in records if r.error not in (None, CANCELLED)]
    seconds = _seconds(whole)
    point = PointReport(
        load=load.name,
        concurrency=load.concurrency,
        rate=load.rate,
        seconds=seconds,
        num_completed=len(whole),
        num_failed=len(failed),
        num_unfinished=len(records) - len(whole) - len(failed),
        num_retried=sum(r.retried for r in records),
        errors=_by_class((r.error or "", r.detail) for r in failed),
        doubts=_by_class(fault for r in whole for fault in _doubts(r, stall_s))
        | (usage_doubts(whole) if stream else {}),
        finish_reasons=dict(Counter(str(r.finish_reason) for r in whole)),
        too_few=_too_few(whole, stream),
        **_rates(whole, seconds, stream),
        **_latencies(load, whole, stream),
    )
    if slo is not None:
        point.goodput = _goodput(whole, len(failed), seconds, slo, stream)
    if price is not None:
        point.price = _price(point, price)
    return rounded(point)


def _seconds(whole: Sequence[LoadRecord]) -> float:
    if not whole:
        return 0.0
    begin = min(r.sent_ns for r in whole)
    return (max(r.last_ns or r.end_ns for r in whole) - begin) / 1e9


def _doubts(record: LoadRecord, stall_s: float) -> list[tuple[str, str]]:
    fault = usage_fault(record)
    found = [fault] if fault is not None else []
    longest_s = max(record.gaps_ns, default=0) / 1e9
    if longest_s > stall_s:
        found.append((STALLED, f"the stream paused for {longest_s:.1f} s between two outputs"))
    if not record.saw_done:
        found.append((NO_DONE, f"no [DONE] came, finish reason {record.finish_reason}"))
    elif record.finish_reason is None:
        found.append((NO_FINISH, f"ended after {record.num_outputs} outputs without a reason"))
    if not record.num_outputs:
        found.append((EMPTY, f"no output, finish reason {record.finish_reason}"))
    return found


def usage_doubts(whole: Sequence[LoadRecord]) -> dict[str, Occurrence]:
    """Doubts about a usage that may count tokens twice, judged by outputs and bytes.

    Either every answer has two tokens an output, or outputs have several and tokens hardly a byte.
    """
    told = [
        (r.completion_tokens, r.num_outputs, r.num_bytes)
        for r in whole
        if r.completion_tokens and r.counted_tokens is None and r.num_outputs >= MIN_OUTPUTS
    ]
    if not told:
        return {}
    tokens, outputs, size = (sum(column) for column in zip(*told, strict=True))
    doubled = sum(abs(count - 2 * number) <= 1 for count, number, _ in told)
    is_thin = tokens > SEVERAL * outputs and size < MIN_BYTES_PER_TOKEN * tokens
    if doubled < DOUBLED_SHARE * len(told) and not is_thin:
        return {}
    text = (
        f"usage has {tokens / outputs:.2f} tokens an output and {size / tokens:.1f} bytes a token: "
        "outputs carry several tokens, or usage counts double; --tokenizer tells which"
    )
    return {DOUBLE: Occurrence(count=doubled or len(told), first=text)}


def _by_class(found: Iterable[tuple[str, str]]) -> dict[str, Occurrence]:
    """How many of each class, and what the first one said."""
    classes: dict[str, Occurrence] = {}
    for name, detail in found:
        classes.setdefault(name, Occurrence(count=0, first=detail)).count += 1
    return classes


def _rates(whole: Sequence[LoadRecord], seconds: float, stream: bool) -> Partial:
    output = sum(num_tokens(r, stream) for r in whole)
    prompt = sum(r.prompt_tokens or 0 for r in whole)
    outputs = sum(r.num_outputs for r in whole)
    per_second = 1 / seconds if seconds else 0.0
    report: Partial = {
        "num_prompt_tokens": prompt,
        "num_output_tokens": output,
        "request_s": len(whole) * per_second,
        "output_tok_s": output * per_second,
        "total_tok_s": (output + prompt) * per_second,
        "outputs_s": outputs * per_second,
        "tokens_per_output": output / outputs if outputs else 0.0,
    }
    if any(r.image_tokens for r in whole):
        report["num_image_tokens"] = sum(r.image_tokens or 0 for r in whole)
    if whole and seconds:
        begin_ns = min(r.sent_ns for r in whole)
        rates = window_rates(whole, begin_ns, seconds, stream, NUM_WINDOWS)
        if bounds := interval_95(rates):
            report["output_tok_s_ci95"] = list(bounds)
    return report


def window_rates(
    whole: Sequence[LoadRecord], begin_ns: int, seconds: float, stream: bool, num_windows: int
) -> list[float]:
    """Output tokens per second in equal parts of the time from `begin_ns`."""
    width_ns = seconds * 1e9 / num_windows
    windows = [0.0] * num_windows
    for record in whole:
        now_ns = record.first_ns
        share = num_tokens(record, stream) / max(record.num_outputs, 1)
        for gap_ns in (0, *record.gaps_ns) if record.num_outputs else ():
            now_ns += gap_ns
            windows[min(int((now_ns - begin_ns) / width_ns), num_windows - 1)] += share
    return [tokens / width_ns * 1e9 for tokens in windows]


def _latencies(load: ClientLoad, whole: Sequence[LoadRecord], stream: bool) -> Partial:
    times = [times_of(r, stream) for r in whole]
    slots = int(load.concurrency or 1)  # requests that are under way together
    report: Partial = {"e2e_ms": summarize_with_intervals((t.e2e_ms for t in times), slots)}
    if not stream:
        return report
    report["ttft_ms"] = summarize_with_intervals((t.ttft_ms for t in times), slots)
    report["tpot_ms"] = summarize_with_intervals((t.tpot_ms for t in times), slots)
    report["tpot_n1_ms"] = summarize(t.tpot_n1_ms for t in times)
    report["itl_ms"] = summarize(gap / NS_PER_MS for r in whole for gap in r.gaps_ns)
    report["tok_s_user"] = tok_s_user(report["tpot_ms"])
    if load.is_open:
        scheduled = (times_of(r, stream, r.planned_ns).ttft_ms for r in whole)
        report["ttft_from_schedule_ms"] = summarize_with_intervals(scheduled)
    return report


def _too_few(whole: Sequence[LoadRecord], stream: bool) -> dict[str, TooFew]:
    """By latency, how many values there are where some percentile needs more."""
    times = [times_of(r, stream) for r in whole]
    counts = {"e2e_ms": sum(t.e2e_ms is not None for t in times)}
    if stream:
        counts["ttft_ms"] = sum(t.ttft_ms is not None for t in times)
        counts["tpot_ms"] = sum(t.tpot_ms is not None for t in times)
        counts["itl_ms"] = sum(len(r.gaps_ns) for r in whole)
    return {
        key: TooFew(num_values=count, percentiles=names)
        for key, count in counts.items()
        if count and (names := too_few_for(count))
    }


def _goodput(
    whole: Sequence[LoadRecord], num_failed: int, seconds: float, slo: Slo, stream: bool
) -> GoodputReport:
    good = [r for r in whole if slo.met_by(times_of(r, stream))]
    tokens = sum(num_tokens(r, stream) for r in good)
    answered = len(whole) + num_failed
    return GoodputReport(
        ttft_ms=slo.ttft_ms,
        tpot_ms=slo.tpot_ms,
        e2e_ms=slo.e2e_ms,
        num_good=len(good),
        good_share=len(good) / answered if answered else 0.0,
        request_s=len(good) / seconds if seconds else 0.0,
        output_tok_s=tokens / seconds if seconds else 0.0,
    )


def _price(point: PointReport, price: Price) -> PriceReport:
    def usd(tok_s: float) -> float | None:
        return usd_per_million_tokens(price.usd_per_hour, tok_s) if tok_s else None

    found = PriceReport(
        gpus=price.num_gpus,
        usd_per_gpu_hour=price.usd_per_gpu_hour,
        output_tok_s_gpu=point.output_tok_s / price.num_gpus,
        usd_per_million_output=usd(point.output_tok_s),
        usd_per_million_total=usd(point.total_tok_s),
    )
    if point.goodput:
        found.usd_per_million_good_output = usd(point.goodput.output_tok_s)
    return found


def count_tokens(records: Iterable[LoadRecord], count: Callable[[str], int]) -> None:
    for record in records:
        if record.text is not None:
            record.counted_tokens = count(record.text)


def rounded(value: T) -> T:
    """All numbers to five digits behind the point; what is no number becomes None."""
    return cast(T, _rounded(value))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    if isinstance(value, msgspec.Struct):
        return type(value)(**_rounded(msgspec.structs.asdict(value)))
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value

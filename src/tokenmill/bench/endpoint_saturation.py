"""`bench endpoint --saturate`: runs the search over points and prints its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from tokenmill import console
from tokenmill.bench.options import EndpointConfig
from tokenmill.core.metrics import Slo
from tokenmill.settings import Settings, SettingsError

if TYPE_CHECKING:
    from tokenmill.bench.client.arrivals import ClientLoad
    from tokenmill.bench.client.saturation import Probe, SearchGoal
    from tokenmill.bench.results.reports import PointReport, SaturationReport

RAMP_SHARE = 0.1  # of a point: users who all begin at once are a burst of prompts, not a load
START = 4  # users; a knee is looked for from one user on
HIGHEST = 4096
RATE_SPAN = 64.0  # how far below its start a rate is looked for
HIGHEST_RATE = 1e6


class Bench(Protocol):
    """What a search needs of `bench endpoint`."""

    slo: Slo | None

    @property
    def interrupted(self) -> bool: ...

    def measure(self, load: ClientLoad) -> PointReport: ...


def check_saturation(settings: Settings, config: EndpointConfig) -> None:
    for name, values in (("concurrency", config.concurrency), ("rate", config.rate)):
        if len(values) > 1:
            raise SettingsError(f"--saturate starts at a single --{name}, got {len(values)} values")
    if config.trace is not None:
        raise SettingsError("--saturate and --trace do not go together: leave one out")
    if config.concurrency and "arrival" in settings:
        raise SettingsError("--saturate with --arrival searches a rate, not --concurrency")
    if "slo-percentile" in settings and not config.goodput:
        raise SettingsError("--slo-percentile needs the limits of --goodput")


def search_saturation(
    bench: Bench, base: ClientLoad, config: EndpointConfig, by_rate: bool = False
) -> SaturationReport:
    """Run points until the load is found; `base` bounds each of them."""
    from tokenmill.bench.client.saturation import Interrupted, find_saturation
    from tokenmill.bench.client.summary import rounded
    from tokenmill.bench.results.reports import SaturationReport

    share = None if bench.slo is None else config.slo_percentile / 100
    goal = _goal(base, config, share, by_rate)

    def probe(load: float) -> Probe:
        point = bench.measure(_load(base, load, by_rate))
        if bench.interrupted:
            raise Interrupted
        return to_probe(load, point)

    outcome = find_saturation(probe, goal)
    report = SaturationReport(
        by="rate" if by_rate else "concurrency",
        criterion="throughput" if share is None else "goodput",
        required_share=share,
        **outcome.fields(),
    )
    return rounded(report)


def _goal(
    base: ClientLoad, config: EndpointConfig, share: float | None, by_rate: bool
) -> SearchGoal:
    from tokenmill.bench.client.saturation import SearchGoal

    if by_rate:
        start = config.rate[0] if config.rate else 1.0
        # Requests that are all sent within a second are a burst, not a rate.
        highest = float(base.num_sessions or HIGHEST_RATE)
        return SearchGoal(share, min(start, highest), start / RATE_SPAN, highest, is_whole=False)
    start = config.concurrency[0] if config.concurrency else START if share else 1
    # More users than requests would not be that many users.
    highest = min(HIGHEST, base.num_sessions or HIGHEST)
    return SearchGoal(share, min(start, highest), 1, highest)


def _load(base: ClientLoad, load: float, by_rate: bool) -> ClientLoad:
    if by_rate:
        return replace(base, rate=load, concurrency=None)
    ramp_s = base.ramp_s or RAMP_SHARE * (base.duration_s or 0.0)
    return replace(base, concurrency=int(load), ramp_s=ramp_s)


def note_client(saturation: SaturationReport, points: Sequence[PointReport]) -> None:
    """Mark the search as limited by the client if an audit at the found load says so."""
    decisive = (saturation.found, saturation.above)
    saturation.client_limited |= any(
        point.audit.client_limited for point in points if getattr(point, saturation.by) in decisive
    )


def to_probe(load: float, point: PointReport) -> Probe:
    from tokenmill.bench.client.saturation import Probe

    answered = point.num_completed + point.num_failed
    good = point.goodput.num_good if point.goodput else point.num_completed
    limited = point.audit.client_limited
    return Probe(load, point.output_tok_s, max(answered, 1), good, limited)


def print_saturation(report: SaturationReport) -> None:
    found, by = report.found, report.by
    unit = "requests/s" if by == "rate" else "users at once"
    if report.criterion == "goodput":
        share = 100 * (report.required_share or 0.0)
        what = f"at least {share:.4g} % of the requests keep the limits"
    else:
        what = "the knee of throughput"
    shown = "nothing" if found is None else f"{found:g} {unit}"
    console.out.print(f"saturation: {shown} ({what}); {report.stopped}", markup=False)
    for doubt in report.doubts or ():
        console.out.print(f"warning: {doubt}", markup=False)
    if report.client_limited:
        text = "warning: the client may have been the limit there: the server may take more load"
        console.out.print(text, markup=False)

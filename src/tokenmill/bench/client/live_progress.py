"""Shows the progress of `bench endpoint`: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tokenmill import console
from tokenmill.bench.client.progress import Progress, percentile_of

Watch = Callable[[Progress], None]

LINE_EVERY_S = 5.0
WINDOW_S = 5.0  # the rates of the view are those of the last seconds
BAR = 30


@dataclass(frozen=True, slots=True)
class PointGoal:
    """The name of a point, and the number of requests or the time that ends it."""

    name: str
    num_requests: int | None = None
    duration_s: float | None = None

    def share_done(self, now: Progress) -> float | None:
        """How much of the point is over, by whichever bound is nearer."""
        shares = []
        if self.num_requests:
            shares.append((now.num_done + now.num_failed) / self.num_requests)
        if self.duration_s:
            shares.append(now.seconds / self.duration_s)
        return min(max(shares), 1.0) if shares else None

    def seconds_left(self, now: Progress) -> float | None:
        """Seconds until the end at the present rate; None if it is unknown."""
        share = self.share_done(now)
        return now.seconds * (1 - share) / share if share else None


def rates(before: Progress, now: Progress) -> tuple[float, float]:
    """(requests, tokens) per second between two moments."""
    passed = now.seconds - before.seconds
    if passed <= 0:
        return 0.0, 0.0
    done, tokens = now.num_done - before.num_done, now.num_tokens - before.num_tokens
    return done / passed, tokens / passed


def plain_line(before: Progress, now: Progress) -> str:
    requests_s, tok_s = rates(before, now)
    return (
        f"{now.seconds:6.1f} s: {now.num_done:,} done, {now.num_failed:,} failed, "
        f"{now.num_open:,} in flight, {requests_s:,.1f} req/s, {tok_s:,.0f} tok/s"
    )


def view_lines(goal: PointGoal, before: Progress, now: Progress) -> list[str]:
    requests_s, tok_s = rates(before, now)
    share, left_s = goal.share_done(now), goal.seconds_left(now)
    head = f"{goal.name}  {now.seconds:.1f} s"
    if share is not None:
        full = round(BAR * share)
        left = "" if left_s is None else f", about {left_s:,.0f} s left"
        head += f"  {'━' * full}{'╌' * (BAR - full)} {share:.0%}{left}"
    total = f" of {goal.num_requests:,}" if goal.num_requests else ""
    return [
        head,
        f"{now.num_done:,}{total} done, {now.num_failed:,} failed, {now.num_open:,} in flight",
        f"{requests_s:,.1f} req/s, {tok_s:,.0f} tok/s",
        f"TTFT {_latency(now.ttft)}   TPOT {_latency(now.tpot)}",
    ]


def _latency(counts: Sequence[int]) -> str:
    return "  ".join(f"p{percent} {_ms(percentile_of(counts, percent))}" for percent in (50, 99))


def _ms(value: float | None) -> str:
    """Two digits: a bucket is not known better."""
    return "-" if value is None else f"{float(f'{value:.2g}'):,g} ms"


def line_watch() -> Watch:
    shown = Progress(0.0)

    def watch(now: Progress) -> None:
        nonlocal shown
        if now.seconds - shown.seconds >= LINE_EVERY_S:
            console.note(plain_line(shown, now))
            shown = now

    return watch


@contextmanager
def watching(goal: PointGoal) -> Iterator[Watch]:
    """The function that shows the progress, called a few times a second."""
    if not console.err.is_terminal:
        yield line_watch()
        return
    from rich.live import Live
    from rich.text import Text

    seen = deque([Progress(0.0)])
    with Live(console=console.err, transient=True, auto_refresh=False) as live:

        def watch(now: Progress) -> None:
            while len(seen) > 1 and seen[1].seconds < now.seconds - WINDOW_S:
                seen.popleft()
            live.update(Text("\n".join(view_lines(goal, seen[0], now))), refresh=True)
            seen.append(now)

        yield watch

"""Compares a point's prefix-cache hits with the hits that the shared prefixes of its data explain.

If there were more hits than the data explain, the server had seen the prompts before, and the
figures show its cache. These are pure functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tokenmill.bench.client.datasets import Dataset, Synthetic
from tokenmill.bench.client.records import LoadRecord
from tokenmill.bench.results.reports import HitsReport, Occurrence, PointReport

UNEXPLAINED, DIFFER = "prefix_hits_unexplained", "prefix_hits_differ"
CLASSES = (UNEXPLAINED, DIFFER)
MARGIN = 0.05  # of the prompt tokens, by which hits may exceed what the data explain
APART = 0.1  # of the prompt tokens, by which hits of points that are compared may differ


def prefix_hits(
    dataset: Dataset,
    records: Sequence[LoadRecord],
    warmup: Sequence[LoadRecord] = (),
    server_share: float | None = None,
) -> HitsReport | None:
    """Shares of the prompt tokens, by usage or else by the server's counters; None: no usage."""
    whole = [r for r in records if r.error is None and r.prompt_tokens]
    total = sum(r.prompt_tokens or 0 for r in whole)
    if not total:
        return None
    explained = explained_tokens(dataset, records, warmup)
    by_usage = all(r.cached_tokens is not None for r in whole)
    cached = [r.cached_tokens or 0 for r in whole]
    over = sum(
        hits > most + MARGIN * (r.prompt_tokens or 0)
        for r, hits, most in zip(whole, cached, explained, strict=True)
    )
    return HitsReport(
        share=sum(cached) / total if by_usage else server_share,
        explained=sum(explained) / total,
        by="usage" if by_usage else "server" if server_share is not None else None,
        num_unexplained=over if by_usage else None,
    )


def explained_tokens(
    dataset: Dataset, records: Sequence[LoadRecord], warmup: Sequence[LoadRecord] = ()
) -> list[float]:
    """Prompt tokens of each complete answer that a perfect, initially empty cache would have.

    What all prompts have around them (a chat template) counts, and so does the turn before.
    """
    template = _template_tokens(dataset, records, warmup)
    seen = _seen_in_warmup(dataset, warmup)
    before: dict[tuple[int, int], int] = {}  # (session, turn) -> tokens in and out
    found = []
    for record in records:
        tokens = record.prompt_tokens or 0
        if record.turn:
            most = float(before.get((record.session, record.turn - 1), 0))
        else:
            most = template + (tokens - template) * _shared(dataset, record.session, seen)
        if record.error is None and tokens:
            before[record.session, record.turn] = tokens + (record.completion_tokens or 0)
            found.append(min(max(most, template), tokens))
    return found


def _template_tokens(
    dataset: Dataset, records: Sequence[LoadRecord], warmup: Sequence[LoadRecord]
) -> float:
    """Tokens around a prompt's own, at most: no request has more beside its own text."""
    bounds = [
        _text_tokens(r) - _length(dataset, r.session) / dataset.units_per_token
        for r in records
        if r.error is None and r.prompt_tokens and not r.turn
    ]
    if dataset.warmup_words is not None:
        bounds += [r.prompt_tokens - dataset.warmup_words for r in warmup if r.prompt_tokens]
    # A prompt with the file of an image has fewer tokens than its length says: it bounds nothing.
    return min((bound for bound in bounds if bound >= 0), default=0.0)


def _text_tokens(record: LoadRecord) -> int:
    return (record.prompt_tokens or 0) - (record.image_tokens or 0)


def asked_tokens(dataset: Dataset, records: Sequence[LoadRecord]) -> int | None:
    """Of the prompts that were answered; None where the data are texts, not lengths."""
    if dataset.units_per_token != 1:
        return None
    added = dataset.template_tokens if isinstance(dataset, Synthetic) else 0
    answered = [r.session for r in records if r.error is None and r.prompt_tokens]
    return sum(_length(dataset, session) + added for session in answered)


def _length(dataset: Dataset, session: int) -> int:
    return sum(length for _, length in dataset.parts(session))


def _seen_in_warmup(dataset: Dataset, warmup: Sequence[LoadRecord]) -> set[int]:
    """Warm-ups that are as the measured sessions have all parts in common but their own, last."""
    seen: set[int] = set()
    if dataset.warmup_words is None:
        for index in range(sum(not r.turn for r in warmup)):
            seen.update(_chain([key for key, _ in dataset.parts(index)[:-1]]))
    return seen


def _chain(keys: Sequence[Hashable]) -> list[int]:
    """A hash of each part that implies all before it."""
    found, above = [], 0
    for key in keys:
        above = hash((above, key))
        found.append(above)
    return found


def _shared(dataset: Dataset, session: int, seen: set[int]) -> float:
    """The share of a session's first prompt that has been sent before; it has been, from now on."""
    parts = dataset.parts(session)
    chain = _chain([key for key, _ in parts])
    same = total = 0
    is_same = True
    for link, (_, length) in zip(chain, parts, strict=True):
        is_same = is_same and link in seen
        same += length if is_same else 0
        total += length
    seen.update(chain)
    return same / total if total else 0.0


def hit_doubts(hits: HitsReport | None) -> dict[str, Occurrence]:
    """A doubt where there were more hits than the data explain."""
    if hits is None or hits.share is None or hits.share <= hits.explained + MARGIN:
        return {}
    text = (
        f"{hits.share:.0%} of the prompt tokens were hits in the server's prefix cache; the "
        f"data of this point explain {hits.explained:.0%}: the server had seen these prompts"
    )
    return {UNEXPLAINED: Occurrence(count=hits.num_unexplained or 1, first=text)}


def note_differences(points: Sequence[PointReport]) -> None:
    """Add a doubt to every point with more hits than the point with the fewest."""
    known = [
        (hits.share, hits.explained, point)
        for point in points
        if (hits := point.prefix_hits) and hits.share is not None
    ]
    if not known:
        return
    least, explained, first = min(known, key=lambda one: one[0])
    for share, own, point in known:
        point.doubts.pop(DIFFER, None)
        if share - least > APART and share - least - (own - explained) > APART:
            text = (
                f"prefix-cache hits of {share:.0%} here and of {least:.0%} at {first.load}: the "
                "cache, not the load alone, makes the difference between these points"
            )
            point.doubts[DIFFER] = Occurrence(first=text)


def hit_sentences(points: Sequence[PointReport]) -> list[str]:
    return [
        f"{point.load}: {point.doubts[name].first}"
        for point in points
        for name in CLASSES
        if name in point.doubts
    ]

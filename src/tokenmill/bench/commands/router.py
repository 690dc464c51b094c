"""tokenmill bench router: the cost of a routing decision, beside that of a plain dict of sets."""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.core.config import RouterConfig
from tokenmill.core.kv_events import Event, EventBatch, Removed, Stored
from tokenmill.core.metrics import summarize
from tokenmill.settings import SETTINGS, Settings

KEYS = (
    "router-workers",
    "index-blocks",
    "query-blocks",
    "block-size",
    "num-decisions",
    "bench-seed",
)
PANELS = {"Benchmark": (*(SETTINGS[key] for key in KEYS), SETTINGS["json-only"])}
DEFAULTS = {"block-size": 64}
LIMITS = {
    "decision_us": {"p50": 100.0, "p99": 300.0},
    "bytes_per_block": 200.0,
    "events_per_s": 300_000.0,
}
NUM_LIVE = 256  # requests that have been routed and not ended
QUERIES_AHEAD = 500
EVENT_BLOCKS = 16  # blocks of one stored event
CHURN = 0.1  # share of the blocks that are removed and stored again
PAGE = 4096

Hashes = Callable[[Sequence[int]], list[int]]
Form = Callable[[list[int]], Any]  # a prompt -> what a router is given


def router(settings: Settings) -> None:
    """Time and memory of a KV-aware routing decision.

    A decision includes block hashes of the tokens, the overlap with every
    worker's cache, score, choice and bookkeeping. Prompts are synthetic. The
    same decisions are also made with a plain dict of sets, for comparison.

    tokenmill bench router --num-decisions 5000
    """
    from tokenmill.sched.cache.blocks import block_hashes, hash_input

    shape = Shape(*(settings.get(key) for key in KEYS))
    size, num_workers = shape.block_size, shape.num_workers

    def hashes(token_ids: Sequence[int]) -> list[int]:
        return block_hashes(token_ids, size)

    console.note(
        f"{shape.num_blocks} blocks on {num_workers} workers, "
        f"{shape.query_blocks} blocks of {size} tokens a query"
    )
    ours, index = measure_index(lambda: BenchRouter(num_workers, size), hashes, shape)
    decisions = measure_decisions(ours, shape, hash_input)
    from_list = measure_decisions(ours, shape)
    plain, plain_index = measure_index(
        lambda: PlainRouter(num_workers, size, hashes), hashes, shape
    )
    report = {
        "benchmark": "router",
        **asdict(shape),
        "decision_us": decisions,
        "decision_from_list_us": from_list,
        "token_words_us": measure_form(shape, hash_input),
        **index,
        "plain_dict": {"decision_us": measure_decisions(plain, shape), **plain_index},
        "limits": LIMITS,
        "time": "CPU time of the thread; tokens as the words that the server makes of them where "
        "it tokenises, which token_words_us is the time of",
        "memory": "growth of the resident set over distinct blocks",
    }
    if not settings.get("json-only"):
        _print(report)
    console.print_json(report)


class BenchRouter:
    """The real router; its workers have numbers and publish their blocks."""

    def __init__(self, num_workers: int, block_size: int) -> None:
        from tokenmill.routing.router import Router

        self._router = Router(RouterConfig(block_size=block_size))
        self._names = [str(number) for number in range(num_workers)]
        self._sequences = [0] * num_workers
        for name in self._names:
            self._router.add_worker(name)

    def store(self, worker: int, hashes: list[int]) -> None:
        self._publish(worker, Stored(None, hashes))

    def remove(self, worker: int, hashes: list[int]) -> None:
        self._publish(worker, Removed(hashes))

    def decide(self, request_id: str, token_ids: Any) -> None:
        self._router.route(request_id, token_ids, time.monotonic())

    def end(self, request_id: str) -> None:
        self._router.free(request_id)

    def _publish(self, worker: int, event: Event) -> None:
        self._sequences[worker] += 1
        self._router.apply(self._names[worker], EventBatch(self._sequences[worker], [event]))


def _print(report: dict[str, Any]) -> None:
    limits, plain = report["limits"], report["plain_dict"]
    rows = [["", "this router", "plain dict", "limit"]]
    for name in ("p50", "p99"):
        ours, theirs = report["decision_us"][name], plain["decision_us"][name]
        limit = limits["decision_us"][name]
        rows.append([f"decision {name} us", f"{ours:.0f}", f"{theirs:.0f}", f"{limit:.0f}"])
    for key, name in (("bytes_per_block", "bytes a block"), ("events_per_s", "blocks/s taken in")):
        rows.append([name, f"{report[key]:.0f}", f"{plain[key]:.0f}", f"{limits[key]:.0f}"])
    console.print_table(rows)


class Router(Protocol):
    """A router as the benchmark sees it: workers are numbers."""

    def store(self, worker: int, hashes: list[int]) -> None: ...

    def remove(self, worker: int, hashes: list[int]) -> None: ...

    def decide(self, request_id: str, token_ids: Any) -> None:
        """Tokens -> blocks -> overlap -> score -> choice -> bookkeeping."""

    def end(self, request_id: str) -> None: ...


class PlainRouter:
    """What one would write first: a dict of sets, walked block by block and worker by worker."""

    def __init__(self, num_workers: int, block_size: int, hashes: Hashes) -> None:
        self._size = block_size
        self._hashes = hashes
        self._holders: dict[int, set[int]] = {}
        self._load = [0] * num_workers
        self._routed: dict[str, tuple[int, int]] = {}

    def store(self, worker: int, hashes: list[int]) -> None:
        for block_hash in hashes:
            self._holders.setdefault(block_hash, set()).add(worker)

    def remove(self, worker: int, hashes: list[int]) -> None:
        for block_hash in hashes:
            holders = self._holders[block_hash]
            holders.discard(worker)
            if not holders:
                del self._holders[block_hash]

    def decide(self, request_id: str, token_ids: Sequence[int]) -> None:
        hashes = self._hashes(token_ids)
        overlap = [0] * len(self._load)
        for block_hash in hashes:
            holders = self._holders.get(block_hash)
            if not holders:
                break
            for worker in holders:
                overlap[worker] += 1
        costs = [
            (load + len(token_ids) - self._size * blocks, worker)
            for worker, (load, blocks) in enumerate(zip(self._load, overlap, strict=True))
        ]
        worker = min(costs)[1]
        work = len(token_ids) - self._size * overlap[worker]
        self._load[worker] += work
        self._routed[request_id] = (worker, work)
        self.store(worker, hashes)

    def end(self, request_id: str) -> None:
        worker, work = self._routed.pop(request_id)
        self._load[worker] -= work


class Prompts:
    """Synthetic prompts by number, made again whenever they are needed."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        self._num_tokens = num_tokens
        self._seed = seed

    def tokens(self, number: int) -> array[int]:
        """Token ids below 65536, as an array("q")."""
        rng = random.Random(f"{self._seed}:{number}")
        return array("q", array("H", rng.randbytes(2 * self._num_tokens)))

    def query(self, number: int, kept: int) -> array[int]:
        """A prompt that leaves prompt `number` after `kept` tokens."""
        return self.tokens(number)[:kept] + self.tokens(~number)[kept:]


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is cached, where, and how long a query is."""

    num_workers: int = 64
    num_blocks: int = 1_400_000
    query_blocks: int = 200
    block_size: int = 64
    num_decisions: int = 5000
    seed: int = 0

    @property
    def num_chains(self) -> int:
        return -(-self.num_blocks // self.query_blocks)

    @property
    def prompts(self) -> Prompts:
        return Prompts(self.query_blocks * self.block_size, self.seed)


def measure_index(
    make: Callable[[], Router], hashes: Hashes, shape: Shape
) -> tuple[Router, dict[str, float]]:
    """Fill a router with distinct blocks, then replace some: the router, its memory and speed.

    Memory is the growth of the resident set: keep alive whatever was measured before.
    """
    prompts, num_chains = shape.prompts, shape.num_chains
    gc.collect()
    before = resident_bytes()
    router = make()
    ingest_ns = _fill(router, prompts, hashes, num_chains, shape.num_workers)
    gc.collect()
    grown = resident_bytes() - before
    churned = range(0, num_chains, round(1 / CHURN))
    ingest_ns += _churn(router, prompts, hashes, churned, shape.num_workers)
    stored = num_chains * shape.query_blocks
    ingested = stored + 2 * shape.query_blocks * len(churned)
    return router, {
        "bytes_per_block": round(grown / stored, 1),
        "events_per_s": round(ingested / (ingest_ns / 1e9)),
    }


def measure_decisions(router: Router, shape: Shape, form: Form = list) -> dict[str, float]:
    """CPU time in us of decisions on prompts that share a part with what is cached.

    `form` makes of a prompt what the router is given, before the clock starts.

    The router never waits: its cost is its CPU time, whoever else uses the machine.
    """
    gc.collect()
    gc.freeze()
    try:
        times_us = _decide(router, shape, form)
    finally:
        gc.unfreeze()
    return {key: round(value, 1) for key, value in summarize(times_us).items()}


def _fill(
    router: Router, prompts: Prompts, hashes: Hashes, num_chains: int, num_workers: int
) -> int:
    """Store every chain on one worker; the CPU time of it in ns."""
    spent = 0
    for number in range(num_chains):
        chain = hashes(prompts.tokens(number))
        begin = time.thread_time_ns()
        for start in range(0, len(chain), EVENT_BLOCKS):
            router.store(number % num_workers, chain[start : start + EVENT_BLOCKS])
        spent += time.thread_time_ns() - begin
    return spent


def _churn(
    router: Router, prompts: Prompts, hashes: Hashes, numbers: Iterable[int], num_workers: int
) -> int:
    """Remove chains and store them again; the CPU time of it in ns."""
    spent = 0
    for number in numbers:
        chain = hashes(prompts.tokens(number))
        worker = number % num_workers
        begin = time.thread_time_ns()
        for change in (router.remove, router.store):
            for start in range(0, len(chain), EVENT_BLOCKS):
                change(worker, chain[start : start + EVENT_BLOCKS])
        spent += time.thread_time_ns() - begin
    return spent


def measure_form(shape: Shape, form: Form) -> dict[str, float]:
    """CPU time in us that it takes to give prompts, as lists, that form."""
    times_us = []
    for query in _queries(replace(shape, num_decisions=min(shape.num_decisions, QUERIES_AHEAD))):
        tokens = query.tolist()
        begin = time.thread_time_ns()
        form(tokens)
        times_us.append((time.thread_time_ns() - begin) / 1000)
    return {key: round(value, 1) for key, value in summarize(times_us).items()}


def _decide(router: Router, shape: Shape, form: Form) -> list[float]:
    times_us = []
    live: deque[str] = deque()
    for number, query in enumerate(_queries(shape)):
        tokens = form(query.tolist())  # just written, as a tokenizer leaves them
        live.append(str(number))
        begin = time.thread_time_ns()
        router.decide(live[-1], tokens)
        times_us.append((time.thread_time_ns() - begin) / 1000)
        if len(live) > NUM_LIVE:
            router.end(live.popleft())
    while live:
        router.end(live.popleft())
    return times_us


def _queries(shape: Shape) -> Iterator[array[int]]:
    """Prompts that leave a cached one anywhere; made ahead, so that decisions follow each other."""
    rng = random.Random(shape.seed)
    prompts, num_tokens = shape.prompts, shape.query_blocks * shape.block_size
    for start in range(0, shape.num_decisions, QUERIES_AHEAD):
        count = min(QUERIES_AHEAD, shape.num_decisions - start)
        yield from [
            prompts.query(rng.randrange(shape.num_chains), rng.randrange(num_tokens + 1))
            for _ in range(count)
        ]


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return PAGE * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


COMMANDS = (BenchCommand("router", router, PANELS, defaults=DEFAULTS),)

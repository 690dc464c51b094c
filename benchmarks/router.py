"""The cost of a routing decision, beside that of a plain dict of sets."""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, Report
from tokenmill import console
from tokenmill.core.config import RouterConfig
from tokenmill.core.flags import count, setting
from tokenmill.core.kv_events import Event, EventBatch, Removed, Stored
from tokenmill.core.metrics import summarize
from tokenmill.routing.router import Router
from tokenmill.sched.cache.blocks import block_hashes, hash_input

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

Form = Callable[[list[int]], Any]  # a prompt -> what a router is given


@dataclass(frozen=True)
class Options:
    """How much is cached, where, and how long a query is."""

    num_workers: int = setting(64, "Workers that the router knows.", count(1))
    num_blocks: int = setting(1_400_000, "Distinct cached blocks.", count(1))
    query_blocks: int = setting(200, "Blocks of a prompt.", count(1))
    block_size: int = setting(64, "Tokens of a block.", count(1))
    num_decisions: int = setting(5000, "Decisions to measure.", count(1))
    seed: int = setting(0, "Seed of the prompts.", count(0))

    @property
    def num_chains(self) -> int:
        return -(-self.num_blocks // self.query_blocks)

    @property
    def num_tokens(self) -> int:
        return self.query_blocks * self.block_size

    def prompt(self, number: int) -> array[int]:
        """Token ids below 65536, made again whenever they are needed."""
        rng = random.Random(f"{self.seed}:{number}")
        return array("q", array("H", rng.randbytes(2 * self.num_tokens)))

    def query(self, number: int, kept: int) -> array[int]:
        """A prompt that leaves prompt `number` after `kept` tokens."""
        return self.prompt(number)[:kept] + self.prompt(~number)[kept:]

    def hashes(self, token_ids: Sequence[int]) -> list[int]:
        return block_hashes(token_ids, self.block_size)


def run(options: Options) -> Report:
    """Time and memory of a KV-aware routing decision.

    A decision includes block hashes of the tokens, the overlap with every worker's cache, score,
    choice and bookkeeping. Prompts are synthetic. The same decisions are also made with a plain
    dict of sets, for comparison. Times are CPU times of the thread, and memory is the growth of the
    resident set. Tokens come as the words that the server makes of them where it tokenises, which
    token_words_us is the time of.

    python -m benchmarks.router --num-decisions 5000
    """
    ours, index = measure_index(lambda: OwnRouter(options), options)
    decisions = measure_decisions(ours, options, hash_input)
    from_list = measure_decisions(ours, options)
    plain, plain_index = measure_index(lambda: PlainRouter(options), options)
    return {
        **asdict(options),
        "decision_us": decisions,
        "decision_from_list_us": from_list,
        "token_words_us": measure_form(options, hash_input),
        **index,
        "plain_dict": {"decision_us": measure_decisions(plain, options), **plain_index},
        "limits": LIMITS,
    }


def show(report: Report) -> None:
    limits, plain = report["limits"], report["plain_dict"]
    rows = [["", "this router", "plain dict", "limit"]]
    for name in ("p50", "p99"):
        ours, theirs = report["decision_us"][name], plain["decision_us"][name]
        limit = limits["decision_us"][name]
        rows.append([f"decision {name} us", f"{ours:.0f}", f"{theirs:.0f}", f"{limit:.0f}"])
    for key, name in (("bytes_per_block", "bytes a block"), ("events_per_s", "blocks/s taken in")):
        rows.append([name, f"{report[key]:.0f}", f"{plain[key]:.0f}", f"{limits[key]:.0f}"])
    console.print_table(rows)


class OwnRouter:
    """The real router; its workers have numbers and publish their blocks."""

    def __init__(self, options: Options) -> None:
        self._router = Router(RouterConfig(block_size=options.block_size))
        self._names = [str(number) for number in range(options.num_workers)]
        self._sequences = [0] * options.num_workers
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


class PlainRouter:
    """What one would write first: a dict of sets, walked block by block and worker by worker."""

    def __init__(self, options: Options) -> None:
        self._size, self._hashes = options.block_size, options.hashes
        self._holders: dict[int, set[int]] = {}
        self._load = [0] * options.num_workers
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


Contestant = OwnRouter | PlainRouter


def measure_index(
    make: Callable[[], Contestant], options: Options
) -> tuple[Contestant, dict[str, float]]:
    """Fill a router with distinct blocks, then replace some: the router, its memory and speed.

    Memory is the growth of the resident set: keep alive whatever was measured before.
    """
    gc.collect()
    before = resident_bytes()
    router, every = make(), range(options.num_chains)
    seconds = _ingest(router, options, every, router.store)
    gc.collect()
    grown = resident_bytes() - before
    churned = every[:: round(1 / CHURN)]
    seconds += _ingest(router, options, churned, router.remove, router.store)
    stored = options.query_blocks * len(every)
    ingested = stored + 2 * options.query_blocks * len(churned)
    return router, {
        "bytes_per_block": round(grown / stored, 1),
        "events_per_s": round(ingested / seconds),
    }


def _ingest(
    router: Contestant, options: Options, chains: range, *changes: Callable[[int, list[int]], None]
) -> float:
    """Make these changes to every chain, each on one worker; the CPU seconds of it."""
    spent_ns = 0
    for number in chains:
        hashes = options.hashes(options.prompt(number))
        begin = time.thread_time_ns()
        for change in changes:
            for start in range(0, len(hashes), EVENT_BLOCKS):
                change(number % options.num_workers, hashes[start : start + EVENT_BLOCKS])
        spent_ns += time.thread_time_ns() - begin
    return spent_ns / 1e9


def measure_decisions(router: Contestant, options: Options, form: Form = list) -> Report:
    """CPU time in us of decisions on prompts that share a part with what is cached.

    `form` makes of a prompt what the router is given, before the clock starts.
    """
    times_us = []
    live: deque[str] = deque()
    gc.collect()
    gc.freeze()
    try:
        for number, query in enumerate(_queries(options)):
            tokens = form(query.tolist())  # just written, as a tokenizer leaves them
            live.append(str(number))
            begin = time.thread_time_ns()
            router.decide(live[-1], tokens)
            times_us.append((time.thread_time_ns() - begin) / 1000)
            if len(live) > NUM_LIVE:
                router.end(live.popleft())
    finally:
        gc.unfreeze()
    while live:
        router.end(live.popleft())
    return summarize(times_us, 1)


def measure_form(options: Options, form: Form) -> Report:
    """CPU time in us that it takes to give prompts, as lists, that form."""
    times_us = []
    for query in _queries(
        replace(options, num_decisions=min(options.num_decisions, QUERIES_AHEAD))
    ):
        tokens = query.tolist()
        begin = time.thread_time_ns()
        form(tokens)
        times_us.append((time.thread_time_ns() - begin) / 1000)
    return summarize(times_us, 1)


def _queries(options: Options) -> Iterator[array[int]]:
    """Prompts that leave a cached one anywhere; made ahead, so that decisions follow each other."""
    rng = random.Random(options.seed)
    for start in range(0, options.num_decisions, QUERIES_AHEAD):
        ahead = min(QUERIES_AHEAD, options.num_decisions - start)
        yield from [
            options.query(rng.randrange(options.num_chains), rng.randrange(options.num_tokens + 1))
            for _ in range(ahead)
        ]


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return PAGE * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


BENCHMARK = Benchmark("router", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()

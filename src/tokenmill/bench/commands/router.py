"""tokenmill bench router."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.core.config import RouterConfig
from tokenmill.core.kv_events import Event, EventBatch, Removed, Stored
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


def router(settings: Settings) -> None:
    """Time and memory of a KV-aware routing decision.

    A decision is the whole way: tokens, block hashes, overlap with every
    worker's cache, score, choice, bookkeeping. Prompts are synthetic. Beside
    it stands a plain dict of sets, walked block by block.

    tokenmill bench router --num-decisions 5000
    """
    from tokenmill.bench.decision_cost import (
        LIMITS,
        PlainRouter,
        Shape,
        measure_decisions,
        measure_form,
        measure_index,
    )
    from tokenmill.sched.blocks import block_hashes, hash_input

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


COMMANDS = (BenchCommand("router", router, PANELS, defaults=DEFAULTS),)

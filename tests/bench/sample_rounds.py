"""Synthetic rounds of `bench endpoint`, as folders that are compared."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenmill.bench.client.arrivals import ClientLoad
from tokenmill.bench.client.records import LoadRecord, write_records
from tokenmill.bench.client.summary import Price, summarize_point
from tokenmill.bench.results.reports import as_json

MS = 1_000_000
TOKENS = 16


def synthetic_records(seed: int, ttft_ms: float, concurrency: int = 4) -> list[LoadRecord]:
    """Synthetic answers of a closed loop, whose waiting times come in waves."""
    rng = random.Random(seed)
    clocks, records = [0] * concurrency, []
    wave = 0.0
    for index in range(400):
        wave = 0.7 * wave + rng.gauss(0, 0.1)
        slot = clocks.index(min(clocks))
        sent = clocks[slot] + MS
        first = sent + round(ttft_ms * (1 + abs(wave)) * MS)
        gaps = [round(rng.uniform(9, 11) * MS) for _ in range(TOKENS - 1)]
        last = first + sum(gaps)
        clocks[slot] = last
        records.append(
            LoadRecord(
                *(index, 0, sent),
                sent_ns=sent,
                first_ns=first,
                last_ns=last,
                end_ns=last,
                gaps_ns=gaps,
                num_outputs=TOKENS,
                num_bytes=5 * TOKENS,
                prompt_tokens=10,
                completion_tokens=TOKENS,
                total_tokens=TOKENS + 10,
                finish_reason="length",
            )
        )
    return sorted(records, key=lambda record: record.sent_ns)


def write_result(folder: Path, seed: int, ttft_ms: float, **config: Any) -> Path:
    """A folder as `bench endpoint --output-dir` leaves it."""
    folder.mkdir()
    records = synthetic_records(seed, ttft_ms)
    price = Price(config["gpus"], config["price_per_gpu_hour"]) if "gpus" in config else None
    point = summarize_point(ClientLoad(concurrency=4, num_sessions=400), records, price=price)
    summary = {"benchmark": "endpoint", "url": "http://x", "model": "m", "stream": True}
    summary |= {"interrupted": False, "points": [as_json(point)], "config": config}
    (folder / "summary.json").write_text(json.dumps(summary))
    write_records(folder / "events.jsonl", records)
    return folder

"""What several tests ask of a worker pool, and send to it."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

from api.streams import Spawner
from light_processes import LightProcess, start_program
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams
from tokenmill.workers.pool import WorkerPool

KV_WORKER = "workers.kv_worker"


class KVSpawner(Spawner):
    """Starts workers with a tiny model whose KV moves."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        super().__init__(["--model", str(folder), "--connector", "shm", *arguments])

    async def __call__(self, address: str) -> LightProcess:
        process = start_program(KV_WORKER, *self.argv, "--address", address)
        self.processes.append(process)
        return process


def kill(workers: Spawner) -> None:
    """Kill the oldest one that lives."""
    os.kill(workers.live[0], signal.SIGKILL)


def prompt(length: int, seed: int | str) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(64) for _ in range(length)]


def request(name: str, num_tokens: int, prompt: list[int] | None = None) -> Request:
    return Request(
        name, Generate(prompt or [1], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    )


def states(pool: WorkerPool) -> list[str]:
    return [worker.state for worker in pool.view().workers]


def told(pool: WorkerPool, request_id: str) -> bool:
    """The worker that decodes waits for KV, which is on its way."""
    entry = pool.open_requests.get(request_id)
    return entry is not None and entry.handover is not None and entry.handover.told

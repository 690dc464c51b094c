"""Who pays for a request that moves: what each worker spent on it, also one that died."""

from __future__ import annotations

import asyncio

import pytest

from api.sim import MAX_MODEL_LEN, worker_argv
from api.streams import GENEROUS_S, Spawner, read, until
from tokenmill.core.config import PoolConfig, SchedulerConfig
from tokenmill.workers.pool import WorkerPool
from workers.pools import kill, request

SIM = worker_argv(SchedulerConfig(max_model_len=MAX_MODEL_LEN), step_ms=5.0)


def test_a_request_pays_what_the_worker_that_died_spent_on_it() -> None:
    async def main() -> None:
        workers = Spawner(SIM)
        pool = WorkerPool(workers, PoolConfig(workers=1, backoff_s=0.01, heartbeat_s=0.1))
        async with asyncio.timeout(GENEROUS_S):
            await pool.start()
            stream = pool.submit([request("moves", 200)], account="me")
            await until(lambda: pool.accounts().accounts != [])  # told while it runs
            (told,) = pool.accounts().accounts
            assert told.name == "me" and told.num_requests == 0 and told.cost.decode_s > 0
            kill(workers)
            (output,) = await read(stream)
            assert len(output.token_ids) == 200 and pool.num_migrations == 1
            cost = await stream.cost(GENEROUS_S)
            assert output.cost is not None
            both_s = output.cost.spent_s + told.cost.spent_s
            assert cost.spent_s > both_s or cost.spent_s == pytest.approx(both_s)
            await pool.stats()
            view = pool.accounts()
            (account,) = view.accounts
            assert account.num_requests == 1 and account.cost.spent_s == cost.spent_s
            assert view.latest[0].cost.spent_s == cost.spent_s
            assert view.untold_s == pytest.approx(0.0, abs=0.02)
        await pool.close()

    asyncio.run(main())


def test_an_aborted_request_pays_until_its_worker_stops() -> None:
    async def main() -> None:
        pool = WorkerPool(Spawner(SIM), PoolConfig(workers=1, heartbeat_s=0.1))
        async with asyncio.timeout(GENEROUS_S):
            await pool.start()
            stream = pool.submit([request("goes", 400)], account="me")
            await stream.get()
            pool.abort(["goes"])
            cost = await stream.cost(GENEROUS_S)
            assert cost.prefill_s + cost.decode_s > 0
            (account,) = pool.accounts().accounts
            assert account.num_requests == 1 and account.cost == cost
        await pool.close()

    asyncio.run(main())

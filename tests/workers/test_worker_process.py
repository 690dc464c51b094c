from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from api.streams import read
from tokenmill.core.config import PoolConfig
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason, SamplingParams, StructuredOutput, TokenLogprobs
from tokenmill.workers.link import WorkerDownError, WorkerStartError
from tokenmill.workers.messages import Outputs, Submit, decode_from_worker, decode_to_worker, encode
from tokenmill.workers.output_stream import OutputStream, StreamClosedError
from tokenmill.workers.pool import WorkerPool
from workers.counting_engine import CRASH, EXIT, FACTS, REFUSE

WORKER = [sys.executable, str(Path(__file__).with_name("counting_engine.py"))]
GENEROUS_S = 180.0
PYTHONPATH = f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"


class Spawner:
    """Starts worker processes and remembers them."""

    def __init__(self, *extra: str) -> None:
        self.extra = extra
        self.processes: list[asyncio.subprocess.Process] = []

    async def __call__(self, address: str) -> asyncio.subprocess.Process:
        argv = [*WORKER, *self.extra, "--address", address]
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*argv, stdout=null, stderr=null)
        self.processes.append(process)
        return process


@asynccontextmanager
async def running(spawner: Spawner) -> AsyncIterator[WorkerPool]:
    client = WorkerPool(spawner, PoolConfig(max_migrations=0, backoff_s=0.01, heartbeat_s=60.0))
    await client.start()
    try:
        async with asyncio.timeout(GENEROUS_S):
            yield client
    finally:
        await client.close()
    assert all(p.returncode is not None for p in spawner.processes)


def request(name: str, num_tokens: int, prompt: int = 1) -> Request:
    return Request(name, Generate([prompt], SamplingParams(max_tokens=num_tokens)))


async def ready_again(client: WorkerPool) -> None:
    while not client.ready:
        await asyncio.sleep(0.01)


def test_outputs_come_back_in_order_and_end_once() -> None:
    async def main() -> None:
        async with running(Spawner()) as client:
            assert client.facts == FACTS
            streams = [
                client.submit([request(f"{i}a", 5 + i), request(f"{i}b", 50)]) for i in range(20)
            ]
            for i, stream in enumerate(streams):
                short, long = await read(stream)
                assert short.token_ids == list(range(5 + i))
                assert long.token_ids == list(range(50))
                assert short.finish_reason is long.finish_reason is FinishReason.LENGTH
            assert client.num_open == 0

    asyncio.run(main())


def test_an_idle_worker_does_not_step() -> None:
    async def main() -> None:
        async with running(Spawner()) as client:
            before = (await client.stats()).num_steps
            stats = [await client.stats() for _ in range(10)]
            assert stats[-1].num_steps - before <= 11  # at most one step per message

    asyncio.run(main())


def test_abort_frees_the_request_in_the_engine() -> None:
    async def main() -> None:
        async with running(Spawner()) as client:
            stream = client.submit([request("endless", 10**9)])
            await stream.get()
            assert (await client.stats()).num_running == 1
            client.abort(["endless", "unknown"])
            assert client.num_open == 0
            assert (await client.stats()).num_running == 0

    asyncio.run(main())


def test_rejects_and_draining() -> None:
    async def main() -> None:
        async with running(Spawner()) as client:
            (refused,) = await read(client.submit([request("r", 5, REFUSE)]))
            assert (refused.finish_reason, refused.stop_reason) == ("reject", "queue_full")
            early = client.submit([request("early", 200)])
            client.drain()
            (late,) = await read(client.submit([request("late", 5)]))
            assert (late.finish_reason, late.stop_reason) == ("reject", "draining")
            (finished,) = await read(early)
            assert finished.token_ids == list(range(200))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("poison", "message"), [(CRASH, "RuntimeError: the counter jammed"), (EXIT, "code 7")]
)
def test_a_failing_engine_ends_every_request_once_and_is_restarted(
    poison: int, message: str
) -> None:
    async def main() -> None:
        spawner = Spawner()
        async with running(spawner) as client:
            bystander = client.submit([request("b0", 10**9), request("b1", 10**9)])
            await bystander.get()
            (culprit,) = await read(client.submit([request("c", 5, poison)]))
            outputs = [culprit, *await read(bystander)]
            assert all(o.finish_reason is FinishReason.ERROR for o in outputs)
            assert all(o.stop_reason == "worker_died" for o in outputs)
            assert all(message in (o.error or "") for o in outputs)
            await ready_again(client)
            (healthy,) = await read(client.submit([request("h", 3)]))
            assert healthy.token_ids == [0, 1, 2]
            assert client.num_restarts == 1 and len(spawner.processes) == 2

    asyncio.run(main())


def test_a_killed_worker_is_replaced() -> None:
    async def main() -> None:
        spawner = Spawner()
        async with running(spawner) as client:
            stream = client.submit([request("x", 10**9)])
            await stream.get()
            spawner.processes[0].kill()
            (output,) = await read(stream)
            assert output.finish_reason is FinishReason.ERROR
            with pytest.raises(WorkerDownError):
                client.submit([request("meanwhile", 1)])
            await ready_again(client)
            (healthy,) = await read(client.submit([request("y", 2)]))
            assert healthy.token_ids == [0, 1]

    asyncio.run(main())


def test_a_request_sent_to_a_worker_that_just_died_ends_in_error() -> None:
    async def main() -> None:
        spawner = Spawner()
        async with running(spawner) as client:
            pid = spawner.processes[0].pid
            os.kill(pid, signal.SIGKILL)
            while _alive(pid):
                pass
            assert client.ready  # this loop has not run since
            (output,) = await read(client.submit([request("late", 5)]))
            assert output.finish_reason is FinishReason.ERROR

    asyncio.run(main())


def test_a_start_can_be_cancelled() -> None:
    async def main() -> None:
        spawner = Spawner("--start-s", "3600")
        client = WorkerPool(spawner)
        start = asyncio.create_task(client.start())
        while not spawner.processes:
            await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await client.close()
        assert spawner.processes[0].returncode is not None

    asyncio.run(main())


def test_group_signals_are_left_to_the_parent() -> None:
    async def main() -> None:
        spawner = Spawner()
        async with running(spawner) as client:
            stream = client.submit([request("x", 300)])
            for number in (signal.SIGINT, signal.SIGTERM):
                spawner.processes[0].send_signal(number)
            (output,) = await read(stream)
            assert output.token_ids == list(range(300))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("extra", "message"),
    [(("--fail", "no such model"), "ValueError: no such model"), (("--exit-code", "3"), "code 3")],
)
def test_start_up_errors_are_told(extra: tuple[str, ...], message: str) -> None:
    async def main() -> None:
        client = WorkerPool(Spawner(*extra))
        with pytest.raises(WorkerStartError, match=message):
            await client.start()
        await client.close()

    asyncio.run(main())


def test_a_command_that_does_not_exist_is_told() -> None:
    async def spawn(address: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec("/nonexistent/worker", address)

    async def main() -> None:
        client = WorkerPool(spawn)
        with pytest.raises(WorkerStartError, match="cannot be started"):
            await client.start()
        await client.close()

    asyncio.run(main())


def test_a_worker_that_keeps_dying_is_given_up() -> None:
    async def main() -> None:
        spawner = Spawner()
        client = WorkerPool(spawner, PoolConfig(backoff_s=0.01, max_restarts=2))
        await client.start()
        spawner.extra = ("--exit-code", "5")
        spawner.processes[0].kill()
        async with asyncio.timeout(GENEROUS_S):
            await client.gave_up.wait()
        assert len(spawner.processes) == 3 and not client.ready
        await client.close()

    asyncio.run(main())


PARENT = """
import asyncio, sys
from api.streams import Spawner
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams
from tokenmill.workers.pool import WorkerPool
async def main():
    spawner = Spawner(sys.argv[2:])
    client = WorkerPool(spawner)
    await client.start()
    if sys.argv[1] == "busy":
        await client.submit([Request("x", Generate([1], SamplingParams(max_tokens=10**9)))]).get()
    print(spawner.processes[0].pid, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.mark.parametrize("load", ["idle", "busy"])
def test_the_worker_goes_when_the_api_process_is_gone(load: str) -> None:
    async def main(folder: str) -> None:
        env = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": folder}
        argv = [sys.executable, "-c", PARENT, load, *WORKER]
        parent = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, env=env
        )
        assert parent.stdout is not None
        pid = int(await parent.stdout.readline())
        parent.kill()
        await parent.wait()
        deadline = time.monotonic() + GENEROUS_S
        while _alive(pid):
            assert time.monotonic() < deadline, "the worker outlived its parent"
            await asyncio.sleep(0.02)

    with tempfile.TemporaryDirectory() as folder:  # a killed parent leaves its socket behind
        asyncio.run(main(folder))


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_unread_outputs_are_merged() -> None:
    async def main() -> None:
        stream = OutputStream(["a", "b"])
        logprob = TokenLogprobs([1], [-0.5], 1)
        stream.put(0, RequestOutput("a", [1], logprobs=[logprob], num_cached_tokens=16))
        stream.put(1, RequestOutput("b", [7]))
        stream.put(0, RequestOutput("a", [2], logprobs=[logprob]))
        stream.put(0, RequestOutput("a", [3], [logprob], None, FinishReason.STOP, 3))
        outputs = await stream.get()
        assert outputs[0].token_ids == [1, 2, 3] and len(outputs[0].logprobs or []) == 3
        assert outputs[0].finish_reason is FinishReason.STOP and outputs[0].stop_reason == 3
        assert outputs[0].num_cached_tokens == 16
        assert outputs[1].token_ids == [7]
        stream.close()
        with pytest.raises(StreamClosedError):
            await stream.get()

    asyncio.run(main())


def test_messages_survive_the_wire() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        logit_bias={3: -1.5},
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        seed=-(2**63),
        structured=StructuredOutput("regex", "a+"),
    )
    sent = Submit(
        [Request("r", Generate([1, 2], sampling, cache_salt="s"), priority=-1, deadline_ns=5)]
    )
    assert decode_to_worker(encode(sent)) == sent
    output = RequestOutput(
        "r", [4], [TokenLogprobs([4, 5], [-0.1, -2.0], 1)], [None], FinishReason.STOP, "x", 3
    )
    back = decode_from_worker(encode(Outputs([output])))
    assert back == Outputs([output])
    assert isinstance(back, Outputs) and back.outputs[0].finish_reason is FinishReason.STOP

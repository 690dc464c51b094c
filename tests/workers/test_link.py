"""What a worker sends is read, whole and in order, however it arrives."""

from __future__ import annotations

import asyncio

import zmq

from tokenmill.workers.link import MAX_AT_ONCE, WorkerLink
from tokenmill.workers.messages import FromWorker, Outputs, encode


class _Silent:
    """A worker process that runs until it is killed."""

    def __init__(self) -> None:
        self._end = asyncio.Event()

    async def wait(self) -> int:
        await self._end.wait()
        return 0

    def kill(self) -> None:
        self._end.set()


def test_messages_that_come_together_and_apart_are_all_read_in_order() -> None:
    """The socket's descriptor tells once that there is something: nothing may be left behind."""

    async def read() -> list[str]:
        seen: list[str] = []

        def take(message: FromWorker) -> None:
            assert isinstance(message, Outputs)
            seen.extend(message.tokens)

        link, process = WorkerLink(take), _Silent()

        async def spawn(address: str) -> _Silent:
            return process

        starting = asyncio.create_task(link.start(spawn))
        with zmq.Context() as context, context.socket(zmq.PAIR) as worker:
            worker.linger = 0
            worker.connect(link.address)
            number = 0
            for size in (1, 3 * MAX_AT_ONCE, 1, 2, 5 * MAX_AT_ONCE):
                for _ in range(size):
                    worker.send(encode(Outputs([], {str(number): [1]})))
                    number += 1
                async with asyncio.timeout(20):
                    while len(seen) < number:
                        await asyncio.sleep(0.001)
            starting.cancel()
            link.kill("the test is over")
            await link.close(0.0)
        return seen

    assert asyncio.run(read()) == [str(i) for i in range(2 + 2 + 8 * MAX_AT_ONCE)]

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tokenmill.core.requests import RequestOutput
from tokenmill.core.types import FinishReason
from tokenmill.workers.messages import OutputPacker, Outputs, decode_from_worker, encode
from tokenmill.workers.output_stream import OutputStream, WriteTurn


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(180):
            await work()

    asyncio.run(bounded())


def first(*token_ids: int) -> RequestOutput:
    return RequestOutput("a", list(token_ids), num_cached_tokens=3, scheduled_ns=7)


def last(*token_ids: int) -> RequestOutput:
    return RequestOutput("a", list(token_ids), finish_reason=FinishReason.LENGTH)


class Reader:
    """Reads a stream to its end, as the task of a call does; `direct` takes what it can."""

    def __init__(self, stream: OutputStream, takes: bool = True) -> None:
        self.stream = stream
        self.takes = takes
        self.parts: list[tuple[str, list[int]]] = []
        stream.direct = self.direct

    def direct(self, tokens: dict[int, list[int]], now_ns: int) -> bool:
        if self.takes:
            self.parts.append(("direct", list(tokens[0])))
        return self.takes

    async def run(self) -> None:
        while True:
            output = (await self.stream.get())[0]
            self.parts.append(("read", list(output.token_ids)))
            if output.finish_reason is not None:
                return


def test_tokens_pass_the_reader_while_it_waits_and_never_each_other() -> None:
    async def work() -> None:
        stream = OutputStream(["a"], WriteTurn())
        reader = Reader(stream)
        task = asyncio.create_task(reader.run())
        stream.put(0, first(1))
        stream.extend(0, [2])  # the reader has not read its first token
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.extend(0, [3])
        stream.extend(0, [4])  # of the same turn: one write
        await asyncio.sleep(0)
        reader.takes = False  # a client that does not read
        stream.extend(0, [5])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.extend(0, [6])
        stream.put(0, last(7))  # the end takes along what came before it
        await task
        assert reader.parts == [
            ("read", [1, 2]),
            ("direct", [3, 4]),
            ("read", [5]),
            ("read", [6, 7]),
        ]

    run(work)


def test_a_fault_ends_its_own_stream_alone() -> None:
    async def work() -> None:
        turn = WriteTurn()
        broken, sound = OutputStream(["a"], turn), OutputStream(["b"], turn)
        broken.direct = lambda tokens, now_ns: bool(1 // 0)
        readers = [asyncio.create_task(stream.get()) for stream in (broken, sound)]
        await asyncio.sleep(0)
        seen: list[dict[int, list[int]]] = []
        sound.direct = lambda tokens, now_ns: not seen.append(tokens)  # type: ignore[func-returns-value]
        broken.extend(0, [1])
        sound.extend(0, [2])
        with pytest.raises(ZeroDivisionError):
            await readers[0]
        assert seen == [{0: [2]}]
        readers[1].cancel()

    run(work)


def test_tokens_of_an_only_request_are_passed_on_where_they_are_read() -> None:
    async def work() -> None:
        stream = OutputStream(["a"], WriteTurn())
        reader = Reader(stream)
        stream.direct_one = lambda token_ids, now_ns: reader.direct({0: token_ids}, now_ns)
        task = asyncio.create_task(reader.run())
        stream.put(0, first(1))
        stream.extend(0, [2], 1)  # the reader has not read its first token
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.extend(0, [3], 1)
        assert reader.parts[-1] == ("direct", [3])
        stream.extend(0, [4])  # more has come: it waits for its turn, and the next one with it
        stream.extend(0, [5], 1)
        assert reader.parts[-1] == ("direct", [3])
        await asyncio.sleep(0)
        stream.extend(0, [6], 1)
        reader.takes = False
        stream.extend(0, [7], 1)
        stream.extend(0, [8], 1)
        await asyncio.sleep(0)
        stream.put(0, last(9))
        await task
        assert reader.parts == [
            ("read", [1, 2]),
            ("direct", [3]),
            ("direct", [4, 5]),
            ("direct", [6]),
            ("read", [7, 8]),
            ("read", [9]),
        ]

    run(work)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_fault_of_an_only_request_ends_its_stream(at_once: bool) -> None:
    async def work() -> None:
        stream = OutputStream(["a"], WriteTurn())
        stream.direct = lambda tokens, now_ns: bool(1 // 0)
        stream.direct_one = lambda token_ids, now_ns: bool(1 // 0)
        reader = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        stream.extend(0, [1], int(at_once))
        with pytest.raises(ZeroDivisionError):
            await reader

    run(work)


@pytest.mark.parametrize("has_direct", [True, False])
def test_an_interval_holds_tokens_back_after_the_first(has_direct: bool) -> None:
    async def work() -> None:
        stream = OutputStream(["a"], WriteTurn())
        reader = Reader(stream)
        if not has_direct:
            stream.direct = None
        stream.interval = 3
        task = asyncio.create_task(reader.run())
        stream.put(0, first(1))
        for token in range(2, 10):
            await asyncio.sleep(0.001)
            stream.extend(0, [token])
        stream.put(0, last(10))
        await task
        assert [ids for _, ids in reader.parts] == [[1], [2, 3, 4], [5, 6, 7], [8, 9, 10]]

    run(work)


def test_an_interval_holds_whole_outputs_back_too() -> None:
    async def work() -> None:
        stream = OutputStream(["a"])
        stream.interval = 3
        reader = Reader(stream)
        task = asyncio.create_task(reader.run())
        for token in range(1, 6):  # as outputs with log-probabilities come
            stream.put(0, RequestOutput("a", [token]))
            await asyncio.sleep(0.001)
        stream.put(0, last(6))
        await task
        assert [ids for _, ids in reader.parts] == [[1], [2, 3, 4], [5, 6]]

    run(work)


def test_what_a_first_output_says_is_not_sent_again() -> None:
    packer = OutputPacker()
    steps = [
        [first(1)],
        [RequestOutput("a", [2, 3], num_cached_tokens=3, scheduled_ns=7), first(9)],
        [RequestOutput("a", [4], num_cached_tokens=3, scheduled_ns=7)],
        [last(5)],
        [first(6)],  # an id that comes again begins again
    ]
    sent = [decode_from_worker(encode(packer.pack(outputs))) for outputs in steps]
    assert sent == [
        Outputs([first(1)]),
        Outputs([first(9)], {"a": [2, 3]}),
        Outputs([], {"a": [4]}),
        Outputs([last(5)]),
        Outputs([first(6)]),
    ]
    assert isinstance(sent[1], Outputs)
    assert [o.token_ids for o in sent[1].all()] == [[2, 3], [9]]

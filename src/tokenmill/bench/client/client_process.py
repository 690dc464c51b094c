"""One client process: warms up, waits for the start, issues its share of a load, keeps records."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from tokenmill.bench.client.arrivals import ClientLoad, planned_times, shard_slots, slot_delays
from tokenmill.bench.client.connections import CANCELLED, Client
from tokenmill.bench.client.datasets import Dataset, Message, PromptTurn, Session
from tokenmill.bench.client.progress import DONE, FAILED, NUM_COUNTERS, OPEN, TOKENS, observe
from tokenmill.bench.client.records import Endpoint, LoadRecord, request_body, write_records
from tokenmill.core.metrics import RequestTimes
from tokenmill.http_connection import raise_file_limit

EARLY_NS = 500_000  # timers of the loop count milliseconds: half of one early is on time
PULSE_S = 0.01
STALL_S = 0.025  # a pulse so late is a stall


@dataclass(frozen=True, slots=True)
class Task:
    target: Endpoint
    load: ClientLoad
    dataset: Dataset
    shard: int
    num_shards: int
    num_warmup: int
    events: Path
    warmup_events: Path


@dataclass(slots=True)
class ClientHealth:
    """CPU time, lag and stalls of a client process, measured by itself."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    num_stalls: int = 0
    max_stall_ms: float = 0.0


@dataclass(slots=True)
class Issuer:
    client: Client
    task: Task
    counters: Any  # shared with the parent: NUM_COUNTERS numbers
    tickets: Any = None  # shared by all processes where a load ends with a whole pass
    records: list[LoadRecord] = field(default_factory=list)
    warmup_records: list[LoadRecord] = field(default_factory=list)
    _open: set[asyncio.Task[None]] = field(default_factory=set)
    _failure: BaseException | None = None

    async def warm_up(self) -> None:
        """Run a closed loop over sessions that are not measured; its records are kept apart."""
        load, shard = self.task.load, self.task.shard
        concurrency = load.concurrency or self.task.num_warmup
        slots = len(shard_slots(concurrency, shard, self.task.num_shards))
        await self.client.open(slots if not load.is_open else 1)
        mine = iter(range(shard, self.task.num_warmup, self.task.num_shards))

        async def slot() -> None:
            for index in mine:
                await self._session(self.task.dataset.warmup(index), -1, time.monotonic_ns())

        await asyncio.gather(*(slot() for _ in range(slots)))
        self.warmup_records, self.records = self.records, []
        self.counters[:] = [0] * NUM_COUNTERS

    async def run(self, start_ns: int) -> None:
        """Issue the share of this process; returns when the last answer has ended."""
        if self.task.load.is_open:
            await self._run_open(start_ns)
        else:
            for index, delay_s in self._slots():
                self._start(self._slot(start_ns + round(delay_s * 1e9), start_ns, index))
        while self._open:
            await asyncio.wait(set(self._open))
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """Cancel the running requests; the records list them as cancelled."""
        for running in self._open:
            running.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _slots(self) -> Iterator[tuple[int, float]]:
        delays = slot_delays(self.task.load)
        for slot in shard_slots(len(delays), self.task.shard, self.task.num_shards):
            yield slot, delays[slot]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        running = asyncio.get_running_loop().create_task(work)
        self._open.add(running)
        running.add_done_callback(self._ended)

    def _ended(self, running: asyncio.Task[None]) -> None:
        self._open.discard(running)
        if not running.cancelled():
            self._failure = self._failure or running.exception()

    async def _run_open(self, start_ns: int) -> None:
        task = self.task
        for index, offset_s in islice(planned_times(task.load), task.shard, None, task.num_shards):
            planned_ns = start_ns + round(offset_s * 1e9)
            session = task.dataset.session(index)
            await _sleep_until(planned_ns)
            self._start(self._session(session, index, planned_ns))

    async def _slot(self, planned_ns: int, start_ns: int, slot: int) -> None:
        """One user of a closed loop: the next session when the last one has ended."""
        await _sleep_until(planned_ns)
        for own in count(slot, self.task.load.concurrency or 1):
            index = self._next(own, (planned_ns - start_ns) / 1e9)
            if index is None:
                return
            await self._session(self.task.dataset.session(index), index, planned_ns)
            planned_ns = time.monotonic_ns()

    def _next(self, own: int, planned_s: float) -> int | None:
        """The session of a user: its own, or whichever is next where passes are whole."""
        load = self.task.load
        is_over = load.duration_s is not None and planned_s >= load.duration_s
        if self.tickets is not None:
            return take_ticket(self.tickets, load.pass_size or 1, is_over)
        if is_over or (load.num_sessions is not None and own >= load.num_sessions):
            return None
        return own

    async def _session(self, session: Session, index: int, planned_ns: int) -> None:
        history: list[Message] = []
        if session.system and self.task.target.api == "chat":
            history.append({"role": "system", "content": session.system})
        for number, turn in enumerate(session.turns):
            content = self._content(session, history, turn)
            body = request_body(self.task.target, content, turn.max_tokens)
            record = LoadRecord(index, number, planned_ns, max_tokens=turn.max_tokens)
            await self._call(record, body)
            if record.error is not None:
                return
            planned_ns = record.end_ns
            if len(session.turns) > 1:
                history += _said(turn, record)

    def _content(
        self, session: Session, history: list[Message], turn: PromptTurn
    ) -> str | list[Message]:
        content = turn.content
        if isinstance(content, str) and (history or turn.images):
            return [*history, {"role": "user", "content": turn.spoken}]
        if isinstance(content, str) and session.system:
            return f"{session.system} {content}"
        return content

    async def _call(self, record: LoadRecord, body: bytes) -> None:
        counters = self.counters
        counters[OPEN] += 1
        self.records.append(record)
        try:
            await self.client.call(record, body)
        except asyncio.CancelledError:
            record.error = record.error or CANCELLED
            raise
        finally:
            counters[OPEN] -= 1
            counters[DONE if record.error is None else FAILED] += 1
            tokens = record.completion_tokens or record.num_outputs
            counters[TOKENS] += tokens
            if record.error is None:
                times = RequestTimes(record.sent_ns, record.first_ns, record.last_ns, 1, tokens)
                observe(counters, times)


def take_ticket(tickets: Any, pass_size: int, is_over: bool) -> int | None:
    """The next session of all processes; None when the time is over and a pass is complete."""
    with tickets.get_lock():
        index = int(tickets[0])
        if tickets[1] or (is_over and index and index % pass_size == 0):
            tickets[1] = 1
            return None
        tickets[0] = index + 1
        return index


def _said(turn: PromptTurn, record: LoadRecord) -> list[Message]:
    content = turn.content
    asked = [{"role": "user", "content": turn.spoken}] if isinstance(content, str) else content
    return [*asked, {"role": "assistant", "content": record.text or ""}]


async def _sleep_until(planned_ns: int) -> None:
    """A timer counts whole milliseconds from the last one, so it may end 1.5 of them early."""
    while (left_ns := planned_ns - time.monotonic_ns()) > EARLY_NS:
        await asyncio.sleep(left_ns / 1e9)


async def _watch(health: ClientHealth) -> None:
    due_s = time.monotonic() + PULSE_S
    while True:
        await asyncio.sleep(due_s - time.monotonic())
        late_s = time.monotonic() - due_s
        if late_s > STALL_S:
            health.num_stalls += 1
            health.max_stall_ms = max(health.max_stall_ms, late_s * 1e3)
        due_s = time.monotonic() + PULSE_S


def run_process(task: Task, counters: Any, tickets: Any, pipe: Pipe) -> None:
    """Entry of a client process: it reports "ready", waits for the start, and ends with "done"."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent says when to stop
    raise_file_limit()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        health = runner.run(_run(Issuer(Client(task.target), task, counters, tickets), pipe))
    pipe.send((health.cpu_s, health.wall_s, health.num_stalls, health.max_stall_ms))
    pipe.close()


def loop_factory() -> Any:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


async def _run(issuer: Issuer, pipe: Pipe) -> ClientHealth:
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[int] = asyncio.Queue()
    loop.add_reader(pipe.fileno(), _read_order, loop, pipe, orders)
    warm = loop.create_task(issuer.warm_up())
    order = loop.create_task(orders.get())
    await asyncio.wait((warm, order), return_when=asyncio.FIRST_COMPLETED)
    health = ClientHealth()
    if warm.done():
        warm.result()
        pipe.send("ready")
        if start_ns := await order:
            health = await _measure(issuer, start_ns, orders)
            write_records(issuer.task.events, issuer.records)
            write_records(issuer.task.warmup_events, issuer.warmup_records)
    issuer.client.close()
    loop.remove_reader(pipe.fileno())
    return health


def _read_order(loop: asyncio.AbstractEventLoop, pipe: Pipe, orders: asyncio.Queue[int]) -> None:
    """A start time, or 0: stop. A parent that has gone says stop too."""
    try:
        orders.put_nowait(pipe.recv())
    except (EOFError, OSError):
        loop.remove_reader(pipe.fileno())
        orders.put_nowait(0)


async def _measure(issuer: Issuer, start_ns: int, orders: asyncio.Queue[int]) -> ClientHealth:
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # records live on: looking at them again costs time
    health = ClientHealth()
    await _sleep_until(start_ns)
    cpu_s, wall_s = time.process_time(), time.monotonic()
    loop = asyncio.get_running_loop()
    watch, work = loop.create_task(_watch(health)), loop.create_task(issuer.run(start_ns))
    stop = loop.create_task(orders.get())
    await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        await issuer.stop()
    health.cpu_s, health.wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    for task in (watch, stop, work):
        if not task.done():
            task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    return health

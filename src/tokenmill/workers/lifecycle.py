"""Starts, restarts, scales and drains the slots of a pool; the first start is all or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sized
from typing import Protocol

import msgspec

from tokenmill.core.config import PoolConfig
from tokenmill.core.types import TokenmillError
from tokenmill.workers.link import Spawn, WorkerStartError
from tokenmill.workers.messages import FromWorker, ModelFacts
from tokenmill.workers.slot import Role, WorkerSlot

_log = logging.getLogger(__name__)

PREFIXES: dict[Role, str] = {"both": "w", "prefill": "p", "decode": "d"}  # of names
MAX_BACKOFF_S = 30.0
POLL_S = 0.02
GRACE_S = 5.0  # for a worker that leaves to exit
LONGEST_S = 1e8  # of a timer


class PoolError(TokenmillError):
    """The pool cannot do what was asked; the message says why."""


def roles_of(config: PoolConfig) -> list[Role]:
    counts: dict[Role, int] = {"both": config.workers}
    if config.prefill or config.decode:
        counts = {"prefill": config.prefill, "decode": config.decode}
    return [role for role in counts for _ in range(counts[role])]


def of_role(facts: ModelFacts, role: Role) -> ModelFacts:
    """The facts that bind the pool: a prompt too long to prefill is computed where it decodes."""
    return msgspec.structs.replace(facts, max_model_len=sys.maxsize) if role == "prefill" else facts


def agreed(known: ModelFacts, new: ModelFacts, *more: str) -> ModelFacts:
    """The facts that hold for all workers, which must agree on tokens and blocks, and `more`."""
    for name in ("vocab_size", "block_size", *more):
        ours, theirs = getattr(known, name), getattr(new, name)
        if ours != theirs:
            raise WorkerStartError(
                f"{name}: the other workers have {ours}, the new one has {theirs}"
            )
    queues = [n for n in (known.max_waiting, new.max_waiting) if n is not None]
    return msgspec.structs.replace(
        known,
        max_model_len=min(known.max_model_len, new.max_model_len),
        max_waiting=min(queues, default=None),
    )


SpawnOf = Callable[[str, Role], Spawn]  # of a slot's name and role


class WorkerWatcher(Protocol):
    """Who hears of workers that come and go, in the process that owns them."""

    def worker_ready(self, slot: WorkerSlot) -> None: ...

    def worker_down(self, slot: WorkerSlot) -> None: ...

    def worker_stopped(self, slot: WorkerSlot) -> None:
        """A worker that left the pool has ended."""

    async def worker_leaving(self, slot: WorkerSlot, timeout_s: float) -> None:
        """Wait until nobody has requests there, for so long at most."""


class SlotUser(Protocol):
    """Who gives the workers what they have to do, and moves it when they come and go."""

    def on_message(self, slot: WorkerSlot, message: FromWorker) -> None: ...

    def check(self, slot: WorkerSlot) -> None:
        """Raise WorkerStartError where a new worker does not go with the others."""

    def worker_ready(self, slot: WorkerSlot) -> None: ...

    async def settled(self) -> None:
        """Wait until the workers that are ready know each other."""

    def worker_down(self, slot: WorkerSlot) -> None:
        """A worker died: what it had goes elsewhere."""

    def worker_leaving(self, slot: WorkerSlot) -> None:
        """A worker gets nothing more to do."""

    def worker_left(self, slot: WorkerSlot) -> None:
        """A worker leaves now: what it still has goes elsewhere."""

    def worker_gone(self, slot: WorkerSlot) -> None:
        """A worker that has left was stopped."""

    def at(self, slot: WorkerSlot) -> Sized:
        """What a worker has to do."""

    def others_take(self, slot: WorkerSlot) -> bool:
        """True where other workers than this one take work."""

    def no_worker(self, message: str) -> None:
        """No worker is left, and none can be started."""


class Lifecycle:
    """Owns the slots of a pool; it alone changes `slots`.

    When no slot has a worker any more and none can be started, `gave_up` is set.
    """

    def __init__(
        self,
        slots: dict[str, WorkerSlot],
        spawn_of: SpawnOf,
        config: PoolConfig,
        requests: SlotUser,
        host: str | None,
    ) -> None:
        self.facts: ModelFacts | None = None  # what holds for all workers
        self.gave_up = asyncio.Event()
        self.failure = ""  # why it is given up
        self._slots = slots
        self._spawn_of = spawn_of
        self.watcher: WorkerWatcher | None = None
        self._config = config
        self._requests = requests
        self._host = host
        self._tasks: dict[str, asyncio.Task[None]] = {}  # that keep slots alive
        self._heartbeats: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._num_named: Counter[Role] = Counter()
        self._num_past_restarts = 0
        self._waiting: asyncio.TimerHandle | None = None  # for a worker to join

    @property
    def num_restarts(self) -> int:
        """Times that a worker was started in place of another."""
        return self._num_past_restarts + sum(s.num_restarts for s in self._slots.values())

    def of_role(self, role: Role) -> list[WorkerSlot]:
        return [slot for slot in self._slots.values() if slot.role == role]

    def _staying(self, role: Role) -> list[WorkerSlot]:
        """The slots of a role that have a worker or get one again."""
        return [slot for slot in self.of_role(role) if slot.state not in ("draining", "failed")]

    async def start(self, roles: list[Role]) -> None:
        """Start a worker for each role and connect them with the others; if one fails, none is."""
        self._heartbeats = self._heartbeats or asyncio.create_task(self._beat())
        new = [self._slot(role) for role in roles]
        starts = [asyncio.create_task(self._start(slot)) for slot in new]
        try:
            await asyncio.gather(*starts)
            await self._requests.settled()
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            for slot in new:
                del self._slots[slot.name]
                self._requests.worker_down(slot)
                if self.watcher is not None:
                    await self.watcher.worker_leaving(slot, 0.0)
                await self._stop(slot, 0.0)
                self._check_left()
            raise

    async def follow(self, name: str, role: Role) -> None:
        """Have a slot of this name; returns when a worker is there, or the slot was given up."""
        self._heartbeats = self._heartbeats or asyncio.create_task(self._beat())
        slot = self._slot(role, name)
        while self._slots.get(name) is slot:
            try:
                await self._start(slot)
                return
            except WorkerStartError as error:  # it died before it was ready; another one comes
                _log.warning("worker %s: %s", name, error)
                await asyncio.sleep(POLL_S)

    async def join(self, spawn: Spawn, host: str) -> WorkerSlot:
        """Have a slot for a worker that others have started; it goes with its worker."""
        slot = self._slot("both", spawn=spawn, host=host)
        slot.joined = True
        try:
            await self._start(slot)
        except BaseException:
            await self._remove(slot, 0.0, 0.0)
            raise
        return slot

    async def leave(self, name: str, timeout_s: float, grace_s: float = 0.0) -> None:
        """Give up a slot when its requests are done; late ones move elsewhere."""
        slot = self._slots.get(name)
        if slot is not None and slot.state != "draining":
            await self._remove(slot, timeout_s, grace_s)

    async def _start(self, slot: WorkerSlot) -> None:
        await self._launch(slot)
        if self._slots.get(slot.name) is slot:
            self._tasks[slot.name] = asyncio.create_task(self._keep(slot))

    async def scale(self, num_workers: int, role: Role) -> None:
        """Have this many workers of a role: start new ones, or drain the youngest.

        Slots that were given up do not count, and go.
        """
        what = "workers" if role == "both" else role
        if num_workers < 1:
            raise PoolError(f"{what}: must be at least 1, got {num_workers}")
        async with self._changing:
            roles = {slot.role for slot in self._slots.values()}
            if role not in roles:
                have = " and ".join(sorted("workers" if r == "both" else r for r in roles))
                raise PoolError(f"{what}: this server has none of these; give a number of {have}")
            given_up = [slot for slot in self.of_role(role) if slot.state == "failed"]
            staying = self._staying(role)
            await self.start([role] * (num_workers - len(staying)))
            for slot in [*given_up, *reversed(staying[num_workers:])]:
                await self._remove(slot)

    async def drain(self, name: str, timeout_s: float) -> None:
        """Take a worker out of the pool when its requests are done; late ones move elsewhere."""
        async with self._changing:
            slot = self._slots.get(name)
            if slot is None:
                known = ", ".join(self._slots)
                raise PoolError(f"worker: there is no {name!r}; the pool has {known}")
            if slot.role in ("both", "decode") and not self._requests.others_take(slot):
                raise PoolError(
                    f"worker: {name!r} is the only one that takes requests; start another"
                )
            await self._remove(slot, timeout_s)

    async def close(self, grace_s: float) -> None:
        slots = list(self._slots.values())
        self._slots.clear()
        if self._heartbeats is not None:
            await _end(self._heartbeats)
        if self._waiting is not None:
            self._waiting.cancel()
        await asyncio.gather(*(self._stop(slot, grace_s) for slot in slots))

    def _slot(
        self, role: Role, name: str = "", spawn: Spawn | None = None, host: str | None = None
    ) -> WorkerSlot:
        name = name or f"{PREFIXES[role]}{self._num_named[role]}"
        self._num_named[role] += 1
        spawn, receiver = spawn or self._spawn_of(name, role), self._requests.on_message
        slot = WorkerSlot(name, spawn, self._config, receiver, host or self._host, role)
        self._slots[name] = slot
        return slot

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            for slot in self._slots.values():
                slot.beat()

    async def _launch(self, slot: WorkerSlot) -> None:
        try:
            facts = await slot.launch()
            if self._slots.get(slot.name) is slot:
                self._requests.check(slot)
                self._agree(slot, facts)
                self._requests.worker_ready(slot)
                if self.watcher is not None:
                    self.watcher.worker_ready(slot)
        except BaseException as error:
            await slot.stop(GRACE_S if slot.joined else 0.0, str(error))
            raise

    def _agree(self, slot: WorkerSlot, facts: ModelFacts) -> None:
        """Limit the pool to what this worker can do, too, and log its warnings."""
        self._check_gpus(slot, facts)
        binding = of_role(facts, slot.role)
        self.facts = agreed(self.facts or binding, binding, *["dtype"] * slot.joined)
        for warning in facts.warnings:
            _log.warning("worker %s: %s", slot.name, warning)

    def _check_gpus(self, slot: WorkerSlot, facts: ModelFacts) -> None:
        """Refuse a worker that joined on a GPU of another; a placement has looked at its own."""
        others = [] if self._config.share_gpus else list(self._slots.values())
        for other in others:
            if other is slot or other.facts is None or not (slot.joined or other.joined):
                continue
            if shared := set(facts.gpus) & set(other.facts.gpus):
                raise WorkerStartError(
                    f"GPU {min(shared)} is that of worker {other.name}: give each worker its own "
                    "by CUDA_VISIBLE_DEVICES, or try the layout with `serve --share-gpus`"
                )

    async def _keep(self, slot: WorkerSlot) -> None:
        """Replace a slot's worker whenever it dies, until that is in vain."""
        attempts = 0
        while slot.state != "failed":
            launched_s = time.monotonic()
            await slot.died()
            self._requests.worker_down(slot)
            if self.watcher is not None:
                self.watcher.worker_down(slot)
            await slot.stop(self._config.backoff_s)
            if slot.state == "draining":
                return
            if slot.joined:
                del self._tasks[slot.name]  # which is this one
                await self._remove(slot, 0.0, 0.0)
                return
            lived_s = time.monotonic() - launched_s
            attempts = await self._restart(slot, 0 if lived_s > self._config.stable_s else attempts)

    async def _restart(self, slot: WorkerSlot, attempts: int) -> int:
        """Launch until a worker is ready; returns the attempts used, or gives up."""
        config = self._config
        while attempts < config.max_restarts:
            await asyncio.sleep(min(config.backoff_s * 2 ** min(attempts, 16), MAX_BACKOFF_S))
            attempts += 1
            try:
                await self._launch(slot)
            except WorkerStartError as error:
                _log.error("restart %d of worker %s failed: %s", attempts, slot.name, error)
                continue
            _log.warning("worker %s was restarted", slot.name)
            slot.num_restarts += 1
            return attempts
        self._give_up(slot)
        return attempts

    def _give_up(self, slot: WorkerSlot) -> None:
        """Give up a slot whose restarts failed; with the last slot, give up the pool."""
        slot.state = "failed"
        _log.error(
            "worker %s is given up: its last %d restarts failed",
            slot.name,
            self._config.max_restarts,
        )
        self._check_left()

    def _check_left(self) -> None:
        """End the pool where all slots that are left were given up."""
        left = list(self._slots.values())
        if not left and self._config.join_listen is not None:
            self._await_joiner()
        if not left or any(slot.state != "failed" for slot in left):
            return
        message = f"the engine stopped: {left[-1].last_failure}"
        self._requests.no_worker(message)
        self.failure = message
        self.gave_up.set()

    def _await_joiner(self) -> None:
        """End what waits for a worker if none joins in time."""

        def check() -> None:
            if not self._slots:
                limit_s = self._config.wait_s
                message = f"no worker has joined within {limit_s:g} s (--wait-s)"
                self._requests.no_worker(message)

        if self._waiting is not None:
            self._waiting.cancel()
        delay_s = min(self._config.wait_s, LONGEST_S)
        self._waiting = asyncio.get_running_loop().call_later(delay_s, check)

    async def _remove(
        self, slot: WorkerSlot, timeout_s: float = 30.0, grace_s: float = GRACE_S
    ) -> None:
        slot.state = "draining"
        self._requests.worker_leaving(slot)
        deadline_s = time.monotonic() + timeout_s
        while self._requests.at(slot) and slot.ready and time.monotonic() <= deadline_s:
            await asyncio.sleep(POLL_S)
        if self.watcher is not None:
            await self.watcher.worker_leaving(slot, deadline_s - time.monotonic())
        self._slots.pop(slot.name, None)
        self._num_past_restarts += slot.num_restarts
        self._requests.worker_left(slot)
        await self._stop(slot, grace_s)
        self._requests.worker_gone(slot)
        self._check_left()

    async def _stop(self, slot: WorkerSlot, grace_s: float) -> None:
        if slot.name in self._tasks:
            await _end(self._tasks.pop(slot.name))
        await slot.stop(grace_s)
        if self.watcher is not None:
            self.watcher.worker_stopped(slot)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

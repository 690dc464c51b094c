"""The events of a simulated system: arrivals, steps, KV on its way, failures and starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tokenmill.core.kv import PREFILLED, KVNotice
from tokenmill.core.metrics import NS_PER_MS, RequestTimes, summarize
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.types import FinishReason
from tokenmill.plan.cluster.cluster import ClusterConfig
from tokenmill.plan.cluster.faults import FaultEvent
from tokenmill.plan.cluster.layout import DECODE, PREFILL
from tokenmill.plan.cluster.load import Arriving, SimulatedLoad
from tokenmill.plan.cluster.requests import SimulatedHandover, SimulatedRequest, SimulationOutcome
from tokenmill.plan.cluster.worker import Worker
from tokenmill.plan.hardware import Accelerator
from tokenmill.plan.virtual_time import VirtualTime
from tokenmill.routing.attention_dp import assign
from tokenmill.routing.disaggregation import place_prefill
from tokenmill.routing.router import Router
from tokenmill.routing.step_rates import fit_rates
from tokenmill.routing.suspects import Suspects


@dataclass(slots=True)
class Moved:
    num_bytes: float = 0.0
    times_ms: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return {
            "transfers": len(self.times_ms),
            "gigabytes": round(self.num_bytes / 1e9, 3),
            "ms": summarize(self.times_ms, 3),
        }


class Network:
    """The rate of a GPU's links and of its network, one transfer at a time, and a latency."""

    def __init__(self, gpu: Accelerator, bytes_per_token: float, latency_s: float) -> None:
        self._gpu, self._bytes_per_token, self._latency_s = gpu, bytes_per_token, latency_s
        self.inside, self.between = Moved(), Moved()

    def transfer_s(self, source: Worker, target: Worker, num_tokens: int) -> float:
        """Seconds until the KV of so many tokens is there; counted."""
        is_inside = bool(set(source.place.racks) & set(target.place.racks))
        gpu, moved = self._gpu, self.inside if is_inside else self.between
        rate = gpu.link_bytes_per_s if is_inside else gpu.network_bytes_per_s
        num_bytes = num_tokens * self._bytes_per_token
        seconds = num_bytes / rate + self._latency_s
        moved.num_bytes += num_bytes
        moved.times_ms.append(seconds * 1e3)
        return seconds


START_NS = NS_PER_MS  # RequestTimes reads 0 as "not yet"
REPORT_NS = 10**8  # workers report their steps as often
SECOND = 10**9
BEFORE = "before the run"


class Simulation:
    """One run of a load over a cluster."""

    def __init__(
        self, config: ClusterConfig, load: SimulatedLoad, faults: tuple[FaultEvent, ...] = ()
    ) -> None:
        self._config, self._load = config, load
        self._time, self._now_ns = VirtualTime(), START_NS
        self.workers = {p.name: config.make_worker(p) for p in config.layout.workers}
        router = config.router_config()
        self._main, self._prefill = Router(router), Router(router)
        self._late = {h.worker for h in faults if h.kind == "start"}
        self._faults = faults
        for worker in self.workers.values():
            if worker.name in self._late:
                worker.alive = False
            else:
                self._router_of(worker).add_worker(worker.name)
        kv = config.spec.kv_bytes_per_token(1 if self._kv_is_fp8() else 2)
        latency_s = config.efficiency.exchange_us / 1e6
        self.network = Network(config.layout.gpu, kv, latency_s)
        self._suspects: Suspects[SimulatedRequest] = Suspects(config.pool.max_migrations)
        self.open: dict[str, SimulatedRequest] = {}  # by what it was sent as
        self._held: list[SimulatedRequest] = []
        self._arrivals, self._followers = load.arrivals(), load.followers()
        self._num_entries, self._report_ns = 0, START_NS
        self._num_unanswered = 0  # measured requests that have no first token
        self.outcome = SimulationOutcome()

    def _kv_is_fp8(self) -> bool:
        return self._config.layout.workers[0].replica.precision.kv == "fp8"

    def run(self) -> SimulationOutcome:
        """Play everything until the measured requests are through."""
        collects = gc.isenabled()
        gc.disable()  # no cycles are made here, and looking for them would walk all requests
        try:
            self._fill()
            self._plan_faults()
            self._next_arrival(self._arrivals)
            for name in self.workers:
                self._start(name, START_NS)
            while self._goes_on() and self._time.next_ns is not None:
                self._time.run_next()
        finally:
            if collects:
                gc.enable()
        self._conclude()
        return self.outcome

    def _goes_on(self) -> bool:
        outcome, load = self.outcome, self._load
        if load.trace:
            return bool(self.open or outcome.num_arrived < load.num_requests)
        if load.is_closed:
            return outcome.num_finished < load.num_requests
        return outcome.num_arrived < load.num_requests or self._num_unanswered > 0

    # Before the run.

    def _fill(self) -> None:
        """Let requests be under way: spread evenly over the workers that decode and are there."""
        workers = [w for w in self.workers.values() if w.role != PREFILL and w.alive]
        begun = self._load.begun()
        for number, worker in enumerate(workers):
            self._fill_worker(worker, begun[number :: len(workers)])
        for _, arriving in zip(range(self._load.num_waiting), self._followers, strict=False):
            self._arrive(arriving, START_NS)

    def _fill_worker(self, worker: Worker, begun: list[tuple[int, int, int]]) -> None:
        totals = [num_prompt + known for num_prompt, _, known in begun]
        ranks = assign([rank.load() for rank in worker.ranks], totals)
        for (num_prompt, num_output, known), rank in zip(begun, ranks, strict=True):
            entry = self._entry(Arriving(0.0, num_prompt, num_output), START_NS)
            entry.num_known = entry.num_before = known
            entry.times.record(START_NS, 1)
            entry.worker = worker
            worker.ranks[rank].scheduler.add(entry.request(BEFORE))
            worker.rank_of[entry.sent_as] = rank
            self._main.adopt(entry.sent_as, worker.name, num_prompt + known, 0)
        for one in worker.ranks:
            one.scheduler.schedule(START_NS, hold_context=True)
            for seq in one.scheduler.admission.take_to_receive():
                one.receive(seq)

    # Requests come.

    def _entry(self, arriving: Arriving, now_ns: int) -> SimulatedRequest:
        entry = SimulatedRequest(
            self._num_entries,
            arriving.num_prompt,
            arriving.num_output,
            RequestTimes(now_ns),
            arriving.prompt,
        )
        self._num_entries += 1
        self.open[entry.sent_as] = entry
        return entry

    def _next_arrival(self, arrivals: Iterator[Arriving]) -> None:
        if (arriving := next(arrivals, None)) is not None:
            at_ns = START_NS + round(arriving.after_s * SECOND)
            self._time.at(at_ns, "", partial(self._on_arrival, arriving))

    def _on_arrival(self, arriving: Arriving, now_ns: int) -> None:
        self._arrive(arriving, now_ns)
        self._next_arrival(self._arrivals)

    def _arrive(self, arriving: Arriving, now_ns: int) -> None:
        self._now_ns = now_ns
        entry = self._entry(arriving, now_ns)
        if self.outcome.num_arrived < self._load.num_requests:
            entry.is_measured = True
            self.outcome.measured.append(entry)
            self._num_unanswered += 1
        self.outcome.num_arrived += 1
        if now_ns >= self._report_ns:
            self._report_ns = now_ns + REPORT_NS
            self._learn()
        self._send([entry])

    def _learn(self) -> None:
        columns = zip(*(worker.sums.values for worker in self.workers.values()), strict=True)
        rates = fit_rates([sum(column) for column in columns])
        for router in (self._main, self._prefill):
            router.learn_rates(rates)

    def _router_of(self, worker: Worker) -> Router:
        return self._prefill if worker.role == PREFILL else self._main

    def _send(self, entries: list[SimulatedRequest]) -> None:
        """Route requests; those that find no worker are held until one is ready."""
        router = self._main if self._main.workers else self._prefill
        for entry in entries:
            if not router.workers or not self._suspects.may_go(entry):
                self._held.append(entry)
            else:
                self._route(entry, router)

    def _route(self, entry: SimulatedRequest, router: Router) -> None:
        tokens, now_s = entry.routed_tokens(), self._now_ns / SECOND
        decision = router.route(entry.sent_as, tokens, now_s)
        worker = entry.worker = self.workers[decision.worker]
        request = entry.request()
        if not entry.times.first_ns:
            self.outcome.num_prompt_tokens += len(tokens)
        if worker.role == DECODE and entry.may_hand_over:
            rule, has_prefill = self._config.rule, bool(self._prefill.workers)
            place = place_prefill(len(tokens), decision.num_cached_tokens, rule, has_prefill)
            if place.remote:
                source = self.workers[self._prefill.route(entry.sent_as, tokens, now_s).worker]
                router.prefill_done(entry.sent_as)
                entry.handover = SimulatedHandover(request, source)
                lease_s = self._config.pool.kv_lease_s
                return self._submit(source, entry, request.with_task(hold_kv_s=lease_s))
        self._submit(worker, entry, request)

    def _submit(self, worker: Worker, entry: SimulatedRequest, request: Request) -> None:
        worker.submit(request)
        worker.watched.add(entry.sent_as)
        if not worker.running:
            self._time.at(self._now_ns, worker.name, partial(self._kick, worker.name))

    def _kick(self, name: str, now_ns: int) -> None:
        if self.workers[name].alive and not self.workers[name].running:
            self._start(name, now_ns)

    # Steps.

    def _start(self, name: str, now_ns: int) -> None:
        self._now_ns, worker = now_ns, self.workers[name]
        if not worker.alive:
            return
        end_ns, refused = worker.start(now_ns)
        for output in refused:
            self._record(worker, output, now_ns)
        self._take_started(worker)
        if end_ns is not None:
            end = partial(self._end_step, name, worker.generation)
            self._time.at(end_ns, name, end)

    def _end_step(self, name: str, generation: int, now_ns: int) -> None:
        self._now_ns, worker = now_ns, self.workers[name]
        if worker.generation != generation or not worker.alive:
            return  # it died meanwhile
        router = self._router_of(worker)
        for output in worker.finish(router, now_ns):
            self._record(worker, output, now_ns)
        if worker.role == PREFILL:
            for rank in worker.ranks:
                for notice in rank.scheduler.leases.take_notices():
                    self._on_notice(worker, notice)
                rank.scheduler.leases.take_expired()
        router.stepped(name, now_ns / SECOND)
        self._start(name, now_ns)

    def _record(self, worker: Worker, output: RequestOutput, now_ns: int) -> None:
        entry = self.open.get(output.request_id)
        if entry is None:
            return
        is_source = entry.handover is not None and entry.handover.source is worker
        if output.token_ids and not entry.times.first_ns:
            self._record_first(entry, output, now_ns)
        if is_source and output.stop_reason == PREFILLED:
            self._prefill.prefill_done(output.request_id)
        elif output.finish_reason is not None:
            self._end(entry, output.finish_reason, now_ns)

    def _record_first(self, entry: SimulatedRequest, output: RequestOutput, now_ns: int) -> None:
        entry.times.record(now_ns, 1)
        self.outcome.num_cached_tokens += output.num_cached_tokens
        self._num_unanswered -= entry.is_measured
        if entry.handover is None:
            self._main.prefill_done(entry.sent_as)

    def _end(self, entry: SimulatedRequest, reason: FinishReason, now_ns: int) -> None:
        if not entry.times.first_ns:
            self._num_unanswered -= entry.is_measured
        is_whole = reason is FinishReason.LENGTH
        times = entry.times
        times.num_tokens = entry.num_output - entry.num_before if is_whole else times.num_tokens
        times.last_ns = now_ns
        self.outcome.ended(entry, reason)
        self._close(entry, times.num_tokens)
        if self._load.is_closed:
            self._arrive(next(self._followers), now_ns)

    def _close(self, entry: SimulatedRequest, num_tokens: int) -> None:
        self._main.free(entry.sent_as, num_tokens)
        self._prefill.free(entry.sent_as)
        self._end_handover(entry)
        del self.open[entry.sent_as]
        if entry.worker is not None:
            entry.worker.rank_of.pop(entry.sent_as, None)
        if self._suspects.ended(entry):
            self._send_held()

    # KV moves from prefill to decode workers.

    def _on_notice(self, source: Worker, notice: KVNotice) -> None:
        """The first blocks bring the request to the worker that decodes, the last ones the KV."""
        entry = self.open.get(notice.request_id)
        handover = entry.handover if entry else None
        if entry is None or handover is None or handover.source is not source:
            source.abort(notice.request_id)
            return
        assert entry.worker is not None
        if not handover.told:
            handover.told = True
            self._submit(entry.worker, entry, handover.request.with_task(kv_from=source.name))
        handover.num_last = len(notice.block_ids)
        handover.num_blocks += handover.num_last
        handover.is_ready = notice.token_id is not None
        self._move(entry)

    def _take_started(self, worker: Worker) -> None:
        """Sequences that have got blocks for their KV; that from before the run is there."""
        for index, rank in enumerate(worker.ranks):
            for seq in rank.scheduler.admission.take_to_receive():
                entry = self.open.get(seq.request_id)
                if seq.request.task.kv_from == BEFORE:
                    worker.received.append((index, seq))
                elif entry is not None and entry.handover is not None:
                    entry.handover.receiver = index, seq
                    entry.handover.began_late = entry.handover.is_ready
                    self._move(entry)

    def _move(self, entry: SimulatedRequest) -> None:
        """Once all is computed and there is room: what has not gone yet goes now."""
        handover, target = entry.handover, entry.worker
        assert handover is not None and target is not None
        if not handover.is_ready or handover.receiver is None or handover.is_moving:
            return
        handover.is_moving = True
        blocks = handover.num_blocks if handover.began_late else handover.num_last
        num_tokens = min(blocks * self._config.block_size, entry.num_prompt)
        seconds = self.network.transfer_s(handover.source, target, num_tokens)
        at_ns = self._now_ns + round(seconds * SECOND)
        self._time.at(at_ns, target.name, partial(self._on_received, entry, handover))

    def _on_received(
        self, entry: SimulatedRequest, handover: SimulatedHandover, now_ns: int
    ) -> None:
        self._now_ns, target = now_ns, entry.worker
        if entry.handover is not handover or target is None or handover.receiver is None:
            return  # its worker died meanwhile
        target.received.append(handover.receiver)
        entry.handover = None
        handover.source.abort(entry.sent_as)
        self._prefill.free(entry.sent_as)
        self._kick(target.name, now_ns)

    def _end_handover(self, entry: SimulatedRequest) -> None:
        """End a handover that is under way, at both sides."""
        handover, entry.handover = entry.handover, None
        if handover is None:
            return
        if handover.source.alive:
            handover.source.abort(entry.sent_as)
        if handover.told and entry.worker is not None and entry.worker.alive:
            entry.worker.abort(entry.sent_as)
            if handover.receiver is not None:
                rank, seq = handover.receiver
                entry.worker.ranks[rank].scheduler.release(seq)

    # Workers come and go.

    def _plan_faults(self) -> None:
        for fault in self._faults:
            action = self._fail if fault.kind == "fail" else self._begin_start
            at_ns = START_NS + round(fault.after_s * SECOND)
            self._time.at(at_ns, "", partial(action, fault.worker))

    def _fail(self, name: str, now_ns: int) -> None:
        """A worker dies: what it had goes on elsewhere, and it is started again."""
        self._now_ns, worker = now_ns, self.workers[name]
        if not worker.alive:
            return
        worker.die()
        self._router_of(worker).remove_worker(name)
        lost = [e for e in self.open.values() if self._is_at(e, worker)]
        for entry in lost:
            if entry.worker is worker:
                entry.num_known = max(entry.num_known, worker.num_tokens_of(entry.sent_as))
            if entry.num_deaths:
                self._suspects.got_on(entry)
        causes = self._suspects.died(lost)
        for entry in causes:
            self._end(entry, FinishReason.ERROR, now_ns)
        self._migrate([e for e in lost if e.sent_as in self.open])
        self.outcome.happened.append((now_ns, "failed", name, len(lost) - len(causes)))
        back_ns = now_ns + round(self._config.pool.backoff_s * SECOND)
        self._time.at(back_ns, name, partial(self._begin_start, name))

    def _is_at(self, entry: SimulatedRequest, worker: Worker) -> bool:
        source = entry.handover.source if entry.handover else None
        return entry.worker is worker or source is worker

    def _migrate(self, entries: list[SimulatedRequest]) -> None:
        for entry in entries:
            self._main.free(entry.sent_as)
            self._prefill.free(entry.sent_as)
            self._end_handover(entry)
            del self.open[entry.sent_as]
            entry.take_back()
            self.open[entry.sent_as] = entry
            self.outcome.num_recomputed += entry.num_prompt + entry.num_known
        self.outcome.num_migrations += len(entries)
        self._send(entries)

    def _begin_start(self, name: str, now_ns: int) -> None:
        ready_ns = now_ns + round(self._config.start_s * SECOND)
        self._time.at(ready_ns, name, partial(self._ready, name))

    def _ready(self, name: str, now_ns: int) -> None:
        """A worker has started, with nothing cached; those that waited for one go first."""
        self._now_ns, old = now_ns, self.workers[name]
        worker = self.workers[name] = self._config.make_worker(old.place)
        worker.tally, worker.sums, worker.generation = old.tally, old.sums, old.generation + 1
        self._router_of(worker).add_worker(name)
        self.outcome.happened.append((now_ns, "ready", name, len(self._held)))
        self._send_held()

    def _send_held(self) -> None:
        held, self._held = self._held, []
        self._send([entry for entry in held if entry.sent_as in self.open])

    def _conclude(self) -> None:
        """Count what those that still run have got."""
        self.outcome.elapsed_s = (self._now_ns - START_NS) / SECOND
        for worker in self.workers.values():
            for rank in worker.ranks:
                rank.cancel()
        for entry in self.open.values():
            if entry.worker is not None and entry.times.first_ns and entry.handover is None:
                known = entry.worker.num_tokens_of(entry.sent_as) - entry.num_before
                entry.times.num_tokens = max(entry.times.num_tokens, known)
                entry.times.last_ns = max(entry.times.last_ns, entry.worker.last_end_ns)
            self.outcome.running.append(entry)

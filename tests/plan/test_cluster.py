"""Clusters in virtual time: the scheduler's own batches, nothing lost, and prices by hand."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from scheduler_integrity import check_scheduler
from tokenmill.bench.results.mooncake import TraceRequest
from tokenmill.core.config import PoolConfig
from tokenmill.core.requests import Request
from tokenmill.core.types import StepResult
from tokenmill.plan.cluster.cluster import ClusterConfig, StepLimits, expert_factor
from tokenmill.plan.cluster.faults import FaultEvent
from tokenmill.plan.cluster.layout import Division, place_workers
from tokenmill.plan.cluster.load import SimulatedLoad
from tokenmill.plan.cluster.rank_work import RankWork
from tokenmill.plan.cluster.report import full_report
from tokenmill.plan.cluster.simulation import START_NS, Simulation
from tokenmill.plan.cluster.step_price import StepPrice
from tokenmill.plan.hardware import find_gpu
from tokenmill.plan.predict.catalog import find_model, precisions_of
from tokenmill.plan.predict.efficiencies import find_fit
from tokenmill.plan.predict.step_cost import Replica
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Batch, Scheduler

R1, GB300 = find_model("deepseek-r1"), find_gpu("gb300")
DEP8 = Replica(precisions_of(R1, "fp4"), attention_dp=8)
PAIRS = ((700, 30), (90, 61), (1500, 12), (300, 45))


PAIR = Division(DEP8, 2)


def cluster(
    division: Division = PAIR, gpus: int = 16, racks: int = 1, **changes: Any
) -> ClusterConfig:
    """A small system: few places, small steps, large blocks."""
    limits = StepLimits(12, 256)
    defaults: dict[str, Any] = {"max_model_len": 2000, "block_size": 512, "start_s": 0.5}
    layout = place_workers(GB300, gpus, racks, division)
    efficiency = find_fit("v6.0").efficiency
    return ClusterConfig(R1, layout, efficiency, limits, limits, **(defaults | changes))


def finite(count: int, gap_ms: float = 4.0) -> SimulatedLoad:
    """Requests that come one after the other, share nothing, and all end."""
    trace = tuple(
        TraceRequest(gap_ms * n, i, o, range(100 * n, 100 * n - (-i // 16)))
        for n in range(count)
        for i, o in [PAIRS[n % len(PAIRS)]]
    )
    return SimulatedLoad((), count, trace=trace, trace_block_tokens=16)


def report_of(config: ClusterConfig, load: SimulatedLoad, *faults: FaultEvent) -> dict[str, Any]:
    simulation = Simulation(config, load, faults)
    return full_report(config, simulation, simulation.run())


class Spy:
    """Keeps the calls of every scheduler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[Scheduler, list[tuple[Any, ...]]] = defaultdict(list)
        add, schedule, update, skip = (
            getattr(Scheduler, name) for name in ("add", "schedule", "update", "skip_decode_steps")
        )

        def on_add(this: Scheduler, request: Request) -> None:
            self.calls[this].append(("add", request))
            add(this, request)

        def on_schedule(this: Scheduler, now_ns: int, hold_context: bool = False) -> Batch:
            batch: Batch = schedule(this, now_ns, hold_context)
            self.calls[this].append(("schedule", hold_context, chosen(batch)))
            return batch

        def on_update(this: Scheduler, batch: Batch, result: StepResult) -> Any:
            self.calls[this].append(("update", result))
            return update(this, batch, result)

        def on_skip(this: Scheduler, tokens: list[int]) -> None:
            self.calls[this].append(("skip", len(tokens)))
            skip(this, tokens)

        for name, spy in (("add", on_add), ("schedule", on_schedule), ("update", on_update)):
            monkeypatch.setattr(Scheduler, name, spy)
        monkeypatch.setattr(Scheduler, "skip_decode_steps", on_skip)


def chosen(batch: Batch) -> list[tuple[str, int]]:
    return [(seq.request_id, num_new) for seq, num_new in batch.items]


def test_simulated_batches_are_those_of_the_scheduler() -> None:
    """A plain scheduler, told the same, chooses the same; what was skipped only decodes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        spy = Spy(monkeypatch)
        load = SimulatedLoad(PAIRS, 60, None, num_running=150, num_waiting=16)
        report = report_of(cluster(), load)
    assert report["num_finished"]["length"] >= 60
    num_skipped = 0
    for simulated, calls in spy.calls.items():
        pool = simulated.pool
        plain = Scheduler(
            simulated.config, BlockPool(pool.num_blocks, pool.block_size, False), frozenset()
        )
        num_skipped += _follow(plain, calls)
    assert len(spy.calls) == 16 and num_skipped > 50


def _follow(plain: Scheduler, calls: list[tuple[Any, ...]]) -> int:
    """Check every batch; returns how many steps were skipped."""
    num_skipped, batch = 0, Batch()
    for name, *rest in calls:
        if name == "add":
            plain.add(rest[0])
        elif name == "schedule":
            batch = plain.schedule(1, rest[0])
            assert chosen(batch) == rest[1]
            for seq in plain.admission.take_to_receive():
                plain.receive(seq, 0)
        elif name == "update":
            plain.update(batch, rest[0])
        else:
            for _ in range(rest[0]):
                step = plain.schedule(1, True)
                assert step.num_tokens == len(step.items) == plain.stats().num_running
                assert not any(out.finish_reason for out in plain.update(step, ones(step)))
            num_skipped += rest[0]
    return num_skipped


def ones(batch: Batch) -> StepResult:
    return StepResult([[0] for _ in batch.items])


@pytest.mark.parametrize("rate", [None, 400.0])
def test_skipped_steps_change_nothing(rate: float | None) -> None:
    load = SimulatedLoad(PAIRS, 50, rate, num_running=100, num_waiting=0 if rate else 16)
    fail = FaultEvent("fail", 0.1, "worker-1")
    skipping, stepping = (report_of(cluster(skips=skips), load, fail) for skips in (True, False))
    assert skipping == stepping and skipping["num_migrations"] > 0


def ends(config: ClusterConfig, load: SimulatedLoad, *faults: FaultEvent) -> dict[str, Any]:
    """A finite load: every request has ended, once, with all its tokens."""
    simulation = Simulation(config, load, faults)
    outcome = simulation.run()
    assert not simulation.open and not outcome.running
    numbers = sorted(entry.number for entry in outcome.ended_entries)
    assert numbers == list(range(load.num_requests)), "each ends exactly once"
    for worker in simulation.workers.values():
        for rank in worker.ranks if worker.alive else ():
            scheduler = rank.catch_up()
            scheduler.schedule(1)
            check_scheduler(scheduler)
            assert scheduler.load()[0] == len(scheduler.leases) == 0
    whole = [e for e in outcome.ended_entries if e.times.num_tokens == e.num_output]
    assert len(whole) == outcome.finished.get("length", 0)
    return full_report(config, simulation, outcome)


def test_a_dead_worker_loses_nothing() -> None:
    report = ends(cluster(), finite(60), FaultEvent("fail", 0.12, "worker-0"))
    assert report["num_finished"] == {"length": 60}
    failed, ready = report["events"]
    assert failed["migrated"] == report["num_migrations"] > 0
    assert report["num_recomputed_tokens"] > 0
    assert ready["event"] == "ready" and ready["after_s"] == 0.12 + 0.5 + 0.5
    calm = ends(cluster(), finite(60))
    assert calm["ttft_ms"]["p99"] < report["ttft_ms"]["p99"] and not calm["events"]


APART = Division(DEP8, 2, replace(DEP8, attention_dp=4), 2)


@pytest.mark.parametrize("dead", ["prefill-0", "decode-1"])
@pytest.mark.parametrize("after_s", [0.05, 0.13])
def test_prompts_computed_elsewhere_survive_either_worker(dead: str, after_s: float) -> None:
    config = cluster(APART, 24, 2)
    report = ends(config, finite(60), FaultEvent("fail", after_s, dead))
    assert report["num_finished"] == {"length": 60} and report["num_migrations"] > 0
    for where, gb_per_s in (("inside_racks", 900), ("between_racks", 100)):
        kv = report["network"][where]["kv"]
        latency_ms = config.efficiency.exchange_us / 1e3
        mean_ms = kv["gigabytes"] / gb_per_s * 1e3 / kv["transfers"] + latency_ms
        assert kv["ms"]["mean"] == pytest.approx(mean_ms, abs=0.01)


def test_requests_whose_workers_die_too_often_end_in_an_error() -> None:
    config = cluster(pool=PoolConfig(max_migrations=0))
    report = ends(config, finite(40), FaultEvent("fail", 0.1, "worker-0"))
    assert report["num_finished"]["error"] > 0 and sum(report["num_finished"].values()) == 40


def test_requests_wait_for_the_only_worker_to_come_back() -> None:
    config = cluster(Division(DEP8, 1), 8)
    report = ends(config, finite(12, 40.0), FaultEvent("fail", 0.1, "worker-0"))
    assert report["num_finished"] == {"length": 12}
    assert report["events"][1]["held"] > 0 and report["ttft_ms"]["max"] > 700


def test_a_worker_that_starts_takes_requests_when_it_is_ready() -> None:
    simulation = Simulation(cluster(), finite(80, 20.0), (FaultEvent("start", 0.2, "worker-1"),))
    outcome = simulation.run()
    late = simulation.workers["worker-1"]
    assert late.tally.num_steps > 0 and outcome.finished == {"length": 80}
    assert outcome.happened == [(START_NS + 700_000_000, "ready", "worker-1", 0)]
    alone = sum(entry.times.arrival_ns < START_NS + 700_000_000 for entry in outcome.measured)
    tokens = sum(e.num_output for e in outcome.measured[:alone])
    assert simulation.workers["worker-0"].tally.num_output_tokens >= tokens


def test_prices_of_ranks() -> None:
    config = cluster()
    price = StepPrice(config.cost(DEP8))
    works = [RankWork(100, 100, 61 * 300_000, sampled=100)] * 8
    even = price.price(works)
    total = RankWork(800, 800, 8 * 61 * 300_000, sampled=800).times(1.0)
    assert even.seconds == even.even_s == pytest.approx(price.cost.step_s(total))
    assert even.inside_s == pytest.approx(price.cost.parts(total)["exchange"])
    chunk = RankWork(100, 100, 61 * 300_000, 2000, 61 * 2_000_000, 102)
    uneven = price.price([chunk, *works[1:]])
    full = price.cost.parts(chunk.times(8))
    own_s = sum(s for name, s in full.items() if name not in ("routed experts", "launches"))
    mean = price.cost.parts(
        RankWork(800, 800, 8 * 61 * 300_000, 2000, 61 * 2_000_000, 802).times(1)
    )
    assert uneven.seconds == pytest.approx(own_s + mean["routed experts"] + mean["launches"])
    assert uneven.seconds > uneven.even_s == pytest.approx(sum(mean.values()))
    plain = StepPrice(config.cost(DEP8), fused=False).price(works)
    added = price.cost.parts(total)["activations"] + 58 * 237e-6
    assert plain.seconds - even.seconds == pytest.approx(added)


def test_a_replica_over_two_racks_exchanges_over_the_network() -> None:
    wide = replace(DEP8, attention_dp=16)
    config = cluster(Division(wide, 1), 16, 2)
    assert config.layout.workers[0].racks == (0, 1)
    works = [RankWork(100, 100, 61 * 300_000, sampled=100)] * 16
    over = config.price(wide, 2).price(works)
    inside = cluster(Division(wide, 1), 16, 1).price(wide, 1).price(works)
    latency_s = 58 * config.efficiency.exchange_us * 1e-6
    assert over.between_s - latency_s == pytest.approx(9 * (inside.inside_s - latency_s) / 2)
    assert over.seconds - inside.seconds == pytest.approx(over.between_s - inside.inside_s)


def test_experts_that_were_never_placed_take_longer() -> None:
    assert expert_factor(8, 256, 8, 32) == 1.0
    assert expert_factor(32, 256, 8, 32) < expert_factor(32, 256, 8, 0)


def test_drafts_are_accepted_as_often_as_said() -> None:
    drafting = replace(DEP8, mtp_depth=3)
    load = SimulatedLoad(((50, 400),), 40, None, num_running=64)
    config = cluster(Division(drafting, 1), 8, acceptance=0.5)
    simulation = Simulation(config, load)
    simulation.run()
    tally = simulation.workers["worker-0"].tally
    steps = sum(count for _, count in tally.gaps)
    assert tally.num_output_tokens / steps == pytest.approx(1.875, rel=0.05)
    stats = [rank.scheduler.stats() for rank in simulation.workers["worker-0"].ranks]
    drafted, accepted = (
        sum(getattr(one, name)[0] for one in stats) for name in ("num_drafted", "num_accepted")
    )
    assert accepted / drafted == pytest.approx(0.5, abs=0.05)

"""Any order of submit, abort, failure and late loads: what comes back from tiers is what left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_runner import EOS, FakeRunner, Launched, expected
from kv.at_once import without_threads
from scheduler_integrity import check_host_tier, check_scheduler
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.kv_groups import NONE_SLIDE, Sliding
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.engine import LanguageEngine
from tokenmill.kv.tiers.disk_tier import DiskTier
from tokenmill.kv.tiers.offloading import KVTiers
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.cache.prefix import find_stored, match_prefix
from tokenmill.sched.scheduler import Batch, Scheduler
from tokenmill.sched.sequence import Sequence as Seq

SIZE, MAX_LEN = 4, 64


class Late:
    """A load that copies after some polls: a batch in flight may write to its pages before."""

    def __init__(self, copies: FakeCopies, slots: list[int], block_ids: list[int]) -> None:
        self._copies, self._slots, self._block_ids = copies, slots, block_ids
        self._polls = copies.source.randrange(2, 6)

    def done(self) -> bool:
        self._polls -= 1
        if not self._polls:
            for slot, block_id in zip(self._slots, self._block_ids, strict=True):
                page = self._copies.pages[slot].tolist()
                self._copies.kv[block_id * SIZE : (block_id + 1) * SIZE] = page
        return self._polls <= 0

    def exception(self) -> BaseException | None:
        return None


class FakeCopies:
    """Host memory for the KV of a fake model; garbage is 0.

    As on a GPU, pages are taken when they are saved, and reach their slots as late as may be.
    """

    def __init__(self, kv: list[int | None], num_slots: int, source: random.Random) -> None:
        self.kv, self.source = kv, source
        self.pages = np.zeros((num_slots, SIZE), np.int64)
        self.host = self.pages.view(np.uint8)
        self._late: list[tuple[int, list[int]]] = []

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            page = self.kv[block_id * SIZE : (block_id + 1) * SIZE]
            self._late.append((slot, [value or 0 for value in page]))

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> Late:
        self.settle()
        return Late(self, list(slots), list(block_ids))

    def settle(self) -> None:
        for slot, page in self._late:
            self.pages[slot] = page
        self._late.clear()

    def close(self) -> None: ...


class FailingRunner(FakeRunner):
    """Some steps raise after they have left garbage."""

    def __init__(self, source: random.Random, failures: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._source, self._failures = source, failures

    def launch(self, batch: Batch) -> Launched:
        launched = super().launch(batch)
        wait = launched.wait

        def wait_or_raise() -> Any:
            if self._source.random() < self._failures:
                launched.lose()
                raise RuntimeError("the step raised")
            return wait()

        launched.wait = wait_or_raise  # type: ignore[method-assign]
        return launched

    def run(self, batch: Batch) -> Any:
        return self.launch(batch).wait()


@pytest.mark.parametrize("failures", [0.0, 0.05])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sliding", [NONE_SLIDE, Sliding(7, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_what_comes_back_is_what_left(
    seed: int, sliding: Sliding, overlap: bool, failures: float, tmp_path: Path
) -> None:
    source = random.Random(f"{seed} {sliding} {overlap} {failures}")
    num_blocks = source.choice([14, 20]) * sliding.pages_per_block
    config = SchedulerConfig(max_num_batched_tokens=9, max_num_seqs=5, max_model_len=MAX_LEN)
    scheduler = Scheduler(config, BlockPool(num_blocks, SIZE, True, sliding), EOS)
    runner = FailingRunner(source, failures, num_blocks, SIZE, sliding=sliding)
    disk = DiskTier(str(tmp_path), 4000, bytes(16)) if seed % 2 else None
    num_slots = source.choice([8, 60, 400] if disk is None else [8, 16])
    copies = FakeCopies(runner.kv, num_slots, source)
    tiers = KVTiers(scheduler, copies, disk, b"model")  # type: ignore[arg-type]
    without_threads(tiers)
    engine = LanguageEngine(
        scheduler, runner, launcher=runner if overlap else None, tiers=tiers, vocab_size=None
    )
    texts = [[source.randrange(1, 9) for _ in range(40)] for _ in range(5)]
    asked: dict[str, Request] = {}
    answers: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}

    def take() -> None:
        for output in engine.step():
            assert output.request_id not in ends, "two terminal outputs"
            answers[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
        check_scheduler(scheduler)

    for number in range(120):
        text, salt = source.choice(texts), source.choice(["", "", "s"])
        sampling = SamplingParams(max_tokens=source.randrange(1, 12), ignore_eos=True)
        prompt = text[: source.choice([3, 11, 19, 27, 39])]
        request = Request(
            str(number), Generate(prompt, sampling, cache_salt=salt), arrival_ns=number
        )
        asked[str(number)], answers[str(number)] = request, []
        engine.submit(request)
        for _ in range(source.randrange(8)):
            take()
        if source.random() < 0.1:
            engine.abort(source.choice(list(asked)))
    for _ in range(20_000):
        if not engine.has_work():
            break
        take()
    assert not engine.has_work() and ends.keys() == asked.keys()
    for name, reason in ends.items():
        if reason is FinishReason.LENGTH:
            words, _ = expected(asked[name], MAX_LEN, scheduler.limits.capacity)
            assert answers[name] == words, name
    assert failures or FinishReason.ERROR not in ends.values()
    assert sum(reason is FinishReason.LENGTH for reason in ends.values()) > 20
    check_host_tier(tiers.host)
    assert scheduler.stats().num_kv_blocks_used == 0
    assert tiers.stats()["saved_bytes"] > 0
    assert disk is None or tiers.stats()["disk_read_bytes"] > 0


def test_a_block_that_is_used_while_it_is_written_stays(tmp_path: Path) -> None:
    config = SchedulerConfig(max_num_batched_tokens=9, max_num_seqs=5, max_model_len=MAX_LEN)
    scheduler = Scheduler(config, BlockPool(8, SIZE, True), EOS)
    copies = FakeCopies([], 8, random.Random(0))
    disk = DiskTier(str(tmp_path), 4000, bytes(16))
    tiers = KVTiers(scheduler, copies, disk, b"model")  # type: ignore[arg-type]
    without_threads(tiers)
    names = [bytes([number]) * 24 for number in range(8)]
    for name in names:
        slots = tiers.host.claim(1)
        assert slots is not None
        tiers.host.put(name, slots)
    for used in (True, False):
        tiers.exchange()  # writes the oldest block, as no slot is free
        if used:
            tiers.host.pin(names[0])  # as a load does
            tiers.host.touch(names[0])
        tiers.poll()
    assert tiers.host.names() == [*names[2:], names[0]] and sorted(disk.names()) == names[:2]
    assert tiers.stats()["disk_written_bytes"] == 2 * copies.host.shape[1]
    assert tiers.stats()["dropped"] == 0


def serve(
    tmp_path: Path, num_blocks: int, num_seqs: int, num_slots: int, on_disk: bool
) -> tuple[LanguageEngine, Scheduler, KVTiers]:
    config = SchedulerConfig(
        max_num_batched_tokens=48, max_num_seqs=num_seqs, max_model_len=MAX_LEN
    )
    scheduler = Scheduler(config, BlockPool(num_blocks, SIZE, True), EOS)
    runner = FakeRunner(num_blocks, SIZE)
    disk = DiskTier(str(tmp_path), 2**20, bytes(16)) if on_disk else None
    copies = FakeCopies(runner.kv, num_slots, random.Random(0))
    tiers = KVTiers(scheduler, copies, disk, b"model")  # type: ignore[arg-type]
    without_threads(tiers)
    return LanguageEngine(scheduler, runner, tiers=tiers), scheduler, tiers


def ask(engine: LanguageEngine, name: str, prompt: list[int], max_tokens: int = 1) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.submit(Request(name, Generate(prompt, sampling)))


def finish(engine: LanguageEngine) -> dict[str, int]:
    """Run to the end; returns how many tokens of each prompt were cached."""
    cached = {}
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH
                cached[output.request_id] = output.num_cached_tokens
    return cached


FIRST, OTHERS = [1, 2, 3, 4] * 5, ([5] * 40, [6] * 40)


def test_a_prefix_is_on_the_device_before_its_request_has_a_place(tmp_path: Path) -> None:
    """It comes while another request runs, takes nothing from that, and nobody holds it."""
    engine, scheduler, tiers = serve(tmp_path, 20, 1, 60, on_disk=False)
    for number, prompt in enumerate((FIRST, *OTHERS)):
        ask(engine, str(number), prompt)
        finish(engine)
    assert not match_prefix(scheduler.pool, sequence(scheduler, FIRST)), "it is still there"
    ask(engine, "long", [7] * 8, max_tokens=30)
    ask(engine, "again", FIRST)
    was_ahead = False
    for _ in range(15):
        engine.step()
        check_scheduler(scheduler)
        stats = scheduler.stats()
        was_ahead |= stats.num_loading == stats.num_running == 1
    assert was_ahead and (stats.num_running, stats.num_waiting) == (1, 1)
    assert len(match_prefix(scheduler.pool, sequence(scheduler, FIRST))) == 4
    assert scheduler.pool.num_used == -(-stats_tokens(scheduler) // SIZE)
    loaded = tiers.stats()["loaded_bytes"]
    assert finish(engine)["again"] == 16 and tiers.stats()["loaded_bytes"] == loaded
    assert scheduler.stats().num_preemptions == 0
    check_host_tier(tiers.host)


def sequence(scheduler: Scheduler, prompt: list[int]) -> Seq:
    return scheduler.limits.sequence(Request("probe", Generate(prompt, SamplingParams())), 0, EOS)


def stats_tokens(scheduler: Scheduler) -> int:
    return sum(seq.num_tokens for seq in scheduler._queues.running)


def test_an_ahead_load_leaves_running_ones_their_blocks(tmp_path: Path) -> None:
    """Where they may need the blocks to grow, the prefix waits with its request."""
    engine, scheduler, _ = serve(tmp_path, 14, 1, 60, on_disk=False)
    for number, prompt in enumerate((FIRST, *OTHERS)):
        ask(engine, str(number), prompt)
        finish(engine)
    ask(engine, "long", [7] * 36, max_tokens=12)
    ask(engine, "again", FIRST)
    for _ in range(10):
        engine.step()
        assert scheduler.stats().num_loading == 0
    assert finish(engine)["again"] == 16 and scheduler.stats().num_preemptions == 0


def test_blocks_of_waiting_requests_come_from_disk_to_host_memory(tmp_path: Path) -> None:
    """Ahead of their place on the device, as far as slots are free."""
    engine, scheduler, tiers = serve(tmp_path, 14, 5, 40, on_disk=True)
    for number, prompt in enumerate((FIRST, *([token] * 16 for token in range(10, 30)))):
        ask(engine, str(number), prompt)
        finish(engine)
    ask(engine, "long", [9] * 40, max_tokens=12)
    ask(engine, "again", FIRST)
    stored = find_stored(scheduler.pool, sequence(scheduler, FIRST))
    assert stored is not None
    names = dict(stored.missing).keys()
    assert len(names) == 4 and names.isdisjoint(tiers.host.names())
    for _ in range(8):
        engine.step()
    assert scheduler.stats().num_waiting == 1, "it was to wait for blocks of the device"
    assert tiers.stats()["prefetched_bytes"] > 0 and names & set(tiers.host.names())
    assert finish(engine)["again"] == 16
    check_host_tier(tiers.host)

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
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.kv_groups import NONE_SLIDE, Sliding
from tokenmill.core.types import FinishReason, Request, SamplingParams
from tokenmill.engine.engine import LanguageEngine
from tokenmill.kv.tiers.disk_tier import DiskTier
from tokenmill.kv.tiers.offloading import KVTiers
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Batch, Scheduler

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
        scheduler.check_integrity()

    for number in range(60):
        text, salt = source.choice(texts), source.choice(["", "", "s"])
        sampling = SamplingParams(max_tokens=source.randrange(1, 12), ignore_eos=True)
        prompt = text[: source.randrange(1, 40)]
        request = Request(str(number), prompt, sampling, arrival_ns=number, cache_salt=salt)
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
    tiers.host.check_integrity()
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

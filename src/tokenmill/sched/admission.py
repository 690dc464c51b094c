"""How waiting sequences start: here, on blocks that another engine fills, or on those of tiers."""

from __future__ import annotations

from tokenmill.core.config import SchedulerConfig
from tokenmill.core.types import EngineStats
from tokenmill.sched.cache.block_ledger import BlockLedger
from tokenmill.sched.cache.encoder_cache import EncoderCache
from tokenmill.sched.cache.prefix import (
    PrefixLoad,
    StoredPrefix,
    cache_blocks,
    cache_loaded,
    find_stored,
    match_prefix,
)
from tokenmill.sched.cache.tiers import Page
from tokenmill.sched.meter import StepMeter
from tokenmill.sched.queues import Queues
from tokenmill.sched.sequence import Sequence, Status, Step

_MOST_AHEAD = 4  # requests whose prefixes come to the device before there is a place for them


class Admission:
    """Starts waiting sequences in order, as far as budget, places and blocks go.

    One starts only when all its known tokens fit beside what running ones will still need, so that
    an admission never leads to a preemption by itself.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queues: Queues,
        ledger: BlockLedger,
        images: EncoderCache,
        meter: StepMeter,
        counters: EngineStats,
    ) -> None:
        self._config, self._queues, self._ledger, self._pool = config, queues, ledger, ledger.pool
        self._images, self._meter, self._counters = images, meter, counters
        self.now_ns = 0  # of the step
        self._to_receive: list[Sequence] = []  # that take_to_receive() has not told
        self._new_loads: list[PrefixLoad] = []
        self._loads: dict[Sequence, PrefixLoad] = {}  # of sequences that have ended, too

    # What fits.

    def num_startable(self, num_running: int, budget: int) -> int:
        """Return how many waiting requests admit() would start, if the first finds its blocks."""
        first = self._queues.first_waiting()
        places = self._config.num_seqs - num_running - self._num_receiving
        places = min(places, budget, self._queues.num_waiting)
        if first is None or first.remote or places <= 0:
            return 0
        total = -(-first.num_tokens // self._pool.block_size)
        return places * self._fits(first, match_prefix(self._pool, first), total)

    def num_blocks_to_start(self, budget: int) -> int | None:
        """Return how many free blocks keep the first waiting request as startable as it is.

        0: it cannot start before a running one ends. None: it receives its KV and starts at once.
        """
        first = self._queues.first_waiting()
        if first is None or budget <= 0 or self._is_full():
            return 0
        size = self._pool.block_size
        total = first.num_tokens // size + 1 if first.remote else -(-first.num_tokens // size)
        if not self._fits(first, [], total):
            return 0
        return None if first.remote else total + self._ledger.watermark

    def reserve_for_loads(self) -> None:
        """Keep blocks for the rest of the prompts that are loaded."""
        size = self._pool.block_size
        for seq, load in self._loads.items():
            if not seq.finished and not load.ahead:
                self._ledger.reserve(max(0, -(-seq.num_tokens // size) - len(seq.block_ids)))

    def _is_full(self) -> bool:
        return len(self._queues.running) + self._num_receiving >= self._config.num_seqs

    @property
    def _num_receiving(self) -> int:
        """Sequences outside the batch that have a place in it."""
        return len(self._queues.outside) - self._num_ahead

    @property
    def _num_ahead(self) -> int:
        return sum(load.ahead and not seq.finished for seq, load in self._loads.items())

    def _fits(
        self, seq: Sequence, matched: list[int], total: int, start: int | None = None
    ) -> bool:
        return self._ledger.fits(seq, matched, total, not self._queues.running, start)

    # A step is chosen.

    def admit_alone(self, step: Step) -> bool:
        """Without chunking, give a step to a prompt that does not fit beside the running ones."""
        seq = None if self._config.chunked_prefill else self._queues.first_waiting()
        if seq is None or seq.remote or self._is_full():
            return False
        num_new = seq.num_tokens - len(match_prefix(self._pool, seq)) * self._pool.block_size
        if num_new <= step.budget - len(self._queues.running):
            return False
        return self._start(seq, num_new, step)

    def admit(self, step: Step) -> None:
        """Start waiting sequences in order until one has to wait."""
        while step.budget > 0 and not self._is_full():
            seq = self._queues.first_waiting()
            if seq is None or (step.hold_context and not seq.remote):
                break
            if seq.remote:
                started = self._receive(seq)
            elif stored := find_stored(self._pool, seq):
                started = self._load(seq, stored)
            else:
                started = self._start(seq, step.budget, step)
            if not started:
                break
        if self._pool.tiers is not None and (step.budget <= 0 or self._is_full()):
            self._load_ahead()

    def _start(self, seq: Sequence, budget: int, step: Step) -> bool:
        """Start the first waiting sequence on its cached prefix; False if it has to wait."""
        pool, size = self._pool, self._pool.block_size
        matched = match_prefix(pool, seq)
        first = len(matched) * size
        num_new = min(seq.num_tokens - first, budget)
        if first + num_new < seq.num_tokens and not self._config.chunked_prefill:
            return False
        total = -(-seq.num_tokens // size)
        if not self._fits(seq, matched, total):
            return False
        if seq.image_end:
            num_new = self._images.reach(seq, first, num_new)
            if num_new == 0:  # its next image is encoded in a later step
                return False
        end = first + num_new
        self._ledger.occupy(seq, matched, -(-end // size))
        self._count_start(seq)
        self._ledger.take_slot(seq)
        self._ledger.reserve(total - len(seq.block_ids))
        if pool.prefix_cache:
            cache_blocks(pool, [(seq, end)])
        self._queues.move(seq, Status.RUNNING)
        self._meter.takes(seq, num_new)
        step.add(seq, num_new)
        return True

    def _receive(self, seq: Sequence) -> bool:
        """Let another engine fill the first waiting sequence's blocks; False if it has to wait.

        It gets room for the first token, too, so that it can run as soon as its KV is here.
        """
        matched, total = match_prefix(self._pool, seq), seq.num_tokens // self._pool.block_size + 1
        if not self._fits(seq, matched, total):
            return False
        self._ledger.occupy(seq, matched, total)
        self._count_start(seq)
        self._queues.move(seq, Status.RECEIVING)
        self._to_receive.append(seq)
        return True

    def _load(self, seq: Sequence, stored: StoredPrefix) -> bool:
        """Let tiers fill the first waiting sequence's blocks; False if it has to wait."""
        total = -(-seq.num_tokens // self._pool.block_size)
        if not self._fits(seq, stored.matched, total, stored.end):
            return False
        self._begin_load(seq, stored, ahead=False)
        self._ledger.reserve(total - stored.end)
        return True

    def _load_ahead(self) -> None:
        """Let tiers bring prefixes of those that start next, where nobody else needs the blocks."""
        ledger, size, spare = self._ledger, self._pool.block_size, len(self._queues.running)
        for seq in self._queues.next_waiting(_MOST_AHEAD):
            total = -(-seq.num_tokens // size) + spare  # running ones may grow meanwhile
            if self._num_ahead >= _MOST_AHEAD or not ledger.fits(seq, [], total, False):
                return
            if seq.ahead or seq.remote:
                continue
            seq.ahead = True
            stored = find_stored(self._pool, seq)
            if stored and ledger.fits(seq, stored.matched, total, False, stored.end):
                self._begin_load(seq, stored, ahead=True)

    def _begin_load(self, seq: Sequence, stored: StoredPrefix, ahead: bool) -> None:
        matched, end = stored.matched, stored.end
        windows = self._ledger.occupy(seq, matched, end, start=end)
        absent = [*((block_id,) for block_id in seq.block_ids[len(matched) :]), *windows]
        pages = [Page(name, ids) for (name, _), ids in zip(stored.missing, absent, strict=True)]
        load = self._loads[seq] = PrefixLoad(seq, end, pages, ahead)
        self._new_loads.append(load)
        self._queues.move(seq, Status.LOADING)

    def _count_start(self, seq: Sequence) -> None:
        """Count a request that begins to run, and what of its prompt was cached."""
        if seq.started:
            return
        seq.started = True
        seq.scheduled_ns = self.now_ns
        seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        request, counters = seq.request, self._counters
        if request.task.kv_from is not None or request.task.output_token_ids:
            return  # another engine counted the prompt
        if seq.num_cached_tokens:
            seq.cost.saved_s = self._meter.saved_s(seq.num_cached_tokens)
        counters.num_prompt_tokens += seq.num_prompt_tokens
        if self._pool.prefix_cache and seq.prompt_logprobs is None:
            counters.prefix_query_tokens += seq.num_prompt_tokens
            counters.prefix_hit_tokens += seq.num_cached_tokens

    # Others fill the blocks of sequences outside the batch.

    def take_to_receive(self) -> list[Sequence]:
        """Return the sequences that have got blocks for their KV, each once.

        A batch in flight may still write to these blocks until its result is collected.
        """
        seqs, self._to_receive = self._to_receive, []
        return seqs

    def take_loads(self) -> list[PrefixLoad]:
        """Return the loads that are new, each once."""
        loads, self._new_loads = self._new_loads, []
        return loads

    def spoil_load(self, seq: Sequence) -> None:
        """What a sequence has matched was not written: it has to start anew after its load."""
        self._loads[seq].spoilt = True

    def end_load(self, load: PrefixLoad, loaded: bool) -> None:
        """Run the sequence of a load, or let it wait again where that failed.

        One that was loaded ahead of its place waits, too: nobody holds its blocks, so that running
        ones can have them, but they are cached. Blocks of one that has ended were kept until now.
        """
        seq = load.seq
        del self._loads[seq]
        if seq.finished:
            self._ledger.release_abandoned(seq)
            return
        is_complete = loaded and not load.spoilt
        if is_complete:
            cache_loaded(self._pool, seq, load.end)
        if is_complete and not load.ahead:
            self._ledger.take_slot(seq)
            self._queues.move(seq, Status.RUNNING)
            self._count_start(seq)
            self._meter.takes(seq, seq.num_tokens - seq.num_computed_tokens)
        else:
            self._ledger.release(seq)
            seq.num_computed_tokens = 0
            self._queues.move(seq, Status.WAITING)

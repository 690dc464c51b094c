"""Which requests can run at all, and when waiting ones start."""

from __future__ import annotations

from typing import NamedTuple

from tokenmill.core.config import SchedulerConfig
from tokenmill.core.types import EngineStats, Request, no_room
from tokenmill.sched.cache.block_ledger import BlockLedger
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.cache.encoder_cache import EncoderCache
from tokenmill.sched.cache.prefix import cache_blocks, match_prefix
from tokenmill.sched.loading import Loading, StoredPrefix, find_stored
from tokenmill.sched.meter import StepMeter
from tokenmill.sched.receiving import Receiving
from tokenmill.sched.request_queues import RequestQueues
from tokenmill.sched.sequence import Sequence, Step


def kv_tokens(pool: BlockPool, config: SchedulerConfig) -> int:
    """Tokens of one sequence that a pool holds."""
    most_new, size = config.most_new_tokens, pool.block_size
    return pool.sliding.num_blocks(pool.num_blocks, most_new, size) * size


MOST_AHEAD = 4  # requests whose prefixes come to the device before there is a place for them


class Limits(NamedTuple):
    """What bounds a request: the configuration, and the tokens that the KV cache holds."""

    config: SchedulerConfig
    capacity: int

    def refusal(self, request: Request, num_waiting: int) -> tuple[str, str] | None:
        """Why a request is not taken: (stop_reason, a sentence), or None."""
        num_prompt = len(request.prompt_token_ids) + len(request.output_token_ids)
        max_len = self.config.max_model_len
        if not request.prompt_token_ids:
            return "empty_prompt", "the prompt has no tokens, at least 1 is needed"
        if num_prompt > max_len - 1:
            return "too_long", no_room(num_prompt, max_len)
        if num_prompt + 1 > self.capacity:
            return (
                "no_capacity",
                f"the prompt has {num_prompt} tokens; the KV cache holds {self.capacity} "
                "and must have room for one more",
            )
        return self.queue_full(request, num_waiting)

    def queue_full(self, request: Request, num_waiting: int) -> tuple[str, str] | None:
        """Why a request cannot wait; one that began elsewhere is taken in any case."""
        most = self.config.max_waiting
        if num_waiting < most or request.output_token_ids:
            return None
        return (
            "queue_full",
            f"{num_waiting} requests wait; the limit is {most} (--max-queue)",
        )

    def sequence(self, request: Request, order: int, eos: frozenset[int]) -> Sequence:
        """The sequence of a request that came as number `order`."""
        sampling = request.sampling
        priority = request.priority if self.config.policy == "priority" else 0
        # One token past the pool needs no block of its own as long as nothing follows it.
        max_len = min(self.config.max_model_len, self.capacity + 1)
        if sampling.max_tokens is not None:
            max_len = min(max_len, len(request.prompt_token_ids) + sampling.max_tokens)
        if request.hold_kv_s is not None:
            max_len = min(max_len, len(request.prompt_token_ids) + 1)
        stop_ids = frozenset() if sampling.ignore_eos else eos
        if sampling.stop_token_ids:
            stop_ids = stop_ids.union(sampling.stop_token_ids)
        return Sequence(request, (priority, request.arrival_ns, order), max_len, stop_ids)


class Admission:
    """Starts waiting sequences in order, as far as budget, places and blocks go.

    One starts only when all its known tokens fit beside what running ones will still need, so that
    an admission never leads to a preemption by itself.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        ledger: BlockLedger,
        receiving: Receiving,
        loading: Loading,
        images: EncoderCache,
        counters: EngineStats,
        meter: StepMeter,
    ) -> None:
        self._config = config
        self._images = images
        self._meter = meter
        self._queues = queues
        self._ledger = ledger
        self._receiving = receiving
        self._loading = loading
        self._pool = ledger.pool
        self._counters = counters

    def num_startable(self, budget: int) -> int:
        """Return how many waiting requests admit() would start, if the first finds its blocks."""
        queues, first = self._queues, self._queues.waiting.first()
        num_running = sum(not seq.finished for seq in queues.running)
        places = self._config.num_seqs - num_running - self._num_receiving
        places = min(places, budget)
        if first is None or first.remote or places <= 0:
            return 0
        total = -(-first.num_tokens // self._pool.block_size)
        matched = match_prefix(self._pool, first)
        return min(places, len(queues.waiting)) * self._fits(first, matched, total)

    def num_blocks_to_start(self, budget: int) -> int | None:
        """Return how many free blocks keep the first waiting request as startable as it is.

        0: it cannot start before a running one ends. None: it receives its KV and starts at once.
        """
        first = self._queues.waiting.first()
        if first is None or budget <= 0 or self._is_full():
            return 0
        size = self._pool.block_size
        total = first.num_tokens // size + 1 if first.remote else -(-first.num_tokens // size)
        if not self._fits(first, [], total):
            return 0
        return None if first.remote else total + self._ledger.watermark

    def admit_alone(self, step: Step) -> bool:
        """Without chunking, give a step to a prompt that does not fit beside the running ones."""
        seq = None if self._config.chunked_prefill else self._queues.waiting.first()
        if seq is None or seq.remote or self._is_full():
            return False
        num_new = seq.num_tokens - len(match_prefix(self._pool, seq)) * self._pool.block_size
        if num_new <= step.budget - len(self._queues.running):
            return False
        return self._start(seq, num_new, step) > 0

    def admit(self, step: Step) -> None:
        """Start waiting sequences in order until one has to wait."""
        self._admit(step)
        if self._pool.tiers is not None and (step.budget <= 0 or self._is_full()):
            self._load_ahead()

    def _admit(self, step: Step) -> None:
        while step.budget > 0 and not self._is_full():
            seq = self._queues.waiting.first()
            if seq is None or (step.hold_context and not seq.remote):
                return
            if seq.remote:
                if not self._receive(seq, step.now_ns):
                    return
                continue
            if self._pool.tiers is not None and (stored := find_stored(self._pool, seq)):
                if not self._load(seq, stored):
                    return
                continue
            num_new = self._start(seq, step.budget, step)
            if num_new == 0:
                return
            step.budget -= num_new

    def _is_full(self) -> bool:
        return len(self._queues.running) + self._num_receiving >= self._config.num_seqs

    @property
    def _num_receiving(self) -> int:
        """Sequences outside the batch that have a place in it."""
        return len(self._receiving) - self._loading.num_ahead

    def _fits(self, seq: Sequence, matched: list[int], total: int) -> bool:
        return self._ledger.fits(seq, matched, total, alone=not self._queues.running)

    def _start(self, seq: Sequence, budget: int, step: Step) -> int:
        """Start the first waiting sequence on its cached prefix; returns 0 if it has to wait."""
        pool, size = self._pool, self._pool.block_size
        matched = match_prefix(pool, seq)
        first = len(matched) * size
        num_new = min(seq.num_tokens - first, budget)
        if first + num_new < seq.num_tokens and not self._config.chunked_prefill:
            return 0
        total = -(-seq.num_tokens // size)
        if not self._fits(seq, matched, total):
            return 0
        if seq.image_end:
            num_new = self._images.reach(seq, first, num_new)
            if num_new == 0:  # its next image is encoded in a later step
                return 0
        end = first + num_new
        self._occupy(seq, matched, -(-end // size), step.now_ns)
        self._ledger.take_slot(seq)
        self._ledger.reserve(total - len(seq.block_ids))
        if pool.prefix_cache:
            cache_blocks(pool, [(seq, end)])
        self._queues.run(seq)
        self._meter.takes(seq, num_new)
        (step.singles if num_new == 1 else step.chunks).append((seq, num_new))
        return num_new

    def _receive(self, seq: Sequence, now_ns: int) -> bool:
        """Let another engine fill the first waiting sequence's blocks; False if it has to wait.

        It gets room for the first token, too, so that it can run as soon as its KV is here.
        """
        matched, total = match_prefix(self._pool, seq), seq.num_tokens // self._pool.block_size + 1
        if not self._fits(seq, matched, total):
            return False
        self._occupy(seq, matched, total, now_ns)
        self._receiving.start(seq)
        return True

    def _load(self, seq: Sequence, stored: StoredPrefix) -> bool:
        """Let tiers fill the first waiting sequence's blocks; False if it has to wait."""
        total, ledger = -(-seq.num_tokens // self._pool.block_size), self._ledger
        alone = not self._queues.running
        if not ledger.fits(seq, stored.matched, total, alone, stored.end):
            return False
        self._queues.waiting.pop()
        self._loading.start(seq, stored)
        ledger.reserve(total - stored.end)
        return True

    def _load_ahead(self) -> None:
        """Let tiers bring prefixes of those that start next, where nobody else needs the blocks."""
        ledger, size, spare = self._ledger, self._pool.block_size, len(self._queues.running)
        for seq in self._queues.waiting.next_few(MOST_AHEAD):
            total = -(-seq.num_tokens // size) + spare  # running ones may grow meanwhile
            if self._loading.num_ahead >= MOST_AHEAD or not ledger.fits(seq, [], total, False):
                return
            if seq.ahead or seq.remote:
                continue
            seq.ahead = True
            stored = find_stored(self._pool, seq)
            if stored and ledger.fits(seq, stored.matched, total, False, stored.end):
                self._queues.waiting.take(seq)
                self._loading.start(seq, stored, ahead=True)

    def _occupy(self, seq: Sequence, matched: list[int], total: int, now_ns: int) -> None:
        self._queues.waiting.pop()
        self._ledger.occupy(seq, matched, total)
        if not seq.started:
            self.count_start(seq, now_ns)

    def count_start(self, seq: Sequence, now_ns: int) -> None:
        """Count a request that begins to run, and what of its prompt was cached."""
        seq.started = True
        seq.scheduled_ns = now_ns
        seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        request, counters = seq.request, self._counters
        if request.kv_from is not None or request.output_token_ids:
            return  # another engine counted the prompt
        if seq.num_cached_tokens:
            seq.cost.saved_s = self._meter.saved_s(seq.num_cached_tokens)
        counters.num_prompt_tokens += seq.num_prompt_tokens
        if self._pool.prefix_cache and seq.prompt_logprobs is None:
            counters.prefix_query_tokens += seq.num_prompt_tokens
            counters.prefix_hit_tokens += seq.num_cached_tokens

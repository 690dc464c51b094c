"""One token budget per step: who runs on which blocks, and what the step meant for whom."""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import replace
from operator import attrgetter

from tokenmill.core.config import DEFAULT_BUDGET, SchedulerConfig
from tokenmill.core.kv import PREFILLED
from tokenmill.core.types import (
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    StepResult,
)
from tokenmill.sched.admission import Limits
from tokenmill.sched.blocks import BlockPool
from tokenmill.sched.drafts import usable, verified
from tokenmill.sched.leases import Leases
from tokenmill.sched.prefix import cache_blocks, match_prefix
from tokenmill.sched.sequence import PENDING, Batch, Item, Sequence
from tokenmill.sched.waiting import WaitingQueue

__all__ = ["Batch", "Scheduler", "Sequence"]

_MISCOUNT = "the step sampled tokens for an unfinished prompt, or none for a finished one"
_RECOVERY_STEPS = 256  # after so many, a budget that lack of memory has halved is doubled again
_by_key = attrgetter("key")


def _is_context(seq: Sequence) -> bool:
    return len(seq.token_ids) - seq.num_computed_tokens > 1


class Scheduler:
    """Decides each step's batch and turns its result into outputs; the caller runs the batch.

    Blocks are hashed when their last token is scheduled: a layer writes the keys and values of the
    whole batch before it attends, so that a request admitted in the same step may read them.

    The plain loop is schedule(), run, update(). A caller that overlaps schedules the next batch
    while one runs: schedule(n + 1), launch, update(n), advance(n + 1). Sampled tokens that are not
    known yet are PENDING then; blocks that end with one are hashed when update() knows it. Blocks
    that schedule(n + 1) takes from a preempted sequence may still be used by batch n: a runner must
    execute batches in order.

    A sequence whose prompt another engine computes gets blocks and is received outside the batch;
    received() counts all its prompt as computed, and it runs. The engine that computes such a
    prompt announces its blocks and holds them in `leases`.

    Drafts are tokens after the known ones: they take budget and blocks that nobody else needs, and
    update() counts the accepted ones as computed. A caller that overlaps must not bring drafts.
    """

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, eos_token_ids: frozenset[int]
    ) -> None:
        self._full_budget = DEFAULT_BUDGET
        if config.max_num_batched_tokens is not None:
            self._full_budget = config.max_num_batched_tokens
        self._budget = self._full_budget  # less for a while after a step ran out of memory
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_waiting", "max_model_len"):
            value = getattr(config, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.config = config
        self.pool = pool
        self._eos = eos_token_ids
        self._live: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # sorted by key; the last one is preempted first
        self._num_finished_running = 0  # of _running; dropped in one pass at the next schedule()
        self._waiting = WaitingQueue()
        self._deadlines: list[tuple[int, int, Sequence]] = []  # a heap; finished ones are skipped
        self._order = 0
        self._now_ns = 0
        self._num_in_flight = 0  # batches between schedule() and update()
        self._num_advanced = 0  # of these, batches that advance() has counted as computed
        self._drafting = False  # some sequence may have drafts
        self._late: list[Item] = []  # (sequence, end) of full blocks whose last token is PENDING
        self._grown: list[Item] = []  # of the batch being chosen
        self._free_slots: list[int] = []
        self._num_slots = 0
        # (num_steps at its end, sequence): ended in flight; its blocks come back with that step.
        self._deferred: list[tuple[int, Sequence]] = []
        self._dropped: list[int] = []  # blocks of sequences preempted while a batch is in flight
        self.leases = Leases(pool)
        self._receiving: dict[str, Sequence] = {}  # they hold blocks that another engine fills
        self._admitted: list[Sequence] = []  # of these, those that take_receiving() has not told
        self._abandoned: list[Sequence] = []  # ended, but a transfer may still write to its blocks
        self._finished: list[RequestOutput] = []
        self._draining = False
        self._watermark = pool.num_blocks // 100  # left free by admission for the running to grow
        self._reserved = 0  # blocks that admitted sequences lack for tokens they already know
        self._counters = EngineStats(num_kv_blocks=pool.num_blocks)

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a request; one that cannot run gets its REJECT from take_finished()."""
        limits = Limits(self.config, self.pool.num_blocks * self.pool.block_size)
        refusal = self._refusal(request, limits)
        if refusal is not None:
            self._count_finish(FinishReason.REJECT)
            stop_reason, error = refusal
            self._finished.append(
                RequestOutput(
                    request.request_id,
                    [],
                    finish_reason=FinishReason.REJECT,
                    stop_reason=stop_reason,
                    error=error,
                )
            )
            return
        self._order += 1
        seq = limits.sequence(request, self._order, self._eos)
        self._live[seq.request_id] = seq
        if request.hold_kv_s is not None:
            self.leases.open(request.request_id, request.hold_kv_s)
        self._waiting.push(seq)
        if request.deadline_ns is not None:
            heapq.heappush(self._deadlines, (request.deadline_ns, self._order, seq))
        self._compact()

    def abort(self, request_id: str) -> None:
        """End a request with ABORT, or its lease; unknown or finished ids are ignored."""
        seq = self._live.get(request_id)
        if seq is not None:
            self._finished.append(self._end(seq, FinishReason.ABORT))
        else:
            self.leases.release(request_id)

    def drain(self) -> None:
        """Refuse new requests from now on; those already here run to their end."""
        self._draining = True

    def has_work(self) -> bool:
        """True while a request is live and here, or a terminal output waits to be taken."""
        return bool(len(self._live) > len(self._receiving) or self._finished)

    def take_finished(self) -> list[RequestOutput]:
        """The terminal outputs of rejected, aborted and expired requests, each once."""
        finished, self._finished = self._finished, []
        return finished

    def stats(self) -> EngineStats:
        """Counters since start, and gauges now."""
        return replace(
            self._counters,
            num_waiting=len(self._waiting),
            num_running=len(self._live) - len(self._waiting) - len(self._receiving),
            num_kv_blocks_used=self.pool.num_used,
            num_finished=dict(self._counters.num_finished),
            num_receiving=len(self._receiving),
            num_leases=len(self.leases),
            num_leases_expired=self.leases.num_expired,
            num_drafted=list(self._counters.num_drafted),
            num_accepted=list(self._counters.num_accepted),
        )

    def _refusal(self, request: Request, limits: Limits) -> tuple[str, str] | None:
        """Why a request is not taken: (stop_reason, a sentence), or None."""
        if self._draining:
            return "draining", "the engine is draining and takes no new requests"
        if request.request_id in self._live or request.request_id in self.leases:
            return "duplicate_id", f"request_id {request.request_id!r} is already in use"
        return limits.refusal(request, len(self._waiting))

    def _compact(self) -> None:
        """Drop finished entries once they outnumber the live requests."""
        limit = 2 * len(self._live) + 64
        self._waiting.compact(limit)
        if len(self._deadlines) > limit:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
            heapq.heapify(self._deadlines)

    # A step is chosen.

    def load(self) -> tuple[int, int]:
        """(requests that are not finished, tokens whose KV they hold or will get)."""
        tokens = self.pool.num_used * self.pool.block_size
        return len(self._live), tokens + sum(s.num_tokens for s in self._waiting.sequences())

    def outlook(self) -> tuple[int, int]:
        """(context requests that schedule() would compute next, requests that decode).

        Context is whoever has more than one known token to compute: begun prompts, and waiting
        requests as far as there are places, once the first of them finds its blocks.
        """
        live = [seq for seq in self._running if not seq.finished]
        num_begun = sum(_is_context(seq) for seq in live)
        num_decoding = len(live) - num_begun
        places = self.config.max_num_seqs - len(live) - len(self._receiving)
        places = min(places, self._budget - num_decoding)
        first = self._waiting.first()
        if first is None or first.remote or places <= 0:
            return num_begun, num_decoding
        total = -(-first.num_tokens // self.pool.block_size)
        starts = min(places, len(self._waiting))
        starts *= self._fits(match_prefix(self.pool, first), total)
        return num_begun + starts, num_decoding

    def schedule(self, now_ns: int, hold_context: bool = False) -> Batch:
        """Choose the next batch: running requests first, then waiting ones in order.

        Where context is held the batch decodes only: no prompt is begun or continued, and it may
        be empty though there is work. Waiting requests whose KV comes from elsewhere get blocks.
        """
        if self._num_in_flight > self._num_advanced:
            raise RuntimeError(
                "schedule() was called before update(), fail() or advance() of the last batch"
            )
        self._now_ns = now_ns
        self._expire()
        if self._num_finished_running:
            self._running = [seq for seq in self._running if not seq.finished]
            self._num_finished_running = 0
        self._reserved = 0
        if self._budget < self._full_budget and self._counters.num_steps % _RECOVERY_STEPS == 0:
            self._budget = min(2 * self._budget, self._full_budget)
        singles: list[Item] = []
        chunks: list[Item] = []
        if hold_context or not self._admit_alone(chunks):
            preemptions = self._counters.num_preemptions
            budget = self._schedule_running(singles, chunks, hold_context)
            if budget and self._drafting:
                singles, chunks, budget = self._with_drafts(singles, chunks, budget)
            if preemptions == self._counters.num_preemptions:
                self._admit(budget, singles, chunks, hold_context)
        if not singles and not chunks:
            return Batch()
        self._num_in_flight += 1
        self._counters.num_steps += 1
        num_tokens = len(singles) + sum(num_new for _, num_new in chunks)
        grown, self._grown = self._grown, []
        return Batch(singles + chunks, num_tokens, grown)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._now_ns:
            seq = heapq.heappop(self._deadlines)[2]
            if not seq.finished:
                self._finished.append(self._end(seq, FinishReason.ABORT, "deadline"))
        if self.leases:
            self.leases.expire(self._now_ns)

    def _schedule_running(self, singles: list[Item], chunks: list[Item], hold_context: bool) -> int:
        """Give each running sequence its next tokens; returns the budget that is left.

        The list shrinks from its tail while it is walked: whoever is preempted has had no turn.
        """
        running, size = self._running, self.pool.block_size
        budget = self._budget
        filled: list[Item] = []
        for index, seq in enumerate(running):
            end = num_tokens = len(seq.token_ids)
            if end >= seq.max_len:  # it ends when its PENDING token is known
                continue
            num_new = end - seq.num_computed_tokens
            if num_new == 1 and end < seq.capacity:  # most of them, in most steps
                singles.append((seq, 1))
                budget -= 1
                if budget == 0:
                    break
                continue
            if num_new > 1 and hold_context:
                self._reserved += -(-num_tokens // size) - len(seq.block_ids)
                continue
            if num_new > 1:  # leave a token to each sequence behind this one
                num_new = max(1, min(num_new, budget - (len(running) - index - 1)))
                end = seq.num_computed_tokens + num_new
                self._reserved += -(-num_tokens // size) + (-end // size)
            if end >= seq.capacity:
                if end > seq.capacity and not self._grow(seq, end):
                    break
                if end // size > seq.num_inserted_blocks:
                    late = seq.token_ids[end - 1] == PENDING
                    (self._late if late else filled).append((seq, end))
            (singles if num_new == 1 else chunks).append((seq, num_new))
            budget -= num_new
            if budget == 0:
                break
        if filled and self.pool.prefix_cache:
            cache_blocks(self.pool, filled)
        return budget

    def _grow(self, seq: Sequence, end: int) -> bool:
        """Give a sequence blocks up to `end`, preempting from the tail; False: it went itself."""
        needed = -(-end // self.pool.block_size) - len(seq.block_ids)
        while self.pool.num_free < needed:
            victim = self._running.pop()
            self._requeue(victim)
            if victim is seq:
                return False
        self._grown.append((seq, len(seq.block_ids)))
        seq.block_ids += self.pool.allocate(needed)
        seq.capacity = len(seq.block_ids) * self.pool.block_size
        return True

    def _with_drafts(
        self, singles: list[Item], chunks: list[Item], budget: int
    ) -> tuple[list[Item], list[Item], int]:
        """Let sequences of one new token verify their drafts as well; the budget that is left."""
        plain: list[Item] = []
        drafted: list[Item] = []
        for seq, num_new in singles:
            del seq.draft_ids[budget:]
            if seq.draft_ids:
                del seq.draft_ids[self._draft_room(seq) :]
            num_drafts = len(seq.draft_ids)
            budget -= num_drafts
            (drafted if num_drafts else plain).append((seq, num_new + num_drafts))
        return plain, drafted + chunks, budget

    def _draft_room(self, seq: Sequence) -> int:
        """How many drafts the blocks hold; with one block more, if nobody else will want it."""
        size, num_tokens = self.pool.block_size, len(seq.token_ids)
        needed = -(-(num_tokens + len(seq.draft_ids)) // size) - len(seq.block_ids)
        if 0 < needed <= self.pool.num_free - self._reserved - self._watermark:
            self._grown.append((seq, len(seq.block_ids)))
            seq.block_ids += self.pool.allocate(needed)
            seq.capacity = len(seq.block_ids) * size
        return seq.capacity - num_tokens

    def _requeue(self, seq: Sequence) -> None:
        """A preempted sequence waits again; its tokens are kept, its blocks are not."""
        if self._num_in_flight:
            self._dropped += seq.block_ids
        self._release(seq)
        seq.num_computed_tokens = 0
        seq.draft_ids = []
        self._waiting.push(seq)
        self._counters.num_preemptions += 1

    def _admit_alone(self, chunks: list[Item]) -> bool:
        """Without chunking, give a step to a prompt that does not fit beside the running ones."""
        seq = None if self.config.chunked_prefill else self._waiting.first()
        if seq is None or seq.remote or self._is_full():
            return False
        num_new = seq.num_tokens - len(match_prefix(self.pool, seq)) * self.pool.block_size
        if num_new <= self._budget - len(self._running):
            return False
        return self._start(seq, num_new, chunks, chunks) > 0

    def _admit(
        self, budget: int, singles: list[Item], chunks: list[Item], hold_context: bool
    ) -> None:
        """Start waiting sequences in order until one has to wait."""
        while budget > 0 and not self._is_full():
            seq = self._waiting.first()
            if seq is None or (hold_context and not seq.remote):
                return
            if seq.remote:
                if not self._receive(seq):
                    return
                continue
            num_new = self._start(seq, budget, singles, chunks)
            if num_new == 0:
                return
            budget -= num_new

    def _is_full(self) -> bool:
        return len(self._running) + len(self._receiving) >= self.config.max_num_seqs

    def _start(self, seq: Sequence, budget: int, singles: list[Item], chunks: list[Item]) -> int:
        """Run the first of the waiting on top of its cached prefix; 0 new tokens: it has to wait.

        It starts only when all its known tokens fit beside what running ones will still need, so
        that an admission never leads to a preemption by itself.
        """
        pool, size = self.pool, self.pool.block_size
        matched = match_prefix(self.pool, seq)
        num_matched = len(matched)
        num_new = min(seq.num_tokens - num_matched * size, budget)
        end = num_matched * size + num_new
        if end < seq.num_tokens and not self.config.chunked_prefill:
            return 0
        total = -(-seq.num_tokens // size)
        if not self._fits(matched, total):
            return 0
        self._occupy(seq, matched, -(-end // size))
        self._take_slot(seq)
        self._reserved += total - len(seq.block_ids)
        if pool.prefix_cache:
            cache_blocks(self.pool, [(seq, end)])
        insort(self._running, seq, key=_by_key)
        (singles if num_new == 1 else chunks).append((seq, num_new))
        return num_new

    def _fits(self, matched: list[int], total: int) -> bool:
        """Whether `total` blocks, the matched ones among them, fit beside the running ones."""
        needed = total - len(matched) + self.pool.num_revived(matched)
        if self._running:
            needed += self._reserved + self._watermark
        return needed <= self.pool.num_free

    def _occupy(self, seq: Sequence, matched: list[int], total: int) -> None:
        """Give the first of the waiting its blocks: the matched ones and others up to `total`."""
        self._waiting.pop()
        pool = self.pool
        pool.acquire(matched)
        seq.block_ids = matched + pool.allocate(total - len(matched))
        seq.capacity = total * pool.block_size
        seq.num_computed_tokens = len(matched) * pool.block_size
        seq.num_inserted_blocks = len(matched)
        seq.parent = pool.identity(matched[-1]) if matched else seq.request.cache_salt
        if not seq.started:
            self._count_start(seq)

    def _take_slot(self, seq: Sequence) -> None:
        if not self._free_slots:
            self._free_slots.append(self._num_slots)
            self._num_slots += 1
        seq.slot = self._free_slots.pop()
        self._grown.append((seq, 0))

    # KV comes from another engine.

    def _receive(self, seq: Sequence) -> bool:
        """Let another engine fill the blocks of the first of the waiting; False: it has to wait.

        It gets room for the first token, too, so that it can run as soon as its KV is here.
        """
        matched, total = match_prefix(self.pool, seq), seq.num_tokens // self.pool.block_size + 1
        if not self._fits(matched, total):
            return False
        self._occupy(seq, matched, total)
        self._receiving[seq.request_id] = seq
        self._admitted.append(seq)
        return True

    def take_receiving(self) -> list[Sequence]:
        """Sequences that have got blocks for KV to come, each once.

        What a batch in flight still does to these blocks is over when that batch has landed.
        """
        admitted, self._admitted = self._admitted, []
        return admitted

    def received(self, seq: Sequence, token_id: int) -> None:
        """The KV of the whole prompt is in the blocks, and this is the first token: run it."""
        first = seq.num_inserted_blocks
        del self._receiving[seq.request_id]
        seq.remote = False
        seq.num_computed_tokens = seq.num_tokens
        if self.pool.prefix_cache:
            cache_blocks(self.pool, [(seq, seq.num_tokens)])
        self._counters.num_kv_blocks_received += -(-seq.num_tokens // self.pool.block_size) - first
        seq.token_ids.append(token_id)
        self._take_slot(seq)
        insort(self._running, seq, key=_by_key)
        if seq.num_tokens >= seq.max_len:
            reason = self._length_reason(seq)
            self._finished.append(self._end(seq, FinishReason.LENGTH, reason))

    def lose(self, request_id: str, stop_reason: str, message: str) -> None:
        """The KV of a request will not come; unknown ids are ignored."""
        seq = self._live.get(request_id)
        if seq is not None:
            self._finished.append(self._end(seq, FinishReason.ERROR, stop_reason, message))

    def retire(self, seq: Sequence) -> None:
        """No transfer writes to the blocks of this ended sequence any more."""
        self._abandoned.remove(seq)
        self._retire(seq)

    # A step is accounted for.

    def advance(self, batch: Batch) -> None:
        """Count a launched batch as computed; what it samples is PENDING until its update()."""
        if self._num_in_flight > 1:
            raise RuntimeError("advance() was called before update() or fail() of the last batch")
        self._num_advanced += bool(batch.items)
        batch.samples = []
        for seq, num_new in batch.items:
            seq.num_computed_tokens += num_new
            samples = seq.num_computed_tokens == len(seq.token_ids) and not seq.finished
            if samples:
                seq.token_ids.append(PENDING)
            batch.samples.append(samples)

    def update(self, batch: Batch, result: StepResult) -> list[RequestOutput]:
        """Advance every item, append its tokens and end what has to end; what is new comes out."""
        all_logprobs = result.logprobs or [None] * len(batch.items)
        if not len(batch.items) == len(result.token_ids) == len(all_logprobs):
            raise ValueError(
                f"the batch has {len(batch.items)} items, the result {len(result.token_ids)} "
                f"token_ids and {len(all_logprobs)} logprobs"
            )
        self._land(batch)
        for index, entries in result.prompt_logprobs.items():
            batch.items[index][0].extend_prompt_logprobs(entries)
        outputs: list[RequestOutput] = []
        num_kept = 0
        for index, (seq, _) in enumerate(batch.items):
            if seq.finished:
                continue
            tokens, sampled = self._count(batch, index, result.token_ids[index])
            token_ids = seq.token_ids
            num_tokens = len(token_ids)
            if not sampled and not tokens:
                continue
            if not sampled or not tokens:
                outputs.append(self._end(seq, FinishReason.ERROR, error=_MISCOUNT))
                continue
            output = RequestOutput(
                seq.request_id,
                tokens,
                all_logprobs[index],
                seq.prompt_logprobs if num_tokens == seq.num_prompt_tokens else None,
                None,
                None,
                seq.num_cached_tokens,
                None,
                seq.scheduled_ns,
            )
            outputs.append(output)
            token = tokens[0]
            if len(tokens) == 1 and token not in seq.stop_ids and num_tokens + 1 < seq.max_len:
                token_ids.append(token)
                num_kept += 1
            elif seq.request.hold_kv_s is not None and not seq.block_ids:
                outputs.pop()  # preempted while its last chunk was in flight: it runs again
            else:
                self._append(seq, output)
                num_kept += len(output.token_ids)
        self._counters.num_output_tokens += num_kept
        self._counters.num_relaxed += result.num_relaxed
        if self._drafting or result.draft_ids is not None:
            self._take_drafts(batch, result.draft_ids or [[] for _ in batch.items])
        self._hash_late()
        if self.leases:
            self._announce(batch)
        return outputs

    def _count(self, batch: Batch, index: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Count an item as computed: the tokens it sampled, and whether it was to sample any."""
        seq, num_new = batch.items[index]
        if batch.samples is not None:
            if batch.samples[index]:
                seq.token_ids.pop()  # the PENDING one
            return tokens, batch.samples[index]
        seq.num_computed_tokens += num_new
        num_drafts = seq.num_computed_tokens - len(seq.token_ids)
        if num_drafts > 0:
            tokens = verified(seq, tokens, *self.draft_counts)
        return tokens, num_drafts >= 0

    @property
    def drafting(self) -> bool:
        """True while a sequence has drafts: the next batch may verify them."""
        return self._drafting

    @property
    def draft_counts(self) -> tuple[list[int], list[int]]:
        """Verified drafts by position, and those of them that were right."""
        return self._counters.num_drafted, self._counters.num_accepted

    def _take_drafts(self, batch: Batch, draft_ids: list[list[int]]) -> None:
        """Give running sequences their next drafts, as far as these can be used.

        Blocks that accepted drafts have filled are cached, those that none has reached come back.
        """
        size = self.pool.block_size
        for (seq, _), drafts in zip(batch.items, draft_ids, strict=True):
            if seq.finished or not seq.block_ids or seq.num_computed_tokens < seq.num_tokens - 1:
                continue
            if seq.draft_ids:
                self._cache_computed(seq)
                num_blocks = -(-seq.num_tokens // size)
                self.pool.release(seq.block_ids[num_blocks:])
                del seq.block_ids[num_blocks:]
                seq.capacity = len(seq.block_ids) * size
            seq.draft_ids = usable(seq, drafts)
        self._drafting = any(seq.draft_ids for seq in self._running)

    def _cache_computed(self, seq: Sequence) -> None:
        """Cache the full blocks of known tokens whose keys and values are computed."""
        end = min(seq.num_computed_tokens, seq.num_tokens)
        if self.pool.prefix_cache and end // self.pool.block_size > seq.num_inserted_blocks:
            cache_blocks(self.pool, [(seq, end)])

    def _announce(self, batch: Batch) -> None:
        """Tell of the full blocks of prompts that are computed for another engine."""
        for seq, _ in batch.items:
            if seq.request.hold_kv_s is not None and not seq.finished:
                num_full = seq.num_computed_tokens // self.pool.block_size
                self.leases.announce(seq.request_id, seq.block_ids[:num_full])

    def _hash_late(self) -> None:
        """Cache the blocks whose last token has become known; the next batch computes it."""
        late, self._late = self._late, []
        if self.pool.prefix_cache:
            cache_blocks(self.pool, [(seq, end) for seq, end in late if not seq.finished])

    def preempt(self, batch: Batch, message: str) -> list[RequestOutput]:
        """The step did not fit into memory: run its requests again, in steps half as large for now.

        What cannot be made smaller, or was launched already, ends in ERROR.
        """
        divisible = batch.num_tokens if self.config.chunked_prefill else len(batch.items)
        if divisible <= 1 or batch.samples is not None:
            return self.fail(batch, message)
        lost = [seq for seq in self._readers(batch) if seq.remote]
        for seq in [seq for seq, _ in batch.items] + lost:
            self.pool.forget(seq.block_ids)
        self._land(batch)
        self._budget = max(1, min(self._budget, batch.num_tokens) // 2)
        self._running = [seq for seq in self._running if not seq.finished]
        self._num_finished_running = 0
        for seq, _ in batch.items:
            if not seq.finished:
                self._running.remove(seq)
                self._requeue(seq)
        self._tell_again(batch)
        return [self._end(seq, FinishReason.ERROR, error=message) for seq in lost]

    def fail(self, batch: Batch, message: str) -> list[RequestOutput]:
        """The step raised: its items and their readers end in ERROR, nothing of it stays cached."""
        seqs = [seq for seq, _ in batch.items] + self._readers(batch)
        for seq in seqs:
            self.pool.forget(seq.block_ids)
        self.pool.forget(self._dropped)
        self._late = []  # these sampled in the batch and end with it
        self._land(batch)
        error = FinishReason.ERROR
        outputs = [self._end(seq, error, error=message) for seq in seqs if not seq.finished]
        self._tell_again(batch)
        return outputs

    def _tell_again(self, batch: Batch) -> None:
        """The runner may not have heard of the blocks of sequences that run, but not in this batch.

        Only received ones can be among them: the others get blocks for the batch they are in.
        """
        self._grown += [(seq, 0) for seq, _ in batch.grown if seq.slot >= 0 and not seq.finished]

    def _readers(self, batch: Batch) -> list[Sequence]:
        """Whoever will read what this batch was to write: it is received, or in the next batch."""
        launched = batch.samples is not None
        readers = [*self._receiving.values(), *(self._running if launched else [])]
        written: set[int] = set()
        for seq, num_new in batch.items if readers else []:
            first = (seq.num_computed_tokens - launched * num_new) // self.pool.block_size
            written.update(seq.block_ids[first:])
        return [seq for seq in readers if not written.isdisjoint(seq.block_ids)]

    def _land(self, batch: Batch) -> None:
        """A batch is no longer in flight: blocks of requests that ended meanwhile come back."""
        self._num_in_flight -= bool(batch.items)
        self._num_advanced -= bool(batch.samples)
        self._dropped = []
        if self._deferred:
            num_landed = self._counters.num_steps - self._num_in_flight
            for step, seq in self._deferred:
                if step <= num_landed:
                    self._retire(seq)
            self._deferred = [entry for entry in self._deferred if entry[0] > num_landed]

    def _append(self, seq: Sequence, output: RequestOutput) -> None:
        """Append the output's tokens, cut both at the first stop and end the request there."""
        sampling = seq.request.sampling
        for count, token in enumerate(output.token_ids, 1):
            seq.token_ids.append(token)
            if token in seq.stop_ids and seq.num_output_tokens >= sampling.min_tokens:
                output.finish_reason = FinishReason.STOP
                eos = token in self._eos and not sampling.ignore_eos
                output.stop_reason = None if eos else token
            elif seq.num_tokens >= seq.max_len:
                output.finish_reason = FinishReason.LENGTH
                output.stop_reason = self._length_reason(seq)
            if output.finish_reason is not None:
                output.token_ids = output.token_ids[:count]
                if output.logprobs is not None:
                    output.logprobs = output.logprobs[:count]
                if output.stop_reason == PREFILLED:
                    self.leases.announce(seq.request_id, seq.block_ids, token)
                    self.leases.hold(seq.request_id, self._now_ns)
                if seq.draft_ids:
                    self._cache_computed(seq)
                self._finish(seq, output.finish_reason)
                return

    def _length_reason(self, seq: Sequence) -> str | None:
        max_tokens = seq.request.sampling.max_tokens
        asked = max_tokens is not None and seq.num_output_tokens >= max_tokens
        if asked or seq.num_tokens >= self.config.max_model_len:
            return None
        return "kv_capacity" if seq.request.hold_kv_s is None else PREFILLED

    # How sequences end.

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        stop_reason: str | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        """End a request that has no new token; returns its terminal output."""
        self._finish(seq, reason)
        return RequestOutput(
            seq.request_id,
            [],
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=seq.num_cached_tokens,
            error=error,
            scheduled_ns=seq.scheduled_ns,
        )

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """The one place where a live request ends; running ones are those that hold blocks."""
        seq.finished = True
        del self._live[seq.request_id]
        self._count_finish(reason)
        self.leases.abandon(seq.request_id)
        if self._receiving.pop(seq.request_id, None) is not None:
            self._abandoned.append(seq)
            return
        if seq.block_ids:
            self._num_finished_running += 1
        else:
            self._waiting.forget()
        if seq.block_ids and self._num_in_flight:
            self._deferred.append((self._counters.num_steps, seq))
        else:
            self._retire(seq)

    def _retire(self, seq: Sequence) -> None:
        self._release(seq)
        seq.state = None

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.block_ids)
        seq.block_ids = []
        seq.capacity = 0
        if seq.slot >= 0:
            self._free_slots.append(seq.slot)
            seq.slot = -1

    def _count_start(self, seq: Sequence) -> None:
        seq.started = True
        seq.scheduled_ns = self._now_ns
        seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        request, counters = seq.request, self._counters
        if request.kv_from is not None or request.output_token_ids:
            return  # another engine counted the prompt
        counters.num_prompt_tokens += seq.num_prompt_tokens
        if self.pool.prefix_cache and seq.prompt_logprobs is None:
            counters.prefix_query_tokens += seq.num_prompt_tokens
            counters.prefix_hit_tokens += seq.num_cached_tokens

    def _count_finish(self, reason: FinishReason) -> None:
        finished = self._counters.num_finished
        finished[reason.value] = finished.get(reason.value, 0) + 1

    def check_integrity(self) -> None:
        """Raise AssertionError where queues, sequences and the block pool disagree."""
        running = [seq for seq in self._running if not seq.finished]
        waiting = self._waiting.sequences()
        assert sorted(running, key=_by_key) == running, "running sequences are out of order"
        assert len(self._running) - len(running) == self._num_finished_running
        num_waiting = len(self._waiting)
        assert len(waiting) == num_waiting, f"{len(waiting)} wait, not {num_waiting}"
        receiving = list(self._receiving.values())
        assert {seq.request_id for seq in running + waiting + receiving} == set(self._live)
        assert len(running + waiting + receiving) == len(self._live), "a sequence is queued twice"
        assert not any(seq.block_ids or seq.num_computed_tokens for seq in waiting)
        assert self._num_in_flight or not self._deferred
        size = self.pool.block_size
        for seq in running:
            assert seq.block_ids, f"running {seq.request_id!r} holds no blocks"
            assert seq.capacity == len(seq.block_ids) * size
            assert seq.num_computed_tokens <= seq.capacity
            assert seq.num_computed_tokens <= seq.num_tokens <= seq.max_len
            if self.pool.prefix_cache:
                inserted = seq.num_inserted_blocks
                assert seq.num_computed_tokens // size <= inserted <= len(seq.block_ids)
        holders = running + [seq for _, seq in self._deferred]
        assert all(seq.block_ids for seq in holders), "an ended sequence gave its blocks back early"
        slots = [seq.slot for seq in holders] + self._free_slots
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost or held twice"
        assert all(seq.remote and seq.slot == -1 for seq in receiving + self._abandoned)
        holders += receiving + self._abandoned
        tables = [seq.block_ids for seq in holders] + self.leases.block_tables
        self.pool.check_integrity(tables)

"""One token budget per step: who runs on which blocks, and what the step meant for whom."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

from tokenmill.core.config import SchedulerConfig
from tokenmill.core.cost import Cost
from tokenmill.core.kv import PREFILLED
from tokenmill.core.requests import End, Request, RequestOutput
from tokenmill.core.types import EngineStats, FinishReason, StepResult
from tokenmill.sched import decode_only, request_limits
from tokenmill.sched.admission import Admission
from tokenmill.sched.cache.block_ledger import BlockLedger, Leases
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.cache.encoder_cache import EncoderCache
from tokenmill.sched.cache.prefix import cache_blocks, cache_computed
from tokenmill.sched.cache.tiers import Page
from tokenmill.sched.decode_only import DecodeOnlyRun
from tokenmill.sched.drafts import add_drafts, look_up, make_room, take_drafts, verified
from tokenmill.sched.meter import StepMeter
from tokenmill.sched.queues import Queues
from tokenmill.sched.request_limits import RequestLimits
from tokenmill.sched.sequence import PENDING, Batch, Item, Sequence, Status, Step
from tokenmill.sched.trackers import LOOP

__all__ = ["Batch", "Scheduler", "Sequence"]

_MISCOUNT = End(
    FinishReason.ERROR,
    error="the step sampled tokens for an unfinished prompt, or none for a finished one",
)
_FEW_IMAGES = 4  # prompts with images run in parts while no more of them are ahead,
_FEW_WAITING = 16  # and no more requests of any kind wait
_SHARED_TOKENS = 32  # of a step that prompts share with decoding, for each request that is here
_RECOVERY_STEPS = 256  # after so many, a budget that lack of memory has halved is doubled again


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

    A sequence whose prompt another engine computes is RECEIVING, outside the batch, until its KV is
    here: admission.take_to_receive() tells the transfer, which calls receive(). The engine that
    computes such a prompt announces its blocks and holds them in `leases`. A sequence whose prefix
    tiers hold is LOADING in the same way, from admission.take_loads() to end_load(). What
    schedule() evicts is in take_evicted() until the batch runs.

    Drafts are tokens after the known ones: they take budget and blocks that nobody else needs, and
    update() counts the accepted ones as computed. A caller that overlaps must not bring drafts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        eos_token_ids: frozenset[int],
        meter: StepMeter | None = None,
    ) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_waiting", "max_model_len"):
            value = getattr(config, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.config, self.pool = config, pool
        self.limits = RequestLimits.of(config, pool)
        self.meter = meter or StepMeter()  # the caller tells it when time has passed
        self.leases = Leases(pool)
        # A prompt that may not be split takes its images as they are.
        patches = config.encoder_budget if config.chunked_prefill else None
        self.images = EncoderCache(patches, config.encoder_share, config.image_tokens)
        self.token_texts: Items[str] = ()  # of the vocabulary: what spells the end of reasoning
        self.looks_up = False  # drafts are taken from the sequences, not from results
        self.has_matches = False  # something was found in the last batch that was looked up
        self.drafting = False  # some sequence may have drafts: the next batch may verify them
        self._queues, self._ledger = Queues(), BlockLedger(pool, config.most_new_tokens)
        self._counters = EngineStats(num_kv_blocks=pool.num_blocks)
        self._budget = config.budget  # less for a while after a step ran out of memory
        self._eos = eos_token_ids
        self._order = 0
        self._now_ns = 0
        self._held: set[str] = set()
        self._late: list[Item] = []  # (sequence, end) of full blocks whose last token is PENDING
        self._finished: list[RequestOutput] = []  # terminal outputs that no batch produces
        self.admission = Admission(
            config, self._queues, self._ledger, self.images, self.meter, self._counters
        )

    @property
    def progress(self) -> tuple[int, int]:
        """Return the budget now, and how many batches were chosen: what resume() takes."""
        return self._budget, self._ledger.num_launched

    def resume(self, budget: int, num_launched: int) -> None:
        """Go on as a scheduler that was at this point; only an idle one can."""
        self._budget, self._ledger.num_launched = budget, num_launched

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a request; one that cannot run gets its REJECT from take_finished()."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._count_end(FinishReason.REJECT)
            self._finished.append(End(FinishReason.REJECT, *refusal).output(request.request_id))
            return
        self._order += 1
        self.leases.open(request)
        self._queues.add(self.limits.sequence(request, self._order, self._eos, self.token_texts))

    def _refusal(self, request: Request) -> tuple[str, str] | None:
        """Why a request is not taken: (stop_reason, a sentence), or None."""
        if request.request_id in self._queues or request.request_id in self.leases:
            return "duplicate_id", f"request_id {request.request_id!r} is already in use"
        return self.limits.refusal(request, self._queues.num_waiting)

    def abort(self, request_id: str) -> None:
        """End a request with ABORT, or its lease; unknown or finished ids are ignored."""
        if request_id in self._queues:
            self._end_between_steps(request_id, End(FinishReason.ABORT))
        else:
            self.leases.release(request_id)

    def end_in_error(self, request_id: str, stop_reason: str, message: str) -> None:
        """End a request: what it needs will not come; unknown ids are ignored."""
        self._end_between_steps(request_id, End(FinishReason.ERROR, stop_reason, message))

    def hold(self, request_ids: set[str]) -> None:
        """Let these running requests sit out steps, and no others, until this is called again."""
        self._held = request_ids

    def has_work(self) -> bool:
        """True while a request waits or runs here, or a terminal output waits to be taken."""
        return len(self._queues) > len(self._queues.outside) or bool(self._finished)

    def num_output_tokens(self, request_id: str) -> int:
        """Return how many tokens of an answer are known; 0 of one that is not here."""
        seq = self._queues.get(request_id)
        return 0 if seq is None else seq.num_output_tokens

    def take_finished(self) -> list[RequestOutput]:
        """The terminal outputs of rejected, aborted and expired requests, each once."""
        finished, self._finished = self._finished, []
        return finished

    def _end_between_steps(self, request_id: str, end: End) -> None:
        seq = self._queues.get(request_id)
        if seq is not None:
            self._finished.append(self._end(seq, end))

    def _end(self, seq: Sequence, end: End) -> RequestOutput:
        """End a request that has no new token; returns its terminal output."""
        self._finish(seq, end.reason)
        return end.output(seq.request_id, seq.num_cached_tokens, seq.scheduled_ns, seq.cost)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """The one place where a request ends: free what it holds."""
        self.meter.settle(seq)
        self._count_end(reason)
        spent = seq.thinking is not None and seq.thinking.is_spent
        self._counters.num_budgets_spent += spent and seq.request.task.hold_kv_s is None
        self.leases.abandon(seq.request_id)
        is_outside = seq.request_id in self._queues.outside
        self._queues.move(seq, Status.ENDED)
        if is_outside:
            self._ledger.abandon(seq)
        else:
            self._ledger.retire(seq)

    def _count_end(self, reason: FinishReason) -> None:
        finished = self._counters.num_finished
        finished[reason.value] = finished.get(reason.value, 0) + 1

    # What others ask.

    def stats(self) -> EngineStats:
        """Counters since start, and gauges now."""
        outside = self._queues.outside.values()
        num_loading = sum(seq.status is Status.LOADING for seq in outside)
        return replace(
            self._counters,
            num_steps=self._ledger.num_launched,
            num_waiting=self._queues.num_waiting,
            num_running=self._queues.num_running,
            num_kv_blocks_used=self.pool.num_used,
            num_kv_blocks_slid=self._ledger.num_slid,
            num_branch_points=self.pool.points.num_inside,
            num_finished=dict(self._counters.num_finished),
            num_receiving=len(outside) - num_loading,
            num_loading=num_loading,
            num_leases=len(self.leases),
            num_leases_expired=self.leases.num_expired,
            num_drafted=list(self._counters.num_drafted),
            num_accepted=list(self._counters.num_accepted),
            num_images_encoded=self.images.num_encoded,
            num_image_hits=self.images.num_hits,
            num_patches_encoded=self.images.num_patches,
            num_gpus=self.meter.num_gpus,
            gpu_s=self.meter.gpu_s,
            gpu_idle_s=self.meter.idle_s,
        )

    def costs(self) -> dict[str, Cost]:
        """What the requests that have not ended have taken so far, by id."""
        return {seq.request_id: self.meter.cost(seq) for seq in self._queues.started()}

    @property
    def draft_counts(self) -> tuple[list[int], list[int]]:
        """Return the verified drafts by position, and how many of them were accepted."""
        return self._counters.num_drafted, self._counters.num_accepted

    def load(self) -> tuple[int, int]:
        """Return the number of unfinished requests, and of the tokens whose KV they need."""
        waiting = sum(seq.num_tokens for seq in self._queues.waiting())
        return len(self._queues), self.pool.num_used_tokens + waiting

    def outlook(self) -> tuple[int, int]:
        """Return how many context requests schedule() would compute next, and how many decode.

        Context is whoever has more than one known token to compute: begun prompts, and waiting
        requests as far as there are places, once the first of them finds its blocks.
        """
        running = [seq for seq in self._queues.running if not seq.finished]
        num_begun = sum(map(_is_context, running))
        num_decoding = len(running) - num_begun
        budget = self._budget - num_decoding
        return num_begun + self.admission.num_startable(len(running), budget), num_decoding

    def take_evicted(self) -> list[Page]:
        """What schedule() has evicted, but for what a batch in flight may still write."""
        unsure = {block_id for _, ids in self._ledger.behind.values() for block_id in ids}
        unsure.update(self._ledger.dropped)
        return [page for page in self.pool.take_evicted() if unsure.isdisjoint(page.block_ids)]

    def upcoming(self, count: int) -> list[Sequence]:
        """About so many of the next sequences to run, but for those whose KV is near."""
        return [seq for seq in self._queues.next_waiting(count) if not seq.near]

    # A step is chosen.

    def schedule(self, now_ns: int, hold_context: bool = False) -> Batch:
        """Choose the next batch: running requests first, then waiting ones in order.

        Where context is held the batch decodes only: no prompt is begun or continued, and it may
        be empty though there is work. Waiting requests whose KV comes from elsewhere get blocks.
        """
        ledger = self._ledger
        if ledger.num_in_flight > ledger.num_advanced:
            raise RuntimeError(
                "schedule() was called before update(), fail() or advance() of the last batch"
            )
        self._now_ns = self.admission.now_ns = now_ns
        self._begin_step()
        step = Step(self._step_budget(), hold_context)
        if hold_context or not self.admission.admit_alone(step):
            preemptions = self._counters.num_preemptions
            self._schedule_running(step)
            if step.budget and self.drafting:
                add_drafts(step, ledger)
            if preemptions == self._counters.num_preemptions:
                self.admission.admit(step)
        if not step.singles and not step.chunks:
            return Batch()
        num_tokens = len(step.singles) + sum(num_new for _, num_new in step.chunks)
        batch = Batch(step.singles + step.chunks, num_tokens, ledger.launch())
        batch.dropped_images = self.images.take_dropped()
        batch.begun_images = self.images.begun_images()
        return batch

    def _begin_step(self) -> None:
        """End what is overdue, and count anew what is promised."""
        queues, ledger = self._queues, self._ledger
        for seq in queues.overdue(self._now_ns):
            self._end_between_steps(seq.request_id, End(FinishReason.ABORT, "deadline"))
        if self.leases:
            self.leases.expire(self._now_ns)
        queues.sweep()
        self.images.begin(self._texts_beside_images())
        ledger.reserved = 0
        self.admission.reserve_for_loads()
        if self._budget < self.config.budget and ledger.num_launched % _RECOVERY_STEPS == 0:
            self._budget = min(2 * self._budget, self.config.budget)

    def _step_budget(self) -> int:
        """Tokens of the next step: fewer where prompts share it with a few requests that decode.

        Then prompts spread over steps that have to read the weights anyhow. The more requests are
        here, the more prompts come in each step, and the fewer steps are worth the division.
        """
        least, queues = self.config.least_shared_tokens, self._queues
        if least is None or not self.config.chunked_prefill:
            return self._budget
        shared = max(least, _SHARED_TOKENS * len(queues))
        if shared >= self._budget or all(map(_is_context, queues.running)):
            return self._budget
        return shared

    def _texts_beside_images(self) -> int | None:
        """Prompt tokens of texts that are ahead, where prompts with images run in parts.

        They do where requests decode and few images are ahead: then short steps matter most.
        """
        queues = self._queues
        if not self.images.divides or queues.num_waiting > _FEW_WAITING:
            return None
        ahead = [seq for seq in queues.running if _is_context(seq)]
        decoding = len(ahead) < len(queues.running)
        ahead += queues.waiting()
        texts = [seq for seq in ahead if not seq.image_end]
        if not decoding or not 0 < len(ahead) - len(texts) <= _FEW_IMAGES:
            return None
        return sum(seq.num_tokens - seq.num_computed_tokens for seq in texts)

    def _schedule_running(self, step: Step) -> None:
        """Give each running sequence its next tokens.

        The list shrinks from its tail while it is walked: whoever is preempted has had no turn.
        """
        running, size = self._queues.running, self.pool.block_size
        singles, chunks, budget = step.singles, step.chunks, step.budget
        filled: list[Item] = []
        held = self._held
        for index, seq in enumerate(running):
            end = len(seq.token_ids)
            if end >= seq.limit or seq.request_id in held:
                continue  # its PENDING token decides whether and how it goes on, or it sits out
            num_new = end - seq.num_computed_tokens
            if num_new == 1 and end < seq.capacity:  # most of them, in most steps
                singles.append((seq, 1))
                budget -= 1
                if budget == 0:
                    break
                continue
            if num_new > 1:  # leave a token to each sequence behind this one
                most = max(1, budget - (len(running) - index - 1))
                num_new = self._chunk(seq, 0 if step.hold_context else min(num_new, most))
                if num_new == 0:
                    continue
                end = seq.num_computed_tokens + num_new
                self.meter.takes(seq, num_new)
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
        step.budget = budget

    def _chunk(self, seq: Sequence, num_new: int) -> int:
        """How much of its prompt a sequence computes now; 0: its next image has to wait."""
        first, size = seq.num_computed_tokens, self.pool.block_size
        if num_new and seq.image_end:
            num_new = self.images.reach(seq, first, num_new)
        end = first + num_new if num_new else len(seq.block_ids) * size
        self._ledger.reserve(-(-seq.num_tokens // size) + (-end // size))
        return num_new

    def _grow(self, seq: Sequence, end: int) -> bool:
        """Give a sequence blocks up to `end`, preempting from the tail; False if it went itself."""
        needed = num_blocks = -(-end // self.pool.block_size) - len(seq.block_ids)
        if self.pool.sliding.num_groups:
            self._ledger.slide(seq)
            needed = self._ledger.num_needed(num_blocks)
        if self.drafting:
            make_room(needed, self._queues.running, self._ledger)
        while self.pool.num_free < needed:
            victim = self._queues.running[-1]
            self._requeue(victim)
            if victim is seq:
                return False
        self._ledger.grow(seq, num_blocks)
        return True

    def _requeue(self, seq: Sequence) -> None:
        """A preempted sequence waits again; its tokens are kept, its blocks are not."""
        self._ledger.drop(seq)
        self.meter.settle(seq)
        seq.num_computed_tokens = 0
        seq.draft_ids = []
        self._queues.move(seq, Status.WAITING)
        self._counters.num_preemptions += 1

    def receive(self, seq: Sequence, token_id: int) -> None:
        """Run a sequence: the KV of its prompt is in its blocks, and its first token is known."""
        pool, first = self.pool, seq.num_inserted_blocks
        seq.num_computed_tokens = seq.num_tokens
        if pool.prefix_cache:
            cache_blocks(pool, [(seq, seq.num_tokens)])
        num_blocks = -(-seq.num_tokens // pool.block_size)
        num_seen = (num_blocks - seq.window_first) * pool.sliding.num_groups
        self._counters.num_kv_blocks_received += num_blocks - first + num_seen
        seq.token_ids.append(token_id)
        request_limits.take_in(seq)
        self._ledger.take_slot(seq)
        self._queues.move(seq, Status.RUNNING)
        self.meter.takes(seq, 1)
        if seq.num_tokens >= seq.max_len:
            reason = request_limits.length_reason(seq, self.config.max_model_len)
            self._end_between_steps(seq.request_id, End(FinishReason.LENGTH, reason))

    def release(self, seq: Sequence) -> None:
        """Free the blocks of a sequence that ended while it received: no transfer writes there."""
        self._ledger.release_abandoned(seq)

    # A step is accounted for.

    def advance(self, batch: Batch) -> None:
        """Count a launched batch as computed; what it samples is PENDING until its update()."""
        if self._ledger.num_in_flight > 1:
            raise RuntimeError("advance() was called before update() or fail() of the last batch")
        self._ledger.num_advanced += bool(batch.items)
        batch.samples = []
        for seq, num_new in batch.items:
            seq.num_computed_tokens += num_new
            samples = seq.num_computed_tokens == len(seq.token_ids) and not seq.finished
            if samples:
                seq.token_ids.append(PENDING)
            batch.samples.append(samples)
        for index in batch.unsampled:
            seq, _ = batch.items[index]
            if batch.samples[index]:
                batch.samples[index] = False
                seq.token_ids.pop()
                seq.num_computed_tokens -= 1

    def update(self, batch: Batch, result: StepResult) -> list[RequestOutput]:
        """Account for a step: append its tokens, end what has to end, and return what is new."""
        all_logprobs = result.logprobs or [None] * len(batch.items)
        if not len(batch.items) == len(result.token_ids) == len(all_logprobs):
            raise ValueError(
                f"the batch has {len(batch.items)} items, the result {len(result.token_ids)} "
                f"token_ids and {len(all_logprobs)} logprobs"
            )
        self._ledger.collect(batch)
        outputs = self._fail_items(batch, result.errors) if result.errors else []
        for index, entries in result.prompt_logprobs.items():
            batch.items[index][0].extend_prompt_logprobs(entries)
        num_kept, ended = 0, Status.ENDED
        for index, (seq, _) in enumerate(batch.items):
            if seq.status is ended:
                continue
            tokens, sampled = self._count(batch, index, result.token_ids[index])
            token_ids = seq.token_ids
            num_tokens = len(token_ids)
            if not sampled and not tokens:
                continue
            if not sampled or not tokens:
                outputs.append(self._end(seq, _MISCOUNT))
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
            if len(tokens) == 1 and token not in seq.stop_ids and num_tokens + 1 < seq.look_at:
                token_ids.append(token)
                num_kept += 1
            elif seq.request.task.hold_kv_s is not None and not seq.block_ids:
                outputs.pop()  # preempted while its last chunk was in flight: it runs again
            else:
                self._append(seq, output)
                num_kept += len(output.token_ids)
        self._counters.num_output_tokens += num_kept
        self._settle_blocks(batch, result)
        return outputs

    def _count(self, batch: Batch, index: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Count an item as computed; returns its tokens, and whether it had to sample any."""
        seq, num_new = batch.items[index]
        if batch.samples is not None:
            if batch.samples[index]:
                seq.token_ids.pop()  # the PENDING one
            return tokens, batch.samples[index]
        seq.num_computed_tokens += num_new
        num_drafts = seq.num_computed_tokens - len(seq.token_ids)
        if index in batch.unsampled:
            seq.num_computed_tokens = len(seq.token_ids) - 1  # the last token is computed again
            return [], False
        if num_drafts > 0:
            tokens = verified(seq, tokens, *self.draft_counts)
        return tokens, num_drafts >= 0

    def _append(self, seq: Sequence, output: RequestOutput) -> None:
        """Append the output's tokens, cut both at the first stop and end the request there."""
        request_limits.append(seq, output, self._eos, self.config.max_model_len)
        if output.finish_reason is None:
            return
        self._counters.num_loops_ended += output.stop_reason == LOOP
        output.cost = seq.cost
        if output.stop_reason == PREFILLED:
            self.leases.hold(seq, output.token_ids[-1], self._now_ns)
        if seq.draft_ids:
            cache_computed(self.pool, seq)
        self._finish(seq, output.finish_reason)

    def _settle_blocks(self, batch: Batch, result: StepResult) -> None:
        """Take up new drafts, and cache, announce and free what the tokens of a step allow."""
        if self.looks_up:
            drafts = look_up(batch) if batch.num_to_draft else []
            self.has_matches = any(drafts)
            if drafts and not self._ledger.num_in_flight:  # a batch that runs began without them
                result.draft_ids = drafts
        if self.drafting or result.draft_ids is not None:
            take_drafts(batch, result.draft_ids or [[] for _ in batch.items], self._ledger)
            self.drafting = any(seq.draft_ids for seq in self._queues.running)
        late, self._late = self._late, []  # their last tokens are known now
        if self.pool.prefix_cache:
            cache_blocks(self.pool, [(seq, end) for seq, end in late if not seq.finished])
        self.leases.announce_computed(batch)
        if self.pool.sliding.num_groups:
            for seq, num_new in batch.items:
                if num_new > 1 and not seq.finished and seq.block_ids:
                    self._ledger.slide(seq)

    def preempt(self, batch: Batch, message: str) -> list[RequestOutput]:
        """Run the requests of a step that did not fit into memory again, in steps half as large.

        What cannot be made smaller, or was launched already, ends in ERROR.
        """
        divisible = batch.num_tokens if self.config.chunked_prefill else len(batch.items)
        if divisible <= 1 or batch.samples is not None:
            return self.fail(batch, message)
        lost: list[Sequence] = []
        for seq in self._readers(batch, batch.items):
            if seq.status is Status.RECEIVING:
                lost.append(seq)
            else:
                self.admission.spoil_load(seq)
        self._ledger.forget([seq for seq, _ in batch.items] + lost)
        self._ledger.collect(batch)
        self._budget = max(1, min(self._budget, batch.num_tokens) // 2)
        self._queues.sweep()
        for seq, _ in batch.items:
            if not seq.finished:
                self._requeue(seq)
        self._ledger.tell_again(batch)
        return [self._end(seq, End(FinishReason.ERROR, error=message)) for seq in lost]

    def fail(self, batch: Batch, message: str) -> list[RequestOutput]:
        """End the items of a failed step and their readers in ERROR; nothing of it stays cached."""
        seqs = [seq for seq, _ in batch.items] + self._readers(batch, batch.items)
        self._ledger.forget(seqs)
        self.pool.forget(self._ledger.dropped)
        for _, behind in self._ledger.behind.values():
            self.pool.forget(behind)
        self._late = []  # these sampled in the batch and end with it
        self._ledger.collect(batch)
        end = End(FinishReason.ERROR, error=message)
        outputs = [self._end(seq, end) for seq in seqs if not seq.finished]
        self._ledger.tell_again(batch)
        return outputs

    def _fail_items(self, batch: Batch, errors: dict[int, str]) -> list[RequestOutput]:
        """End some items of a step that went well, and who reads what they had to write."""
        ends: dict[Sequence, End] = {}
        for index, message in errors.items():
            item, end = batch.items[index], End(FinishReason.ERROR, error=message)
            for seq in (item[0], *self._readers(batch, [item], self._queues.running)):
                ends.setdefault(seq, end)
        self._ledger.forget(list(ends))
        return [self._end(seq, end) for seq, end in ends.items() if not seq.finished]

    def _readers(
        self, batch: Batch, items: list[Item], running: list[Sequence] | None = None
    ) -> list[Sequence]:
        """Return the sequences that will read what these items of a batch had to write."""
        launched = batch.samples is not None
        running = self._queues.running if launched else running or []
        candidates = [*self._queues.outside.values(), *running]
        return self._ledger.readers(items, launched, candidates)

    # Steps that nobody has to choose.

    def decode_only_run(self, most: int) -> DecodeOnlyRun | None:
        """Look at the next steps, `most` at most: None where the next one does more than decode.

        Where a waiting request could start, they only decode while context is held. Until they are
        over outlook() stays as it is. A prefix cache, sliding layers, drafts, leases and deadlines
        make every step count.
        """
        queues, pool, ledger = self._queues, self.pool, self._ledger
        queues.sweep()
        counted = pool.prefix_cache or pool.sliding.num_groups or self.drafting or self.leases
        if counted or ledger.reserved or ledger.num_in_flight or not queues.running:
            return None
        if len(queues.running) > self._budget or queues.has_deadlines:
            return None
        needed = self.admission.num_blocks_to_start(self._budget - len(queues.running))
        if needed is None:
            return None
        return decode_only.look_ahead(queues.running, pool.block_size, pool.num_free - needed, most)

    def skip_decode_steps(self, tokens: list[int]) -> None:
        """Take as many steps as there are tokens; each running sequence gets all of them."""
        decode_only.skip_decode_steps(self._queues.running, self._ledger, tokens)
        self._counters.num_output_tokens += len(tokens) * len(self._queues.running)

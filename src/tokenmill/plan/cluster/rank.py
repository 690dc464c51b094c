"""A rank: a real scheduler over a real block pool, stepped only where a step chooses something."""

from __future__ import annotations

import random

from tokenmill.core.config import SchedulerConfig
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.types import StepResult
from tokenmill.plan.cluster.rank_work import OUTPUT_TOKEN, Positions, RankWork, TokenCount
from tokenmill.routing.attention_dp import Outlook, RankLoad
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.decode_only import DecodeOnlyRun
from tokenmill.sched.scheduler import Batch, Scheduler
from tokenmill.sched.sequence import Sequence, num_drafts

ONE = [0]  # of which no scheduler takes anything away
TOKEN = 0  # what every sampled token is where no prompt is shared
MOST_STEPS = 1 << 20  # to look ahead


class SimulatedRank:
    """Steps that only decode are counted; what asks or adds something first makes up for them."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        positions: Positions,
        mtp: tuple[int, float] = (0, 0.0),
        rng: random.Random | None = None,
        skips: bool = True,
    ) -> None:
        """`mtp` is (drafts of a step, share of them that is accepted after an accepted one)."""
        self.scheduler = Scheduler(config, pool, frozenset())
        self._positions, self._skips = positions, skips
        self._depth, self._acceptance = mtp
        self._rng = rng or random.Random(0)
        self._batch: Batch | None = None
        self._run: DecodeOnlyRun | None = None
        self._lag = 0  # steps of it that the scheduler does not know of
        self._is_counted = False  # the step that runs is one of these
        self._load: RankLoad | None = None
        self._outlook: Outlook | None = None
        self.num_computed = 0  # tokens of all its steps

    # What others ask.

    def load(self) -> RankLoad:
        if self._load is None:
            self._load = self.scheduler.load()
        if self._run is None or not self._lag:
            return self._load
        num_requests, num_tokens = self._load
        return num_requests, num_tokens + self._grown()

    def outlook(self) -> Outlook:
        """As Scheduler.outlook(), now: steps that only decode do not change it."""
        if self._outlook is None:
            self._outlook = self.scheduler.outlook()
        return self._outlook

    def _grown(self) -> int:
        pool, run = self.scheduler.pool, self._run
        return run.num_blocks(self._lag) * pool.block_size if run else 0

    @property
    def kv_tokens(self) -> int:
        return self.scheduler.pool.num_used_tokens + self._grown()

    def catch_up(self) -> Scheduler:
        if self._lag:
            self.scheduler.skip_decode_steps([TOKEN] * self._lag)
        self._lag, self._run = 0, None
        self._load = self._outlook = None
        return self.scheduler

    def add(self, request: Request) -> list[RequestOutput]:
        """Queue a request; a refusal comes back."""
        scheduler = self.catch_up()
        scheduler.add(request)
        return scheduler.take_finished()

    def receive(self, seq: Sequence) -> None:
        self.catch_up().receive(seq, TOKEN)
        if not self.scheduler.pool.prefix_cache:
            seq.token_ids = TokenCount(len(seq.token_ids))

    # A step.

    def choose(self, now_ns: int, hold: bool) -> RankWork:
        if self._run is None and self._skips:
            self._run = self.scheduler.decode_only_run(MOST_STEPS)
        run = self._run
        if run and self._lag < run.num_steps and (hold or not self.outlook()[0]):
            work = RankWork.of_decode_only(run, self._lag, self._positions)
            self.load()  # as it was before the first of them
            self._lag += 1
            self._is_counted = True
        else:
            batch = self.catch_up().schedule(now_ns, hold)
            self._batch = batch if batch.items else None
            work = RankWork.of(batch, self._positions)
        work.kv_tokens = self.kv_tokens
        self.num_computed += work.num_tokens
        return work

    def finish(self) -> tuple[list[RequestOutput], list[tuple[str, int]]]:
        """End the step: outputs and (request, prompt tokens computed); none if only counted."""
        batch, self._batch = self._batch, None
        self._is_counted = False
        if batch is None:
            return [], []
        tokens: list[list[int]] = []
        chunks: list[tuple[str, int]] = []
        counted, drafts = not self.scheduler.pool.prefix_cache, [TOKEN] * self._depth
        for seq, num_new in batch.items:
            if seq.num_computed_tokens + num_new <= seq.num_prompt_tokens:
                chunks.append((seq.request_id, num_new))
            guessed = num_drafts((seq, num_new))
            if guessed == 0 and counted:
                tokens.append(ONE)
            elif guessed < 0:
                tokens.append([])
            else:
                tokens.append([self._token(seq)] * (1 + self._accepted(guessed)))
            if counted and type(seq.token_ids) is list:
                seq.token_ids = TokenCount(len(seq.token_ids))
        guesses = [drafts[:] if sampled else [] for sampled in tokens] if self._depth else None
        self._load = self._outlook = None
        return self.scheduler.update(batch, StepResult(tokens, draft_ids=guesses)), chunks

    def _token(self, seq: Sequence) -> int:
        if not self.scheduler.pool.prefix_cache:
            return TOKEN
        return OUTPUT_TOKEN + int(seq.request_id.partition("~")[0])

    def _accepted(self, guessed: int) -> int:
        count = 0
        while count < guessed and self._rng.random() < self._acceptance:
            count += 1
        return count

    def cancel(self) -> None:
        """Forget the step: its worker has died."""
        self._lag -= self._is_counted
        self._batch, self._is_counted = None, False

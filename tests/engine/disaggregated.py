"""A prefill and a decode engine in one process, and the messages that a front passes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from driver import Answer
from scheduler_integrity import check_scheduler
from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.images import ImageSpan
from tokenmill.core.kv import PREFILLED, KVNotice
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import FinishReason, GrammarVocab, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.engine.engine import LanguageEngine
from tokenmill.kv.transfer import KVTransfer
from tokenmill.sched.scheduler import Scheduler

DEADLINE_S = 60.0


def build(
    folder: Path,
    dtype: Literal["fp32", "int8"] = "fp32",
    *,
    connector: str = "shm",
    budget: int = 512,
    chunked: bool = True,
    num_blocks: int = 256,
    block_size: int = 16,
    prefix_cache: bool = True,
    overlap: bool = False,
    max_waiting: int = 1024,
    vocab: GrammarVocab | None = None,
    mtp: int = 0,
    draft: Path | None = None,
) -> LanguageEngine:
    built = build_engine(
        resolve_setup(
            Setup(
                ModelConfig(
                    str(folder), dtype=dtype, device="cpu", draft=str(draft) if draft else None
                ),
                CacheConfig(
                    block_size=block_size,
                    num_blocks=num_blocks,
                    prefix_cache=prefix_cache,
                    connector=connector,  # type: ignore[arg-type]
                ),
                SchedulerConfig(
                    max_num_batched_tokens=budget,
                    max_num_seqs=16,
                    chunked_prefill=chunked,
                    max_waiting=max_waiting,
                ),
                ExecutionConfig(overlap=overlap, mtp=mtp, mtp_adaptive=False),
            )
        ),
        vocab,
    )
    assert isinstance(built.engine, LanguageEngine)
    return built.engine


def kv_of(engine: LanguageEngine) -> KVTransfer:
    assert engine.kv is not None
    return engine.kv


class WorkerPool:
    """One prefill and one decode engine; `complete` is all that a front has to do."""

    def __init__(self, prefill: LanguageEngine, decode: LanguageEngine) -> None:
        self.prefill, self.decode = prefill, decode
        self.engine_id = kv_of(prefill).address.engine_id
        assert kv_of(decode).connect(kv_of(prefill).address) is None
        self.notices: list[KVNotice] = []
        self.num_early = 0  # notices that came before the last one of their request

    def close(self) -> None:
        for engine in (self.decode, self.prefill):
            kv_of(engine).close()

    def complete(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        images: Sequence[tuple[ImageSpan, ...]] | None = None,
    ) -> list[Answer]:
        """Run prompts through both engines; each answer has one terminal output."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        requests: dict[str, Request] = {
            str(i): Request(
                str(i),
                Generate(list(prompt), params[i], images=images[i] if images else ()),
                arrival_ns=i,
            )
            for i, prompt in enumerate(prompts)
        }
        answers = {request_id: Answer() for request_id in requests}
        sent: set[str] = set()
        for request in requests.values():
            self.prefill.submit(request.with_task(hold_kv_s=30.0))
        give_up = time.monotonic() + DEADLINE_S
        while any(not answer.terminals for answer in answers.values()):
            assert time.monotonic() < give_up, "the pool hangs"
            for output in self.prefill.step():
                if output.stop_reason == PREFILLED:
                    output.finish_reason = output.stop_reason = None
                answers[output.request_id].add(output)
            for notice in kv_of(self.prefill).take_events().notices:
                self._pass_on(requests[notice.request_id], notice, sent)
            for output in self.decode.step():
                answers[output.request_id].add(output)
            for request_id in kv_of(self.decode).take_events().received:
                kv_of(self.prefill).release(request_id)
        for request_id in sent:  # those that ended with their first token
            self.decode.abort(request_id)
        self.settle()
        for answer in answers.values():
            assert len(answer.terminals) == 1, answer
        return list(answers.values())

    def _pass_on(self, request: Request, notice: KVNotice, sent: set[str]) -> None:
        self.notices.append(notice)
        self.num_early += notice.token_id is None
        if request.request_id not in sent:
            sent.add(request.request_id)
            self.decode.submit(request.with_task(kv_from=self.engine_id))
        kv_of(self.decode).notice(notice)

    def settle(self) -> None:
        """Nothing is left behind in either engine."""
        give_up = time.monotonic() + DEADLINE_S
        while any(
            e.has_work() or kv_of(e).wait_ms() is not None for e in (self.prefill, self.decode)
        ):
            assert time.monotonic() < give_up, "something is left behind"
            for engine in (self.prefill, self.decode):
                for output in engine.step():
                    assert output.finish_reason is FinishReason.ABORT
        for engine in (self.prefill, self.decode):
            scheduler = engine._scheduler
            if isinstance(scheduler, Scheduler):
                check_scheduler(scheduler)
            else:
                scheduler.check()  # in another process: gpu/far_engine.py
            assert scheduler.pool.num_used == 0, "blocks are left behind"


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | changes))

"""KV that moves between two processes of one device: what a GPU and a CPU have to show."""

from __future__ import annotations

import contextlib
import os
import signal

from driver import Answer, complete
from engine.disaggregated import WorkerPool, kv_of
from gpu.far_engine import far_engine
from gpu.setups import SETUPS, Checkpoints, Device, prompts
from kv.host_ipc import on_the_host
from scheduler_integrity import check_scheduler
from tokenmill.core.kv import KVNotice
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.engine import LanguageEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


def build(name: str, checkpoints: Checkpoints, device: Device) -> LanguageEngine:
    with on_the_host() if device == "cpu" else contextlib.nullcontext():
        engine = SETUPS[name].build(checkpoints, device).engine
    assert isinstance(engine, LanguageEngine)
    assert kv_of(engine).address.ways[0].connector == "cuda-ipc"
    return engine


def bits(answers: list[Answer]) -> list[object]:
    return [(answer.token_ids, [x.logprobs for x in answer.logprobs]) for answer in answers]


def check_bits(name: str, checkpoints: Checkpoints, device: Device) -> None:
    """Two engines give the bits of one, and chunks of a prompt move while others are computed."""
    alone = build(name, checkpoints, device)
    expected = bits(complete(alone, prompts(), GREEDY))
    kv_of(alone).close()
    decode = build(name, checkpoints, device)  # a new one, whose cache is empty
    with far_engine(name, checkpoints.folder, device) as (prefill, _):
        pool = WorkerPool(prefill, decode)
        assert bits(pool.complete(prompts(), GREEDY)) == expected
        assert pool.num_early > 0, "no block moved before its prompt was complete"
        assert decode.stats().num_kv_blocks_received > 0
        kv_of(decode).close()


def check_killed_peer(checkpoints: Checkpoints, device: Device) -> None:
    """A peer that dies while its blocks are read costs that request alone."""
    decode = build("moves", checkpoints, device)
    expected = bits(complete(decode, prompts()[:2], GREEDY))
    with far_engine("moves", checkpoints.folder, device) as (prefill, pid):
        pool = WorkerPool(prefill, decode)
        prefill.submit(Request("halfway", Generate([7] * 330, GREEDY, hold_kv_s=30.0)))
        notices: list[KVNotice] = []
        while not notices:
            assert not any(output.finish_reason for output in prefill.step())
            notices = prefill.kv.take_events().notices
        decode.submit(Request("halfway", Generate([7] * 330, GREEDY, kv_from=pool.engine_id)))
        decode.step()
        kv_of(decode).notice(notices[0])
        decode.step()  # reads
        os.kill(pid, signal.SIGKILL)
    kv_of(decode).disconnect(pool.engine_id)
    ends: list[RequestOutput] = []
    while not ends:
        ends = [output for output in decode.step() if output.finish_reason]
    assert (ends[0].finish_reason, ends[0].stop_reason) == (FinishReason.ERROR, "kv_transfer")
    assert bits(complete(decode, prompts()[:2], GREEDY)) == expected
    check_scheduler(decode._scheduler)
    assert decode._scheduler.pool.num_used == 0
    kv_of(decode).close()

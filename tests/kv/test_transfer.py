"""Prefill in one engine, decode in another: the answer is that of a single engine."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from driver import Answer, complete
from engine.disaggregated import WorkerPool, build, greedy, kv_of
from kv.host_ipc import on_the_host
from open_ports import elsewhere
from random_model import EOS, PIECES, vocab
from tiny_models import make_model, save, tame
from tokenmill.core.kv import PREFILLED, KVNotice, common_ways
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import FinishReason, SamplingParams, StructuredOutput
from tokenmill.kv.transfer import TransferError

NEEDS_NIXL = pytest.mark.skipif(sys.platform != "linux", reason="nixl is made for Linux alone")
WIDE = {"head_dim": 16, "hidden_size": 64, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tame(make_model("llama", **WIDE, vocab_size=len(PIECES), eos_token_id=EOS), 0.3)
    return save(model, tmp_path_factory.mktemp("tiny"))


def prompts() -> list[list[int]]:
    """Prompts of many lengths, half of them with a shared beginning."""
    source = random.Random(3)
    shared = [source.randrange(64) for _ in range(70)]
    own = [[source.randrange(64) for _ in range(n)] for n in (1, 15, 16, 17, 64, 130)]
    return own + [shared + tail for tail in own]


def told(answers: list[Answer]) -> list[object]:
    return [
        (a.token_ids, a.logprobs, a.terminals[0].finish_reason, a.terminals[0].stop_reason)
        for a in answers
    ]


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, list[object]]:
    """What one engine says, by weight type."""
    sampling = greedy(logprobs=2)
    return {d: told(complete(build(folder, d), prompts(), sampling)) for d in ("fp32", "int8")}


@pytest.mark.parametrize(
    ("dtype", "prefill", "decode"),
    [
        ("fp32", {}, {}),
        ("fp32", {"budget": 48}, {"overlap": True}),
        ("fp32", {"budget": 48, "overlap": True}, {"num_blocks": 18}),
        ("fp32", {"chunked": False, "num_blocks": 20}, {"prefix_cache": False}),
        ("int8", {"budget": 40, "prefix_cache": False}, {"num_blocks": 16, "overlap": True}),
        pytest.param(
            "fp32", {"budget": 48, "connector": "nixl"}, {"connector": "nixl"}, marks=NEEDS_NIXL
        ),
        ("fp32", {"budget": 48, "connector": "cuda-ipc"}, {"connector": "cuda-ipc"}),
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else value,
)
def test_same_answer_as_a_single_engine(
    folder: Path,
    single: dict[str, list[object]],
    dtype: str,
    prefill: dict[str, Any],
    decode: dict[str, Any],
) -> None:
    with on_the_host():
        pool = WorkerPool(build(folder, dtype, **prefill), build(folder, dtype, **decode))
    assert told(pool.complete(prompts(), greedy(logprobs=2))) == single[dtype]
    if prefill.get("budget", 512) < 130:
        assert pool.num_early > 0, "no block moved before its prompt was complete"
    # Again: with a prefix cache both sides hit, and the decode side reads no full block twice.
    before = pool.decode.stats()
    assert told(pool.complete(prompts(), greedy(logprobs=2))) == single[dtype]
    after = pool.decode.stats()
    assert after.kv_read_s > 0
    if decode.get("prefix_cache", True) and "num_blocks" not in decode:
        moved = after.num_kv_blocks_received - before.num_kv_blocks_received
        assert moved <= len(prompts())  # the last, partial ones
    if decode.get("num_blocks", 256) < 20:  # who meets whom there depends on when KV comes
        for _ in range(10):
            if pool.decode.stats().num_preemptions:
                break
            assert told(pool.complete(prompts(), greedy(logprobs=2))) == single[dtype]
        assert pool.decode.stats().num_preemptions > 0
    pool.close()


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_layers_with_windows_and_sinks(dtype: str, tmp_path: Path) -> None:
    folder, sampling = save(tame(make_model("gpt-oss"), 0.3), tmp_path), greedy(logprobs=2)
    expected = told(complete(build(folder, dtype), prompts(), sampling))
    pool = WorkerPool(build(folder, dtype, budget=48), build(folder, dtype, overlap=True))
    assert told(pool.complete(prompts(), sampling)) == expected
    assert pool.num_early > 0
    pool.close()


def test_every_way_to_sample_continues_in_the_other_engine(folder: Path) -> None:
    """Seeds, penalties, log-probabilities of the prompt, n > 1, and grammars."""
    kinds: list[SamplingParams] = [
        *(
            SamplingParams(temperature=0.9, seed=seed, max_tokens=12, top_k=20)
            for seed in (1, 2, 3)
        ),
        SamplingParams(temperature=0.8, seed=7, max_tokens=12, presence_penalty=1.5),
        greedy(repetition_penalty=1.8, frequency_penalty=1.0),
        greedy(prompt_logprobs=1, logprobs=1),
        greedy(logit_bias={70: 50.0}, min_tokens=4, ignore_eos=False),
        greedy(ignore_eos=False, structured=StructuredOutput("json_object"), max_tokens=20),
        greedy(ignore_eos=False, structured=StructuredOutput("regex", "[a-f]{3,9}")),
    ]
    tokens = [prompts()[-1]] * len(kinds)  # the choices of one request share their prompt
    options: dict[str, Any] = {"vocab": vocab()}
    expected = complete(build(folder, **options), tokens, kinds)
    pool = WorkerPool(build(folder, budget=48, **options), build(folder, **options))
    found = pool.complete(tokens, kinds)
    assert told(found) == told(expected)
    assert [a.prompt_logprobs for a in found] == [a.prompt_logprobs for a in expected]
    assert len({tuple(a.token_ids) for a in found[:3]}) == 3
    pool.close()


def test_an_answer_of_one_token_ends_where_it_began(folder: Path) -> None:
    pool = WorkerPool(build(folder, budget=48), build(folder))
    (first,) = complete(build(folder), [prompts()[-1]], greedy(max_tokens=1))
    stop = replace(greedy(), stop_token_ids=(first.token_ids[0],))
    found = pool.complete([prompts()[-1]] * 2, [greedy(max_tokens=1), stop])
    assert [answer.token_ids for answer in found] == [first.token_ids] * 2
    assert [a.terminals[0].finish_reason for a in found] == ["length", "stop"]
    assert pool.decode.stats().num_output_tokens == 0
    pool.close()


def submit_both(pool: WorkerPool, name: str, hold_s: float = 30.0) -> list[KVNotice]:
    """Compute a prompt, and let the other engine wait for it; returns the notices."""
    request = Request(name, Generate(prompts()[-1], greedy()))
    pool.prefill.submit(request.with_task(hold_kv_s=hold_s))
    pool.decode.submit(request.with_task(kv_from=pool.engine_id))
    outputs = pool.prefill.step()
    while pool.prefill.has_work():
        outputs += pool.prefill.step()
    assert outputs[-1].stop_reason == PREFILLED
    assert pool.decode.step() == [] and not pool.decode.has_work()
    return kv_of(pool.prefill).take_events().notices


@pytest.fixture(params=["shm", "cuda-ipc"])
def pool(folder: Path, request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    way = request.param
    with on_the_host():
        pool = WorkerPool(build(folder, budget=48, connector=way), build(folder, connector=way))
    yield pool
    pool.settle()
    pool.close()


def ends(pool: WorkerPool) -> list[object]:
    """How requests end in the decode engine now."""
    outputs = pool.decode.step()
    return [(o.request_id, o.finish_reason, o.stop_reason) for o in outputs if o.finish_reason]


def test_a_lease_expires_and_is_said_to(pool: WorkerPool) -> None:
    submit_both(pool, "a", hold_s=0.01)
    assert pool.prefill.stats().num_leases == 1
    time.sleep(0.02)
    pool.prefill.step()
    assert kv_of(pool.prefill).take_events().expired == ["a"]
    assert pool.prefill.stats().num_kv_blocks_used == 0
    pool.decode.abort("a")
    assert ends(pool) == [("a", FinishReason.ABORT, None)]


@pytest.mark.parametrize("all_there", [False, True])
def test_abort_while_blocks_arrive(pool: WorkerPool, all_there: bool) -> None:
    """The blocks come back only when nothing writes to them any more; none of them is cached."""
    for notice in submit_both(pool, "a"):
        kv_of(pool.decode).notice(notice)
    slow: Future[None] = Future()
    (connector,) = kv_of(pool.decode)._connectors.values()
    with mock.patch.object(connector, "read", return_value=slow):
        pool.decode.step()
    pool.decode.abort("a")
    if all_there:  # before the engine has said that the request ended
        slow.set_result(None)
        assert ends(pool) == [("a", FinishReason.ABORT, None)]
        pool.decode.step()
        assert pool.decode.stats().num_kv_blocks_used == 0 == len(pool.decode.kv_dump().hashes)
        pool.prefill.abort("a")
        return
    assert ends(pool) == [("a", FinishReason.ABORT, None)]
    pool.decode.step()
    assert pool.decode.stats().num_kv_blocks_used > 0
    assert pool.decode.stats().num_receiving == 0
    slow.set_result(None)
    pool.decode.step()
    assert pool.decode.stats().num_kv_blocks_used == 0
    pool.prefill.abort("a")


def test_a_source_that_goes_or_falls_silent(pool: WorkerPool) -> None:
    notices = submit_both(pool, "silent")
    kv_of(pool.decode).notice(notices[0])
    later = time.monotonic_ns() + 16 * 10**9
    with mock.patch.object(pool.decode, "_clock", return_value=later):
        assert ends(pool) == [("silent", FinishReason.ERROR, "kv_transfer")]
    kv_of(pool.prefill).release("silent")
    notices = submit_both(pool, "gone")
    kv_of(pool.decode).disconnect(pool.engine_id)
    assert ends(pool) == [("gone", FinishReason.ERROR, "kv_transfer")]
    kv_of(pool.prefill).release("gone")
    pool.decode.submit(Request("late", Generate([1, 2], greedy(), kv_from=pool.engine_id)))
    assert ends(pool) == [("late", FinishReason.REJECT, "kv_transfer")]


def test_a_failed_read_ends_its_request_alone(pool: WorkerPool) -> None:
    bad = submit_both(pool, "bad")
    for notice in bad + submit_both(pool, "good"):
        kv_of(pool.decode).notice(notice)
    broken: Future[None] = Future()
    broken.set_exception(TransferError("the wire is cut"))
    (connector,) = kv_of(pool.decode)._connectors.values()
    read = connector.read(pool.engine_id, [])
    with mock.patch.object(connector, "read", side_effect=[broken, read]):
        assert ends(pool) == [("bad", FinishReason.ERROR, "kv_transfer")]
    while not any(o.finish_reason for o in pool.decode.step()):
        pass
    assert pool.decode.stats().num_finished == {"error": 1, "length": 1}
    for name in ("bad", "good"):
        kv_of(pool.prefill).release(name)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_size": 32}, "block size: the prefill engine has 32, the decode engine 16"),
        pytest.param(
            {"connector": "nixl"},
            "the prefill engine moves KV by nixl, the decode engine by shm",
            marks=NEEDS_NIXL,
        ),
    ],
)
def test_engines_that_do_not_match(folder: Path, options: dict[str, Any], reason: str) -> None:
    source, target = build(folder, **options), build(folder)
    assert kv_of(target).connect(kv_of(source).address) == reason
    other = replace(kv_of(target).address.geometry, dtype="bf16")
    peer = replace(kv_of(target).address, geometry=other)
    assert (
        kv_of(target).connect(peer)
        == "KV dtype: the prefill engine has bf16, the decode engine fp32"
    )


def test_engines_of_other_weights_do_not_match(folder: Path, tmp_path: Path) -> None:
    model = tame(make_model("llama", **WIDE, vocab_size=len(PIECES), eos_token_id=EOS), 0.2)
    other = build(save(model, tmp_path))
    reason = kv_of(build(folder)).connect(kv_of(other).address) or ""
    assert reason.startswith("weights: the prefill engine has ")


@NEEDS_NIXL
def test_auto_takes_shared_memory_on_one_host_and_nixl_to_another(folder: Path) -> None:
    source, target = (kv_of(build(folder, connector="auto")) for _ in range(2))
    near = common_ways(source.address, target.address)
    assert [way.connector for way in near] == ["shm", "nixl"]
    distant = replace(source.address, host="another")
    far = common_ways(distant, target.address)
    assert [way.connector for way in far] == ["nixl"]
    assert target.connect(distant) is None  # the read of a block is then NIXL's
    assert target._peers[distant.engine_id].name == "nixl"
    hidden = replace(source.address.ways[0], endpoint=b"0:0")  # memory that cannot be mapped
    unseen = replace(source.address, engine_id="unseen", ways=(hidden, near[1]))
    assert target.connect(unseen) is None
    assert target._peers["unseen"].name == "nixl"
    shm = replace(distant, ways=distant.ways[:1])
    every = {host for host, _ in elsewhere([os.getpid()])} & {"0.0.0.0", "::"}
    assert not every  # UCX listens at the addresses of this machine, one by one
    assert target.connect(shm) == (
        "the prefill engine moves KV by shm, the decode engine by shm or nixl: shm needs one host"
    )
    for engine in (source, target):
        engine.close()


def test_an_engine_without_a_connector_says_so(folder: Path) -> None:
    engine = build(folder, connector="none")
    engine.submit(Request("a", Generate([1, 2, 3], greedy(), hold_kv_s=1.0)))
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.REJECT
    assert output.error == "this engine moves no KV: give it a kv_connector"

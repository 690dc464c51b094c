"""Engines over two ranks: the answer of one, whatever is divided; and the death of a rank."""

import math
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import msgspec
import pytest

import tiny_images
from draft_heads import eagle3_tensors, forgetful, look_at_newest, save_eagle3, save_head
from driver import Answer, complete
from light_ranks import start_light_ranks
from tiny_configs import EXPERTS
from tiny_models import make_model, save, tame
from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    RouterConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.images import ImageSpan
from tokenmill.core.kv import PREFILLED, KVAddress, KVGeometry, KVNotice, KVTransferEvents, KVWay
from tokenmill.core.kv_events import Cleared, Removed, Stored, pack_events, unpack_events
from tokenmill.core.requests import Engine, Generate, Request, RequestOutput
from tokenmill.core.tasks import Video
from tokenmill.core.types import (
    EngineStats,
    FinishReason,
    GrammarVocab,
    ModelLoadError,
    RanksLostError,
    SamplingParams,
    StructuredOutput,
    TokenLogprobs,
)
from tokenmill.core.video import VideoParams
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.ranks import group as group
from tokenmill.engine.ranks import rank_messages
from tokenmill.engine.ranks.group import side_by_side
from tokenmill.engine.ranks.leader import DataParallelEngine, LeadingEngine, OwnEngine
from tokenmill.engine.ranks.rank_messages import RankMessage, RankState
from tokenmill.engine.ranks.rebalance import Rebalancer
from tokenmill.engine.ranks.shared_kv import GroupCalls, RankReader
from tokenmill.engine.ranks.step_leader import SequenceCopies, StepFollower, pack_batch
from tokenmill.engine.sampling.device_sampler import DeviceSampler, Sampled
from tokenmill.engine.sampling.sampler import SampledRow
from tokenmill.engine.sampling.step_sampler import StepSampler
from tokenmill.models import spec_of
from tokenmill.parallel import RANK_GONE, Ranks, all_or_none
from tokenmill.routing.attention_dp import RankCaches
from tokenmill.routing.router import Router
from tokenmill.sched.sequence import PENDING, Batch, Item, Sequence, num_drafts
from tokenmill.video import video_messages, video_rank_process
from tokenmill.workers.messages import ConnectKV, decode_to_worker, encode
from tokenmill.workers.worker_process import KVSource

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
MIXED = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=5, max_tokens=12, top_k=8, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=1, frequency_penalty=0.5),
)


def prompts() -> list[list[int]]:
    source = random.Random(3)
    shared = [source.randrange(64) for _ in range(40)]
    own = [[source.randrange(64) for _ in range(n)] for n in (1, 17, 33)]
    return own + [shared + tail for tail in own]


@contextmanager
def engine(
    folder: Path,
    num_blocks: int = 64,
    head: Path | None = None,
    connector: Literal["none", "shm"] = "none",
    offloading: str | None = None,
    **parallel: Any,
) -> Iterator[BuiltEngine]:
    draft = None if head is None else str(head)
    built = build_engine(
        resolve_setup(
            Setup(
                ModelConfig(str(folder), "fp32", "cpu", num_threads=1, draft=draft),
                CacheConfig(num_blocks=num_blocks, connector=connector, offloading=offloading),
                SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=16),
                ExecutionConfig(mtp=2 if head else 0, mtp_adaptive=False),
                ParallelConfig(**parallel),
            )
        )
    )
    try:
        yield built
    finally:
        built.close()


def run(built: BuiltEngine) -> list[Answer]:
    params = [MIXED[i % len(MIXED)] for i in range(len(prompts()))]
    return complete(built.engine, prompts(), params)


def facts(answers: list[Answer]) -> list[object]:
    """Tokens and log-probabilities to the last bit."""
    return [(answer.token_ids, answer.logprobs, answer.prompt_logprobs) for answer in answers]


def test_experts_of_two_ranks_and_the_death_of_one(tmp_path: Path) -> None:
    model = forgetful(tame(make_model("gpt-oss"), 0.3))
    folder, head = save(model, tmp_path), save_head(model, tmp_path / "head.safetensors")
    with engine(folder) as one:
        expected = facts(run(one))
    parallel = {"ep": 2, "redundant_experts": 2, "rebalance_steps": 4, "rebalance_layers": 1}
    with engine(folder, 18, head, "shm", **parallel) as two:
        assert facts(run(two)) == expected
        assert facts(run(two)) == expected
        stats = two.engine.stats()
        assert stats.num_rebalances > 0 and stats.num_expert_bytes_moved > 0
        assert stats.rank_imbalance >= 1.0 and stats.rank_imbalance_before > 1.0
        assert stats.rebalance_s > 0 and sum(stats.num_accepted) > 0
        moved = prompts()[3:6:2]
        assert facts(handed_over(two.engine, moved)) == facts(complete(two.engine, moved, GREEDY))
        with pytest.raises(ModelLoadError, match=r"close\(\)"), engine(folder, **parallel):
            pass
        assert two.group is not None
        (child,) = two.group._children
        two.engine.submit(Request("last", Generate(prompts()[3], GREEDY)))
        two.engine.step()
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(RanksLostError, match="a rank ended with exit code -9"):
            while two.engine.has_work():
                two.engine.step()
        assert child.poll() == -signal.SIGKILL
        with pytest.raises(RanksLostError, match="have been ended"):
            two.engine.stats()
    two.close()


@pytest.fixture
def light_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above has a program of its own as its other rank; elsewhere a fork will do."""
    start_light_ranks(monkeypatch)


@pytest.mark.usefixtures("light_ranks")
def test_each_rank_has_requests_of_its_own(tmp_path: Path) -> None:
    model = forgetful(tame(make_model("deepseek-v3"), 0.3))
    folder, head = save(model, tmp_path), save_head(model, tmp_path / "head.safetensors")
    with engine(folder) as one:
        expected = facts(run(one))
    parallel = {"ep": 2, "attention_dp": True, "redundant_experts": 2, "rebalance_steps": 4}
    parallel |= {"timeout_iters": 5, "batching_wait_iters": 1}
    with engine(folder, head=head, connector="shm", **parallel) as two:
        assert two.engine.stats().num_kv_blocks == 2 * 64  # before the first round, too
        assert facts(run(two)) == expected
        stats = two.engine.stats()
        assert stats.num_rebalances > 0 and stats.num_kv_blocks == 2 * 64
        assert len(stats.num_drafted) == 2 and sum(stats.num_accepted) > 0
        assert stats.num_finished == {"length": 6} and stats.num_kv_blocks_used == 0
        for request_id in ("a", "b", "a"):
            two.engine.submit(Request(request_id, Generate(prompts()[4], GREEDY)))
        (refused,) = [o for o in two.engine.step() if o.finish_reason is not None]
        assert (refused.request_id, refused.stop_reason) == ("a", "duplicate_id")
        assert two.engine.stats().num_running == 2
        for request_id in ("a", "b", "unknown"):
            two.engine.abort(request_id)
        ended = {output.request_id: output.finish_reason for output in two.engine.step()}
        assert ended == {"a": FinishReason.ABORT, "b": FinishReason.ABORT}
        assert not two.engine.has_work() and two.engine.step() == []
        check_that_caches_are_found(two.engine)
        moved = prompts()[3:]
        assert two.engine.kv is not None and len(two.engine.kv.address.ranks) == 1
        assert facts(handed_over(two.engine, moved)) == facts(complete(two.engine, moved, GREEDY))
        stats = two.engine.stats()
        assert stats.num_kv_blocks_used == 0 and stats.num_kv_blocks_received == 3 + 4 + 5


@pytest.mark.usefixtures("light_ranks")
def test_each_rank_has_tiers_of_its_own(tmp_path: Path) -> None:
    """Prompts that the devices of both ranks have dropped come back, bit for bit."""
    folder, source = save(tame(make_model("qwen3-moe"), 0.3), tmp_path), random.Random(5)
    asked = [[source.randrange(64) for _ in range(90)] for _ in range(8)]
    with engine(folder) as one:
        expected = facts(complete(one.engine, asked, GREEDY))
    parallel = {"ep": 2, "attention_dp": True, "offloading": "host=4MiB"}
    with engine(folder, 14, **parallel) as two:
        assert facts(complete(two.engine, asked, GREEDY)) == expected
        assert facts(complete(two.engine, asked, GREEDY)) == expected
        stats = two.engine.stats()
        assert stats.tiers["host_hit_tokens"] > 0 and stats.tiers["dropped"] == 0
        assert stats.num_kv_blocks_used == 0
        held = two.engine.kv_dump().tiers["host"]
        assert 0 < len(held) <= stats.tiers["host_blocks"]


@pytest.mark.usefixtures("light_ranks")
@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"ep": 2}])
def test_ranks_that_share_requests_have_the_same_tiers(
    tmp_path: Path, parallel: dict[str, Any], disk: bool
) -> None:
    """Each brings its part of blocks back; where a part is gone they are computed."""
    folder, source = save(tame(make_model("qwen3-moe"), 0.3), tmp_path / "model"), random.Random(5)
    asked = [[source.randrange(64) for _ in range(90)] for _ in range(8)]
    files = tmp_path / "kv"
    room = "64KiB" if "tp" in parallel else "128KiB"  # of whole blocks
    tiers = f"host={room},disk={files}:64MiB" if disk else "host=4MiB"
    with engine(folder) as one:
        expected = [answer.token_ids for answer in complete(one.engine, asked, GREEDY)]
    with engine(folder, 14, offloading=tiers, **parallel) as two:
        for _ in range(2):
            found = complete(two.engine, asked, GREEDY)
            assert [answer.token_ids for answer in found] == expected
        stats = two.engine.stats()
        assert stats.tiers["disk_hit_tokens" if disk else "host_hit_tokens"] > 0
        assert stats.num_kv_blocks_used == 0
        roots = list((files / "tokenmill-kv").glob("*/")) if disk else []
        assert len([root for root in roots if root.is_dir()]) == (disk and 1 + ("tp" in parallel))
        if disk and "tp" in parallel:
            assert isinstance(two.engine, LanguageEngine) and two.engine.tiers is not None
            (other,) = (root for root in roots if root.name != two.engine.tiers.root.hex())
            for file in other.glob("*/*"):
                file.unlink()
            found = complete(two.engine, asked, GREEDY)
            assert [answer.token_ids for answer in found] == expected


def test_new_prompts_count_in_the_round_they_come_in() -> None:
    policy, own = mock.Mock(), mock.Mock(kv=None)
    own.engine.kv, own.run.return_value = None, []
    idle, busy = (RankState(bool(n), EngineStats(), (0, 0), (0, n)) for n in (0, 3))
    own.state.return_value = idle
    own.over.return_value = rank_messages.RoundOver([], [], busy)
    alone = mock.MagicMock(size=1)
    alone.hear.return_value = []
    ranks = DataParallelEngine(own, alone, None, policy, RankCaches(1, 16), 8)
    ranks.submit(Request("r", Generate([1, 2], GREEDY)))
    ranks.submit(Request("elsewhere", Generate([1, 2], GREEDY, kv_from="peer")))
    for _ in range(2):
        ranks.step()
    assert [call.args[0] for call in policy.hold.call_args_list] == [[(1, 0)], [(0, 3)]]


def check_that_caches_are_found(ranks: Engine) -> None:
    """Prompts go to the rank that holds their beginning, and a router hears of every rank."""
    assert isinstance(ranks, KVSource)
    publisher, router = ranks.kv_events(), Router(RouterConfig(policy="kv"))
    router.add_worker("ranks")
    router.load("ranks", ranks.kv_dump())
    source = random.Random(8)
    talks = [[source.randrange(64) for _ in range(n)] for n in (70, 50)]
    first = complete(ranks, talks, GREEDY)  # one on each rank
    batch = publisher.take()
    assert batch is not None and router.apply("ranks", batch)
    assert publisher.take() is None
    for talk, answer in zip(talks, first, strict=True):
        longer = talk + answer.token_ids + talk[:20]
        decision = router.route(str(len(talk)), longer, now_s=0.0)
        (again,) = complete(ranks, [longer], GREEDY)
        assert again.num_cached_tokens == decision.num_cached_tokens > len(talk) - 16
        batch = publisher.take()
        assert batch is not None and router.apply("ranks", batch)
    assert router.index.num_blocks("ranks") == len(ranks.kv_dump().hashes)


@pytest.mark.usefixtures("light_ranks")
@pytest.mark.parametrize("variant", ["gpt-oss", "qwen3-tied", "deepseek-v3"])
def test_heads_and_vocabulary_of_two_ranks_give_the_same_tokens(
    tmp_path: Path, variant: str
) -> None:
    model = forgetful(tame(make_model(variant, vocab_size=67), 0.3), 0.1)
    folder, head = save(model, tmp_path), save_head(model, tmp_path / "head.safetensors")
    with engine(folder) as one:
        expected = run(one)
    with engine(folder, 18, head, "shm", tp=2) as two:
        found = run(two)
        assert sum(two.engine.stats().num_accepted) > 0
        assert two.engine.kv is not None and len(two.engine.kv.address.others) == 1
        found += handed_over(two.engine, prompts()[3:6:2])
        expected += complete(two.engine, prompts()[3:6:2], GREEDY)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    for answer, other in zip(found, expected, strict=True):
        for entry, its in zip(answer.logprobs, other.logprobs, strict=True):
            assert entry.logprobs == pytest.approx(its.logprobs, abs=1e-3)


@pytest.mark.usefixtures("light_ranks")
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("llama", {"tp": 2}),
        ("gpt-oss", {"tp": 2, "ep": 2}),
        ("gpt-oss", {"ep": 2}),
        ("gpt-oss", {"ep": 2, "attention_dp": True}),
    ],
)
def test_an_eagle3_head_drafts_on_two_ranks(
    family: str, parallel: dict[str, Any], tmp_path: Path
) -> None:
    """The drafts of one rank are accepted as often: the head's parts are added up."""
    sizes = {"head_dim": 16, "hidden_size": 64, "num_hidden_layers": 4}
    model = forgetful(tame(make_model(family, **sizes), 0.3))
    tensors = eagle3_tensors(model, bias=True)
    look_at_newest(tensors, model)
    head = save_eagle3(model, tmp_path / "head", tensors)
    folder = save(model, tmp_path / "model")
    params = [MIXED[i % 2] for i in range(len(prompts()))]
    with engine(folder) as plain, engine(folder, head=head) as one:
        expected = complete(plain.engine, prompts(), params)
        complete(one.engine, prompts(), params)
        accepted = one.engine.stats().num_accepted
    with engine(folder, head=head, **parallel) as two:
        found = complete(two.engine, prompts(), params)
        assert sum(accepted) > 0
        if "attention_dp" not in parallel:  # there steps have other sequences
            assert two.engine.stats().num_accepted == accepted
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


@pytest.mark.usefixtures("light_ranks")
def test_a_request_that_cannot_be_sampled_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks do their part of the step all the same, drafts included, and go on."""
    model = forgetful(tame(make_model("qwen3-tied"), 0.3), 0.1)
    folder, head = save(model, tmp_path), save_head(model, tmp_path / "head.safetensors")
    with engine(folder) as one:
        expected = complete(one.engine, prompts(), GREEDY)
    sample = StepSampler._sample

    def fails(self: StepSampler, sampler: Any, rows: list[SampledRow], *rest: Any) -> Sampled:
        if any(
            row.request.task.sampling.max_tokens == 3 and row.num_output_tokens > 1 for row in rows
        ):
            raise ValueError("no dice")
        return sample(self, sampler, rows, *rest)

    monkeypatch.setattr(StepSampler, "_sample", fails)
    with engine(folder, head=head, tp=2) as two:
        params = [replace(GREEDY, max_tokens=3 if i == 2 else 12) for i in range(len(prompts()))]
        found = complete(two.engine, prompts(), params)
        assert sum(two.engine.stats().num_accepted) > 0
    (end,) = found[2].terminals
    assert end.finish_reason is FinishReason.ERROR and "no dice" in str(end.error)
    for i, (answer, other) in enumerate(zip(found, expected, strict=True)):
        assert i == 2 or answer.token_ids == other.token_ids


@pytest.mark.usefixtures("light_ranks")
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"ep": 2, "attention_dp": True}])
def test_two_ranks_see_images(tmp_path: Path, parallel: dict[str, Any]) -> None:
    folder = save(tame(make_model("qwen3-vl-moe", vocab_size=67), 0.3), tmp_path)
    seen = [tiny_images.image(seed, (1, 6, 10)) for seed in (1, 2)]
    asked = [tiny_images.prompt(i, 20, seen[i % 2], 9) for i in range(3)]
    ids, images = [each.token_ids for each in asked], [each.images for each in asked]
    with engine(folder) as one:
        expected = complete(one.engine, ids, GREEDY, images=images)
    with engine(folder, **parallel) as two:
        found = complete(two.engine, ids, GREEDY, images=images)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


@pytest.mark.usefixtures("light_ranks")
def test_two_ranks_of_a_model_that_slides(tmp_path: Path) -> None:
    folder = save(tame(make_model("gemma3", vocab_size=67), 0.3), tmp_path)
    with engine(folder) as one:
        expected = run(one) + complete(one.engine, prompts()[3:6:2], GREEDY)
    with engine(folder, 18, connector="shm", tp=2) as two:
        assert two.runner.sliding.num_groups == 3
        found = run(two) + handed_over(two.engine, prompts()[3:6:2])
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


@pytest.mark.usefixtures("light_ranks")
def test_ranks_with_windows_find_what_their_requests_left(tmp_path: Path) -> None:
    folder = save(tame(make_model("gpt-oss", sliding_window=24), 0.3), tmp_path)
    with engine(folder) as one:
        expected = facts(complete(one.engine, prompts()[3:], GREEDY))
    with engine(folder, ep=2, attention_dp=True) as two:
        check_that_caches_are_found(two.engine)
        for _ in range(2):
            assert facts(complete(two.engine, prompts()[3:], GREEDY)) == expected
        assert two.engine.stats().num_branch_points > 0


def handed_over(ranks: Engine, token_ids: list[list[int]]) -> list[Answer]:
    """Each prompt is computed in some blocks, then read into others, on the same rank or not."""
    assert isinstance(ranks, LeadingEngine | DataParallelEngine) and ranks.kv is not None
    kv, answers = ranks.kv, {str(i): Answer() for i in range(len(token_ids))}
    engine_id = kv.address.engine_id
    assert kv.connect(kv.address) is None
    for i, prompt in enumerate(token_ids):
        ranks.submit(Request(f"from {i}", Generate(prompt, GREEDY, hold_kv_s=30.0)))
        request = Request(
            f"to {i}", Generate(prompt, GREEDY, kv_from=engine_id, cache_salt="not cached")
        )
        ranks.submit(request)
    while ranks.has_work() or kv.wait_ms() is not None:
        for output in ranks.step():
            if output.stop_reason == PREFILLED:
                output.finish_reason = None
            answers[output.request_id.split()[1]].add(output)
        events = kv.take_events()
        for notice in events.notices:
            kv.notice(replace(notice, request_id=notice.request_id.replace("from", "to")))
        for request_id in events.received:
            kv.release(request_id.replace("to", "from"))
    kv.disconnect(engine_id)
    return list(answers.values())


def test_ranks_of_a_machine_are_neighbours() -> None:
    assert side_by_side("b", ["c", "b", "a", "b", "c", "a"]) == [1, 3, 2, 5, 0, 4]


def test_a_rank_whose_rank_0_is_gone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "START_TIMEOUT_S", 1.0)
    with pytest.raises(SystemExit):
        group.call(str(tmp_path / "calls"))


def test_a_closed_connection_is_told_from_an_error() -> None:
    for text, told in (
        ("Connection reset by peer. GLHF!", RANK_GONE),
        ("no", ".*RuntimeError: no"),
    ):
        with pytest.raises(RanksLostError, match=f"^{told}$"), all_or_none():
            raise RuntimeError(text)


@contextmanager
def strange_rank(size: int = 2) -> Iterator[tuple[group.RankGroup, Connection]]:
    """A group whose ranks are one connection, over which a test says what it wants."""
    ours, theirs = Pipe()
    strangers = group.RankGroup.__new__(group.RankGroup)
    strangers.size, strangers._links = size, [ours]
    with ours, theirs:
        yield strangers, theirs


@contextmanager
def inbox_of_a_rank() -> Iterator[tuple[group.Inbox, Connection]]:
    """A rank's inbox, whose end does not end this process, and the connection into it."""
    ours, theirs = Pipe()
    others = set(threading.enumerate())
    with mock.patch("os._exit", side_effect=SystemExit), ours:
        with theirs:
            yield group.Inbox(ours, "host:1"), theirs
        for reader in set(threading.enumerate()) - others:
            reader.join()


WRONG_BYTES = (
    b"",
    b"\xc1\x00",  # a type that msgpack does not have
    b"\xa1\xff",  # no UTF-8
    *(msgspec.msgpack.encode(wrong) for wrong in (7, [], {}, ["Popen", 1], [["LateTokens"], 1])),
    *(msgspec.msgpack.encode(["LateTokens", *wrong]) for wrong in ([], ["3"], [3, 4])),
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("data", WRONG_BYTES)
def test_what_is_no_message_of_a_rank_is_an_error_for_both_sides(data: bytes) -> None:
    with strange_rank() as (strangers, link):
        for hear in (lambda: strangers.hear(rank_messages.NumBlocks), lambda: strangers.take(True)):
            link.send_bytes(data)
            with pytest.raises(RanksLostError, match="need the same version of tokenmill"):
                hear()
    with inbox_of_a_rank() as (inbox, link):
        link.send_bytes(data)
        with pytest.raises(RanksLostError, match="need the same version of tokenmill"):
            inbox.next()
        rank_messages.send(rank_messages.LateTokens(3), link)
        with pytest.raises(RanksLostError, match="said LateTokens where GroupPlace was expected"):
            inbox.next_of(rank_messages.GroupPlace)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_message_of_another_kind_is_an_error_with_optimized_python_too() -> None:
    with strange_rank() as (strangers, link):
        rank_messages.send(video_messages.StepVideo(), link)
        with pytest.raises(RanksLostError, match="said StepVideo where NumBlocks was expected"):
            strangers.hear(rank_messages.NumBlocks)
        calls = GroupCalls(strangers)
        call = calls.start_all(rank_messages.KVCall("disconnect", "shm", "e"))
        rank_messages.send(rank_messages.CallOver(99), link)
        with pytest.raises(RanksLostError, match="call 99, which is not open"):
            calls.over(call, wait=True)
        rank_messages.send(video_messages.StepVideo(), link)
        with pytest.raises(RanksLostError, match="said StepVideo where CallOver was expected"):
            calls.over(call, wait=True)
    own = OwnEngine.__new__(OwnEngine)
    own.kv = None
    with pytest.raises(RanksLostError, match="said StepVideo where EngineRound was expected"):
        own.answer(video_messages.StepVideo())
    follower = StepFollower.__new__(StepFollower)
    with pytest.raises(RanksLostError, match="rank 0 asks for StepVideo"):
        follower.do(video_messages.StepVideo())
    reader = RankReader.__new__(RankReader)
    reader._connectors = {"shm": mock.Mock()}
    with pytest.raises(RanksLostError, match="says connect and not to whom"):
        reader.do(rank_messages.KVCall("connect", "shm", "e"))
    with inbox_of_a_rank() as (inbox, link):
        rank_messages.send(rank_messages.CallOver(), link)
        with pytest.raises(RanksLostError, match="rank 0 asks for CallOver"):
            video_rank_process.follow(mock.Mock(), link, inbox)


def test_nodes_without_routing_groups_are_said_to_do_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = spec_of(EXPERTS)
    Rebalancer([], spec, ParallelConfig(ep=4, nodes=2, rebalance_steps=9), Ranks(0, 4))
    assert "2 nodes: that number does not divide the 1 routing groups" in caplog.text


def travelled(message: RankMessage) -> Any:
    ours, theirs = Pipe()
    rank_messages.send(message, ours)
    return rank_messages.receive(theirs)


SHAPE = KVGeometry("m", "w", "fp32", "l", 2, 1, 16, 16, (64, 64))
ADDRESS = KVAddress("e", "h", SHAPE, 9, (KVWay("shm", (0, 4096), b"1:\xff"),))
PEER = replace(ADDRESS, others=(ADDRESS,), ranks=(ADDRESS, ADDRESS))
REQUEST = Request(
    "r",
    Generate(
        [1, 2],
        SamplingParams(
            stop=("x",),
            stop_token_ids=(7,),
            logit_bias={3: -1.5},
            structured=StructuredOutput("regex", "a+"),
        ),
        output_token_ids=[4],
    ),
    deadline_ns=10**15,
)
ENTRY = TokenLogprobs([1, 2], [-0.1, -math.inf], 1)
OUTPUT = RequestOutput("r", [1], [ENTRY], [None, ENTRY], FinishReason.STOP, "x", 3, scheduled_ns=5)
EVENTS = [Stored(2**64 - 1, [1, 2]), Stored(None, [3]), Removed([2]), Cleared()]
STATS = EngineStats(num_finished={"stop": 2}, num_drafted=[3, 1], step_sums=[0.5])
NOTICE = KVNotice("r", 2, [5, 6], 9, engine_id="e")
VIDEO_JOB = Request("v", Video([1], VideoParams(size=(32, 16), latent="x.pt", seed=-3)))
MESSAGES: list[RankMessage] = [
    rank_messages.CallOver(4, "not here"),
    rank_messages.RankCalls("here"),
    rank_messages.GroupPlace(1, 2, "gloo", "cpu", file="/store"),
    rank_messages.EngineOrder(
        Setup(
            ModelConfig("m", "int8", seed=3),
            CacheConfig(dtype="fp32", memory_share=0.25),
            SchedulerConfig(max_num_seqs=4),
            ExecutionConfig(mtp=2, overlap=False),
            ParallelConfig(ep=2),
        ),
        GrammarVocab(["a", "\u00e9"], "RAW", 2, [1]),
    ),
    rank_messages.NumBlocks(7),
    rank_messages.LoadFailed("no room"),
    rank_messages.KVReachable(PEER),
    rank_messages.KVCall("read", "shm", "e", PEER, [(1, 2, 3)], 4),
    rank_messages.OpenTiers(12, b"root"),
    rank_messages.TierCall("read", [1, 2], [3, 4], b"name", 7),
    rank_messages.StepBatch(
        b"1234", b"", [rank_messages.GrownRow(1, 0, [5, 6], 1, [7], 9, [(2, 4, (1, 2, 3))])], 3, 2
    ),
    rank_messages.LateTokens(3),
    rank_messages.CaptureGraphs(),
    rank_messages.ShortPrompts({8: 3, 32: 1}),
    rank_messages.EngineRound([REQUEST], ["gone"], True, [NOTICE], ["r"]),
    rank_messages.RoundOver(
        [OUTPUT],
        pack_events(EVENTS),
        RankState(True, STATS, (1, 2), (3, 4)),
        KVTransferEvents([], ["r"], []),
        50,
    ),
    video_messages.VideoOrder(ModelConfig("wan"), True, VideoParallel(2, 4)),
    video_messages.SubmitVideo(VIDEO_JOB),
    video_messages.AbortVideo("v"),
    video_messages.StepVideo(),
    video_messages.VideoStepOver(1),
    video_messages.MeasureVideo(VIDEO_JOB, None),
]


def test_every_message_between_ranks_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(RankMessage.__subclasses__())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_between_ranks_is_what_it_was(message: RankMessage) -> None:
    assert travelled(message) == message


def test_times_travel_as_distances_and_events_as_on_every_wire() -> None:
    back = rank_messages.arrived(rank_messages.leaving(REQUEST))
    assert back.deadline_ns is not None and abs(back.deadline_ns - 10**15) < 10**9
    assert replace(back, deadline_ns=10**15, arrival_ns=0) == REQUEST
    told = rank_messages.arrived_output(rank_messages.leaving_output(OUTPUT))
    assert abs(told.scheduled_ns - 5) < 10**9 and replace(told, scheduled_ns=5) == OUTPUT
    told_peer = ConnectKV(PEER)
    assert decode_to_worker(encode(told_peer)) == told_peer
    over = next(message for message in MESSAGES if isinstance(message, rank_messages.RoundOver))
    assert unpack_events(travelled(over).events) == EVENTS


def described(batch: Batch) -> list[object]:
    """What runners read of a batch."""
    return [
        (batch.num_tokens, batch.num_to_draft),
        [(s.slot, first, s.block_ids, s.window_first, s.window_ids) for s, first in batch.grown],
        [
            (
                (seq.slot, num_new, seq.num_computed_tokens, len(seq.token_ids), seq.capacity),
                seq.token_ids[seq.num_computed_tokens :][: num_new + 1],
                seq.draft_ids[: max(0, num_drafts((seq, num_new)))],
                (seq.num_prompt_tokens, seq.image_end, bool(seq.prompt_logprobs)),
                [
                    (span.offset, span.num_tokens, span.image.grid)
                    for span in seq.request.task.images
                ],
                DeviceSampler().wants_best([seq]),
            )
            for seq, num_new in batch.items
        ],
    ]


def test_a_step_travels_whole() -> None:
    """A prompt in two parts, a sequence whose newest token is not known here, drafts; and a slot
    that somebody else gets."""
    spans = (ImageSpan(2, 6, tiny_images.image(1, (1, 4, 6))),)
    first = Sequence(
        Request("a", Generate(list(range(30)), GREEDY, images=spans)), (0, 0, 0), 99, frozenset()
    )
    drawn = SamplingParams(temperature=1.0, prompt_logprobs=1)
    second = Sequence(Request("b", Generate([7, 8, 9], drawn)), (0, 0, 1), 99, frozenset())
    first.slot, first.block_ids, first.capacity = 3, [4, 5], 32
    second.slot, second.block_ids, second.capacity = 0, [6], 16
    second.window_first, second.window_ids = 0, [1, 2]
    sampler, copies = mock.Mock(wants_best=DeviceSampler().wants_best), SequenceCopies()

    def check(items: list[Item], grown: list[Item], to_draft: int = 0) -> None:
        batch = Batch(items, sum(n for _, n in items), grown, num_to_draft=to_draft)
        assert described(copies.unpack(travelled(pack_batch(batch, sampler)))) == described(batch)

    check([(second, 3), (first, 20)], [(first, 0), (second, 0)])
    second.num_computed_tokens, first.num_computed_tokens = 3, 20
    second.token_ids.append(PENDING)
    check([(second, 1), (first, 10)], [])
    second.token_ids[-1:], first.num_computed_tokens = [11, 12], 30
    first.token_ids.append(13)
    second.num_computed_tokens, second.draft_ids = 4, [21, 22, 23]
    second.block_ids.append(9)
    second.capacity, second.window_first, second.window_ids = 32, 1, [3, 4]
    check([(first, 1), (second, 3)], [(second, 1)], 2)
    third = Sequence(Request("c", Generate([1, 2])), (0, 0, 2), 9, frozenset())
    third.slot, third.block_ids, third.capacity = 3, [8], 16
    check([(third, 2)], [(third, 0)])

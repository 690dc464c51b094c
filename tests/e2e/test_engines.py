"""The Engine protocol, for every engine: each request ends in exactly one terminal output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from e2e.request_path import build
from tiny_ranking import tiny_model
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.requests import Engine, Generate, Request, RequestOutput
from tokenmill.core.tasks import Rank, Scores, TaskProgress, Video, VideoFile, VideoFrames
from tokenmill.core.types import EngineStats, FinishReason, SamplingParams
from tokenmill.core.video import VideoParams
from tokenmill.engine.engine import LanguageEngine
from tokenmill.models.checkpoints.diffusers_folder import random_wan
from tokenmill.plan.simulator import SimRunner
from tokenmill.ranking.engine import RankingEngine
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler
from tokenmill.video.pipeline import build_pipeline
from tokenmill.video.video_engine import VideoEngine
from tokenmill.video.video_task_engine import VideoTaskEngine
from workers.echo_engine import EchoEngine

PAST_NS = 1  # a deadline
WIDE = np.arange(4, dtype="<i8").tobytes()


def text(name: str, good: bool = True, deadline_ns: int | None = None) -> Request:
    tokens = [1, 2, 3] if good else [1] * 5000
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    return Request(name, Generate(tokens, sampling), deadline_ns=deadline_ns)


def rank(name: str, good: bool = True, deadline_ns: int | None = None) -> Request:
    ids = dict.fromkeys(("item_ids", "category_ids", "candidate_ids"), WIDE)
    task = Rank(user_id=0 if good else 9999, actions=WIDE, candidate_category_ids=WIDE, **ids)
    return Request(name, task, deadline_ns=deadline_ns)


def video(name: str, good: bool = True, deadline_ns: int | None = None) -> Request:
    size = (32, 16 if good else 17)
    params = VideoParams(size=size, num_frames=5, num_steps=2, negative_token_ids=(9,))
    return Request(name, Video([5, 6], params), deadline_ns=deadline_ns)


class Kind(NamedTuple):
    """An engine, the requests that it takes, and one of another task."""

    make: Callable[[Path], Engine]
    request: Callable[..., Request]
    other: Request
    delta: type | None  # of what it ends with; None: tokens


def simulated(_: Path) -> Engine:
    scheduler = Scheduler(SchedulerConfig(max_model_len=64), BlockPool(64, 4), frozenset())
    return LanguageEngine(scheduler, SimRunner([7, 8]), vocab_size=16)


def frames(_: Path) -> VideoEngine:
    return VideoEngine(build_pipeline(random_wan("wan-tiny"), torch.device("cpu"), "fp32"))


def files(folder: Path) -> Engine:
    return VideoTaskEngine(frames(folder), lambda v: b"mp4", lambda v: b"png", lambda: b"")


def ranking(_: Path) -> Engine:
    return RankingEngine(tiny_model())


ENGINES = {
    "language": Kind(lambda folder: build(folder).engine, text, rank("other"), None),
    "simulated": Kind(simulated, text, video("other"), None),
    "ranking": Kind(ranking, rank, text("other"), Scores),
    "video": Kind(frames, video, text("other"), VideoFrames),
    "video files": Kind(files, video, rank("other"), VideoFile),
}


def run(engine: Engine) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


@pytest.mark.parametrize("kind", ENGINES.values(), ids=ENGINES)
def test_every_request_ends_once_whatever_becomes_of_it(kind: Kind, tmp_path: Path) -> None:
    engine = kind.make(tmp_path)
    assert not engine.has_work() and engine.step() == []
    names = ("first", "second")
    for name in names:
        engine.submit(kind.request(name))
    engine.submit(kind.request("left"))
    engine.submit(kind.request("wrong", good=False))
    engine.submit(kind.request("late", deadline_ns=PAST_NS))
    engine.submit(kind.other)
    engine.abort("left")
    engine.abort("unknown")
    assert isinstance(engine.stats(), EngineStats)
    found = run(engine)
    assert found.keys() == {*names, "left", "wrong", "late", "other"}
    for outputs in found.values():
        reasons = [output.finish_reason for output in outputs]
        assert reasons[-1] is not None and set(reasons[:-1]) <= {None}
    ends = {name: outputs[-1] for name, outputs in found.items()}
    assert {ends[name].finish_reason for name in names} <= {"stop", "length"}
    assert ends["left"].finish_reason is ends["late"].finish_reason is FinishReason.ABORT
    for name in ("wrong", "other"):
        assert ends[name].finish_reason is FinishReason.REJECT and ends[name].error
    other = ends["other"]
    assert "task" in f"{other.stop_reason}: {other.error}"
    _check_answers(kind, [found[name] for name in names])
    engine.abort("first")  # it has ended
    assert not engine.has_work() and engine.step() == []
    engine.submit(kind.request("first"))  # its id is free again
    assert run(engine)["first"][-1].finish_reason in ("stop", "length")


def _check_answers(kind: Kind, answers: list[list[RequestOutput]]) -> None:
    for outputs in answers:
        *before, last = outputs
        if kind.delta is None:
            assert sum(len(output.token_ids) for output in outputs) == 4
            assert all(output.delta is None for output in outputs)
        else:
            assert isinstance(last.delta, kind.delta)
            assert all(isinstance(output.delta, TaskProgress) for output in before)


def test_the_engine_of_the_pools_tests_holds_to_it_too() -> None:
    engine = EchoEngine()
    engine.submit(text("other"))
    (end,) = run(engine)["other"]
    assert end.finish_reason is FinishReason.REJECT

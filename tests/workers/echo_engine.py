"""An Engine without a model: a task takes some steps and answers with its worker's pid.

Its actions are JSON: {"steps": 3}, and "exit", "hang" or "raise" at the last of them, or "bad".
With "until" it ends at the first step that finds a file of this name.
Run as a script it is a worker process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.tasks import Rank, Scores, TaskProgress
from tokenmill.core.types import EngineStats, FinishReason
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.worker_process import run_worker

STEP_S = 0.005


def task(**actions: Any) -> Rank:
    """What the engine is to do."""
    ids = dict.fromkeys(("category_ids", "candidate_ids", "candidate_category_ids"), b"")
    return Rank(user_id=0, item_ids=bytes(8), actions=json.dumps(actions).encode(), **ids)


class EchoEngine:
    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.ends: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self.ended: list[RequestOutput] = []
        self.num_steps = self.num_aborted = 0

    def submit(self, request: Request) -> None:
        name = request.request_id
        actions = json.loads(request.task.actions) if isinstance(request.task, Rank) else {"bad": 1}
        if "bad" in actions:
            message = f"bad: {actions['bad']} is wrong"
            self._end(name, FinishReason.REJECT, "invalid", message)
            return
        self.left[name] = sys.maxsize if "until" in actions else actions.get("steps", 1)
        self.files[name] = actions.get("until", "")
        self.ends[name] = actions.get("end", "")

    def abort(self, request_id: str) -> None:
        if self.left.pop(request_id, None) is not None:
            self.num_aborted += 1
            self._end(request_id, FinishReason.ABORT)

    def has_work(self) -> bool:
        return bool(self.left or self.ended)

    def step(self) -> list[RequestOutput]:
        ended, self.ended = self.ended, []
        if not self.left:
            return ended
        time.sleep(STEP_S)
        self.num_steps += 1
        return ended + [self._advance(name) for name in list(self.left)]

    def _end(self, name: str, reason: FinishReason, why: str = "", error: str = "") -> None:
        end = RequestOutput(name, [], finish_reason=reason, stop_reason=why, error=error)
        self.ended.append(end)

    def _advance(self, name: str) -> RequestOutput:
        self.left[name] -= 1
        if self.left[name] and not os.path.exists(self.files[name]):
            told = TaskProgress(0.5, picture=str(self.left[name]).encode())
            return RequestOutput(name, [], delta=told)
        del self.left[name]
        match self.ends[name]:
            case "exit":
                os._exit(7)
            case "hang":
                time.sleep(3600)
            case "raise":
                raise RuntimeError("the echo failed")
        pid = Scores(scores=str(os.getpid()).encode())
        return RequestOutput(name, [], finish_reason=FinishReason.STOP, delta=pid)

    def stats(self) -> EngineStats:
        figures = {
            "num_running": len(self.left),
            "steps_total": self.num_steps,
            'aborted_total{by="front"}': self.num_aborted,
        }
        return EngineStats(num_running=len(self.left), figures=figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    run_worker(EchoEngine(), parser.parse_args().address, ModelFacts(about={"echo": True}))

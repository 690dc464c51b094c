"""An Engine without model or scheduler: request i answers 0, 1, 2, ... one token a step.

A prompt token steers it: CRASH makes step() raise, EXIT kills the process, REFUSE is a REJECT.
Run as a script it is a worker process, or with --join a worker that joins a pool; `--relay` is a
port that takes its link to where it should go.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

import msgspec

from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.types import EngineStats, FinishReason, TokenmillError
from tokenmill.workers.joining.joiner import Membership
from tokenmill.workers.joining.protocol import read_token
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.worker_process import run_worker, send_failure

CRASH, EXIT, REFUSE = 1001, 1002, 1003
FACTS = ModelFacts(
    max_model_len=512, vocab_size=2048, num_kv_blocks=64, block_size=16, dtype="none"
)


class CountingEngine:
    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.live: dict[str, tuple[Request, int]] = {}
        self.finished: list[RequestOutput] = []
        self.num_steps = 0

    def submit(self, request: Request) -> None:
        if request.task.prompt_token_ids[:1] == [REFUSE]:
            self._finish(request.request_id, FinishReason.REJECT, "queue_full")
        else:
            self.live[request.request_id] = (request, len(request.task.output_token_ids))

    def abort(self, request_id: str) -> None:
        if self.live.pop(request_id, None) is not None:
            self._finish(request_id, FinishReason.ABORT, None)

    def has_work(self) -> bool:
        return bool(self.live or self.finished)

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        time.sleep(self.step_s * bool(self.live))
        outputs, self.finished = self.finished, []
        for request_id, (request, count) in list(self.live.items()):
            if request.task.prompt_token_ids[:1] == [CRASH]:
                raise RuntimeError("the counter jammed")
            if request.task.prompt_token_ids[:1] == [EXIT] and count:
                time.sleep(0.05)  # what was said before is on its way
                os._exit(7)
            outputs.append(self._next(request_id, request, count))
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.live), num_steps=self.num_steps)

    def _next(self, request_id: str, request: Request, count: int) -> RequestOutput:
        last = count + 1 == request.task.sampling.max_tokens
        if last:
            del self.live[request_id]
        else:
            self.live[request_id] = (request, count + 1)
        reason = FinishReason.LENGTH if last else None
        return RequestOutput(request_id, [count], finish_reason=reason)

    def _finish(self, request_id: str, reason: FinishReason, why: str | None) -> None:
        self.finished.append(
            RequestOutput(request_id, [], finish_reason=reason, stop_reason=why, error=why)
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--fail", default="")
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument("--start-s", type=float, default=0.0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--dtype", default=FACTS.dtype)
    parser.add_argument("--gpu")
    parser.add_argument("--join")
    parser.add_argument("--token-file")
    parser.add_argument("--relay")
    args = parser.parse_args()
    if args.exit_code:
        os._exit(args.exit_code)
    leave = None
    if args.join:
        logging.basicConfig(level="INFO", format="%(message)s")
        member = Membership(args.join, read_token(args.token_file), wait_s=60.0)
        args.address, leave = member.address, member.leave
        if args.relay:
            host, _, rest = args.address.rpartition(":")
            port, _, key = rest.partition("#")
            Path(args.relay).write_text(port)
            args.address = f"{host}:{Path(args.relay).stem}#{key}"
    time.sleep(args.start_s)
    if args.fail:
        send_failure(args.address, ValueError(args.fail))
        raise SystemExit(1)
    gpus = [args.gpu] if args.gpu else []
    facts = msgspec.structs.replace(FACTS, dtype=args.dtype, gpus=gpus)
    if not run_worker(CountingEngine(args.step_s), args.address, facts, leave=leave):
        raise SystemExit("the server is gone")


if __name__ == "__main__":
    try:
        main()
    except TokenmillError as error:
        raise SystemExit(f"error: {error}") from None

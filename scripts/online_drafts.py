"""Tokens per second with drafts and without, for several numbers of users at once.

Two engines of one model, one that drafts and one that does not, answer the package's prompts in
turns: as many requests as users are under way, and where one ends the next begins. K follows the
load, as it does when a server drafts. No HTTP is in it.

usage: python scripts/online_drafts.py [--device cuda] [--users 1,8,32] [--seconds 5 --rounds 2]
Every turn prints its figures. The last line is one JSON object: by number of users the tokens per
second of each round without and with drafts, their ratio (of all rounds and of all but the first,
in which the number of drafts is still sought), tokens per step, and how many answers differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

from tokenmill.bench.commands.mtp import read_prompts
from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.types import Request, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.models.checkpoints.store import resolve

KINDS = ("unseen", "everyday", "chat")


@dataclass(slots=True)
class Side:
    """An engine, and what it did with each number of users."""

    engine: Any
    tok_s: dict[int, list[float]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)  # answered, of each round
    seconds: dict[int, list[float]] = field(default_factory=dict)
    accepted: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by users and prompt


def build(args: argparse.Namespace, drafts: int) -> Side:
    begin = time.monotonic()
    setup = Setup(
        ModelConfig(
            str(resolve(args.model)), args.dtype, args.device, draft=args.draft if drafts else None
        ),
        CacheConfig(memory_bytes=int(args.kv_gib * 2**30), prefix_cache=False),
        SchedulerConfig(max_num_seqs=max(args.users)),
        ExecutionConfig(mtp=drafts),
    )
    side = Side(build_engine(resolve_setup(setup)).engine)
    print(f"engine with {drafts} drafts: built in {time.monotonic() - begin:.1f} s", flush=True)
    return side


def turn(side: Side, prompts: list[list[int]], users: int, args: argparse.Namespace) -> None:
    """Keep so many requests under way for some seconds, then let go of them."""
    sampling = SamplingParams(temperature=0.0, max_tokens=args.output_len)
    numbers = itertools.count()
    running: dict[str, tuple[int, list[int]]] = {}
    done: dict[int, list[int]] = {}
    before, num_tokens = sum(side.engine.stats().num_accepted), 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < args.seconds:
        while len(running) < users:
            number = next(numbers)
            running[str(number)] = number % len(prompts), []
            side.engine.submit(Request(str(number), prompts[number % len(prompts)], sampling))
        for output in side.engine.step():
            num_tokens += len(output.token_ids)
            running[output.request_id][1].extend(output.token_ids)
            if output.finish_reason is not None:
                index, answer = running.pop(output.request_id)
                done[index] = answer
    seconds = time.perf_counter() - begin
    for request_id in running:
        side.engine.abort(request_id)
    while side.engine.has_work():
        side.engine.step()
    side.answers |= {(users, index): answer for index, answer in done.items()}
    after = sum(side.engine.stats().num_accepted)
    for known, value in (
        (side.tok_s, num_tokens / seconds), (side.tokens, num_tokens),
        (side.seconds, seconds), (side.accepted, after - before),
    ):  # fmt: skip
        known.setdefault(users, []).append(value)  # type: ignore[attr-defined]


def report(plain: Side, drafting: Side, users: int) -> dict[str, Any]:
    def rate(side: Side, first: int) -> float:
        return sum(side.tokens[users][first:]) / sum(side.seconds[users][first:])

    later = 1 if len(plain.tok_s[users]) > 1 else 0
    tokens, accepted = sum(drafting.tokens[users]), sum(drafting.accepted[users])
    both = [key for key in plain.answers if key[0] == users and key in drafting.answers]
    different = sum(plain.answers[key] != drafting.answers[key] for key in both)
    return {
        "without": [round(rate, 1) for rate in plain.tok_s[users]],
        "with": [round(rate, 1) for rate in drafting.tok_s[users]],
        "ratio": round(rate(drafting, 0) / rate(plain, 0), 4),
        "ratio_later": round(rate(drafting, later) / rate(plain, later), 4),
        "tokens_per_step": round(tokens / max(1, tokens - accepted), 3),
        "different": f"{different} of {len(both)}",
    }


def read_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft", help="what drafts, as of tokenmill serve; the model's module")
    parser.add_argument("--drafts", type=int, default=3, help="at most")
    parser.add_argument("--users", default="1,8,32")
    parser.add_argument("--kinds", default=",".join(KINDS), help="sets of prompts")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5, help="of a turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-gib", type=float, default=4)
    args = parser.parse_args()
    args.users = [int(number) for number in args.users.split(",")]
    return args


def main() -> None:
    args = read_args()
    prompts = [p.token_ids for kind in args.kinds.split(",") for p in read_prompts(kind)]
    plain, drafting = build(args, 0), build(args, args.drafts)
    found = {}
    for users in args.users:
        for number in range(args.rounds):
            for name, side in (("without", plain), ("with", drafting)):
                turn(side, prompts, users, args)
                rate = side.tok_s[users][-1]
                print(f"{users} users, round {number + 1}, {name}: {rate:.1f} tok/s", flush=True)
        found[str(users)] = report(plain, drafting, users)
        print(f"{users} users: {found[str(users)]}", flush=True)
    print(json.dumps({"device": args.device, "drafts": args.drafts, "users": found}))


if __name__ == "__main__":
    main()

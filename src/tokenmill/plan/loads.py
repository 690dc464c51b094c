"""Kinds of load that tell routers apart: what prompts share, how long they are, how they arrive.

A load is drawn from a seed. Its rate is a share of what the workers could do if each prefix were
computed once, so that a load is as hard on the costs of a GPU as on those of a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.core.mooncake import TraceRequest
from tokenmill.plan.replay import ReplayConfig, StepTiming

BLOCK_TOKENS = 16
BURST = 24  # requests that come at once


@dataclass(frozen=True, slots=True)
class Draft:
    """A request without a time: blocks that others may have too, and blocks of its own."""

    shared: tuple[int, ...]
    num_own_blocks: int
    num_output_tokens: int

    def request(self, number: int, arrival_ms: float) -> TraceRequest:
        own = range(number << 20, (number << 20) + self.num_own_blocks)
        ids = [*self.shared, *own]
        return TraceRequest(arrival_ms, BLOCK_TOKENS * len(ids), self.num_output_tokens, ids)


def _length(rng: random.Random, mean: float, spread: float = 0.5) -> int:
    """A length about a mean, at least 1, by a log-normal distribution."""
    return max(1, round(mean * rng.lognormvariate(-spread * spread / 2, spread)))


def _prefix(number: int, num_tokens: int) -> tuple[int, ...]:
    first = (1 << 50) + (number << 20)
    return tuple(range(first, first + num_tokens // BLOCK_TOKENS))


def _draft(rng: random.Random, shared: tuple[int, ...], own: int, output: int) -> Draft:
    return Draft(shared, _length(rng, own / BLOCK_TOKENS), _length(rng, output))


def system_short(rng: random.Random, num: int) -> list[Draft]:
    """One system prompt of 96 tokens, then 32 of one's own."""
    return [_draft(rng, _prefix(0, 96), 32, 64) for _ in range(num)]


def system_long(rng: random.Random, num: int) -> list[Draft]:
    """One system prompt of 768 tokens, then 64 of one's own."""
    return [_draft(rng, _prefix(0, 768), 64, 64) for _ in range(num)]


def system_huge(rng: random.Random, num: int) -> list[Draft]:
    """One system prompt of 4,096 tokens, then 128 of one's own."""
    return [_draft(rng, _prefix(0, 4096), 128, 64) for _ in range(num)]


def unique(rng: random.Random, num: int) -> list[Draft]:
    """Prompts of 512 tokens that share nothing."""
    return [_draft(rng, (), 512, 64) for _ in range(num)]


def skewed(rng: random.Random, num: int) -> list[Draft]:
    """16 prefixes of 2,048 tokens, one of which has half of the requests."""
    numbers = [0 if rng.random() < 0.5 else rng.randrange(1, 16) for _ in range(num)]
    return [_draft(rng, _prefix(number, 2048), 96, 48) for number in numbers]


def documents(rng: random.Random, num: int) -> list[Draft]:
    """Four questions about each document of 4,096 tokens, of all documents in one order."""
    drafts = [_draft(rng, _prefix(number // 4, 4096), 96, 48) for number in range(num)]
    rng.shuffle(drafts)
    return drafts


def mixed(rng: random.Random, num: int) -> list[Draft]:
    """Prompts of 32 to 2,048 tokens, half of them after a system prompt; answers of 8 to 128."""
    drafts = []
    for _ in range(num):
        which = rng.randrange(6)
        shared = _prefix(which, 64 << which) if rng.random() < 0.5 else ()
        drafts.append(_draft(rng, shared, rng.choice((32, 256, 2048)), rng.choice((8, 32, 128))))
    return drafts


def chats(rng: random.Random, num: int) -> list[Draft]:
    """Chats of up to 8 turns; each asks with all that was said before, some while later."""
    drafts: list[Draft] = []
    waiting: list[tuple[int, int, int]] = []  # (chat, turn, blocks said so far)
    for number in range(num):
        if len(waiting) < 24:
            chat, turn, said = number, 0, 0
        else:
            chat, turn, said = waiting.pop(rng.randrange(12))
        draft = _draft(rng, _prefix(chat, BLOCK_TOKENS * said), 128, 64)
        drafts.append(draft)
        if turn < 7:
            said += draft.num_own_blocks + -(-draft.num_output_tokens // BLOCK_TOKENS)
            waiting.append((chat, turn + 1, said))
    return drafts


KINDS: dict[str, Callable[[random.Random, int], list[Draft]]] = {
    "system-short": system_short,
    "system-long": system_long,
    "system-huge": system_huge,
    "unique": unique,
    "chats": chats,
    "documents": documents,
    "skewed": skewed,
    "mixed": mixed,
    "bursts": system_long,
}


def work_ms(drafts: Sequence[Draft], timing: StepTiming, num_kv_tokens: int) -> float:
    """What a request takes from a worker, in the mean, if no prefix is computed twice."""
    known: set[int] = set()
    total_ms = 0.0
    for draft in drafts:
        new = [block for block in draft.shared if block not in known]
        known.update(new)
        num_prefill = BLOCK_TOKENS * (len(new) + draft.num_own_blocks)
        context = BLOCK_TOKENS * (len(draft.shared) + draft.num_own_blocks)
        kv_ms = timing.decode[1] * context / num_kv_tokens
        total_ms += timing.step_ms(num_prefill, 0, 0.0)
        total_ms += draft.num_output_tokens * (timing.sequence + kv_ms)
    return total_ms / len(drafts)


def make_load(
    kind: str, seed: int, num_requests: int, utilization: float, config: ReplayConfig
) -> list[TraceRequest]:
    """Requests that take this share of the workers' time; bursts come as many at once."""
    rng = random.Random(f"{kind}:{seed}")
    drafts = KINDS[kind](rng, num_requests)
    num_kv_tokens = config.num_blocks * config.block_size
    gap_ms = work_ms(drafts, config.timing, num_kv_tokens) / utilization / config.num_workers
    at_once = BURST if kind == "bursts" else 1
    requests, now_ms = [], 0.0
    for number, draft in enumerate(drafts):
        if number % at_once == 0 and number:
            now_ms += rng.expovariate(1.0) * gap_ms * at_once
        requests.append(draft.request(number, now_ms))
    return requests

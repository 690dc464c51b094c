"""Writes recipes/conversation-trace.jsonl: conversations with the shape of Mooncake's.

In its published trace of conversations (12,031 requests) those of several turns begin with a median
of 6,900 prompt tokens and a mean of 11,500, have 3.1 turns, grow by a median of 455 tokens a turn,
and answers have 343 tokens; all prompts share their first block of 512 tokens.
"""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path
from typing import Any

from tokenmill.bench.results.mooncake import TRACE_BLOCK_TOKENS

FILE = Path(__file__).parent.parent / "recipes" / "conversation-trace.jsonl"
NUM_CONVERSATIONS = 64
FIRST_MEDIAN, FIRST_SIGMA, MOST = 6900, 1.0, 32_000
MORE_TURNS = 0.52  # the chance of another turn after the second
TURN_MEDIAN, ANSWER_MEAN = 120, 343
BEGIN_S, GAP_S = 240, 120  # conversations begin within so many seconds; between two of their turns


def conversation(source: random.Random, fresh: count[int]) -> list[dict[str, Any]]:
    length = min(MOST, max(600, round(source.lognormvariate(0, FIRST_SIGMA) * FIRST_MEDIAN)))
    at_ms, ids = source.uniform(0, BEGIN_S) * 1000, [0]
    turns: list[dict[str, Any]] = []
    while length <= MOST:
        del ids[max(1, (turns[-1]["input_length"] if turns else 1) // TRACE_BLOCK_TOKENS) :]
        ids += [next(fresh) for _ in range(-(-length // TRACE_BLOCK_TOKENS) - len(ids))]
        answer = max(8, round(source.expovariate(1 / ANSWER_MEAN)))
        turns.append(
            {
                "timestamp": round(at_ms),
                "input_length": length,
                "output_length": answer,
                "hash_ids": list(ids),
            }
        )
        if len(turns) > 1 and source.random() > MORE_TURNS:
            break
        at_ms += 1000 * source.expovariate(1 / GAP_S)
        length += answer + max(8, round(source.lognormvariate(0, 1) * TURN_MEDIAN))
    return turns


def main() -> None:
    source, fresh = random.Random(1), count(1)
    turns = [turn for _ in range(NUM_CONVERSATIONS) for turn in conversation(source, fresh)]
    turns.sort(key=lambda turn: turn["timestamp"])
    FILE.write_text("".join(json.dumps(turn) + "\n" for turn in turns), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Reads request traces in Mooncake's format: times, lengths and shared blocks of prompts.

`plan replay` replays a trace in virtual time, `bench endpoint` against a server. Both read it by
the same rules: every field has its type, there are as many hash ids as the prompt has blocks, and
requests are taken in the order of their timestamps, whatever the order of the lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.core.installation import with_recipes
from tokenmill.core.types import TokenmillError

TRACE_BLOCK_TOKENS = 512  # that one hash id of Mooncake's published traces stands for


class TraceError(TokenmillError):
    """A trace cannot be used; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace; equal hash ids stand for equal content after an equal prefix."""

    arrival_ms: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: Sequence[int]

    def prompt(self, block_tokens: int) -> list[int]:
        """Token ids that are shared exactly as the trace's blocks are."""
        tokens: list[int] = []
        for hash_id in self.hash_ids:
            tokens += [hash_id] * block_tokens
        return tokens[: self.num_prompt_tokens]


def read_trace(
    path: str | Path, block_tokens: int, speed: float = 1.0, *, ordered: bool = False
) -> list[TraceRequest]:
    """All requests of a JSONL file by arrival; above 1 `speed` brings them closer together.

    With `ordered` a line that arrives before the one above it is an error.
    """
    try:
        lines = with_recipes(Path(path).expanduser()).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise TraceError(f"--trace {path}: cannot read: {reason}") from None
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_request(json.loads(line), block_tokens, speed))
                if ordered:
                    _check_order(requests)
            except (ValueError, KeyError, TypeError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise TraceError(f"--trace {path}, line {number}: {reason}") from None
    if not requests:
        raise TraceError(f"--trace {path}: no request in it")
    return sorted(requests, key=lambda request: request.arrival_ms)


def _check_order(requests: Sequence[TraceRequest]) -> None:
    last = requests[-1].arrival_ms
    before = requests[-2].arrival_ms if len(requests) > 1 else 0.0
    if last < before:
        raise ValueError(
            f"timestamp {last:g} lies {before - last:g} ms before that of the line above; "
            "sort the lines by timestamp"
        )


def _request(line: object, block_tokens: int, speed: float) -> TraceRequest:
    if not isinstance(line, dict):
        raise TypeError("expected a JSON object")
    first = line["timestamp"]
    if type(first) in (int, float) and first < 0:
        raise ValueError(f"timestamp must be at least 0, got {first!r}; add {-first:g} to all")
    for name in ("timestamp", "input_length", "output_length"):
        least = 0 if name == "timestamp" else 1
        if type(line[name]) not in (int, float) or not least <= line[name] < math.inf:
            raise ValueError(f"{name} must be a positive number, got {line[name]!r}")
    ids, length = line["hash_ids"], int(line["input_length"])
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**62 for i in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    if len(ids) != -(-length // block_tokens):
        raise ValueError(
            f"input_length {length} needs {-(-length // block_tokens)} hash_ids of "
            f"{block_tokens} tokens, got {len(ids)}; see --trace-block-tokens"
        )
    return TraceRequest(line["timestamp"] / speed, length, int(line["output_length"]), ids)

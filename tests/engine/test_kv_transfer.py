"""Prefill in one engine, decode in another: the answer is that of a single engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from driver import Answer, complete
from engine.disaggregated import Floor, build, greedy
from tiny_models import make_model, save

WIDE = {"head_dim": 16, "hidden_size": 64, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", **WIDE)
    for name, parameter in model.named_parameters():
        parameter.data.mul_(0.3)
        if "norm" in name:
            parameter.data.add_(1.0)
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
        ("fp32", {"budget": 48, "connector": "nixl"}, {"connector": "nixl"}),
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
    if prefill.get("connector") == "nixl":
        pytest.importorskip("nixl")
    floor = Floor(build(folder, dtype, **prefill), build(folder, dtype, **decode))
    assert told(floor.complete(prompts(), greedy(logprobs=2))) == single[dtype]
    if prefill.get("budget", 512) < 130:
        assert floor.num_early > 0, "no block moved before its prompt was complete"
    if decode.get("num_blocks", 256) < 20:
        assert floor.decode.stats().num_preemptions > 0
    # Again: with a prefix cache both sides hit, and the decode side reads no full block twice.
    before = floor.decode.stats()
    assert told(floor.complete(prompts(), greedy(logprobs=2))) == single[dtype]
    after = floor.decode.stats()
    if decode.get("prefix_cache", True) and "num_blocks" not in decode:
        moved = after.num_kv_blocks_received - before.num_kv_blocks_received
        assert moved <= len(prompts())  # the last, partial ones
    floor.close()

"""tokenmill bench eplb."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.core.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, Setup
from tokenmill.core.types import Request, SamplingParams, TokenmillError
from tokenmill.settings import SETTINGS, Settings, SettingsError

if TYPE_CHECKING:
    from tokenmill.engine.build import BuiltEngine

PANELS = {"Benchmark": (SETTINGS["eplb-ranks"], SETTINGS["live-ranks"], SETTINGS["json-only"])}
COLUMNS = ("load", "ranks", "slots", "before", "placed", "balanced", "by_node", "place_ms")
PASSES = 3
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 12, 24, 24
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}


class EplbError(TokenmillError):
    """A live run moved no expert, or gave other tokens than one rank."""


def eplb(settings: Settings) -> None:
    """Balance of the experts' load over ranks, before and after experts are copied and moved.

    The first part uses synthetic loads of DeepSeek-R1's shape (58 layers, 256
    experts, 32 redundant ones). It places experts by one window of counted
    tokens and reports the busiest rank over the mean in the next window. The
    second part runs a small random model on ranks of this machine and moves
    experts while it generates; its outputs must be bitwise those of one rank.

    tokenmill bench eplb
    tokenmill bench eplb --eplb-ranks 8,16 --live-ranks 0
    """
    from tokenmill.routing import eplb_study

    live_ranks = settings.get("live-ranks")
    if live_ranks == 1:
        raise SettingsError(
            "--live-ranks must be 0 or at least 2, got 1: experts move between ranks"
        )
    rows = [
        eplb_study.study(skew, eplb_study.Shape(num_ranks))
        for skew in eplb_study.SKEWS
        for num_ranks in settings.get("eplb-ranks")
    ]
    if not settings.get("json-only"):
        cells = [[str(row.get(column, "")) for column in COLUMNS] for row in rows]
        console.print_table([list(COLUMNS), *cells])
        console.out.print(
            "synthetic loads; busiest rank / mean: before, experts in order; placed by load; "
            "balanced, busy ones copied, too; by_node, groups of experts each on one machine"
        )
    live = _live(live_ranks) if live_ranks else None
    if live is not None and not settings.get("json-only"):
        console.out.print(
            f"live, {live['ranks']} ranks: imbalance {live['before']:.3f} -> {live['after']:.3f}, "
            f"{live['moved_bytes'] / 1e6:.2f} MB moved in {live['rebalance_ms']:.0f} ms, "
            "outputs unchanged"
        )
    console.print_json({"benchmark": "eplb", "synthetic": rows, "live": live})


def _live(num_ranks: int) -> dict[str, Any]:
    """A small model whose experts move; the same tokens as one rank's, or an error."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        one = _build(folder, ParallelConfig())
        expected = _generate(one)
        parallel = ParallelConfig(
            ep=num_ranks,
            redundant_experts=num_ranks,
            rebalance_steps=one.engine.stats().num_steps,  # a window is one pass
            rebalance_layers=1,
        )
        many = _build(folder, parallel)
        try:
            return _passes(many, expected, num_ranks)
        finally:
            many.close()


def _passes(built: BuiltEngine, expected: list[Any], num_ranks: int) -> dict[str, Any]:
    before, seconds = 0.0, []
    for number in range(PASSES):
        start = time.perf_counter()
        if _generate(built) != expected:
            raise EplbError(
                f"{num_ranks} ranks and one rank gave different tokens in pass {number}"
            )
        seconds.append(round(time.perf_counter() - start, 3))
        stats = built.engine.stats()
        before = before or stats.rank_imbalance_before
    if not before:
        raise EplbError("no expert was moved, because the load was even")
    return {
        "ranks": num_ranks,
        "experts": TINY["num_experts"],
        "layers": TINY["num_hidden_layers"],
        "before": round(before, 4),
        "after": round(stats.rank_imbalance, 4),
        "rebalances": stats.num_rebalances,
        "moved_bytes": stats.num_expert_bytes_moved,
        "rebalance_ms": round(1e3 * stats.rebalance_s, 2),
        "pass_s": seconds,
        "outputs_unchanged": True,
    }


def _build(folder: str, parallel: ParallelConfig) -> BuiltEngine:
    from tokenmill.engine.build import build_engine
    from tokenmill.engine.choices import resolve_setup

    return build_engine(
        resolve_setup(
            Setup(
                ModelConfig(folder, "fp32", "cpu", random_weights=True, seed=3),
                CacheConfig(num_blocks=128, prefix_cache=False),
                SchedulerConfig(max_num_batched_tokens=64),
                parallel=parallel,
            )
        )
    )


def _generate(built: BuiltEngine) -> list[Any]:
    """Tokens and log-probabilities of prompts of few distinct tokens, so that experts have skew."""
    source = random.Random(0)
    weights = [1 / (token + 1) for token in range(16)]
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    told: dict[str, list[Any]] = {str(number): [] for number in range(NUM_PROMPTS)}
    for request_id in told:
        prompt = source.choices(range(16), weights, k=PROMPT_TOKENS)
        built.engine.submit(Request(request_id, prompt, sampling))
    while built.engine.has_work():
        for output in built.engine.step():
            told[output.request_id] += [output.token_ids, output.logprobs]
    return list(told.values())


COMMANDS = (BenchCommand("eplb", eplb, PANELS),)

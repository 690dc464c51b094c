"""Ranks in virtual time: prices by hand, tokens that add up, and a balance that pays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tokenmill.bench
from tokenmill.__main__ import run
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import Request, SamplingParams, TokenmillError
from tokenmill.models import spec_of
from tokenmill.plan.attention_dp_simulator import Ranks, RanksConfig, prompt_budget
from tokenmill.plan.hardware import find_gpu
from tokenmill.plan.predict.catalog import find_model
from tokenmill.plan.rank_cost import RankCost, RankWork, mean_work
from tokenmill.routing.attention_dp import (
    ContextBalancer,
    ContextPolicy,
    DelayPolicy,
    IntervalPolicy,
    NeverHold,
    Outlook,
)
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler

SHAPE = Path(tokenmill.bench.__path__[0]) / "shapes" / "deepseek-r1.json"
SPEC = spec_of(json.loads(SHAPE.read_text(encoding="utf-8")))
OWN_PARAMS = 61 * 187_105_280 + 58 * (44_040_192 + 7168 * 256) + 3 * 396_361_728
EXPERT_PARAMS = 58 * 44_040_192  # of one expert in every sparse layer


class TokenCost:
    """A millisecond for each token of the fullest rank; keeps all works."""

    def __init__(self) -> None:
        self.works: list[list[RankWork]] = []

    def step_s(self, ranks: Sequence[RankWork]) -> float:
        self.works.append(list(ranks))
        return 1e-3 * max(work.num_tokens for work in ranks)


def small(**fields: Any) -> RanksConfig:
    defaults: dict[str, Any] = {
        "num_ranks": 4,
        "concurrency": 40,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_blocks": 256,
        "block_size": 4,
        "num_steps": 200,
        "num_warmup_steps": 0,
    }
    return RanksConfig(**(defaults | fields))


def test_prices_by_hand() -> None:
    """Of H200, at the rates that were measured: hardware.toml has them."""
    h200 = find_gpu("h200")
    memory, bf16, fp8 = 4.28e12, 798e12, 1479e12
    cost = RankCost(SPEC, h200, num_ranks=8)
    seen = 61 * 256 * 4000  # over all layers
    decode = RankWork(num_tokens=256, num_sampled=128, decode_seen=seen, kv_read=seen)
    linear_s = 2 * 256 * OWN_PARAMS / fp8
    assert linear_s > OWN_PARAMS / memory, "arithmetic takes longer than reading"
    head_s = 129_280 * 7168 * 2 / memory
    assert head_s > 2 * 128 * 129_280 * 7168 / bf16, "and here reading"
    attention_s = max(256 * 4000 * 35_136 / memory, seen * 256 * 1088 / bf16)
    others = 7 * (1 - (7 / 8) ** 8)
    sent_s = 256 * 58 * others * 7168 * 3 / 450e9
    assert cost.own_s(decode) == pytest.approx(linear_s + head_s + attention_s + sent_s)

    chunk = RankWork(100, 100, 1, context_seen=61 * 100 * 101 // 2)
    added = cost.own_s(chunk) - 100 * 58 * others * 7168 * 3 / 450e9
    seen_s = 61 * 5050 * 2 * 128 * (192 + 128) / bf16
    assert added == pytest.approx(OWN_PARAMS / memory + head_s + seen_s), "few rows: reading"

    hit = 256 * (1 - (1 - 8 / 256) ** 2048)
    read_s, compute_s = hit * EXPERT_PARAMS / memory / 8, 2 * 2048 * 8 * EXPERT_PARAMS / fp8 / 8
    assert read_s > compute_s
    assert cost.experts_s(2048) == pytest.approx(read_s + 58 * 49e-6)
    assert cost.step_s([decode] * 7 + [chunk]) == pytest.approx(
        max(cost.own_s(decode), cost.own_s(chunk)) + cost.experts_s(7 * 256 + 100)
    )
    assert cost.own_s(RankWork()) == 0
    weights = OWN_PARAMS + 4 * 129_280 * 7168 + 256 * EXPERT_PARAMS / 8
    assert cost.kv_tokens(512) == int((0.9 * 141 * 2**30 - weights) / 35_136)
    gb200 = RankCost(SPEC, find_gpu("gb200"), 8)
    assert gb200.kv_tokens(512) > cost.kv_tokens(512)
    # Unmeasured, it falls as short of its datasheet as H200: 8 TB/s, and fp4 as fp8.
    reached = find_gpu("gb200").as_reached()
    assert reached.memory_bytes_per_s == pytest.approx(8e12 * 4.28 / 4.8)
    assert reached.peak("fp4") == pytest.approx(10e15 * 1479 / 1979)


def test_windows_bound_what_is_seen_and_kept() -> None:
    """gpt-oss: every other of its 36 layers sees 128 positions."""
    spec = find_model("gpt-oss-120b")
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=4, max_model_len=1024),
        BlockPool(64, 16),
        frozenset(),
    )
    scheduler.add(Request("a", [0] * 400, SamplingParams(max_tokens=8)))
    batch = scheduler.schedule(0)
    work = RankWork.of(batch, spec.layer_windows)
    assert work.context_seen == spec.attended_positions(400)
    assert work.context_seen == 18 * (400 * 401 // 2) + 18 * (128 * 129 // 2 + 272 * 128)
    cost = RankCost(spec, find_gpu("h200"), num_ranks=1)
    position = 2 * 8 * 64  # bytes in fp8
    few, many = (cost.kv_tokens(count) for count in (0, 100))
    assert few - many == pytest.approx(100 * 128, abs=1)  # 18 layers of either kind
    assert few * 18 * position == pytest.approx(0.9 * 141 * 2**30 - _weights(spec), rel=1e-3)


def _weights(spec: ModelSpec) -> float:
    """Experts in fp8 as the ranks have them, embeddings and head in bf16, the rest in fp8."""
    assert spec.moe is not None
    experts = 36 * spec.moe.num_experts * spec.moe.expert_params(spec.hidden_size)
    return sum(spec.step_params(0)) + experts + 4 * spec.vocab_size * spec.hidden_size


def test_mean_work() -> None:
    works = [RankWork(10, 4, 6, 20, 30, 40), RankWork(20, 8, 10, 40, 10, 0)]
    assert mean_work(works) == RankWork(15, 6, 8, 30, 20, 20)


def test_tokens_add_up() -> None:
    """All that was computed is in answers that ended, or in the KV of those that go on."""
    length, output = 20, 30
    cost = TokenCost()

    class Watcher(NeverHold):
        begun = -1

        def hold(self, ranks: Sequence[Outlook]) -> bool:
            if self.begun < 0:
                self.begun = computed()
            return super().hold(ranks)

    def computed() -> int:
        return sum(seq.num_computed_tokens for rank in sim.ranks for seq in rank._queues.running)

    policy = Watcher()
    sim = Ranks([(length, output)], small(), cost, policy)
    report = sim.run()
    works = cost.works[::2]  # beside each is the even one
    stats = [rank.stats() for rank in sim.ranks]
    for rank in sim.ranks:
        rank.schedule(0, hold_context=True)  # drops those that have ended
        rank.check_integrity()
    num_tokens = sum(work.num_tokens for step in works for work in step)
    gone = report["num_finished"] * (length + output - 1)
    assert policy.begun > 0 and report["num_finished"] > 50 and report["num_preemptions"] == 0
    assert computed() + gone - policy.begun == num_tokens
    assert report["num_output_tokens"] == sum(s.num_output_tokens for s in stats)
    prompts = sum(work.num_context_tokens for step in works for work in step)
    assert report["num_context_tokens"] == prompts and len(works) == report["num_steps"] == 200
    assert sum(s.num_running + s.num_waiting for s in stats) + len(sim._queue) == 40
    duration_s = sum(max(work.num_tokens for work in step) for step in works) / 1e3
    assert report["duration_s"] == pytest.approx(duration_s)
    balances = [sum(w.num_tokens for w in s) / 4 / max(w.num_tokens for w in s) for s in works]
    assert report["balance"] == round(sum(balances) / 200, 4)
    assert report["even_tok_s"] > report["output_tok_s"]


@pytest.mark.parametrize(
    "policy",
    [lambda: ContextBalancer(16, 20, 3), lambda: DelayPolicy(20), lambda: IntervalPolicy(8)],
)
def test_holding_prompts_evens_the_ranks(policy: Any) -> None:
    lengths = [(60, 40), (100, 20), (30, 90)]
    config = small(max_num_seqs=16, concurrency=64, max_num_batched_tokens=256, num_blocks=1024)

    def play(policy: ContextPolicy) -> dict[str, Any]:
        return Ranks(lengths, config, TokenCost(), policy).run()

    plain, held = play(NeverHold()), play(policy())
    assert held["balance"] > plain["balance"] + 0.1
    assert held["output_tok_s"] > 1.1 * plain["output_tok_s"]
    assert held["placed_to_first_token_ms"]["mean"] > plain["placed_to_first_token_ms"]["mean"]
    assert held["held_steps"] > 0 == plain["held_steps"]
    assert held == play(policy()), "the same seed gives the same run"


def test_a_small_budget_spreads_prompts() -> None:
    """Eight places, prompts of 30 tokens for answers of 60: four prompt tokens a step."""
    lengths = [(20, 40), (40, 80)]
    assert prompt_budget(lengths, 8, 1.5) == 8 + 6
    plain, spread = (
        Ranks(lengths, small(max_num_batched_tokens=budget), TokenCost(), NeverHold()).run()
        for budget in (64, 14)
    )
    assert spread["balance_by_time"] > plain["balance_by_time"] + 0.1
    assert spread["output_tok_s"] > 1.1 * plain["output_tok_s"]


def test_a_rank_too_small_for_a_request() -> None:
    with pytest.raises(TokenmillError, match="50 tokens does not fit"):
        Ranks([(20, 30)], small(num_blocks=12), TokenCost(), NeverHold())


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_length,output_length\n800,90\n400,60\n", encoding="utf-8")
    flags = ["--lengths", str(lengths), "--max-num-seqs", "8", "--num-steps", "40"]
    line = ["plan", "attention-dp", "--ranks", "4", "--gpu", "gb300", *flags]
    assert run([*line, "--compare-policies"]) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    runs = report["runs"]
    names = ["none", "timeout 50", "timeout 50, batching 10", "every 20th step", "delay 30"]
    names.append("none, 104 tokens a step")
    assert list(runs) == names and all(name in printed for name in names)
    assert report["concurrency"] == 32 and "predicted" in report["time"]
    for name in names[1:-1]:
        assert runs[name]["balance_by_time"] > runs["none"]["balance_by_time"]
    assert run([*line, "--search", "--json-only", "--ttft-limit-ms", "1"]) == 0
    searched = json.loads(capsys.readouterr().out)
    assert searched["search"] == {"ttft_limit_ms": 1, "best": None}
    assert run([*line, "--no-balance", "--json-only", "--seed", "1"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert list(again["runs"]) == ["none"] and again["runs"]["none"] != runs["none"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "2", "--gpu", "h200"], "--ranks 2"),
        (["--concurrency", "3,4"], "--concurrency"),
        (["--gpu", "b100"], "--gpu"),
        (["--lengths", "unknown"], "--lengths unknown"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "attention-dp", *flags]) > 0
    assert message in capsys.readouterr().err

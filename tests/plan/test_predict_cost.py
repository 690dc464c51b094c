"""The planner's parts against formulas written out by hand and against the families' own specs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.models import FAMILIES, spec_of
from tokenmill.plan.hardware import PlanError, find_gpu, load_hardware
from tokenmill.plan.predict.catalog import (
    find_model,
    known_models,
    precisions_of,
    read_dimensions,
)
from tokenmill.plan.predict.efficiencies import find_fit
from tokenmill.plan.predict.finite_run import FiniteRun
from tokenmill.plan.predict.lengths import Lengths, demand_of, represent
from tokenmill.plan.predict.queueing import PromptQueue, waiting_probability
from tokenmill.plan.predict.steady_state import Limit, Station, tokens_per_step
from tokenmill.plan.predict.step_cost import Efficiency, Replica, StepCost, Work

ALL = Efficiency(
    products=1,
    fp4_products=1,
    experts=1,
    attention=1,
    memory=1,
    overlap=0,
    layer_us=0,
    exchange_us=0,
    balance=1,
    load=1,
)


def configs() -> list[Path]:
    paths = known_models().values()
    return [p for p in paths if json.loads(p.read_text())["architectures"][0] in FAMILIES]


@pytest.mark.parametrize("path", configs(), ids=lambda path: path.stem)
def test_dimensions_are_those_of_the_family(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    ours, theirs = read_dimensions(config, str(path)), spec_of(config)
    for spec in (ours, theirs):
        assert spec.seen_flops(decode=True) == theirs.seen_flops(decode=True)
    assert ours.flops_per_token(3000) == theirs.flops_per_token(3000)
    assert ours.step_params(17) == theirs.step_params(17)
    assert ours.kv_bytes_per_token() == theirs.kv_bytes_per_token()
    assert ours.attended_positions(9000) == theirs.attended_positions(9000)


def test_gpt_oss_has_windows_and_its_size() -> None:
    spec = find_model("gpt-oss-120b")
    assert round(spec.num_params() / 1e9, 1) == 116.8
    assert spec.layer_windows[:2] == (128, None)


def llama_cost(efficiency: Efficiency = ALL, **replica: int) -> StepCost:
    spec = find_model("llama3.1-8b")
    types = precisions_of(spec, "bf16")
    return StepCost(spec, find_gpu("h200"), Replica(types, **replica), efficiency)


def test_a_decode_step_by_hand() -> None:
    """64 sequences of 1,000 tokens of Llama-3.1-8B in bf16, everything at its peak."""
    cost = llama_cost()
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    work = Work(64, 64, decode_seen=64 * 32 * 1000, sampled=64)
    parts = cost.parts(work)
    assert parts["linear layers"] == pytest.approx(
        32 * layer * (2 * 64 / 989e12 + 2 / 4.8e12), rel=1e-9
    )
    assert parts["output head"] == pytest.approx(128256 * 4096 * (128 / 989e12 + 2 / 4.8e12))
    assert parts["decode attention"] == pytest.approx(64 * 32 * 1000 * 2 * 8 * 128 * 2 / 4.8e12)
    assert parts["exchange"] == parts["launches"] == parts["prefill attention"] == 0


def test_tensor_parallelism_divides_and_exchanges() -> None:
    one, two = llama_cost(), llama_cost(tensor_parallel=2)
    work = Work(64, 64, decode_seen=64 * 32 * 1000, sampled=64)
    before, after = one.parts(work), two.parts(work)
    for part in ("linear layers", "decode attention", "output head"):
        assert after[part] == pytest.approx(before[part] / 2)
    # Two all-reduces of a layer: each GPU sends 2 (n - 1) / n of 64 rows in bf16 over 450 GB/s.
    assert after["exchange"] == pytest.approx(64 * 32 * 2 * 4096 * 2 / 450e9)


def test_experts_are_read_once_and_padded_to_tiles() -> None:
    spec = find_model("mixtral-8x7b")
    cost = StepCost(spec, find_gpu("h200"), Replica(precisions_of(spec, "fp8")), ALL)
    each = 32 * 3 * 4096 * 14336
    parts = cost.parts(Work(4096, 4096, 0.0))
    flops = 2 * each * (4096 * 2 + 8 * 64)  # two experts a token; half a tile each is empty
    assert parts["routed experts"] == pytest.approx(flops / 1979e12 + 8 * each / 4.8e12)


def test_tokens_go_to_the_ranks_that_have_their_experts() -> None:
    """DeepSeek-R1 on eight ranks: a token has 8 of 256 experts in each of 58 layers."""
    spec = find_model("deepseek-r1")
    cost = StepCost(
        spec, find_gpu("h200"), Replica(precisions_of(spec, "fp8"), attention_dp=8), ALL
    )
    others = 7 * (1 - (7 / 8) ** 8)  # ranks besides its own
    sent = 58 * others * 7168 * (1 + 2)  # there in fp8, back in bf16
    assert cost.parts(Work(2048, 2048, 0.0))["exchange"] == pytest.approx(256 * sent / 450e9)


def test_overlap_hides_the_shorter_of_the_two() -> None:
    work = Work(64, 64, 0.0)
    serial = llama_cost().parts(work)["linear layers"]
    hidden = llama_cost(ALL.scaled()).parts(work)["linear layers"]
    assert serial == hidden
    full = llama_cost(Efficiency(1, 1, 1, 1, 1, 1, 0, 0, 1, 1)).parts(work)["linear layers"]
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    assert full == pytest.approx(32 * layer * 2 / 4.8e12)


def test_memory_that_is_left_for_kv() -> None:
    cost = llama_cost()
    weights = (8_030_261_248 - 65 * 4096) * 2  # all but the norms
    assert cost.weight_bytes == weights
    assert cost.kv_bytes == pytest.approx(0.9 * 141 * 2**30 - weights)


@pytest.mark.parametrize(("servers", "load", "share"), [(1, 0.7, 0.7), (2, 0.5, 1 / 3)])
def test_erlangs_formula(servers: int, load: float, share: float) -> None:
    assert waiting_probability(servers, load) == pytest.approx(share)


def test_the_wait_of_one_server_is_exponential() -> None:
    """M/D/1 by its known approximation: P(W > t) = rho exp(-2 (1 - rho) t / S)."""
    queue = PromptQueue(Lengths("equal", ((1000, 10),)), 0.5, 1000.0, 1)
    wait = queue.percentile_s(0.99) - 1.0
    assert wait == pytest.approx(math.log(50) / 2 / 0.5, rel=1e-3)
    assert PromptQueue(queue.lengths, 1.0, 1000.0, 1).percentile_s(0.99) == math.inf


def test_drafts_gain_until_the_first_wrong_one() -> None:
    assert tokens_per_step(0) == 1
    assert tokens_per_step(3, acceptance=0.5) == 1 + 0.5 + 0.25 + 0.125


def test_representatives_keep_the_distribution() -> None:
    pairs = [(100 + 7 * n % 900, 1 + n * n % 5000) for n in range(5000)]
    few = represent("made up", pairs, 400)
    for ours, all_of_them in (
        (few.mean_input, sum(i for i, _ in pairs) / 5000),
        (few.mean_output, sum(o for _, o in pairs) / 5000),
    ):
        assert ours == pytest.approx(all_of_them, rel=0.03)


def test_demand_sums_over_the_distribution_not_the_mean() -> None:
    spec = find_model("llama3.1-8b")
    demand = demand_of(spec, Lengths("two", ((100, 10), (300, 30))))
    seen = [32 * n * (n + 1) // 2 for n in (100, 300, 110, 330)]
    assert demand.prefill_seen == (seen[0] + seen[1]) / 2
    assert demand.decode_seen == (seen[2] - seen[0] + seen[3] - seen[1]) / 2
    half = demand.without_cached(0.5)
    assert half.input_tokens == 100
    assert half.prefill_seen == 0.75 * demand.prefill_seen


def test_a_run_of_one_request_is_its_steps() -> None:
    cost = llama_cost()
    run = FiniteRun(cost, [(1000, 3)], max_num_seqs=8, budget=1000)
    seen = cost.spec.attended_positions(1000)
    prompt = cost.step_s(Work(0, 0, 0, 1000, seen, 1))
    step = cost.step_s(Work(1, 1, 32 * 1003, sampled=1))
    assert run.run() == pytest.approx(prompt + 2 * step, rel=1e-3)


def test_a_run_that_does_not_fit_at_once_starts_some_over() -> None:
    cost = llama_cost()
    room = int(cost.max_sequences(cost.spec.num_layers))
    few = [(room // 8, room // 16)] * 4
    many = [(room // 8, room // 16)] * 16
    alone = FiniteRun(cost, few, 64, 8192).run()
    assert FiniteRun(cost, many, 64, 8192).run() > 3 * alone
    with pytest.raises(PlanError, match="does not fit"):
        FiniteRun(cost, [(room, 10)], 8, 8192)


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    """gpt-oss holds almost twice the tokens that it would if every layer kept all of them."""
    spec = find_model("gpt-oss-20b")
    full = replace(spec, layer_windows=(None,) * spec.num_layers)
    types = precisions_of(spec, "mxfp4")
    costs = [StepCost(one, find_gpu("h200"), Replica(types), ALL) for one in (spec, full)]
    room = int(costs[1].max_sequences(spec.num_layers))
    longest = (int(1.9 * room) - 10, 10)
    assert FiniteRun(costs[0], [longest], 8, 8192).run() > 0
    with pytest.raises(PlanError, match="does not fit"):
        FiniteRun(costs[1], [longest], 8, 8192)


def test_drafts_cost_a_layer_and_the_head_each() -> None:
    """TensorRT-LLM: a step of DeepSeek-R1 on eight B200 takes 8, 15, 24 % more with 1, 2, 3."""
    spec, efficiency = find_model("deepseek-r1"), find_fit("v6.0").efficiency

    def step_s(depth: int) -> float:
        replica = Replica(precisions_of(spec, "fp4"), tensor_parallel=8, mtp_depth=depth)
        cost = StepCost(spec, find_gpu("b200"), replica, efficiency)
        return cost.step_s(Work(1, 1 + depth, 61 * 1500, sampled=1 + depth))

    for depth, measured in ((1, 0.08), (2, 0.15), (3, 0.24)):
        assert step_s(depth) / step_s(0) - 1 == pytest.approx(measured, rel=0.4)


def test_a_rate_within_limits_is_the_highest() -> None:
    lengths = Lengths("equal", ((1000, 200),))
    station = Station(llama_cost(), demand_of(find_model("llama3.1-8b"), lengths), lengths)
    limit = Limit(0.5, 0.03)
    most = station.within(limit, pooled=1)
    assert most is not None and most.tpot_high_s <= 0.03 and (most.ttft_high_s or 1) <= 0.5
    wider = station.within(Limit(5.0, 0.3), pooled=1)
    assert wider is not None and wider.requests_per_s > most.requests_per_s
    half = station.at_rate(most.requests_per_s / 2, limit, pooled=1)
    assert half is not None and half.tpot_s < most.tpot_s
    assert station.at_rate(most.requests_per_s * 100, limit, pooled=1) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x]\nmemory-gb = 80", r"x\.memory-tb-s: is needed"),
        ("[x]\nmemory-gb = -1", r"x\.memory-gb: expected a positive number, got -1"),
        ("[x]\nmemory = 1", r"x\.memory: no such key; known are memory-gb"),
        ("[x]\nname = 3", r"x\.name: expected a text"),
        ("x = 3", "x: expected a table"),
        ("[x", "cannot be read"),
    ],
)
def test_a_hardware_file_is_checked(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=message) as caught:
        load_hardware(file)
    assert str(file) in str(caught.value)


def test_a_gpu_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    keys = "memory-gb = 96\nmemory-tb-s = 1.6\nbf16-tflops = 250\nnode-gpus = 4\n"
    file.write_text(f"[rtx6000]\n{keys}", encoding="utf-8")
    gpu = find_gpu("RTX6000", file)
    assert gpu.peak("fp4") == 250e12 and gpu.domain_gpus == 4
    with pytest.raises(PlanError, match=r"--gpu b100: not known; known are h100, .*--hardware"):
        find_gpu("b100")

"""The bounds of a workload, computed by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import tokenmill.bench
from tokenmill.bench.commands.throughput import ranks_report
from tokenmill.bench.offline import CellRun, tokens_per_step
from tokenmill.bench.roofline import (
    CellSetup,
    PeakRates,
    min_decode_steps,
    min_weight_bytes,
    roofline,
    step_weight_bytes,
)
from tokenmill.bench.workload import Cell
from tokenmill.core.config import ParallelConfig
from tokenmill.models import spec_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SPEC = spec_of(CONFIG)
# A layer has 8*8*2 + 8*4*2 + 3*8*16 = 576 weights; two of them 1,152, the head 800.
LAYERS, HEAD = 2 * 1152, 2 * 800
SEEN_FLOPS = 4 * 8  # per position and layer
ROOMY = {"max_num_seqs": 1000, "kv_tokens": 10**9}


def test_positions_that_are_attended_to() -> None:
    assert SPEC.attended_positions(0) == 0
    assert SPEC.attended_positions(10) == 2 * 55
    mistral = CONFIG | {"architectures": ["MistralForCausalLM"], "sliding_window": 4}
    windowed = spec_of(mistral)
    assert windowed.attended_positions(3) == 2 * 6
    assert windowed.attended_positions(10) == 2 * (1 + 2 + 3 + 7 * 4)


def test_prefill_is_arithmetic_alone() -> None:
    machine = PeakRates({"fp32": 1e6}, read_bytes_per_s=1e-3, num_threads=1)
    roof = roofline(Cell.equal("p", 3, 10, 1), SPEC, CellSetup("fp32", "fp32", **ROOMY), machine)
    assert roof.flops == 3 * (10 * LAYERS + HEAD + 2 * 55 * SEEN_FLOPS)
    assert roof.serial_s == roof.overlap_s == pytest.approx(roof.flops / 1e6)
    assert roof.bytes_read == roof.num_steps == 0


def test_attention_over_an_fp16_cache_runs_at_the_rate_of_int16() -> None:
    machine = PeakRates({"int8": 4e6, "int16": 2e6}, read_bytes_per_s=1e-3, num_threads=1)
    roof = roofline(Cell.equal("p", 1, 10, 1), SPEC, CellSetup("int8", "fp16", **ROOMY), machine)
    assert roof.serial_s == pytest.approx((10 * LAYERS + HEAD) / 4e6 + 110 * SEEN_FLOPS / 2e6)


def test_decode_of_one_stream_reads_weights_and_cache() -> None:
    # Three steps: 1,952 weights of a byte each, and 11 + 12 + 13 positions of two layers in fp32.
    machine = PeakRates({"int8": 1e30, "fp32": 1e30}, read_bytes_per_s=1e6, num_threads=1)
    roof = roofline(Cell.equal("s", 1, 10, 4), SPEC, CellSetup("int8", "fp32", **ROOMY), machine)
    weights, cache = 3 * 1952, (11 + 12 + 13) * SPEC.kv_bytes_per_token(4)
    assert SPEC.kv_bytes_per_token(4) == 64
    assert roof.num_steps == 3 and roof.bytes_read == pytest.approx(weights + cache)
    assert roof.serial_s == roof.overlap_s == pytest.approx((weights + cache) / 1e6)


def test_drafts_that_came_true_save_steps() -> None:
    """Four decoded tokens, of which two were drafts: two steps read weights and cache."""
    cell = Cell.equal("s", 1, 10, 5)
    gained = tokens_per_step(cell, [CellRun(1.0, num_accepted=2), CellRun(1.0, num_accepted=2)])
    assert gained == 2.0 and tokens_per_step(cell, [CellRun(1.0)]) == 1.0
    machine = PeakRates({"int8": 1e30, "fp32": 1e30}, read_bytes_per_s=1e6, num_threads=1)
    plain, drafted = (
        roofline(cell, SPEC, CellSetup("int8", "fp32", **ROOMY, tokens_per_step=each), machine)
        for each in (1.0, gained)
    )
    assert (plain.num_steps, drafted.num_steps) == (4, 2) and plain.flops == drafted.flops
    assert plain.serial_s == pytest.approx(2 * drafted.serial_s)


def test_serial_takes_the_longer_of_each_kind_and_overlap_of_the_sums() -> None:
    cell = Cell("m", ((10, 4), (6, 2)))
    machine = PeakRates({"bf16": 1e6, "fp8": 2e6}, read_bytes_per_s=1e6, num_threads=1)
    roof = roofline(cell, SPEC, CellSetup("fp8", "bf16", **ROOMY), machine)
    seen = 2 * (11 + 12 + 13 + 7)
    prefill_s = 16 * LAYERS / 2e6 + 2 * HEAD / 1e6 + 2 * (55 + 21) * SEEN_FLOPS / 1e6
    linear_s, weights_s = 4 * (LAYERS / 2e6 + HEAD / 1e6), 3 * (1152 + 800 * 2) / 1e6
    attention_s, cache_s = seen * SEEN_FLOPS / 1e6, seen * 2 * 4 * 2 / 1e6
    assert linear_s > weights_s and attention_s > cache_s
    assert roof.serial_s == roof.overlap_s == pytest.approx(prefill_s + linear_s + attention_s)
    slow = PeakRates(machine.gemm_flops, read_bytes_per_s=3e5, num_threads=1)
    weights_s, cache_s = weights_s / 0.3, cache_s / 0.3
    assert linear_s < weights_s and attention_s < cache_s
    roof = roofline(cell, SPEC, CellSetup("fp8", "bf16", **ROOMY), slow)
    assert roof.serial_s == pytest.approx(prefill_s + weights_s + cache_s)
    assert roof.overlap_s == pytest.approx(
        max(prefill_s + linear_s + attention_s, weights_s + cache_s)
    )
    assert roof.overlap_s < roof.serial_s


def test_fewest_decode_steps() -> None:
    cell = Cell("m", ((10, 4), (6, 2)))
    assert min_decode_steps(cell, SPEC, 1000, 10**9) == 3  # the longest output
    assert min_decode_steps(cell, SPEC, 1, 10**9) == 4  # one after the other
    assert min_decode_steps(cell, SPEC, 1000, 13) == pytest.approx(max(3, (11 + 12 + 13 + 7) / 13))
    half = replace(SPEC, num_layers=2, layer_windows=(None, 5))
    held = (11 + 12 + 13 + 7 + 4 * 5) / 2
    assert min_decode_steps(cell, half, 1000, 7) == pytest.approx(held / 7)


def test_bytes_of_the_weights_by_type() -> None:
    sizes = {dtype: step_weight_bytes(SPEC, dtype, 7) for dtype in ("fp32", "bf16", "int8", "fp8")}
    assert sizes == {"fp32": 4 * 1952, "bf16": 2 * 1952, "int8": 1952, "fp8": 1152 + 2 * 800}


def test_a_rate_that_was_not_measured_is_the_best_of_the_others() -> None:
    assert PeakRates({"bf16": 2.0}, 1.0, 1).flops_per_s("fp8") == 2.0
    assert PeakRates({"bf16": 2.0, "fp8": 3.0}, 1.0, 1).flops_per_s("bf16") == 2.0


def test_shipped_shapes_have_their_published_sizes() -> None:
    folder = Path(tokenmill.bench.__file__).parent / "shapes"
    specs = {f.stem: spec_of(json.loads(f.read_text())) for f in folder.iterdir()}
    billions = {name: round(spec.num_params() / 1e9, 2) for name, spec in specs.items()}
    assert billions == {
        "llama3.1-8b": 8.03,
        "smollm2": 0.13,
        "qwen3-0.6b": 0.6,
        "qwen3-14b": 14.77,
        "qwen3-30b-a3b": 30.53,
        "qwen3-235b-a22b": 235.09,
        "qwen3-vl-30b-a3b": 31.07,  # with the vision encoder
        "qwen3-vl-235b-a22b": 235.67,
        "llama2-70b": 68.98,
        "llama3.1-405b": 405.85,
        "mixtral-8x7b": 46.7,
        "gpt-oss-20b": 20.91,
        "gpt-oss-120b": 116.83,
        "deepseek-r1": 671.03,
        "deepseek-r1-rank": 37.45,  # 8 of 256 experts, without the MTP layer
    }
    assert specs["llama3.1-8b"].kv_bytes_per_token(2) == 128 * 1024
    assert specs["deepseek-r1"].kv_bytes_per_token(2) == 61 * (512 + 64) * 2


MOE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 6,
    "mlp_only_layers": [0],
    "head_dim": 4,
}


def test_a_step_reads_the_experts_that_its_tokens_hit() -> None:
    """Attention 192 a layer, one dense MLP 384, a router 32, experts of 3 * 8 * 6 = 144."""
    spec = spec_of(MOE)
    assert spec.flops_per_token(0) == 2 * (2 * 192 + 384 + 32 + 144 + 800)
    for tokens, experts in ((1, 1.0), (2, 1.75), (3, 4 * (1 - 0.75**3)), (1000, 4.0)):
        rounded, plain = 2 * 192 + 384 + experts * 144, 32 + 800
        assert step_weight_bytes(spec, "bf16", tokens) == pytest.approx(2 * (rounded + plain))
        assert step_weight_bytes(spec, "fp8", tokens) == pytest.approx(rounded + 2 * plain)
    cell = Cell.equal("m", 3, 10, 5)  # four decode steps of three tokens
    machine = PeakRates({"bf16": 1e30}, read_bytes_per_s=1.0, num_threads=1)
    roof = roofline(cell, spec, CellSetup("bf16", "bf16", **ROOMY), machine)
    cache = 3 * (11 + 12 + 13 + 14) * spec.kv_bytes_per_token(2)
    assert roof.bytes_read == pytest.approx(4 * step_weight_bytes(spec, "bf16", 3) + cache)


def test_no_schedule_reads_fewer_weights_than_the_bound() -> None:
    """Requests of very different lengths, in order of arrival, so many at a time as may run."""
    spec, source = spec_of(MOE), random.Random(3)
    for _ in range(50):
        lens = [1 + int(source.expovariate(0.2)) for _ in range(source.randrange(1, 20))]
        cell = Cell("m", tuple((5, length) for length in lens))
        setup = CellSetup("bf16", "bf16", source.randrange(1, 25), 10**9)
        waiting, running, read, steps = [length - 1 for length in lens], [], 0.0, 0
        while waiting or running:
            while waiting and len(running) < setup.max_num_seqs:
                running.append(waiting.pop(0))
            running = [left for left in running if left]
            read += step_weight_bytes(spec, "bf16", len(running)) if running else 0.0
            steps, running = steps + 1, [left - 1 for left in running]
        fewest = min_decode_steps(cell, spec, setup.max_num_seqs, setup.kv_tokens)
        assert fewest <= steps
        assert min_weight_bytes(cell, spec, setup, fewest) <= read * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "batch", "weights_gb", "cache_gb"),
    [
        ("gpt-oss-120b", 1, 5.00, 0.04),
        ("gpt-oss-120b", 4, 10.36, 0.17),
        ("gpt-oss-120b", 64, 56.03, 2.72),
        ("gpt-oss-120b", 256, 63.99, 10.87),
        ("gpt-oss-20b", 1, 3.71, 0.03),
        ("gpt-oss-20b", 64, 12.59, 1.81),
    ],
)
def test_a_step_of_gpt_oss(name: str, batch: int, weights_gb: float, cache_gb: float) -> None:
    """Experts of 4.25 bits, and windows: what others count for a context of 1,024 tokens."""
    folder = Path(tokenmill.bench.__file__).parent / "shapes"
    spec = spec_of(json.loads((folder / f"{name}.json").read_text()))
    assert step_weight_bytes(spec, "bf16", batch) / 1e9 == pytest.approx(weights_gb, abs=0.01)
    # The second token of an answer to 1,023 tokens sees 1,024, or 128 in every second layer.
    cell, machine = Cell.equal("d", batch, 1023, 2), PeakRates({"bf16": 1e30}, 1.0, 1)
    roof = roofline(cell, spec, CellSetup("bf16", "bf16", **ROOMY), machine)
    cache = roof.bytes_read - step_weight_bytes(spec, "bf16", batch)
    assert cache / 1e9 == pytest.approx(cache_gb, abs=0.01)
    entry = 2 * 8 * 64 * 2 * spec.num_layers / 2  # of one token in half of the layers
    assert cache == pytest.approx(batch * entry * (1024 + 128))


def test_experts_in_mxfp4_are_multiplied_in_bf16() -> None:
    folder = Path(tokenmill.bench.__file__).parent / "shapes"
    spec = spec_of(json.loads((folder / "gpt-oss-20b.json").read_text()))
    machine = PeakRates({"bf16": 1e12, "fp8": 2e12, "int8": 4e12}, 1.0, 1)
    experts, head = 2 * 24 * 4 * 3 * 2880 * 2880, 2 * 201_088 * 2880
    others = spec.flops_per_token(0) - head - experts
    cell = Cell.equal("p", 1, 1, 1)
    for dtype, seconds in (
        ("bf16", (others + experts + head) / 1e12),
        ("fp8", others / 2e12 + (experts + head) / 1e12),
        ("int8", (others + experts + head) / 4e12),  # on CPU they are weights as all others
    ):
        roof = roofline(cell, spec, CellSetup(dtype, dtype, **ROOMY), machine)
        assert roof.serial_s == pytest.approx(seconds, rel=1e-4)
    assert step_weight_bytes(spec, "int8", 1e9) == pytest.approx(spec.num_params() - head / 2, 1e-2)


def test_latent_attention_unpacks_a_prompt_once_and_the_cache_never() -> None:
    folder = Path(tokenmill.bench.__file__).parent / "shapes"
    spec = spec_of(json.loads((folder / "deepseek-r1.json").read_text()))
    assert spec.seen_flops(decode=True) == 2 * 128 * (576 + 512)
    assert spec.seen_flops(decode=False) == 2 * 128 * (192 + 128)
    assert spec.mla is not None and spec.softmax_scale == pytest.approx(0.135234, abs=1e-6)
    plain = spec.step_params(1).plain
    assert plain == 61 * 512 * 128 * 256 + 58 * 7168 * 256


def test_figures_of_ranks_say_so_and_have_the_ceiling_of_all() -> None:
    two = PeakRates({"bf16": 3.0}, 5.0, 1).times(2)
    assert two == PeakRates({"bf16": 6.0}, 10.0, 1)
    assert ranks_report(ParallelConfig()) == {"count": 1}
    found = ranks_report(ParallelConfig(ep=2, attention_dp=True))
    assert found == {"count": 2, "ep": 2, "attention_dp": True}

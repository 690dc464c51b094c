"""Parts of a decode step, and their ceilings."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.decode import BENCHMARK, by_part, least_seconds, part_of
from benchmarks.harness import SHAPES
from tiny_configs import write_config
from tokenmill.bench.roofline import PeakRates
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import TokenmillError
from tokenmill.models import spec_of

H200 = PeakRates({"bf16": 790e12, "fp8": 1480e12}, 4.2e12, 1)


def spec(name: str) -> ModelSpec:
    return spec_of(json.loads((SHAPES / f"{name}.json").read_text()))


def test_kernels_belong_to_parts() -> None:
    assert part_of("_latent_kernel") == "attention"
    assert part_of("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT") == "linear"
    found = by_part(
        {
            "_grouped_kernel": 1.5,
            "grouped_kernel": 0.5,
            "_rms_norm_kernel": 1.0,
            "_route_kernel": 0.5,
        }
    )
    assert found == {"attention": 0.0, "experts": 2.0, "linear": 0.0, "other": 1.5}


def test_every_kernel_of_ours_has_its_part() -> None:
    """Those without a ceiling of their own, to be told from a new one that nobody has placed."""
    others = {"bidirectional", "embedding", "hstu"}  # no decode step's
    others |= {"blocks", "modulation", "segments"}
    files = [f for f in (SHAPES.parents[1] / "kernels/gpu").rglob("*.py") if f.stem not in others]
    names = {n for f in files for n in re.findall(r"^def (\w*_kernel)\(", f.read_text(), re.M)}
    small = {"_rms_norm", "_norm_pair", "_act_and_mul", "_quantize", "_rope", "_cache", "_place"}
    small |= {"_spread", "_route", "_rank", "_sort", "_sum", "_accept", "_advance", "_layer_norm"}
    sampling = {"_chunk_best", "_argmax", "_survey", "_collect", "_threshold", "_chunk_sum"}
    sampling |= {"_draw", "_penalise", "_bias", "_mask"}
    found = {name.removesuffix("_kernel") for name in names if part_of(name) == "other"}
    assert found == small | sampling
    assert part_of("void gemv2T_kernel_val<int, int, __nv_bfloat16>") == "linear"


def test_least_time_of_one_rank() -> None:
    """Latent attention of 128 heads is bound by arithmetic, experts of a small batch by reading."""
    rank = spec("deepseek-r1-rank")
    least = least_seconds(rank, "fp8", "bf16", 32, 4096, H200)
    positions = 32 * 4097 * 61
    assert least["attention"] == pytest.approx(positions * 128 * 2 * (576 + 512) / 790e12)
    assert least["experts"] == pytest.approx(58 * 8 * 3 * 7168 * 2048 / 4.2e12)
    twice = least_seconds(rank, "fp8", "bf16", 64, 4096, H200)
    assert twice["attention"] == pytest.approx(2 * least["attention"])
    oss = least_seconds(spec("gpt-oss-120b"), "bf16", "bf16", 1, 1023, H200)
    assert oss["experts"] == pytest.approx(36 * 4 * 3 * 2880 * 2880 * 17 / 32 / 4.2e12)
    assert oss["attention"] == pytest.approx(18 * (1024 + 128) * 2 * 8 * 64 * 2 / 4.2e12)
    dense = least_seconds(spec("llama3.1-8b"), "bf16", "bf16", 1, 1024, H200)
    assert dense["experts"] == 0
    assert dense["linear"] == pytest.approx(7.5e9 * 2 / 4.2e12, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--context 50000", "--context 50000: the model's context is 256"),
        ("--context 64 --fusions", "--fusions needs a GPU"),
        ("--context 64 --kv-cache-memory 16KB", "the KV cache holds"),
        ("--mtp 2", "unrecognized arguments: --mtp 2"),
    ],
)
def test_wrong_input(flags: str, says: str, tmp_path: Path) -> None:
    model = ["--model", str(write_config(tmp_path)), "--random-weights", "--batch", "2"]
    with pytest.raises(TokenmillError, match=says):
        BENCHMARK.call([*model, *flags.split()])

"""bench decode: parts of a step, their ceilings, and the command on CPU."""

import json
import re
from pathlib import Path

import pytest

from tokenmill.__main__ import run as run_command
from tokenmill.bench.commands.decode import by_part, least_seconds, part_of
from tokenmill.bench.roofline import Machine
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.models import spec_of

SHAPES = Path(__file__).parents[3] / "src/tokenmill/bench/shapes"
H200 = Machine({"bf16": 790e12, "fp8": 1480e12}, 4.2e12, 1)


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
    sampling |= {"_draw", "_penalise", "_bias"}
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


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = run_command(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = json.loads((SHAPES / "qwen3-0.6b.json").read_text())
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config | small | heads))
    return str(tmp_path)


def test_command_on_cpu(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", folder, "--random-weights", "--decode-batch", "1,4", "--context", "40"]
    status, out, _ = run(["bench", "decode", *flags], capsys)
    report = json.loads(out.splitlines()[-1])
    assert status == 0 and [row["batch"] for row in report["steps"]] == [1, 4]
    for row in report["steps"]:
        assert 0 < row["share_of_ceiling"] < 1 and row["parts_ms"] == {}
        assert row["tok_s"] == pytest.approx(row["batch"] / row["ms"] * 1e3, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--context", "50000"], "--context 50000: the model's context is 40960"),
        (["--context", "64", "--fusions"], "--fusions"),
        (["--context", "64", "--kv-cache-memory", "32KB"], "the KV cache holds"),
        (["--decode-batch", "0"], "decode-batch"),
        (["--mtp", "2"], "No such option: --mtp"),
    ],
)
def test_wrong_input(
    folder: str, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", folder, "--random-weights", *flags]
    if "--decode-batch" not in flags:
        flags += ["--decode-batch", "2"]
    status, out, err = run(["bench", "decode", *flags], capsys)
    assert status != 0 and out == "" and says in err and "Measuring" not in err

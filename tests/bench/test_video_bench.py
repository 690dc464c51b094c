"""bench video: figures by hand, and the command on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tokenmill.__main__ import run
from tokenmill.bench.commands.video import _params, figures, least_seconds
from tokenmill.bench.roofline import PeakRates
from tokenmill.core.requests import Request
from tokenmill.core.specs.wan import A14B
from tokenmill.core.tasks import Video
from tokenmill.core.video import VideoParams
from tokenmill.models.wan.wan_vae import LatentTiles, VideoDecoder

TINY = ("--random-weights", "--model", "wan-tiny", "--size", "32x16", "--frames", "5")
FAST = PeakRates(gemm_flops={"bf16": 1e15, "fp8": 2e15}, read_bytes_per_s=1e13, num_threads=1)
JOB = Request("a", Video([1] * 512, VideoParams(negative_token_ids=(1,) * 512)))


def test_the_flops_of_a_video_of_mlperf() -> None:
    grid = A14B.grid(81, 720, 1280)
    tokens = A14B.transformer.num_tokens(grid)
    assert (grid, tokens) == ((21, 90, 160), 75_600)
    # 2 S L (6 D^2 + 2 D F) and 4 S (S + 512) D L, with D 5120, F 13824 and L 40.
    assert A14B.transformer.linear_flops(tokens) == 2 * 75_600 * 40 * 298_844_160
    assert A14B.transformer.attention_flops(tokens) == 4 * 75_600 * 76_112 * 5120 * 40
    assert A14B.step_flops(grid) == pytest.approx(2 * 6.521e15, rel=1e-3)
    assert A14B.vae.decode_flops(grid) == pytest.approx(0.64e15, rel=0.02)
    assert A14B.text.flops(512) == pytest.approx(4.84e12, rel=1e-3)


def test_the_least_time_counts_each_part_at_its_own_rate() -> None:
    least = least_seconds(A14B, JOB, "bf16", FAST)
    assert least["denoise"] == pytest.approx(260.8, rel=1e-3)
    assert least["text"] == pytest.approx(2 * 0.00484, rel=1e-3)
    faster = least_seconds(A14B, JOB, "fp8", FAST)
    assert least["denoise"] - faster["denoise"] == pytest.approx(0.5 * 40 * 1.8075, rel=1e-3)
    for rounding, share in (("int8", 0.75), ("int8-fp8", 0.5), ("fp8", 0.5)):
        job = Request("a", Video([1] * 512, replace(_params(JOB), attention_dtype=rounding)))
        rounded = least_seconds(A14B, job, "fp8", FAST)["denoise"]
        linears = 0.5 * 40 * 1.8075
        assert rounded == pytest.approx(linears + share * (faster["denoise"] - linears), rel=1e-3)
    found = figures(A14B, JOB, "bf16", FAST, {"text": 0.1, "denoise": 521.6, "decode": 0.3})
    assert found["s_per_video"] == 522.0
    assert found["tflop_s"] == pytest.approx(500, rel=1e-3)
    assert found["share_of_ceiling"] == pytest.approx(0.501, abs=0.001)


@pytest.mark.parametrize("measured", [(), ("--measured-steps", "1", "--offload")])
def test_the_command_prints_one_json_line(
    measured: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "video", *TINY, "--steps", "3", "--gpu-price", "36", *measured]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    told = printed.err.split("Measuring\n")[-1]  # as it went: a run may be cut off
    assert told.count("of 3: ") == report["measured_steps"] and told.count("decode: ") == 1
    assert report["whole_videos"] is not bool(measured)
    assert report["measured_steps"] == (1 if measured else 3)
    assert report["s_per_video"] == pytest.approx(sum(report["parts_s"].values()), abs=0.01)
    assert report["usd_per_video"] == pytest.approx(0.01 * report["s_per_video"], abs=1e-5)
    assert (report["parts_s"]["load"] > 0) is bool(measured)
    assert report["exact"] is True and report["branches"] == 2


def test_tiles_are_measured_and_not_called_exact(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[LatentTiles | None] = []
    frames = VideoDecoder.frames

    def recorded(
        self: VideoDecoder, latents: torch.Tensor, tiles: LatentTiles | None = None
    ) -> Iterator[torch.Tensor]:
        seen.append(tiles)
        return frames(self, latents, tiles)

    monkeypatch.setattr(VideoDecoder, "frames", recorded)
    tiled = ("--steps", "2", "--measured-steps", "1", "--vae-tiles")
    assert run(["bench", "video", *TINY, *tiled]) == 0
    assert seen == [LatentTiles(), LatentTiles()]  # of the warm-up and of the video
    printed = capsys.readouterr().out
    assert "not exact, by --vae-tiles" in printed
    assert json.loads(printed.splitlines()[-1])["exact"] is False

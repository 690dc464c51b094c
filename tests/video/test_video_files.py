"""Folders of diffusers pipelines in, files of videos out, and the command between them."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import UMT5Config, UMT5EncoderModel

from tokenmill.__main__ import run
from tokenmill.core.requests import Request
from tokenmill.core.specs.wan import TINY
from tokenmill.core.tasks import Video, VideoFrames
from tokenmill.core.types import ModelLoadError, TokenmillError
from tokenmill.core.video import VideoParams, byte_token_ids, clean_prompt
from tokenmill.models.checkpoints.diffusers_folder import WanCheckpoint, open_wan
from tokenmill.video.pipeline import build_pipeline
from tokenmill.video.video_engine import VideoEngine
from tokenmill.video.video_files import check_target, write_video

TINY_JOB = ("--random-weights", "--model", "wan-tiny", "--size", "32x16", "--frames", "5")


@pytest.fixture(scope="module")
def diffusers_pipeline() -> WanPipeline:
    torch.manual_seed(0)
    shape, text, vae = TINY.transformer, TINY.text, TINY.vae
    experts = [
        WanTransformer3DModel(
            num_attention_heads=shape.num_heads,
            attention_head_dim=shape.head_dim,
            text_dim=shape.text_dim,
            freq_dim=shape.freq_dim,
            ffn_dim=shape.ffn_dim,
            num_layers=shape.num_layers,
        ).eval()
        for _ in range(2)
    ]
    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=text.vocab_size,
            d_model=text.hidden_size,
            d_kv=text.head_dim,
            d_ff=text.ffn_dim,
            num_layers=text.num_layers,
            num_heads=text.num_heads,
        )
    ).eval()
    decoder = AutoencoderKLWan(
        base_dim=vae.base_dim, dim_mult=list(vae.dim_mult), num_res_blocks=vae.num_res_blocks
    ).eval()
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    made = WanPipeline(None, encoder, decoder, scheduler, *experts, boundary_ratio=0.9)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(diffusers_pipeline: WanPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wan")
    for part in ("transformer", "transformer_2", "vae", "text_encoder", "scheduler"):
        limit = {"max_shard_size": "20kB"} if part == "transformer" else {}
        getattr(diffusers_pipeline, part).save_pretrained(target / part, **limit)
    parts = {part: ["diffusers", "x"] for part in ("transformer", "transformer_2", "vae")}
    index = parts | {"boundary_ratio": 0.9, "_class_name": "WanPipeline"}
    (target / "model_index.json").write_text(json.dumps(index))
    return target


@torch.inference_mode()
def test_a_folder_gives_the_frames_of_diffusers(
    folder: Path, diffusers_pipeline: WanPipeline
) -> None:
    checkpoint = open_wan(folder)
    assert (checkpoint.spec.flow_shift, checkpoint.spec.boundary_ratio) == (5.0, 0.9)
    assert not [name for name in checkpoint.parts["vae"] if name.startswith("encoder")]
    read: list[tuple[int, int]] = []
    pipeline = build_pipeline(
        checkpoint, torch.device("cpu"), "fp32", progress=lambda *now: read.append(now)
    )
    assert read[-1][0] == read[-1][1] == checkpoint.num_bytes  # each tensor was read once
    params = VideoParams(
        size=(48, 32),
        num_frames=5,
        num_steps=6,
        schedule="diffusers",
        negative_token_ids=(1, 2, 3, 4),
    )
    engine = VideoEngine(pipeline)
    engine.submit(Request("a", Video([7, 8, 9], params)))
    outputs = [output for _ in range(8) for output in engine.step()]
    made = outputs[-1].delta
    assert made is not None
    text = pipeline.encode([[7, 8, 9], [1, 2, 3, 4]])
    expected = diffusers_pipeline(
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=6,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        latents=torch.randn(16, 2, 4, 6, generator=torch.Generator().manual_seed(42))[None],
        prompt_embeds=text[:1],
        negative_prompt_embeds=text[1:],
        output_type="np",
    ).frames[0]
    pixels = np.frombuffer(made.data, np.uint8).reshape(expected.shape)
    assert np.abs(pixels - expected * 255).max() < 0.51  # rounded, and no more


def test_broken_folders_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"model_index\.json: no such file"):
        open_wan(tmp_path)
    for part in folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "vae").unlink()
    (tmp_path / "vae").mkdir()
    config = json.loads((folder / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config | {"z_dim": 0}))
    with pytest.raises(ModelLoadError, match=r"vae/config\.json: z_dim: expected a positive int"):
        open_wan(tmp_path)
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"no diffusion_pytorch_model\.safetensors or"):
        open_wan(tmp_path)
    config["num_res_blocks"] = 2
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config))
    weights = "diffusion_pytorch_model.safetensors"
    (tmp_path / "vae" / weights).symlink_to(folder / "vae" / weights)
    with pytest.raises(ModelLoadError, match=r"tensors are missing: decoder\.up_blocks\.0\.resn"):
        open_wan(tmp_path)


SCHEDULER = "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("file", "changes", "says"),
    [
        ("model_index.json", {"_class_name": "WanVACEPipeline"}, "only 'WanPipeline' is supported"),
        (
            "transformer/config.json",
            {"_class_name": "WanVACETransformer3DModel"},
            "only 'WanTransformer3DModel' is supported",
        ),
        (
            SCHEDULER,
            {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0},
            "_class_name: only 'UniPCMultistepScheduler' is supported",
        ),
        (SCHEDULER, {"prediction_type": "epsilon"}, "only 'flow_prediction' is supported"),
        (SCHEDULER, {"flow_shift": "five"}, "flow_shift: expected a positive number, got 'five'"),
    ],
)
def test_pipelines_that_would_run_as_another_are_refused(
    folder: Path, tmp_path: Path, file: str, changes: dict[str, object], says: str
) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "wan"))
    config = json.loads((copied / file).read_text())
    (copied / file).write_text(json.dumps(config | changes))
    with pytest.raises(ModelLoadError, match=f"{file}: .*{says}"):
        open_wan(copied)


def test_tensors_of_an_expert_that_would_not_be_used_are_named(
    folder: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "wan"))
    weights = copied / "transformer_2" / "diffusion_pytorch_model.safetensors"
    more = {"vace_blocks.0.proj_in.weight": torch.zeros(2, 2)}
    save_file(load_file(weights) | more, weights)
    with pytest.raises(ModelLoadError, match=r"1 tensors are not of .*: vace_blocks\.0\.proj_in"):
        open_wan(copied)


def test_mp4_and_png_hold_the_frames(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 32, dtype=np.uint8)
    pixels = np.stack([np.full((16, 32, 3), ramp[:, None]) // (n + 1) for n in range(6)])
    video = VideoFrames(32, 16, 8, 6, pixels.tobytes())
    write_video(video, tmp_path / "frames")
    found = [np.asarray(Image.open(file)) for file in sorted((tmp_path / "frames").iterdir())]
    assert np.array_equal(np.stack(found), pixels)
    write_video(video, tmp_path / "video.mp4")
    with av.open(str(tmp_path / "video.mp4")) as container:
        assert container.streams.video[0].average_rate == 8
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.abs(np.stack(frames).astype(int) - pixels).mean() < 12  # H.264 loses some


def test_frames_are_written_without_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)  # as where it is not installed
    video = VideoFrames(32, 16, 8, 2, bytes(range(256)) * 12)
    check_target(tmp_path / "frames")
    write_video(video, tmp_path / "frames")
    second = np.asarray(Image.open(tmp_path / "frames" / "frame-0002.png"))
    assert second.tobytes() == video.frame(1)
    with pytest.raises(TokenmillError, match=r"need PyAV: pip install 'av.*, or"):
        check_target(tmp_path / "fox.mp4")


def test_a_target_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "frames", tmp_path / "fox.mp4"
    file.write_text("")
    folder.mkdir()
    for target, says in (
        (file, "frames is a file"),
        (file / "deep" / "er", "frames is a file"),
        (folder, "fox.mp4: is a folder"),
    ):
        with pytest.raises(TokenmillError, match=says):
            check_target(target)
    (tmp_path / "old.mp4").write_text("")
    good = [tmp_path / "new.mp4", tmp_path / "old.mp4", tmp_path / "new" / "er", tmp_path]
    for target in good:
        check_target(target)
    monkeypatch.chdir(tmp_path)
    check_target(Path("new.mp4"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # as it is for a folder of another user
    for target in good:
        with pytest.raises(TokenmillError, match="no permission to write to"):
            check_target(target)


def test_the_command_makes_a_clip_of_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "fox.mp4"
    assert run(["video", "a red fox", "--out", str(target), "--steps", "2", *TINY_JOB]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(target) and "will be noise" in captured.err
    with av.open(str(target)) as container:
        assert len(list(container.decode(video=0))) == 5
    folder = str(tmp_path / "frames")
    flags = ["--out", folder, "--json", "--steps", "2", "--offload"]
    assert run(["video", "x", *flags, *TINY_JOB]) == 0
    captured = capsys.readouterr()
    assert re.search(r"16, 2 steps, .* s \(.*load \d+\.\d", captured.err)  # what it costs
    report = json.loads(captured.out)
    assert report["offload"] and report["exact"] and report["seconds"]["load"] > 0.0
    assert (report["file"], report["size"], report["num_frames"]) == (folder, "32x16", 5)
    assert len(list(Path(folder).iterdir())) == 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["", *TINY_JOB], "PROMPT is empty"),
        (["x", *TINY_JOB, "--out", "fox.gif"], "fox.gif: give a name that ends in .mp4"),
        (["x", *TINY_JOB, "--out", "nowhere/fox.mp4"], "there is no folder nowhere"),
        (["x", *TINY_JOB, "--frames", "6"], "num_frames must be 4 n + 1"),
        (["x", *TINY_JOB, "--dtype", "int8"], "--dtype int8"),
        (["x", "--random-weights"], "one of wan2.2-t2v-a14b, wan-tiny"),
        (["x", "--model", "nowhere"], "no such folder"),
    ],
)
def test_wrong_commands_say_what_to_type(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["video", *arguments]) != 0
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["video", "x", "--frames", "80"], "num_frames must be 4 n + 1"),
        (["video", "x", "--size", "1000x700"], "got 1000x700"),
        (["video", "x", "--latent", "nowhere.pt"], "nowhere.pt cannot be read"),
        (["video", "x", "--seed", "1" * 20], "seed must be a 64-bit integer"),
        (["bench", "video", "--frames", "80"], "num_frames must be 4 n + 1"),
    ],
)
def test_a_wrong_job_is_refused_before_weights_are_read(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(WanCheckpoint, "readers", None)
    model = ["--random-weights", "--model", "wan-tiny"]
    assert run([*arguments, *model]) != 0
    assert says in capsys.readouterr().err


def test_only_steps_that_were_skipped_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = [*TINY_JOB, "--steps", "8", "--out", str(tmp_path / "frames"), "--json"]
    for threshold, skipped in (("1e-9", 0), ("10", 5)):
        assert run(["video", "x", *job, "--step-cache", threshold]) == 0
        captured = capsys.readouterr()
        report = json.loads(captured.out)
        assert (report["num_skipped"], report["exact"]) == (skipped, False)
        assert ("5 steps were skipped" in captured.err) is bool(skipped)


def test_prompts_are_cleaned_as_the_models_were_trained() -> None:
    assert clean_prompt("  a&amp;amp;b \n c\t") == "a&b c"
    assert byte_token_ids(" a  b ", 256) == [97, 32, 98]
    assert byte_token_ids("ab", 90) == [7, 8]
    assert replace(VideoParams(), guidance_scale=1.0).guided is False

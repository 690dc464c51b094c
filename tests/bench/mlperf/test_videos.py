"""Wan 2.2 under LoadGen: a small submission from end to end, its figures, what is refused."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import av
import pytest

from light_processes import light_processes
from tokenmill.__main__ import run
from tokenmill.bench.commands import mlperf
from tokenmill.bench.commands.mlperf import PANELS
from tokenmill.bench.mlperf import loadgen_tests, runs, submission, video
from tokenmill.bench.mlperf.compliance import verify_same_sample
from tokenmill.bench.mlperf.loadgen import ACCURACY, audit_config
from tokenmill.bench.mlperf.presets import REQUIRED_VIDEOS, ROUNDS, WAN
from tokenmill.bench.workload import BenchError
from tokenmill.core.config import ModelConfig
from tokenmill.core.requests import Request
from tokenmill.core.tasks import Video
from tokenmill.core.video import NEGATIVE_PROMPT, VideoParams, byte_token_ids
from tokenmill.models.checkpoints.diffusers_folder import random_wan
from tokenmill.settings import Settings, defaults_of
from tokenmill.video.pipeline import load_pipeline
from tokenmill.video.video_engine import VideoEngine

TABLE = defaults_of(*PANELS.values())

BENCHMARK = ("bench", "mlperf", "--benchmark", WAN.name)
URL = "http://127.0.0.1:1/v1"
SMALL = ("--size", "32x16", "--frames", "5", "--steps", "2", "--num-threads", "1")


def test_a_small_submission(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loadgen_tests, "SPAWN", light_processes())
    (tmp_path / "prompts.txt").write_text("a red fox\n\na red fox\n")
    line = [*BENCHMARK, "--quick", "--test-mode", "submission", "--compliance", *SMALL]
    line += ["--dataset", str(tmp_path / "prompts.txt"), "--submission-dir", str(tmp_path / "sub")]
    assert run([*line, "--gpu-price", "36", "--round", "v6.1"]) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["num_queries"] == report["num_samples"] == 2
    assert report["metric"]["unit"] == "samples/s"
    seconds = 1 / report["metric"]["value"]
    assert report["s_per_video"] == pytest.approx(seconds, abs=6e-5)  # of four digits
    assert report["usd_per_video"] == pytest.approx(seconds / 100, abs=6e-9)
    assert report["video"]["size"] == "32x16" and not report["synthetic"]
    said = " ".join(report["notices"])
    assert "5 frames of 32x16 in 2 steps instead of MLPerf's 81 frames of 1280x720" in said
    assert "Weights are random" in said and "not a valid submission" in said
    # No score is made up: what is missing is a reason, and the reference's script is named.
    assert report["accuracy"] == {"vbench_score": None} and report["result"] == "INVALID"
    assert any("run_evaluation.py" in why and "69.7752" in why for why in report["reasons"])
    check_files(tmp_path / "sub")


def check_files(root: Path) -> None:
    results = root / f"open/tokenmill/results/system/{WAN.name}/Offline"
    found = {str(path.relative_to(results)) for path in results.rglob("*") if path.stat().st_size}
    logs = ("mlperf_log_summary.txt", "mlperf_log_detail.txt")
    wanted = {f"performance/run_1/{name}" for name in logs}
    wanted |= {f"accuracy/{name}" for name in (*logs, ACCURACY, "accuracy.txt")}
    wanted |= {f"TEST04/performance/run_1/{name}" for name in logs}
    wanted |= {"TEST04/verify_performance.txt", "measurements.json", "user.conf", "report.html"}
    assert wanted <= found
    detail = (results / "TEST04/performance/run_1/mlperf_log_detail.txt").read_text()
    assert '"effective_performance_issue_same", "value": true' in detail
    videos = root / "videos" / f"system_{WAN.name}_Offline"
    names = sorted(file.name for file in videos.iterdir())
    assert names == ["a red fox-0.mp4", "a red fox-1.mp4"]  # as VBench looks for them
    with av.open(str(videos / names[0])) as container:
        assert len(list(container.decode(video=0))) == 5
    answers = json.loads((results / "accuracy" / ACCURACY).read_text())
    logged = [json.loads(bytes.fromhex(answer["data"])) for answer in answers]
    assert {each["file"] for each in logged} == set(names)
    assert {each["sha256"] for each in logged} == {expected_pixels()}
    page = (results / "report.html").read_text()
    assert "A video" in page and "tok/s" not in page and "not scored here" in page


def expected_pixels() -> str:
    """The hash of the same job without LoadGen."""
    checkpoint, negative = random_wan("wan-tiny"), byte_token_ids(NEGATIVE_PROMPT, 256)
    params = VideoParams((32, 16), 5, num_steps=2, negative_token_ids=tuple(negative))
    engine = VideoEngine(load_pipeline(checkpoint, ModelConfig(device="cpu", num_threads=1)))
    engine.submit(Request("a", Video(byte_token_ids("a red fox", 256), params)))
    outputs = [output for _ in range(4) for output in engine.step()]
    return sha256(video.frames_of(outputs[-1]).data).hexdigest()


def run_of(**values: Any) -> runs.MlperfRun:
    return mlperf.run_of(Settings({"benchmark": WAN.name, **values}, TABLE))


def report_of(scenario: str, **values: Any) -> Any:
    found = {"result_validity": "VALID", "result_samples_per_second": 0.02} | values
    found |= {"result_mean_latency_ns": 4e10, "result_90.00_percentile_latency_ns": 5e10}
    return loadgen_tests.performance_fields(run_of(scenario=scenario), found, [], [])


def test_figures_are_those_that_the_checker_reads() -> None:
    offline, stream = report_of("Offline"), report_of("SingleStream")
    assert (offline["metric"].value, offline["metric"].unit) == (0.02, "samples/s")
    assert (stream["metric"].value, stream["metric"].unit) == (50.0, "s")
    estimated = report_of("SingleStream", early_stopping_latency_ss=52e9)
    assert estimated["metric"].value == 52.0
    assert offline["limits_ms"] is None and stream["limits_ms"] is None  # the round has none
    price = video.price_fields(run_of(scenario="SingleStream"), stream, 36.0)
    assert (price["s_per_video"], price["usd_per_video"]) == (40.0, 0.4)
    assert video.price_fields(run_of(), offline, 36.0)["s_per_video"] == 50.0


@pytest.mark.parametrize("round_name", ROUNDS)
def test_both_rounds_have_the_benchmark(round_name: str) -> None:
    this = run_of(round=round_name)
    assert (this.preset.num_samples, this.seeds) == (248, ROUNDS[round_name].seeds)
    assert len(REQUIRED_VIDEOS[round_name]) == 10 and max(REQUIRED_VIDEOS[round_name]) < 248
    # Of 600 s at the expected rate fewer samples would come than the dataset has.
    assert this.user_conf(248) == (
        f"{WAN.name}.Offline.target_qps = 0.05\n{WAN.name}.Offline.min_query_count = 248\n"
    )


def test_synthetic_prompts_are_as_many_as_the_benchmarks_and_all_have_its_settings() -> None:
    prompts = video.load_prompts(Settings({}, TABLE), run_of(), "performance")
    requests = video.make_requests(prompts, random_wan("wan2.2-t2v-a14b"), VideoParams())
    assert len({tuple(request.task.prompt_token_ids) for request in requests}) == 248
    assert len(set(video.file_names(prompts))) == 248
    (params,) = {request.task.params for request in requests}
    assert params is not None
    assert (params.size, params.num_frames, params.num_steps) == ((1280, 720), 81, 20)
    assert (params.guidance_scale, params.guidance_scale_2, params.seed) == (4.0, 3.0, 42)
    assert params.schedule == "mlperf" and len(params.negative_token_ids) == len(NEGATIVE_PROMPT)


def test_the_checkers_videos_are_copied_by_number(tmp_path: Path) -> None:
    logs, layout = (
        tmp_path / "logs",
        submission.SubmissionLayout(tmp_path, "open", "me", "s", "b", "Offline"),
    )
    (logs / "videos").mkdir(parents=True)
    layout.accuracy.mkdir(parents=True)
    entries = []
    for index in range(3):
        (logs / "videos" / f"p{index}-0.mp4").write_text(str(index))
        data = json.dumps({"file": f"p{index}-0.mp4"}).encode().hex()
        entries.append({"qsl_idx": index, "data": data})
    (logs / ACCURACY).write_text(json.dumps(entries))
    kept = submission.move_videos(layout, logs / "videos", (2, 0))
    assert sorted(file.name for file in kept.iterdir()) == [f"p{i}-0.mp4" for i in range(3)]
    copied = {file.name: file.read_text() for file in (layout.accuracy / "videos").iterdir()}
    assert copied == {"0.mp4": "0", "2.mp4": "2"}


def test_test04_fails_where_the_same_sample_is_faster() -> None:
    assert verify_same_sample("Offline", 1.0, 1.09).passed
    assert not verify_same_sample("Offline", 1.0, 1.11).passed
    assert verify_same_sample("SingleStream", 1.0, 1.19).passed
    verdict = verify_same_sample("SingleStream", 1.0, 1.21)
    assert not verdict.passed and "TEST FAIL" in verdict.text
    assert "performance_issue_same_index = 3\n" in audit_config("TEST04", 248)
    assert "min_query_count = 20\n" in audit_config("TEST04", 248)
    assert "performance_issue_same_index = 1\n" in audit_config("TEST04", 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scenario", "Server"], "has Offline and SingleStream only"),
        (["--test-mode", "TEST06"], "has performance, accuracy, submission, TEST04 only"),
        (["--test-mode", "TEST04"], "use --test-mode performance --compliance"),
        (["--url", URL, "--offload"], "--offload is for an engine of this process, not for --url"),
        (["--url", URL, "--dtype", "bf16"], "--dtype is for an engine of this process"),
        (["--url", URL, "--api", "chat"], "--api does not go with"),
        (["--max-num-seqs", "8"], "--max-num-seqs is for language models"),
        (["--steps", "4"], "--steps other than MLPerf's is for a quick run: add --quick"),
        (["--step-cache", "0.1", "--division", "closed"], "--step-cache is not exact"),
        (["--max-batch-tokens", "9"], "--max-batch-tokens goes with --benchmark dlrm-v3"),
        (["--test-mode", "accuracy", "--dataset", "x"], "accuracy needs --submission-dir"),
    ],
)
def test_what_the_benchmark_does_not_have_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*BENCHMARK, *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_full_size_is_not_begun_on_a_cpu() -> None:
    with pytest.raises(BenchError, match="takes days on a CPU: add --quick"):
        video.job_of(Settings({"device": "cpu"}, TABLE))
    config, params = video.job_of(Settings({"device": "cpu", "quick": True}, TABLE))
    assert (config.model, config.random_weights, params.num_steps) == ("wan-tiny", True, 4)
    given = Settings({"device": "cpu", "quick": True, "steps": 3}, TABLE)
    assert video.job_of(given)[1].num_steps == 3


def test_prompts_that_cannot_name_a_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a fox\neither/or\n")
    assert video.read_prompts(file, as_files=False) == ["a fox", "either/or"]
    with pytest.raises(BenchError, match="line 2: VBench names videos by their prompts"):
        video.read_prompts(file, as_files=True)
    file.write_text("\n")
    with pytest.raises(BenchError, match="there is no prompt"):
        video.read_prompts(file, as_files=False)
    with pytest.raises(BenchError, match="cannot be read as a text file"):
        video.read_prompts(tmp_path, as_files=False)

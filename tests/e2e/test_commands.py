"""The commands on a tiny model: random weights from a config.json, and a tokenizer."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny_configs import write_config
from tiny_tokenizers import HERMES_TEMPLATE, byte_level, save_folder
from tokenmill import __version__
from tokenmill.__main__ import run
from tokenmill.kernels import cpu_kernels

SIZES = {"vocab_size": 422, "hidden_size": 64, "intermediate_size": 96}
ENGINE = ["--random-weights", "--num-threads", "1", "--kv-cache-memory", "4MiB"]
START_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_folder(
        byte_level(),
        tmp_path_factory.mktemp("tiny"),
        eos_token="<|im_end|>",
        chat_template=HERMES_TEMPLATE,
    )
    return write_config(folder, **SIZES)


def generate(model: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    line = ["generate", "--model", str(model), "--max-tokens", "8", "--ignore-eos", *ENGINE]
    assert run([*line, *arguments]) == 0
    return capsys.readouterr().out


def test_generate_streams_what_json_reports(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = generate(model, capsys, "Hello world", "--temperature", "0")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello world"))
    report = json.loads(generate(model, capsys, "-", "--temperature", "0", "--json"))
    assert report["text"] + "\n" == text
    assert report["finish_reason"] == "length"
    assert report["num_output_tokens"] == 8 and report["tok_s"] > 0
    chat = json.loads(generate(model, capsys, "Hello world", "--chat", "--json"))
    assert chat["num_prompt_tokens"] > report["num_prompt_tokens"]


def test_generate_names_a_prompt_that_is_too_long(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "x" * 300, "--model", str(model), *ENGINE]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: This model's maximum context length is 256 tokens; the prompt is too long: "
        "300 tokens > 256 maximum"
    )


SMALL = ["--random-weights", "--num-threads", "1", "--dtype", "fp32", "--kv-cache-memory", "64KiB"]
# 128 tokens; without --dtype a timed trial decides how wide they are.
CUT = "the context is 128 tokens instead of 256: the KV cache holds no more"


def test_every_way_in_has_the_context_that_the_cache_holds(
    model: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = "context length is 128 tokens; the prompt is too long: 200 tokens > 128 maximum"
    assert run(["generate", "x" * 200, "--model", str(model), *SMALL]) == 1
    assert refused in capsys.readouterr().err and CUT in caplog.text
    line = ["bench", "throughput", "--model", str(model), "--cell", "single", *SMALL]
    assert run(line) == 1
    assert "needs 256 tokens, but the model's context is 128; the KV" in capsys.readouterr().err
    caplog.clear()
    told = []
    monkeypatch.setattr(
        "tokenmill.workers.worker_process.run_worker",
        lambda engine, address, facts, *exchanges: told.append(facts),
    )
    assert run(["worker-process", "--model", str(model), "--address", "none", *SMALL]) == 0
    (facts,) = told
    assert facts.max_model_len == 128 and CUT in facts.warnings[0]
    assert not caplog.records  # the front tells it, and it alone


@pytest.mark.skipif(not cpu_kernels(), reason="nothing reads the variable here")
@pytest.mark.parametrize("way", ["generate", "serve", "LLM"])
def test_a_wrong_instruction_set_is_one_sentence(model: Path, way: str) -> None:
    command = [sys.executable, "-m", "tokenmill", way, "--model", str(model), *ENGINE]
    if way == "generate":
        command.append("Hello")
    elif way == "serve":
        command += ["--port", "0"]
    else:
        code = "import sys, tokenmill; tokenmill.LLM(sys.argv[1], random_weights=True)"
        command = [sys.executable, "-c", code, str(model)]
    environ = os.environ | {"TOKENMILL_CPU_ISA": "avx9"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, env=environ)
    sentence = "TOKENMILL_CPU_ISA is 'avx9': use avx2, or leave it unset"
    assert done.returncode == 1
    if way == "LLM":
        assert done.stderr.endswith(f"\ntokenmill.core.types.ModelLoadError: {sentence}\n")
    else:
        assert done.stderr == f"error: {sentence}\n"


def test_generate_names_a_draft_that_is_not_there(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["generate", "Hello", "--model", str(model), "--mtp", "1", "--draft", "no.safetensors"]
    assert run([*line, *ENGINE]) == 1
    assert "no.safetensors: expected a .safetensors file" in capsys.readouterr().err


def test_chat_keeps_and_forgets_the_conversation(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["Hello there", "", "/help", "Hello there", "/reset", "Hello there", "/exit", "unread"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    line = ["chat", str(model), "--temperature", "0", "--max-tokens", "6", *ENGINE]
    assert run(line) == 0
    captured = capsys.readouterr()
    assert captured.err.count("tok/s, first after") == 3
    assert "The conversation is forgotten." in captured.err
    assert sys.stdin.read() == "unread"


def test_throughput_ends_in_one_json_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "throughput", "--model", str(model), "--random-weights", "--num-threads", "1"]
    line += ["--num-prompts", "3", "--input-len", "20", "--output-len", "5", "--cell", "batch"]
    assert run([*line, "--cell", "single", "--rounds", "2", "--max-model-len", "256"]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert list(report["cells"]) == ["batch", "single"]
    ours = report["cells"]["batch"]["tokenmill"]
    assert len(ours["tok_s_runs"]) == 2
    assert ours["output_tok_s"] * 5 == pytest.approx(ours["total_tok_s"], rel=0.01)
    assert 0 < ours["mfu"] < 1 and ours["ceiling_tok_s"] > ours["tok_s"]
    assert {"p50", "p99"} <= ours["ttft_ms"].keys() & ours["tpot_ms"].keys()
    assert report["machine"]["read_gb_s"] > 0 and "ratios" not in report
    assert any("of a ceiling of" in text for text in lines)
    assert run([*line, "--cell", "prefill"]) == 1
    assert "cell prefill needs 2049 tokens" in capsys.readouterr().err


def test_a_recorded_run_is_replayed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "flight.jsonl"
    load = ["--lengths", "uniform:4-40", "--num-prompts", "12", "--output-len", "6", "--json"]
    engine = [*ENGINE, "--model", str(model), "--record", str(record)]
    assert run(["bench", "throughput", *engine, *load]) == 0
    capsys.readouterr()
    command = ["plan", "replay", "--record", str(record), "--max-num-seqs", "2"]
    assert run(command) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["num_equal_steps"] == report["num_steps"] > 6
    assert report["first_difference"] is None and report["changed"] == {"max-num-seqs": 2}
    assert report["what_if"]["ttft_ms"]["mean"] > report["simulated"]["ttft_ms"]["mean"]
    assert run([*command, "--trace", "recipes/sample-trace.jsonl"]) == 2
    assert "--record: leave out --trace" in capsys.readouterr().err


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`tokenmill serve` on a free port; its URL is read from its log."""
    command = [sys.executable, "-m", "tokenmill", "serve", str(model), "--port", "0", *ENGINE]
    environ = os.environ | {"TOKENMILL_API_KEY": "secret", "TOKENMILL_SERVED_MODEL_NAME": "tiny"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if match := re.search(r"tiny .* is served at (\S+)/v1", line):
                    assert next(process.stderr) == f"dashboard: {match[1]}/dashboard\n"
                    yield process, match[1]
                    break
        finally:
            process.kill()


def test_serve_shows_the_defaults_of_generation_config(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 9}')
    command = [sys.executable, "-m", "tokenmill", "serve", str(folder), "--port", "0", *ENGINE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = (re.search(r"is served at (\S+)/v1", line) for line in process.stderr)
            url = next(match[1] for match in found if match)
            next(process.stderr)
            assert "temperature 0.5, top_k 9 where calls say nothing" in next(process.stderr)
            with urllib.request.urlopen(f"{url}/v1/models") as answer:
                (card,) = json.load(answer)["data"]
            assert card["default_sampling_params"] == {"temperature": 0.5, "top_k": 9}
            body = json.dumps({"input": "a", "max_output_tokens": 1}).encode()
            asked = urllib.request.Request(f"{url}/v1/responses", body)
            asked.add_header("content-type", "application/json")
            with urllib.request.urlopen(asked) as answer:
                assert json.load(answer)["temperature"] == 0.5
        finally:
            process.kill()


NO_METADATA = """
import importlib.metadata
found = importlib.metadata.distribution
def distribution(name):
    if name == "tokenmill":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.distribution = distribution
"""


def test_serve_from_a_source_tree_that_was_never_installed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_METADATA)
    paths = [str(tmp_path), *(path for path in sys.path if path)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tokenmill", "serve", str(model), "--port", "0", *ENGINE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        try:
            said = ""
            for line in process.stderr:
                said += line
                if match := re.search(r"is served at (\S+)/v1", line):
                    with urllib.request.urlopen(f"{match[1]}/version") as answer:
                        assert json.load(answer)["version"] == __version__
                    return
            pytest.fail(said)
        finally:
            process.kill()


def test_chat_with_a_server(
    server: tuple[subprocess.Popen[str], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = server[1] + "/v1"
    assert run(["chat", "--url", url]) == 1
    assert "answered 401: missing or wrong API key" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there\nHello again"))
    line = ["chat", "--url", url, "--api-key", "secret", "--max-tokens", "6", "--ignore-eos"]
    assert run([*line, "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("6 tokens, ") == 2
    assert len(captured.out) > 6


def test_a_used_port_is_one_sentence(
    server: tuple[subprocess.Popen[str], str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = server[1].rsplit(":", 1)[1]
    assert run(["serve", str(model), "--port", port, "--random-weights"]) == 1
    assert capsys.readouterr().err == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


def test_sigterm_ends_the_server_well(server: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = server
    process.send_signal(signal.SIGTERM)
    assert process.wait(START_S) == 0


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    folder = save_folder(byte_level(), tmp_path, eos_token="<|im_end|>")
    write_config(folder, **SIZES, hidden_act="tanh")
    command = [sys.executable, "-m", "tokenmill", "serve", str(folder), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "hidden_act" in result.stderr

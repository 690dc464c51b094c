"""tokenmill serve over two ranks that Ray has placed, and a worker that computes their prompts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from open_ports import descendants, elsewhere
from tiny_configs import EXPERTS
from tiny_tokenizers import byte_level, save_folder
from tokenmill.__main__ import run
from tokenmill.api import server
from tokenmill.core.types import SamplingParams
from tokenmill.llm import LLM

PROMPTS = ["Hello world " * 9, "def add", "Hello there " * 9]
ENGINE = {"dtype": "fp32", "device": "cpu", "random_weights": True, "num_threads": 1}
FLAGS = ["--dtype", "fp32", "--device", "cpu", "--num-threads", "1"]


def test_serve_with_ranks_placed_by_ray(tmp_path: Path) -> None:
    folder = save_folder(byte_level(), tmp_path / "tiny", eos_token="<|im_end|>")
    (folder / "config.json").write_text(json.dumps(EXPERTS | {"vocab_size": 422}))
    command = [sys.executable, "-m", "tokenmill", "serve", str(folder), "--port", "0", *FLAGS]
    command += ["--random-weights", "--kv-cache-memory", "4MiB", "--placement", "ray"]
    command += ["--ep", "2", "--attention-dp", "--redundant-experts", "2", "--rebalance-steps", "3"]
    command += ["--prefill", "1", "--decode", "1", "--remote-prefill-tokens", "16"]
    for own in ("ep=1", "attention-dp=false", "redundant-experts=0", "rebalance-steps=0"):
        command += ["--prefill-set", own]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            pattern = re.compile(r"on each rank\) is served at (\S+)/v1")
            found = map(pattern.search, process.stderr)
            url = next(match[1] for match in found if match)
            assert elsewhere(descendants(process.pid)) == set()  # nor do Ray's own processes
            answers = [complete(url, prompt) for prompt in PROMPTS]
            with urllib.request.urlopen(f"{url}/metrics", timeout=300) as response:
                metrics = response.read().decode()
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=300)
    assert process.returncode == 0
    moved = re.search(r"tokenmill_expert_bytes_moved_total\{.*\} (\S+)", metrics)
    assert moved is not None and float(moved[1]) > 0
    received = re.search(r'kv_transfers_total\{.*result="received"\} (\S+)', metrics)
    assert received is not None and float(received[1]) == 2
    llm = LLM(str(folder), **ENGINE)  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    assert answers == [output.outputs[0].text for output in outputs]


def test_what_cannot_be_divided_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    monkeypatch.setattr(server, "serve", pytest.fail)
    assert run(["serve", str(tmp_path), "--ep", "64"]) == 1
    assert "--ep 64: the model has 32 experts in a layer" in capsys.readouterr().err


def complete(url: str, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return str(json.load(response)["choices"][0]["text"])

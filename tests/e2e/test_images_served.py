"""A tiny random Qwen3-VL behind `tokenmill serve` and in `tokenmill chat`, images included."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from openai import OpenAI
from PIL import Image

from api.sim import IMAGE_TEMPLATE, IMAGE_TOKENS, make_tokenizer
from tiny_models import make_model, save, tame

RANDOM = "qwen3-vl-tiny takes images; its weights are random, so its answers mean nothing"
NUM_TOKENS = 12  # of 24 x 32 pixels, patches of 4 and 2 x 2 patches a token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, with a tokenizer that knows the names of images."""
    path, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer(sees=True)
    start, image, end = (tokenizer.encode(t, add_special_tokens=False)[0] for t in IMAGE_TOKENS)
    save(tame(make_model("qwen3-vl", vocab_size=tokenizer.vocab_size)), path)
    config = json.loads((path / "config.json").read_text())
    config |= {"image_token_id": image, "vision_start_token_id": start, "vision_end_token_id": end}
    (path / "config.json").write_text(json.dumps(config))
    size = {"shortest_edge": 64, "longest_edge": 4096}
    halves = [0.5, 0.5, 0.5]
    processor: dict[str, Any] = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    processor |= {"size": size, "image_mean": halves, "image_std": halves}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    tokenizer._backend.save(str(path / "tokenizer.json"))
    names = {"chat_template": IMAGE_TEMPLATE, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


@contextmanager
def serving(model: Path | str, *flags: str, said: list[str] | None = None) -> Iterator[OpenAI]:
    """A server's client; what the server says before it listens is added to `said`."""
    said = [] if said is None else said
    command = [sys.executable, "-m", "tokenmill", "serve", str(model)]
    command += ["--port", "0", "--dtype", "fp32", "--num-threads", "1", "--max-model-len", "256"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"at (\S+/v1)", line):
                    break
            assert found is not None, said
            yield OpenAI(base_url=found[1], api_key="none")
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[OpenAI]:
    with serving(folder, "--workers", "2") as client:
        yield client


def test_mlperf_issues_images_and_scores_the_answers(folder: Path, tmp_path: Path) -> None:
    target = {"ground_truth_category": "Home > Kitchen", "prompt": "Which category?"}
    rows = [target | {"image": f"{i}.png"} for i in range(2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    command = [sys.executable, "-m", "tokenmill", "bench", "mlperf", "--model", str(folder)]
    command += ["--benchmark", "qwen3-vl-235b", "--quick", "--test-mode", "accuracy"]
    command += ["--dataset", str(tmp_path / "rows.jsonl"), "--max-model-len", "200"]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, check=True)
    report = json.loads(done.stdout)
    assert report["num_samples"] == 2 and report["num_input_tokens"] > 2 * NUM_TOKENS
    gate = report["accuracy_gates"]["category_f1"]
    assert gate == {"value": 0.0, "min": 78.2397, "passed": False}  # random weights write no JSON


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").point(lambda v: (v + shade) % 256).resize((32, 24)).save(file, "PNG")
    return file.getvalue()


def ask(client: OpenAI, *shades: int) -> Any:
    parts: list[Any] = [{"type": "text", "text": "Hello world! " * 4}]
    for shade in shades:
        url = f"data:image/png;base64,{base64.b64encode(picture(shade)).decode()}"
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": parts}],
        temperature=0,
        max_tokens=8,
        logprobs=True,
    )


def scores(answer: Any) -> list[float]:
    return [entry.logprob for entry in answer.choices[0].logprobs.content]


def test_an_image_is_seen_and_cached_and_no_other_is_taken_for_it(client: OpenAI) -> None:
    first, other, both = ask(client, 0), ask(client, 90), ask(client, 0, 90)
    assert first.usage.prompt_tokens_details.image_tokens == NUM_TOKENS
    assert both.usage.prompt_tokens_details.image_tokens == 2 * NUM_TOKENS
    assert scores(first) != scores(other)
    again = ask(client, 0)
    assert scores(again) == scores(first)
    assert again.usage.prompt_tokens_details.cached_tokens >= 16
    plain = ask(client)
    assert plain.usage.prompt_tokens_details.image_tokens is None and scores(plain)


def test_prefill_and_decode_workers_give_the_same_answers(folder: Path, client: OpenAI) -> None:
    asked = [(0,), (90,), (0, 90), (), (0,)]
    wanted = [scores(ask(client, *shades)) for shades in asked]
    with serving(
        folder, *("--prefill", "1", "--decode", "1", "--remote-prefill-tokens", "16")
    ) as apart:
        assert [scores(ask(apart, *shades)) for shades in asked] == wanted
        assert workers(apart)["transfers"] > 0


def workers(client: OpenAI) -> Any:
    with urlopen(str(client.base_url).replace("/v1/", "/workers")) as answer:
        return json.load(answer)


def test_a_file_in_the_terminal(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(0))
    command = [sys.executable, "-m", "tokenmill", "chat", str(folder), "--dtype", "fp32"]
    command += ["--image", str(tmp_path / "a.png"), "--temperature", "0", "--max-tokens", "8"]
    done = subprocess.run(command, input="Hello\n", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_tiny_model_of_the_catalog_is_made_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first use writes it, and every command says that its answers mean nothing."""
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    said: list[str] = []
    with serving("qwen3-vl-tiny", said=said) as client:
        assert client.models.list().data[0].id == "qwen3-vl-tiny"
        usage = ask(client, 0).usage
        assert usage.prompt_tokens_details.image_tokens == 1  # a token has 32 x 32 pixels
        assert usage.completion_tokens > 0
    assert sum(RANDOM in line for line in said) == 1
    assert (tmp_path / "qwen3-vl-tiny" / "config.json").is_file()
    (tmp_path / "a.png").write_bytes(picture(0))
    command = [sys.executable, "-m", "tokenmill", "chat", "--model", "qwen3-vl-tiny"]
    command += ["--image", str(tmp_path / "a.png"), "--temperature", "0", "--max-tokens", "8"]
    done = subprocess.run(command, input="Hello\n", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and RANDOM in done.stderr

"""`serve --prefill 1 --decode 1` with the default model answers as a single engine does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import openai

from open_ports import descendants, elsewhere
from tokenmill.core.config import CacheConfig
from tokenmill.core.types import SamplingParams
from tokenmill.llm import LLM

STORY = "A small robot lived in a lighthouse and counted the ships that passed by at night. " * 8
PROMPTS = (STORY + "\nThe robot's name was", STORY + STORY + "\nOne night", "The sea is")
COMMAND = [sys.executable, "-P", "-m", "tokenmill", "serve", "--port", "0", "--dtype", "int8"]
LIMITS = ("--max-model-len", "512", "--kv-cache-memory", "64MiB")


def test_answers_over_http_are_those_of_one_engine(smollm2_path: Path) -> None:
    command = [*COMMAND, str(smollm2_path), *LIMITS, "--prefill", "1", "--decode", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        cache = CacheConfig(num_blocks=64)
        llm = LLM(str(smollm2_path), dtype="int8", max_model_len=512, cache=cache)
        wanted = llm.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=24))
        url = listening(process)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        for prompt, answer in zip(PROMPTS, wanted, strict=True):
            text, num_prompt_tokens = complete(client, model, prompt)
            assert text == answer.outputs[0].text
            assert num_prompt_tokens == len(answer.prompt_token_ids)
        assert elsewhere(descendants(process.pid)) == set()
        pool = client.get(f"{url}/workers", cast_to=dict[str, object])
        assert pool["transfers"] == 2 and pool["failed_transfers"] == 0
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def listening(process: subprocess.Popen[str]) -> str:
    """The URL that a server logs when it is ready."""
    assert process.stderr is not None
    log = []
    for line in process.stderr:
        log.append(line)
        if (found := re.search(r"(http://127\.0\.0\.1:\d+)/v1;", line)) is not None:
            return found[1]
    raise AssertionError("".join(log))


def complete(client: openai.OpenAI, model: str, prompt: str) -> tuple[str, int]:
    """Stream a greedy completion; its text, and the prompt's tokens by the usage."""
    text, num_prompt_tokens = "", 0
    for chunk in client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += "".join(choice.text for choice in chunk.choices)
        num_prompt_tokens = chunk.usage.prompt_tokens if chunk.usage else num_prompt_tokens
    return text, num_prompt_tokens

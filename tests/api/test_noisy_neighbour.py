"""Whatever one key sends, another's answers stay right, and what it has stored and cached stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from api.sim import MAX_MODEL_LEN, MODEL
from api.sim_server import Answer, Json, SimServer, sim_server
from noisy_calls import CHAT, Crowd, Noise, noises
from tokenmill.core.config import SchedulerConfig, ServerConfig
from tokenmill.core.images import VisionConfig

VICTIM, NOISY = {"authorization": "Bearer victim"}, "noisy"
NUM_BLOCKS = 1200  # of 16 tokens: enough for what runs, and some dozens of prompts fill it
PREFIX = "The quick brown fox jumps over the lazy dog. " * 12
CALLS: list[tuple[Json, str]] = [
    ({"content": "say: hello there"}, "hello there"),
    ({"content": "say: 3141", "guided_regex": "[0-9]{4}"}, "3141"),
    ({"content": "say: one STOP two", "stop": ["STOP"]}, "one "),
    ({"content": 'say: {"x": 7}', "response_format": {"type": "json_object"}}, '{"x": 7}'),
]
ROUNDS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    config = ServerConfig(port=0, api_keys=("victim", NOISY))
    limits = SchedulerConfig(max_model_len=MAX_MODEL_LEN)
    with sim_server(
        config, limits, step_ms=1.0, num_blocks=NUM_BLOCKS, vision=VisionConfig()
    ) as running:
        yield running


def post(server: SimServer, path: str, **call: Any) -> Answer:
    return server.call("POST", path, {"model": MODEL, **call}, VICTIM)


def answer_of(server: SimServer, content: str, **fields: Any) -> str:
    messages = [{"role": "user", "content": content}]
    answer = post(server, CHAT, messages=messages, **fields)
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][0]["message"]["content"]
    return text


def cached_tokens(server: SimServer) -> int:
    """How much of the victim's prompt is cached."""
    usage = post(server, "/v1/completions", prompt=PREFIX, max_tokens=1).json["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def store(server: SimServer) -> str:
    """The id of a response that the victim has stored."""
    answer = post(server, "/v1/responses", input="say: kept")
    assert answer.status == 200, answer.body
    return str(answer.json["id"])


@pytest.mark.parametrize("noise", noises(3), ids=lambda noise: noise.name)
def test_calls_of_one_key_do_not_harm_another(server: SimServer, noise: Noise) -> None:
    pids = [server.process.pid, *server.worker_pids()]
    cached_tokens(server)
    cached, stored = cached_tokens(server), store(server)
    assert cached > 100
    crowd = Crowd(server.address, NOISY, noise.path, noise.body)
    with crowd.calling(noise.clients, noise.stalls):
        rounds = 0
        while rounds < ROUNDS or not crowd.statuses:
            for call, expected in CALLS:
                assert answer_of(server, **call) == expected
            rounds += 1
    assert server.call("GET", f"/v1/responses/{stored}", headers=VICTIM).status == 200
    assert cached_tokens(server) == cached
    assert [server.process.pid, *server.worker_pids()] == pids and server.process.poll() is None


def test_what_one_key_stores_and_caches_pushes_nothing_of_another_out(server: SimServer) -> None:
    cached_tokens(server)
    cached, stored = cached_tokens(server), store(server)
    other = {"authorization": f"Bearer {NOISY}"}
    for number in range(90):
        prompt = f"{number} and so on, for ever and ever. " * 14
        call = {"model": MODEL, "input": prompt, "max_output_tokens": 20}
        assert server.call("POST", "/v1/responses", call, other).status == 200
    assert server.call("GET", f"/v1/responses/{stored}", headers=VICTIM).status == 200
    assert cached_tokens(server) == cached

"""The server over plain HTTP: answers, errors and their shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from api.sim import DEFAULT_TEXT, MAX_MODEL_LEN, MODEL, make_tokenizer
from api.sim_server import Answer, SimServer, sim_server
from tokenmill.core.config import ServerConfig

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    with sim_server(ServerConfig(port=0, max_body_bytes=100_000)) as running:
        yield running


def test_operations(server: SimServer) -> None:
    assert server.call("GET", "/health").json == {"status": "ok"}
    assert server.call("GET", "/version").json["version"]
    card = server.call("GET", "/v1/models").json["data"][0]
    assert card["id"] == MODEL and card["max_model_len"] == MAX_MODEL_LEN
    assert server.call("GET", f"/v1/models/{MODEL}").json == card


def test_the_page_and_the_document_agree_with_the_routes(server: SimServer) -> None:
    document = server.call("GET", "/openapi.json").json
    assert document["openapi"].startswith("3.1")
    page = server.call("GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert b"http://" not in page.body and b"https://" not in page.body and b"src=" not in page.body
    for path, operations in document["paths"].items():
        assert path.encode() in page.body
        for method in operations:
            answer = server.call(method.upper(), path.replace("{model_id}", MODEL), {})
            missing = "{response_id}" in path and b"response_not_found" in answer.body
            assert answer.status in (200, 400) or missing, (method, path)
            assert str(answer.status) in operations[method]["responses"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_routes_that_do_not_exist(server: SimServer, method: str, path: str, status: int) -> None:
    answer = server.call(method, path)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["type"] in ("not_found_error", "invalid_request_error")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"messages": ' + b"[" * 50_000, b"{} {}", b"NaN"],
)
def test_malformed_bodies(server: SimServer, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        answer = server.call("POST", path, body)
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"


def test_unknown_models(server: SimServer) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        call: dict[str, Any] = {"model": "gpt-9"}
        call |= {"messages": USER} if "chat" in path else {"prompt": "x"}
        call = {"model": "gpt-9", "tokens": [1]} if path == "/detokenize" else call
        answer = server.call("POST", path, call)
        assert answer.status == 404
        assert answer.error["code"] == "model_not_found" and answer.error["param"] == "model"


def test_the_context_limit(server: SimServer) -> None:
    fits = server.complete([5] * (MAX_MODEL_LEN - 1), max_tokens=1)
    assert fits.status == 200 and fits.json["usage"]["total_tokens"] == MAX_MODEL_LEN
    for prompt, fields in (
        ([5] * MAX_MODEL_LEN, {}),
        ([5] * 5000, {}),
        ([5] * 10, {"max_tokens": MAX_MODEL_LEN - 9}),
    ):
        answer = server.complete(prompt, **fields)
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"
    left = server.chat("count: 10000").json
    assert left["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert left["choices"][0]["finish_reason"] == "length"


def test_bodies_that_are_too_large(server: SimServer) -> None:
    answer = server.call("POST", "/v1/completions", {"prompt": "x" * 200_000})
    assert answer.status == 413 and answer.error["code"] == "body_too_large"
    chunks = iter([b'{"prompt": "', b"x" * 150_000, b'"}'])
    answer = server.call("POST", "/v1/completions", chunks)
    assert answer.status == 413


def test_tokenize_and_back(server: SimServer) -> None:
    tokenizer = make_tokenizer()
    text = "Hello café 😀"
    answer = server.call("POST", "/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    back = server.call("POST", "/detokenize", {"tokens": answer["tokens"]})
    assert back.json == {"prompt": text}
    chat = server.call("POST", "/tokenize", {"messages": USER}).json
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat["tokens"], skip_special_tokens=False) == expected
    usage = server.chat("hi").json["usage"]
    assert usage["prompt_tokens"] == chat["count"]
    assert server.call("POST", "/tokenize", {}).status == 400
    assert server.call("POST", "/tokenize", {"prompt": "a", "messages": USER}).status == 400
    assert server.call("POST", "/detokenize", {"tokens": [10**6]}).error["param"] == "tokens"


def test_stream_events(server: SimServer) -> None:
    answer = server.chat("say: Hello there", stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = answer.events
    assert done == "[DONE]"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3
    assert all(c["usage"] is None and c["object"] == "chat.completion.chunk" for c in chunks)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(d.get("content", "") for d in deltas) == "Hello there"
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    without = server.chat("say: Hello there", stream=True).events
    assert all("usage" not in c for c in without[:-1])


def test_budgets_and_loops_end_and_are_counted(server: SimServer) -> None:
    def counts() -> list[float]:
        names = ("thinking_budgets_spent", "loops_ended")
        return [server.metric(f"{name}_total") for name in names]

    before, said = counts(), "say: <think>Hmm, well</think>Yes"
    for n in (1, 2):
        answer = server.chat(said, thinking_token_budget=2, n=n).json
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * n
        for choice in answer["choices"]:
            assert choice["message"]["content"].endswith("Yes")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, usage = server.chat(said, reasoning={"max_tokens": 3}, **options).events[:-1]
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    loop = {"max_pattern_size": 3, "min_count": 3}
    for ask in (server.chat, server.complete):
        (choice,) = ask("say: xyxyxyxyxyxyxy", repetition_detection=loop).json["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition_detected")
    (raw,) = server.complete("say: xyz", thinking_token_budget=0).json["choices"]
    assert raw["text"] == "xyz", "nothing is forced where nothing is opened"
    after = counts()
    assert [a - b for a, b in zip(after, before, strict=True)] == [4, 2]


def test_usage_in_every_event(server: SimServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for ask in (server.chat, server.complete):
        *chunks, last, _ = ask("hi", stream=True, stream_options=options, max_tokens=3).events
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        # On a busy machine an event has several tokens.
        assert counts[0] >= 1 and counts[-1] == 3 and counts == sorted(counts)
        assert last["choices"] == [] and last["usage"] == chunks[-1]["usage"]
        alone = {"continuous_usage_stats": True}  # include_usage decides, as in vLLM
        assert "usage" not in ask("hi", stream=True, stream_options=alone).events[0]


def test_text_is_escaped_in_events(server: SimServer) -> None:
    text = 'quotes " and \\ and \n\nnewlines\u2028 data: x 😀 数字'
    events = server.chat(f"say: {text}", stream=True).events[:-1]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text


def test_deadlines(server: SimServer) -> None:
    with sim_server(step_ms=30.0) as slow:
        answer = slow.chat("count: 400", timeout=0.1)
        assert answer.status == 408 and answer.error["param"] == "timeout"
        events = slow.chat("count: 400", timeout=0.3, stream=True).events
        assert events[-1]["error"]["code"] == "deadline"
        assert slow.metric("num_requests_running") == 0


@pytest.fixture(scope="module")
def keyed() -> Iterator[SimServer]:
    """A server with two keys and little memory."""
    config = ServerConfig(port=0, api_keys=("one", "two"), max_stored_responses=6)
    with sim_server(config, num_blocks=160) as running:
        yield running


def test_no_key_pushes_out_or_sees_what_another_has_cached_and_stored(keyed: SimServer) -> None:
    text = "the lazy dog jumps over the quick brown fox " * 24

    def ask(key: str, prompt: str, **fields: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return keyed.call("POST", "/v1/completions", {"prompt": prompt, **fields}, headers).json

    def cached(answer: Any) -> int:
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def store(key: str, said: str) -> str:
        head, call = {"authorization": f"Bearer {key}"}, {"input": f"say: {said}", "model": MODEL}
        return str(keyed.call("POST", "/v1/responses", call, head).json["id"])

    first = ask("two", text)
    assert cached(first) == 0 and cached(ask("two", text)) > 200
    assert cached(ask("one", text)) == 0, "another key's prompts tell it nothing"
    assert cached(ask("two", text, cache_salt="own")) == 0
    kept = [store("two", "kept") for _ in range(2)]
    calls = ThreadPoolExecutor(4)
    noise = calls.map(lambda i: ask("one", f"{i} {text}", n=1 + i % 2), range(40))
    assert all(len(answer["choices"]) for answer in noise)
    list(calls.map(lambda i: store("one", str(i)), range(12)))
    again = ask("two", text)
    assert cached(again) > 200 and again["choices"] == first["choices"]
    for response_id in kept:
        path = f"/v1/responses/{response_id}"
        for method in ("GET", "DELETE"):
            foreign = keyed.call(method, path, headers={"authorization": "Bearer one"})
            assert foreign.status == 404 and foreign.error["code"] == "response_not_found"
        assert keyed.call("GET", path, headers={"authorization": "Bearer two"}).status == 200
    assert keyed.metric("worker_restarts_total") == 0


def test_api_keys(keyed: SimServer) -> None:
    for path in ("/v1/models", f"/v1/models/{MODEL}"):
        assert keyed.call("GET", path).status == 401
    for headers in (
        {},
        {"Authorization": "Bearer three"},
        {"Authorization": "one"},
        {"Authorization": "Basic one"},
        {"Authorization": "Bearer "},
    ):
        answer = keyed.call("POST", "/v1/completions", {"prompt": "hi"}, headers)
        assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
    for key in ("one", "two"):
        headers = {"Authorization": f"Bearer {key}"}
        assert keyed.call("POST", "/v1/completions", {"prompt": "hi"}, headers).status == 200
    for path in ("/health", "/version", "/docs"):
        assert keyed.call("GET", path).status == 200
    document = keyed.call("GET", "/openapi.json").json
    assert document["paths"]["/v1/completions"]["post"]["security"]
    figures = ("/metrics", "/workers", "/workers/receipts", "/dashboard/data")
    token = {"Authorization": f"Bearer {keyed.token}"}
    assert {keyed.call("GET", path, headers=token).status for path in figures} == {200}
    for path in figures:  # of all keys
        refused = keyed.call("GET", path, headers=headers)
        assert refused.status == 403 and refused.error["code"] == "not_operator"
        assert keyed.call("GET", path, headers={"x-api-key": "three"}).status == 401
    headers["content-type"] = "application/json"
    assert keyed.call("POST", "/workers/scale", {"workers": 2}, headers).status == 401
    assert keyed.call("POST", "/v1/completions", {"prompt": "hi"}, token).status == 200


def test_no_answer_is_kept_for_an_idempotency_key_and_refusals_are_counted() -> None:
    path, large = "/v1/completions", b"x" * 2000
    with sim_server(ServerConfig(port=0, api_keys=("one",), max_body_bytes=1000)) as guarded:

        def ask(key: str, body: dict[str, Any] | bytes) -> Answer:
            headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "k"}
            return guarded.call("POST", path, body, headers)

        stranger = ask("two", large)  # refused before its body is read
        assert stranger.status == 401 and stranger.error["code"] == "invalid_api_key"
        assert ask("one", large).status == 413
        answers = [ask("one", {"prompt": "hi", "max_tokens": n}).json for n in (3, 4)]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [3, 4]
        only = {"Authorization": "Bearer one"}  # whose figures are all figures
        assert guarded.call("GET", "/metrics", headers=only).status == 200
        counts = {
            status: guarded.metric(
                "requests_total", f'endpoint="{path}",model_name="{MODEL}",status="{status}"'
            )
            for status in (200, 401, 413)
        }
        assert counts == {200: 2, 401: 1, 413: 1}


def test_metrics_count_what_happened() -> None:
    with sim_server() as server:
        prompt = server.chat(f"say: {DEFAULT_TEXT}").json["usage"]
        server.chat(f"say: {DEFAULT_TEXT}", stream=True)
        server.chat("count: 100", max_tokens=3)
        assert server.metric("request_success_total", 'finished_reason="stop"') == 2
        assert server.metric("request_success_total", 'finished_reason="length"') == 1
        num_output = 2 * prompt["completion_tokens"] + 3
        assert server.metric("generation_tokens_total") == num_output
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert server.metric(f"{name}_seconds_count") == 3
        assert server.metric("request_time_per_output_token_seconds_count") == 3
        assert server.metric("inter_token_latency_seconds_count") >= 1
        assert server.metric("prompt_tokens_total") > 2 * prompt["prompt_tokens"]
        assert server.metric("prefix_cache_queries_total") == server.metric("prompt_tokens_total")
        assert server.metric("prefix_cache_hits_total") >= 16
        assert 0 < server.metric("prefix_cache_hit_rate") < 1
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage"):
            assert server.metric(gauge) == 0
        kinds = server.call("GET", "/metrics").headers["content-type"]
        assert kinds.startswith("text/plain")


def test_return_token_ids(server: SimServer) -> None:
    tokenizer = make_tokenizer()
    answer = server.chat("say: Hello there", return_token_ids=True).json
    token_ids = answer["choices"][0]["token_ids"]
    assert tokenizer.decode(token_ids) == "Hello there"
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    events = server.chat("say: Hello there", return_token_ids=True, stream=True).events[:-1]
    streamed = [t for e in events for t in e["choices"][0].get("token_ids", [])]
    assert streamed == token_ids and events[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    text = server.complete("hi", max_tokens=2, return_token_ids=True).json["choices"][0]
    assert len(text["token_ids"]) == 2 and tokenizer.decode(text["prompt_token_ids"]) == "hi"


def test_bytes_of_a_json_body_are_utf8(server: SimServer) -> None:
    body = json.dumps({"prompt": "say: \ud800"}).encode()
    assert server.call("POST", "/v1/completions", body).status == 400

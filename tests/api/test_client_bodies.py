"""Bodies as clients send them, fields that change nothing, one call at a time, limits by choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from api.sim import MODEL, make_tokenizer
from api.sim_server import SimServer, sim_server, wait_until
from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.decoding import decode_call
from tokenmill.api.protocol.prepare import Preparer
from tokenmill.api.protocol.requests import ChatCompletionRequest
from tokenmill.core.config import SchedulerConfig, ServerConfig
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.workers.messages import ModelFacts

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("weather", "time")
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
SAME = [{"role": "user", "content": "say: same"}]


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    with sim_server(limits=SchedulerConfig(max_model_len=4096)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: SimServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as opened:
        yield opened


# What the libraries send over the wire besides model and messages.
EXTRAS: dict[str, dict[str, Any]] = {
    "openai": {
        "store": True,
        "service_tier": "flex",
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prediction": {"type": "content", "content": "same"},
        "parallel_tool_calls": False,
        "reasoning_effort": "minimal",
        "verbosity": "low",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "stream": False,
    },
    "nulls": dict.fromkeys(
        (
            *("audio", "functions", "function_call", "web_search_options", "prediction", "stop"),
            *("reasoning_effort", "verbosity", "tools", "tool_choice", "parallel_tool_calls"),
            *("logit_bias", "logprobs", "top_logprobs", "n", "seed", "stream_options", "suffix"),
            *("max_tokens", "response_format", "temperature", "metadata", "modalities", "store"),
            *("a_field_of_next_year", "guided_json", "structured_outputs", "chat_template_kwargs"),
        )
    ),
    "empty": {"functions": [], "function_call": "none", "tools": [], "stop": [], "documents": []},
    "vllm": {
        "use_beam_search": False,
        "length_penalty": 1.0,
        "early_stopping": False,
        "spaces_between_special_tokens": True,
        "truncate_prompt_tokens": None,
        "logits_processors": None,
        "include_reasoning": True,
        "request_id": "r",
        "guided_decoding_backend": "xgrammar",
        "structured_outputs": None,
        "top_logprobs": 0,
        "logprobs": False,
        "echo": False,
        "add_generation_prompt": True,
        "add_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "top_k": 40.0,
        "seed": 1.0,
        "ignore_eos": False,
    },
}


@pytest.mark.parametrize("name", EXTRAS)
def test_fields_that_change_nothing(server: SimServer, name: str) -> None:
    plain, decorated = server.chat("say: same"), server.chat("say: same", **EXTRAS[name])
    assert decorated.status == 200, decorated.body
    assert decorated.json["choices"] == plain.json["choices"]


def test_ignored_fields_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer()
    facts = ModelFacts(4096, tokenizer.vocab_size, 1, 16, "none")
    preparer = Preparer(tokenizer, lambda: facts, ServerConfig())
    message = {"role": "user", "content": "hi", "id": "m", "opts": 1}
    body = {"messages": [message], "store": True, "user": None, "verbosity": "low"}
    refused = json.dumps({"messages": [{**message, "content": 3, "fault": 1}]}).encode()
    with caplog.at_level("INFO"):
        with pytest.raises(ApiError):
            decode_call(refused, ChatCompletionRequest, preparer.ignored)
        for _ in range(2):
            call = decode_call(json.dumps(body).encode(), ChatCompletionRequest, preparer.ignored)
            asyncio.run(preparer.chat(call))
    told = " ".join(record.getMessage() for record in caplog.records)
    for name in ("messages[].opts", "messages[].id", "store", "verbosity"):
        assert told.count(name) == 1
    assert "user" not in told
    assert "fault" not in told, "the call was refused"


def test_reasoning_effort_reaches_the_template() -> None:
    known = make_tokenizer()
    template = "{{ reasoning_effort }} {{ enable_thinking }} {{ messages[0].content }}"
    tokenizer = Tokenizer(
        known._backend,
        named_tokens={},
        eos_token_ids=known.eos_token_ids,
        chat_templates={"default": ChatTemplate(template, "test")},
    )
    facts = ModelFacts(4096, 400, 1, 16, "none")
    preparer = Preparer(tokenizer, lambda: facts, ServerConfig())

    def prompt(**fields: Any) -> str:
        body = json.dumps({"messages": SAME, **fields}).encode()
        job = asyncio.run(preparer.chat(decode_call(body, ChatCompletionRequest)))
        return job.prompts[0].text

    assert prompt(reasoning_effort="high").startswith("high  say")
    assert prompt(reasoning_effort="none").startswith("none False say")
    kwargs = {"reasoning_effort": "low"}
    assert prompt(reasoning_effort="high", chat_template_kwargs=kwargs).startswith("low  say")
    assert not preparer.ignored.is_noted("reasoning_effort")


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "litellm": [
        {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": {"a": 1}}]},
        {"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}},
        {
            "role": "assistant",
            "content": None,
            "function_call": None,
            "provider_specific_fields": {"refusal": None},
            "thinking_blocks": [{"type": "thinking", "thinking": "x"}],
            "tool_calls": [
                {
                    "index": 0,
                    "id": "c",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "name": "weather", "content": "say: same"},
    ],
    "openai client": [
        {"role": "developer", "content": "d", "name": "n"},
        {"role": "user", "content": "hi", "name": ""},
        {
            "role": "assistant",
            "content": "",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "parsed": None,
            "tool_calls": None,
        },
        {"role": "user", "content": "say: same"},
    ],
    "reasoning": [
        {"role": "user", "content": "hi", "id": 7, "timestamp": 12, "opts": {"visible": False}},
        {
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "text", "text": "x", "index": 0, "annotations": []}],
            "reasoning": "r",
            "reasoning_content": "r",
            "reasoning_details": [{}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "text", "text": "say: same"}]},
    ],
    "a call with an object": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "time", "arguments": {"city": "A"}}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": None},
        {"role": "user", "content": "say: same"},
    ],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_that_clients_keep(server: SimServer, name: str) -> None:
    call = {"model": MODEL, "messages": CONVERSATIONS[name], "tools": TOOLS}
    answer = server.call("POST", "/v1/chat/completions", call)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["message"]["content"] == "same"


def test_ignored_fields_do_not_reach_the_prompt(server: SimServer) -> None:
    messages = CONVERSATIONS["litellm"]
    bare = json.loads(json.dumps(messages))
    for message in bare:
        for name in ("cache_control", "provider_specific_fields", "thinking_blocks"):
            message.pop(name, None)
    del bare[2]["tool_calls"][0]["index"], bare[0]["content"][0]["cache_control"]
    counts = [
        server.call("POST", "/tokenize", {"messages": each}).json["tokens"]
        for each in (messages, bare)
    ]
    assert counts[0] == counts[1]


BENCHMARKS: dict[str, tuple[str, dict[str, Any]]] = {
    "aiperf chat": (
        "chat/completions",
        {
            "messages": [{"role": "user", "name": None, "content": "count: 30"}],
            "stream": True,
            "max_completion_tokens": 8,
            "min_tokens": 8,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "aiperf completions": (
        "completions",
        {
            "prompt": ["count: 30"],
            "stream": True,
            "max_tokens": 8,
            "stream_options": {"include_usage": True},
        },
    ),
    "guidellm": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "count: 30"}]}],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 8,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    "vllm bench": (
        "completions",
        {
            "prompt": "count: 30",
            "repetition_penalty": 1.0,
            "temperature": 0.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
    ),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_load_generators(server: SimServer, name: str) -> None:
    path, body = BENCHMARKS[name]
    answer = server.call("POST", f"/v1/{path}", {"model": MODEL, **body})
    assert answer.status == 200, answer.body
    *_, last, done = answer.events
    assert done == "[DONE]" and last["usage"]["completion_tokens"] == 8


def _calls(answer: Any, stream: bool) -> tuple[str, list[list[str]], str]:
    """Content, name and arguments of each call, and the finish reason."""
    if not stream:
        (choice,) = answer.choices
        calls = choice.message.tool_calls or []
        pairs = [[call.function.name, call.function.arguments] for call in calls]
        return choice.message.content or "", pairs, choice.finish_reason
    content, pairs, reason = "", [], ""
    for chunk in answer:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or []:
            if delta.id:
                pairs.append([delta.function.name, ""])
            pairs[delta.index][1] += delta.function.arguments or ""
    return content, pairs, reason


def ask(client: OpenAI, said: str, stream: bool, **fields: Any) -> tuple[str, list[list[str]], str]:
    messages: Any = [{"role": "user", "content": f"say: {said}"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, stream=stream, **{"tools": TOOLS, **fields}
    )
    return _calls(answer, stream)


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time(client: OpenAI, stream: bool) -> None:
    first = ["weather", '{"city": "Bern"}']
    said = f"Look. {CALL}\n{CALL.replace('weather', 'time')} and more"
    assert ask(client, said, stream, parallel_tool_calls=True)[1][1][0] == "time"
    one = ask(client, said, stream, parallel_tool_calls=False)
    assert one == ("Look.", [first], "tool_calls")
    thought = f"<think>{CALL}</think>{CALL}{CALL}"
    assert ask(client, thought, stream, parallel_tool_calls=False) == ("", [first], "tool_calls")
    plain = ask(client, "no call", stream, parallel_tool_calls=False)
    assert plain == ("no call", [], "stop")
    calls = [{"name": n, "parameters": {"city": "Bern"}} for n in ("weather", "time")]
    forced = json.dumps(calls)
    both = ask(client, forced, stream, tool_choice="required")
    assert [name for name, _ in both[1]] == ["weather", "time"]
    one = ask(client, forced, stream, tool_choice="required", parallel_tool_calls=False)
    assert one == ("", [first], "tool_calls")
    named: Any = {"type": "function", "function": {"name": "weather"}}
    one = ask(client, first[1], stream, tool_choice=named, parallel_tool_calls=False)
    assert one == ("", [first], "tool_calls")
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    one = ask(client, f"{CALL}\n{CALL}", stream, tools=strict, parallel_tool_calls=False)
    assert one == ("", [first], "tool_calls")


def test_the_engine_stops_after_the_one_call(server: SimServer) -> None:
    said = CALL + " and on and on" * 20
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    answer = server.chat(f"say: {said}", **fields, return_token_ids=True, logprobs=True).json
    (choice,) = answer["choices"]
    used = answer["usage"]["completion_tokens"]
    assert used == len(choice["token_ids"]) == len(choice["logprobs"]["content"])
    assert used <= len(make_tokenizer().encode(CALL))
    wait_until(lambda: server.metric("num_requests_running") == 0, "nothing runs")


def test_allowed_tools(client: OpenAI) -> None:
    def choice(mode: str, name: str) -> Any:
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    said = '[{"name": "time", "parameters": {"city": "Bern"}}]'
    found = ask(client, said, False, tool_choice=choice("required", "time"))
    assert found == ("", [["time", '{"city": "Bern"}']], "tool_calls")
    assert ask(client, CALL, False, tool_choice=choice("auto", "weather"))[2] == "tool_calls"
    with pytest.raises(openai.BadRequestError, match="'moon' is not among the tools"):
        ask(client, "x", False, tool_choice=choice("auto", "moon"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_a_call_that_max_tokens_cuts_off_is_no_content(
    client: OpenAI, stream: bool, choice: str
) -> None:
    said = {
        "auto": f"Look. {CALL}",
        "required": '[{"name": "weather", "parameters": {"city": "Bern"}}]',
        "named": '{"city": "Bern"}',
    }[choice]
    fields: dict[str, Any] = {"tool_choice": choice}
    if choice == "named":
        fields["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    tokenizer = make_tokenizer()
    num_tokens, seen_partial = len(tokenizer.encode(said)), False
    prefix = "Look." if choice == "auto" else ""
    for max_tokens in range(1, num_tokens - 1):
        content, calls, reason = ask(client, said, stream, max_tokens=max_tokens, **fields)
        assert reason == "length"
        assert prefix.startswith(content.rstrip(" <")), (max_tokens, content)
        for name, arguments in calls:
            assert name == "weather" and '{"city": "Bern"}'.startswith(arguments)
            seen_partial = seen_partial or arguments not in ("", '{"city": "Bern"}')
    assert seen_partial


def test_text_that_is_no_call_stays_when_it_is_cut_off(client: OpenAI) -> None:
    said = "if a < b and <b> is bold then many more words"
    for max_tokens in (4, 8, 12):
        whole, calls, _ = ask(client, said, False, max_tokens=max_tokens)
        streamed, _, _ = ask(client, said, True, max_tokens=max_tokens)
        assert whole == streamed and said.startswith(whole) and whole and not calls


def test_prompt_logprobs(client: OpenAI, server: SimServer) -> None:
    tokenizer = make_tokenizer()
    prompt = "say: Hello there"
    token_ids = tokenizer.encode(prompt)
    answer: Any = client.completions.create(
        model=MODEL, prompt=[prompt, prompt], extra_body={"prompt_logprobs": 2}
    )
    for choice in answer.choices:
        first, *rest = choice.prompt_logprobs
        assert first is None and len(rest) == len(token_ids) - 1
        for token_id, position in zip(token_ids[1:], rest, strict=True):
            own = position[str(token_id)]
            assert own["logprob"] <= 0 and own["rank"] >= 1
            assert own["decoded_token"] == tokenizer.decode([token_id])
            assert 2 <= len(position) <= 3
    chat = server.chat("say: Hello", prompt_logprobs=0).json
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(position) == 1 for position in chat["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in server.chat("say: Hello").json
    echoed = server.complete(prompt, echo=True, logprobs=0, prompt_logprobs=2, max_tokens=0).json
    (choice,) = echoed["choices"]
    assert all(len(best) == 1 for best in choice["logprobs"]["top_logprobs"][1:])
    assert len(choice["prompt_logprobs"]) == len(token_ids)


def test_choices_count_against_the_limits() -> None:
    config = ServerConfig(port=0, max_concurrency=4, max_concurrency_per_key=3)
    with sim_server(config, step_ms=20.0) as server:
        for answer, param in (
            (server.chat("hi", n=4), "n"),
            (server.complete(["hi"] * 5), "prompt"),
            (server.complete(["hi"] * 2, n=2), "prompt"),
        ):
            assert answer.status == 400 and answer.error["param"] == param
            assert "3 answers at most (--max-concurrency-per-key)" in answer.error["message"]
            assert "several calls" in answer.error["message"]
        assert server.complete(["say: a"] * 3).status == 200
        stream = server.open_stream("count: 400", n=2)
        wait_until(lambda: server.metric("num_requests_running") == 2, "two run")
        answer = server.complete(["hi"] * 2)
        assert answer.status == 429 and int(answer.headers["retry-after"]) >= 1
        assert "2 requests of this key are running; the limit is 3" in answer.error["message"]
        assert server.chat("say: one").status == 200
        stream.close()
        wait_until(lambda: server.complete(["hi"] * 3).status == 200, "there is room again")


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (ServerConfig(port=0), "1024 answers at most (--max-concurrency)"),
        (ServerConfig(port=0, max_concurrency=9999), "64 answers at most (--max-queue)"),
    ],
    ids=["concurrency", "queue"],
)
def test_what_can_never_run_is_a_bad_request(config: ServerConfig, flag: str) -> None:
    queue = 64 if config.max_concurrency == 9999 else 1024
    with sim_server(config, SchedulerConfig(max_model_len=512, max_waiting=queue)) as server:
        answer = server.complete(["hi"] * 2000, max_tokens=1)
        assert answer.status == 400, answer.body
        assert flag in answer.error["message"] and "2000 prompts" in answer.error["message"]
        fits = int(flag.split()[0])
        assert server.complete(["hi"] * fits, max_tokens=1).status == 200

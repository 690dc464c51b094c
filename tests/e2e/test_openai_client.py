"""The official openai client against the server over a real socket, with a simulated engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from api.sim import DEFAULT_TEXT, MAX_MODEL_LEN, MODEL, make_tokenizer
from api.sim_server import sim_server
from tokenmill.core.config import SchedulerConfig, ServerConfig

KEY = "secret"
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": CITY_SCHEMA},
    }
    for name in ("weather", "time")
]
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with sim_server(ServerConfig(port=0, api_keys=(KEY,))) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as opened:
        yield opened


def ask(client: OpenAI, content: str, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], **fields
    )


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "tokenmill"


def test_chat(client: OpenAI) -> None:
    answer = ask(client, "hello")
    (choice,) = answer.choices
    assert choice.message.content == DEFAULT_TEXT
    assert choice.message.role == "assistant" and choice.message.tool_calls is None
    assert choice.finish_reason == "stop" and answer.model == MODEL
    usage = answer.usage
    assert usage.completion_tokens == len(make_tokenizer().encode(DEFAULT_TEXT)) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_cached_prompt_tokens_are_reported(client: OpenAI) -> None:
    prompt = "a prompt of more than one block " * 4
    first = ask(client, prompt).usage
    second = ask(client, prompt).usage
    assert first.prompt_tokens_details.cached_tokens < 16
    assert second.prompt_tokens_details.cached_tokens >= second.prompt_tokens - 16
    salted = ask(client, prompt, extra_body={"cache_salt": "mine"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_streamed_text_is_the_whole_text(client: OpenAI) -> None:
    text = "naïve café 😀👍 数字 and more"
    for prompt in ("hello", f"say: {text}"):
        whole = ask(client, prompt)
        chunks = list(ask(client, prompt, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == (
            whole.choices[0].message.content
        )
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert len({c.id for c in chunks}) == 1


def test_the_stream_helper_understands_the_events(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "say: Hello there"}]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and "content.done" in kinds
    assert final.choices[0].message.content == "Hello there"


def test_n_choices_have_indexes(client: OpenAI) -> None:
    whole = ask(client, "hello", n=3, seed=2**63 - 1)
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert {c.message.content for c in whole.choices} == {DEFAULT_TEXT}
    texts = dict.fromkeys(range(3), "")
    reasons = {}
    for chunk in ask(client, "hello", n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert set(texts.values()) == {DEFAULT_TEXT}
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: OpenAI, stream: bool) -> None:
    def text(**fields: Any) -> tuple[str, str, Any]:
        answer = ask(client, "hello", stream=stream, **fields)
        if not stream:
            (choice,) = answer.choices
            return choice.message.content, choice.finish_reason, choice.stop_reason
        choices = [c.choices[0] for c in answer]
        content = "".join(c.delta.content or "" for c in choices)
        return content, choices[-1].finish_reason, choices[-1].stop_reason

    assert text(stop="fox") == ("The quick brown ", "stop", "fox")
    assert text(stop=["never", "own f"]) == ("The quick br", "stop", "own f")
    kept = text(stop="fox", extra_body={"include_stop_str_in_output": True})
    assert kept == ("The quick brown fox", "stop", "fox")
    token = make_tokenizer().encode(DEFAULT_TEXT)[2]
    stopped = text(extra_body={"stop_token_ids": [token]})
    assert stopped == ("The quick", "stop", token)
    assert text(max_tokens=2) == ("The quick", "length", None)
    assert text(max_completion_tokens=2)[1] == "length"


def test_stop_strings_count_the_tokens_used(client: OpenAI) -> None:
    usage = ask(client, "hello", stop="fox").usage
    assert usage.completion_tokens == 4


def test_chat_logprobs(client: OpenAI) -> None:
    text = "Hello 😀 there"
    whole = ask(client, f"say: {text}", logprobs=True, top_logprobs=3).choices[0]
    content = whole.logprobs.content
    raw = b"".join(bytes(p.bytes) for p in content)
    assert raw.decode().removesuffix("<|im_end|>") == text
    assert all(len(p.top_logprobs) == 3 and p.logprob <= 0 for p in content)
    assert all(p.top_logprobs[0].token == p.token for p in content)
    streamed = [
        position
        for chunk in ask(client, f"say: {text}", logprobs=True, top_logprobs=3, stream=True)
        for position in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == content
    bare = ask(client, "hello", logprobs=True).choices[0].logprobs.content
    assert all(p.top_logprobs == [] for p in bare)
    assert ask(client, "hello").choices[0].logprobs is None


def test_completion_prompts_in_four_forms(client: OpenAI) -> None:
    tokenizer = make_tokenizer()
    say = ["say: one", "say: two"]
    token_ids = [tokenizer.encode(prompt) for prompt in say]
    prompts: list[Any] = [say[0], token_ids[0], say, token_ids]
    for prompt in prompts:
        answer = client.completions.create(model=MODEL, prompt=prompt)
        texts = [c.text for c in answer.choices]
        assert texts == (["one"] if prompt in (say[0], token_ids[0]) else ["one", "two"])
    both = client.completions.create(model=MODEL, prompt=say, n=2)
    assert [(c.index, c.text) for c in both.choices] == [
        (0, "one"),
        (1, "one"),
        (2, "two"),
        (3, "two"),
    ]
    assert both.usage is not None
    assert both.usage.prompt_tokens == len(token_ids[0]) + len(token_ids[1])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: OpenAI, stream: bool) -> None:
    prompt = "say: Hello there"
    answer: Any = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=2, stream=stream
    )
    choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
    text = "".join(c.text for c in choices)
    parts = [c.logprobs for c in choices if c.logprobs is not None]
    tokens = [t for p in parts for t in p.tokens]
    offsets = [o for p in parts for o in p.text_offset]
    logprobs = [x for p in parts for x in p.token_logprobs]
    best = [x for p in parts for x in p.top_logprobs]
    assert text == prompt + "Hello there"
    assert "".join(tokens) == text + "<|im_end|>"
    assert [text[o : o + len(t)] for o, t in zip(offsets, tokens, strict=True)][:-1] == tokens[:-1]
    assert logprobs[0] is None and all(x < 0 for x in logprobs[1:])
    assert best[0] is None and all(t in b for t, b in zip(tokens[1:], best[1:], strict=True))


def test_scoring_a_prompt_without_new_tokens(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Hello there", echo=True, logprobs=0, max_tokens=0
    )
    (choice,) = answer.choices
    assert choice.text == "Hello there" and choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.tokens == ["Hello", " there"]
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_completions_default_to_sixteen_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="count: 100")
    assert answer.usage is not None and answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_tools_auto(client: OpenAI, stream: bool) -> None:
    content = f"say: Let me look. {HERMES_CALL}"
    message, reason = _tool_answer(ask(client, content, tools=TOOLS, stream=stream), stream)
    assert message["content"] == "Let me look."
    assert message["calls"] == [("weather", {"city": "Bern"})]
    assert reason == "tool_calls"
    message, reason = _tool_answer(ask(client, "say: no", tools=TOOLS, stream=stream), stream)
    assert message == {"content": "no", "calls": []} and reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_required_and_named(client: OpenAI, stream: bool) -> None:
    calls = [
        {"name": "weather", "parameters": {"city": "Bern"}},
        {"name": "time", "parameters": {"city": "Rome"}},
    ]
    required = ask(
        client,
        f"say: {json.dumps(calls)}",
        tools=TOOLS,
        tool_choice="required",
        stream=stream,
    )
    message, reason = _tool_answer(required, stream)
    assert message["calls"] == [("weather", {"city": "Bern"}), ("time", {"city": "Rome"})]
    assert not message["content"] and reason == "tool_calls"
    named = ask(
        client,
        'say: {"city": "Oslo"}',
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "time"}},
        stream=stream,
    )
    message, reason = _tool_answer(named, stream)
    assert message["calls"] == [("time", {"city": "Oslo"})] and reason == "tool_calls"


def test_tools_none_leaves_the_text_alone(client: OpenAI) -> None:
    answer = ask(client, f"say: {HERMES_CALL}", tools=TOOLS, tool_choice="none").choices[0]
    assert answer.message.tool_calls is None and answer.message.content == HERMES_CALL
    assert answer.finish_reason == "stop"


def test_a_conversation_with_a_tool_result(client: OpenAI) -> None:
    first = ask(client, f"say: {HERMES_CALL}", tools=TOOLS).choices[0].message
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        first.model_dump(),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "say: It rains"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "It rains"


def _tool_answer(answer: Any, stream: bool) -> tuple[dict[str, Any], str]:
    """Content, calls and finish reason; stream deltas put together as OpenAI's clients do."""
    calls: list[dict[str, str]] = []
    content, reason = "", ""
    if stream:
        for chunk in answer:
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for delta in choice.delta.tool_calls or []:
                if delta.id:
                    assert delta.index == len(calls) and delta.type == "function"
                    calls.append({"name": delta.function.name, "arguments": ""})
                calls[delta.index]["arguments"] += delta.function.arguments or ""
    else:
        (choice,) = answer.choices
        content, reason = choice.message.content or "", choice.finish_reason
        for call in choice.message.tool_calls or []:
            assert call.id.startswith("call_") and call.type == "function"
            calls.append({"name": call.function.name, "arguments": call.function.arguments})
    parsed = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return {"content": content, "calls": parsed}, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_split_off(client: OpenAI, stream: bool, opened: bool) -> None:
    said = "say: Hmm, well.</think>Yes." if opened else "say: <think>Hmm, well.</think>Yes."
    extra = {"chat_template_kwargs": {"think": opened}}
    answer = ask(client, said, stream=stream, extra_body=extra)
    if stream:
        deltas = [c.choices[0].delta for c in answer]
        content = "".join(d.content or "" for d in deltas)
        reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    else:
        message = answer.choices[0].message
        content, reasoning = message.content, message.reasoning_content
    assert (reasoning, content) == ("Hmm, well.", "Yes.")


def test_continuing_a_message(client: OpenAI) -> None:
    messages: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "say: Hello"},
    ]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra)
    assert answer.choices[0].message.content == "Hello"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("response_format", {"type": "json_object"}, '{"a": 1}'),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY_SCHEMA}},
            '{"city": "Bern"}',
        ),
        ("guided_json", CITY_SCHEMA, '{"city": "Bern"}'),
        ("guided_regex", "[0-9]{3}", "123"),
        ("guided_choice", ["yes", "no"], "no"),
        ("guided_grammar", 'root ::= "ab" | "ba"', "ba"),
        ("structured_outputs", {"regex": "a+b"}, "aaab"),
        ("structured_outputs", {"choice": ["left"]}, "left"),
    ],
)
def test_structured_output(client: OpenAI, field: str, value: Any, said: str) -> None:
    answer = ask(client, f"say: {said}", extra_body={field: value})
    assert answer.choices[0].message.content == said
    forced = ask(client, "say: *", max_tokens=40, extra_body={field: value}).choices[0].message
    assert not forced.content.startswith("*")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "soup"}}}},
        {"guided_regex": "(["},
        {"guided_grammar": "root = nothing"},
        {"structured_outputs": {"regex": "a{"}},
    ],
)
def test_a_bad_schema_or_regex_is_a_bad_request(client: OpenAI, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, "hi", stream=stream, extra_body=fields)
        assert caught.value.code == "invalid_grammar"


def test_a_schema_that_is_not_json_names_its_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "hi", extra_body={"guided_json": "{not json"})
    assert (caught.value.param, caught.value.code) == ("guided_json", "invalid_value")


def test_errors_have_the_clients_types(client: OpenAI, base_url: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as unknown:
        ask(client, "hi", extra_body={"beam_width": 4})
    assert unknown.value.param == "beam_width" and unknown.value.code == "unknown_field"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, "word " * MAX_MODEL_LEN, stream=True)
    assert long.value.code == "context_length_exceeded"
    with (
        OpenAI(base_url=base_url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_failing_step_is_an_internal_error(client: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the script says so"):
        ask(client, "crash: now")
    assert ask(client, "hello").choices[0].message.content == DEFAULT_TEXT


def test_a_full_queue_is_a_rate_limit() -> None:
    limits = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=1, max_waiting=1)

    async def main(url: str) -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            calls = [
                client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "count: 50"}]
                )
                for _ in range(8)
            ]
            results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [r for r in results if isinstance(r, openai.RateLimitError)]
        answered = [r for r in results if not isinstance(r, BaseException)]
        # All may come before the first step: then one waits and is answered.
        assert refused and answered and len(refused) + len(answered) == 8
        assert all(int(r.response.headers["retry-after"]) >= 1 for r in refused)
        assert {r.code for r in refused} == {"queue_full"}

    with sim_server(limits=limits, step_ms=10.0) as server:
        asyncio.run(main(server.url))


def test_many_streams_at_once(base_url: str) -> None:
    async def one(client: AsyncOpenAI, number: int) -> None:
        text = f"stream {number} says {number * number}"
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"say: {text}"}], stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == text

    async def main() -> None:
        async with AsyncOpenAI(base_url=base_url, api_key=KEY) as client:
            await asyncio.gather(*(one(client, number) for number in range(64)))

    asyncio.run(main())

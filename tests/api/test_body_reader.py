"""Large bodies: read by another process, with the same result, and no route reads one here."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.requests import Request

from api.body_readers import count_here, end_process, process_id, refuse
from api.sim import TEMPLATE, make_tokenizer
from harmony_tokenizer import harmony_tokenizer
from tokenmill.api import body_reader, messages_routes, openai_routes, responses_routes
from tokenmill.api.body_reader import LONG_BODY_BYTES, BodyReader, Reader
from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.prepare import Preparer
from tokenmill.core.config import ServerConfig
from tokenmill.text.detokenize import Detokenizer
from tokenmill.text.tokenizer import load_tokenizer
from tokenmill.workers.messages import ModelFacts

LONG = "Hello there, how are you? " * (LONG_BODY_BYTES // 20)
TURNS = [{"role": "user", "content": LONG}]
FACTS = ModelFacts(200_000, 402, 1, 16, "none")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
READERS: dict[str, tuple[Reader[Any], dict[str, Any]]] = {
    "chat": (openai_routes.read_chat, {"messages": TURNS, "stream": True}),
    "completion": (openai_routes.read_completion, {"prompt": LONG}),
    "tokenize": (openai_routes.read_tokenize, {"prompt": LONG, "return_token_strs": True}),
    "detokenize": (openai_routes.read_detokenize, {"tokens": [99] * LONG_BODY_BYTES}),
    "message": (messages_routes.read_message, {"model": "m", "max_tokens": 9, "messages": TURNS}),
    "count": (messages_routes.read_count, {"model": "m", "messages": TURNS}),
    "response": (responses_routes.read_response, {"input": LONG, "store": False}),
    "input tokens": (responses_routes.read_input_count, {"input": LONG}),
}


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BodyReader]:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reader = BodyReader(load_tokenizer(folder), lambda: FACTS, ServerConfig(), "m")
    yield reader
    reader.close()


def read(bodies: BodyReader, reader: Reader[Any], body: bytes, **more: Any) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": []}
    return asyncio.run(bodies.read(Request(scope, receive), reader, **more))


def encode(call: dict[str, Any]) -> bytes:
    return json.dumps(call).encode()


def essence(result: Any) -> Any:
    """What must be the same in both processes: all but ids and times."""
    if not hasattr(result, "job"):
        return result
    job, form = result.job, getattr(result, "form", None)
    (request,) = job.requests
    prompt = job.prompts[0].text, request.prompt_token_ids, request.sampling
    return (*prompt, list(job.hash_inputs[0]), type(form), getattr(result, "streams", None))


@pytest.mark.parametrize("name", READERS)
def test_long_bodies_are_read_alike_and_not_here(
    name: str, bodies: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, call = READERS[name]
    expected = asyncio.run(reader(encode(call), bodies.preparer, "m"))  # type: ignore[arg-type]

    def decodes_here(*_: Any) -> Any:
        raise AssertionError("a long body was decoded in the process of the server")

    for module in (openai_routes, messages_routes, responses_routes):
        monkeypatch.setattr(module, "decode_call", decodes_here)
    result = read(bodies, reader, encode(call))
    assert essence(result) == essence(expected)
    form = getattr(result, "form", None)
    assert getattr(form, "_tokenizer", None) in (None, bodies.preparer.tokenizer)


def test_short_bodies_stay_and_fields_without_effect_come_back(bodies: BodyReader) -> None:
    assert read(bodies, process_id, b"x" * LONG_BODY_BYTES) == os.getpid()
    bodies.preparer.ignored = type(bodies.preparer.ignored)()
    assert read(bodies, process_id, b"x" * (LONG_BODY_BYTES + 1)) != os.getpid()
    assert bodies.preparer.ignored.names == ["a field"]


def test_errors_of_long_bodies_are_those_of_short_ones(bodies: BodyReader) -> None:
    with pytest.raises(ApiError) as caught:
        read(bodies, refuse, LONG.encode())
    error = caught.value
    assert (error.status, str(error), error.param, error.code) == (400, "no", "prompt", "a_code")


def test_a_call_that_refers_to_stored_items_is_read_here(bodies: BodyReader) -> None:
    body = encode({"input": LONG, "previous_response_id": "resp_1"})
    reader: Any = responses_routes.read_response
    assert read(bodies, reader, body, here=count_here) == len(body)


def test_a_process_that_dies_ends_one_call(bodies: BodyReader) -> None:
    with pytest.raises(ApiError, match="was ended") as caught:
        read(bodies, end_process, LONG.encode())
    assert caught.value.status == 500
    assert read(bodies, process_id, LONG.encode()) != os.getpid()


@pytest.mark.parametrize("make", [make_tokenizer, harmony_tokenizer])
def test_readers_of_tools_and_reasoning_pass_between_processes(make: Callable[[], Any]) -> None:
    tokenizer = make()
    config = ServerConfig(template_date="2026-11-16", reasoning_parser="auto")
    preparer = Preparer(tokenizer, lambda: FACTS, config)
    body = encode({"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]})
    call: Any = asyncio.run(openai_routes.read_chat(body, preparer, "m"))
    passed = body_reader._loads(body_reader._dumps(call), tokenizer)
    ids = tokenizer.encode("Hello world!", False)
    texts = [
        str(each.job.make_reader(Detokenizer(tokenizer), True).push(ids)) for each in (call, passed)
    ]
    assert texts[0] == texts[1]

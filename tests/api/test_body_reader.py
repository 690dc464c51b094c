"""Large bodies: read by another process, with the same result, and no route reads one here."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from api.body_readers import count_here, end_process, hang, process_id, refuse, take_a_while
from api.sim import TEMPLATE, make_loader, make_tokenizer
from api.sim_server import wait_until
from harmony_tokenizer import harmony_tokenizer
from tokenmill.api import (
    messages_routes,
    openai_routes,
    responses_routes,
    server,
)
from tokenmill.api.access import Calls
from tokenmill.api.bodies import body_processes, body_reader
from tokenmill.api.bodies.body_processes import LONG_BODY_BYTES
from tokenmill.api.bodies.body_reader import BodyReader, Reader
from tokenmill.api.bodies.fair_share import FairShare
from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.prepare import Preparer
from tokenmill.api.server import ServerError
from tokenmill.core.config import ServerConfig
from tokenmill.core.images import VisionConfig
from tokenmill.text.detokenize import Detokenizer
from tokenmill.text.tokenizer import load_tokenizer
from tokenmill.vision.loader import ImageLoader
from tokenmill.workers.messages import ModelFacts

LONG = "Hello there, how are you? " * (LONG_BODY_BYTES // 20)
TURNS = [{"role": "user", "content": LONG}]
PLACE = Calls(ServerConfig()).enter("a")
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


IMAGES = [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "data:,"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_bodies(folder: Path, images: ImageLoader | None = None) -> BodyReader:
    return BodyReader(load_tokenizer(folder), lambda: FACTS, ServerConfig(), "m", images)


@pytest.fixture(scope="module")
def bodies(folder: Path) -> Iterator[BodyReader]:
    with closing(make_bodies(folder)) as reader:
        yield reader


def request(body: bytes, gone: asyncio.Event) -> Request:
    """A call whose client goes away when `gone` is set."""
    messages = iter([{"type": "http.request", "body": body}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


def read(bodies: BodyReader, reader: Reader[Any], body: bytes, **more: Any) -> Any:
    async def main() -> Any:
        return await bodies.read(request(body, asyncio.Event()), PLACE, reader, **more)

    return asyncio.run(main())


def encode(call: dict[str, Any]) -> bytes:
    return json.dumps(call).encode()


def essence(result: Any) -> Any:
    """What must be the same in both processes: all but ids and times."""
    if not hasattr(result, "job"):
        return result
    job, form = result.job, getattr(result, "form", None)
    (request,) = job.requests
    prompt = job.prompts[0].text, request.task.prompt_token_ids, request.task.sampling
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
    bodies.processes._places = FairShare(5)

    async def main() -> list[Any]:
        readers = end_process, take_a_while
        calls = [
            bodies.read(request(LONG.encode(), asyncio.Event()), PLACE, each) for each in readers
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    error, other = asyncio.run(main())
    assert isinstance(error, ApiError) and error.status == 500 and "was ended" in str(error)
    assert isinstance(other, int) and other != os.getpid()


def test_a_process_that_dies_while_it_is_idle_ends_no_call(bodies: BodyReader) -> None:
    dead = read(bodies, process_id, LONG.encode())
    (process,) = [each for each in bodies.processes._processes._idle if each.pid == dead]
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: not process.is_alive, "it is dead")
    assert read(bodies, process_id, LONG.encode()) not in (dead, os.getpid())


def test_a_body_is_given_up_after_a_while_or_when_its_client_goes(
    bodies: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies.processes._places = FairShare(3)
    with monkeypatch.context() as patch:
        patch.setattr(body_processes, "READ_S", 0.01)
        with pytest.raises(ApiError, match=r"within 0\.01 s"):
            read(bodies, hang, LONG.encode())

    async def leave() -> None:
        gone = asyncio.Event()
        call = asyncio.create_task(bodies.read(request(LONG.encode(), gone), PLACE, hang))
        while not bodies.processes._processes._busy:
            await asyncio.sleep(0)
        gone.set()
        with pytest.raises(ClientDisconnect):
            await call

    asyncio.run(leave())
    assert read(bodies, process_id, LONG.encode()) != os.getpid()


def test_a_process_that_cannot_load_the_tokenizer_is_done_without(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(folder, gone)
    with closing(make_bodies(gone)) as bodies, caplog.at_level(logging.WARNING):
        shutil.rmtree(gone)
        for _ in range(2):
            assert read(bodies, process_id, LONG.encode()) == os.getpid()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "cannot load the tokenizer" in said


def test_only_calls_with_images_are_read_here(folder: Path) -> None:
    def chat(content: Any) -> bytes:
        return encode({"messages": [{"role": "user", "content": content}]})

    images = make_loader(VisionConfig(), make_tokenizer())
    with closing(make_bodies(folder, images)) as bodies:
        assert not bodies._goes_elsewhere(chat(IMAGES))
        assert read(bodies, process_id, chat('An "image" of type image. ' + LONG)) != os.getpid()
        hidden = chat(IMAGES).replace(b'"image_url"', b'"im\\u0061ge_url"')
        reader: Any = openai_routes.read_chat
        assert read(bodies, reader, hidden, here=count_here) == len(hidden)


def test_processes_end_with_a_server_that_cannot_listen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.gc, "freeze", lambda: None)
    monkeypatch.setattr(server.gc, "set_threshold", lambda young: None)

    def listen(backlog: int) -> None:
        raise OSError("taken")

    listener: Any = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1), listen=listen)
    nothing: Any = SimpleNamespace(tls=None, config=ServerConfig(), drain=None)
    api = SimpleNamespace(metrics=None, keys=nothing, config=nothing.config, calls=None)
    bodies = make_bodies(folder)
    app: Any = SimpleNamespace(state=SimpleNamespace(api=api, bodies=bodies))
    service = server.text_service(nothing, app)
    work = server.answer_calls(service, listener, nothing, nothing, lambda url: None)
    with pytest.raises(ServerError, match="taken"):
        asyncio.run(work)
    assert bodies.processes.is_closed


@pytest.mark.parametrize(("cores", "fronts", "expected"), [(64, 1, 4), (8, 4, 2), (2, 8, 1)])
def test_processes_are_bounded_by_the_cores_of_a_front(
    cores: int, fronts: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert body_processes._num_processes(fronts) == expected


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

"""The Responses and Messages APIs through a router: stored responses stay with their backend."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI

from api.sim import MODEL as SIM
from api.sim import make_loader, make_tokenizer
from api.sim_server import SimServer, sim_server, wait_until
from api.video_app import in_loop, video_app
from proxy.route_server import MODEL, Handler, Scripted, router_process
from tokenmill.core.config import PoolConfig, RouteConfig, RouterConfig, ServerConfig
from tokenmill.core.images import VisionConfig
from tokenmill.proxy.backends import ResponseOwners
from tokenmill.proxy.call_prompt import read_prompt
from tokenmill.proxy.forwarding import stored_in
from vision.pictures import data_url, file_of, photo

KEY = "ours"
BACKEND_KEY = "theirs"
ROUTE = RouteConfig(health_interval_s=0.2, backend_key=BACKEND_KEY)
TURNS = 6


@pytest.fixture(scope="module")
def backends() -> Iterator[list[SimServer]]:
    """Two servers, one of them with two workers."""
    config = ServerConfig(port=0, api_keys=(BACKEND_KEY,))
    with sim_server(config, pool=PoolConfig(workers=2)) as first, sim_server(config) as second:
        yield [first, second]


@contextlib.contextmanager
def routed(backends: list[SimServer]) -> Iterator[SimServer]:
    """A router by turns: only what it knows of responses keeps a conversation together."""
    urls = tuple(f"{backend.url}/v1" for backend in backends)
    config = ServerConfig(api_keys=(KEY,))
    with router_process(urls, config, RouterConfig("round-robin"), ROUTE) as router:
        yield router


@pytest.fixture(scope="module")
def router(backends: list[SimServer]) -> Iterator[SimServer]:
    with routed(backends) as running:
        yield running


def openai_client(server: SimServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def num_stored(backends: list[SimServer], response_id: str) -> int:
    headers = {"authorization": f"Bearer {BACKEND_KEY}"}
    path = f"/v1/responses/{response_id[:-33]}"  # the account is in the rest
    return sum(b.call("GET", path, headers=headers).status == 200 for b in backends)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_stays_with_its_backend(
    router: SimServer, backends: list[SimServer], stream: bool
) -> None:
    with openai_client(router) as client:
        previous: str | None = None
        for turn in range(TURNS):
            fields: Any = {
                "model": SIM,
                "input": f"say: turn {turn}",
                "previous_response_id": previous,
            }
            if stream:
                with client.responses.stream(**fields) as events:
                    answer: Any = events.get_final_response()
            else:
                answer = client.responses.create(**fields)
            assert answer.output_text == f"turn {turn}"
            previous = answer.id
        assert previous is not None and num_stored(backends, previous) == 1
        items = client.responses.input_items.list(previous, limit=100).data
        assert len(items) == 2 * TURNS - 1
        assert client.responses.retrieve(previous).output_text == f"turn {TURNS - 1}"
        assert client.responses.delete(previous) is None
        with pytest.raises(openai.NotFoundError, match=f"no response '{previous}'"):
            client.responses.retrieve(previous)
        with pytest.raises(openai.NotFoundError, match="send the conversation as input"):
            client.responses.create(model=SIM, input="x", previous_response_id=previous)


def test_conversations_are_spread(router: SimServer) -> None:
    with openai_client(router) as client:
        before = [worker["routed"] for worker in workers(router)]
        for _ in range(4):
            client.responses.create(model=SIM, input="say: x")
        after = [worker["routed"] for worker in workers(router)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 2]


def workers(router: SimServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = router.call("GET", "/workers").json["workers"]
    return found


def test_a_new_router_finds_the_backend(router: SimServer, backends: list[SimServer]) -> None:
    with openai_client(router) as client:
        ids = [client.responses.create(model=SIM, input="say: x").id for _ in range(2)]
    with routed(backends) as fresh, openai_client(fresh) as client:
        for response_id in ids:
            items = client.responses.retrieve(response_id).output
            references: Any = [{"type": "item_reference", "id": item.id} for item in items]
            question: Any = {"role": "user", "content": "say: by reference"}
            referred = client.responses.create(model=SIM, input=[*references, question])
            assert referred.output_text == "by reference"
            answer = client.responses.create(
                model=SIM, input="say: again", previous_response_id=response_id
            )
            assert answer.output_text == "again"
            assert client.responses.retrieve(response_id).output_text == "x"


def test_messages_pass_with_either_header(router: SimServer) -> None:
    messages: Any = [{"role": "user", "content": "say: hello there"}]
    fields: Any = {"model": SIM, "max_tokens": 20, "messages": messages}
    for keys in ({"api_key": KEY}, {"auth_token": KEY}):
        with Anthropic(base_url=router.url, max_retries=0, **keys) as client:
            assert client.messages.create(**fields).content[0].text == "hello there"  # type: ignore[union-attr]
            with client.messages.stream(**fields) as stream:
                assert stream.get_final_text() == "hello there"
            assert client.messages.count_tokens(model=SIM, messages=messages).input_tokens > 0
            with pytest.raises(anthropic.BadRequestError, match="top_k: 'x'"):
                client.messages.create(**fields, extra_body={"top_k": "x"})
    with (
        Anthropic(base_url=router.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError, match="x-api-key"),
    ):
        client.messages.create(**fields)
    assert router.metric("requests_total", 'endpoint="/v1/messages"') > 0


def test_a_stored_response_whose_backend_is_down(backends: list[SimServer]) -> None:
    config = ServerConfig(port=0, api_keys=(BACKEND_KEY,))
    with (
        sim_server(config) as short,
        routed([backends[1], short]) as router,
        openai_client(router) as client,
    ):
        answers = [client.responses.create(model=SIM, input="say: x") for _ in range(2)]
        (lost,) = [a.id for a in answers if num_stored([short], a.id)]
        short.process.terminate()
        short.process.wait()
        wait_until(lambda: "failed" in [w["state"] for w in workers(router)], "the router noticed")
        for call in (
            lambda: client.responses.retrieve(lost),
            lambda: client.responses.create(model=SIM, input="x", previous_response_id=lost),
        ):
            with pytest.raises(openai.APIStatusError, match=r"is stored at .+ is down") as info:
                call()
            assert info.value.status_code == 503


def test_a_cut_stream_ends_in_an_event_of_its_api() -> None:
    def cut(handler: Handler) -> None:
        handler.start_stream()
        handler.chunk(b'event: x\ndata: {"type": "x"}\n\n')
        handler.cut()

    backend = Scripted(MODEL)
    backend.behaviour = cut
    try:
        with router_process((backend.url,)) as router:
            for path in ("/v1/messages", "/v1/responses"):
                answer = router.call("POST", path, {"model": MODEL, "stream": True})
                name, data = answer.body.decode().split("\n\n")[1].split("\n")
                event = json.loads(data.removeprefix("data: "))
                assert name == "event: error" and event["type"] == "error"
                if path == "/v1/messages":
                    assert event["error"]["type"] == "api_error"
                else:
                    assert event["sequence_number"] == 1 and event["code"] == "backend_lost"
            backend.stop()
            down = router.call("POST", "/v1/messages", {"model": MODEL})
            assert down.status == 503 and down.json["error"]["type"] == "overloaded_error"
    finally:
        backend.stop()


def test_prompts_are_those_of_the_chat() -> None:
    """The same conversation in three APIs is the same prompt for the router."""
    tokenizer = make_tokenizer()
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    turns.append({"role": "user", "content": "three"})
    system = {"role": "system", "content": "be brief"}
    function = {"name": "f", "parameters": {"type": "object"}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": [system, *turns],
            "tools": [{"type": "function", "function": function}],
        },
        "/v1/responses": {
            "input": turns,
            "instructions": "be brief",
            "tools": [{"type": "function", **function}],
        },
        "/v1/messages": {
            "messages": turns,
            "system": [{"type": "text", "text": "be brief"}],
            "max_tokens": 5,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
    }
    prompts = [
        read_prompt(json.dumps({"model": SIM, **body}).encode(), tokenizer, path)
        for path, body in bodies.items()
    ]
    assert prompts[0].token_ids == prompts[1].token_ids == prompts[2].token_ids
    odd = {"model": SIM, "input": [{"type": "of next year"}], "previous_response_id": "resp_1"}
    prompt = read_prompt(json.dumps(odd).encode(), tokenizer, "/v1/responses")
    assert prompt.token_ids and prompt.previous_response_id == "resp_1"


def test_owners_are_learned_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.proxy.backends.MAX_KNOWN", 2)
    owners = ResponseOwners()
    owners.learn(b'event: response.created\ndata: {"response":{"id":"resp_1","x":1}}', "a")
    owners.learn(b'{"id": "resp_2", "previous_response_id": "resp_1"}', "b")
    owners.learn(b'{"error": {"message": "no"}}', "c")
    assert [owners.find(f"resp_{n}") for n in (1, 2, 3)] == ["a", "b", None]
    owners.find("resp_1")
    owners.note("resp_4", "c")
    assert [owners.find(f"resp_{n}") for n in (1, 2, 4)] == ["a", None, "c"]
    paths = ("/v1/responses/resp_1", "/v1/responses/resp_1/input_items", "/v1/responses")
    assert [stored_in(path) for path in paths] == ["resp_1", "resp_1", ""]
    assert stored_in("/v1/responses/input_tokens") == stored_in("/v1/models/x") == ""
    paths = ("/v1/videos/video_1/content", "/v1/videos/sync", "/v1/videos/generations")
    assert [stored_in(path) for path in paths] == ["video_1", "", ""]


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
@in_loop
async def test_a_video_stays_with_its_backend(tmp_path: Path) -> None:
    async with (
        video_app(tmp_path / "0") as first,
        video_app(tmp_path / "1") as second,
        AsyncExitStack() as stack,
    ):
        turns = RouterConfig("round-robin")
        router = router_process((first.url, second.url), ServerConfig(), turns)
        url = (await asyncio.to_thread(router.__enter__)).url
        stack.push_async_callback(asyncio.to_thread, router.__exit__, None, None, None)
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        await stack.enter_async_context(client)
        names = [(await client.videos.create(prompt="a", size="32x16")).id for _ in range(2)]  # type: ignore[arg-type]
        assert {name in first.state.jobs.store for name in names} == {True, False}
        for name in names:
            app = first if name in first.state.jobs.store else second
            await app.finish(name, name.encode())
            for _ in range(2):  # whose turn it is does not matter
                assert (await client.videos.retrieve(name)).status == "completed"
            assert (await client.videos.download_content(name)).read() == name.encode()
            assert (await client.videos.delete(name)).deleted and name not in app.state.jobs.store
        with pytest.raises(openai.NotFoundError, match="there is no video"):
            await client.videos.retrieve(names[0])
        with pytest.raises(openai.APIStatusError, match="ask each of its backends"):
            await client.videos.list()


def test_images_count_as_their_tokens_and_by_their_content() -> None:
    tokenizer = make_tokenizer(sees=True)
    processor = make_loader(VisionConfig(), tokenizer).processor
    one, other = (data_url(file_of(photo(128, 96, seed), "PNG")) for seed in (1, 2))

    def ids(path: str, content: Any, **fields: Any) -> list[int]:
        body = {"model": SIM, "messages": [{"role": "user", "content": content}], **fields}
        return list(read_prompt(json.dumps(body).encode(), tokenizer, path, processor).token_ids)

    def chat(url: str, **fields: Any) -> list[int]:
        image = {"type": "image_url", "image_url": {"url": url, **fields}}
        return ids("/v1/chat/completions", [{"type": "text", "text": "see"}, image])

    plain = ids("/v1/chat/completions", "see")
    first, again, second = chat(one), chat(one), chat(other)
    assert first == again != second and len(first) == len(second) >= len(plain) + 12
    known = 0
    while first[known] == second[known]:
        known += 1
    assert known > 0 and first[known + 12 :] == second[known + 12 :]
    assert len(chat(one, max_pixels=4096)) < len(first)
    far = chat("https://example.com/cat.png")
    assert far == chat("https://example.com/cat.png") and len(far) > len(plain) + 256
    source = {"type": "base64", "media_type": "image/png", "data": one.partition(",")[2]}
    block = [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
    assert ids("/v1/messages", block, max_tokens=1)[: len(first) - 12] == first[: len(first) - 12]
    broken = chat("data:image/png;base64,AAAA")
    assert broken == chat("data:image/png;base64,AAAA") != plain

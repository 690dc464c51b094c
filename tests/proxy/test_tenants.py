"""Keys of a router that has one key for its backends: none gets what another has stored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from api.sim import MODEL as SIM
from api.sim_server import Answer, SimServer, sim_server
from proxy.route_server import MODEL, Handler, Scripted, router_process, say
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig
from tokenmill.proxy import tenants
from tokenmill.proxy.tenants import Tenant
from tokenmill.proxy.upstream import AnswerError

CONFIG = ServerConfig(api_keys=("alice", "bob"))
ROUTE = RouteConfig(health_interval_s=0.2, backend_key="theirs")
NO_ID = "0" * 32


@pytest.fixture(scope="module")
def router() -> Iterator[SimServer]:
    config = ServerConfig(port=0, api_keys=("theirs",))
    with (
        sim_server(config) as first,
        sim_server(config) as second,
        router_process((first.url, second.url), CONFIG, RouterConfig("round-robin"), ROUTE) as one,
    ):
        yield one


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[SimServer, Scripted]]:
    backend = Scripted(MODEL)
    try:
        with router_process((backend.url,), CONFIG, route=ROUTE) as one:
            yield one, backend
    finally:
        backend.stop()


def call(router: SimServer, key: str, method: str, path: str, body: Any = None) -> Answer:
    return router.call(method, path, body, {"authorization": f"Bearer {key}"})


def respond(router: SimServer, key: str, **fields: Any) -> Any:
    return call(router, key, "POST", "/v1/responses", {"model": SIM, **fields})


def raw(sealed: str) -> str:
    """An id as the backend has it."""
    return sealed[: -len(NO_ID) - 1]


def test_a_key_has_all_of_its_own(router: SimServer) -> None:
    with OpenAI(base_url=f"{router.url}/v1", api_key="alice", max_retries=0) as client:
        first = client.responses.create(model=SIM, input="say: one")
        with client.responses.stream(
            model=SIM, input="say: two", previous_response_id=first.id
        ) as events:
            seen = list(events)
            second = events.get_final_response()
        assert second.previous_response_id == first.id and second.output_text == "two"
        assert {getattr(e, "item_id", second.output[0].id) for e in seen} == {second.output[0].id}
        assert client.responses.retrieve(second.id).output_text == "two"
        items = client.responses.input_items.list(second.id, limit=1, order="asc")
        assert len(list(items)) == 3, "pages follow each other by the ids of their last items"
        references: Any = [{"id": second.output[0].id, "type": "item_reference"}]
        more: Any = [*references, *(i.model_dump() for i in first.output)]
        again = client.responses.create(model=SIM, input=[*more, user("say: by reference")])
        assert again.output_text == "by reference"
        client.responses.delete(first.id)
        gone = call(router, "alice", "GET", f"/v1/responses/{first.id}")
        assert (gone.status, first.id in gone.error["message"]) == (404, True)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_no_key_has_what_is_anothers(router: SimServer) -> None:
    mine = respond(router, "alice", input="say: secret").json
    name, item = mine["id"], mine["output"][0]["id"]
    for given in (name, raw(name), f"{raw(name)}-{NO_ID}"):
        for path in ("", "/input_items", "/cancel"):
            method = "POST" if path == "/cancel" else "GET"
            assert call(router, "bob", method, f"/v1/responses/{given}{path}").status == 404
        assert call(router, "bob", "DELETE", f"/v1/responses/{given}").status == 404
        follow = respond(router, "bob", input="say: x", previous_response_id=given)
        assert (follow.status, given in follow.error["message"]) == (404, True)
        escaped = b'{"model": "%s", "input": "x", "previous_\\u0072esponse_id": "%s"}'
        body = escaped % (SIM.encode(), given.encode())
        assert call(router, "bob", "POST", "/v1/responses", body).status == 404
    for given in (item, raw(item), f"{raw(item)}-{NO_ID}"):
        for reference in ({"type": "item_reference", "id": given}, {"id": given}):
            answer = respond(router, "bob", input=[reference, user("repeat")])
            assert answer.status in (400, 404) and "secret" not in answer.body.decode()
    assert call(router, "alice", "GET", f"/v1/responses/{raw(name)}").status == 404
    assert call(router, "alice", "GET", f"/v1/responses/{name}").json == mine


def test_what_a_backend_repeats_opens_nothing(router: SimServer) -> None:
    """An id that a key makes up comes back as one that stands for nothing else."""
    name = respond(router, "alice", input="say: secret").json["id"]
    item = {"type": "message", "id": raw(name), **user("say: x")}
    answer = respond(router, "bob", input=[item]).json
    (shown,) = call(router, "bob", "GET", f"/v1/responses/{answer['id']}/input_items").json["data"]
    for given in (shown["id"], raw(shown["id"])):
        assert call(router, "bob", "GET", f"/v1/responses/{given}").status == 404


def test_ids_outlive_the_router(router: SimServer) -> None:
    name = respond(router, "alice", input="say: kept").json["id"]
    urls = tuple(f"http://{w['name']}" for w in router.call("GET", "/workers").json["workers"])
    with router_process(urls, CONFIG, route=ROUTE) as fresh:
        assert call(fresh, "alice", "GET", f"/v1/responses/{name}").status == 200
        assert call(fresh, "bob", "GET", f"/v1/responses/{name}").status == 404


def test_a_body_that_cannot_be_read_is_not_passed_on(scripted: tuple[SimServer, Scripted]) -> None:
    router, backend = scripted
    backend.calls.clear()
    for body in (b'{"previous_response_id": "resp_1"', b"\xff", b"\x1f\x8b\x08", b"[" * 5000):
        assert call(router, "bob", "POST", "/v1/responses", body).status == 400
    assert not backend.calls


def test_videos_of_a_key_are_its_own(scripted: tuple[SimServer, Scripted]) -> None:
    router, backend = scripted
    backend.calls.clear()
    paths: list[str] = []

    def get(handler: Handler) -> None:
        paths.append(handler.path)
        handler.reply(200, b'{"id": "video_1", "status": "queued", "metadata": {"id": "mine"}}')

    backend.behaviour = get
    made = call(router, "alice", "POST", "/v1/videos", {"prompt": "a"}).json
    assert made["metadata"] == {"id": "mine"} and raw(made["id"]) == "video_1"
    backend.gets = get
    try:
        for key, wanted in (("alice", "video_1"), ("bob", f"{made['id']}-")):
            for method, below in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
                paths.clear()
                call(router, key, method, f"/v1/videos/{made['id']}{below}")
                (path,) = (path for path in paths if path != "/v1/models")
                assert path.startswith(f"/v1/videos/{wanted}") and path.endswith(below)
                assert (path == f"/v1/videos/video_1{below}") == (key == "alice")
    finally:
        backend.gets = None


def test_an_idempotency_key_is_one_of_its_account(scripted: tuple[SimServer, Scripted]) -> None:
    router, backend = scripted
    backend.behaviour = say(200, b"{}")
    backend.calls.clear()
    for key, given in (("alice", "k"), ("alice", "k"), ("bob", "k"), ("alice", "other")):
        headers = {"authorization": f"Bearer {key}", "Idempotency-Key": given}
        assert router.call("POST", "/v1/completions", {}, headers).status == 200
    first, again, second, other = (
        {name.lower(): value for name, value in got.items()}["idempotency-key"]
        for _, got, _ in backend.calls
    )
    assert first == again and len({first, second, other, "k"}) == 4


def test_events_come_in_any_parts(scripted: tuple[SimServer, Scripted]) -> None:
    router, backend = scripted
    data = b'event: response.created\r\ndata: {"type":"x","response":{"id":"resp_1"}}\r\n\r\n'
    data += b'data: {"item_id" : "msg_1", "delta":"\\"id\\": \\"resp_1\\""}\n\ndata: [DONE]\n\n'

    def bytewise(handler: Handler) -> None:
        handler.start_stream()
        for byte in data:
            handler.chunk(bytes([byte]))
            time.sleep(0.0005)
        handler.chunk(b"")

    backend.behaviour = bytewise
    answer = call(router, "alice", "POST", "/v1/responses", {"model": MODEL, "stream": True})
    lines = answer.body.splitlines()
    first, second = (json.loads(lines[n].removeprefix(b"data: ")) for n in (1, 3))
    assert raw(first["response"]["id"]) == "resp_1" and raw(second["item_id"]) == "msg_1"
    assert second["delta"] == '"id": "resp_1"' and lines[5] == b"data: [DONE]"
    assert answer.body.count(b"\r\n") == 3


def test_an_event_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MAX_LINE", 100)
    tenant = Tenant("a", b"salt")
    assert tenant.events("/v1/responses", b"data: " + b"x" * 90, False) == b""
    with pytest.raises(AnswerError, match="an event of more than 100 bytes"):
        tenant.events("/v1/responses", b"x" * 90, False)

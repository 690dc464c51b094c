"""Write the tables of docs/security.md: what each route answers to whom.

    python scripts/isolation_matrix.py

Every route of a language, a ranking and a video server, and of a router, is called as each kind of
caller would call it: on a server with the keys A and B, and on one without keys. Routes about
something that is stored are asked for what A has just stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]

from module_table import put  # noqa: E402

from api.sim import MODEL, make_tokenizer, worker_argv  # noqa: E402
from api.sim_server import Answer, SimServer  # noqa: E402
from api.streams import Spawner  # noqa: E402
from api.video_app import MODEL as VIDEO_MODEL  # noqa: E402
from api.video_app import SMALL, FakePool, video_app  # noqa: E402
from tokenmill.api.access import Calls  # noqa: E402
from tokenmill.api.keys import Keys  # noqa: E402
from tokenmill.api.middleware import CallMiddleware  # noqa: E402
from tokenmill.api.openai_routes import create_app  # noqa: E402
from tokenmill.api.ranking.rank_routes import make_rank_service  # noqa: E402
from tokenmill.api.server import bind, listening, url_of  # noqa: E402
from tokenmill.core.config import (  # noqa: E402
    RouteConfig,
    RouterConfig,
    SchedulerConfig,
    ServerConfig,
)
from tokenmill.core.requests import Request  # noqa: E402
from tokenmill.core.tasks import Scores  # noqa: E402
from tokenmill.core.types import EngineStats, FinishReason  # noqa: E402
from tokenmill.proxy.backends import Backends  # noqa: E402
from tokenmill.proxy.forwarding import POSTS, STORED  # noqa: E402
from tokenmill.proxy.proxy_routes import RouteApp, RouteState  # noqa: E402
from tokenmill.workers.messages import ModelFacts  # noqa: E402
from tokenmill.workers.output_stream import OutputStream  # noqa: E402
from tokenmill.workers.pool import WorkerPool  # noqa: E402

PAGE = ROOT / "docs" / "security.md"
SECRET, OWN = "Ysolde", "mine"  # in what A has stored, and in what callers send
TOKEN = "control"
KEYED = ServerConfig(port=0, api_keys=("key-a", "key-b"), log_stats=False)
OPEN = ServerConfig(port=0, log_stats=False)
JSON = {"content-type": "application/json"}
FOREIGN_HOST, FOREIGN_ORIGIN = {"host": "evil.example"}, {"origin": "https://evil.example"}
PROXY = {"x-forwarded-for": "203.0.113.7"}
Json = dict[str, Any]
Routes = list[tuple[str, str]]


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


@dataclass(frozen=True)
class Caller:
    """Who calls, and by which headers."""

    name: str
    headers: dict[str, str]


CALLERS = {
    True: (
        Caller("no key", {}),
        Caller("no key, by a proxy", PROXY),
        Caller("key A", key("key-a")),
        Caller("key A, foreign Host", key("key-a") | FOREIGN_HOST),
        Caller("key A, foreign Origin", key("key-a") | FOREIGN_ORIGIN),
        Caller("key B", key("key-b")),
        Caller("control token", key(TOKEN)),
    ),
    False: (
        Caller("this machine", {}),
        Caller("by a proxy", PROXY),
        Caller("foreign Host", FOREIGN_HOST),
        Caller("foreign Origin", FOREIGN_ORIGIN),
        Caller("control token", key(TOKEN)),
    ),
}

CHAT = {"messages": [{"role": "user", "content": f"say: {OWN}"}], "model": MODEL}
TEXT = {"model": MODEL, "input": f"say: {OWN}"}
IDS = {"item_ids": [1], "category_ids": [1]}
USER = {"user_id": 1, "history": IDS | {"actions": [1]}, "candidates": IDS}
VIDEO = SMALL | {"prompt": OWN}
# A call that the server answers; a route that is not here makes the script fail.
BODIES: dict[str, Json] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": OWN},
    "/v1/responses": TEXT,
    "/v1/responses/input_tokens": TEXT,
    "/v1/responses/{response_id}/cancel": {},
    "/v1/messages": CHAT | {"max_tokens": 9},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": OWN},
    "/detokenize": {"tokens": [1]},
    "/ping": {},
    "/v1/rank": {"users": [USER]},
    "/v1/videos": VIDEO,
    "/v1/videos/sync": VIDEO,
    "/v1/videos/generations": VIDEO,
    "/workers/scale": {"workers": 1},
    "/workers/router": {},
    "/workers/drain": {"worker": "none"},
    "/reset_prefix_cache": {},
}
# Beside a route itself: what else may name something that is stored.
NAMES_STORED = ("/v1/responses", "/v1/responses/input_tokens")
OF_A = "previous_response_id"


@dataclass(frozen=True)
class Outcome:
    status: int
    tells: bool  # what A has stored

    def __str__(self) -> str:
        return f"{self.status}, **tells**" if self.tells else str(self.status)


Row = tuple[str, list[Outcome]]


@dataclass(frozen=True)
class Site:
    """A server that listens, and how A stores something there."""

    url: str
    model: str
    routes: Routes
    store: Callable[[Json], Awaitable[str]]  # as the caller with these headers; returns the id

    async def call(self, method: str, path: str, body: Json | None, headers: Json) -> Answer:
        server = SimServer(None, self.url)  # type: ignore[arg-type]
        data = None if body is None else json.dumps(body).encode()
        given = {"authorization": "", **(JSON if body is not None else {}), **headers}
        return await asyncio.to_thread(server.call, method, path, data, given)


def routes_of(app: Any) -> Routes:
    found = [(m, route.path) for route in app.routes for m in sorted(getattr(route, "methods", ()))]
    return [(method, path) for method, path in found if method != "HEAD"]


@contextlib.asynccontextmanager
async def language(config: ServerConfig, _folder: Path) -> AsyncIterator[Site]:
    tokenizer, keys = make_tokenizer(), Keys.of(config, TOKEN, b"salt")
    pool = WorkerPool(Spawner(worker_argv(SchedulerConfig(max_model_len=512), 0.0)))
    await pool.start()
    app = create_app(pool, tokenizer, keys, MODEL)
    try:
        with contextlib.closing(bind(config.host, 0)) as listener, _closed(app.state.bodies):
            async with listening(CallMiddleware(app, keys, app.state.api.metrics), listener, keys):
                url = url_of(listener, keys)
                site = Site(url, MODEL, routes_of(app), lambda headers: _stored(site, headers))
                yield site
    finally:
        await pool.close()


_closed = contextlib.closing


class RankPool(FakePool):
    """A worker that scores every candidate alike."""

    facts = ModelFacts(about={"max_seq_len": 64, "scaling_seqlen": 0})
    num_held, num_working = 0, 1

    def submit(self, requests: list[Request]) -> OutputStream:
        stream = super().submit(requests)
        asyncio.get_running_loop().call_soon(self.answer, requests[0].request_id)
        return stream

    def answer(self, request_id: str) -> None:
        scores = Scores(scores=bytes(4))
        self._put(request_id, delta=scores, finish_reason=FinishReason.STOP)

    def known_stats(self) -> EngineStats:
        return EngineStats()

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def scale(self, num_workers: int) -> None: ...

    async def drain_worker(self, name: str, timeout_s: float) -> None: ...

    def drain(self) -> None: ...

    def fail_open(self, message: str, error_kind: str) -> None: ...


@contextlib.asynccontextmanager
async def ranking(config: ServerConfig, _folder: Path) -> AsyncIterator[Site]:
    keys, pool = Keys.of(config, TOKEN, b"salt"), RankPool()
    service = await make_rank_service(MODEL, 9, keys, pool)  # type: ignore[arg-type]
    front = CallMiddleware(service.app, keys, service.metrics, streams=False)

    async def store(headers: Json) -> str:
        return ""  # a ranking server stores nothing

    with contextlib.closing(bind(config.host, 0)) as listener:
        async with listening(front, listener, keys):
            yield Site(url_of(listener, keys), MODEL, routes_of(service.app), store)


class VideoPool(RankPool):
    content = OWN

    def answer(self, request_id: str) -> None:
        self.done(request_id, self.content.encode())


@contextlib.asynccontextmanager
async def video(config: ServerConfig, folder: Path) -> AsyncIterator[Site]:
    pool = VideoPool()
    async with video_app(folder, config, pool) as app:
        site: Site

        async def store(headers: Json) -> str:
            pool.content = SECRET
            made = await site.call("POST", "/v1/videos", VIDEO | {"prompt": SECRET}, headers)
            video_id = str(made.json["id"])
            await app.until(lambda: app.record(video_id).is_finished)
            pool.content = OWN
            return video_id

        site = Site(app.url, VIDEO_MODEL, routes_of(app.app), store)
        yield site


@contextlib.asynccontextmanager
async def router(config: ServerConfig, folder: Path) -> AsyncIterator[Site]:
    """A router before a language server with the same keys."""
    keys = Keys.of(config, TOKEN, b"salt")
    async with language(config, folder) as backend:
        backends = Backends(RouteConfig(backends=(f"{backend.url}/v1",)), RouterConfig())
        state = RouteState(backends, make_tokenizer(), keys, Calls(config))
        listener = bind(config.host, 0)
        with contextlib.closing(listener), contextlib.closing(RouteApp(state)) as app:
            try:
                await backends.start()
                async with listening(CallMiddleware(app, keys, state.metrics), listener, keys):
                    own = [route for route in routes_of(app._rest) if "videos" not in route[1]]
                    passed_on = {*POSTS, *STORED}
                    has = [r for r in own if r[1] not in passed_on or r in backend.routes]
                    site = Site(url_of(listener, keys), MODEL, has, lambda h: _stored(site, h))
                    yield site
            finally:
                await backends.close()


async def _stored(site: Site, headers: Json) -> str:
    """The id of a response with the secret, at a language server or through a router."""
    call = TEXT | {"input": f"say: {SECRET}"}
    answer = await site.call("POST", "/v1/responses", call, headers)
    assert SECRET in answer.body.decode(), answer.body
    return str(answer.json["id"])


SERVERS = {"language": language, "router": router, "ranking": ranking, "video": video}


async def outcomes(
    site: Site, method: str, path: str, keyed: bool, names_stored: bool = False
) -> list[Outcome]:
    """What the callers are answered, about what A has stored where a route is about such."""
    found = []
    for caller in CALLERS[keyed]:
        parameter = re.search(r"\{(response|video)_id\}", path)
        is_about = parameter or names_stored
        stored = await site.store(key("key-a") if keyed else {}) if is_about else ""
        where = path.replace("{model_id:path}", site.model)
        where = where.replace(parameter[0], stored) if parameter else where
        body = BODIES[path] if method == "POST" else None
        if names_stored and body is not None:
            body = body | {OF_A: stored, "input": f"say: {OWN}"}
        answer = await site.call(method, where, body, caller.headers)
        is_a = not keyed or caller.headers.items() >= key("key-a").items()
        tells = SECRET in answer.body.decode("latin-1") and not is_a
        found.append(Outcome(answer.status, tells))
    return found


async def rows_of(name: str, keyed: bool) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        async with SERVERS[name](KEYED if keyed else OPEN, Path(folder)) as site:
            await site.store(key("key-a") if keyed else {})
            for method, path in site.routes:
                rows.append((f"{method} {path}", await outcomes(site, method, path, keyed)))
                if method == "POST" and path in NAMES_STORED:
                    found = await outcomes(site, method, path, keyed, True)
                    rows.append((f"{method} {path}, {OF_A} of A", found))
    return rows


def shown(route: str) -> str:
    """A route as the tables have it: all files of the pages are alike."""
    return re.sub(r"/dashboard/[\w.]+\.\w+", "/dashboard/FILE", route.replace(":path", ""))


def table(rows: list[Row], keyed: bool) -> str:
    """Routes with the same answers are one row."""
    same: dict[tuple[str, ...], dict[str, None]] = {}
    for route, found in rows:
        same.setdefault(tuple(map(str, found)), {})[f"`{shown(route)}`"] = None
    names = [caller.name for caller in CALLERS[keyed]]
    lines = [f"| route | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {', '.join(routes)} | {' | '.join(found)} |" for found, routes in same.items()]
    return "\n".join(lines)


async def measure() -> dict[tuple[str, bool], list[Row]]:
    ways = [(name, keyed) for name in SERVERS for keyed in (True, False)]
    return {way: await rows_of(*way) for way in ways}


def render(page: str, found: dict[tuple[str, bool], list[Row]]) -> str:
    for (name, keyed), rows in found.items():
        page = put(page, f"{name} {'with keys' if keyed else 'without keys'}", table(rows, keyed))
    return page


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(render(page, asyncio.run(measure())), encoding="utf-8")


if __name__ == "__main__":
    main()

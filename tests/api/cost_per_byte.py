"""Print what each field of each call costs the server, per byte that a client sends.

    python tests/api/cost_per_byte.py [--time] [ROUTE ...]

A body is made for every text, list, object and free value that the calls of language, ranking and
video servers declare, with 64 kB in that field, and is read as the server reads it. Counted are the
lines of Python that run and the bytes that are held at once. `--time` adds the CPU time of 64 kB
and 1 MB, and what it grows by beside what the body does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import inspect

sys.path.insert(0, str(Path(__file__).parents[1]))

from api.sim import make_tokenizer
from tokenmill.api import messages_routes, openai_routes, responses_routes
from tokenmill.api.bodies.body_processes import NotElsewhereError
from tokenmill.api.bodies.body_reader import Reader
from tokenmill.api.errors import ApiError
from tokenmill.api.messages.message_request import (
    CountTokensRequest,
    MessagesRequest,
)
from tokenmill.api.open_call import OpenCall
from tokenmill.api.protocol.decoding import decode_call
from tokenmill.api.protocol.prepare import Preparer
from tokenmill.api.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tokenmill.api.ranking.rank_body import read_rank
from tokenmill.api.ranking.rank_protocol import RankCall
from tokenmill.api.responses.response_request import ResponsesRequest
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.api.videos.video_request import VideoPreparer, VideoRequest
from tokenmill.core.config import ServerConfig
from tokenmill.core.specs.wan import TINY
from tokenmill.core.types import InvalidRequestError
from tokenmill.core.video import VideoServerConfig
from tokenmill.workers.messages import ModelFacts

SMALL, LARGE = 64_000, 1_000_000  # of a field, in bytes of JSON
FACTS = ModelFacts(4_000_000, 402, 1, 16, "none")
Json = dict[str, Any]
Make = Callable[[int], Any]  # a value of so many bytes


@dataclass(frozen=True, slots=True)
class Route:
    """How the body of a call is read, what it declares, and a call that is taken."""

    reader: Reader[Any]
    kind: Any
    call: Json


TURNS = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/chat/completions": Route(
        openai_routes.read_chat, ChatCompletionRequest, {"messages": TURNS}
    ),
    "/v1/completions": Route(openai_routes.read_completion, CompletionRequest, {"prompt": "hi"}),
    "/v1/messages": Route(
        messages_routes.read_message,
        MessagesRequest,
        {"model": "m", "max_tokens": 9, "messages": TURNS},
    ),
    "/v1/messages/count_tokens": Route(
        messages_routes.read_count, CountTokensRequest, {"model": "m", "messages": TURNS}
    ),
    "/v1/responses": Route(responses_routes.read_response, ResponsesRequest, {"input": "hi"}),
    "/v1/responses/input_tokens": Route(
        responses_routes.read_input_count, ResponsesRequest, {"input": "hi"}
    ),
    "/tokenize": Route(openai_routes.read_tokenize, TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": Route(openai_routes.read_detokenize, DetokenizeRequest, {"tokens": [1]}),
}
IDS = {"item_ids": [1], "category_ids": [1]}
USER = {"user_id": 1, "history": IDS | {"actions": [1]}, "candidates": IDS}


async def _read_rank(body: bytes, *_: Any) -> None:
    read_rank(body, False, None, ServerConfig().max_concurrency)


async def _read_video(body: bytes, *_: Any) -> None:
    videos = VideoPreparer(TINY, None, VideoServerConfig())
    videos.prepare(decode_call(body, VideoRequest))


JOB_ROUTES = {
    "/v1/rank": Route(_read_rank, RankCall, {"users": [USER]}),
    "/v1/videos": Route(_read_video, VideoRequest, {"prompt": "hi"}),
}


# Bodies: for each growing field a function from its size to the body.


def bodies_of(route: Route) -> Iterator[tuple[str, Make]]:
    """The growing fields of a call, by their paths, each with what makes the body."""
    for path, make in _Fields().of_object(inspect.type_info(route.kind), ""):
        yield path, lambda size, make=make: route.call | make(size)
    yield "(a field's name)", lambda size: route.call | {"x" * size: 1}
    yield (
        "(names of fields)",
        lambda size: route.call | {f"x{i:07}": 1 for i in range(size // 12)},
    )


class _Fields:
    """What can grow in a call; an object that stands in several places is entered once."""

    def __init__(self) -> None:
        self._entered: set[type] = set()

    def of_object(self, info: inspect.StructType, path: str) -> Iterator[tuple[str, Make]]:
        """The members of an object that can grow: each function makes the whole object."""
        least = _least_object(info)
        for field in info.fields:
            name = field.encode_name
            for inner, make in self._of(field.type, f"{path}{name}"):
                yield inner, lambda size, name=name, make=make: least | {name: make(size)}

    def _of(self, info: inspect.Type, path: str) -> Iterator[tuple[str, Make]]:
        match info:
            case inspect.Metadata(type=inner):
                yield from self._of(inner, path)
            case inspect.UnionType(types=members):
                for member in members:
                    yield from self._of(member, path)
            case inspect.StrType():
                yield f"{path}: text", _text
                yield f"{path}: marks", _marks
            case inspect.AnyType():
                yield from _values(path)
            case inspect.ListType(item_type=item):
                least = _least(item)
                width = len(json.dumps(least)) + 2
                yield f"{path}[]", lambda size: [least] * (size // width)
                for inner_path, make in self._of(item, f"{path}[0]"):
                    yield inner_path, lambda size, make=make: [make(size)]
            case inspect.DictType(value_type=value):
                least = _least(value)
                width = len(json.dumps(least)) + 14
                yield f"{path}{{}}", lambda size: {f"{i:08}": least for i in range(size // width)}
                for inner_path, make in self._of(value, f"{path}{{0}}"):
                    yield inner_path, lambda size, make=make: {"0": make(size)}
            case inspect.StructType() if info.cls not in self._entered:
                self._entered.add(info.cls)
                yield from self.of_object(info, f"{path}.")


def _values(path: str) -> Iterator[tuple[str, Make]]:
    yield f"{path}: any object", lambda size: {f"{i:08}": 1 for i in range(size // 15)}
    yield f"{path}: any lists in a list", lambda size: [[1]] * (size // 5)


def _text(size: int) -> str:
    return ("Hello there, how are you? " * (size // 26 + 1))[:size]


def _marks(size: int) -> str:
    """What parsers, patterns and templates look for."""
    return ('<think>{"(a*</' * (size // 16 + 1))[: size // 8 * 7]


def _least(info: inspect.Type) -> Any:
    """The smallest value of a type that may be in a list."""
    match info:
        case inspect.Metadata(type=inner):
            return _least(inner)
        case inspect.UnionType(types=members):
            return _least(members[0])
        case inspect.StructType():
            return _least_object(info)
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.ListType():
            return []
        case inspect.DictType():
            return {}
        case inspect.StrType():
            return "a"
        case inspect.BoolType():
            return True
        case _:
            return 1


def _least_object(info: inspect.StructType) -> Json:
    tag = {} if info.tag_field is None else {info.tag_field: info.tag}
    return tag | {f.encode_name: _least(f.type) for f in info.fields if f.required}


def encoded(make: Make, size: int) -> bytes:
    """The body of a call."""
    return json.dumps(make(size)).encode()


# What they cost.


class TooManyError(BaseException):
    """More lines run than a body of this size may have; nothing is to catch it."""


class Meter:
    """Reads bodies as the server does, and counts."""

    def __init__(self, max_lines: int) -> None:
        self._loop = asyncio.new_event_loop()  # asyncio.run() makes the repr of what it returns
        self.tokenizer = make_tokenizer()
        self.preparer = Preparer(self.tokenizer, lambda: FACTS, ServerConfig(client_priority=True))
        self._metrics = ServerMetrics("m", None)
        self._max_lines = max_lines  # for a thousand bytes
        self.num_choices = 0  # of the call that was read last

    def read(self, route: Route, body: bytes) -> None:
        """Read one body, and make what follows its tokens where it is taken."""
        self.num_choices = 0
        try:
            work: Any = route.reader(body, self.preparer, "m")
            read = self._loop.run_until_complete(work)
        except (ApiError, InvalidRequestError, NotElsewhereError):
            return
        job = getattr(read, "job", None)
        if job is not None:
            self.num_choices = len(job.requests)
            OpenCall(job, self.tokenizer, self._metrics, False).close()

    def lines(self, route: Route, body: bytes) -> int:
        """The lines that run to read a body; a TooManyError ends it."""
        most = self._max_lines * (len(body) // 1000 + 20)
        return _count_lines(lambda: self.read(route, body), most)

    def peak(self, route: Route, body: bytes) -> int:
        """The bytes that are held at once to read a body."""
        tracemalloc.start()
        try:
            self.read(route, body)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def seconds(self, route: Route, body: bytes) -> float:
        """The CPU time that a body takes."""
        began_s = time.process_time()
        self.read(route, body)
        return time.process_time() - began_s


def _count_lines(work: Callable[[], None], most: int) -> int:
    """The lines that run on this thread."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        if count > most:
            sys.settrace(None)
            raise TooManyError(f"more than {most} lines, in {frame.f_code.co_qualname}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def main() -> None:
    """Print a line for each field."""
    routes = ROUTES | JOB_ROUTES
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(routes)
    meter = Meter(max_lines=10**9)
    for name in names:
        route = routes[name]
        for path, make in bodies_of(route):
            small, large = (encoded(make, size) for size in (SMALL, LARGE))
            lines, held = meter.lines(route, small), meter.peak(route, small)
            line = f"{name} {path}: {lines / len(small):.3f} lines a byte, "
            line += f"{held / len(small):.1f} bytes a byte"
            if "--time" in sys.argv:
                small_s, large_s = (meter.seconds(route, body) for body in (small, large))
                grown = large_s / small_s / len(large) * len(small)
                line += f", {small_s * 1e3:.1f} and {large_s * 1e3:.1f} ms, {grown:.2f} of linear"
            print(line, flush=True)


if __name__ == "__main__":
    main()

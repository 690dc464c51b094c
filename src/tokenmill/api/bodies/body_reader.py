"""From the body of a call to what answers it; large bodies are read by processes of their own.

Decoding JSON, rendering a template and freeing what a tokenizer made hold Python's lock, whichever
thread does them, and no stream of this process gets a token meanwhile. So a body of more than
`LONG_BODY_BYTES` goes to a process as it is. What comes back is small: the context bounds it.
"""

from __future__ import annotations

import asyncio
import io
import logging
import pickle
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from tokenmill.api.access import CallPlace, handing_on, read_bytes
from tokenmill.api.bodies.body_processes import (
    LONG_BODY_BYTES,
    BodyProcesses,
    NotElsewhereError,
    unless_gone,
)
from tokenmill.api.errors import unknown_model
from tokenmill.api.middleware import take_turn
from tokenmill.api.protocol.decoding import IgnoredFields
from tokenmill.api.protocol.prepare import PreparedCall, Preparer
from tokenmill.api.stream import ApiState, Format, GenerationResponse
from tokenmill.core.config import ServerConfig
from tokenmill.core.images import ImageInput, VisionConfig
from tokenmill.text.tokenizer import Tokenizer, TokenizerOrigin, load_tokenizer
from tokenmill.vision.loader import ImageLoader
from tokenmill.vision.processor import ImageProcessor
from tokenmill.workers.messages import ModelFacts

# Images stay here, with their cache; their base64 is a string, which is decoded at once.
_IMAGE = re.compile(rb'"type"\s*:\s*"(image|image_url|input_image)"')
_TOKENIZER = "tokenizer"  # stands for the tokenizer between processes

_log = logging.getLogger(__name__)

T = TypeVar("T")
Reader = Callable[[bytes, Preparer, str], Awaitable[T]]  # of a body for the model of this name


@dataclass(frozen=True, slots=True)
class ReadCall:
    job: PreparedCall
    form: Format
    streams: bool
    parsed_ns: int  # when the body was known to be valid


def check_model(name: str | None, served: str) -> None:
    if name is not None and name != served:
        raise unknown_model(name, served)


@dataclass(frozen=True, slots=True)
class _Setup:
    """What another process needs to read bodies alike."""

    origin: TokenizerOrigin
    config: ServerConfig
    model: str
    images: tuple[ImageProcessor, VisionConfig] | None


class BodyReader:
    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: Callable[[], ModelFacts],
        config: ServerConfig,
        model: str,
        images: ImageLoader | None = None,
    ) -> None:
        self.preparer = Preparer(tokenizer, facts, config, images)
        self._tokenizer = tokenizer
        self._facts = facts
        self._config = config
        self._model = model
        self._images = images
        self.processes = BodyProcesses(config.fronts)
        self._has_warned = False

    async def read(
        self, request: Request, place: CallPlace, reader: Reader[T], here: Reader[T] | None = None
    ) -> T:
        """What `reader`, a function of a module, makes of a body; too large ones raise ApiError.

        In this process `here` stands in for it, if it is given.
        """
        declared = request.headers.get("content-length", "")
        limit = self._config.max_body_bytes
        body = await read_bytes(request.receive, declared, limit, place.body)
        if self._goes_elsewhere(body):
            work = self._read_elsewhere(reader, body, place.account)
            try:
                return await unless_gone(request.receive, work)
            except NotElsewhereError as error:
                self._warn_once(str(error))
        await take_turn(request.scope)
        preparer = self.preparer.within(place.image_room)
        return await (here or reader)(body, preparer, self._model)

    def close(self) -> None:
        self.processes.close()

    def _goes_elsewhere(self, body: bytes) -> bool:
        if len(body) <= LONG_BODY_BYTES or self._tokenizer.origin is None:
            return False
        return self._images is None or _IMAGE.search(body) is None

    def _warn_once(self, reason: str) -> None:
        if reason and not self._has_warned:
            self._has_warned = True
            _log.warning("streams wait while the server itself reads long bodies: %s", reason)

    async def _read_elsewhere(self, reader: Reader[T], body: bytes, account: str) -> T:
        work = (_read, body, self._setup(), reader, self._facts())
        data = await self.processes.run(account, len(body), *work)
        ignored: list[str]
        result: T
        ignored, result = _loads(data, self._tokenizer)
        self.preparer.ignored.note(ignored)
        return result

    def _setup(self) -> bytes:
        images, origin = self._images, self._tokenizer.origin
        assert origin is not None
        parts = None if images is None else (images.processor, images.config)
        return pickle.dumps(_Setup(origin, self._config, self._model, parts))


async def answer_call(
    request: Request, state: ApiState, bodies: BodyReader, reader: Reader[ReadCall]
) -> Response:
    with handing_on(state.admit(request.state.account)) as place:
        with state.traced(request) as trace:
            read = await bodies.read(request, place, reader)
            place.body.release()
            trace.parsed(read.parsed_ns)
            trace.prepared(read.job, state.model)
        return GenerationResponse(state, read.job, read.form, read.streams, place, trace)


# In the other process.


class _NoImages(ImageLoader):
    """Knows the limits of images, and leaves the images to the server."""

    async def load(self, *_: object) -> ImageInput:
        raise NotElsewhereError


class _BodyProcess:
    def __init__(self, setup: _Setup) -> None:
        origin = setup.origin
        self.facts: ModelFacts | None = None
        self.model = setup.model
        self.preparer = Preparer(
            load_tokenizer(origin.path, origin.chat_template),
            self._facts_now,
            setup.config,
            None if setup.images is None else _NoImages(*setup.images),
        )

    def _facts_now(self) -> ModelFacts:
        assert self.facts is not None
        return self.facts


@cache
def _process_of(setup: bytes) -> _BodyProcess:
    return _BodyProcess(pickle.loads(setup))


def _read(body: bytes, setup: bytes, reader: Reader[Any], facts: ModelFacts) -> bytes:
    try:
        process = _process_of(setup)
    except Exception as error:
        raise NotElsewhereError(f"another process cannot load the tokenizer: {error}") from error
    process.facts, preparer = facts, process.preparer
    preparer.ignored = IgnoredFields()
    result: object = asyncio.run(reader(body, preparer, process.model))  # type: ignore[arg-type]
    return _dumps((preparer.ignored.names, result))


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return _TOKENIZER if isinstance(value, Tokenizer) else None


def _dumps(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _loads(data: bytes, tokenizer: Tokenizer) -> Any:
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = lambda name: tokenizer  # type: ignore[method-assign]
    return unpickler.load()

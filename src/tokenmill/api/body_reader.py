"""From the body of a call to what answers it; large bodies are read by processes of their own.

Decoding JSON, rendering a template and freeing what a tokenizer made hold Python's lock, whichever
thread does them, and no stream of this process gets a token meanwhile. So a body of more than
`LONG_BODY_BYTES` goes to a process as it is. What comes back is small: the context bounds it.
"""

from __future__ import annotations

import asyncio
import io
import logging
import multiprocessing
import os
import pickle
import re
import signal
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from tokenmill.api.access import read_bytes
from tokenmill.api.errors import ApiError, unknown_model
from tokenmill.api.protocol.decoding import IgnoredFields
from tokenmill.api.protocol.prepare import Job, Preparer
from tokenmill.api.stream import ApiState, Format, GenerationResponse
from tokenmill.core.config import ServerConfig
from tokenmill.core.images import ImageInput
from tokenmill.core.vision_config import VisionConfig
from tokenmill.text.tokenizer import Tokenizer, TokenizerOrigin, load_tokenizer
from tokenmill.vision.loader import ImageLoader
from tokenmill.vision.processor import ImageProcessor, PixelLimits
from tokenmill.workers.messages import ModelFacts

LONG_BODY_BYTES = 65_536  # of token ids they take 20 ms
MAX_PROCESSES = 4
READ_S = 120.0  # that a process may take for a body, its own start included
NICENESS = 10
# Images stay here, with their cache; their base64 is a string, which is decoded at once.
_IMAGE = re.compile(rb'"type"\s*:\s*"(image|image_url|input_image)"')
_TOKENIZER = "tokenizer"  # stands for the tokenizer between processes

_log = logging.getLogger(__name__)

T = TypeVar("T")
Reader = Callable[[bytes, Preparer, str], Awaitable[T]]  # of a body for the model of this name


class NotElsewhereError(Exception):
    """The body needs what only the process of the server has, or no other process can be had."""


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call that can be submitted, and how its answer is written."""

    job: Job
    form: Format
    streams: bool
    parsed_ns: int  # when the body was known to be valid


def check_model(name: str | None, served: str) -> None:
    """404 for a model that is not served here."""
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
    """Reads the bodies of calls for one model."""

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
        # Each pool has one process: what becomes of it concerns one body.
        self._places = asyncio.Semaphore(_num_processes(config.fronts))
        self._idle: list[ProcessPoolExecutor] = []
        self._busy: list[ProcessPoolExecutor] = []
        self._is_closed = self._has_warned = False

    async def read(self, request: Request, reader: Reader[T], here: Reader[T] | None = None) -> T:
        """What `reader`, a function of a module, makes of a body; too large ones raise ApiError.

        In this process `here` takes its place, if it is given.
        """
        declared = request.headers.get("content-length", "")
        body = await read_bytes(request.receive, declared, self._config.max_body_bytes)
        if self._goes_elsewhere(body):
            try:
                return await _unless_gone(request.receive, self._read_elsewhere(reader, body))
            except NotElsewhereError as error:
                self._warn_once(str(error))
        return await (here or reader)(body, self.preparer, self._model)

    def close(self) -> None:
        """End the processes, whatever they are reading."""
        self._is_closed = True
        for pool in (*self._idle, *self._busy):
            _end(pool)

    def _goes_elsewhere(self, body: bytes) -> bool:
        if len(body) <= LONG_BODY_BYTES or self._tokenizer.origin is None:
            return False
        return self._images is None or _IMAGE.search(body) is None

    def _warn_once(self, reason: str) -> None:
        if reason and not self._has_warned:
            self._has_warned = True
            _log.warning("streams wait while the server itself reads long bodies: %s", reason)

    async def _read_elsewhere(self, reader: Reader[T], body: bytes) -> T:
        async with self._places:
            try:
                data = await self._in_process(_read, self._setup(), reader, body, self._facts())
            except TimeoutError:
                message = f"this body of {len(body)} bytes could not be read within {READ_S:g} s"
                raise ApiError(500, message, code="internal_error") from None
            except BrokenProcessPool:
                self._check_open()
                message = f"the process that read this body of {len(body)} bytes was ended"
                raise ApiError(500, message, code="internal_error") from None
            except OSError as error:
                raise NotElsewhereError(f"no process can be started: {error}") from None
        ignored: list[str]
        result: T
        ignored, result = _loads(data, self._tokenizer)
        self.preparer.ignored.note(ignored)
        return result

    async def _in_process(self, work: Callable[..., bytes], *args: Any) -> bytes:
        """What `work` returns in a process; one that does not come to its end is ended."""
        self._check_open()
        self._idle = [pool for pool in self._idle if not pool._broken]
        pool = self._idle.pop() if self._idle else _new_pool()
        self._busy.append(pool)
        is_spent = False
        try:
            async with asyncio.timeout(READ_S):
                # On a thread: a process may have to be started for it.
                future = await asyncio.to_thread(pool.submit, work, *args)
                return await asyncio.wrap_future(future)
        except (BrokenProcessPool, OSError, asyncio.CancelledError):
            is_spent = True
            raise
        finally:
            self._busy.remove(pool)
            if is_spent:
                _end(pool)
            else:
                self._idle.append(pool)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ApiError(503, "the server is shutting down", code="shutdown")

    def _setup(self) -> bytes:
        images, origin = self._images, self._tokenizer.origin
        assert origin is not None
        parts = None if images is None else (images.processor, images.config)
        return pickle.dumps(_Setup(origin, self._config, self._model, parts))


def _num_processes(num_fronts: int) -> int:
    """Each front has processes of its own: together they are bounded by the cores."""
    return max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) // num_fronts))


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin_process)


def _end(pool: ProcessPoolExecutor) -> None:
    """End a pool's process, whatever it does."""
    processes = pool._processes
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list((processes or {}).values()):
        process.kill()


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; ClientDisconnect when the client goes first, which cancels it."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_call(
    request: Request, state: ApiState, bodies: BodyReader, reader: Reader[ReadCall]
) -> Response:
    """Admit a call, read it, and answer it."""
    state.admit(request.state.key)
    with state.traced(request) as trace:
        read = await bodies.read(request, reader)
        trace.parsed(read.parsed_ns)
        trace.prepared(read.job, state.model)
    return GenerationResponse(state, read.job, read.form, read.streams, request.state.key, trace)


# In the other process.


class _NoImages(ImageLoader):
    """Knows the limits of images, and leaves the images to the server."""

    async def load(self, url: str, limits: PixelLimits, max_tokens: int) -> ImageInput:
        raise NotElsewhereError


class _BodyProcess:
    """Reads bodies for a server in another process."""

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


def _begin_process() -> None:
    """Leave the cores to streams and Ctrl-C to the server, and end with it, however it ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@cache
def _process_of(setup: bytes) -> _BodyProcess:
    return _BodyProcess(pickle.loads(setup))


def _read(setup: bytes, reader: Reader[Any], body: bytes, facts: ModelFacts) -> bytes:
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

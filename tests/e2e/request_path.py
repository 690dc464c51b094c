"""Traces one chat through two workers, all in this process: its functions, modules and types.

Functions and modules are those of the package without kernels, layers and models. A type counts
where an instance of it, made during the call, holds the prompt (in) or the answer (out), directly
or by what it refers to; `list`, `tuple`, `dict` and `bytes` count, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import sys
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from urllib.parse import urlsplit

from api.sim import MODEL, make_tokenizer
from tiny_configs import write_config
from tokenmill.api.keys import Keys
from tokenmill.api.middleware import CallMiddleware
from tokenmill.api.openai_routes import create_app
from tokenmill.api.server import bind, listening, url_of
from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    PoolConfig,
    SchedulerConfig,
    ServerConfig,
    Setup,
)
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.pool import WorkerPool
from tokenmill.workers.worker_process import run_worker

PROMPT, ANSWER = "quagga quagga quagga", "~"  # the answer is this character, again and again
NUM_TOKENS = 12
PACKAGE = str(Path(sys.modules["tokenmill"].__file__ or "").parent) + "/"
LEFT_OUT = ("kernels/", "layers/", "models/")
CONTAINERS = (list, tuple, dict, set, frozenset)
DEPTH = 6  # references that are followed


@dataclass
class Side:
    """What a request touched on one side of the wire."""

    functions: set[CodeType] = field(default_factory=set)
    types: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # in and out

    @property
    def modules(self) -> set[str]:
        return {code.co_filename for code in self.functions}


class Tracer:
    """Looks at the arguments and results of all calls, in the front's thread and the workers'."""

    def __init__(self, prompt_ids: list[int], answer_id: int) -> None:
        self.front, self.worker = Side(), Side()
        self._prompt, self._answer = _words(prompt_ids), answer_id
        self._home = threading.get_ident()
        self._before: list[Any] = []  # what was there, kept: no new object takes its id
        self._known: set[int] = set()
        self._busy = threading.local()
        self.active = False

    def watch(self) -> None:
        """Begin; what is there by now does not count."""
        gc.unfreeze()
        self._before = gc.get_objects()
        self._known = {id(known) for known in self._before}
        self.active = True
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if not self.active or event not in ("call", "return"):
            return
        if not code.co_filename.startswith(PACKAGE) or getattr(self._busy, "now", False):
            return
        if code.co_filename[len(PACKAGE) :].startswith(LEFT_OUT):
            return
        path = self.front if threading.get_ident() == self._home else self.worker
        self._busy.now = True
        try:
            if not code.co_name.startswith("<"):
                path.functions.add(code)
            for value in (*frame.f_locals.values(), arg) if event == "call" else (arg,):
                for side in ("in", "out"):
                    self._holds(value, side, path.types[side], set(), DEPTH)
        finally:
            self._busy.now = False

    def _holds(self, value: Any, side: str, types: set[str], seen: set[int], depth: int) -> bool:
        """Whether an object that is new holds the prompt or the answer; notes who does."""
        if id(value) in seen or id(value) in self._known or not depth:
            return False
        seen.add(id(value))
        kind = type(value)
        if kind in (str, bytes, bytearray):
            found = _in(PROMPT if side == "in" else ANSWER, value)
        else:
            found = self._has_tokens(value, side)
            for child in _children(value):
                found |= self._holds(child, side, types, seen, depth - 1)
        if found and kind is not str:
            types.add(kind.__qualname__)
        return found

    def _has_tokens(self, value: Any, side: str) -> bool:
        if type(value) not in (list, tuple, array) or not value or type(value[0]) is not int:
            return False
        if side == "out":
            return self._answer in value
        return len(value) < 10_000 and self._prompt in _words(value)


def _words(numbers: Any) -> str:
    return "".join(f"<{number}>" for number in numbers)


def _in(mark: str, value: str | bytes | bytearray) -> bool:
    return mark in value if isinstance(value, str) else mark.encode() in value


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, CONTAINERS):
        if not value or type(next(iter(value))) not in (int, float):
            yield from value
    elif type(value).__module__.startswith("tokenmill."):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                with contextlib.suppress(AttributeError):
                    yield getattr(value, name)


class WorkerThread:
    """A worker in a thread, with what a pool asks of a process."""

    def __init__(self, built: BuiltEngine, address: str) -> None:
        facts = ModelFacts(
            max_model_len=built.max_model_len,
            vocab_size=built.spec.vocab_size,
            num_kv_blocks=built.num_blocks,
            block_size=built.block_size,
            dtype=built.dtype,
        )
        work = (built.engine, address, facts)
        self._thread = threading.Thread(target=run_worker, args=work, daemon=True)
        self._thread.start()

    async def wait(self) -> int | None:
        while self._thread.is_alive():
            await asyncio.sleep(0.01)
        return 0

    def kill(self) -> None:
        """A thread ends when its owner is gone."""


def build(folder: Path) -> BuiltEngine:
    model = ModelConfig(
        str(write_config(folder, vocab_size=400)), "fp32", "cpu", random_weights=True, num_threads=1
    )
    cache, execution = CacheConfig(16, num_blocks=64), ExecutionConfig(fused_kernels=False)
    return build_engine(resolve_setup(Setup(model, cache, SchedulerConfig(), execution)))


def chat(url: str, answer_id: int) -> str:
    """The text of a streamed answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
        "logit_bias": {answer_id: 100},
    }
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    with contextlib.closing(connection.getresponse()) as response:
        lines = response.read().decode().split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "error" not in events[0], events[0]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])


async def traced(folder: Path) -> Tracer:
    """A chat that was traced, after one that was not."""
    tokenizer = make_tokenizer()
    (answer_id,) = tokenizer.encode(ANSWER, add_special_tokens=False)
    tracer = Tracer(tokenizer.encode(PROMPT, add_special_tokens=False)[1:], answer_id)
    threading.setprofile(tracer)

    async def spawn(address: str) -> WorkerThread:
        return WorkerThread(build(folder), address)

    pool = WorkerPool(spawn, PoolConfig(workers=2))
    try:
        await pool.start()
        with contextlib.closing(bind("127.0.0.1", 0)) as listener:
            keys = Keys.of(ServerConfig(port=0, log_stats=False), "control", b"salt")
            app = create_app(pool, tokenizer, keys, MODEL)
            front = CallMiddleware(app, keys, app.state.api.metrics)
            with contextlib.closing(app.state.bodies):
                async with listening(front, listener, keys):
                    for _ in range(4):  # both workers have had one
                        await asyncio.to_thread(chat, url_of(listener, keys), answer_id)
                    tracer.watch()
                    text = await asyncio.to_thread(chat, url_of(listener, keys), answer_id)
                    tracer.active = False
        assert text == ANSWER * NUM_TOKENS
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
        await pool.close()
    return tracer

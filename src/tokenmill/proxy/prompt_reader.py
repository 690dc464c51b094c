"""Reads the prompts of calls, those of long bodies in processes of their own.

Decoding JSON and tokenising hold Python's lock for a time that grows with the body, and no stream
of this process is passed on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from array import array
from dataclasses import dataclass, replace
from functools import cache

from starlette.types import Receive

from tokenmill.api.bodies.body_processes import (
    LONG_BODY_BYTES,
    BodyProcesses,
    NotElsewhereError,
    unless_gone,
)
from tokenmill.api.errors import ApiError
from tokenmill.proxy.call_prompt import RoutedPrompt, read_prompt
from tokenmill.proxy.tenants import Tenant
from tokenmill.text.tokenizer import Tokenizer, TokenizerOrigin, load_tokenizer
from tokenmill.vision.processor import ImageProcessor

THREAD_BYTES = 20_000  # longer ones are tokenised on another thread at least
MAX_TOKENS = 1 << 18  # of a long prompt that the router gets: to hash more would hold streams up

_log = logging.getLogger(__name__)


class PromptReader:
    """Reads prompts as their model does, as far as its tokenizer is known."""

    def __init__(self, tokenizer: Tokenizer | None, processor: ImageProcessor | None) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._processes = BodyProcesses(1)

    async def read(self, account: str, body: bytes, path: str, receive: Receive) -> RoutedPrompt:
        """The prompt of a body that was sent to `path`; ClientDisconnect if the client goes."""
        if self._tokenizer is None or len(body) <= THREAD_BYTES:
            return self._read_here(body, path)
        if len(body) > LONG_BODY_BYTES and self._tokenizer.origin is not None:
            try:
                return await unless_gone(receive, self._read_elsewhere(account, body, path))
            except NotElsewhereError as error:
                _log.debug("a long body is read by the router itself: %s", error)
            except ApiError as error:  # the backend may have more luck with it
                _log.warning("a call is routed by load alone: %s", error)
                return RoutedPrompt()
        return await asyncio.to_thread(self._read_here, body, path)

    async def opened(self, tenant: Tenant, body: bytes, path: str, receive: Receive) -> bytes:
        """A body with ids as the backend has them, as Tenant.body() does."""
        if len(body) > LONG_BODY_BYTES and tenant.opens(path):
            work = self._processes.run(tenant.account, len(body), _opened, body, tenant, path)
            try:
                changed: bytes
                changed, ids = pickle.loads(await unless_gone(receive, work))
                tenant.given_ids.update(ids)
                return changed
            except NotElsewhereError as error:
                _log.debug("ids of a long body are changed by the router itself: %s", error)
        return tenant.body(path, body)

    def close(self) -> None:
        self._processes.close()

    def _read_here(self, body: bytes, path: str) -> RoutedPrompt:
        return read_prompt(body, self._tokenizer, path, self._processor)

    async def _read_elsewhere(self, account: str, body: bytes, path: str) -> RoutedPrompt:
        assert self._tokenizer is not None and self._tokenizer.origin is not None
        setup = pickle.dumps(_Setup(self._tokenizer.origin, self._processor))
        data = await self._processes.run(account, len(body), _read, body, setup, path)
        prompt: RoutedPrompt = pickle.loads(data)
        return prompt


@dataclass(frozen=True, slots=True)
class _Setup:
    """What another process needs to read prompts alike."""

    origin: TokenizerOrigin
    processor: ImageProcessor | None


# In the other process.


def _opened(body: bytes, tenant: Tenant, path: str) -> bytes:
    return pickle.dumps((tenant.body(path, body), tenant.given_ids))


@cache
def _loaded(setup: bytes) -> tuple[Tokenizer, ImageProcessor | None]:
    parts: _Setup = pickle.loads(setup)
    return load_tokenizer(parts.origin.path, parts.origin.chat_template), parts.processor


def _read(body: bytes, setup: bytes, path: str) -> bytes:
    try:
        tokenizer, processor = _loaded(setup)
    except Exception as error:
        raise NotElsewhereError(f"another process cannot load the tokenizer: {error}") from error
    prompt = read_prompt(body, tokenizer, path, processor)
    return pickle.dumps(replace(prompt, token_ids=array("q", prompt.token_ids[:MAX_TOKENS])))

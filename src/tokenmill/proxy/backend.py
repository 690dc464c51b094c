"""One server behind a router: whether it is up, its models, and the calls that it received."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from tokenmill.core.config import RouteConfig
from tokenmill.http_connection import Headers
from tokenmill.proxy.backend_address import BackendAddress
from tokenmill.proxy.upstream import ConnectError, Upstream, UpstreamAnswer, UpstreamError
from tokenmill.workers.slot import Rate

_log = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.25, 30.0
MAX_REST_S = 5.0  # a busy backend is left alone for so long at most
PROBE_TIMEOUT_S = 10.0
MAX_MODELS_BYTES = 4 << 20
State = Literal["starting", "ready", "failed"]


class Backend:
    """A server whose health is checked regularly; `on_change` is called when it goes down or up.

    One that is down is asked after a pause that doubles each time.
    """

    def __init__(
        self, address: BackendAddress, config: RouteConfig, on_change: Callable[[Backend], None]
    ) -> None:
        self.name = address.name
        self.upstream = Upstream(address.url, config.connect_timeout_s)
        self.state: State = "starting"
        self.models: dict[str, Any] = {}  # cards by id, as the backend has them
        self.num_open = 0
        self.num_pending = 0  # of these, without a first byte
        self.queued_tokens = 0  # of their prompts, what is not taken for cached
        self.num_routed = 0
        self.num_prompt_tokens = 0
        self.num_overlap_tokens = 0
        self.num_failures = 0
        self.num_returns = 0  # times that it was up again
        self._was_ready = False
        self.last_failure = ""
        self.tokens = Rate()
        self.rests_until_s = 0.0  # it said that it is busy
        self._config = config
        self._on_change = on_change
        self._backoff_s = FIRST_BACKOFF_S
        self._doubted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def key(self) -> Headers:
        """The Authorization that stands for the client's, if there is one."""
        key = self._config.backend_key
        return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]

    async def start(self) -> None:
        """Probe the backend once, then go on probing in the background."""
        await self._probe()
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.upstream.close()

    def fail(self, error: UpstreamError) -> None:
        """Note a failed or lost connection; the backend is probed at once."""
        self.num_failures += 1
        self.last_failure = str(error)
        if isinstance(error, ConnectError):
            self._go_down(str(error))
        self._doubted.set()

    def rest(self, retry_after: bytes) -> None:
        """Prefer other backends for as long as this one says that it is busy."""
        wanted_s = float(retry_after) if retry_after.isdigit() else 0.0
        self.rests_until_s = time.monotonic() + min(wanted_s, MAX_REST_S)

    def _go_down(self, reason: str) -> None:
        if self.state != "failed":
            _log.warning("backend %s is down: %s", self.name, reason)
            self.state = "failed"
            self._backoff_s = FIRST_BACKOFF_S
            self._on_change(self)

    async def _watch(self) -> None:
        while True:
            if self.ready:
                self._doubted.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.health_interval_s):
                        await self._doubted.wait()
            if not self.ready:
                await asyncio.sleep(self._backoff_s)
                self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            await self._probe()

    async def _probe(self) -> None:
        """Any answer that is no 5xx is a sign of life; a server may want a key for its models."""
        try:
            status, cards = await ask_models(self, self.key())
        except UpstreamError as error:
            if self.state != "failed":
                self.num_failures += 1
            self.last_failure = str(error)
            self._go_down(str(error))
            return
        if status == 200:
            self.models = cards
        if not self.ready:
            if self.state == "failed":
                self.num_returns += self._was_ready
                _log.warning("backend %s is %s", self.name, "back" if self._was_ready else "up")
            self.state, self._was_ready = "ready", True
            self._on_change(self)


async def ask_models(backend: Backend, headers: Headers) -> tuple[int, dict[str, Any]]:
    """GET /v1/models: the status, and the cards by id; raises UpstreamError."""
    answer = UpstreamAnswer()
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await backend.upstream.send(answer, "GET", b"/v1/models", headers)
            body = await answer.read_whole(MAX_MODELS_BYTES)
    except TimeoutError:
        raise UpstreamError(f"no answer within {PROBE_TIMEOUT_S:g} s") from None
    finally:
        answer.close()
    if answer.status >= 500:
        raise UpstreamError(f"/v1/models answers {answer.status}")
    return answer.status, _cards(body) if answer.status == 200 else {}


def _cards(body: bytes) -> dict[str, Any]:
    try:
        cards = msgspec.json.decode(body)["data"]
        return {card["id"]: card for card in cards if isinstance(card["id"], str)}
    except (msgspec.DecodeError, KeyError, TypeError):
        return {}

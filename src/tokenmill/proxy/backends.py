"""The servers behind a router: chooses one for a call, and the next one when it fails."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from tokenmill.core.config import RouteConfig, RouterConfig
from tokenmill.engine_events.engine_blocks import salt_of
from tokenmill.engine_events.engine_caches import EngineCaches
from tokenmill.engine_events.wire import EngineBatch
from tokenmill.http_connection import Headers
from tokenmill.proxy.backend import Backend, ask_models
from tokenmill.proxy.backend_address import BackendAddress, read_backends
from tokenmill.proxy.call_prompt import RoutedPrompt
from tokenmill.proxy.event_source import EventCounts, EventSource, Listener
from tokenmill.proxy.upstream import UpstreamError
from tokenmill.routing.router import Basis, Decision, NoWorkerError, Router
from tokenmill.routing.suspects import OpenEntry, Suspects
from tokenmill.workers.pool_view import Choices, PoolView, WorkerView, policy_view

_log = logging.getLogger(__name__)
MAX_KNOWN = 100_000  # ids of stored responses and videos
_ID = re.compile(rb'"id"\s*:\s*"((?:resp|video)_[\w.-]{1,128})"')


@dataclass(slots=True)
class Attempt:
    call_id: str
    backend: Backend
    decision: Decision
    is_pending: bool = True
    num_output_tokens: int = 0  # of an answer that came to its end, as far as the proxy sees them

    @property
    def num_uncached(self) -> int:
        return self.decision.num_prompt_tokens - self.decision.num_cached_tokens


class ResponseOwners:
    """Backends by the ids of what they stored; the least recently used ids are forgotten first."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, str] = OrderedDict()

    def find(self, response_id: str) -> str | None:
        """The backend that has the response; None where it is not known."""
        owner = self._owners.get(response_id)
        if owner is not None:
            self._owners.move_to_end(response_id)
        return owner

    def learn(self, data: bytes, backend: str) -> None:
        """Read the id of a new response or video in the first bytes of its answer."""
        found = _ID.search(data)
        if found is not None:
            self.note(found[1].decode(), backend)

    def note(self, response_id: str, backend: str) -> None:
        self._owners[response_id] = backend
        self._owners.move_to_end(response_id)
        if len(self._owners) > MAX_KNOWN:
            self._owners.popitem(last=False)


class Backends:
    """Routes calls over servers; what those without events have cached is assumed."""

    def __init__(self, config: RouteConfig, router: RouterConfig) -> None:
        self.config = config
        self._router = Router(replace(router, events=False))
        addresses = read_backends(config.backends)
        made = [Backend(address, config, self._on_change) for address in addresses]
        self._told = EngineCaches(router.block_size, router.predict_s)
        self._counts = {a.name: EventCounts() for a in addresses if a.streams}
        self._sources = [source for address in addresses for source in self._sources_of(address)]
        if self._sources:
            self._router.told = self._told
        self._all = {backend.name: backend for backend in made}
        self._choices = Choices()
        self.owners = ResponseOwners()
        self._numbers = count(1)
        self._suspects: Suspects[OpenEntry] = Suspects(config.max_migrations)
        self._held: list[asyncio.Future[None]] = []  # suspects that wait for another one
        self.num_moved = 0  # calls that a second backend was tried for

    @property
    def ready(self) -> bool:
        return any(backend.ready for backend in self._all.values())

    async def start(self) -> None:
        """Check every backend once; the checks then go on in the background."""
        for source in self._sources:
            source.start()
        await asyncio.gather(*(backend.start() for backend in self._all.values()))

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources))
        await asyncio.gather(*(backend.close() for backend in self._all.values()))

    def new_call(self) -> str:
        return f"call-{next(self._numbers)}"

    def choose(
        self, call_id: str, prompt: RoutedPrompt, tried: Collection[str], only: str | None = None
    ) -> Attempt | None:
        """The next backend for a call, which is on its account from now on; None: there is none.

        `only`: nobody else can answer it.
        """
        try:
            now_s = time.monotonic()
            without = self._left_out(prompt.model, tried, now_s)
            if only is not None:
                without = {name for name in self._all if name != only or name in tried}
            decision = self._router.route(
                *(call_id, prompt.token_ids, now_s, prompt.salt, without), self._told_salt(prompt)
            )
        except NoWorkerError:
            return None
        attempt = Attempt(call_id, self._all[decision.worker], decision)
        self._count(attempt)
        self.num_moved += bool(tried)
        self._choices.add(call_id, decision)
        return attempt

    def _count(self, attempt: Attempt) -> None:
        backend, decision = attempt.backend, attempt.decision
        backend.num_open += 1
        backend.num_pending += 1
        backend.queued_tokens += attempt.num_uncached
        backend.num_routed += 1
        backend.num_prompt_tokens += decision.num_prompt_tokens
        backend.num_overlap_tokens += decision.num_cached_tokens

    # A call that seems to kill backends (routing/suspects.py).

    def may_go(self, call: OpenEntry) -> bool:
        """False while a call must wait because another one is tried alone."""
        return self._suspects.may_go(call)

    async def wait(self) -> None:
        """Wait until another suspect may be tried, or somebody calls wake()."""
        self._held.append(asyncio.get_running_loop().create_future())
        await self._held[-1]

    def wake(self) -> None:
        """Let those that wait look again."""
        held, self._held = self._held, []
        for waiter in held:
            if not waiter.done():
                waiter.set_result(None)

    def died(self, call: OpenEntry) -> bool:
        """A backend was lost with a call; True: it is the cause, as far as can be told."""
        causes = self._suspects.died([call])
        self.wake()
        return bool(causes)

    def ended(self, call: OpenEntry) -> None:
        """A call has ended, or will not be sent again."""
        if self._suspects.ended(call):
            self.wake()

    # What becomes of an attempt.

    def first_byte(self, attempt: Attempt) -> None:
        if attempt.is_pending:
            attempt.is_pending = False
            attempt.backend.num_pending -= 1
            attempt.backend.queued_tokens -= attempt.num_uncached
            self._router.prefill_done(attempt.call_id)
            self._router.stepped(attempt.backend.name, time.monotonic())

    def stepped(self, attempt: Attempt) -> None:
        """A piece of a stream came: with events, the steps of a backend are counted by both."""
        if attempt.backend.name in self._counts:
            self._router.stepped(attempt.backend.name, time.monotonic())

    def end(self, attempt: Attempt) -> None:
        """A backend is done with a call, or will not do it."""
        self.first_byte(attempt)
        attempt.backend.num_open -= 1
        self._router.free(attempt.call_id, attempt.num_output_tokens)

    async def models(self, headers: Headers) -> list[Any]:
        """The cards of all models, asked for with the client's headers where there is no key."""
        ready = [backend for backend in self._all.values() if backend.ready]
        found = await asyncio.gather(
            *(ask_models(b, b.key() or headers) for b in ready), return_exceptions=True
        )
        cards: dict[str, Any] = {}
        for backend, answer in zip(ready, found, strict=True):
            if isinstance(answer, UpstreamError):
                backend.fail(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                cards |= {name: card for name, card in answer[1].items() if name not in cards}
        return list(cards.values())

    def failures(self) -> str:
        down = [backend for backend in self._all.values() if not backend.ready]
        return "; ".join(f"{backend.name}: {backend.last_failure}" for backend in down)

    def known_models(self) -> list[str]:
        """The model names that backends reported at their last health check."""
        return list(dict.fromkeys(name for b in self._all.values() for name in b.models))

    def view(self, decisions: bool = True) -> PoolView:
        return PoolView(
            router=self._router.config.policy,
            policy=policy_view(self._router.policy),
            num_open=sum(backend.num_open for backend in self._all.values()),
            num_held=0,
            migrations=self.num_moved,
            workers=[self._worker_view(backend) for backend in self._all.values()],
            decisions=self._choices.views() if decisions else [],
        )

    def _left_out(self, model: str, tried: Collection[str], now_s: float) -> Collection[str]:
        """Who does not get a call: those without its model, then, if others are left, busy ones."""
        backends = self._all.values()
        out = set(tried)
        if any(model in b.models for b in backends):  # else anybody may say that it has none
            out |= {b.name for b in backends if b.models and model not in b.models}
        resting = out.union(b.name for b in backends if b.rests_until_s > now_s)
        return resting if set(self._router.workers).difference(resting) else out

    def _sources_of(self, address: BackendAddress) -> list[EventSource]:
        name, told = address.name, self._told
        sources = []
        for number, stream in enumerate(address.streams):
            begin, take = partial(told.begin, name, number), partial(self._take, name, number)
            listener = Listener(begin, partial(self._restarted, name, number), take)
            sources.append(EventSource(name, stream, listener, self._counts[name]))
        return sources

    def _take(self, name: str, stream: int, batch: EngineBatch) -> None:
        num_tokens = self._told.take(name, stream, batch)
        self._router.told_step(name, num_tokens, time.monotonic())

    def _restarted(self, name: str, stream: int) -> None:
        self._told.restart(name, stream)
        self._router.forget_cache(name)

    def _told_salt(self, prompt: RoutedPrompt) -> str | None:
        """What stands before a prompt in events, which name adapters but no models."""
        if not prompt.is_exact:
            return None
        cards = (b.models.get(prompt.model) for b in self._all.values())
        is_adapter = any(isinstance(card, dict) and card.get("parent") for card in cards)
        return salt_of(prompt.model if is_adapter else "", prompt.cache_salt)

    def _on_change(self, backend: Backend) -> None:
        if backend.ready:
            self._router.add_worker(backend.name)
        else:
            self._router.remove_worker(backend.name)

    def _worker_view(self, backend: Backend) -> WorkerView:
        known = backend.name in self._router.workers
        counts = self._counts.get(backend.name)
        basis: Basis = "assumed" if counts is None else self._told.basis(backend.name)
        assumed = self._router.index.num_blocks(backend.name) if known else 0
        return WorkerView(
            name=backend.name,
            role="backend",
            state=backend.state,
            num_requests=backend.num_open,
            num_running=backend.num_open - backend.num_pending,
            num_waiting=backend.num_pending,
            queued_tokens=backend.queued_tokens,
            kv_blocks=0,
            kv_blocks_used=0,
            cached_blocks=assumed if basis != "events" else self._told.num_blocks(backend.name),
            routed=backend.num_routed,
            routed_tokens=backend.num_prompt_tokens,
            overlap_tokens=backend.num_overlap_tokens,
            tokens_per_s=round(backend.tokens.per_s(), 1),
            output_tokens=backend.tokens.total,
            restarts=0,  # by the router
            failures=backend.num_failures,
            hangs=0,
            last_failure=backend.last_failure,
            cache_basis=basis,
            event_batches={} if counts is None else asdict(counts),
            returns=backend.num_returns,
        )

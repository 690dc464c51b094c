"""The servers behind a router: chooses one for a call, and the next one when it fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from tokenmill.core.config import RouteConfig, RouterConfig
from tokenmill.http_connection import Headers
from tokenmill.proxy.backend import Backend, ask_models, base_urls
from tokenmill.proxy.call_prompt import RoutedPrompt
from tokenmill.proxy.response_owners import ResponseOwners
from tokenmill.proxy.upstream import UpstreamError
from tokenmill.routing.router import Decision, NoWorkerError, Router
from tokenmill.workers.fronts.control import (
    CallAnswered,
    CallBegan,
    CallEnded,
    CallNews,
    ResponseStored,
)
from tokenmill.workers.pool_view import Choices, PoolView, WorkerView, policy_view

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Attempt:
    """A call at one backend."""

    call_id: str
    backend: Backend
    decision: Decision
    is_pending: bool = True
    num_output_tokens: int = 0  # of an answer that came to its end, as far as the proxy sees them

    @property
    def num_uncached(self) -> int:
        return self.decision.num_prompt_tokens - self.decision.num_cached_tokens


class Backends:
    """Routes calls over servers that do not report their caches: these are predicted.

    With a `tell` there are other fronts, which hear of each call and of its end.
    """

    def __init__(
        self,
        config: RouteConfig,
        router: RouterConfig,
        front: str = "",
        tell: Callable[[CallNews], None] | None = None,
    ) -> None:
        self._router = Router(replace(router, events=False), front, announces=tell is not None)
        made = [Backend(url, config, self._on_change) for url in base_urls(config.backends)]
        self._all = {backend.name: backend for backend in made}
        self._choices = Choices()
        self.owners = ResponseOwners()
        self._numbers = count(1)
        self._prefix = f"{front}-" if front else ""
        self._tell = tell
        if tell is not None:
            self.owners.on_new = lambda *stored: tell(ResponseStored(*stored))
        self._open: dict[str, Attempt] = {}
        self._theirs: dict[str, str] = {}  # fronts by their open calls
        self.num_moved = 0  # calls that a second backend was tried for

    @property
    def ready(self) -> bool:
        return any(backend.ready for backend in self._all.values())

    async def start(self) -> None:
        """Check every backend once; the checks then go on in the background."""
        await asyncio.gather(*(backend.start() for backend in self._all.values()))

    async def close(self) -> None:
        await asyncio.gather(*(backend.close() for backend in self._all.values()))

    def new_call(self) -> str:
        """An id that no other call has."""
        return f"{self._prefix}call-{next(self._numbers)}"

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
            decision = self._router.route(call_id, prompt.token_ids, now_s, prompt.salt, without)
        except NoWorkerError:
            return None
        attempt = Attempt(call_id, self._all[decision.worker], decision)
        self._open[call_id] = attempt
        if self._tell is not None and decision.announcement is not None:
            self._tell(CallBegan(call_id, decision.announcement))
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

    def first_byte(self, attempt: Attempt) -> None:
        """The prompt of a call is computed."""
        if attempt.is_pending:
            attempt.is_pending = False
            attempt.backend.num_pending -= 1
            attempt.backend.queued_tokens -= attempt.num_uncached
            self._router.prefill_done(attempt.call_id)
            self._router.stepped(attempt.backend.name, time.monotonic())
            if self._tell is not None:
                self._tell(CallAnswered(attempt.call_id, attempt.backend.name))

    def end(self, attempt: Attempt) -> None:
        """A backend is done with a call, or will not do it."""
        self.first_byte(attempt)
        attempt.backend.num_open -= 1
        del self._open[attempt.call_id]
        self._router.free(attempt.call_id, attempt.num_output_tokens)
        if self._tell is not None:
            self._tell(CallEnded(attempt.call_id, attempt.num_output_tokens))

    # Calls of other fronts.

    def heard(self, message: CallNews) -> None:
        """Take what another front does with a call; what is not known is ignored."""
        now_s = time.monotonic()
        match message:
            case CallBegan(call_id=call_id, told=told) if call_id not in self._theirs:
                self._theirs[call_id] = told.front
                self._router.adopt_call(call_id, told, now_s, message.is_new)
            case CallAnswered(call_id=call_id, backend=backend):
                self._router.prefill_done(call_id)
                self._router.stepped(backend, now_s)
            case CallEnded(call_id=call_id):
                self._theirs.pop(call_id, None)
                self._router.free(call_id, message.num_output_tokens)
            case ResponseStored(response_id=response_id, backend=backend):
                self.owners.hear(response_id, backend)

    def front_gone(self, front: str) -> None:
        """Another front is gone: its calls have ended."""
        for call_id in [call_id for call_id, theirs in self._theirs.items() if theirs == front]:
            del self._theirs[call_id]
            self._router.free(call_id)

    def tell_open(self) -> None:
        """Tell a front that has come what is open; where prompts are cached it learns by itself."""
        for call_id, attempt in self._open.items():
            told = attempt.decision.announcement
            if self._tell is not None and told is not None:
                queued = told.queued_tokens if attempt.is_pending else 0
                told = replace(told, queued_tokens=queued, hashes=[], prefix=None)
                self._tell(CallBegan(call_id, told, is_new=False))

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
        """Why backends are down, in one line."""
        down = [backend for backend in self._all.values() if not backend.ready]
        return "; ".join(f"{backend.name}: {backend.last_failure}" for backend in down)

    def known_models(self) -> list[str]:
        """The model names that backends reported at their last health check."""
        return list(dict.fromkeys(name for b in self._all.values() for name in b.models))

    def view(self, decisions: bool = True) -> PoolView:
        """The backends now."""
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

    def _on_change(self, backend: Backend) -> None:
        if backend.ready:
            self._router.add_worker(backend.name)
        else:
            self._router.remove_worker(backend.name)

    def _worker_view(self, backend: Backend) -> WorkerView:
        known = backend.name in self._router.workers
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
            cached_blocks=self._router.index.num_blocks(backend.name) if known else 0,
            routed=backend.num_routed,
            routed_tokens=backend.num_prompt_tokens,
            overlap_tokens=backend.num_overlap_tokens,
            tokens_per_s=round(backend.tokens.per_s(), 1),
            output_tokens=backend.tokens.total,
            restarts=backend.num_returns,
            failures=backend.num_failures,
            hangs=0,
            last_failure=backend.last_failure,
        )

"""The Python API for asyncio: an engine that a thread of its own steps, for many tasks at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, Self

from tokenmill.core.types import SamplingParams, TokenmillError
from tokenmill.llm import LLM, GenerationOutput, Prompt

Update = GenerationOutput | BaseException


@dataclass(slots=True)
class _Watched:
    """A prompt under way: what its task has seen of it, and how it is told more."""

    owner: GenerationOutput
    tell: Callable[[Update], None]
    num_seen: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.owner.outputs)


class AsyncLLM:
    """A model loaded in this process, for asyncio; it takes the arguments of LLM.

    >>> async with AsyncLLM("smollm2") as llm:
    ...     async for output in llm.generate("The sea is"):
    ...         print(output.outputs[0].text)
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        self._llm = LLM(model, **settings)
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._watched: list[_Watched] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="AsyncLLM", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[GenerationOutput]:
        """Complete one prompt: all there is of it after each step that adds to it.

        A task that stops to listen ends the prompt.
        """
        updates: asyncio.Queue[Update] = asyncio.Queue()
        loop, opened = asyncio.get_running_loop(), list[_Watched]()

        def tell(update: Update) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, update)

        def submit() -> None:
            try:
                params = sampling_params or self._llm.get_default_sampling_params()
                owner = self._llm.submit(prompt, params, priority)
            except Exception as error:
                tell(error)
                return
            opened.append(_Watched(owner, tell))
            self._watched.extend(opened)

        self._order(submit)
        try:
            while True:
                update = await updates.get()
                if isinstance(update, BaseException):
                    raise update
                yield update
                if update.finished:
                    return
        finally:
            self._order(lambda: self._forget(opened))

    def close(self) -> None:
        """End what is under way, and the engine."""
        if self._thread.is_alive():
            self._orders.put(None)
            self._thread.join()
            self._llm.close()

    def _order(self, order: Callable[[], None]) -> None:
        """Have the engine's thread do something before its next step."""
        if self._failure is not None:
            raise TokenmillError(f"the engine has ended: {self._failure}") from self._failure
        if self._thread.is_alive():
            self._orders.put(order)

    def _forget(self, watched: list[_Watched]) -> None:
        for each in watched:
            if each in self._watched:
                self._watched.remove(each)
                self._llm.abort(each.owner)

    # The engine's thread.

    def _run(self) -> None:
        error: BaseException = TokenmillError("the engine was closed")
        try:
            while self._follow_orders():
                if self._watched:
                    self._llm.step()
                    self._watched = [each for each in self._watched if _goes_on(each)]
        except BaseException as failure:
            self._failure = error = failure
        for each in self._watched:
            each.tell(error)

    def _follow_orders(self) -> bool:
        """Do what was ordered, waiting while there is nothing else to do; False at the end."""
        while not self._watched or not self._orders.empty():
            order = self._orders.get()
            if order is None:
                return False
            order()
        return True


def _goes_on(watched: _Watched) -> bool:
    """Tell a task what is new; False where that was the last."""
    owner = watched.owner
    if owner.error is not None:
        watched.tell(TokenmillError(owner.error))
        return False
    if owner.finished or watched.num_tokens > watched.num_seen:
        watched.num_seen = watched.num_tokens
        watched.tell(_copy(owner))
    return not owner.finished


def _copy(owner: GenerationOutput) -> GenerationOutput:
    """The output as it is now: the next step changes it."""
    outputs = [
        replace(
            each,
            token_ids=list(each.token_ids),
            logprobs=None if each.logprobs is None else list(each.logprobs),
        )
        for each in owner.outputs
    ]
    return replace(owner, outputs=outputs)

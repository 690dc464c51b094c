"""The stored responses of all fronts, and the answers to questions about them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tokenmill.core.config import ServerConfig
from tokenmill.workers.fronts.control import (
    AboutResponse,
    DeleteResponse,
    FindItem,
    GetResponse,
    OwnerAnswer,
)
from tokenmill.workers.fronts.stored_responses import StoredResponses


class SharedResponses(StoredResponses):
    """What fronts have sent; `catch_up` waits until all that they sent has come."""

    def __init__(self, limits: ServerConfig, catch_up: Callable[[], Awaitable[None]]) -> None:
        super().__init__(limits)
        self._catch_up = catch_up

    async def answer(self, question: AboutResponse, answer: OwnerAnswer) -> None:
        """Answer with what is stored, or with what is once all that was sent has come."""
        if not await self._find(question, answer):
            await self._catch_up()
            await self._find(question, answer)

    async def _find(self, question: AboutResponse, answer: OwnerAnswer) -> bool:
        match question:
            case GetResponse(response_id=response_id, account=account):
                answer.response = await self.get(response_id, account)
            case FindItem(item_id=item_id, account=account):
                answer.response = await self.find_item(item_id, account)
            case DeleteResponse(response_id=response_id, account=account):
                answer.is_deleted = await self.delete(response_id, account)
        return answer.response is not None or answer.is_deleted

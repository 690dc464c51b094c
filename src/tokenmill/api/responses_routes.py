"""The routes of OpenAI's Responses API: each call is answered by a chat completion."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from tokenmill.api.access import authorizer, read_body
from tokenmill.api.errors import ApiError, of_invalid, renamed, unknown_model
from tokenmill.api.operations import json_response
from tokenmill.api.protocol.prepare import Job, Preparer
from tokenmill.api.responses.response_chat import (
    RESPONSE_NAMES,
    chat_of,
    without_first,
)
from tokenmill.api.responses.response_format import ResponseFormat
from tokenmill.api.responses.response_items import InputItem, Item, MessageItem
from tokenmill.api.responses.response_object import (
    DeletedResponse,
    InputTokens,
    ResponseObject,
    new_response,
)
from tokenmill.api.responses.response_request import (
    ENCRYPTED,
    LOGPROBS,
    RESPONSE_WITHOUT_EFFECT,
    ResponsesRequest,
)
from tokenmill.api.responses.response_store import ResponseStore, page_of
from tokenmill.api.stream import ApiState, GenerationResponse
from tokenmill.core.types import InvalidRequestError

MAX_PAGE, DEFAULT_PAGE = 100, 20  # input items of one answer


def add_responses(app: FastAPI, state: ApiState, preparer: Preparer) -> None:
    """Add /v1/responses and what lies below it."""
    guard = [Depends(authorizer(state.config))]
    turns = ResponseTurns(state, preparer, ResponseStore(state.config))
    state.metrics.stored = turns.store.size

    @app.post("/v1/responses", dependencies=guard)
    async def create(request: Request) -> Response:
        state.admit(request.state.key)
        with state.traced(request) as trace:
            call = await turns.read(request)
            trace.parsed()
            items = turns.context(call, request.state.key)
            job, items = await turns.prepare(call, items)
            form = turns.format(call, job, items, request.state.key)
            trace.prepared(job, state.model)
        return GenerationResponse(state, job, form, bool(call.stream), request.state.key, trace)

    @app.post("/v1/responses/input_tokens", dependencies=guard)
    async def input_tokens(request: Request) -> Response:
        call = await turns.read(request)
        count = await turns.count(call, turns.context(call, request.state.key))
        return json_response(InputTokens(input_tokens=count))

    @app.get("/v1/responses/{response_id}", dependencies=guard)
    async def retrieve(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") in ("true", "1"):
            message = "stream: a stored response cannot be streamed again; leave the field out"
            raise ApiError(400, message, "stream", "unsupported_value")
        return json_response(turns.store.get(response_id, request.state.key).response)

    @app.delete("/v1/responses/{response_id}", dependencies=guard)
    async def delete(request: Request, response_id: str) -> Response:
        turns.store.delete(response_id, request.state.key)
        return json_response(DeletedResponse(id=response_id))

    @app.post("/v1/responses/{response_id}/cancel", dependencies=guard)
    async def cancel(request: Request, response_id: str) -> Response:
        turns.store.get(response_id, request.state.key)
        message = f"response_id: {response_id!r} has ended: only a response in the background can "
        message += "be cancelled, and there are none; close the connection of a running one"
        raise ApiError(400, message, "response_id", "unsupported_value")

    @app.get("/v1/responses/{response_id}/input_items", dependencies=guard)
    async def input_items(request: Request, response_id: str) -> Response:
        entry = turns.store.get(response_id, request.state.key)
        query = request.query_params
        descending = _order(query.get("order", "desc")) == "desc"
        limit = _limit(query.get("limit", str(DEFAULT_PAGE)))
        return json_response(page_of(entry.context, limit, descending, query.get("after")))


def _order(text: str) -> str:
    if text not in ("asc", "desc"):
        message = f"order: {text!r} is not valid; send 'asc' or 'desc'"
        raise ApiError(400, message, "order", "invalid_value")
    return text


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_PAGE):
        message = f"limit: {text!r} is not valid; send a whole number from 1 to {MAX_PAGE}"
        raise ApiError(400, message, "limit", "invalid_value")
    return int(text)


class ResponseTurns:
    """Turns calls into jobs, and keeps what later calls refer to."""

    def __init__(self, state: ApiState, preparer: Preparer, store: ResponseStore) -> None:
        self._state = state
        self._preparer = preparer
        self.store = store

    async def read(self, request: Request) -> ResponsesRequest:
        """The body of a call for the model that is served."""
        limit, ignored = self._state.config.max_body_bytes, self._preparer.ignored
        call = await read_body(request, ResponsesRequest, limit, ignored)
        if call.model is not None and call.model != self._state.model:
            raise unknown_model(call.model, self._state.model)
        ignored.note(n for n in RESPONSE_WITHOUT_EFFECT if getattr(call, n) is not None)
        if call.reasoning is not None and (call.reasoning.summary or call.reasoning.context):
            ignored.note(["reasoning.summary"])
        return call

    def context(self, call: ResponsesRequest, key: int) -> list[Item]:
        """All items that the model is to see: the earlier turns', then the call's own."""
        given: Sequence[InputItem] = (
            [MessageItem(role="user", content=call.input)]
            if isinstance(call.input, str)
            else call.input
        )
        items = self.store.resolve(given, key)
        previous_id = call.previous_response_id
        if previous_id is None:
            return items
        return [*self.store.get(previous_id, key, "previous_response_id").conversation, *items]

    async def prepare(self, call: ResponsesRequest, items: list[Item]) -> tuple[Job, list[Item]]:
        """The job, and the items that it has: with truncation the first may be missing."""
        try:
            return await self._job(call, items), items
        except ApiError as error:
            is_too_long = error.code == "context_length_exceeded"
            if call.truncation != "auto" or not is_too_long or len(items) < 2:
                raise
        return await self._truncated(call, items)

    async def _truncated(self, call: ResponsesRequest, items: list[Item]) -> tuple[Job, list[Item]]:
        """Drop as few of the first items as possible; the last one stays."""
        low, high = 1, len(items) - 1
        kept = without_first(items, high)
        job = await self._job(call, kept)
        while low < high:
            middle = (low + high) // 2
            try:
                fitting = without_first(items, middle)
                job, kept, high = await self._job(call, fitting), fitting, middle
            except ApiError as error:
                if error.code != "context_length_exceeded":
                    raise
                low = middle + 1
        return job, kept

    async def count(self, call: ResponsesRequest, items: list[Item]) -> int:
        """The tokens of the prompt."""
        try:
            return await self._preparer.count_chat(chat_of(call, items))
        except InvalidRequestError as error:
            raise renamed(of_invalid(error), RESPONSE_NAMES) from None

    async def _job(self, call: ResponsesRequest, items: Sequence[Item]) -> Job:
        try:
            job = await self._preparer.chat(chat_of(call, items), "resp_")
        except InvalidRequestError as error:
            raise renamed(of_invalid(error), RESPONSE_NAMES) from None
        except ApiError as error:
            raise renamed(error, RESPONSE_NAMES) from None
        if LOGPROBS in (call.include or ()) and job.splits_message:
            message = f"include: '{LOGPROBS}' is not supported for answers with reasoning or tools"
            raise ApiError(400, f"{message}; leave it out", "include", "unsupported_value")
        return job

    def format(
        self, call: ResponsesRequest, job: Job, items: list[Item], key: int
    ) -> ResponseFormat:
        """Writes the answer, and has it stored unless the call says not to."""
        response = new_response(call, job.job_id, job.created, self._state.model)

        def on_end(ended: ResponseObject) -> None:
            if call.store is not False:
                self.store.put(ended, items, key)

        carries = ENCRYPTED in (call.include or ())
        return ResponseFormat(response, self._state.tokenizer, on_end, carries)

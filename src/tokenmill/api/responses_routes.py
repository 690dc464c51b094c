"""The routes of OpenAI's Responses API: each call is answered by a chat completion."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.api.access import handing_on
from tokenmill.api.bodies.body_processes import NotElsewhereError
from tokenmill.api.bodies.body_reader import BodyReader, check_model
from tokenmill.api.errors import ApiError, of_invalid, renamed
from tokenmill.api.keys import caller
from tokenmill.api.operations import json_response
from tokenmill.api.protocol.answers import json_encode
from tokenmill.api.protocol.decoding import decode_call
from tokenmill.api.protocol.prepare import PreparedCall, Preparer
from tokenmill.api.responses.response_chat import (
    RESPONSE_NAMES,
    chat_of,
    without_first,
)
from tokenmill.api.responses.response_format import ResponseFormat
from tokenmill.api.responses.response_items import (
    InputItem,
    Item,
    ItemReference,
    MessageItem,
    as_stored,
)
from tokenmill.api.responses.response_object import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
    new_response,
)
from tokenmill.api.responses.response_request import (
    ENCRYPTED,
    LOGPROBS,
    RESPONSE_WITHOUT_EFFECT,
    ResponsesRequest,
)
from tokenmill.api.routes import (
    CANCEL_RESPONSE,
    DELETE_RESPONSE,
    INPUT_ITEMS,
    INPUT_TOKENS,
    RESPONSE,
    RESPONSES,
)
from tokenmill.api.stream import ApiState, GenerationResponse
from tokenmill.core.config import ServerConfig
from tokenmill.core.types import InvalidRequestError
from tokenmill.workers.fronts.stored_responses import ResponseKeeper

MAX_PAGE, DEFAULT_PAGE = 100, 20  # input items of one answer


def add_responses(app: FastAPI, state: ApiState, bodies: BodyReader) -> None:
    guard = caller(state.keys)
    keeper = state.client.response_keeper(state.config)
    store = ResponseStore(keeper, state.config)
    state.metrics.stored = keeper.size

    @RESPONSES.on(app, guard)
    async def create(request: Request) -> Response:
        account = request.state.account
        with handing_on(state.admit(account)) as place:
            with state.traced(request) as trace:
                here = partial(_read_response, store, account)
                read = await bodies.read(request, place, read_response, here)
                trace.parsed(read.parsed_ns)
                form = _format(read, state, store, account)
                trace.prepared(read.job, state.model)
            if read.call.store is False:  # else what it says is kept until it is stored
                place.body.release()
            return GenerationResponse(state, read.job, form, bool(read.call.stream), place, trace)

    @INPUT_TOKENS.on(app, guard)
    async def input_tokens(request: Request) -> Response:
        here = partial(_read_count, store, request.state.account)
        with state.enter(request.state.account) as place:
            count = await bodies.read(request, place, read_input_count, here)
        return json_response(InputTokens(input_tokens=count))

    @RESPONSE.on(app, guard)
    async def retrieve(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") in ("true", "1"):
            message = "stream: a stored response cannot be streamed again; leave the field out"
            raise ApiError(400, message, "stream", "unsupported_value")
        return json_response((await store.get(response_id, request.state.account)).response)

    @DELETE_RESPONSE.on(app, guard)
    async def delete(request: Request, response_id: str) -> Response:
        await store.delete(response_id, request.state.account)
        return json_response(DeletedResponse(id=response_id))

    @CANCEL_RESPONSE.on(app, guard)
    async def cancel(request: Request, response_id: str) -> Response:
        await store.get(response_id, request.state.account)
        message = f"response_id: {response_id!r} has ended: only a response in the background can "
        message += "be cancelled, and there are none; close the connection of a running one"
        raise ApiError(400, message, "response_id", "unsupported_value")

    @INPUT_ITEMS.on(app, guard)
    async def input_items(request: Request, response_id: str) -> Response:
        entry = await store.get(response_id, request.state.account)
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


@dataclass(frozen=True, slots=True)
class ReadResponse:
    call: ResponsesRequest
    items: list[Item]  # that its model sees
    job: PreparedCall
    parsed_ns: int


async def read_response(body: bytes, preparer: Preparer, model: str) -> ReadResponse:
    """A call that refers to nothing that is stored."""
    return await _read_response(None, "", body, preparer, model)


async def read_input_count(body: bytes, preparer: Preparer, model: str) -> int:
    """The tokens of the prompt of a call that refers to nothing that is stored."""
    return await _read_count(None, "", body, preparer, model)


async def _read_response(
    store: ResponseStore | None, account: str, body: bytes, preparer: Preparer, model: str
) -> ReadResponse:
    call, parsed_ns = _decode(body, preparer, model), time.monotonic_ns()
    items = await _context(call, store, account)
    try:
        job = await _job(call, items, preparer)
    except ApiError as error:
        is_too_long = error.code == "context_length_exceeded"
        if call.truncation != "auto" or not is_too_long or len(items) < 2:
            raise
        job, items = await _truncated(call, items, preparer)
    return ReadResponse(call, items, job, parsed_ns)


async def _read_count(
    store: ResponseStore | None, account: str, body: bytes, preparer: Preparer, model: str
) -> int:
    call = _decode(body, preparer, model)
    try:
        return await preparer.count_chat(chat_of(call, await _context(call, store, account)))
    except InvalidRequestError as error:
        raise renamed(of_invalid(error), RESPONSE_NAMES) from None


def _decode(body: bytes, preparer: Preparer, model: str) -> ResponsesRequest:
    ignored = preparer.ignored
    call = decode_call(body, ResponsesRequest, ignored)
    check_model(call.model, model)
    ignored.note(n for n in RESPONSE_WITHOUT_EFFECT if getattr(call, n) is not None)
    if call.reasoning is not None and (call.reasoning.summary or call.reasoning.context):
        ignored.note(["reasoning.summary"])
    return call


async def _context(call: ResponsesRequest, store: ResponseStore | None, account: str) -> list[Item]:
    """All items that the model is to see: the earlier turns', then the call's own."""
    given: Sequence[InputItem] = (
        [MessageItem(role="user", content=call.input)]
        if isinstance(call.input, str)
        else call.input
    )
    previous_id = call.previous_response_id
    own = [item for item in given if not isinstance(item, ItemReference)]
    if previous_id is None and len(own) == len(given):
        return own
    if store is None:
        raise NotElsewhereError
    items = await store.resolve(given, account)
    if previous_id is None:
        return items
    previous = await store.get(previous_id, account, "previous_response_id")
    return [*previous.conversation, *items]


async def _truncated(
    call: ResponsesRequest, items: list[Item], preparer: Preparer
) -> tuple[PreparedCall, list[Item]]:
    """Drop as few of the first items as possible; the last one stays."""
    low, high = 1, len(items) - 1
    kept = without_first(items, high)
    job = await _job(call, kept, preparer)
    while low < high:
        middle = (low + high) // 2
        try:
            fitting = without_first(items, middle)
            job, kept, high = await _job(call, fitting, preparer), fitting, middle
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            low = middle + 1
    return job, kept


async def _job(call: ResponsesRequest, items: Sequence[Item], preparer: Preparer) -> PreparedCall:
    try:
        job = await preparer.chat(chat_of(call, items), "resp_")
    except InvalidRequestError as error:
        raise renamed(of_invalid(error), RESPONSE_NAMES) from None
    except ApiError as error:
        raise renamed(error, RESPONSE_NAMES) from None
    if LOGPROBS in (call.include or ()) and job.splits_message:
        message = f"include: '{LOGPROBS}' is not supported for answers with reasoning or tools"
        raise ApiError(400, f"{message}; leave it out", "include", "unsupported_value")
    return job


def _format(
    read: ReadResponse, state: ApiState, store: ResponseStore, account: str
) -> ResponseFormat:
    """Writes the answer, and has it stored unless the call says not to."""
    call, job = read.call, read.job
    response = new_response(call, job.job_id, job.created, state.model)
    sampling = job.requests[0].task.sampling
    response.temperature, response.top_p = sampling.temperature, sampling.top_p

    def on_end(ended: ResponseObject) -> None:
        if call.store is not False:
            store.put(ended, read.items, account)

    carries = ENCRYPTED in (call.include or ())
    return ResponseFormat(response, state.tokenizer, on_end, carries)


class StoredResponse(msgspec.Struct):
    """A response and what its model saw."""

    response: ResponseObject
    context: list[Item]  # input of this and earlier turns, and the earlier turns' output

    @property
    def conversation(self) -> list[Item]:
        return [*self.context, *self.response.output]


_decode_stored = msgspec.json.Decoder(StoredResponse).decode


class ResponseStore:
    """Stored responses of all fronts; what is not there is answered with a 404."""

    def __init__(self, keeper: ResponseKeeper, limits: ServerConfig) -> None:
        self._keeper = keeper
        self._limits = limits

    def put(self, response: ResponseObject, context: Sequence[Item], account: str) -> None:
        if not self._limits.max_stored_responses:
            return
        stored = StoredResponse(response, [as_stored(item) for item in context])
        item_ids = [item.id for item in stored.conversation if item.id is not None]
        self._keeper.put(response.id, account, item_ids, json_encode(stored))

    async def get(
        self, response_id: str, account: str, param: str = "response_id"
    ) -> StoredResponse:
        payload = await self._keeper.get(response_id, account)
        if payload is None:
            raise self._no_response(response_id, param)
        return _decode_stored(payload)

    async def delete(self, response_id: str, account: str) -> None:
        if not await self._keeper.delete(response_id, account):
            raise self._no_response(response_id, "response_id")

    async def resolve(self, items: Sequence[InputItem], account: str) -> list[Item]:
        found: dict[str | None, Item] = {}
        for index, item in enumerate(items):
            if isinstance(item, ItemReference) and item.id not in found:
                payload = await self._keeper.find_item(item.id, account)
                if payload is None:
                    what = f"no item {item.id!r} is stored here"
                    raise self._unknown(what, f"input[{index}].id")
                found |= {each.id: each for each in _decode_stored(payload).conversation}
        return [found[item.id] if isinstance(item, ItemReference) else item for item in items]

    def _no_response(self, response_id: str, param: str) -> ApiError:
        return self._unknown(f"no response {response_id!r} is stored here", param)

    def _unknown(self, what: str, param: str) -> ApiError:
        limits = self._limits
        message = (
            f"{param}: {what}: it is unknown, was deleted or not stored (store false), or was "
            f"dropped (this server keeps at most {limits.max_stored_responses} responses of all "
            f"keys, {limits.max_stored_response_bytes} bytes, for {limits.stored_response_age_s:g} "
            "s); "
            "send the conversation as input"
        )
        return ApiError(404, message, param, "response_not_found")


def page_of(items: Sequence[Item], limit: int, descending: bool, after: str | None) -> ItemList:
    """One page of a list of items; `after` is the id of the last item of the page before."""
    ordered = list(reversed(items)) if descending else list(items)
    if after is not None:
        places = [index for index, item in enumerate(ordered) if item.id == after]
        if not places:
            message = f"after: no input item has the id {after!r}; send the last_id of a page"
            raise ApiError(400, message, "after", "invalid_value")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(ordered) > len(page),
    )

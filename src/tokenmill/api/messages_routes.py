"""The routes of Anthropic's Messages API: each call is answered by a chat completion."""

from __future__ import annotations

import time
from typing import TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.api.bodies.body_reader import BodyReader, ReadCall, answer_call, check_model
from tokenmill.api.errors import ApiError, of_invalid, renamed
from tokenmill.api.keys import caller
from tokenmill.api.messages.message_chat import MESSAGE_NAMES, chat_of_messages
from tokenmill.api.messages.message_format import MessageFormat, TokenCountAnswer
from tokenmill.api.messages.message_request import (
    MESSAGE_WITHOUT_EFFECT,
    CountTokensRequest,
    MessagesRequest,
    ThinkingDisabled,
)
from tokenmill.api.operations import json_response
from tokenmill.api.protocol.decoding import decode_call
from tokenmill.api.protocol.prepare import PreparedCall, Preparer
from tokenmill.api.routes import COUNT_TOKENS, MESSAGES
from tokenmill.api.stream import ApiState
from tokenmill.core.types import InvalidRequestError

T = TypeVar("T", bound=CountTokensRequest)


def add_messages(app: FastAPI, state: ApiState, bodies: BodyReader) -> None:
    guard = caller(state.keys)

    @MESSAGES.on(app, guard)
    async def create(request: Request) -> Response:
        return await answer_call(request, state, bodies, read_message)

    @COUNT_TOKENS.on(app, guard)
    async def count_tokens(request: Request) -> Response:
        with state.enter(request.state.account) as place:
            count = await bodies.read(request, place, read_count)
        return json_response(TokenCountAnswer(input_tokens=count))


async def read_message(body: bytes, preparer: Preparer, model: str) -> ReadCall:
    call, parsed_ns = _decode(body, MessagesRequest, preparer, model), time.monotonic_ns()
    job = await _prepare(call, preparer)
    return ReadCall(job, _format(call, job, model), bool(call.stream), parsed_ns)


async def read_count(body: bytes, preparer: Preparer, model: str) -> int:
    call = _decode(body, CountTokensRequest, preparer, model)
    try:
        return await preparer.count_chat(chat_of_messages(call))
    except InvalidRequestError as error:
        raise renamed(of_invalid(error), MESSAGE_NAMES) from None


def _decode(body: bytes, kind: type[T], preparer: Preparer, model: str) -> T:
    call = decode_call(body, kind, preparer.ignored)
    check_model(call.model, model)
    given = [n for n in MESSAGE_WITHOUT_EFFECT if getattr(call, n, None) is not None]
    preparer.ignored.note(given)
    return call


async def _prepare(call: MessagesRequest, preparer: Preparer) -> PreparedCall:
    try:
        return await preparer.chat(chat_of_messages(call), "msg_", clamps=True)
    except InvalidRequestError as error:
        if error.param == "reasoning_effort" and isinstance(call.thinking, ThinkingDisabled):
            raise _always_thinks() from None
        raise renamed(of_invalid(error), MESSAGE_NAMES) from None
    except ApiError as error:
        raise renamed(error, MESSAGE_NAMES) from None


def _always_thinks() -> ApiError:
    message = "thinking: 'disabled' is not supported: this model always reasons; leave the field "
    return ApiError(
        400, f"{message}out, or send output_config.effort 'low'", "thinking", "unsupported_value"
    )


def _format(call: MessagesRequest, job: PreparedCall, model: str) -> MessageFormat:
    hides_thinking = getattr(call.thinking, "display", None) == "omitted"
    max_tokens = job.requests[0].task.sampling.max_tokens
    fills_context = max_tokens is not None and max_tokens < call.max_tokens
    return MessageFormat(job, model, hides_thinking, fills_context)

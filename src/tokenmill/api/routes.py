"""The routes of servers: each row registers the handler of a route, and is what its document says.

Rows have the parameters of their paths by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Depends, FastAPI

from tokenmill.api.keys import Guard
from tokenmill.api.messages import message_format, message_request
from tokenmill.api.protocol import answers
from tokenmill.api.protocol import requests as protocol
from tokenmill.api.responses import response_object
from tokenmill.api.responses.response_request import ResponsesRequest

JSON, HTML, TEXT = "application/json", "text/html", "text/plain"
GENERATION_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)
TEXT_ERRORS = (400, 401, 404, 413)
STORED_ERRORS = (400, 401, 404)
PAGE: Mapping[str, Any] = {  # how to ask for a part of a list
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
Answers = type | str  # a struct, or another kind of content
Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Route:
    """One way to call a path."""

    method: str
    path: str
    summary: str
    answer: Answers | tuple[Answers, ...] | None
    errors: tuple[int, ...] = ()
    body: type | None = None
    events: type | None = None  # of an answer that is streamed
    names_events: bool = False  # an event has a name, and the stream no [DONE]
    error: type = answers.ErrorAnswer
    query: Mapping[str, Any] = field(default_factory=dict)  # the JSON schema of each parameter
    kinds: tuple[str, ...] = (JSON,)  # of content, in which the body may be sent
    answers_in_kind: bool = False  # the answer may have these, too

    def on(self, app: FastAPI, *guards: Guard) -> Callable[[Handler], Handler]:
        """Have the app call a handler; the guards are asked before."""

        def register(handler: Handler) -> Handler:
            app.add_api_route(
                self.path,
                handler,
                methods=[self.method],
                dependencies=[Depends(guard) for guard in guards],
            )
            return handler

        return register


CHAT = Route(
    *("POST", "/v1/chat/completions", "Answer a conversation, whole or as server-sent events"),
    *(answers.ChatCompletion, GENERATION_ERRORS),
    body=protocol.ChatCompletionRequest,
    events=answers.ChatCompletionChunk,
)
COMPLETIONS = Route(
    *("POST", "/v1/completions", "Continue a text, whole or as server-sent events"),
    *(answers.Completion, GENERATION_ERRORS),
    body=protocol.CompletionRequest,
    events=answers.Completion,
)
RESPONSES = Route(
    *("POST", "/v1/responses"),
    "Answer input items with output items, whole or as typed server-sent events",
    *(response_object.ResponseObject, GENERATION_ERRORS),
    body=ResponsesRequest,
    events=response_object.ResponseEvent,
    names_events=True,
)
INPUT_TOKENS = Route(
    *("POST", "/v1/responses/input_tokens", "The tokens of a prompt"),
    *(response_object.InputTokens, TEXT_ERRORS),
    body=ResponsesRequest,
)
RESPONSE = Route(
    *("GET", "/v1/responses/{response_id}", "A stored response"),
    *(response_object.ResponseObject, STORED_ERRORS),
)
DELETE_RESPONSE = Route(
    *("DELETE", "/v1/responses/{response_id}", "Forget it"),
    *(response_object.DeletedResponse, (401, 404)),
)
CANCEL_RESPONSE = Route(
    *("POST", "/v1/responses/{response_id}/cancel", "Refused: no response is in the background"),
    answer=None,
    errors=STORED_ERRORS,
)
INPUT_ITEMS = Route(
    *("GET", "/v1/responses/{response_id}/input_items", "What a stored response was made from"),
    *(response_object.ItemList, STORED_ERRORS),
    query=PAGE,
)
MESSAGES = Route(
    *("POST", "/v1/messages"),
    "Anthropic's form of a chat, whole or as typed server-sent events",
    *(message_format.MessageAnswer, GENERATION_ERRORS),
    body=message_request.MessagesRequest,
    events=message_format.MessageStreamEvent,
    names_events=True,
    error=answers.MessagesErrorAnswer,
)
COUNT_TOKENS = Route(
    *("POST", "/v1/messages/count_tokens", "The tokens of a prompt"),
    *(message_format.TokenCountAnswer, TEXT_ERRORS),
    body=message_request.CountTokensRequest,
    error=answers.MessagesErrorAnswer,
)
TOKENIZE = Route(
    *("POST", "/tokenize", "Text or messages to token ids", answers.TokenizeAnswer, TEXT_ERRORS),
    body=protocol.TokenizeRequest,
)
DETOKENIZE = Route(
    *("POST", "/detokenize", "Token ids to text", answers.DetokenizeAnswer, TEXT_ERRORS),
    body=protocol.DetokenizeRequest,
)
TOKENIZER_INFO = Route(
    *("GET", "/tokenizer_info", "Special tokens and the chat template"),
    *(answers.TokenizerInfo, (401,)),
)
MODELS = Route("GET", "/v1/models", "The models served here", answers.ModelList, (401,))
MODEL = Route("GET", "/v1/models/{model_id:path}", "One model", answers.ModelCard, (401, 404))
ROOT = Route("GET", "/", "Who this is, and where the rest is", answers.ServiceInfo)
HEALTH = Route("GET", "/health", "Whether requests are taken", answers.Health, (503,))
PING = Route("GET", "/ping", "The same", answers.Health, (503,))
VERSION = Route("GET", "/version", "The server's version", answers.Version)
METRICS = Route("GET", "/metrics", "Prometheus metrics", TEXT)
DASHBOARD = Route("GET", "/dashboard", "The live page", HTML)
DOCS = Route("GET", "/docs", "This page", HTML)
OPENAPI = Route("GET", "/openapi.json", "This document", JSON)

EVERYWHERE = (MODELS, MODEL, ROOT, HEALTH, PING, VERSION, METRICS, DASHBOARD, DOCS, OPENAPI)
LANGUAGE: Sequence[Route] = (
    *(CHAT, COMPLETIONS, RESPONSES, INPUT_TOKENS, RESPONSE, DELETE_RESPONSE, CANCEL_RESPONSE),
    *(INPUT_ITEMS, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE, TOKENIZER_INFO, *EVERYWHERE),
)

"""The OpenAPI document, from the structs that are decoded and encoded, and a page that shows it.

The page is plain HTML: it needs neither scripts nor the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from tokenmill.api.messages import message_format, message_request
from tokenmill.api.protocol import answers
from tokenmill.api.protocol import requests as protocol
from tokenmill.api.responses import response_object
from tokenmill.api.responses.response_items import MessageItem
from tokenmill.api.responses.response_request import ResponsesRequest

Json = dict[str, Any]

_TITLES = {
    400: "Malformed, unknown or unsupported field, out of range, or too long",
    401: "Missing or wrong API key",
    404: "Unknown model or response",
    408: "The request passed its deadline",
    413: "The body is too large",
    429: "The queue is full or too many requests are open",
    500: "The engine failed",
    503: "Draining, or the engine is restarting",
}
_GENERATION_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)
_TEXT_ERRORS = (400, 401, 404, 413)
_REQUESTS = (
    protocol.ChatCompletionRequest,
    protocol.CompletionRequest,
    ResponsesRequest,
    message_request.MessagesRequest,
    message_request.CountTokensRequest,
    protocol.TokenizeRequest,
    protocol.DetokenizeRequest,
)
_ANSWERS = (
    answers.ChatCompletion,
    answers.ChatCompletionChunk,
    answers.Completion,
    response_object.ResponseObject,
    response_object.ResponseEvent,
    response_object.ItemList,
    response_object.DeletedResponse,
    response_object.InputTokens,
    message_format.MessageAnswer,
    message_format.MessageStreamEvent,
    message_format.TokenCountAnswer,
    answers.MessagesErrorAnswer,
    answers.ModelList,
    answers.ModelCard,
    answers.TokenizeAnswer,
    answers.TokenizerInfo,
    answers.DetokenizeAnswer,
    answers.Health,
    answers.Version,
    answers.Service,
    answers.ErrorAnswer,
)


def document(
    version: str,
    model: str | None,
    needs_key: bool,
    passed_on: Iterable[tuple[str, Sequence[str]]] = (),
) -> Json:
    """The whole OpenAPI 3.1 document of a server of `model`.

    A router has no model of its own, and passes on routes with these methods.
    """
    _, schemas = msgspec.json.schema_components(
        _REQUESTS + _ANSWERS, ref_template="#/components/schemas/{name}"
    )
    for struct in _REQUESTS:
        name = schemas[struct.__name__]["properties"]["model"]
        if model is not None:
            name["anyOf"] = [{"type": "string", "enum": [model]}, {"type": "null"}]
    for struct in _REQUESTS:
        _accept_null(schemas, struct.__name__)
    schemas[MessageItem.__name__]["required"].remove("type")  # the default of input items
    paths = {path: _passed_on(path, methods) for path, methods in passed_on} | _paths()
    return _document(version, needs_key, paths, schemas)


Paths = Mapping[str, tuple[str, type[msgspec.Struct], type[msgspec.Struct]]]


def job_document(
    version: str, model: str, needs_key: bool, calls: Paths, also: str | None = None
) -> Json:
    """The document of a server of jobs: POST calls with their summary, body and answer.

    `also` is the kind of content that bodies and answers may have beside JSON.
    """
    structs = [each for _, body, answer in calls.values() for each in (body, answer)]
    shared = (answers.ModelList, answers.ModelCard, answers.Health, answers.Version)
    own = (*structs, *shared, answers.Service, answers.ErrorAnswer)
    _, schemas = msgspec.json.schema_components(own, ref_template="#/components/schemas/{name}")
    paths = {}
    for path, (summary, body, answer) in calls.items():
        operation = _operation(summary, answer.__name__, _GENERATION_ERRORS, body=body.__name__)
        if also is not None:
            for part in (operation["requestBody"], operation["responses"]["200"]):
                part["content"][also] = part["content"]["application/json"]
        paths[path] = {"post": operation}
        name = schemas[body.__name__]["properties"]["model"]
        name["anyOf"] = [{"type": "string", "enum": [model]}, {"type": "null"}]
        _accept_null(schemas, body.__name__)
    return _document(version, needs_key, paths | _operations(), schemas)


def _document(
    version: str, needs_key: bool, paths: dict[str, dict[str, Json]], schemas: Json
) -> Json:
    """The parts as one document; calls of the API want a key where there is one."""
    security: list[Json] = [{"key": []}, {"x-api-key": []}] if needs_key else []
    for path, operations in paths.items():
        if path.startswith("/v1/") or path in ("/tokenize", "/detokenize", "/tokenizer_info"):
            for operation in operations.values():
                operation["security"] = security
    components: Json = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokenmill", "version": version},
        "paths": paths,
        "components": components,
    }


def _accept_null(schemas: Json, name: str, in_message: bool = False) -> None:
    """Say that objects below a request may have unknown fields: null ones, in messages any.

    An image of a message has none but null ones.
    """
    schema = schemas[name]
    if schema.get("additionalProperties") not in (False, {"type": "null"}):
        return
    takes_all = in_message and name not in _names_below(protocol.ImageSchema)
    schema["additionalProperties"] = True if takes_all else {"type": "null"}
    for field, definition in schema["properties"].items():
        for inner in _references(definition):
            _accept_null(schemas, inner, in_message or field in ("messages", "input"))


def _names_below(base: type) -> set[str]:
    below: list[type] = base.__subclasses__()
    return {each.__name__ for each in below}.union(*map(_names_below, below))


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for each in schema for name in _references(each)]
    if not isinstance(schema, dict):
        return []
    if isinstance(reference := schema.get("$ref"), str):
        return [reference.rpartition("/")[2]]
    return _references(list(schema.values()))


def _paths() -> dict[str, dict[str, Json]]:
    return {
        "/v1/chat/completions": {
            "post": _operation(
                "Answer a conversation, whole or as server-sent events",
                "ChatCompletion",
                _GENERATION_ERRORS,
                body="ChatCompletionRequest",
                events="ChatCompletionChunk",
            )
        },
        "/v1/completions": {
            "post": _operation(
                "Continue a text, whole or as server-sent events",
                "Completion",
                _GENERATION_ERRORS,
                body="CompletionRequest",
                events="Completion",
            )
        },
        **_responses_paths(),
        **_messages_paths(),
        "/tokenize": {
            "post": _operation(
                "Text or messages to token ids",
                "TokenizeAnswer",
                _TEXT_ERRORS,
                body="TokenizeRequest",
            )
        },
        "/detokenize": {
            "post": _operation(
                "Token ids to text", "DetokenizeAnswer", _TEXT_ERRORS, body="DetokenizeRequest"
            )
        },
        "/tokenizer_info": {
            "get": _operation("Special tokens and the chat template", "TokenizerInfo", (401,))
        },
        **_operations(),
    }


def _operations() -> dict[str, dict[str, Json]]:
    """What every server answers."""
    model_id = {
        "name": "model_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
    return {
        "/v1/models": {"get": _operation("The models served here", "ModelList", (401,))},
        "/v1/models/{model_id}": {
            "get": _operation("One model", "ModelCard", (401, 404)) | {"parameters": [model_id]}
        },
        "/": {"get": _operation("Who this is, and where the rest is", "Service", ())},
        "/health": {"get": _operation("Whether requests are taken", "Health", (503,))},
        "/ping": {"get": _operation("The same", "Health", (503,))},
        "/version": {"get": _operation("The server's version", "Version", ())},
        "/metrics": {"get": _plain("Prometheus metrics", "text/plain")},
        "/dashboard": {"get": _plain("The live page", "text/html")},
        "/docs": {"get": _plain("This page", "text/html")},
        "/openapi.json": {"get": _plain("This document", "application/json")},
    }


def _passed_on(path: str, methods: Sequence[str]) -> dict[str, Json]:
    """Calls that the backends of a router know."""
    operation = _plain("Passed on to a backend, which knows more of it", "application/json")
    names = re.findall(r"{(\w+)}", path)
    place = {"in": "path", "required": True, "schema": {"type": "string"}}
    operation["parameters"] = [{"name": name, **place} for name in names]
    return {method.lower(): operation for method in methods}


def _responses_paths() -> dict[str, dict[str, Json]]:
    """What the Responses API has."""
    response_id = {
        "name": "response_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
    page = [
        _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
        _query("order", {"type": "string", "enum": ["asc", "desc"]}),
        _query("after", {"type": "string"}),
    ]
    stored = {"parameters": [response_id]}
    create = _operation(
        "Answer input items with output items, whole or as typed server-sent events",
        "ResponseObject",
        _GENERATION_ERRORS,
        body="ResponsesRequest",
        events="ResponseEvent",
        typed=True,
    )
    count = _operation(
        "The tokens of a prompt", "InputTokens", _TEXT_ERRORS, body="ResponsesRequest"
    )
    cancel = _operation("Refused: no response is in the background", "ErrorAnswer", (400, 401, 404))
    del cancel["responses"]["200"]
    items = _operation("What a stored response was made from", "ItemList", (400, 401, 404))
    return {
        "/v1/responses": {"post": create},
        "/v1/responses/input_tokens": {"post": count},
        "/v1/responses/{response_id}": {
            "get": _operation("A stored response", "ResponseObject", (400, 401, 404)) | stored,
            "delete": _operation("Forget it", "DeletedResponse", (401, 404)) | stored,
        },
        "/v1/responses/{response_id}/cancel": {"post": cancel | stored},
        "/v1/responses/{response_id}/input_items": {
            "get": items | {"parameters": [response_id, *page]}
        },
    }


def _messages_paths() -> dict[str, dict[str, Json]]:
    """What Anthropic's API has."""
    create = _operation(
        "Anthropic's form of a chat, whole or as typed server-sent events",
        "MessageAnswer",
        _GENERATION_ERRORS,
        body="MessagesRequest",
        events="MessageStreamEvent",
        error="MessagesErrorAnswer",
        typed=True,
    )
    count = _operation(
        "The tokens of a prompt",
        "TokenCountAnswer",
        _TEXT_ERRORS,
        body="CountTokensRequest",
        error="MessagesErrorAnswer",
    )
    return {"/v1/messages": {"post": create}, "/v1/messages/count_tokens": {"post": count}}


def _query(name: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _operation(
    summary: str,
    answer: str,
    errors: tuple[int, ...],
    body: str | None = None,
    events: str | None = None,
    error: str = "ErrorAnswer",
    typed: bool = False,
) -> Json:
    content: Json = {"application/json": {"schema": _ref(answer)}}
    if events is not None:
        event = _typed_event(events) if typed else _event(events)
        content["text/event-stream"] = {"schema": event}
    by_status: Json = {"200": {"description": "OK", "content": content}}
    for status in errors:
        by_status[str(status)] = _error(status, error)
    operation: Json = {"summary": summary, "responses": by_status}
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(body)}},
        }
    return operation


def _event(name: str) -> Json:
    """A server-sent event; the last one's data is [DONE], an error's an ErrorAnswer."""
    payload = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(name), _ref("ErrorAnswer")]},
    }
    data = {"anyOf": [{"type": "string", "const": "[DONE]"}, payload]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _typed_event(name: str) -> Json:
    """A server-sent event whose name is the type of its data."""
    payload = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _ref(name),
    }
    properties = {"event": {"type": "string"}, "data": payload}
    return {"type": "object", "properties": properties, "required": ["event", "data"]}


def _error(status: int, body: str) -> Json:
    answer: Json = {
        "description": _TITLES[status],
        "content": {"application/json": {"schema": _ref(body)}},
    }
    if status in (429, 503):
        answer["headers"] = {
            "Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer"}}
        }
    return answer


def _plain(summary: str, media_type: str) -> Json:
    content: Json = {media_type: {"schema": {}}}
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tokenmill API</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
summary {{ cursor: pointer; padding: .3rem 0 }}
code {{ font-family: ui-monospace, monospace }}
table {{ border-collapse: collapse; margin: .5rem 0 1rem 1rem }}
td {{ border-top: 1px solid #ccc; padding: .2rem .8rem .2rem 0; vertical-align: top }}
</style></head><body>
<h1>tokenmill {version}</h1>
<p>The machine-readable document is <a href="openapi.json">openapi.json</a>.</p>
<h2>Routes</h2>{routes}
<h2>Schemas</h2>{schemas}
</body></html>
"""


def docs_page(api: Json) -> str:
    """The document as one static HTML page."""
    routes = "".join(
        _route(method, path, operation)
        for path, operations in api["paths"].items()
        for method, operation in operations.items()
    )
    schemas = "".join(_schema(name, s) for name, s in sorted(api["components"]["schemas"].items()))
    return _PAGE.format(version=escape(api["info"]["version"]), routes=routes, schemas=schemas)


def _route(method: str, path: str, operation: Json) -> str:
    body = ""
    if "requestBody" in operation:
        media = operation["requestBody"]["content"]["application/json"]
        body = f"<p>Body: {_type(media['schema'])}</p>"
    rows = "".join(
        f"<tr><td>{status}</td><td>{escape(answer['description'])}</td><td>"
        + ", ".join(
            f"<code>{escape(kind)}</code> {_type(media['schema'])}"
            for kind, media in answer["content"].items()
        )
        + "</td></tr>"
        for status, answer in operation["responses"].items()
    )
    head = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
    return f"<details><summary>{head}</summary>{body}<table>{rows}</table></details>"


def _schema(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code></td><td>{_type(definition)}</td>"
        f"<td>{'required' if field in required else escape(definition.get('description', ''))}"
        "</td></tr>"
        for field, definition in schema.get("properties", {}).items()
    )
    text = escape(schema.get("description", ""))
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> {text}</summary>'
        f"<table>{rows}</table></details>"
    )


def _type(schema: Json) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "contentSchema" in schema:
        return _type(schema["contentSchema"])
    if "data" in schema.get("properties", {}):
        return _type(schema["properties"]["data"])
    if "const" in schema:
        return escape(str(schema["const"]))
    if "enum" in schema:
        return " or ".join(escape(repr(value)) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    limits = [
        f"{sign} {schema[key]}"
        for key, sign in (
            ("minimum", "&ge;"),
            ("exclusiveMinimum", "&gt;"),
            ("maximum", "&le;"),
            ("pattern", "matches"),
        )
        if key in schema
    ]
    return " ".join([escape(str(schema.get("type", "any"))), *limits])

"""The OpenAPI document of a table of routes, and a page that shows it.

The page is plain HTML: it needs neither scripts nor the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import msgspec

from tokenmill.api.protocol import answers
from tokenmill.api.protocol.requests import ImageSchema
from tokenmill.api.responses.response_items import MessageItem
from tokenmill.api.routes import JSON, Route

Json = dict[str, Any]

_TITLES = {
    400: "Malformed, unknown or unsupported field, out of range, or too long",
    401: "Missing or wrong API key",
    404: "Unknown model, response or video",
    408: "The request passed its deadline",
    413: "The body is too large",
    429: "The queue is full or too many requests are open",
    500: "The engine failed",
    503: "Draining, or the engine is restarting",
}


def document(
    routes: Iterable[Route],
    version: str,
    model: str | None,
    needs_key: bool,
    passed_on: Iterable[tuple[str, Sequence[str]]] = (),
) -> Json:
    """The whole OpenAPI 3.1 document of a server of `model`.

    A router has no model of its own, and passes on paths with these methods.
    """
    routes = tuple(routes)
    bodies = {route.body.__name__ for route in routes if route.body is not None}
    schemas = _schemas(routes)
    for name in bodies if model is not None else ():
        kinds = [{"type": "string", "enum": [model]}, {"type": "null"}]
        schemas[name]["properties"]["model"]["anyOf"] = kinds
    for name in sorted(bodies):
        _accept_null(schemas, name)
    if MessageItem.__name__ in schemas:
        schemas[MessageItem.__name__]["required"].remove("type")  # the default of input items
    paths = {path: _passed_on(path, methods, needs_key) for path, methods in passed_on}
    for path in {_shown(route) for route in routes} & set(paths):
        del paths[path]
    for route in routes:
        paths.setdefault(_shown(route), {})[route.method.lower()] = _operation(route, needs_key)
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


def _shown(route: Route) -> str:
    return route.path.replace(":path", "")


def _schemas(routes: Iterable[Route]) -> Json:
    structs: list[Any] = [answers.ErrorAnswer]
    for route in routes:
        structs += [*_answers(route), route.body, route.events, route.error]
    wanted = dict.fromkeys(each for each in structs if each is not None)
    _, schemas = msgspec.json.schema_components(wanted, ref_template="#/components/schemas/{name}")
    return schemas


def _answers(route: Route) -> list[type]:
    given = route.answer if isinstance(route.answer, tuple) else (route.answer,)
    return [each for each in given if isinstance(each, type)]


def _accept_null(schemas: Json, name: str, in_message: bool = False) -> None:
    """Say that objects below a request may have unknown fields: null ones, in messages any.

    An image of a message has none but null ones.
    """
    schema = schemas[name]
    if schema.get("additionalProperties") not in (False, {"type": "null"}):
        return
    takes_all = in_message and name not in _names_below(ImageSchema)
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


def _passed_on(path: str, methods: Sequence[str], needs_key: bool) -> dict[str, Json]:
    """Calls that the backends of a router know."""
    summary = "Passed on to a backend, which knows more of it"
    routes = (Route(method, path, summary, JSON) for method in methods)
    return {route.method.lower(): _operation(route, needs_key) for route in routes}


def _operation(route: Route, needs_key: bool) -> Json:
    by_status: Json = {}
    if route.answer is not None:
        by_status["200"] = {"description": "OK", "content": _content(route)}
    for status in route.errors:
        by_status[str(status)] = _error(status, route.error)
    operation: Json = {"summary": route.summary, "responses": by_status}
    if route.body is not None:
        content = {kind: {"schema": _ref(route.body)} for kind in route.kinds}
        operation["requestBody"] = {"required": True, "content": content}
    in_path = {name: {"type": "string", "minLength": 1} for name in _NAME.findall(route.path)}
    if parameters := [
        {"name": name, "in": where, "required": where == "path", "schema": schema}
        for where, schemas in (("path", in_path), ("query", route.query))
        for name, schema in schemas.items()
    ]:
        operation["parameters"] = parameters
    if 401 in route.errors or route.path.startswith("/v1/"):
        operation["security"] = [{"key": []}, {"x-api-key": []}] if needs_key else []
    return operation


_NAME = re.compile(r"{(\w+)")


def _content(route: Route) -> Json:
    given = route.answer if isinstance(route.answer, tuple) else (route.answer,)
    refs = [_ref(each) for each in _answers(route)]
    if not refs:
        return {kind: {"schema": _raw(kind)} for kind in given if isinstance(kind, str)}
    schema = {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}
    content: Json = dict.fromkeys(route.kinds if route.answers_in_kind else (JSON,), schema)
    if route.events is not None:
        content["text/event-stream"] = {"schema": _event(route.events, route.names_events)}
    return content


def _raw(kind: str) -> Json:
    is_text = kind.startswith("text/") or kind == JSON
    return {} if is_text else {"type": "string", "format": "binary"}


def _event(kind: type, is_named: bool) -> Json:
    """A server-sent event; without names the last one's data is [DONE], an error's ErrorAnswer."""
    payload: Json = {"type": "string", "contentMediaType": JSON, "contentSchema": _ref(kind)}
    data, names = payload, {"event": {"type": "string"}}
    if not is_named:
        payload["contentSchema"] = {"anyOf": [_ref(kind), _ref(answers.ErrorAnswer)]}
        data, names = {"anyOf": [{"type": "string", "const": "[DONE]"}, payload]}, {}
    properties = names | {"data": data}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _error(status: int, body: type) -> Json:
    answer: Json = {
        "description": _TITLES[status],
        "content": {JSON: {"schema": _ref(body)}},
    }
    if status in (429, 503):
        answer["headers"] = {
            "Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer"}}
        }
    return answer


def _ref(kind: type) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


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

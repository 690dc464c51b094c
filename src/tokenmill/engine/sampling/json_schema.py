"""Which JSON schemas can be enforced: what the grammar compiler would ignore is an error here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenmill.core.types import InvalidRequestError

MAX_DEPTH = 100

_IGNORED = frozenset(  # no output would ever be checked against these
    {"not", "if", "then", "else", "contains", "minContains", "maxContains"}
    | {"dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"}
)
# One of these decides alone; the compiler does not look at the assertions beside it.
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_STRING = ("minLength", "maxLength", "pattern")
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SIZES = ("minProperties", "maxProperties", "minItems", "maxItems")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
_SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ASSERTIONS = frozenset(
    {*_DECIDING, *_STRING, *_RANGE, *_SIZES, *_SCHEMAS, "multipleOf", "format", "required"}
    | {"properties", "patternProperties", "propertyNames", "prefixItems"}
)
_PATTERN_PART = re.compile(
    r"\[\^(?:\\.|[^\]\\])*\]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL
)
_ESCAPED = {'"', "\\", '\\"', "\\\\", "\\n", "\\r", "\\t", "\\f", "\\v", "\\0"}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text that is not nested deeper than MAX_DEPTH."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{what} is not valid JSON: {error}") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise InvalidRequestError(f"{what} is nested deeper than {MAX_DEPTH} levels")


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def check_schema(schema: Any) -> None:
    """Raise InvalidRequestError naming the first keyword that could not be enforced."""
    for path, node in _walk(schema):
        problem = _problem(node)
        if problem:
            raise InvalidRequestError(f"the JSON schema cannot be enforced: {problem} at {path}")


def patterns(schema: Any) -> Iterator[str]:
    """Every regular expression in a schema."""
    for _, node in _walk(schema):
        found = [node.get("pattern"), *_as_dict(node.get("patternProperties"))]
        yield from (pattern for pattern in found if isinstance(pattern, str))


def _walk(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and its subschemas, each with its JSON pointer."""
    stack = [("#", schema)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, dict):
            yield path, node
            stack.extend(_subschemas(path, node))


def _subschemas(path: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _SCHEMAS:
        yield f"{path}/{key}", node.get(key)
    if isinstance(node.get("propertyNames"), dict):  # names are strings without saying so
        yield f"{path}/propertyNames", {"type": "string"} | node["propertyNames"]
    for key in _SCHEMA_LISTS:
        children = node.get(key)
        if isinstance(children, list):
            yield from ((f"{path}/{key}/{i}", child) for i, child in enumerate(children))
    for key in _SCHEMA_MAPS:
        children = _as_dict(node.get(key))
        yield from ((f"{path}/{key}/{name}", child) for name, child in children.items())


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _problem(node: dict[str, Any]) -> str | None:
    """What in this schema, its subschemas aside, the compiler would ignore."""
    keys = node.keys()
    ignored = sorted(keys & _IGNORED)
    if ignored:
        return f"{ignored[0]!r} is not supported"
    if node.get("uniqueItems"):
        return "'uniqueItems' is not supported"
    deciding = next((key for key in _DECIDING if key in keys), None)
    if deciding:
        return _deciding_problem(node, deciding)
    return _string_problem(node) or _number_problem(node) or _object_problem(node)


def _deciding_problem(node: dict[str, Any], deciding: str) -> str | None:
    beside = sorted((node.keys() & _ASSERTIONS) - {deciding})
    if beside:
        return f"{beside[0]!r} beside {deciding!r} is not supported"
    value = node[deciding]
    if deciding == "$ref" and isinstance(value, str) and value != "#" and value[:2] != "#/":
        return f"'$ref' must point into the schema itself ('#/...'), got {value!r}"
    if deciding == "allOf" and isinstance(value, list) and len(value) != 1:
        return "'allOf' with more than one schema is not supported"
    if deciding in ("const", "enum") and "type" in node:
        values = value if deciding == "enum" and isinstance(value, list) else [value]
        odd = [v for v in values if not _has_type(v, node["type"])]
        if odd:
            return f"{deciding!r} has {json.dumps(odd[0])}, which is not of the 'type' beside it"
    return None


def _has_type(value: Any, names: Any) -> bool:
    for name in names if isinstance(names, list) else [names]:
        types = _JSON_TYPES.get(name, ()) if isinstance(name, str) else ()
        if isinstance(value, types) and isinstance(value, bool) <= (name == "boolean"):
            return True
    return False


def _declares(node: dict[str, Any], *names: str) -> bool:
    declared = node.get("type")
    return any(name in (declared if isinstance(declared, list) else [declared]) for name in names)


def _string_problem(node: dict[str, Any]) -> str | None:
    found = [key for key in _STRING if key in node]
    if found and not _declares(node, "string"):
        return f"{found[0]!r} needs 'type': 'string'"
    if "pattern" in node and len(found) > 1:
        return f"'pattern' beside {found[0]!r} is not supported"
    if "format" in node and found:
        return f"'format' beside {found[0]!r} is not supported"
    return _pattern_problem(node.get("pattern"))


def _pattern_problem(pattern: Any) -> str | None:
    """Characters that JSON must escape come out as they are: outside [^...] none may be named."""
    for part in _PATTERN_PART.findall(pattern) if isinstance(pattern, str) else ():
        char = chr(int(part[2:], 16)) if part[:2] in ("\\x", "\\u") and part[2:] else part
        if char < " " or char in _ESCAPED:
            return "a quote, a backslash or a control character in 'pattern' is not supported"
    return None


def _number_problem(node: dict[str, Any]) -> str | None:
    found = [key for key in (*_RANGE, "multipleOf") if key in node]
    if found and not _declares(node, "number", "integer"):
        return f"{found[0]!r} needs 'type': 'number' or 'integer'"
    if "multipleOf" in node and (len(found) > 1 or _declares(node, "number")):
        return "'multipleOf' is supported for integers without a range only"
    return None


def _object_problem(node: dict[str, Any]) -> str | None:
    required, properties = node.get("required"), _as_dict(node.get("properties"))
    if isinstance(required, list):
        undeclared = [n for n in required if isinstance(n, str) and n not in properties]
        if undeclared:
            return f"'required' names {undeclared[0]!r}, which is not in 'properties'"
    if properties and "propertyNames" in node:
        return "'propertyNames' beside 'properties' is not supported"
    for pattern in _as_dict(node.get("patternProperties")):
        problem = _pattern_problem(pattern)
        if problem:
            return problem.replace("'pattern'", "'patternProperties'")
    if "patternProperties" in node and node.get("additionalProperties", False) is not False:
        return "'patternProperties' beside 'additionalProperties' is not supported"
    return None

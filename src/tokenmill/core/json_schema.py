"""What a grammar can enforce of a JSON schema, and what its compiler would ignore.

Some schemas are said in other words that the compiler knows; of others keywords are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tokenmill.core.types import InvalidRequestError

Node = dict[str, Any]

MAX_INLINED = 64  # references of one schema that are replaced by what they point to
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$schema", "$id", "$defs", "definitions", "discriminator"}
)
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def look_up(root: Any, reference: object) -> Any:
    """What a reference into the schema itself points to; None where there is nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node


def merged(one: Node, other: Node) -> Node | None:
    """The schema of what fits both; None where no single one is known to say so."""
    if _closes(one, other) or _closes(other, one):
        return None
    both = one | {name: value for name, value in other.items() if name not in one}
    for name in one.keys() & other.keys() - ANNOTATIONS:
        value = _both(name, one[name], other[name])
        if value is None:
            return None
        both[name] = value
    return both


def _closes(one: Node, other: Node) -> bool:
    """True where a keyword of one is about what its own siblings leave, and the other has such."""
    if "additionalProperties" in one:
        mine, others = _map(one, "properties"), _map(other, "properties")
        if others.keys() - mine.keys() or "patternProperties" in other:
            return True
    return "prefixItems" in one and ("items" in other or "prefixItems" in other)


def _map(node: Node, name: str) -> Mapping[str, Any]:
    value = node.get(name)
    return value if isinstance(value, dict) else {}


def _both(name: str, one: Any, other: Any) -> Any:
    """One value of a keyword for two; None where there is none."""
    if one == other:
        return one
    numbers = all(isinstance(v, int | float) for v in (one, other))
    if name in _LEAST and numbers:
        return max(one, other)
    if name in _MOST and numbers:
        return min(one, other)
    if name == "properties" and isinstance(one, dict) and isinstance(other, dict):
        return None if any(one[k] != other[k] for k in one.keys() & other.keys()) else one | other
    if name == "required" and isinstance(one, list) and isinstance(other, list):
        return [*one, *(each for each in other if each not in one)]
    if name == "enum" and isinstance(one, list) and isinstance(other, list):
        return [each for each in one if each in other] or None
    if name == "type":
        return _common_type(_as_list(one), _as_list(other))
    return None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _common_type(one: list[Any], other: list[Any]) -> Any:
    """The types that both name; an integer is a number."""
    wide = [{*names, *(["integer"] if "number" in names else [])} for names in (one, other)]
    common = [name for name in dict.fromkeys([*one, *other]) if all(name in each for each in wide)]
    return common[0] if len(common) == 1 else common or None


MAX_DEPTH = 100

_IGNORED = frozenset(  # no output would ever be checked against these
    {"not", "if", "then", "else", "contains", "minContains", "maxContains"}
    | {"dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"}
)
# One of these decides alone; the compiler does not look at the assertions beside it.
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_STRING = ("minLength", "maxLength", "pattern")
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SIZES = {
    "object": ("minProperties", "maxProperties"),
    "array": ("minItems", "maxItems"),
}
_INFERRED = {  # from these the compiler infers the type
    "object": ("properties", "additionalProperties", "patternProperties", "propertyNames"),
    "array": ("items", "prefixItems"),
}
_SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
_SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ASSERTIONS = frozenset(
    {
        *_DECIDING,
        *_STRING,
        *_RANGE,
        *_SIZES["object"],
        *_SIZES["array"],
        *_SCHEMAS,
        "multipleOf",
        "format",
        "required",
    }
    | {"properties", "patternProperties", "propertyNames", "prefixItems"}
)
_PATTERN_PART = re.compile(
    r"\[\^(?:\\.|[^\]\\])*\]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL
)
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)
# Look around, back references, word boundaries, flags and named classes, outside of [...].
_UNKNOWN_PART = re.compile(r"\\[^1-9bBkpP]|(\\.|\(\?(?![:<])|\(\?<[=!])", re.DOTALL)
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
        raise InvalidRequestError(f"{what} is not valid JSON: {error}", what) from error
    check_depth(value, what)
    return value


def check_depth(value: Any, what: str) -> None:
    """Raise InvalidRequestError for JSON that is nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise InvalidRequestError(f"{what} is nested deeper than {MAX_DEPTH} levels")


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A keyword that no output would be checked against."""

    pointer: str  # a JSON pointer as the fragment of a URI
    reason: str


def enforceable(schema: Any) -> tuple[Any, list[Unenforced]]:
    """The schema without the keywords that cannot be enforced, and what they are."""
    reader = _Reader(schema)
    try:
        return reader.read("#", schema), reader.found
    except RecursionError as error:
        raise InvalidRequestError("the JSON schema's references are nested too deeply") from error


def check_schema(schema: Any, param: str | None = None) -> Any:
    """The schema as it can be enforced; InvalidRequestError names the first keyword that cannot."""
    read, found = enforceable(schema)
    for problem in found:
        raise InvalidRequestError(f"the JSON schema cannot be enforced: {problem.reason}", param)
    return read


class _Reader:
    """Reads one schema from its root down."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_inlined = 0
        self.found: list[Unenforced] = []

    def read(self, path: str, node: Any, inlined: frozenset[str] = frozenset()) -> Any:
        """A subschema; `inlined`: the references that it was found behind."""
        if not isinstance(node, dict):
            return node
        node, inlined = self._merged(path, node, inlined)
        node = _in_known_words(node)
        while problem := _problem(node):
            self._leave_out(path, problem)
            node = {key: value for key, value in node.items() if key != problem.keyword}
        definitions = (f"{path}/$defs/", f"{path}/definitions/")

        def read_child(place: str, child: Any) -> Any:
            behind = frozenset[str]() if place.startswith(definitions) else inlined
            return self.read(place, child, behind)

        return _with_subschemas(path, node, read_child)

    def _leave_out(self, path: str, problem: _Problem) -> None:
        pointer = f"{path}/{problem.keyword}"
        self.found.append(Unenforced(pointer, f"{problem.reason} at {path}"))

    def _merged(
        self, path: str, node: Node, inlined: frozenset[str]
    ) -> tuple[Node, frozenset[str]]:
        while isinstance(given := node.get("allOf"), list):
            parts = [(i, part) for i, part in enumerate(given) if _says_something(part)]
            rest = {key: value for key, value in node.items() if key != "allOf"}
            if len(parts) == 1 and not _says_something(rest):
                return rest | {"allOf": [parts[0][1]]}, inlined
            node = rest
            for index, part in parts:
                whole, inlined = self._inlined(part, inlined)
                both = None if whole is None else _all_merged(node, whole)
                if both is None:
                    reason = "'allOf' of schemas that cannot be merged"
                    self._leave_out(path, _Problem(f"allOf/{index}", reason))
                else:
                    node = both
        return node, inlined

    def _inlined(self, part: Any, inlined: frozenset[str]) -> tuple[Any, frozenset[str]]:
        """What a part of an allOf refers to; None for one that refers to itself."""
        while isinstance(part, dict) and isinstance(reference := part.get("$ref"), str):
            target = look_up(self._root, reference)
            self._num_inlined += 1
            if target is None or reference in inlined or self._num_inlined > MAX_INLINED:
                return None, inlined
            inlined |= {reference}
            rest = {key: value for key, value in part.items() if key != "$ref"}
            part = merged(rest, _without_definitions(target)) if isinstance(target, dict) else None
        return (part if isinstance(part, dict) else None), inlined


def patterns(schema: Any) -> list[str]:
    found: list[str] = []
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            own = [node.get("pattern"), *_as_dict(node.get("patternProperties"))]
            found += [pattern for pattern in own if isinstance(pattern, str)]
            _with_subschemas("", node, lambda _, child: left.append(child))
    return found


def _with_subschemas(path: str, node: Node, read: Callable[[str, Any], Any]) -> Node:
    """The node with every subschema as `read` makes it of its path and itself."""
    new = dict(node)
    for key in node.keys() & {*_SCHEMAS}:
        new[key] = read(f"{path}/{key}", node[key])
    names = node.get("propertyNames")
    if isinstance(names, dict):  # names are strings without saying so
        new["propertyNames"] = read(f"{path}/propertyNames", {"type": "string"} | names)
    for key in node.keys() & {*_SCHEMA_LISTS}:
        if isinstance(node[key], list):
            new[key] = [read(f"{path}/{key}/{i}", child) for i, child in enumerate(node[key])]
    for key in node.keys() & {*_SCHEMA_MAPS}:
        if isinstance(node[key], dict):
            new[key] = {
                name: read(f"{path}/{key}/{_step(name)}", child)
                for name, child in node[key].items()
            }
    return new


def _step(name: str) -> str:
    """A name as a step of a JSON pointer in the fragment of a URI."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~", errors="replace")


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _says_something(part: Any) -> bool:
    return not isinstance(part, dict) or bool(part.keys() - ANNOTATIONS)


def _without_definitions(node: Node) -> Node:
    return {key: value for key, value in node.items() if key not in ("$defs", "definitions")}


def _all_merged(node: Node, part: Node) -> Node | None:
    """Two nodes as one; the parts of their allOf stay side by side."""
    inner = part.get("allOf")
    both = merged(node, {key: value for key, value in part.items() if key != "allOf"})
    if both is None or inner is None:
        return both
    return both | {"allOf": [*node.get("allOf", ()), *inner]} if isinstance(inner, list) else None


def _in_known_words(node: Node) -> Node:
    node = dict(node)
    if isinstance(node.get("enum"), list) and "type" in node:
        fitting = [value for value in node["enum"] if _has_type(value, node["type"])]
        node["enum"] = fitting or node["enum"]
    if node.keys() & {*_DECIDING}:
        return node
    properties, extra = _as_dict(node.get("properties")), node.get("additionalProperties", True)
    required = node.get("required")
    if isinstance(required, list) and extra is not False and "patternProperties" not in node:
        missing = {n: extra for n in required if isinstance(n, str) and n not in properties}
        if missing:
            node["properties"] = properties = properties | missing
    if _exceeds(node.get("minProperties"), len(properties)) and not node.keys() & {
        *("additionalProperties", "patternProperties", "propertyNames")
    }:
        node["additionalProperties"] = True  # as it is without saying so
    if _declares(node, "array") and "items" not in node:
        num_prefix = len(node["prefixItems"]) if isinstance(node.get("prefixItems"), list) else 0
        if _exceeds(node.get("minItems"), num_prefix):
            node["items"] = True
    return node


def _exceeds(least: Any, size: int) -> bool:
    return isinstance(least, int) and least > size


@dataclass(frozen=True, slots=True)
class _Problem:
    keyword: str  # that is left out
    reason: str


def _problem(node: Node) -> _Problem | None:
    """What in this schema, its subschemas aside, the compiler would ignore."""
    ignored = sorted(node.keys() & _IGNORED)
    if node.get("uniqueItems"):
        ignored.append("uniqueItems")
    if ignored:
        return _Problem(ignored[0], f"{ignored[0]!r} is not supported")
    deciding = next((key for key in _DECIDING if key in node), None)
    if deciding:
        return _deciding_problem(node, deciding)
    return (
        _string_problem(node)
        or _number_problem(node)
        or _size_problem(node)
        or _object_problem(node)
    )


def _deciding_problem(node: Node, deciding: str) -> _Problem | None:
    beside = sorted((node.keys() & _ASSERTIONS) - {deciding})
    if beside:
        # What an object or array consists of says more than which of its forms it has.
        structure = {"properties", "items", "prefixItems"} & node.keys()
        keyword = deciding if structure and deciding in ("anyOf", "oneOf") else beside[0]
        return _Problem(keyword, f"{beside[0]!r} beside {deciding!r} is not supported")
    value = node[deciding]
    if deciding == "$ref" and isinstance(value, str) and value != "#" and value[:2] != "#/":
        reason = f"'$ref' must point into the schema itself ('#/...'), got {value!r}"
        return _Problem("$ref", reason)
    if deciding in ("const", "enum") and "type" in node:
        values = value if deciding == "enum" and isinstance(value, list) else [value]
        odd = [v for v in values if not _has_type(v, node["type"])]
        if odd:
            reason = f"{deciding!r} has {json.dumps(odd[0])}, which is not of the 'type' beside it"
            return _Problem("type", reason)
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


def _string_problem(node: Node) -> _Problem | None:
    found = [key for key in _STRING if key in node]
    if found and not _declares(node, "string"):
        return _Problem(found[0], f"{found[0]!r} needs 'type': 'string'")
    for decided in ("pattern", "format"):
        beside = [key for key in found if key != decided]
        if decided in node and beside:
            return _Problem(beside[0], f"{decided!r} beside {beside[0]!r} is not supported")
    fault = _pattern_fault(node.get("pattern"))
    return _Problem("pattern", f"{fault} in 'pattern' is not supported") if fault else None


def _pattern_fault(pattern: Any) -> str | None:
    """Characters that JSON must escape come out as they are: outside [^...] none may be named."""
    if not isinstance(pattern, str):
        return None
    for part in _PATTERN_PART.findall(pattern):
        char = chr(int(part[2:], 16)) if part[:2] in ("\\x", "\\u") and part[2:] else part
        if char < " " or char in _ESCAPED:
            return "a quote, a backslash or a control character"
    unknown = [part for part in _UNKNOWN_PART.findall(_CLASS.sub("", pattern)) if part]
    return repr(unknown[0]) if unknown else None


def _number_problem(node: Node) -> _Problem | None:
    found = [key for key in (*_RANGE, "multipleOf") if key in node]
    if found and not _declares(node, "number", "integer"):
        return _Problem(found[0], f"{found[0]!r} needs 'type': 'number' or 'integer'")
    if "multipleOf" in node and (len(found) > 1 or _declares(node, "number")):
        reason = "'multipleOf' is supported for integers without a range only"
        return _Problem("multipleOf", reason)
    return None


def _size_problem(node: Node) -> _Problem | None:
    for kind, sizes in _SIZES.items():
        found = [key for key in sizes if key in node]
        inferred = "type" not in node and node.keys() & {*_INFERRED[kind]}
        if found and not inferred and not _declares(node, kind):
            return _Problem(found[0], f"{found[0]!r} needs 'type': {kind!r}")
    return None


def _object_problem(node: Node) -> _Problem | None:
    required, properties = node.get("required"), _as_dict(node.get("properties"))
    if isinstance(required, list):
        undeclared = [n for n in required if isinstance(n, str) and n not in properties]
        if undeclared:
            reason = f"'required' names {undeclared[0]!r}, which is not in 'properties'"
            return _Problem("required", reason)
    if properties and "propertyNames" in node:
        return _Problem("propertyNames", "'propertyNames' beside 'properties' is not supported")
    for pattern in _as_dict(node.get("patternProperties")):
        if fault := _pattern_fault(pattern):
            reason = f"{fault} in 'patternProperties' is not supported"
            return _Problem("patternProperties", reason)
    if "patternProperties" in node and node.get("additionalProperties", False) is not False:
        reason = "'patternProperties' beside 'additionalProperties' is not supported"
        return _Problem("additionalProperties", reason)
    return None

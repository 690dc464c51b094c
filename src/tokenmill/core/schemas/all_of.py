"""The schemas of an `allOf` as one schema, where that says the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

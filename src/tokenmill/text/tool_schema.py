"""The JSON schema that a `tool_choice` puts on the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenmill.core.types import InvalidRequestError


def tool_choice_schema(
    tools: Sequence[dict[str, Any]],
    tool_choice: str | dict[str, Any] | None,
    max_calls: int | None = None,
) -> dict[str, Any] | None:
    """The JSON schema that the output must follow; None where the model is free to answer."""
    if tool_choice in (None, "none", "auto"):
        return None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if tool_choice == "required":
        if not functions:
            raise InvalidRequestError("tool_choice 'required' needs tools", "tool_choice")
        return _calls_schema(functions, max_calls)
    if not isinstance(tool_choice, dict) or tool_choice.get("type") != "function":
        raise InvalidRequestError(
            "tool_choice must be 'none', 'auto', 'required' or a function", "tool_choice"
        )
    name = tool_choice["function"]["name"]
    if name not in functions:
        known = ", ".join(map(repr, functions))
        raise InvalidRequestError(
            f"tool_choice: {name!r} is not among the tools; send one of {known}", "tool_choice"
        )
    return function_schema(functions[name])


def function_schema(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; without parameters it takes none."""
    return function.get("parameters") or {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def _calls_schema(functions: dict[str, dict[str, Any]], max_calls: int | None) -> dict[str, Any]:
    """An array of calls, of at most `max_calls`.

    Schemas with references move to $defs, where their pointers hold.
    """
    definitions = {}
    calls = []
    for name, function in functions.items():
        parameters = function_schema(function)
        moved = _rebase(parameters, f"#/$defs/{name}")
        if moved != parameters:
            definitions[name] = moved
            parameters = {"$ref": f"#/$defs/{name}"}
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [name]},
                    "parameters": parameters,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return schema | ({"$defs": definitions} if definitions else {})


def _rebase(schema: Any, root: str) -> Any:
    """The schema with its own references made relative to `root`."""
    if isinstance(schema, list):
        return [_rebase(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _rebase(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved

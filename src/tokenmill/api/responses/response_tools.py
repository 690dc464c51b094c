"""The tools of the Responses API: functions, functions of namespaces, and what is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.decoding import refuse_built_in
from tokenmill.api.protocol.requests import FunctionDefinition, FunctionName, Schema, Tool

# An agent works without these; its model never sees them.
SKIPPED = (
    *("web_search", "web_search_2025_08_26", "web_search_preview"),
    *("web_search_preview_2025_03_11", "custom", "local_shell", "shell", "apply_patch"),
    *("tool_search", "image_generation"),
)
_DEFAULT_NAMESPACE = "functions"  # OpenAI's name for the functions without a namespace


class FunctionTool(Schema, kw_only=True, tag_field="type", tag="function"):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # Without effect: no tools are searched for, and all calls are direct.
    defer_loading: bool | UnsetType | None = UNSET
    output_schema: dict[str, Any] | UnsetType | None = UNSET
    allowed_callers: list[str] | UnsetType | None = UNSET


class NamespaceTool(Schema, kw_only=True, tag_field="type", tag="namespace"):
    """Functions whose calls name the namespace beside the function."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    tools: list[FunctionTool]


class NamedTool(Schema, kw_only=True, tag_field="type", tag="function"):
    name: str


class AllowedFunction(Schema, kw_only=True):
    name: str
    type: Literal["function"] = "function"


class AllowedFunctions(Schema, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Meta(min_length=1)]


def skip_tools(raw: dict[str, Any]) -> list[str]:
    """Leave tools out of a call that the server cannot run; what the log says of them.

    ApiError 400 for a tool_choice that names one, and for other tools that are no functions.
    """
    namespaces = [tool for tool in _objects(raw.get("tools")) if tool.get("type") == "namespace"]
    skipped = [tool for owner in (raw, *namespaces) for tool in _pop_skipped(owner)]
    refuse_built_in(raw, ("function", "namespace"), "send tools of type 'function'")
    names = [tool["name"] for tool in skipped if "name" in tool]
    for choice in _chosen(raw.get("tool_choice")):
        kind, name = choice.get("type"), choice.get("name")
        if kind in SKIPPED or (kind == "function" and name in names):
            raise ApiError(
                400,
                f"tool_choice: {name or kind!r} is not supported: the server skips tools that it "
                "cannot run; send 'auto', or the name of a function in tools",
                "tool_choice",
                "unsupported_value",
            )
    return [f"tools[] of type {tool['type']!r}" for tool in skipped]


def _pop_skipped(owner: dict[str, Any]) -> list[dict[str, Any]]:
    """Take the tools that are skipped out of a call, or out of a namespace."""
    skipped = [tool for tool in _objects(owner.get("tools")) if tool.get("type") in SKIPPED]
    if skipped:
        owner["tools"] = [tool for tool in owner["tools"] if tool not in skipped]
    return skipped


def _chosen(choice: Any) -> list[dict[str, Any]]:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _objects(choice.get("tools"))
    return _objects([choice])


def _objects(items: Any) -> list[dict[str, Any]]:
    return [each for each in items if isinstance(each, dict)] if isinstance(items, list) else []


def flat_name(namespace: object, name: str) -> str:
    """The name by which the model calls a function of a namespace."""
    if not isinstance(namespace, str) or namespace in ("", _DEFAULT_NAMESPACE):
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def namespaced(tools: Sequence[FunctionTool | NamespaceTool]) -> dict[str, tuple[str, str]]:
    """The namespace and the name of every function in a namespace, by its flat name."""
    spaces = [tool for tool in tools if isinstance(tool, NamespaceTool)]
    return {
        flat_name(space.name, function.name): (space.name, function.name)
        for space in spaces
        for function in space.tools
        if flat_name(space.name, function.name) != function.name
    }


def flat_tools(tools: Sequence[FunctionTool | NamespaceTool]) -> list[Tool]:
    """All functions as a chat has them; a namespace's description begins its first function's."""
    flat: list[Tool] = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            flat.append(_tool(tool, tool.name, tool.description))
            continue
        about = tool.description
        for function in tool.tools:
            texts = [text for text in (about, function.description) if text]
            name = flat_name(tool.name, function.name)
            flat.append(_tool(function, name, "\n\n".join(texts) or None))
            about = None
    return flat


def _tool(function: FunctionTool, name: str, description: str | None) -> Tool:
    definition = FunctionDefinition(
        name=name,
        description=description,
        parameters=function.parameters,
        strict=function.strict,
    )
    return Tool(function=definition, type="function")

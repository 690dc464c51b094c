"""What a call's `tools` and `tool_choice` mean for its prompt, its constraint and its parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from tokenmill.api.protocol.requests import (
    AllowedToolChoice,
    AllowedTools,
    ChatCompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedToolChoice,
    Tool,
)
from tokenmill.api.protocol.structured import enforced_schema, structured_output
from tokenmill.core.types import Branch, InvalidRequestError, StructuredOutput
from tokenmill.text.harmony import HarmonyTokens
from tokenmill.text.output_style import OutputStyle
from tokenmill.text.parsers import (
    TOOL_PARSERS,
    NamedCallParser,
    RequiredCallsParser,
    ToolParser,
)
from tokenmill.text.tokenizer import Tokenizer

Message = dict[str, Any]

_SYSTEM = """You may call functions to help with the user query.
The functions, one JSON signature per line:
<tools>
{signatures}
</tools>
For each call write a JSON object with name and arguments inside <tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    definitions: list[dict[str, Any]]  # as chat templates expect them
    names: list[str]  # the functions that may be called
    parser: Callable[[], ToolParser] | None  # a new one for each choice; None: harmony reads calls
    structured: StructuredOutput | None = None
    one_call: bool = False  # parallel_tool_calls is false: the answer ends with the first call
    is_loose: bool = False  # a function is strict, and nothing enforces it


def plan_tool_use(
    call: ChatCompletionRequest, style: OutputStyle, tokenizer: Tokenizer
) -> ToolUse | None:
    """None when the model may not call tools."""
    if not call.tools:
        if call.tool_choice not in (None, "none"):
            raise InvalidRequestError(
                "tool_choice needs tools; send some, or leave tool_choice out", "tool_choice"
            )
        return None
    if call.tool_choice == "none":
        return None
    _check_format(call, style)
    definitions = tool_definitions(call.tools)
    names = [tool.function.name for tool in call.tools]
    if len(set(names)) != len(names):
        raise InvalidRequestError(
            "tools: two functions have the same name; give each a name of its own", "tools"
        )
    choice, tools = call.tool_choice, call.tools
    if isinstance(choice, AllowedToolChoice):
        tools = _allowed(tools, choice.allowed_tools)
        choice = choice.allowed_tools.mode
    one_call = call.parallel_tool_calls is False
    if choice in (None, "auto"):
        use = _free_use(tools, definitions, style, one_call)
        answer = structured_output(call) if _answer_schema(call) is not None else None
        if answer is None or style.harmony is not None:
            return use
        return replace(use, structured=_calls_or_answer(tools, answer, one_call))
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedToolChoice):
        names = [choice.function.name]
    max_calls = 1 if one_call else None
    tools, unenforced = _enforced([tool for tool in tools if tool.function.name in names] or tools)
    schema = tool_choice_schema(tool_definitions(tools), msgspec.to_builtins(choice), max_calls)
    if style.harmony is not None:
        branches = _call_branches(tools, style.harmony, tokenizer)
        structured = StructuredOutput("branches", branches=branches, unenforced=unenforced)
        return ToolUse(definitions, names, None, structured, one_call)
    parser: Callable[[], ToolParser] = partial(RequiredCallsParser, names, max_calls=max_calls)
    if isinstance(choice, NamedToolChoice):
        parser = partial(NamedCallParser, choice.function.name, max_calls=max_calls)
    structured = StructuredOutput("json_schema", json.dumps(schema), unenforced=unenforced)
    return ToolUse(definitions, names, parser, structured, one_call)


def _check_format(call: ChatCompletionRequest, style: OutputStyle) -> None:
    """Refuse a format of the answer where calls and content cannot be told apart beforehand.

    An answer that must be a call has no content: the format is unused then.
    """
    choice = call.tool_choice
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolChoice) else choice
    if _answer_schema(call) is None or mode not in (None, "auto"):
        return
    # Harmony binds the channel of the answer; a call in Hermes' style begins with a tag.
    if style.harmony is None and style.tools != "hermes":
        raise InvalidRequestError(
            "response_format can be combined with tools for models that call in Hermes' or "
            "Harmony's style; for others send tool_choice 'none', 'required' or a function",
            "response_format",
        )


def _answer_schema(call: ChatCompletionRequest) -> dict[str, Any] | None:
    """What the content must be; None: any text."""
    match call.response_format:
        case JsonSchemaFormat(json_schema=definition):
            return definition.schema
        case JsonObjectFormat(json_schema=schema):
            return schema
        case _:
            return None


def _calls_or_answer(
    tools: list[Tool], answer: StructuredOutput, one_call: bool
) -> StructuredOutput:
    """Calls in Hermes' style, or else an answer that follows its schema."""
    calls = {
        "type": "tags_with_separator",
        "tags": _call_tags(tools),
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": one_call,
    }
    schema = {"type": "json_schema", "json_schema": json.loads(answer.value)}
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": [schema, calls]}}
    return replace(answer, kind="structural_tag", value=json.dumps(tag))


def _call_branches(
    tools: list[Tool], harmony: HarmonyTokens, tokenizer: Tokenizer
) -> tuple[Branch, ...]:
    """A call of each of the functions, written as the model does by itself."""
    functions = [msgspec.to_builtins(tool.function) for tool in tools]
    return tuple(
        harmony.call_branch(tokenizer, each["name"], json.dumps(function_schema(each)))
        for each in functions
    )


def _enforced(tools: list[Tool]) -> tuple[list[Tool], tuple[str, ...]]:
    """The tools with parameters that a grammar can enforce, and what it cannot of them."""
    enforced: list[Tool] = []
    unenforced: list[str] = []
    for tool in tools:
        function = tool.function
        schema, pointers = enforced_schema(
            function.parameters, bool(function.strict), "tools", function.name
        )
        changed = msgspec.structs.replace(function, parameters=schema)
        enforced.append(msgspec.structs.replace(tool, function=changed))
        unenforced += pointers
    return enforced, tuple(unenforced)


def _allowed(tools: list[Tool], allowed: AllowedTools) -> list[Tool]:
    """The tools that tool_choice leaves; the model still sees all."""
    wanted = [tool.function.name for tool in allowed.tools]
    known = {tool.function.name: tool for tool in tools}
    for name in wanted:
        if name not in known:
            raise InvalidRequestError(
                f"tool_choice: {name!r} is not among the tools; send one of "
                f"{', '.join(map(repr, known))}",
                "tool_choice",
            )
    return [known[name] for name in dict.fromkeys(wanted)]


def tool_definitions(tools: list[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates expect them: without the fields that are not set."""
    definitions = []
    for tool in tools:
        function = msgspec.to_builtins(tool.function)
        hidden = ("strict", "cache_control")
        given = {k: v for k, v in function.items() if v is not None and k not in hidden}
        definitions.append({"type": "function", "function": given})
    return definitions


def _free_use(
    tools: list[Tool], definitions: list[dict[str, Any]], style: OutputStyle, one_call: bool
) -> ToolUse:
    """tool_choice "auto": the model decides, the parser of its style finds the calls."""
    names = [tool.function.name for tool in tools]
    if style.harmony is not None:
        is_loose = any(tool.function.strict for tool in tools)
        return ToolUse(definitions, names, None, None, one_call, is_loose)
    if style.tools not in TOOL_PARSERS:
        raise InvalidRequestError(
            "tool_choice 'auto' needs a tool parser for this model; start the server with "
            "--tool-parser, or use tool_choice 'required'",
            "tool_choice",
        )
    structured = None
    if any(tool.function.strict for tool in tools):
        structured = _strict_calls(tools, style.tools)
    parser = partial(TOOL_PARSERS[style.tools], names, max_calls=1 if one_call else None)
    return ToolUse(definitions, names, parser, structured, one_call)


def _strict_calls(tools: list[Tool], style: str) -> StructuredOutput:
    """Free text in which every call, once begun, must follow the function's schema."""
    if style != "hermes":
        raise InvalidRequestError(
            "tools: strict is supported with tool_choice 'required' or a named function, or with "
            "the hermes parser",
            "tools",
        )
    tag_format = {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": _call_tags(tools),
    }
    tag = {"type": "structural_tag", "format": tag_format}
    return StructuredOutput("structural_tag", json.dumps(tag))


def _call_tags(tools: list[Tool]) -> list[dict[str, Any]]:
    """A call of each function in Hermes' style; only strict ones must follow their schema."""
    strict, _ = _enforced([tool for tool in tools if tool.function.strict])
    schemas = {tool.function.name: tool.function.parameters for tool in strict}
    return [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": {json.dumps(tool.function.name)}, "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": schemas.get(tool.function.name) or {"type": "object"},
            },
            "end": "}\n</tool_call>",
        }
        for tool in tools
    ]


def write_tools(messages: list[Message], definitions: list[dict[str, Any]]) -> list[Message]:
    """For templates without tools: definitions, calls and results as text, in Hermes' way."""
    written = [_write_message(message) for message in messages]
    if not definitions:
        return written
    signatures = "\n".join(json.dumps(each, ensure_ascii=False) for each in definitions)
    system = _SYSTEM.format(signatures=signatures)
    if written and written[0]["role"] in ("system", "developer"):
        first = {**written[0], "content": f"{_text(written[0]['content'])}\n\n{system}"}
        return [first, *written[1:]]
    return [{"role": "system", "content": system}, *written]


def join_turns(messages: list[Message]) -> list[Message]:
    """The system text in the user's, neighbours of one role in one, as Gemma's templates want."""
    joined: list[Message] = []
    for message in messages:
        role = "user" if message["role"] == "system" else message["role"]
        text = _text(message["content"])
        if joined and joined[-1]["role"] == role:
            joined[-1]["content"] += f"\n\n{text}"
        else:
            joined.append({**message, "role": role, "content": text})
    return joined


def _write_message(message: Message) -> Message:
    content = _text(message.get("content"))
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [content] if content else []
    texts += [f"<tool_call>\n{_call_text(call)}\n</tool_call>" for call in calls]
    return {"role": "assistant", "content": "\n".join(texts)}


def _call_text(call: dict[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"] or "{}"
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text") or part.get("refusal", "") for part in content)
    return content or ""


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

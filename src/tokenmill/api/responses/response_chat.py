"""A Responses call as the chat completion that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.requests import (
    SAMPLING_FIELDS,
    AllowedTool,
    AllowedToolChoice,
    AllowedTools,
    AssistantMessage,
    CalledFunction,
    ChatCompletionRequest,
    DeveloperMessage,
    EarlierCall,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    LocatedImage,
    Message,
    NamedFunction,
    NamedToolChoice,
    ReasoningOptions,
    ResponseFormat,
    SystemMessage,
    TextPart,
    Tool,
    ToolMessage,
    UserMessage,
)
from tokenmill.api.responses.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    part_text,
    reasoning_of,
    text_of,
)
from tokenmill.api.responses.response_request import (
    LOGPROBS,
    JsonObject,
    NamedJsonSchema,
    ResponsesRequest,
)
from tokenmill.api.responses.response_tools import (
    AllowedFunctions,
    NamedTool,
    flat_name,
    flat_tools,
    namespaced,
)

# What a chat completion's errors call it -> what it is called here.
RESPONSE_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "'image_url'": "'input_image'",
    "of type 'text'": "of type 'input_text'",
}
_MESSAGES: dict[str, Any] = {
    "user": UserMessage,
    "system": SystemMessage,
    "developer": DeveloperMessage,
}


def chat_of(call: ResponsesRequest, items: Sequence[Item]) -> ChatCompletionRequest:
    """The chat call; `items` are all that the model is to see, earlier turns first."""
    wants_logprobs = LOGPROBS in (call.include or ())
    if call.top_logprobs and not wants_logprobs:
        message = f"top_logprobs needs '{LOGPROBS}' in include"
        raise ApiError(400, message, "top_logprobs", "invalid_value")
    reasoning, text = call.reasoning, call.text
    tools = flat_tools(call.tools or ())
    return ChatCompletionRequest(
        **{spec.name: getattr(call, spec.name) for spec in SAMPLING_FIELDS},
        messages=[*_instructions(call), *messages_of(items)],
        stream=call.stream,
        max_completion_tokens=call.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=call.top_logprobs,
        tools=tools or None,
        tool_choice=_tool_choice(call, tools),
        parallel_tool_calls=call.parallel_tool_calls,
        response_format=_format(call),
        reasoning_effort=reasoning.effort if reasoning is not None else None,
        reasoning=ReasoningOptions(max_tokens=reasoning.max_tokens) if reasoning else None,
        verbosity=text.verbosity if text is not None else None,
        structured_outputs=call.structured_outputs,
        chat_template_kwargs=call.chat_template_kwargs,
        priority=call.priority,
        cache_salt=call.cache_salt,
        timeout=call.timeout,
        include_receipt=call.include_receipt,
    )


def _instructions(call: ResponsesRequest) -> list[Message]:
    return [] if call.instructions is None else [SystemMessage(content=call.instructions)]


def messages_of(items: Sequence[Item]) -> list[Message]:
    """The items as messages: reasoning, text and calls that follow each other are one answer."""
    messages: list[Message] = []
    called: set[str] = set()
    for index, item in enumerate(items):
        match item:
            case MessageItem(role="assistant"):
                answer = _open_answer(messages, takes_text=True)
                answer.content = text_of(item.content)
            case MessageItem():
                content = _content(item.content, f"input[{index}].content", item.role == "user")
                messages.append(_MESSAGES[item.role](content=content))
            case ReasoningItem():
                if reasoning := reasoning_of(item):
                    answer = _open_answer(messages, takes_text=True, takes_reasoning=True)
                    answer.reasoning_content = reasoning
            case FunctionCallItem():
                called.add(item.call_id)
                answer = _open_answer(messages)
                answer.tool_calls = [*(answer.tool_calls or ()), _earlier_call(item)]
            case FunctionCallOutputItem():
                if item.call_id not in called:
                    raise _unknown_call(index, item.call_id)
                content = _content(item.output, f"input[{index}].output", takes_images=True)
                messages.append(ToolMessage(tool_call_id=item.call_id, content=content))
    return messages


def _content(content: str | Sequence[Part], path: str, takes_images: bool) -> Any:
    if isinstance(content, str) or not any(isinstance(p, InputImage) for p in content):
        return text_of(content)
    if not takes_images:
        message = f"{path}: images stand in messages of role 'user'; leave them out here"
        raise ApiError(400, message, path, "unsupported_value")
    return [_part(part, f"{path}[{number}]") for number, part in enumerate(content)]


def _part(part: Part, path: str) -> TextPart | LocatedImage:
    if not isinstance(part, InputImage):
        return TextPart(text=part_text(part))
    if part.image_url is None:
        message = f"{path}.image_url: the field is missing; send a URL"
        raise ApiError(400, message, f"{path}.image_url", "missing_field")
    bounds = {"min_pixels": part.min_pixels, "max_pixels": part.max_pixels}
    return LocatedImage(image_url=part.image_url, detail=part.detail, path=path, **bounds)


def _open_answer(
    messages: list[Message], takes_text: bool = False, takes_reasoning: bool = False
) -> AssistantMessage:
    """The answer that the next item belongs to: the last message, or a new one."""
    last = messages[-1] if messages else None
    if isinstance(last, AssistantMessage):
        has_text = last.content is not None or bool(last.tool_calls)
        has_reasoning = last.reasoning_content is not None
        if not (takes_text and has_text) and not (takes_reasoning and has_reasoning):
            return last
    messages.append(AssistantMessage())
    return messages[-1]  # type: ignore[return-value]


def _earlier_call(item: FunctionCallItem) -> EarlierCall:
    name = flat_name(item.namespace, item.name)
    return EarlierCall(
        id=item.call_id, function=CalledFunction(name=name, arguments=item.arguments)
    )


def _unknown_call(index: int, call_id: str) -> ApiError:
    path = f"input[{index}].call_id"
    message = f"{path}: no function_call before it has the call_id {call_id!r}; send that item, too"
    return ApiError(400, message, path, "invalid_value")


def _tool_choice(call: ResponsesRequest, tools: list[Tool]) -> Any:
    # A function of a namespace may be named without it where no other has its name.
    flat = {name: full for full, (_, name) in namespaced(call.tools or ()).items()}
    flat |= {tool.function.name: tool.function.name for tool in tools}
    match call.tool_choice:
        case NamedTool(name=name):
            return NamedToolChoice(function=NamedFunction(name=flat.get(name, name)))
        case AllowedFunctions(mode=mode, tools=chosen):
            names = [flat.get(each.name, each.name) for each in chosen]
            allowed = [AllowedTool(function=NamedFunction(name=name)) for name in names]
            return AllowedToolChoice(allowed_tools=AllowedTools(mode=mode, tools=allowed))
        case choice:
            return choice if tools or choice != "auto" else None


def _format(call: ResponsesRequest) -> ResponseFormat | None:
    match call.text.format if call.text is not None else None:
        case NamedJsonSchema() as wanted:
            schema = JsonSchema(schema=wanted.schema, name=wanted.name, strict=wanted.strict)
            return JsonSchemaFormat(json_schema=schema)
        case JsonObject():
            return JsonObjectFormat()
        case _:
            return None


def without_first(items: Sequence[Item], count: int) -> list[Item]:
    """The items without the first ones, and without the outputs of calls that went with them."""
    kept = list(items[count:])
    called = {item.call_id for item in kept if isinstance(item, FunctionCallItem)}
    return [
        item
        for item in kept
        if not (isinstance(item, FunctionCallOutputItem) and item.call_id not in called)
    ]

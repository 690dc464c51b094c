"""An Anthropic call as the chat completion that answers it."""

from __future__ import annotations

import json
from typing import Any

from tokenmill.api.errors import ApiError
from tokenmill.api.messages.message_request import (
    AnyChoice,
    AssistantTurn,
    Base64Source,
    ClientTool,
    CountTokensRequest,
    ImageBlock,
    MessagesRequest,
    NoneChoice,
    RedactedThinkingBlock,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from tokenmill.api.protocol.requests import (
    AssistantMessage,
    CalledFunction,
    ChatCompletionRequest,
    EarlierCall,
    FunctionDefinition,
    ImagePart,
    JsonSchema,
    JsonSchemaFormat,
    LocatedImage,
    Message,
    NamedFunction,
    NamedToolChoice,
    SystemMessage,
    TextPart,
    Tool,
    ToolMessage,
    UserMessage,
)

Part = TextPart | ImagePart

# What a chat completion's errors call it -> what it is called here.
MESSAGE_NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "'required'": "'any'",
    "'image_url'": "'image'",
    "parts of type": "blocks of type",
}


def chat_of_messages(call: CountTokensRequest) -> ChatCompletionRequest:
    """The chat call; one that ends in an assistant's turn is continued there."""
    continues = isinstance(call.messages[-1], AssistantTurn)
    chat = ChatCompletionRequest(
        messages=[*_system(call.system), *_combined(_messages(call))],
        tools=[_tool(tool) for tool in call.tools or ()] or None,
        reasoning_effort=_effort(call),
        chat_template_kwargs=_template_kwargs(call),
        continue_final_message=continues or None,
        add_generation_prompt=False if continues else None,
    )
    _set_tool_choice(chat, call)
    if call.output_config is not None and call.output_config.format is not None:
        schema = JsonSchema(schema=call.output_config.format.schema)
        chat.response_format = JsonSchemaFormat(json_schema=schema)
    if isinstance(call, MessagesRequest):
        _set_sampling(chat, call)
    return chat


def _set_sampling(chat: ChatCompletionRequest, call: MessagesRequest) -> None:
    chat.stream = call.stream
    chat.max_tokens = call.max_tokens
    chat.stop = call.stop_sequences
    if isinstance(call.thinking, ThinkingEnabled):
        chat.thinking_token_budget = call.thinking.budget_tokens
    sampling = ("temperature", "top_p", "top_k", "priority", "cache_salt", "timeout")
    for name in (*sampling, "include_receipt"):
        setattr(chat, name, getattr(call, name))


def _set_tool_choice(chat: ChatCompletionRequest, call: CountTokensRequest) -> None:
    choice = call.tool_choice
    match choice:
        case None:
            return
        case NoneChoice():
            chat.tool_choice = "none"
            return
        case AnyChoice():
            chat.tool_choice = "required"
        case ToolChoice(name=name):
            chat.tool_choice = NamedToolChoice(function=NamedFunction(name=name))
        case _ if call.tools:
            chat.tool_choice = "auto"
    if choice.disable_parallel_tool_use is not None:
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use


def _effort(call: CountTokensRequest) -> Any:
    if isinstance(call.thinking, ThinkingDisabled):
        return "none"
    return call.output_config.effort if call.output_config is not None else None


def _template_kwargs(call: CountTokensRequest) -> dict[str, Any] | None:
    if call.thinking is None or isinstance(call.thinking, ThinkingDisabled):
        return call.chat_template_kwargs
    return {"enable_thinking": True} | (call.chat_template_kwargs or {})


def _system(system: str | list[TextBlock] | None) -> list[Message]:
    return [SystemMessage(content=_text(system))] if system else []


def _text(content: str | list[TextBlock]) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    return [TextPart(text=block.text) for block in content]


def _content(content: str | list[TextBlock | ImageBlock], path: str) -> str | list[Part]:
    if isinstance(content, str):
        return content
    return [_part(block, f"{path}.content[{index}]") for index, block in enumerate(content)]


def _part(block: TextBlock | ImageBlock, path: str) -> Part:
    if isinstance(block, TextBlock):
        return TextPart(text=block.text)
    source = block.source
    url = source.url if not isinstance(source, Base64Source) else _data_url(source)
    low, high = block.min_pixels, block.max_pixels
    return LocatedImage(image_url=url, path=path, min_pixels=low, max_pixels=high)


def _data_url(source: Base64Source) -> str:
    return f"data:{source.media_type};base64,{source.data}"


def _messages(call: CountTokensRequest) -> list[Message]:
    messages: list[Message] = []
    used: set[str] = set()  # ids of the tool calls so far
    for index, turn in enumerate(call.messages):
        match turn:
            case AssistantTurn(content=str(text)):
                messages.append(AssistantMessage(content=text))
            case AssistantTurn(content=list() as blocks):
                used.update(block.id for block in blocks if isinstance(block, ToolUseBlock))
                messages.append(_answer(blocks))
            case UserTurn(content=list() as blocks):
                messages += _user(blocks, index, used)
            case UserTurn(content=str(text)):
                messages.append(UserMessage(content=text))
            case SystemTurn():
                messages.append(SystemMessage(content=_text(turn.content)))
    return messages


def _answer(
    blocks: list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock],
) -> AssistantMessage:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thinking = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    return AssistantMessage(
        content="\n".join(texts) if texts else None,
        reasoning_content="\n".join(thinking) or None,
        tool_calls=calls or None,
    )


def _call(block: ToolUseBlock) -> EarlierCall:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return EarlierCall(id=block.id, function=CalledFunction(name=block.name, arguments=arguments))


def _user(
    blocks: list[TextBlock | ImageBlock | ToolResultBlock], turn: int, used: set[str]
) -> list[Message]:
    messages: list[Message] = []
    parts: list[Part] = []
    for index, block in enumerate(blocks):
        path = f"messages[{turn}].content[{index}]"
        if not isinstance(block, ToolResultBlock):
            parts.append(_part(block, path))
            continue
        if block.tool_use_id not in used:
            raise _unknown_use(path, block.tool_use_id)
        content = _content(block.content or "", path)
        messages.append(ToolMessage(tool_call_id=block.tool_use_id, content=content))
    if parts:
        messages.append(UserMessage(content=parts))
    return messages


def _combined(messages: list[Message]) -> list[Message]:
    """The messages with those of the user that follow each other as one, as Anthropic has it."""
    combined: list[Message] = []
    for message in messages:
        last = combined[-1] if combined else None
        if isinstance(last, UserMessage) and isinstance(message, UserMessage):
            parts = [*_parts(last.content), *_parts(message.content)]
            combined[-1] = UserMessage(content=parts)
        else:
            combined.append(message)
    return combined


def _parts(content: str | list[Part]) -> list[Part]:
    return [TextPart(text=content)] if isinstance(content, str) else content


def _unknown_use(path: str, tool_use_id: str) -> ApiError:
    message = (
        f"{path}.tool_use_id: no tool_use block before it has the id {tool_use_id!r}; send the "
        "assistant's turn that has it, too"
    )
    return ApiError(400, message, f"{path}.tool_use_id", "invalid_value")


def _tool(tool: ClientTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(function=function, type="function")

"""What a client may send to POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.decoding import refuse_built_in
from tokenmill.api.protocol.requests import (
    INT32_MAX,
    ImageSchema,
    NoItems,
    PixelBounds,
    Schema,
    TokenCount,
    unsupported,
)
from tokenmill.core.types import MAX_STOPS

# Accepted without effect; the log says so once.
MESSAGE_WITHOUT_EFFECT = (
    *("metadata", "service_tier", "inference_geo", "speed", "diagnostics", "context_management"),
    *("user_profile_id", "workspace_id"),
)


class TextBlock(Schema, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None
    citations: Any = None


class Base64Source(ImageSchema, kw_only=True, tag_field="type", tag="base64"):
    media_type: str
    data: str


class UrlSource(ImageSchema, kw_only=True, tag_field="type", tag="url"):
    url: str


class ImageTransformations(ImageSchema, kw_only=True):
    oversized_image: Annotated[
        Literal["downsize"] | None,
        unsupported("images over the limit are always scaled down; send 'downsize'"),
    ] = None


class ImageBlock(PixelBounds, kw_only=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource
    cache_control: Any = None
    transformations: ImageTransformations | None = None


class ThinkingBlock(Schema, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Schema, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: str


class ToolUseBlock(Schema, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None


class ToolResultBlock(Schema, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


AnswerBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserTurn(Schema, kw_only=True, tag_field="role", tag="user"):
    content: str | Annotated[list[TextBlock | ImageBlock | ToolResultBlock], Meta(min_length=1)]


class AssistantTurn(Schema, kw_only=True, tag_field="role", tag="assistant"):
    content: str | list[AnswerBlock]


class SystemTurn(Schema, kw_only=True, tag_field="role", tag="system"):
    content: str | list[TextBlock]


class ClientTool(Schema, kw_only=True):
    """A tool that the client runs."""

    name: Annotated[
        str,
        Meta(
            pattern="^[a-zA-Z0-9_.-]{1,64}$",
            description="a tool's name has 1 to 64 letters, digits, '_', '.' or '-'",
        ),
    ]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    input_examples: list[Any] | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Annotated[
        Literal[False] | None, unsupported("there is no search for tools; leave the field out")
    ] = None


class AutoChoice(Schema, kw_only=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Schema, kw_only=True, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(Schema, kw_only=True, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(Schema, kw_only=True, tag_field="type", tag="none"):
    pass


Display = Literal["summarized", "omitted"]


class ThinkingEnabled(Schema, kw_only=True, tag_field="type", tag="enabled"):
    budget_tokens: TokenCount
    display: Display | None = None


class ThinkingAdaptive(Schema, kw_only=True, tag_field="type", tag="adaptive"):
    display: Display | None = None


class ThinkingDisabled(Schema, kw_only=True, tag_field="type", tag="disabled"):
    pass


class OutputSchema(Schema, kw_only=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(Schema, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class CountTokensRequest(Schema, kw_only=True):
    """POST /v1/messages/count_tokens: what the prompt is made of."""

    ELSEWHERE: ClassVar[dict[str, str]] = {
        "stop": "send stop_sequences",
        "max_completion_tokens": "send max_tokens",
        "max_output_tokens": "send max_tokens",
        "reasoning_effort": "send output_config.effort",
        "thinking_token_budget": "send thinking.budget_tokens",
        "response_format": "send output_config.format",
        "function": "send name, description and input_schema",
        "parameters": "send input_schema",
        "input": "send messages, or ask /v1/responses",
        "prompt": "send messages",
        "instructions": "send system",
        "parallel_tool_calls": "send tool_choice.disable_parallel_tool_use",
        "n": "send several calls",
    }

    model: str
    messages: Annotated[list[UserTurn | AssistantTurn | SystemTurn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoneChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    cache_control: Any = None
    # Accepted because they change nothing in the answer.
    context_management: Any = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    mcp_servers: Annotated[
        NoItems | None, unsupported("this server calls no MCP servers; offer their tools as tools")
    ] = None

    @staticmethod
    def complete(raw: Any) -> list[str]:
        """Refuse threads, and tools that the server would have to run."""
        if isinstance(raw, dict):
            if raw.get("thread") is not None:
                raise _no_threads()
            instead = "send a tool with its name, description and input_schema"
            refuse_built_in(raw, ("custom",), instead)
        return []


def _no_threads() -> ApiError:
    """Clients that begin a thread send the whole conversation instead, once they read the code."""
    code = "thread_unsupported_request"
    message = "thread: this server keeps no threads; send the whole conversation in messages"
    return ApiError(400, message, "thread", code, {"error_code": code})


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    container: Annotated[None, unsupported("this server runs no code; leave the field out")] = None
    # vLLM's extras.
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    cache_salt: str | None = None
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None  # seconds
    include_receipt: bool | None = None  # this server's own: GPU time and price in usage

"""What a client may send to POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from tokenmill.api.protocol.requests import (
    INT32_MAX,
    Effort,
    NoItems,
    SamplingFields,
    Schema,
    StreamOptions,
    StructuredOutputs,
    TokenCount,
    unsupported,
)
from tokenmill.api.responses.response_items import InputItem
from tokenmill.api.responses.response_tools import (
    AllowedFunctions,
    FunctionTool,
    NamedTool,
    NamespaceTool,
    skip_tools,
)
from tokenmill.core.types import MAX_TOP_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
# Accepted without effect; the log says so once.
RESPONSE_WITHOUT_EFFECT = (
    *("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prompt_cache_options", "max_tool_calls", "client_metadata", "access_programs", "image"),
    *("request_id",),
)
_SEND_INPUT = unsupported("this server keeps no conversations; send previous_response_id or input")


class PlainText(Schema, kw_only=True, tag_field="type", tag="text"):
    pass


class JsonObject(Schema, kw_only=True, tag_field="type", tag="json_object"):
    pass


class NamedJsonSchema(Schema, kw_only=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Schema, kw_only=True):
    format: PlainText | JsonObject | NamedJsonSchema | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Schema, kw_only=True):
    """How much the model reasons; there are no summaries, the reasoning itself is returned."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None  # OpenRouter's
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class ResponsesRequest(SamplingFields, Schema, kw_only=True):
    """POST /v1/responses."""

    ELSEWHERE: ClassVar[dict[str, str]] = {
        "messages": "send input, or ask /v1/chat/completions",
        "prompt": "send input",
        "max_tokens": "send max_output_tokens",
        "max_completion_tokens": "send max_output_tokens",
        "response_format": "send text.format",
        "reasoning_effort": "send reasoning.effort",
        "verbosity": "send text.verbosity",
        "functions": "send tools",
        "function": "send its name, description and parameters beside its type",
        "system": "send instructions",
        "n": "send several calls",
        "logprobs": f"send include ['{LOGPROBS}']",
    }

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: TokenCount | None = None
    tools: list[FunctionTool | NamespaceTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Includable] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    # Accepted because they change nothing in the answer.
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    max_tool_calls: int | None = None  # counts calls of built-in tools, which there are not
    client_metadata: Any = None
    access_programs: Any = None
    image: Any = None
    request_id: str | None = None
    # vLLM's extras.
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    cache_salt: str | None = None
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None  # seconds
    include_receipt: bool | None = None  # this server's own: GPU time and price in usage
    # Not supported, with a value that changes nothing.
    background: Annotated[
        Literal[False] | None,
        unsupported("a response ends with its connection; leave the field out, and use stream"),
    ] = None
    conversation: Annotated[None, _SEND_INPUT] = None
    prompt: Annotated[
        None, unsupported("this server keeps no prompt templates; send instructions and input")
    ] = None
    context_management: Annotated[
        NoItems | None, unsupported("items are not compacted; use truncation 'auto'")
    ] = None
    moderation: Annotated[
        None, unsupported("this server does not moderate; leave the field out")
    ] = None

    @staticmethod
    def complete(raw: Any) -> list[str]:
        """Give every input item the type that a client may leave out; leave out skipped tools."""
        if not isinstance(raw, dict):
            return []
        for item in raw["input"] if isinstance(raw.get("input"), list) else ():
            if isinstance(item, dict) and item.get("type") is None:
                item["type"] = "message" if "role" in item or "id" not in item else "item_reference"
        return skip_tools(raw)

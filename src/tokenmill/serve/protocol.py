"""What a client may send: the OpenAI requests and vLLM's extras.

A field that is not listed here is refused by name. A field that only accepts its harmless value
(`Literal`) is one whose other values would change the answer and are not supported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tokenmill.core.types import MAX_TOP_LOGPROBS

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_STOPS = 64

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    """Base of every struct a client fills: unknown fields are refused."""


class TextPart(Schema, kw_only=True):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class FunctionCall(Schema, kw_only=True):
    name: str
    arguments: str  # JSON text, as OpenAI sends it


class ToolCall(Schema, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class SystemMessage(Schema, kw_only=True, tag_field="role", tag="system"):
    content: Content
    name: str | None = None


class DeveloperMessage(Schema, kw_only=True, tag_field="role", tag="developer"):
    content: Content
    name: str | None = None


class UserMessage(Schema, kw_only=True, tag_field="role", tag="user"):
    content: Content
    name: str | None = None


class AssistantMessage(Schema, kw_only=True, tag_field="role", tag="assistant"):
    """An earlier answer. The null-only fields are what the openai client echoes back."""

    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    function_call: None = None


class ToolMessage(Schema, kw_only=True, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: str
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionDefinition(Schema, kw_only=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Schema, kw_only=True):
    function: FunctionDefinition
    type: Literal["function"]


class NamedFunction(Schema, kw_only=True):
    name: str


class NamedToolChoice(Schema, kw_only=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class TextFormat(Schema, kw_only=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Schema, kw_only=True, tag_field="type", tag="json_object"):
    pass


class JsonSchema(Schema, kw_only=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Schema, kw_only=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Schema, kw_only=True):
    """vLLM's constraint; exactly one field is set."""

    json: dict[str, Any] | str | UnsetType = UNSET
    regex: str | UnsetType = UNSET
    choice: Annotated[list[str], Meta(min_length=1)] | UnsetType = UNSET
    grammar: str | UnsetType = UNSET
    json_object: Literal[True] | UnsetType = UNSET
    structural_tag: dict[str, Any] | str | UnsetType = UNSET


class StreamOptions(Schema, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, in every event
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(Schema, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    # Accepted because they change nothing in the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's extras.
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None  # seconds
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: Literal[True] | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None


class TokenizeRequest(Schema, kw_only=True):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Schema, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None

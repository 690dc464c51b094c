"""What a client may send: the OpenAI requests and vLLM's extras.

A field that is not listed here is refused by name, unless it is null or stands in a message. A
field that only accepts its harmless value is one whose other values would change the answer and
are not supported: its description says what to do instead, and is a part of the error.
"""

from __future__ import annotations

import math
from dataclasses import Field, fields
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from tokenmill.core.types import MAX_PATTERN_SIZE, MAX_STOPS, MAX_TOP_LOGPROBS, SamplingParams

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
NoItems = Annotated[list[Any], Meta(max_length=0)]
NoMembers = Annotated[dict[str, Any], Meta(max_length=0)]

# Fields that are accepted and change nothing here; the log says so once.
WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction", "request_id", "guided_decoding_backend"),
)
WITHOUT_EFFECT_IN_MESSAGES = (
    *("id", "cache_control", "metadata", "parsed", "provider_specific_fields"),
    *("thinking_blocks", "reasoning_details"),
)


def unsupported(way_out: str) -> Meta:
    """Marks a field or a part that takes nothing or little; `way_out` ends the error message."""
    return Meta(description=way_out)


_PARTS = unsupported("send images as parts of type 'image_url' in content")
_TEXT_MESSAGE = unsupported("this model takes text only; send text in content")
_TEXT_OUTPUT = unsupported("this model answers in text only; leave the field out, or send ['text']")
_USE_TOOLS = unsupported("functions are deprecated; use tools")
_LEAVE_OUT = unsupported("this server has nothing of the kind; leave the field out")


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    """Base of every struct a client fills: unknown fields are refused."""


class ImageSchema(Schema):
    """Base of all that describes an image: unknown fields are refused inside messages, too."""


class TextPart(Schema, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None


Detail = Literal["low", "high", "auto", "original"]
PixelCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]


class PixelBounds(ImageSchema, kw_only=True):
    """Fewest and most pixels of an image after it is resized."""

    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None


class ImageUrl(PixelBounds, kw_only=True):
    url: str
    detail: Detail | None = None
    format: Any = None  # LiteLLM's: the file says by itself which kind it is


class ImagePart(PixelBounds, kw_only=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str
    detail: Detail | None = None
    uuid: Any = None  # vLLM's; images are known by their content here
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None  # all prefixes are cached


class LocatedImage(ImagePart, kw_only=True, tag_field="type", tag="image_url"):
    """An image of another API's call; errors say where it stands there."""

    path: str


class AnswerText(Schema, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None


class RefusalPart(Schema, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


Content = str | list[TextPart]
ImageContent = str | list[TextPart | ImagePart]


class CalledFunction(Schema, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None  # JSON text, as OpenAI sends it, or the object


class EarlierCall(Schema, kw_only=True):
    id: str
    function: CalledFunction
    type: Literal["function"] | None = "function"
    index: int | None = None  # a client that joins a stream leaves it in


class SystemMessage(Schema, kw_only=True, tag_field="role", tag="system"):
    content: Content
    name: str | None = None
    id: Any = None
    cache_control: Any = None


class DeveloperMessage(Schema, kw_only=True, tag_field="role", tag="developer"):
    content: Content
    name: str | None = None
    id: Any = None
    cache_control: Any = None


class UserMessage(Schema, kw_only=True, tag_field="role", tag="user"):
    content: ImageContent
    name: str | None = None
    id: Any = None
    cache_control: Any = None
    metadata: Any = None
    images: Annotated[NoItems | None, _PARTS] = None
    files: Annotated[NoItems | None, _TEXT_MESSAGE] = None
    attachments: Annotated[NoItems | None, _TEXT_MESSAGE] = None


class AssistantMessage(Schema, kw_only=True, tag_field="role", tag="assistant"):
    """An earlier answer, with whatever clients keep of it."""

    content: str | list[AnswerText | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Annotated[None, _TEXT_MESSAGE] = None
    annotations: list[Any] | None = None
    function_call: Annotated[
        None,
        unsupported("function_call is deprecated; send tool_calls, and results as role 'tool'"),
    ] = None
    prefix: Annotated[
        Literal[False] | None, unsupported("set continue_final_message to true at the top level")
    ] = None
    id: Any = None
    cache_control: Any = None
    metadata: Any = None
    parsed: Any = None
    provider_specific_fields: Any = None
    thinking_blocks: Any = None
    reasoning_details: Any = None


class ToolMessage(Schema, kw_only=True, tag_field="role", tag="tool"):
    content: ImageContent | None = None
    tool_call_id: str
    name: str | None = None
    id: Any = None
    cache_control: Any = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


FunctionName = Annotated[
    str,
    Meta(
        pattern="^[a-zA-Z0-9_.-]{1,64}$",
        description="a function's name has 1 to 64 letters, digits, '_', '.' or '-'",
    ),
]


class FunctionDefinition(Schema, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None


class Tool(Schema, kw_only=True):
    function: FunctionDefinition
    type: Annotated[
        Literal["function"],
        unsupported("only functions can be called here; send tools of type 'function'"),
    ]
    cache_control: Any = None


class NamedFunction(Schema, kw_only=True):
    name: str


class NamedToolChoice(Schema, kw_only=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTool(Schema, kw_only=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedTools(Schema, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class AllowedToolChoice(Schema, kw_only=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


class TextFormat(Schema, kw_only=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Schema, kw_only=True, tag_field="type", tag="json_object"):
    schema: dict[str, Any] | None = None  # llama.cpp's
    value: dict[str, Any] | None = None  # text-generation-inference's

    @property
    def json_schema(self) -> dict[str, Any]:
        """What the object must be."""
        return self.schema or self.value or {"type": "object"}


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

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    structural_tag: dict[str, Any] | str | None = None
    # Options with a value that changes nothing.
    disable_fallback: bool | None = None  # there is one grammar compiler
    disable_any_whitespace: Annotated[
        Literal[False] | None, unsupported("send a grammar without whitespace, or leave it out")
    ] = None
    disable_additional_properties: Annotated[
        Literal[False] | None, unsupported("send additionalProperties false in the schema")
    ] = None
    whitespace_pattern: Annotated[None, unsupported("send a regex or a grammar instead")] = None


class RepetitionOptions(Schema, kw_only=True):
    """vLLM's: an answer ends once its last tokens are so many times the same pattern."""

    max_pattern_size: Annotated[int, Meta(ge=0, le=MAX_PATTERN_SIZE)] | None = None
    min_pattern_size: Annotated[int, Meta(ge=0, le=MAX_PATTERN_SIZE)] | None = None
    min_count: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None


class ReasoningOptions(Schema, kw_only=True):
    """OpenRouter's spelling of reasoning_effort and thinking_token_budget."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    enabled: bool | None = None  # false is the effort "none"


class StreamOptions(Schema, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, in every event
    include_obfuscation: bool | None = None  # accepted; nothing is padded


# Sampling parameters that calls have by the same name, within the bounds of SamplingParams.
SAMPLING_FIELDS = tuple(spec for spec in fields(SamplingParams) if spec.metadata["direct"])
_SAMPLING_TYPES: dict[str, Any] = get_type_hints(SamplingParams) | {
    "seed": Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)],
    "stop": str | Annotated[list[str], Meta(max_length=MAX_STOPS)],
    "stop_token_ids": list[TokenId],
    "thinking_token_budget": int,
    "repetition_detection": RepetitionOptions,
}


def _sampling_type(spec: Field) -> Any:
    kind, bounds = _SAMPLING_TYPES[spec.name], spec.metadata["bounds"]
    if bounds is not None:
        limits: dict[str, Any] = {"gt" if bounds.above else "ge": bounds.low}
        if kind is int or bounds.high < math.inf:
            limits["le"] = INT32_MAX if kind is int else bounds.high
        kind = Annotated[kind, Meta(**limits)]
    return kind | None


SamplingFields: Any = msgspec.defstruct(
    "SamplingFields",
    [(spec.name, _sampling_type(spec), None) for spec in SAMPLING_FIELDS],
    bases=(Schema,),
    kw_only=True,
)


class TextRequest(SamplingFields, Schema, kw_only=True):
    """What chat and text completions have in common, with most of SamplingParams."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    # Accepted because they change nothing in the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: Any = None  # only a hint that makes other servers faster
    request_id: str | None = None
    guided_decoding_backend: str | None = None
    # vLLM's extras.
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # of logprobs
    # Its last tokens are the prompt; -1: as many as fit.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    include_receipt: bool | None = None  # this server's own: GPU time and price in usage
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None  # seconds
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    # vLLM's extras that are not supported but have a value that changes nothing.
    use_beam_search: Annotated[
        Literal[False] | None, unsupported("there is no beam search; ask for several answers by n")
    ] = None
    length_penalty: Annotated[
        Annotated[float, Meta(ge=1, le=1)] | None,
        unsupported("it belongs to beam search, which is not supported; leave the field out"),
    ] = None
    early_stopping: Annotated[
        Literal[False] | None,
        unsupported("it belongs to beam search, which is not supported; leave the field out"),
    ] = None
    spaces_between_special_tokens: Annotated[Literal[True] | None, _LEAVE_OUT] = None
    logits_processors: Annotated[
        NoItems | None, unsupported("code of clients is not run; use logit_bias")
    ] = None
    logprob_token_ids: Annotated[
        NoItems | None,
        unsupported("send logprobs (in chats with top_logprobs) for the likeliest tokens"),
    ] = None
    guided_whitespace_pattern: Annotated[None, _LEAVE_OUT] = None
    kv_transfer_params: Annotated[
        NoMembers | None,
        unsupported("the server moves KV by itself; start it with --prefill and --decode"),
    ] = None
    vllm_xargs: Annotated[NoMembers | None, _LEAVE_OUT] = None


class ChatCompletionRequest(TextRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice | None
    ) = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[NoItems | None, _USE_TOOLS] = None
    function_call: Annotated[
        Literal["none", "auto"] | None,
        unsupported("functions are deprecated; use tools and tool_choice"),
    ] = None
    reasoning_effort: Effort | None = None  # given to the chat template
    reasoning: ReasoningOptions | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # the same
    modalities: Annotated[list[Literal["text"]] | None, _TEXT_OUTPUT] = None
    audio: Annotated[None, _TEXT_OUTPUT] = None
    web_search_options: Annotated[
        None, unsupported("this server cannot search the web; leave it out, or offer a tool")
    ] = None
    documents: Annotated[NoItems | None, unsupported("send them in a message")] = None
    chat_template: str | None = None  # by the operator's leave
    mm_processor_kwargs: PixelBounds | None = None  # vLLM's: of all images of the call
    include_reasoning: bool | None = None
    echo: Annotated[
        Literal[False] | None, unsupported("only /v1/completions can repeat the prompt")
    ] = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(TextRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: Annotated[
        Annotated[str, Meta(max_length=0)] | None,
        unsupported("this model only continues text; leave the field out"),
    ] = None
    prompt_embeds: Annotated[None, unsupported("send the prompt as text or token ids")] = None


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

"""What the server answers: the structs that are encoded, and that the OpenAPI page shows."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishText = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class AnswerSchema(msgspec.Struct):
    """Base of every struct the server fills."""


class PromptTokensDetails(AnswerSchema, kw_only=True):
    cached_tokens: int = 0
    image_tokens: int | UnsetType = UNSET  # of prompts with images


class CompletionTokensDetails(AnswerSchema, kw_only=True):
    reasoning_tokens: int = 0


class UsageReceipt(AnswerSchema, kw_only=True):
    """GPU time that was taken, by what for; on CPU it is the time of workers."""

    gpu_seconds: float  # the sum of the next three
    prefill_gpu_seconds: float
    decode_gpu_seconds: float
    drafts_gpu_seconds: float
    saved_gpu_seconds: float  # what cached tokens would have taken; nobody pays for it
    usd: float | UnsetType = UNSET  # of gpu_seconds, where the server has a price


class Usage(AnswerSchema, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    receipt: UsageReceipt | UnsetType = UNSET  # where the call asks for it


class TopLogprob(AnswerSchema, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerSchema, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(AnswerSchema, kw_only=True):
    """A token at a position of the prompt; ranks begin at 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionCall(AnswerSchema, kw_only=True):
    name: str
    arguments: str  # JSON text


class ToolCall(AnswerSchema, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(AnswerSchema, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(AnswerSchema, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(AnswerSchema, kw_only=True):
    """The answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionCallDelta(AnswerSchema, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(AnswerSchema, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(AnswerSchema, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(AnswerSchema, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(AnswerSchema, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(AnswerSchema, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(AnswerSchema, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishText | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(AnswerSchema, kw_only=True):
    """The answer to POST /v1/completions; streamed events have the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(AnswerSchema, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tokenmill"
    root: str
    parent: None = None
    max_model_len: int
    default_sampling_params: dict[str, float] = {}  # by generation_config.json


class ModelList(AnswerSchema, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(AnswerSchema, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(AnswerSchema, kw_only=True):
    prompt: str


class TokenizerInfo(AnswerSchema, kw_only=True):
    """The answer to GET /tokenizer_info: what clients that count tokens themselves ask for."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None
    vocab_size: int
    model_max_length: int


class Health(AnswerSchema, kw_only=True):
    status: Literal["ok"] = "ok"


class ServiceInfo(AnswerSchema, kw_only=True):
    """The answer to GET /: who this is, and where the rest is."""

    service: str
    version: str
    api: str = "/v1"
    docs: str = "/docs"
    dashboard: str = "/dashboard"
    metrics: str = "/metrics"
    health: str = "/health"


class Version(AnswerSchema, kw_only=True):
    version: str


class ErrorBody(AnswerSchema, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(AnswerSchema, kw_only=True):
    """Every error, whatever its status."""

    error: ErrorBody


class MessagesError(AnswerSchema, kw_only=True):
    type: str
    message: str
    details: dict[str, str] | UnsetType = UNSET


class MessagesErrorAnswer(AnswerSchema, kw_only=True):
    """Every error of Anthropic's API, whatever its status."""

    type: Literal["error"] = "error"
    error: MessagesError


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


json_encode = msgspec.json.Encoder().encode

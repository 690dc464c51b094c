"""What the Responses API answers: the response, lists of items, and what was deleted."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from tokenmill.api.protocol.answers import AnswerSchema, Usage, UsageReceipt
from tokenmill.api.responses.response_items import Item, OutputItem
from tokenmill.api.responses.response_request import (
    PlainText,
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
)
from tokenmill.api.responses.response_tools import (
    AllowedFunctions,
    FunctionTool,
    NamedTool,
    NamespaceTool,
)

FaultCode = Literal["server_error", "rate_limit_exceeded"]  # of OpenAI's, those there are here
CutReason = Literal["max_output_tokens", "repetition_detected"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class InputTokensDetails(AnswerSchema, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    image_tokens: int | UnsetType = UNSET  # of prompts with images


class OutputTokensDetails(AnswerSchema, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(AnswerSchema, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    receipt: UsageReceipt | UnsetType = UNSET  # where the call asks for it


class ResponseFault(AnswerSchema, kw_only=True):
    code: FaultCode
    message: str


class IncompleteDetails(AnswerSchema, kw_only=True):
    reason: CutReason


class ResponseObject(AnswerSchema, kw_only=True):
    """The answer to POST /v1/responses, and what GET returns of a stored one."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus = "in_progress"
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = field(default_factory=list)
    usage: ResponseUsage | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: Literal[False] = False
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    reasoning: ReasoningConfig
    service_tier: str = "default"
    temperature: float = 1.0
    text: TextConfig
    tool_choice: str | NamedTool | AllowedFunctions = "auto"
    tools: list[FunctionTool | NamespaceTool] = field(default_factory=list)
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None


class ResponseEvent(AnswerSchema, kw_only=True):
    """One event of a streamed response; the other fields depend on its type."""

    type: str
    sequence_number: int


class ItemList(AnswerSchema, kw_only=True):
    """The answer to GET /v1/responses/{response_id}/input_items."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(AnswerSchema, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(AnswerSchema, kw_only=True):
    """The answer to POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def new_response(
    call: ResponsesRequest, response_id: str, created: int, model: str
) -> ResponseObject:
    """The response to a call before anything is generated: it repeats what was asked for."""
    given: dict[str, Any] = {
        name: value
        for name in (
            *("instructions", "previous_response_id", "store", "max_output_tokens", "metadata"),
            *("max_tool_calls", "parallel_tool_calls", "temperature", "tool_choice", "tools"),
            *("top_logprobs", "top_p", "truncation", "user"),
        )
        if (value := getattr(call, name)) is not None
    }
    text = call.text or TextConfig()
    return ResponseObject(
        id=response_id,
        created_at=created,
        model=model,
        reasoning=call.reasoning or ReasoningConfig(),
        text=TextConfig(format=text.format or PlainText(), verbosity=text.verbosity),
        **given,
    )


def response_usage(usage: Usage) -> ResponseUsage:
    """The same counts under the names of the Responses API."""
    details = usage.completion_tokens_details
    num_reasoning = 0 if details is UNSET else details.reasoning_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            image_tokens=usage.prompt_tokens_details.image_tokens,
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning),
        total_tokens=usage.total_tokens,
        receipt=usage.receipt,
    )

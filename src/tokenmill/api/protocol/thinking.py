"""How much a call may reason: the budget that it names, or that its effort stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenmill.api.protocol.requests import ChatCompletionRequest
from tokenmill.core.types import InvalidRequestError, ReasoningMarks, SamplingParams

# Tokens, where a template has no word for the effort; docs/serving.md has the table.
EFFORT_BUDGETS = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192, "high": 24_576}


def settle_reasoning(call: ChatCompletionRequest) -> None:
    """Bring OpenRouter's spelling, `reasoning`, into the fields of its own that say the same."""
    options = call.reasoning
    if options is None:
        return
    effort = options.effort if options.enabled is not False else "none"
    call.reasoning_effort = _agreed(call.reasoning_effort, effort, "reasoning_effort", "effort")
    call.thinking_token_budget = _agreed(
        call.thinking_token_budget, options.max_tokens, "thinking_token_budget", "max_tokens"
    )


def _agreed(value: Any, other: Any, name: str, other_name: str) -> Any:
    if None not in (value, other) and value != other:
        path = f"reasoning.{other_name}"
        raise InvalidRequestError(f"{name} is {value!r}, but {path} is {other!r}; send one", path)
    return other if value is None else value


def effort_budget(effort: str | None, chat_template: str) -> int | None:
    """The budget that an effort stands for where the template cannot tell the model of it."""
    told = "reasoning_effort" in chat_template
    told = told or (effort == "none" and "enable_thinking" in chat_template)
    return None if told or effort is None else EFFORT_BUDGETS.get(effort)


def limited(
    sampling: SamplingParams, marks: ReasoningMarks | None, by_effort: int | None, most: int | None
) -> SamplingParams:
    """With the least of the call's own budget, or else its effort's, and the server's."""
    own = sampling.thinking_token_budget
    budgets = [b for b in (by_effort if own is None else own, most) if b is not None]
    if marks is None or not budgets:
        return sampling if own is None else replace(sampling, thinking_token_budget=None)
    return replace(sampling, thinking_token_budget=min(budgets), reasoning=marks)

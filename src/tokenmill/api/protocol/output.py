"""What an answer must be, and how it is read: where its constraint starts, and its reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenmill.api.protocol.requests import ChatCompletionRequest
from tokenmill.api.protocol.tools import ToolUse
from tokenmill.core.images import ImageSpan, content_ids
from tokenmill.core.types import (
    InvalidRequestError,
    ReasoningMarks,
    SamplingParams,
    StructuredOutput,
)
from tokenmill.sched.cache.blocks import U64, hash_input
from tokenmill.text.detokenize import Detokenizer
from tokenmill.text.harmony import HarmonyReader, HarmonyTokens
from tokenmill.text.message import TOKEN_TAGS, ContentReader, MessageReader, TaggedReader
from tokenmill.text.output_style import OutputStyle
from tokenmill.text.parsers import ReasoningParser, opens_reasoning
from tokenmill.text.tokenizer import Tokenizer

MakeReader = Callable[[Detokenizer, bool], MessageReader]  # the bool: the answer is streamed

# Harmony knows three efforts; OpenAI's others are the nearest of them.
_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium"}
_EFFORTS |= {"high": "high", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    token_ids: list[int]
    hash_input: U64  # the same tokens, as the router reads them
    images: tuple[ImageSpan, ...] = ()

    @classmethod
    def of(cls, text: str, token_ids: list[int], images: tuple[ImageSpan, ...] = ()) -> Prompt:
        return cls(text, token_ids, hash_input(content_ids(token_ids, images)), images)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    prompt: Prompt
    structured: StructuredOutput | None
    make_reader: MakeReader | None  # None: all text is content
    stop_ids: tuple[int, ...] = ()  # which end the answer beside the model's own
    marks: ReasoningMarks | None = None  # of its reasoning, if there is any


def plan_output(
    style: OutputStyle,
    tokenizer: Tokenizer,
    prompt: Prompt,
    tools: ToolUse | None,
    structured: StructuredOutput | None,
    continued: bool,
) -> OutputPlan:
    """The plan for a prompt; a constraint holds after the reasoning, which stays free."""
    if style.harmony is not None:
        return _harmony_plan(style.harmony, tokenizer, prompt, tools, structured)
    if tools is not None and tools.structured is not None:
        structured = tools.structured
    splits = style.thinks
    if structured is not None:
        splits = style.think_ids is not None
        after = style.free_text(prompt.text, continued, tokenizer.eos_token_ids)
        structured = replace(structured, after=after)
    if tools is None and not splits:
        return OutputPlan(prompt, structured, None)
    opened = opens_reasoning(prompt.text) if splits else None
    marks = style.chat_marks(prompt.text) if splits else None
    return OutputPlan(prompt, structured, partial(_tagged, style, tools, opened), marks=marks)


def _tagged(
    style: OutputStyle,
    tools: ToolUse | None,
    opened: bool | None,
    detokenizer: Detokenizer,
    streams: bool,
) -> MessageReader:
    reasoning = None
    if opened is not None:
        by_token = style.think_ids is not None
        reasoning = ReasoningParser(opened, TOKEN_TAGS) if by_token else ReasoningParser(opened)
    parser, one_call = (None, False) if tools is None else (tools.parser, tools.one_call)
    content = ContentReader(parser, streams, one_call)
    return TaggedReader(detokenizer, reasoning, content, style.think_ids)


def _harmony_plan(
    tokens: HarmonyTokens,
    tokenizer: Tokenizer,
    prompt: Prompt,
    tools: ToolUse | None,
    structured: StructuredOutput | None,
) -> OutputPlan:
    ends = tokenizer.eos_token_ids
    calls, must_call = tools is not None, tools is not None and tools.structured is not None
    bound = structured is not None and not must_call
    forced = (tokens.until_channel, tokens.until_answer) if calls else (tokens.until_answer,)
    if tools is not None and tools.structured is not None:
        opening = tokens.open_analysis(prompt.token_ids)
        text = tokenizer.decode(opening, skip_special_tokens=False)
        prompt = Prompt.of(prompt.text + text, prompt.token_ids + opening, prompt.images)
        structured = replace(tools.structured, after=tokens.until_end(ends))
        forced = ((tokens.end,),)
    elif structured is not None:
        after = tokens.until_final([t for t in ends if not (calls and t == tokens.call)])
        answering = tokens.answers(tokenizer, prompt.token_ids)
        structured = replace(structured, after=None if answering else after)
    reader = partial(_harmony_reader, tokens, tokenizer, prompt.token_ids, tools, bound)
    missing = tuple(t for t in tokens.stop_ids if t not in ends)
    return OutputPlan(prompt, structured, reader, missing, tokens.marks(forced, bound, calls))


def _harmony_reader(
    tokens: HarmonyTokens,
    tokenizer: Tokenizer,
    prompt: list[int],
    tools: ToolUse | None,
    bound: bool,
    detokenizer: Detokenizer,
    streams: bool,
) -> MessageReader:
    names = [] if tools is None else tools.names
    max_calls = 1 if tools is not None and tools.one_call else None
    return HarmonyReader(detokenizer, tokenizer, tokens, prompt, names, max_calls, bound)


def harmony_effort(call: ChatCompletionRequest) -> dict[str, Any]:
    """The template's `reasoning_effort`, which GPT-OSS has in three steps and never none."""
    name, effort = "reasoning_effort", call.reasoning_effort
    if effort is not None and effort not in _EFFORTS:
        raise InvalidRequestError(
            f"{name}: {effort!r} is not supported: this model always reasons; send 'low', "
            "'medium' or 'high'",
            name,
        )
    given = (call.chat_template_kwargs or {}).get(name)
    if given is not None and given not in ("low", "medium", "high"):
        raise InvalidRequestError(
            f"chat_template_kwargs.{name}: {given!r} is not valid; send 'low', 'medium' or 'high'",
            "chat_template_kwargs",
        )
    return {} if effort is None else {name: _EFFORTS[effort]}


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

"""Chat templates: conversations in OpenAI's form, rendered to a prompt by the model's own Jinja."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.core.types import InvalidRequestError, ModelLoadError

Message = dict[str, Any]

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_ID_FIELDS = ("id", "tool_call_id")
_PART_TEXT = {"text": "text", "refusal": "refusal"}  # content part type -> field with its text
_TESTS_FOR_NULL = re.compile(r"(?<!reasoning_)content\W{0,3}\s+is\s+(not\s+)?none", re.IGNORECASE)
_TESTS_FOR_STRING = re.compile(r"\bis\s+(not\s+)?string\b")
_WANTS_NINE = re.compile(r"id\s*\|\s*length\)?\s*[!=]=\s*9\b")  # Mistral's, of calls
_LOOPS_OVER_PARTS = re.compile(r"\bin\s+\w+(\.content\b|\[['\"]content['\"]\])")
_CONTINUE_MARK = "tokenmill-continues-here "  # a template that trims takes the final space


class ChatTemplate:
    """A compiled chat template and what it expects of its messages."""

    def __init__(self, source: str, origin: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"{origin}: not a usable chat template ({error})") from None
        self.source = source
        self._keeps_null_content = _TESTS_FOR_NULL.search(source) is not None
        self._short_ids = _WANTS_NINE.search(source) is not None
        self._wants_parts = (
            _LOOPS_OVER_PARTS.search(source) is not None
            and _TESTS_FOR_STRING.search(source) is None
        )
        self._takes_images = "image" in source and _LOOPS_OVER_PARTS.search(source) is not None
        self._knows_developer = "developer" in source

    def render(
        self, messages: Sequence[Message], *, continue_final_message: bool = False, **variables: Any
    ) -> str:
        """The prompt; with `continue_final_message` it ends where the final message's text ends."""
        if not messages:
            raise InvalidRequestError("messages must not be empty", "messages")
        if (date := variables.get("current_date")) is not None:
            variables["strftime_now"] = parse_date(date, "chat_template_kwargs").strftime
        prepared = [self._prepare(message) for message in messages]
        if continue_final_message:
            return self._render_unfinished(prepared, variables)
        return self._render(prepared, variables)

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        try:
            text = self._template.render(messages=messages, **variables)
        except Exception as error:  # the template is the model's code: it may raise anything
            filled = _filled(messages)
            if (
                filled != messages
            ):  # it goes through a null, or the arguments of a call that was cut
                return self._render(filled, variables)
            raise _failed(error) from (None if isinstance(error, jinja2.TemplateError) else error)
        check_unicode(text, "messages")
        return text

    def _render_unfinished(self, messages: list[Message], variables: dict[str, Any]) -> str:
        """Mark the end of the final text, render, and cut at the mark."""
        content = messages[-1].get("content")
        if isinstance(content, list) and content and "text" in content[-1]:
            content = content[-1]["text"]
            messages[-1]["content"][-1]["text"] = content + _CONTINUE_MARK
        elif isinstance(content, str):
            messages[-1]["content"] = content + _CONTINUE_MARK
        else:
            raise InvalidRequestError(
                "continue_final_message needs text in the final message", "continue_final_message"
            )
        mark = _CONTINUE_MARK.strip()
        head, found, tail = self._render(messages, variables).rpartition(mark)
        if not found or content.strip() not in head:
            raise InvalidRequestError(
                "the chat template does not repeat the final message, so it cannot be continued",
                "continue_final_message",
            )
        return head if tail.startswith(" ") else head.rstrip()

    def _prepare(self, message: Message) -> Message:
        """What templates expect: no null fields, text content, arguments as objects."""
        prepared = {key: value for key, value in message.items() if value not in (None, [])}
        prepared["content"] = self._content(message.get("content"))
        if prepared.get("role") == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        if calls := prepared.get("tool_calls"):
            prepared["tool_calls"] = [_prepare_call(call) for call in calls]
        if self._short_ids:
            for owner in (*prepared.get("tool_calls", ()), prepared):
                owner.update({key: _nine(str(owner[key])) for key in _ID_FIELDS if key in owner})
        reasoning = next((prepared[key] for key in _REASONING_FIELDS if key in prepared), None)
        if reasoning is not None:
            prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
        return prepared

    def _content(self, content: str | list[dict[str, Any]] | None) -> Any:
        if content is None:
            return None if self._keeps_null_content else ""
        if isinstance(content, list) and (self._takes_images or any(map(_is_image, content))):
            return [_template_part(part) for part in content]
        texts = [content] if isinstance(content, str) else [_part_text(part) for part in content]
        if self._wants_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def load_source(template: str) -> str:
    """The template itself when it has a brace, else the contents of the file it names."""
    if "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(f"chat template {template}: {error.strerror or error}") from None


def parse_date(text: object, param: str) -> datetime:
    """A date such as 2026-11-16, for templates that write today's."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%d")
    except ValueError:
        raise InvalidRequestError(
            f"{param}: {text!r} is no date; send one as YYYY-MM-DD", param
        ) from None


def check_unicode(text: str, param: str) -> None:
    """Refuse a text that cannot be written as UTF-8."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is not valid Unicode: a lone surrogate at position {error.start}", param
        ) from None


def _is_image(part: dict[str, Any]) -> bool:
    return part.get("type") == "image"


def _template_part(part: dict[str, Any]) -> dict[str, Any]:
    """A part as transformers gives it to templates that take images."""
    return {"type": "image"} if _is_image(part) else {"type": "text", "text": _part_text(part)}


def _part_text(part: dict[str, Any]) -> str:
    kind = part.get("type")
    if kind not in _PART_TEXT:
        raise InvalidRequestError(
            f"content parts of type {kind!r} are not supported by this model; use 'text'",
            "messages",
        )
    text = part.get(_PART_TEXT[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"a {kind!r} content part must have text", "messages")
    return text


class CutArguments(str):
    """Arguments of a call that are no object, such as those that `max_tokens` cut off."""


def _prepare_call(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI sends arguments as JSON text, templates write them as objects."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _arguments_of(arguments)
    return {**call, "function": function | {"arguments": arguments}}


def _arguments_of(text: str) -> dict[str, Any] | CutArguments:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return CutArguments(text)
    return value if isinstance(value, dict) else CutArguments(text)


def _nine(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode(errors="replace"), digest_size=8).hexdigest()[:9]


def _filled(messages: list[Message]) -> list[Message]:
    """The messages without null, every cut call's text as the one argument of an object."""
    filled = []
    for message in messages:
        content = "" if message["content"] is None else message["content"]
        filled.append(message | {"content": content})
        if calls := message.get("tool_calls"):
            filled[-1]["tool_calls"] = [_with_object(call) for call in calls]
    return filled


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, CutArguments):
        return call
    return {**call, "function": {**call["function"], "arguments": {"arguments": str(arguments)}}}


def _failed(error: Exception) -> InvalidRequestError:
    reason = str(error) or type(error).__name__
    return InvalidRequestError(f"the chat template refuses these messages: {reason}", "messages")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, filters and globals that templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter; a cut call's arguments as they are."""
    if isinstance(value, CutArguments):
        return str(value)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

"""The items of the Responses API: what a client sends as input, and gets and hands back as output.

One set of structs has both directions, so that every output item is a valid input item.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType, field

from tokenmill.api.protocol.answers import ChatLogprob
from tokenmill.api.protocol.requests import (
    Detail,
    ImageSchema,
    PixelCount,
    Schema,
    unsupported,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
_CARRIED = "tokenmill-reasoning-"  # reasoning in the field that clients hand back unread


class InputText(Schema, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class InputImage(ImageSchema, kw_only=True, tag_field="type", tag="input_image"):
    image_url: str | None = None
    detail: Detail | None = None
    file_id: Annotated[None, unsupported("files are not kept here; send image_url")] = None
    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None
    prompt_cache_breakpoint: Any = None  # all prefixes are cached


class OutputText(Schema, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[ChatLogprob] | None = None


class RefusalText(Schema, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


class ReasoningText(Schema, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Schema, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


Part = InputText | InputImage | OutputText | RefusalText


class MessageItem(Schema, kw_only=True, tag_field="type", tag="message"):
    """A message of the user, of the system, or an earlier answer."""

    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus | None = None
    content: str | list[Part]


class FunctionCallItem(Schema, kw_only=True, tag_field="type", tag="function_call"):
    id: str | None = None
    call_id: str
    name: str
    namespace: str | UnsetType | None = UNSET
    arguments: str  # JSON text
    status: ItemStatus | None = None


class FunctionCallOutputItem(Schema, kw_only=True, tag_field="type", tag="function_call_output"):
    id: str | None = None
    call_id: str
    output: str | list[InputText | InputImage]
    status: ItemStatus | None = None


class ReasoningItem(Schema, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning before an answer or a call."""

    id: str | None = None
    summary: list[SummaryText] = field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


class ItemReference(Schema, kw_only=True, tag_field="type", tag="item_reference"):
    id: str


OutputItem = MessageItem | FunctionCallItem | ReasoningItem
Item = OutputItem | FunctionCallOutputItem
InputItem = Item | ItemReference
_PREFIXES: dict[type, str] = {
    MessageItem: "msg",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
    ReasoningItem: "rs",
}


def new_id(kind: type[Item]) -> str:
    """An id as OpenAI's look: what it is, then a random number."""
    return f"{_PREFIXES[kind]}_{uuid4().hex}"


def as_stored(item: Item) -> Item:
    """An input item as it is listed: with an id, a status and a list of parts."""
    is_message = isinstance(item, MessageItem) and isinstance(item.content, str)
    if item.id is not None and item.status is not None and not is_message:
        return item  # it was stored before
    stored = msgspec.structs.replace(
        item, id=item.id or new_id(type(item)), status=item.status or "completed"
    )
    if isinstance(stored, MessageItem) and isinstance(stored.content, str):
        is_answer = stored.role == "assistant"
        kind = OutputText if is_answer else InputText
        stored.content = cast("list[Part]", [kind(text=stored.content)])
    return stored


def text_of(content: str | Sequence[Part]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([part_text(p) for p in content if not isinstance(p, InputImage)])


def part_text(part: InputText | OutputText | RefusalText) -> str:
    return part.refusal if isinstance(part, RefusalText) else part.text


def reasoning_of(item: ReasoningItem) -> str:
    """The reasoning in whatever field the client has kept."""
    if item.content:
        return "\n".join(part.text for part in item.content)
    if item.encrypted_content is not None:
        return _uncarried(item.encrypted_content)
    return ""


def carried(reasoning: str) -> str:
    """Reasoning as `encrypted_content`: it is encoded, not encrypted."""
    return _CARRIED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode("ascii")


def _uncarried(text: str) -> str:
    """The reasoning that was carried; another server's secret says nothing."""
    if not text.startswith(_CARRIED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_CARRIED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""

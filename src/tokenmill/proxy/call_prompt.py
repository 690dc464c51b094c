"""Reads the model and the prompt of a call, as numbers, without checking the rest of the call.

With a tokenizer the numbers are the token ids that the backend will see. Without one, or if the
chat template fails on the messages, four bytes of the text count as a token: prompts with the same
beginning still have the same first numbers, and only their lengths are estimates.

Images count as as many tokens as they have, named by their content. Nothing is fetched or decoded:
of a file in a data: URL the header says how large it is; an image behind another URL is known by
its URL, and counts as one of a usual size.
"""

from __future__ import annotations

import base64
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from tokenmill.api.errors import MESSAGES_PATH, RESPONSES_PATH, VIDEOS_PATH
from tokenmill.api.messages.message_chat import chat_of_messages
from tokenmill.api.messages.message_request import MessagesRequest
from tokenmill.api.protocol.decoding import decode_call
from tokenmill.api.protocol.images import WantedImage, mark_images, wanted_parts
from tokenmill.api.protocol.requests import ChatCompletionRequest, Message, PixelBounds
from tokenmill.api.protocol.tools import tool_definitions
from tokenmill.api.responses.response_chat import chat_of
from tokenmill.api.responses.response_items import ItemReference, MessageItem
from tokenmill.api.responses.response_request import ResponsesRequest
from tokenmill.core.images import Grid, ImageInput, content_ids
from tokenmill.core.types import ImageError
from tokenmill.sched.cache.blocks import byte_tokens
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.image_headers import checked_size
from tokenmill.vision.placing import place_images
from tokenmill.vision.processor import ImageProcessor, smart_resize

MAX_BYTES = 1 << 18  # of a prompt that are looked at
HEAD_CHARS = 1 << 16  # of a file in base64, which have its size
MOST_PIXELS = 10**9  # of an image that is not decoded here
USUAL_SIZE = 1024, 1024  # pixels of an image that is not there to look at
NOTHING: Any = msgspec.Raw()


class Call(msgspec.Struct):
    """The fields that matter, as they were sent; the backend judges them and all others."""

    model: msgspec.Raw = NOTHING
    messages: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    instructions: msgspec.Raw = NOTHING
    system: msgspec.Raw = NOTHING
    previous_response_id: msgspec.Raw = NOTHING
    cache_salt: msgspec.Raw = NOTHING
    chat_template_kwargs: msgspec.Raw = NOTHING


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt as the router wants it; an empty one is routed by load alone."""

    token_ids: Sequence[int] = field(default_factory=list)
    model: str = ""
    salt: str = ""  # prompts of different models or salts share nothing
    previous_response_id: str = ""  # only the backend that has it can answer
    cache_salt: str = ""  # as the client gave it
    is_exact: bool = False  # the tokens are those that a backend's KV cache events name


_decoder = msgspec.json.Decoder(Call)
# Parts of messages that backends put tokens of their own in place of.
_MEDIA = re.compile(rb'"(?:image|image_url|input_image|input_audio|audio_url|video|video_url)"')


def read_prompt(
    body: bytes,
    tokenizer: Tokenizer | None,
    path: str = "",
    processor: ImageProcessor | None = None,
) -> RoutedPrompt:
    """The prompt of a body that was sent to `path`, whatever it is.

    With a `processor` the model takes images, which count as the tokens that they have.
    """
    try:
        call = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RoutedPrompt()
    model = _text(call.model)
    if path.startswith(VIDEOS_PATH):  # whoever makes a video computes all of it
        return RoutedPrompt(model=model)
    token_ids = None
    if tokenizer is not None:
        read_chat = _CHATS.get(path)
        if read_chat is None and processor is not None and call.messages and b"image" in body:
            read_chat = _completions_chat
        if read_chat is None:
            token_ids = _token_ids(call, tokenizer)
        else:
            token_ids = _chat_token_ids(read_chat, body, tokenizer, processor)
    is_exact = token_ids is not None and _MEDIA.search(body) is None
    if token_ids is None:
        token_ids = _pieces(call)
    cache_salt, previous = _text(call.cache_salt), _text(call.previous_response_id)
    return RoutedPrompt(token_ids, model, f"{model}\0{cache_salt}", previous, cache_salt, is_exact)


def _responses_chat(body: bytes) -> ChatCompletionRequest:
    call = decode_call(body, ResponsesRequest)
    if isinstance(call.input, str):
        return chat_of(call, [MessageItem(role="user", content=call.input)])
    return chat_of(call, [i for i in call.input if not isinstance(i, ItemReference)])


def _completions_chat(body: bytes) -> ChatCompletionRequest:
    return decode_call(body, ChatCompletionRequest)


def _messages_chat(body: bytes) -> ChatCompletionRequest:
    return chat_of_messages(decode_call(body, MessagesRequest))


# The calls that a backend turns into chat completions.
_CHATS: dict[str, Callable[[bytes], ChatCompletionRequest]] = {
    RESPONSES_PATH: _responses_chat,
    MESSAGES_PATH: _messages_chat,
}


def _chat_token_ids(
    read_chat: Callable[[bytes], ChatCompletionRequest],
    body: bytes,
    tokenizer: Tokenizer,
    processor: ImageProcessor | None,
) -> Sequence[int] | None:
    try:
        chat = read_chat(body)
        messages = msgspec.to_builtins(chat.messages)
        tools = tool_definitions(chat.tools or []) or None
        kwargs = chat.chat_template_kwargs or {}
        if processor is None:
            return tokenizer.encode_chat(messages, tools=tools, **kwargs)
        images = CallImages(chat.messages, chat.mm_processor_kwargs, processor)
        images.mark(messages)
        return images.place(tokenizer.encode_chat(messages, tools=tools, **kwargs))
    except Exception:  # templates raise what they like; the backend says what is wrong
        return None


def _text(raw: msgspec.Raw) -> str:
    value = msgspec.json.decode(raw) if raw else ""
    return value if isinstance(value, str) else ""


def _token_ids(call: Call, tokenizer: Tokenizer) -> Sequence[int] | None:
    """The ids of a chat or a text prompt; None where they cannot be told."""
    try:
        if call.messages:
            kwargs = _decoded(call.chat_template_kwargs, {})
            tools = _decoded(call.tools, None)
            messages = msgspec.json.decode(call.messages)
            return tokenizer.encode_chat(messages, tools=tools, **kwargs)
        prompt = _decoded(call.prompt, None)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]  # of several the first decides
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        return array("q", prompt) if prompt else None
    except Exception:  # templates raise what they like; the backend says what is wrong
        return None


def _decoded(raw: msgspec.Raw, default: Any) -> Any:
    return msgspec.json.decode(raw) if raw else default


def _pieces(call: Call) -> Sequence[int]:
    """The bytes of all that a prompt is made of, in the order of a prompt, four at a time.

    A list is taken without its closing bracket: a longer conversation begins with the shorter.
    """
    opening = (call.tools, call.instructions, call.system)
    parts = (*opening, call.messages, call.prompt, call.input)
    data = b"".join([bytes(raw).rstrip(b" \t\r\n]") for raw in parts if raw])[:MAX_BYTES]
    return byte_tokens(data)


class CallImages:
    """The images of one call: marked in its messages, and put into its tokens."""

    def __init__(
        self, messages: Sequence[Message], bounds: PixelBounds | None, processor: ImageProcessor
    ) -> None:
        self._processor = processor
        self._wanted = wanted_parts(messages, bounds, processor)

    def mark(self, conversation: list[dict[str, Any]]) -> None:
        """Turn image parts into what chat templates know."""
        for message in conversation:
            mark_images(message)

    def place(self, token_ids: Sequence[int]) -> Sequence[int]:
        images = list(map(self._sketch, self._wanted))
        expanded, spans = place_images(list(token_ids), images, self._processor)
        return content_ids(expanded, spans)

    def _sketch(self, wanted: WantedImage) -> ImageInput:
        """An image without pixels: its grid, and a hash of the file or the URL."""
        limits = repr(wanted.limits).encode()
        digest = blake2b(wanted.url.encode(), digest_size=32, key=limits[:64]).digest()
        return ImageInput(b"", self._grid(wanted), digest)

    def _grid(self, wanted: WantedImage) -> Grid:
        width, height = size_of(wanted.url) or USUAL_SIZE
        processor = self._processor
        height, width = smart_resize(height, width, processor.factor, wanted.limits)
        return 1, height // processor.patch, width // processor.patch


def size_of(url: str) -> tuple[int, int] | None:
    """Width and height by the header of a file in a data: URL; None where they cannot be told."""
    head, comma, data = url[: HEAD_CHARS + 128].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        return None
    try:
        return checked_size(base64.b64decode(data[: len(data) // 4 * 4]), MOST_PIXELS)
    except (ValueError, ImageError):  # the backend says what is wrong with it
        return None

"""tokenmill chat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import typer
from rich.cells import cell_len

from tokenmill import console
from tokenmill.cli.chat import local_chat as local
from tokenmill.cli.chat import remote_chat as remote
from tokenmill.cli.chat.chat_images import ImagePrompts, image_parts
from tokenmill.core.flags import setting
from tokenmill.core.types import SamplingParams, TokenmillError
from tokenmill.settings import SAMPLING, SERVER, Settings, only
from tokenmill.settings.options import command

DEFAULTS = {"max-tokens": 1024, "temperature": 0.7}


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    system: str | None = setting(None, "System prompt of the conversation.")
    image: tuple[str, ...] = setting(
        (),
        "Image file, or its URL with --url, for the first message; repeatable.",
        repeated=True,
    )
    url: str | None = setting(None, "Talk to a running server, such as http://127.0.0.1:8000.")


PANELS = {
    "Conversation": (ConversationOptions, *only(SERVER, "api-key")),
    "Sampling": SAMPLING,
    **local.PANELS,
}
HELP = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer."

Messages = list[dict[str, Any]]
Source = Callable[[Messages, local.ChatAnswer], Iterator[str]]


def register(app: typer.Typer) -> None:
    common = ("system", "image", "url", "api-key", *local.COMMON)
    command(app, "chat", PANELS, positional="model", defaults=DEFAULTS, common=common)(chat)


def chat(settings: Settings) -> None:
    """Talk to a model in the terminal.

    tokenmill chat
    tokenmill chat --system "You are a pirate." --temperature 0.9
    tokenmill chat --url http://127.0.0.1:8000/v1
    tokenmill chat Qwen/Qwen3-VL-4B-Instruct --image photo.jpg
    tokenmill chat qwen3-vl-tiny --image photo.jpg    random weights

    [bold]/reset[/bold] forgets the conversation, [bold]/exit[/bold] or Ctrl-D leaves.
    Ctrl-C stops an answer without leaving.
    """
    sampling = settings.build(SamplingParams)
    images = image_parts(settings.get("image"))
    model, source = _remote(settings) if "url" in settings else _local(settings, sampling)
    system = settings.get("system")
    opening: Messages = [{"role": "system", "content": system}] if system else []
    console.note(f"{model} answers. {HELP}")
    _converse(source, opening, images)


def _local(settings: Settings, sampling: SamplingParams) -> tuple[str, Source]:
    """The model's name, and what streams its answers."""
    llm = local.load_llm(settings)
    from tokenmill.cli.chat.chat_channels import ReasoningChannels
    from tokenmill.vision.processor import load_processor

    prompts = ImagePrompts(load_processor(llm.path), llm.built.max_model_len)
    prompts.check(settings.get("image"))

    def source(messages: Messages, answer: local.ChatAnswer) -> Iterator[str]:
        prompt, images = prompts.encode(llm.tokenizer, messages)
        channels = ReasoningChannels.of(llm.tokenizer, prompt)
        return local.stream(llm, prompt, sampling, answer, channels, images)

    return settings.get("model"), source


def _remote(settings: Settings) -> tuple[str, Source]:
    keys = settings.get("api-key")
    sampling = {s.field: settings.get(s.key) for s in SAMPLING if s.key in settings}
    model = settings.get("model") if "model" in settings else None
    server = remote.Server(settings.get("url"), keys[0] if keys else None, model, sampling)
    return server.model, server.stream


def _converse(source: Source, opening: Messages, images: Messages) -> None:
    """Answer line by line; the first message of a conversation has the images."""
    messages = list(opening)
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(opening)
            console.note("The conversation is forgotten.")
        elif line.startswith("/"):
            console.note(HELP)
        elif line:
            first = len(messages) == len(opening)
            _answer(source, messages, line, images if first else [])


def _answer(source: Source, messages: Messages, question: str, images: Messages) -> None:
    """Stream one answer; a question that fails is taken out of the conversation again."""
    content = [*images, {"type": "text", "text": question}] if images else question
    messages.append({"role": "user", "content": content})
    answer = local.ChatAnswer()
    texts = source(messages, answer)
    try:
        for text in wrapped(texts, console.out.width) if console.out.is_terminal else texts:
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except TokenmillError as error:
        messages.pop()
        console.fail(str(error))
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    console.note(answer.summary())
    messages.append({"role": "assistant", "content": answer.text})


def wrapped(texts: Iterable[str], width: int) -> Iterator[str]:
    """The texts, with a line's end in place of the space before each word that does not fit."""
    column, gap, word = 0, "", ""
    for char in chain(chain.from_iterable(texts), "\0"):
        if char != "\0" and not char.isspace():
            word += char
            continue
        if word:
            size = cell_len(gap + word)
            fits = not (column and gap) or column + size <= width
            column = column + size if fits else cell_len(word)
            yield gap + word if fits else f"\n{word}"
            gap, word = "", ""
        if char == "\n":
            yield "\n"
            column, gap = 0, ""
        elif char != "\0":
            gap += char


def _read_line() -> str | None:
    """The next line; None at the end of the input."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        import readline  # noqa: F401  (gives input() line editing and a history)
    while True:
        try:
            return input("> " if at_terminal else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            console.note("\n/exit or Ctrl-D leaves.")

"""How a model marks its reasoning and writes its tool calls: decided here, once for a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.core.types import FreeText, ModelLoadError, ReasoningMarks
from tokenmill.text.harmony import HarmonyTokens
from tokenmill.text.parsers import (
    detect_reasoning,
    detect_tool_parser,
    ends_reasoning,
    opens_reasoning,
)
from tokenmill.text.tokenizer import Tokenizer

_TAGS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class OutputStyle:
    thinks: bool = False  # a <think> block comes before the answer
    think_ids: tuple[int, int] | None = None  # its tags, where each is one token
    think_end: tuple[int, ...] = ()  # the last tag, as the tokenizer spells it
    tools: str | None = None  # a key of TOOL_PARSERS, or None where the style is not known
    harmony: HarmonyTokens | None = None  # messages on channels, with calls of their own

    @property
    def reasons(self) -> bool:
        return self.thinks or self.harmony is not None

    def chat_marks(self, prompt: str) -> ReasoningMarks | None:
        """How the reasoning after a chat's prompt is found and ended; None where there is none."""
        if self.harmony is not None:
            return self.harmony.marks((self.harmony.until_answer,))
        return self._block_marks(0 if opens_reasoning(prompt) else None)

    def text_marks(self, text: str, token_ids: Sequence[int]) -> ReasoningMarks | None:
        """The same for a prompt that is no chat, and may end within a <think> block."""
        if self.harmony is not None or self.think_ids is None:
            is_open = text.rfind(_TAGS[0]) > text.rfind(_TAGS[1])
            return self.chat_marks(_TAGS[0] if is_open else "")
        opened, size = None, len(token_ids)
        last = next((i for i in range(size - 1, -1, -1) if token_ids[i] in self.think_ids), None)
        if last is not None and token_ids[last] == self.think_ids[0]:
            opened = size - 1 - last
        return self._block_marks(opened)

    def _block_marks(self, opened: int | None) -> ReasoningMarks | None:
        """Those of a <think> block, of which the prompt has so many tokens, or no beginning."""
        if not self.thinks:
            return None
        texts = None if self.think_ids is not None else _TAGS
        return ReasoningMarks((self.think_end,), opened, self.think_ids, texts)

    def free_text(self, prompt: str, continued: bool, stop_ids: tuple[int, ...]) -> FreeText | None:
        """The <think> block after this prompt, before a constraint; None where there is none."""
        opened = opens_reasoning(prompt)
        if self.think_ids is None or ends_reasoning(prompt) or (continued and not opened):
            return None
        first, last = self.think_ids
        return FreeText(last, opening=None if opened else first, banned=stop_ids)


def resolve_style(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> OutputStyle:
    """The style of a model by two settings, of which "auto" asks its chat template."""
    template = tokenizer.chat_template
    harmony = _harmony(tokenizer, tool_parser, reasoning_parser)
    if harmony is not None:
        return OutputStyle(harmony=harmony)
    tools: str | None = tool_parser
    if tool_parser == "auto":
        with_tools = tokenizer.tools_template
        tools = detect_tool_parser(with_tools) if knows_tools(with_tools) else "hermes"
    thinks = reasoning_parser == "think"
    if reasoning_parser == "auto":
        thinks = detect_reasoning(template) == "think"
    first, last = (tokenizer.token_to_id(tag) for tag in _TAGS)
    single = thinks and first is not None and last is not None
    ids = (first, last) if single and first is not None and last is not None else None
    end = tuple(tokenizer.encode(_TAGS[1], False)) if thinks else ()
    return OutputStyle(thinks, ids, end, None if tools == "none" else tools)


def knows_tools(chat_template: str | None) -> bool:
    """True when the template renders tool definitions itself."""
    return "tools" in (chat_template or "")


def _harmony(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> HarmonyTokens | None:
    asked = "harmony" in (tool_parser, reasoning_parser)
    written = "<|channel|>" in (tokenizer.chat_template or "")
    if not asked and not (written and reasoning_parser == "auto"):
        return None
    tokens = HarmonyTokens.of(tokenizer)
    if tokens is None and asked:
        raise ModelLoadError(
            "the harmony parser needs a tokenizer with the tokens <|start|>, <|channel|>, "
            "<|message|>, <|constrain|>, <|end|>, <|call|> and <|return|>; leave --tool-parser and "
            "--reasoning-parser at auto"
        )
    return tokens

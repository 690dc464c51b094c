"""Shows the answers of models that reason on a channel of its own, as GPT-OSS does."""

from __future__ import annotations

from tokenmill.text.detokenize import Detokenizer
from tokenmill.text.harmony import HarmonyReader, HarmonyTokens
from tokenmill.text.output_style import resolve_style
from tokenmill.text.parsers import ContentDelta, ReasoningDelta
from tokenmill.text.tokenizer import Tokenizer


class ReasoningChannels:
    """Tells the reasoning of a model that writes on channels from its answer."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt: list[int]) -> ReasoningChannels | None:
        """A reader of what follows a prompt; None where the model has no channels."""
        tokens = resolve_style(tokenizer, "auto", "auto").harmony
        return None if tokens is None else cls(tokenizer, tokens, prompt)

    def __init__(self, tokenizer: Tokenizer, tokens: HarmonyTokens, prompt: list[int]) -> None:
        self._reader = HarmonyReader(Detokenizer(tokenizer), tokenizer, tokens, prompt)
        self._reasons = False

    def read(self, token_ids: list[int], finish_reason: str | None) -> tuple[str, str]:
        """(the text to be shown, the answer's part of it) of these tokens."""
        events = self._reader.push(token_ids)
        if finish_reason is not None:
            events += self._reader.finish(finish_reason == "length")
        shown = kept = ""
        for event in events:
            if isinstance(event, ReasoningDelta):
                shown, self._reasons = shown + event.text, True
            elif isinstance(event, ContentDelta):
                shown += ("\n\n" if self._reasons else "") + event.text
                kept, self._reasons = kept + event.text, False
        return shown, kept

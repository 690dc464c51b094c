"""tokenmill generate."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from tokenmill import console
from tokenmill.cli.chat import local_chat as local
from tokenmill.core.flags import setting
from tokenmill.core.types import SamplingParams
from tokenmill.settings import SAMPLING, Settings, SettingsError
from tokenmill.settings.options import command
from tokenmill.settings.shared import JsonOption

DEFAULTS = {"max-tokens": 256, "temperature": 0.7}


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    chat: bool = setting(False, "Put the prompt through the model's chat template.")
    system: str | None = setting(None, "System prompt of the conversation.")


PANELS = {
    "Output": (GenerateOptions, JsonOption),
    "Sampling": SAMPLING,
    **local.PANELS,
}


def register(app: typer.Typer) -> None:
    common = ("chat", "system", "json", *local.COMMON)
    command(app, "generate", PANELS, defaults=DEFAULTS, common=common)(generate)


def generate(
    settings: Settings,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from stdin.")
    ],
) -> None:
    """Continue a text, or answer it with --chat, in this process.

    tokenmill generate "The capital of France is" --temperature 0
    tokenmill generate --chat "Write a haiku about rivers" --seed 7
    cat notes.txt | tokenmill generate - --max-tokens 64 --json
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise SettingsError("PROMPT is empty: give the text to continue")
    sampling = settings.build(SamplingParams)
    llm = local.load_llm(settings)
    if settings.get("chat") or "system" in settings:
        token_ids = llm.tokenizer.encode_chat(messages(settings.get("system"), text))
    else:
        token_ids = llm.tokenizer.encode(text)
    answer = local.ChatAnswer()
    as_json = settings.get("json")
    for piece in local.stream(llm, token_ids, sampling, answer):
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if as_json:
        sys.stdout.write(json.dumps(_report(text, answer), ensure_ascii=False))
    sys.stdout.write("\n")
    console.note(answer.summary())
    if answer.finish_reason is None:
        raise KeyboardInterrupt


def messages(system: str | None, user: str) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": user}]


def _report(prompt: str, answer: local.ChatAnswer) -> dict[str, object]:
    return {
        "prompt": prompt,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_cached_tokens": answer.num_cached_tokens,
        "num_output_tokens": answer.times.num_tokens,
        "ttft_ms": round(answer.times.ttft_ms or 0.0, 2),
        "tok_s": round(answer.tok_s, 2),
    }

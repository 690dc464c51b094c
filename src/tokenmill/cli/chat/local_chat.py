"""Loads a model into this process for `chat` and `generate`, and streams its answers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenmill import console
from tokenmill.console import fetch
from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from tokenmill.core.gpus import check_device
from tokenmill.core.images import ImageSpan
from tokenmill.core.metrics import RequestTimes
from tokenmill.core.types import SamplingParams
from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MODEL,
    PARALLEL,
    SCHEDULER,
    SERVER,
    Settings,
    only,
    without,
)

if TYPE_CHECKING:
    from tokenmill.cli.chat.chat_channels import ReasoningChannels
    from tokenmill.llm import LLM

LOCAL_MODEL = without(MODEL, "weights-seed")  # LLM() seeds no weights
COMMON = (  # flags of --help, beside those of the command itself
    *("model", "max-tokens", "temperature", "top-p", "top-k", "seed", "stop", "ignore-eos"),
    *("thinking-token-budget", "device", "dtype", "random-weights", "max-model-len"),
    *("kv-cache-memory", "num-threads", "tp", "mtp"),
)
PANELS = {
    "Model": (*LOCAL_MODEL, *only(SERVER, "chat-template")),
    "KV cache": CACHE,
    "Scheduler": SCHEDULER,
    "Execution": EXECUTION,
    "Ranks": PARALLEL,
}


@dataclass(slots=True)
class ChatAnswer:
    """One answer: its text so far, and what it cost."""

    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    times: RequestTimes = field(default_factory=lambda: RequestTimes(time.monotonic_ns()))

    @property
    def tok_s(self) -> float:
        """Output tokens per second, the time to the first one included."""
        elapsed_ms = self.times.e2e_ms
        return 1000 * self.times.num_tokens / elapsed_ms if elapsed_ms else 0.0

    def summary(self) -> str:
        """One line with length, speed and time to the first token."""
        ttft = self.times.ttft_ms or 0.0
        ended = "" if self.finish_reason else ", stopped"
        count = self.times.num_tokens
        return f"{count} tokens, {self.tok_s:.1f} tok/s, first after {ttft:.0f} ms{ended}"


def load_llm(settings: Settings) -> LLM:
    """Download and load the model that the settings name, with progress on stderr."""
    config = settings.build(ModelConfig)
    check_device(config.device)
    path = fetch(config.model)
    with console.progress("Loading weights", size_in_bytes=True) as update:
        from tokenmill.llm import LLM

        return LLM(
            str(path),
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            random_weights=config.random_weights,
            num_threads=config.num_threads,
            draft=config.draft,
            chat_template=settings.get("chat-template"),
            cache=settings.build(CacheConfig),
            scheduler=settings.build(SchedulerConfig),
            execution=settings.build(ExecutionConfig),
            parallel=settings.build(ParallelConfig),
            progress=update,
        )


def stream(
    llm: LLM,
    token_ids: list[int],
    sampling: SamplingParams,
    answer: ChatAnswer,
    channels: ReasoningChannels | None = None,
    images: tuple[ImageSpan, ...] = (),
) -> Iterator[str]:
    """Text as it is generated; Ctrl-C ends the answer between two steps, never inside one.

    With `channels` the text is read from the tokens, and reasoning is shown and not kept.
    """
    answer.num_prompt_tokens = len(token_ids)
    with _interrupt_flag() as interrupted:
        for text, output in llm.stream(token_ids, sampling, images):
            completion = output.outputs[0]
            new_ids = completion.token_ids[answer.times.num_tokens :]
            if new_ids:
                answer.times.record(time.monotonic_ns(), len(new_ids))
            answer.num_cached_tokens = output.num_cached_tokens
            answer.finish_reason = completion.finish_reason
            shown = kept = text
            if channels is not None:
                shown, kept = channels.read(new_ids, completion.finish_reason)
            answer.text += kept
            yield shown
            if interrupted.is_set():
                return


@contextmanager
def _interrupt_flag() -> Iterator[threading.Event]:
    """Turn Ctrl-C into a flag meanwhile."""
    interrupted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)

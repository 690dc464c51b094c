"""Drive an Engine to the end of a set of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.images import ImageSpan
from tokenmill.core.requests import Engine, Generate, Request, RequestOutput
from tokenmill.core.types import GrammarVocab, SamplingParams, TokenLogprobs
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.kernels import cpu_kernels

# README: how far log-probabilities may differ without compiled kernels
LOGPROB_BOUND = {"fp32": 1e-3, "int8": 0.3}


@dataclass
class Answer:
    """All that one request was told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    terminals: list[RequestOutput] = field(default_factory=list)
    num_cached_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs came twice"
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self.terminals.append(output)


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """The same answers: to the last bit, or without compiled kernels (fp32) within a bound."""
    assert [_words(a) for a in answers] == [_words(a) for a in expected]
    if cpu_kernels():
        assert [a.logprobs for a in answers] == [a.logprobs for a in expected]
        assert [a.prompt_logprobs for a in answers] == [a.prompt_logprobs for a in expected]
    for answer, other in zip(answers, expected, strict=True):
        for mine, theirs in zip(answer.logprobs, other.logprobs, strict=True):
            pairs = zip(mine.logprobs, theirs.logprobs, strict=True)
            assert all(abs(a - b) <= LOGPROB_BOUND["fp32"] for a, b in pairs), (mine, theirs)


def _words(answer: Answer) -> object:
    """Its tokens and how it ended."""
    ends = [(end.finish_reason, end.stop_reason) for end in answer.terminals]
    return answer.token_ids, ends


def build(
    folder: Path,
    dtype: str,
    *,
    chunked: bool,
    prefix_cache: bool,
    num_blocks: int,
    overlap: bool = False,
    mtp: int = 0,
    draft: Path | None = None,
    vocab: GrammarVocab | None = None,
    max_model_len: int | None = None,
    batch_invariant: bool = False,
    encoder_patches: int | None = None,
    offloading: str | None = None,
    encoder_share: int | None = None,
) -> BuiltEngine:
    """An engine of the golden tests."""
    return build_engine(
        resolve_setup(
            Setup(
                ModelConfig(
                    model=str(folder),
                    dtype=dtype,  # type: ignore[arg-type]
                    max_model_len=max_model_len,
                    draft=draft and str(draft),
                    num_threads=None if cpu_kernels() else 1,  # torch's threads wait for each other
                ),
                CacheConfig(
                    num_blocks=num_blocks, prefix_cache=prefix_cache, offloading=offloading
                ),
                SchedulerConfig(
                    max_num_batched_tokens=48 if chunked else 512,
                    max_num_seqs=16,
                    chunked_prefill=chunked,
                    encoder_patches=encoder_patches,
                    encoder_share=encoder_share,
                ),
                ExecutionConfig(
                    overlap=overlap,
                    batch_invariant=batch_invariant,
                    mtp=mtp,
                    mtp_adaptive=False,
                ),
            )
        ),
        vocab,
    )


def complete(
    engine: Engine,
    prompts: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    after_step: Callable[[int], None] | None = None,
    images: Sequence[tuple[ImageSpan, ...]] | None = None,
) -> list[Answer]:
    """Submit all prompts at once and step until each has its one terminal output."""
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    answers = {str(i): Answer() for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        own = images[i] if images else ()
        engine.submit(Request(str(i), Generate(list(prompt), params[i], images=own), arrival_ns=i))
    steps = 0
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id].add(output)
        steps += 1
        if after_step is not None:
            after_step(steps)
    for answer in answers.values():
        assert len(answer.terminals) == 1
    return list(answers.values())

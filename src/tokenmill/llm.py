"""The offline Python API: prompts in, completions out, over an in-process engine."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from tqdm import tqdm

from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.images import ImageSpan
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import (
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    TokenLogprobs,
    TokenmillError,
    no_room,
)
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.models.checkpoints.store import resolve
from tokenmill.settings.vllm_names import DTYPES, as_fields
from tokenmill.text.detokenize import Detokenizer, StopTable
from tokenmill.text.output_style import resolve_style
from tokenmill.text.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)
_COMPUTE_TYPES = ("auto", "fp32", "int8", "bf16", "fp8")
MAX_CHOICES = 128  # of one prompt: their seeds follow each other

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt_token_ids": [...]}
Message = Mapping[str, Any]
C = TypeVar("C", CacheConfig, SchedulerConfig, ExecutionConfig, ParallelConfig)


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        return sum(entry.logprobs[0] for entry in self.logprobs)


@dataclass(slots=True)
class GenerationOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    error: str | None = None  # it ended by this


@dataclass(slots=True)
class _Stream:
    """A submitted sequence: where its tokens go and how they become text."""

    owner: GenerationOutput
    completion: CompletionOutput
    detokenizer: Detokenizer


class LLM:
    """A model loaded in this process.

    >>> LLM("smollm2").generate(["The capital of France is"], SamplingParams(temperature=0))
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        random_weights: bool = False,
        num_threads: int | None = None,
        draft: str | None = None,
        chat_template: str | None = None,
        generation_config: str = "auto",
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool | None = None,
        seed: int | None = None,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        execution: ExecutionConfig | None = None,
        parallel: ParallelConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
        **vllm: Any,
    ) -> None:
        """Load a model; what is named here wins over the same field of `cache` and `scheduler`.

        `seed` is that of answers whose parameters have none. `vllm` are other arguments of vLLM's
        LLM, such as tensor_parallel_size.
        """
        others = as_fields(vllm)
        config = ModelConfig(
            model=str(resolve(model)),
            dtype=_one_of("dtype", DTYPES.get(dtype, dtype), *_COMPUTE_TYPES),
            device=_one_of("device", device, "auto", "cpu", "cuda"),
            random_weights=random_weights,
            max_model_len=max_model_len,
            num_threads=num_threads,
            draft=draft,
        )
        self.path = Path(config.model)
        self.tokenizer: Tokenizer = load_tokenizer(config.model, chat_template)
        wanted = _one_of("generation_config", generation_config, "auto", "none", "vllm")
        self._defaults = self.tokenizer.sampling_defaults(wanted)
        setup = Setup(
            config,
            _override(
                cache or CacheConfig(),
                memory_bytes=kv_cache_memory_bytes,
                prefix_cache=enable_prefix_caching,
                **others.get(CacheConfig, {}),
            ),
            _override(
                scheduler or SchedulerConfig(max_waiting=2**31),  # offline everything may queue
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                **others.get(SchedulerConfig, {}),
            ),
            _override(execution or ExecutionConfig(), **others.get(ExecutionConfig, {})),
            _override(parallel or ParallelConfig(), **others.get(ParallelConfig, {})),
        )
        self.built = build_engine(
            resolve_setup(setup), self.tokenizer.grammar_vocab(), progress=progress
        )
        gc.freeze()  # the loaded model is not garbage; do not scan it on every collection
        self.engine = self.built.engine
        self._style = resolve_style(self.tokenizer, "auto", "auto")
        self._seed = seed
        self._ids, self._noted_budget = itertools.count(), False
        self._streams: dict[str, _Stream] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[GenerationOutput]:
        """Complete every prompt; outputs come in the order of the prompts.

        `use_tqdm` draws a progress bar on a terminal.
        """
        return self._generate(_as_batch(prompts), sampling_params, use_tqdm, priority, True)

    def _generate(
        self,
        batch: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        continues: bool,
    ) -> list[GenerationOutput]:
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _per_prompt(given, len(batch))
        priorities = priority if priority is not None else [0] * len(batch)
        tokenized = [self._tokenize(prompt) for prompt in batch]
        for (_, token_ids), sampling in zip(tokenized, params, strict=True):
            self._check_fits(token_ids, sampling)
        owners = [
            self._submit(text, token_ids, sampling, rank, continues)
            for (text, token_ids), sampling, rank in zip(tokenized, params, priorities, strict=True)
        ]
        self._drive(owners, use_tqdm)
        return owners

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[GenerationOutput]:
        """Answer one conversation, or a list of them, through the model's chat template."""
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if many else [messages]
        extra = dict(chat_template_kwargs or {})
        prompts: list[Prompt] = [
            self.tokenizer.encode_chat([dict(m) for m in conversation], tools=tools, **extra)
            for conversation in conversations
        ]
        return self._generate(prompts, sampling_params, use_tqdm, None, False)

    def close(self) -> None:
        """Write out KV that is on its way to disk, and end the other ranks, where there are any.

        Both also happen when this process ends.
        """
        self.built.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """What prompts without parameters get: of a model's generation_config.json."""
        return SamplingParams(**self._defaults)  # type: ignore[arg-type]

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def stream(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        images: tuple[ImageSpan, ...] = (),
    ) -> Iterable[tuple[str, GenerationOutput]]:
        """Complete one prompt, yielding (new text, output so far) after every step."""
        self._check_fits(list(token_ids), sampling)
        single = replace(sampling, n=1)
        owner = self._submit(None, list(token_ids), single, 0, False, images)
        completion = owner.outputs[0]
        shown = 0
        try:
            while not owner.finished:
                self.step()
                _check_failed(owner)
                yield completion.text[shown:], owner
                shown = len(completion.text)
        finally:
            if not owner.finished:
                self.abort(owner)

    def submit(self, prompt: Prompt, sampling: SamplingParams, priority: int) -> GenerationOutput:
        """Queue one prompt; steps add to its output."""
        text, token_ids = self._tokenize(prompt)
        self._check_fits(token_ids, sampling)
        return self._submit(text, token_ids, sampling, priority, True)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return None, list(prompt["prompt_token_ids"])
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, list(prompt)  # type: ignore[arg-type]

    def _check_fits(self, token_ids: list[int], sampling: SamplingParams) -> None:
        limit = self.built.max_model_len
        if len(token_ids) >= limit:
            raise InvalidRequestError(no_room(len(token_ids), limit), "prompts")

    def _submit(
        self,
        text: str | None,
        token_ids: list[int],
        sampling: SamplingParams,
        priority: int,
        continues: bool,
        images: tuple[ImageSpan, ...] = (),
    ) -> GenerationOutput:
        """Queue a prompt's n sequences; with a seed, each sibling gets its own."""
        number = next(self._ids)
        owner = GenerationOutput(str(number), text, token_ids, [])
        if sampling.seed is None and self._seed is not None:
            sampling = replace(sampling, seed=self._seed + number * MAX_CHOICES)
        sampling = self._with_marks(sampling, text, token_ids, continues)
        stops = StopTable.of(sampling.stop)
        for index in range(sampling.n):
            seed = None if sampling.seed is None else sampling.seed + index
            single = replace(sampling, n=1, seed=seed)
            completion = CompletionOutput(index, logprobs=None if single.logprobs is None else [])
            detokenizer = Detokenizer(
                self.tokenizer,
                skip_special_tokens=single.skip_special_tokens,
                stop=stops,
                include_stop_str=single.include_stop_str_in_output,
                min_tokens=single.min_tokens,
                continues=continues,
            )
            request_id = f"{number}-{index}"
            owner.outputs.append(completion)
            self._streams[request_id] = _Stream(owner, completion, detokenizer)
            now = time.monotonic_ns()
            request: Request = Request(
                request_id,
                Generate(token_ids, single, images=images),
                priority=priority,
                arrival_ns=now,
            )
            self.engine.submit(request)
        return owner

    def _with_marks(
        self, sampling: SamplingParams, text: str | None, token_ids: list[int], continues: bool
    ) -> SamplingParams:
        """With what a budget of reasoning is counted and ended by, where there is one."""
        if sampling.thinking_token_budget is None or sampling.reasoning is not None:
            return sampling
        if text is None:
            known = [token for token in token_ids if token < self.tokenizer.vocab_size]
            text = self.tokenizer.decode(known, skip_special_tokens=False)
        style = self._style
        marks = style.text_marks(text, token_ids) if continues else style.chat_marks(text)
        if marks is None and not self._noted_budget:
            self._noted_budget = True
            _log.warning("this model does not reason: thinking_token_budget has no effect")
        return replace(sampling, reasoning=marks)

    def _drive(self, owners: list[GenerationOutput], use_tqdm: bool) -> None:
        """Step until all are finished; on an exception or Ctrl-C what is left is aborted."""
        hidden = None if use_tqdm else True  # None: drawn on a terminal only
        try:
            with tqdm(total=len(owners), desc="Prompts", disable=hidden) as bar:
                while (done := sum(owner.finished for owner in owners)) < len(owners):
                    bar.update(done - bar.n)
                    self.step()
                    for owner in owners:
                        _check_failed(owner)
                bar.update(len(owners) - bar.n)
        except BaseException:
            for owner in owners:
                self.abort(owner)
            raise

    def step(self) -> None:
        for output in self.engine.step():
            stream = self._streams.get(output.request_id)
            if stream is not None:
                self._take(stream, output)

    def _take(self, stream: _Stream, output: RequestOutput) -> None:
        """Add one step's tokens to a completion, and end it at a stop string."""
        owner, completion, detokenizer = stream.owner, stream.completion, stream.detokenizer
        owner.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            owner.prompt_logprobs = output.prompt_logprobs
        completion.text += detokenizer.push(output.token_ids)
        kept = detokenizer.num_tokens - len(completion.token_ids)
        completion.token_ids += output.token_ids[:kept]
        if completion.logprobs is not None and output.logprobs is not None:
            completion.logprobs += output.logprobs[:kept]
        if detokenizer.stop_reason is not None:
            if output.finish_reason is None:
                self.engine.abort(output.request_id)
            self._finish(stream, output.request_id, FinishReason.STOP, detokenizer.stop_reason)
        elif output.finish_reason is not None:
            if output.finish_reason in (FinishReason.REJECT, FinishReason.ERROR):
                owner.error = output.error or f"the engine answered {output.finish_reason}"
            self._finish(stream, output.request_id, output.finish_reason, output.stop_reason)

    def _finish(
        self, stream: _Stream, request_id: str, reason: FinishReason, why: int | str | None
    ) -> None:
        del self._streams[request_id]
        stream.completion.text += stream.detokenizer.finish()
        stream.completion.finish_reason = str(reason)
        stream.completion.stop_reason = why
        stream.owner.finished = all(c.finish_reason for c in stream.owner.outputs)

    def abort(self, owner: GenerationOutput) -> None:
        """End what is under way of a prompt."""
        for request_id in [key for key, s in self._streams.items() if s.owner is owner]:
            self.engine.abort(request_id)
            del self._streams[request_id]


def _check_failed(owner: GenerationOutput) -> None:
    if owner.error is not None:
        raise TokenmillError(owner.error)


def _override(config: C, **named: Any) -> C:
    """The config with every field that was named, None meaning not."""
    return replace(config, **{key: value for key, value in named.items() if value is not None})


def _one_of(name: str, value: str, *known: str) -> Any:
    if value not in known:
        raise InvalidRequestError(f"{name} must be one of {', '.join(known)}, got {value!r}", name)
    return value


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, a mapping or a flat list of ints is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"sampling_params has {len(params)} entries for {count} prompts", "sampling_params"
        )
    return list(params)

"""From a validated API call to engine requests: prompts, sampling parameters, limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import msgspec

from tokenmill.api.errors import context_exceeded
from tokenmill.api.protocol.decoding import IgnoredFields
from tokenmill.api.protocol.images import load_images, mark_images, wanted_images
from tokenmill.api.protocol.output import (
    MakeReader,
    Prompt,
    effort_budget,
    harmony_effort,
    limited,
    plan_output,
    settle_reasoning,
)
from tokenmill.api.protocol.requests import (
    INT64_MAX,
    SAMPLING_FIELDS,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_IN_MESSAGES,
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    PixelBounds,
    TextRequest,
    TokenizeRequest,
)
from tokenmill.api.protocol.structured import structured_output
from tokenmill.api.protocol.tools import ToolUse, join_turns, plan_tool_use, write_tools
from tokenmill.core.config import ServerConfig
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import (
    InvalidRequestError,
    ModelLoadError,
    SamplingParams,
    StructuredOutput,
    TokenRules,
    no_room,
)
from tokenmill.sched.cache.blocks import U64
from tokenmill.text.chat_template import ChatTemplate, parse_date
from tokenmill.text.harmony import one_call_per_message
from tokenmill.text.output_style import knows_tools, resolve_style
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.loader import ImageLoader, MakeRoom, boundless
from tokenmill.vision.placing import place_images
from tokenmill.workers.messages import ModelFacts

_log = logging.getLogger(__name__)

LONG_TEXT_CHARS = 20_000  # longer texts are tokenised on another thread
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions
MAX_CHOICES = 2048  # of one call
_RESERVED_KWARGS = {
    "self",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
}


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One API call, ready for the engine: requests[i * n + j] is choice j of prompts[i]."""

    job_id: str
    created: int
    prompts: list[Prompt]
    requests: list[Request]
    n: int
    return_token_ids: bool
    continues: bool = False  # the answer goes on in the middle of the prompt's last text
    prompt_logprobs: int | None = None  # how many alternatives the answer shows, if any
    echo_only: bool = False  # the prompt's logprobs are wanted, the sampled token is not
    make_reader: MakeReader | None = None  # None: all text is content
    include_receipt: bool = False
    tokens_as_ids: bool = False  # in log-probabilities
    shows_reasoning: bool = True

    @property
    def hash_inputs(self) -> list[U64]:
        """The prompts of the requests, as the router reads them."""
        return [self.prompt_of(index).hash_input for index in range(len(self.requests))]

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Keywords of JSON schemas that no answer is checked against."""
        structured = self.requests[0].task.sampling.structured
        return () if structured is None else structured.unenforced

    @property
    def splits_message(self) -> bool:
        """True where an answer may have other parts than content."""
        return self.make_reader is not None

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]


class Preparer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: Callable[[], ModelFacts],
        config: ServerConfig,
        images: ImageLoader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._images = images  # None: the model takes text only
        self._facts_now = facts
        self._config = config
        self._defaults = tokenizer.sampling_defaults(config.generation_config)
        self._style = resolve_style(tokenizer, config.tool_parser, config.reasoning_parser)
        if config.max_thinking_tokens is not None and not self._style.reasons:
            _log.info("this model does not reason: --max-thinking-tokens has no effect")
        if config.template_date is not None:
            parse_date(config.template_date, "--template-date")
        self.ignored = IgnoredFields()
        self._image_room: MakeRoom = boundless

    def within(self, image_room: MakeRoom) -> Preparer:
        own = copy(self)
        own._image_room = image_room
        return own

    @property
    def _facts(self) -> ModelFacts:
        """Those of now: a worker that comes later may have less room."""
        return self._facts_now()

    @property
    def max_model_len(self) -> int:
        return self._facts.max_model_len

    async def chat(
        self, call: ChatCompletionRequest, prefix: str = "chatcmpl-", clamps: bool = False
    ) -> PreparedCall:
        """Render the messages, tokenise them and constrain the answer as tools require.

        The job's id begins with `prefix`. `clamps`: a max_tokens over what is left of the context
        is what is left of it.
        """
        self._check_choices(1, call.n or 1)
        settle_reasoning(call)
        tools = plan_tool_use(call, self._style, self.tokenizer)
        if tools is not None and tools.is_loose:
            self.ignored.note(["tools[].function.strict"])
        plan = plan_output(
            self._style,
            self.tokenizer,
            await self._chat_prompt(call, tools),
            tools,
            structured_output(call),
            bool(call.continue_final_message),
        )
        wanted = call.max_completion_tokens or call.max_tokens
        if clamps and wanted is not None:
            wanted = min(wanted, max(self.max_model_len - len(plan.prompt.token_ids), 1))
        if call.top_logprobs and not call.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        sampling = self._sampling(
            call,
            max_tokens=self._max_tokens(len(plan.prompt.token_ids), wanted, None, "messages"),
            logprobs=(call.top_logprobs or 0) if call.logprobs else None,
            prompt_logprobs=_prompt_logprobs(call),
            structured=plan.structured,
        )
        stop_ids = (*sampling.stop_token_ids, *plan.stop_ids)
        sampling = replace(sampling, stop_token_ids=tuple(dict.fromkeys(stop_ids)))
        by_effort = effort_budget(call.reasoning_effort, self.tokenizer.chat_template or "")
        sampling = limited(sampling, plan.marks, by_effort, self._config.max_thinking_tokens)
        job = self._job(prefix, call, [plan.prompt], [sampling])
        continues = bool(call.continue_final_message)
        return replace(
            job,
            continues=continues,
            make_reader=plan.make_reader,
            shows_reasoning=call.include_reasoning is not False,
        )

    async def count_chat(self, call: ChatCompletionRequest) -> int:
        tools = plan_tool_use(call, self._style, self.tokenizer)
        return len((await self._chat_prompt(call, tools)).token_ids)

    async def _chat_prompt(self, call: ChatCompletionRequest, tools: ToolUse | None) -> Prompt:
        prompt = await self.chat_prompt(
            call,
            tools.definitions if tools is not None else [],
            self._template_kwargs(call),
            call.mm_processor_kwargs,
            self._client_template(call.chat_template),
        )
        return self._truncated(prompt, call, call.max_completion_tokens or call.max_tokens)

    def _client_template(self, source: str | None) -> ChatTemplate | None:
        """The template that a call brings, if the operator allows it."""
        if source is None:
            return None
        if not self._config.client_chat_templates:
            message = "chat_template: this server takes none from clients; leave it out, or start "
            message += "the server with --client-chat-templates, or with --chat-template FILE"
            raise InvalidRequestError(message, "chat_template")
        try:
            return ChatTemplate(source, "chat_template")
        except ModelLoadError as error:
            raise InvalidRequestError(str(error), "chat_template") from None

    def _truncated(self, prompt: Prompt, call: TextRequest, max_tokens: int | None) -> Prompt:
        """The last tokens of a prompt, as many as the call asks for."""
        size = call.truncate_prompt_tokens
        if size is None:
            return prompt
        if size < 0:
            size = max(self.max_model_len - (max_tokens or 1), 1)
        if size >= len(prompt.token_ids):
            return prompt
        if prompt.images or size == 0:
            what = "a prompt with images cannot be cut" if prompt.images else "0 leaves no prompt"
            raise InvalidRequestError(
                f"truncate_prompt_tokens: {what}; leave it out, or send more",
                "truncate_prompt_tokens",
            )
        token_ids = prompt.token_ids[-size:]
        return Prompt.of(self.tokenizer.decode(token_ids, skip_special_tokens=False), token_ids)

    async def chat_prompt(
        self,
        call: ChatCompletionRequest | TokenizeRequest,
        tools: list[dict[str, Any]],
        kwargs: dict[str, Any] | None,
        bounds: PixelBounds | None = None,
        template: ChatTemplate | None = None,
    ) -> Prompt:
        messages, loader = call.messages or [], self._images
        wanted = wanted_images(messages, bounds, loader)
        generates, continues = call.add_generation_prompt, call.continue_final_message
        text = self.render(messages, tools, generates, continues, kwargs, template)
        token_ids = await self.tokenize(text, bool(call.add_special_tokens))
        if loader is None:
            return Prompt.of(text, token_ids)
        images = await load_images(wanted, loader, self.max_model_len, self._image_room)
        return Prompt.of(text, *place_images(token_ids, images, loader.processor))

    async def completion(self, call: CompletionRequest) -> PreparedCall:
        if call.best_of is not None and call.best_of != (call.n or 1):
            raise InvalidRequestError(
                "best_of is only supported when it equals n; leave it out", "best_of"
            )
        if call.max_tokens == 0 and not call.echo:
            raise InvalidRequestError("max_tokens must be at least 1 without echo", "max_tokens")
        special = call.add_special_tokens is not False
        given = _split_prompts(call.prompt)
        self._check_choices(len(given), call.n or 1)
        prompts = [
            self._truncated(await self._prompt(prompt, special), call, call.max_tokens)
            for prompt in given
        ]
        self._check_placeholders(prompts)
        # An echo without new tokens still runs one step for the prompt's logprobs.
        wanted = max(call.max_tokens, 1) if call.max_tokens is not None else None
        structured, default = structured_output(call), COMPLETION_MAX_TOKENS
        limits = [self._max_tokens(len(p.token_ids), wanted, default, "prompt") for p in prompts]
        by_limit = {  # mostly one: to check its fields takes longer than a short prompt
            limit: self._sampling(
                call,
                max_tokens=limit,
                logprobs=call.logprobs,
                prompt_logprobs=_larger(
                    _prompt_logprobs(call), call.logprobs if call.echo else None
                ),
                structured=structured,
            )
            for limit in dict.fromkeys(limits)
        }
        samplings = [by_limit[limit] for limit in limits]
        marks = [self._style.text_marks(prompt.text, prompt.token_ids) for prompt in prompts]
        most = self._config.max_thinking_tokens
        samplings = [limited(s, m, None, most) for s, m in zip(samplings, marks, strict=True)]
        job = self._job("cmpl-", call, prompts, samplings)
        return replace(job, continues=True, echo_only=call.max_tokens == 0)

    def _check_placeholders(self, prompts: list[Prompt]) -> None:
        """400 for a text prompt with the token of an image, which it cannot have."""
        if self._images is None:
            return
        token_id = self._images.processor.token_id
        if any(token_id in prompt.token_ids for prompt in prompts):
            raise InvalidRequestError(
                f"prompt: token {token_id} stands for an image; send images to "
                "/v1/chat/completions",
                "prompt",
            )

    def _check_choices(self, num_prompts: int, n: int) -> None:
        """400 for a call that could not run even alone: waiting would not help."""
        num_choices = num_prompts * n
        limit, flag = min(self._choice_limits())
        if num_choices <= limit:
            return
        what = f"{num_prompts} prompts" if num_prompts > 1 else f"n {n}"
        if num_prompts > 1 and n > 1:
            what += f" times n {n}, {num_choices} answers,"
        raise InvalidRequestError(
            f"{what} can never run at once here: one call may ask for {limit} answers at most "
            f"({flag}); send several calls",
            "prompt" if num_prompts > 1 else "n",
        )

    def _choice_limits(self) -> list[tuple[int, str]]:
        """How many answers one call may ask for, each with where the number comes from."""
        config = self._config
        limits = (
            (MAX_CHOICES, "a fixed limit"),
            (config.max_concurrency, "--max-concurrency"),
            (config.max_concurrency_per_key, "--max-concurrency-per-key"),
            (self._facts.max_waiting, "--max-queue"),
        )
        return [(limit, name) for limit, name in limits if limit is not None]

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; a long one does not hold up the other streams."""
        if len(text) < LONG_TEXT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]],
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        kwargs: dict[str, Any] | None,
        template: ChatTemplate | None = None,
    ) -> str:
        reserved = _RESERVED_KWARGS.intersection(kwargs or {})
        if reserved:
            names = ", ".join(sorted(reserved))
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {names}", "chat_template_kwargs"
            )
        conversation: list[dict[str, Any]] = msgspec.to_builtins(messages)
        for message in conversation:
            _drop_without_effect(message)
            mark_images(message)
        joined = None
        own = self.tokenizer.tools_template if tools else self.tokenizer.chat_template
        if self._style.harmony is not None:
            conversation = one_call_per_message(conversation)
        elif not knows_tools(template.source if template else own):
            written = write_tools(conversation, tools)
            if written != conversation and self._images is None:
                joined = join_turns(written)
            conversation, tools = written, []
        date = self._config.template_date

        def apply(messages: list[dict[str, Any]]) -> str:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=bool(continue_final_message),
                template=template,
                **({} if date is None else {"current_date": date}) | (kwargs or {}),
            )

        try:
            return apply(conversation)
        except InvalidRequestError:
            if joined is None:
                raise
            return apply(joined)

    def _template_kwargs(self, call: ChatCompletionRequest) -> dict[str, Any]:
        """The template's variables; what the template does not read is told as ignored."""
        source = self.tokenizer.chat_template or ""
        given: dict[str, Any] = {}
        if call.reasoning_effort is not None:
            given["reasoning_effort"] = call.reasoning_effort
        if self._style.harmony is not None:
            given |= harmony_effort(call)
        elif call.reasoning_effort == "none":
            given["enable_thinking"] = False
        if call.verbosity is not None:
            given["verbosity"] = call.verbosity
        for name in ("reasoning_effort", "verbosity"):
            used = name == "reasoning_effort" and self._style.reasons  # as a budget
            if name in given and not used and not any(key in source for key in given):
                self.ignored.note([name])
        return given | (call.chat_template_kwargs or {})

    def _note_ignored(self, call: TextRequest) -> None:
        """Tell once about the fields of a call that change nothing."""
        without = WITHOUT_EFFECT + (() if self._style.reasons else ("thinking_token_budget",))
        self.ignored.note(name for name in without if getattr(call, name) is not None)
        if not isinstance(call, ChatCompletionRequest):
            return
        for name in WITHOUT_EFFECT_IN_MESSAGES:
            path = f"messages[].{name}"
            if not self.ignored.is_noted(path) and any(
                getattr(message, name, None) is not None for message in call.messages
            ):
                self.ignored.note([path])

    async def _prompt(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        if isinstance(prompt, str):
            return Prompt.of(prompt, await self.tokenize(prompt, add_special_tokens))
        high = max(prompt, default=0)
        if high >= self._facts.vocab_size:
            raise InvalidRequestError(
                f"prompt: token {high} is not in the vocabulary of {self._facts.vocab_size}",
                "prompt",
            )
        known = [t for t in prompt if t < self.tokenizer.vocab_size]
        return Prompt.of(self.tokenizer.decode(known, skip_special_tokens=False), prompt)

    def _max_tokens(
        self, num_prompt: int, wanted: int | None, default: int | None, param: str
    ) -> int:
        """What is asked for or what is left of the context; refuses what does not fit."""
        limit = self._facts.max_model_len
        left = limit - num_prompt
        if num_prompt == 0:
            raise InvalidRequestError("the prompt has no tokens; send some text", param)
        if left < 1:
            raise context_exceeded(no_room(num_prompt, limit), param)
        if wanted is not None and wanted > left:
            raise context_exceeded(
                f"This model's maximum context length is {limit} tokens; the prompt has "
                f"{num_prompt} and max_tokens asks for {wanted} more",
                "max_tokens",
            )
        return min(wanted or default or left, left)

    def _sampling(
        self,
        call: TextRequest,
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        structured: StructuredOutput | None = None,
    ) -> SamplingParams:
        """The engine's sampling parameters; a field the caller left out keeps its default."""
        values = {spec.name: getattr(call, spec.name) for spec in SAMPLING_FIELDS}
        left_in = {name: value for name, value in values.items() if value is not None}
        given: dict[str, Any] = {**self._defaults, **left_in}
        self._check_tokens(call.stop_token_ids or [], "stop_token_ids")
        if (detection := call.repetition_detection) is not None:
            options = msgspec.to_builtins(detection)
            given["repetition_detection"] = {k: v for k, v in options.items() if v is not None}
        return SamplingParams(
            **given,
            logit_bias=self._logit_bias(call.logit_bias),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured=self._ruled(structured, call),
        )

    def _ruled(
        self, structured: StructuredOutput | None, call: TextRequest
    ) -> StructuredOutput | None:
        """The constraint with the tokens that the call allows or forbids."""
        if not call.bad_words and call.allowed_token_ids is None:
            return structured
        allowed = None
        if call.allowed_token_ids is not None:
            self._check_tokens(call.allowed_token_ids, "allowed_token_ids")
            allowed = tuple(sorted(set(call.allowed_token_ids)))
        # A word is forbidden at the start of a text, and after a space.
        spelled = [text for word in call.bad_words or () for text in (word, f" {word.lstrip()}")]
        encoded = [tuple(self.tokenizer.encode(text, False)) for text in spelled]
        rules = TokenRules(allowed, tuple(dict.fromkeys(filter(None, encoded))))
        return replace(structured or StructuredOutput("any"), rules=rules)

    def _logit_bias(self, bias: dict[str, float] | None) -> dict[int, float] | None:
        if not bias:
            return None
        for key in bias:
            if not (key.isascii() and key.isdigit()):
                raise InvalidRequestError(f"logit_bias: {key!r} is not a token id", "logit_bias")
        converted = {int(key): value for key, value in bias.items()}
        self._check_tokens(list(converted), "logit_bias")
        return converted

    def _check_tokens(self, token_ids: list[int], param: str) -> None:
        for token_id in token_ids:
            if token_id >= self._facts.vocab_size:
                size = self._facts.vocab_size
                raise InvalidRequestError(
                    f"{param}: token {token_id} is not in the vocabulary of {size}", param
                )

    def _job(
        self,
        prefix: str,
        call: TextRequest,
        prompts: list[Prompt],
        samplings: list[SamplingParams],
    ) -> PreparedCall:
        if call.priority and not self._config.client_priority:
            message = "priority: this server takes none from clients; leave it out, or start the "
            raise InvalidRequestError(message + "server with --client-priority", "priority")
        n = call.n or 1
        job_id = prefix + uuid4().hex
        now_ns = time.monotonic_ns()
        timeouts = [t for t in (call.timeout, self._config.request_timeout_s) if t is not None]
        requests: list[Request] = [
            Request(
                f"{job_id}-{p * n + j}",
                Generate(
                    prompt.token_ids,
                    _choice_sampling(sampling, j),
                    cache_salt=call.cache_salt or "",
                    images=prompt.images,
                ),
                priority=call.priority or 0,
                arrival_ns=now_ns,
                deadline_ns=now_ns + int(min(timeouts) * 1e9) if timeouts else None,
            )
            for p, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
            for j in range(n)
        ]
        token_ids = bool(call.return_token_ids)
        self._note_ignored(call)
        shown = call.prompt_logprobs
        return PreparedCall(
            job_id,
            int(time.time()),
            prompts,
            requests,
            n,
            token_ids,
            prompt_logprobs=shown,
            include_receipt=bool(call.include_receipt),
            tokens_as_ids=bool(call.return_tokens_as_token_ids),
        )


def _prompt_logprobs(call: TextRequest) -> int | None:
    if call.prompt_logprobs is not None and call.stream:
        raise InvalidRequestError(
            "prompt_logprobs is not available when stream is true; send stream false, or leave "
            "prompt_logprobs out",
            "prompt_logprobs",
        )
    return call.prompt_logprobs


def _larger(a: int | None, b: int | None) -> int | None:
    return max((k for k in (a, b) if k is not None), default=None)


def _drop_without_effect(message: dict[str, Any]) -> None:
    """Templates see what OpenAI defines: some write a whole call as JSON."""
    for name in WITHOUT_EFFECT_IN_MESSAGES:
        message.pop(name, None)
    for call in message.get("tool_calls") or ():
        call.pop("index")


def _choice_sampling(sampling: SamplingParams, choice: int) -> SamplingParams:
    if sampling.seed is None or choice == 0:
        return sampling
    seed = sampling.seed + choice
    return replace(sampling, seed=seed if seed <= INT64_MAX else seed - 2 * INT64_MAX - 2)


def _split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """OpenAI's four forms of a prompt: a string, strings, token ids, lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    strings = [p for p in prompt if isinstance(p, str)]
    token_ids = [p for p in prompt if isinstance(p, int)]
    lists = [p for p in prompt if isinstance(p, list)]
    if len(token_ids) == len(prompt):
        return [token_ids]
    if len(strings) == len(prompt):
        return list(strings)
    if len(lists) == len(prompt):
        return list(lists)
    raise InvalidRequestError(
        "prompt must be a string, strings, token ids or lists of token ids, not a mixture",
        "prompt",
    )

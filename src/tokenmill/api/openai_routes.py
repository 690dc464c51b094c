"""The HTTP front: OpenAI's routes over a WorkerPool."""

from __future__ import annotations

import time
from functools import cache, partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill import __version__
from tokenmill.api.access import Calls
from tokenmill.api.bodies.body_reader import BodyReader, ReadCall, answer_call, check_model
from tokenmill.api.errors import ApiError
from tokenmill.api.keys import Keys, caller
from tokenmill.api.messages_routes import add_messages
from tokenmill.api.openapi import document
from tokenmill.api.operations import add_operations, exception_handlers, json_response
from tokenmill.api.protocol.answers import (
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    ServiceInfo,
    TokenizeAnswer,
    TokenizerInfo,
    json_encode,
)
from tokenmill.api.protocol.decoding import decode_call
from tokenmill.api.protocol.format_chat import ChatFormat
from tokenmill.api.protocol.format_completion import CompletionFormat
from tokenmill.api.protocol.format_stream import UsageIn
from tokenmill.api.protocol.prepare import Preparer
from tokenmill.api.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TextRequest,
    TokenizeRequest,
)
from tokenmill.api.protocol.tools import tool_definitions
from tokenmill.api.responses_routes import add_responses
from tokenmill.api.routes import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    LANGUAGE,
    MODEL,
    MODELS,
    TOKENIZE,
    TOKENIZER_INFO,
)
from tokenmill.api.stream import ApiState
from tokenmill.api.telemetry.dashboard import add_dashboard
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.api.telemetry.tracing import NO_TRACING, Tracing
from tokenmill.api.worker_routes import add_workers
from tokenmill.core.types import InvalidRequestError
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.loader import ImageLoader
from tokenmill.workers.pool import WorkerPool


def create_app(
    client: WorkerPool,
    tokenizer: Tokenizer,
    keys: Keys,
    model: str,
    tracing: Tracing = NO_TRACING,
    images: ImageLoader | None = None,
) -> FastAPI:
    """The app for a started client; `model` is the name clients use. `app.state.api` drains it,
    and `app.state.bodies` is to be closed.

    Without `images` the model takes text only.
    """
    if client.facts is None:
        raise ValueError("create_app needs a client that has been started")
    config = keys.config
    metrics = ServerMetrics(model, config.price_per_gpu_hour)
    takes_images = images is not None
    client.image_loads = None if images is None else images.stats
    calls = Calls(config)
    state = ApiState(client, tokenizer, keys, model, metrics, calls, tracing, takes_images)
    app = FastAPI(
        title="tokenmill",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=exception_handlers(),
    )
    app.state.api = state
    api_document = partial(document, LANGUAGE, __version__, model, keys.ring.is_needed)
    app.openapi = cache(api_document)  # type: ignore[method-assign]
    bodies = app.state.bodies = BodyReader(tokenizer, state.facts, config, model, images)
    _add_generation(app, state, bodies)
    add_responses(app, state, bodies)
    add_messages(app, state, bodies)
    _add_models(app, state)
    _add_operations(app, state)
    add_workers(app, state)
    add_dashboard(app, state)
    return app


def _usage_in(call: TextRequest) -> UsageIn:
    options = call.stream_options
    otherwise: UsageIn = "end" if call.include_receipt else "none"  # a receipt stands in usage
    if options is None:
        return otherwise
    if not call.stream:
        raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
    if not options.include_usage:
        return otherwise
    return "every" if options.continuous_usage_stats else "end"


def _add_generation(app: FastAPI, state: ApiState, bodies: BodyReader) -> None:
    guard = caller(state.keys)

    @CHAT.on(app, guard)
    async def chat_completions(request: Request) -> Response:
        return await answer_call(request, state, bodies, read_chat)

    @COMPLETIONS.on(app, guard)
    async def completions(request: Request) -> Response:
        return await answer_call(request, state, bodies, read_completion)

    @TOKENIZE.on(app, guard)
    async def tokenize(request: Request) -> Response:
        with state.enter(request.state.account) as place:
            return _json(await bodies.read(request, place, read_tokenize))

    @DETOKENIZE.on(app, guard)
    async def detokenize(request: Request) -> Response:
        with state.enter(request.state.account) as place:
            return _json(await bodies.read(request, place, read_detokenize))

    @TOKENIZER_INFO.on(app, guard)
    async def tokenizer_info() -> Response:
        tokenizer = state.tokenizer
        named = tokenizer.named_tokens
        info = TokenizerInfo(
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token"),
            pad_token=named.get("pad_token"),
            unk_token=named.get("unk_token"),
            chat_template=tokenizer.chat_template,
            vocab_size=tokenizer.vocab_size,
            model_max_length=state.facts().max_model_len,
        )
        return json_response(info)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def read_chat(body: bytes, preparer: Preparer, model: str) -> ReadCall:
    call = decode_call(body, ChatCompletionRequest, preparer.ignored)
    check_model(call.model, model)
    usage_in, parsed_ns = _usage_in(call), time.monotonic_ns()
    job = await preparer.chat(call)
    form = ChatFormat(job, model, preparer.tokenizer, usage_in)
    return ReadCall(job, form, bool(call.stream), parsed_ns)


async def read_completion(body: bytes, preparer: Preparer, model: str) -> ReadCall:
    call = decode_call(body, CompletionRequest, preparer.ignored)
    check_model(call.model, model)
    usage_in, parsed_ns = _usage_in(call), time.monotonic_ns()
    job = await preparer.completion(call)
    form = CompletionFormat(job, model, preparer.tokenizer, usage_in, bool(call.echo))
    return ReadCall(job, form, bool(call.stream), parsed_ns)


async def read_tokenize(body: bytes, preparer: Preparer, model: str) -> bytes:
    call = decode_call(body, TokenizeRequest, preparer.ignored)
    check_model(call.model, model)
    encoded: bytes = json_encode(await _tokenize(call, preparer))
    return encoded


async def read_detokenize(body: bytes, preparer: Preparer, model: str) -> bytes:
    call = decode_call(body, DetokenizeRequest, preparer.ignored)
    check_model(call.model, model)
    text = preparer.tokenizer.decode(call.tokens, skip_special_tokens=False)
    encoded: bytes = json_encode(DetokenizeAnswer(prompt=text))
    return encoded


async def _tokenize(call: TokenizeRequest, preparer: Preparer) -> TokenizeAnswer:
    if (call.prompt is None) == (call.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    if call.messages is None:
        for name in ("tools", "add_generation_prompt", "continue_final_message"):
            if getattr(call, name) is not None:
                raise InvalidRequestError(f"{name} needs messages", name)
        special = call.add_special_tokens is not False
        token_ids = await preparer.tokenize(call.prompt or "", special)
    else:
        definitions = tool_definitions(call.tools or [])
        prompt = await preparer.chat_prompt(call, definitions, call.chat_template_kwargs)
        token_ids = prompt.token_ids
    strings = None
    if call.return_token_strs:
        strings = [preparer.tokenizer.id_to_token(t) or "" for t in token_ids]
    return TokenizeAnswer(
        count=len(token_ids),
        max_model_len=preparer.max_model_len,
        tokens=token_ids,
        token_strs=strings,
    )


def _add_models(app: FastAPI, state: ApiState) -> None:
    guard = caller(state.keys)
    created = int(time.time())
    defaults = state.tokenizer.sampling_defaults(state.keys.config.generation_config)

    def card() -> ModelCard:
        return ModelCard(
            id=state.model,
            created=created,
            root=state.model,
            max_model_len=state.facts().max_model_len,
            default_sampling_params=defaults,
        )

    @MODELS.on(app, guard)
    async def models() -> Response:
        return json_response(ModelList(data=[card()]))

    @MODEL.on(app, guard)
    async def model(model_id: str) -> Response:
        check_model(model_id, state.model)
        return json_response(card())


def _add_operations(app: FastAPI, state: ApiState) -> None:
    def fault() -> ApiError | None:
        if state.client.ready:
            return None
        return ApiError(503, "the engine is not running", code="restarting")

    async def metrics() -> bytes:
        client = state.client
        stats = await client.stats()
        total = state.metrics.total(client.total_counts())
        total.accounts = client.accounts()
        return total.render(stats, client.num_restarts, client.view())

    service = ServiceInfo(service="tokenmill", version=__version__)
    add_operations(app, state.keys, state.calls, fault, metrics, service)

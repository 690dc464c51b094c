"""The HTTP front: OpenAI's routes over a WorkerPool."""

from __future__ import annotations

import time
from functools import cache, partial

from fastapi import Depends, FastAPI, Request
from starlette.responses import HTMLResponse, Response

from tokenmill import __version__
from tokenmill.api.access import Calls, authorizer, read_body
from tokenmill.api.errors import ApiError, unknown_model
from tokenmill.api.messages_routes import add_messages
from tokenmill.api.openapi import docs_page, document
from tokenmill.api.operations import add_operations, exception_handlers, json_response
from tokenmill.api.protocol.answers import (
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    Service,
    TokenizeAnswer,
)
from tokenmill.api.protocol.format_chat import ChatFormat
from tokenmill.api.protocol.format_completion import CompletionFormat
from tokenmill.api.protocol.format_stream import UsageIn
from tokenmill.api.protocol.prepare import Preparer
from tokenmill.api.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from tokenmill.api.protocol.tools import tool_definitions
from tokenmill.api.responses_routes import add_responses
from tokenmill.api.stream import ApiState, GenerationResponse
from tokenmill.api.telemetry.dashboard import add_dashboard
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.api.telemetry.tracing import NO_TRACING, Tracing
from tokenmill.api.worker_routes import add_workers
from tokenmill.core.config import ServerConfig
from tokenmill.core.types import InvalidRequestError
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.loader import ImageLoader
from tokenmill.workers.pool import WorkerPool


def create_app(
    client: WorkerPool,
    tokenizer: Tokenizer,
    config: ServerConfig,
    model: str,
    tracing: Tracing = NO_TRACING,
    images: ImageLoader | None = None,
) -> FastAPI:
    """The app for a started client; `model` is the name clients use. `app.state.api` drains it.

    Without `images` the model takes text only.
    """
    if client.facts is None:
        raise ValueError("create_app needs a client that has been started")
    metrics = ServerMetrics(model, config.price_per_gpu_hour)
    takes_images = images is not None
    client.image_loads = None if images is None else images.stats
    calls = Calls(config)
    state = ApiState(client, tokenizer, config, model, metrics, calls, tracing, takes_images)
    app = FastAPI(
        title="tokenmill",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=exception_handlers(),
    )
    app.state.api = state
    api_document = partial(document, __version__, model, bool(config.api_keys))
    app.openapi = cache(api_document)  # type: ignore[method-assign]
    preparer = Preparer(tokenizer, state.facts, config, images)
    _add_generation(app, state, preparer)
    add_responses(app, state, preparer)
    add_messages(app, state, preparer)
    _add_models(app, state)
    _add_operations(app, state)
    add_workers(app, state)
    add_dashboard(app, state)
    return app


def _check_model(name: str | None, state: ApiState) -> None:
    if name is not None and name != state.model:
        raise unknown_model(name, state.model)


def _usage_in(call: GenerationRequest) -> UsageIn:
    options = call.stream_options
    otherwise: UsageIn = "end" if call.include_receipt else "none"  # a receipt stands in usage
    if options is None:
        return otherwise
    if not call.stream:
        raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
    if not options.include_usage:
        return otherwise
    return "every" if options.continuous_usage_stats else "end"


def _add_generation(app: FastAPI, state: ApiState, preparer: Preparer) -> None:
    guard = [Depends(authorizer(state.config))]
    limit = state.config.max_body_bytes

    @app.post("/v1/chat/completions", dependencies=guard)
    async def chat_completions(request: Request) -> Response:
        state.admit(request.state.key)
        with state.traced(request) as trace:
            call = await read_body(request, ChatCompletionRequest, limit, preparer.ignored)
            _check_model(call.model, state)
            usage_in = _usage_in(call)
            trace.parsed()
            job = await preparer.chat(call)
            form = ChatFormat(job, state.model, state.tokenizer, usage_in)
            trace.prepared(job, state.model)
        return GenerationResponse(state, job, form, bool(call.stream), request.state.key, trace)

    @app.post("/v1/completions", dependencies=guard)
    async def completions(request: Request) -> Response:
        state.admit(request.state.key)
        with state.traced(request) as trace:
            call = await read_body(request, CompletionRequest, limit, preparer.ignored)
            _check_model(call.model, state)
            usage_in = _usage_in(call)
            trace.parsed()
            job = await preparer.completion(call)
            form = CompletionFormat(job, state.model, state.tokenizer, usage_in, bool(call.echo))
            trace.prepared(job, state.model)
        return GenerationResponse(state, job, form, bool(call.stream), request.state.key, trace)

    @app.post("/tokenize", dependencies=guard)
    async def tokenize(request: Request) -> Response:
        call = await read_body(request, TokenizeRequest, limit, preparer.ignored)
        _check_model(call.model, state)
        return json_response(await _tokenize(call, state, preparer))

    @app.post("/detokenize", dependencies=guard)
    async def detokenize(request: Request) -> Response:
        call = await read_body(request, DetokenizeRequest, limit, preparer.ignored)
        _check_model(call.model, state)
        text = state.tokenizer.decode(call.tokens, skip_special_tokens=False)
        return json_response(DetokenizeAnswer(prompt=text))


async def _tokenize(call: TokenizeRequest, state: ApiState, preparer: Preparer) -> TokenizeAnswer:
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
    strings = [state.tokenizer.id_to_token(t) or "" for t in token_ids]
    return TokenizeAnswer(
        count=len(token_ids),
        max_model_len=preparer.max_model_len,
        tokens=token_ids,
        token_strs=strings if call.return_token_strs else None,
    )


def _add_models(app: FastAPI, state: ApiState) -> None:
    guard = [Depends(authorizer(state.config))]
    created = int(time.time())

    def card() -> ModelCard:
        return ModelCard(
            id=state.model,
            created=created,
            root=state.model,
            max_model_len=state.facts().max_model_len,
        )

    @app.get("/v1/models", dependencies=guard)
    async def models() -> Response:
        return json_response(ModelList(data=[card()]))

    @app.get("/v1/models/{model_id:path}", dependencies=guard)
    async def model(model_id: str) -> Response:
        _check_model(model_id, state)
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

    service = Service(service="tokenmill", version=__version__)
    add_operations(app, state.calls, fault, metrics, service)

    @app.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi()))

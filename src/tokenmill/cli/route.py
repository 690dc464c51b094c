"""tokenmill route."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tokenmill.cli.serve import set_log_level
from tokenmill.console import fetch
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig
from tokenmill.core.flags import setting
from tokenmill.settings import ROUTER, SERVER, Settings, SettingsError, only
from tokenmill.settings.options import command

if TYPE_CHECKING:
    from tokenmill.text.tokenizer import Tokenizer
    from tokenmill.vision.processor import ImageProcessor
    from tokenmill.workers.pool_view import PoolView

SERVER_KEYS = (
    *("host", "port", "api-key", "api-key-file", "tls-cert", "tls-key", "max-body-size"),
    *("max-concurrency", "max-concurrency-per-key", "control-token"),
    *("drain-timeout", "cors-origin", "allowed-hosts", "log-requests", "chat-template"),
    *("log-level", "otlp-endpoint"),
)


@dataclass(frozen=True, slots=True)
class TokenizerOption:
    tokenizer: str | None = setting(
        None,
        "Model whose tokenizer and chat template say what a prompt's tokens are; without it, four "
        "bytes of the messages stand for a token: an approximation.",
    )


PANELS = {
    "Backends": (RouteConfig, TokenizerOption),
    "Router": only(ROUTER, "router", "router-lifetime", "router-worker-blocks"),
    "Server": only(SERVER, *SERVER_KEYS),
}


def register(app: typer.Typer) -> None:
    command(app, "route", PANELS)(route)


def route(settings: Settings) -> None:
    """Route calls to several OpenAI-compatible servers.

    tokenmill route --backend http://10.0.0.1:8000 --backend http://10.0.0.2:8000
    tokenmill route --backend URL --backend URL --tokenizer Qwen/Qwen3-0.6B
    tokenmill route --backend URL --backend URL --router least-loaded
    tokenmill route --tokenizer MODEL --backend URL,events=tcp://10.0.0.1:5557

    A backend is vLLM, SGLang or tokenmill serve; calls and answers pass
    unchanged. The router assumes that a backend caches the prompts it received
    for --router-lifetime, and weighs this against the load of each backend;
    with events= the backend says itself what it caches (vLLM, SGLang). If a
    backend is down, or answers 429 or 5xx, another one gets the call; a stream
    that breaks after its first byte ends in an error event.

    /workers, /dashboard, /metrics and tokenmill status show what it does.
    """
    from tokenmill.proxy.backend_address import BackendError, read_backends

    config = settings.build(ServerConfig)
    set_log_level(config.log_level)
    backends = settings.build(RouteConfig)
    try:
        addresses = read_backends(backends.backends)
    except BackendError as error:
        raise SettingsError(str(error)) from None
    from tokenmill.proxy.proxy_server import route as run_router

    name = settings.get("tokenizer")
    folder = None if name is None else fetch(name)
    tokenizer, processor = _load(folder, config)
    if tokenizer is None and any(address.streams for address in addresses):
        raise SettingsError(
            "--backend ...,events= needs --tokenizer: events name blocks by their token ids"
        )
    if tokenizer is None and config.chat_template is not None:
        raise SettingsError("--chat-template needs --tokenizer")

    def on_listening(url: str, pool: PoolView) -> None:
        log = logging.getLogger(__name__)
        num_up = sum(worker.up for worker in pool.workers)
        log.info(f"{num_up} of {len(pool.workers)} backends are up; {url}/v1 routes to them")
        log.info(f"dashboard: {url}/dashboard")

    router = settings.build(RouterConfig)
    run_router(config, backends, router, tokenizer, on_listening, processor)


def _load(
    folder: Path | None, config: ServerConfig
) -> tuple[Tokenizer | None, ImageProcessor | None]:
    from tokenmill.text.tokenizer import load_tokenizer
    from tokenmill.vision.processor import load_processor

    if folder is None:
        return None, None
    return load_tokenizer(folder, config.chat_template), load_processor(folder)

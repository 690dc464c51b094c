"""tokenmill route."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tokenmill.cli.serve import set_log_level
from tokenmill.console import fetch
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig
from tokenmill.settings import ROUTE, ROUTER, SETTINGS, Settings, SettingsError
from tokenmill.settings.options import command

if TYPE_CHECKING:
    from tokenmill.text.tokenizer import Tokenizer
    from tokenmill.vision.processor import ImageProcessor
    from tokenmill.workers.fronts.control import FrontSetup
    from tokenmill.workers.pool_view import PoolView

SERVER_KEYS = (
    "host",
    "port",
    "fronts",
    "api-key",
    "max-body-size",
    "max-concurrency",
    "max-concurrency-per-key",
    "control-token",
    "request-timeout",
    "drain-timeout",
    "header-timeout",
    "body-timeout",
    "body-idle-timeout",
    "send-timeout",
    "keep-alive-timeout",
    "max-connections",
    "cors-origin",
    "allowed-host",
    "log-requests",
    "log-stats",
    "chat-template",
    "log-level",
    "otlp-endpoint",
)
TOKENIZER = replace(
    SETTINGS["tokenizer"],
    help="Model whose tokenizer and chat template say what a prompt's tokens are; without it, "
    "four bytes of the messages stand for a token: an approximation.",
)
PANELS = {
    "Backends": (*ROUTE, TOKENIZER),
    "Router": tuple(setting for setting in ROUTER if setting.key != "router-events"),
    "Server": tuple(SETTINGS[key] for key in SERVER_KEYS),
}


FRONT_COMMAND = (sys.executable, "-P", "-m", "tokenmill", "route-front")


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    command(app, "route", PANELS)(route)
    command(app, "route-front", {"Front": (SETTINGS["join"],)}, hidden=True)(route_front)


def route(settings: Settings) -> None:
    """Route calls to several OpenAI-compatible servers.

    tokenmill route --backend http://10.0.0.1:8000 --backend http://10.0.0.2:8000
    tokenmill route --backend URL --backend URL --tokenizer Qwen/Qwen3-0.6B
    tokenmill route --backend URL --backend URL --router least-loaded
    tokenmill route --backend URL --backend URL --fronts 4

    A backend is vLLM, SGLang or tokenmill serve; calls and answers pass
    unchanged. The router assumes that a backend caches the prompts it received
    for --router-lifetime, and weighs this against the load of each backend. If
    a backend is down, or answers 429 or 5xx, another one gets the call; a
    stream that breaks after its first byte ends in an error event.

    /workers, /dashboard, /metrics and tokenmill status show what it does.
    """
    from tokenmill.proxy.backend import BackendError, base_urls

    config = settings.build(ServerConfig)
    set_log_level(config.log_level)
    backends = settings.build(RouteConfig)
    try:
        base_urls(backends.backends)
    except BackendError as error:
        raise SettingsError(str(error)) from None
    from tokenmill.proxy.proxy_fronts import route_fronts
    from tokenmill.proxy.proxy_server import route as run_router

    name = settings.get("tokenizer")
    folder = None if name is None else fetch(name)
    tokenizer, processor = _load(folder, config)
    if tokenizer is None and config.chat_template is not None:
        raise SettingsError("--chat-template needs --tokenizer")

    def on_listening(url: str, pool: PoolView) -> None:
        log = logging.getLogger(__name__)
        num_up = sum(worker.up for worker in pool.workers)
        log.info(f"{num_up} of {len(pool.workers)} backends are up; {url}/v1 routes to them")
        log.info(f"dashboard: {url}/dashboard")

    router = settings.build(RouterConfig)
    if config.fronts > 1:
        path = "" if folder is None else str(folder)
        route_fronts(FRONT_COMMAND, config, backends, router, on_listening, path, name or "")
        return
    run_router(config, backends, router, tokenizer, on_listening, processor)


def _load(
    folder: Path | None, config: ServerConfig
) -> tuple[Tokenizer | None, ImageProcessor | None]:
    from tokenmill.text.tokenizer import load_tokenizer
    from tokenmill.vision.processor import load_processor

    if folder is None:
        return None, None
    return load_tokenizer(folder, config.chat_template), load_processor(folder)


def route_front(settings: Settings) -> None:
    """Be one of several processes of tokenmill route, which starts it."""
    from tokenmill.proxy.proxy_fronts import run_route_front

    def load(setup: FrontSetup) -> tuple[Tokenizer | None, ImageProcessor | None]:
        set_log_level(setup.server.log_level)
        return _load(Path(setup.path) if setup.path else None, setup.server)

    run_route_front(settings.get("join"), load)

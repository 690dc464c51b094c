"""The process of `tokenmill route`: it opens the socket, and connects the app to the backends."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Callable

from tokenmill.api.access import Calls
from tokenmill.api.keys import open_keys
from tokenmill.api.middleware import CallMiddleware
from tokenmill.api.server import (
    Signals,
    bind,
    drain,
    listening,
    logging_stats,
    run_in_loop,
    url_of,
)
from tokenmill.api.telemetry.tracing import open_tracing
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig
from tokenmill.http_connection import raise_file_limit
from tokenmill.proxy.backends import Backends
from tokenmill.proxy.proxy_routes import RouteApp, RouteState, routed_stats
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.processor import ImageProcessor
from tokenmill.workers.pool_view import PoolView

TRACED_AS = "tokenmill-route"

OnListening = Callable[[str, PoolView], None]


def route(
    config: ServerConfig,
    backends: RouteConfig,
    router: RouterConfig,
    tokenizer: Tokenizer | None = None,
    on_listening: OnListening | None = None,
    processor: ImageProcessor | None = None,
) -> None:
    """Route until SIGTERM or SIGINT, then let open calls finish and return.

    With the `processor` of a model images count as the tokens that they have.
    `on_listening` gets the URL and the backends as they were found.
    Raises TokenmillError when a setting is wrong or the address is taken.
    """
    raise_file_limit()
    with (
        contextlib.closing(open_tracing(config.otlp_endpoint, TRACED_AS)) as tracing,
        contextlib.closing(bind(config.host, config.port)) as listener,
        open_keys(config, listener.getsockname()[1]) as keys,
    ):

        def make_state() -> RouteState:
            reached = Backends(backends, router)
            return RouteState(reached, tokenizer, keys, Calls(config), tracing, processor)

        run_in_loop(_run(listener, make_state, on_listening))


async def _run(
    listener: socket.socket,
    make_state: Callable[[], RouteState],
    on_listening: OnListening | None,
) -> None:
    state = make_state()
    signals = Signals(state.keys.reload)
    backends, config = state.backends, state.config
    try:
        with contextlib.closing(RouteApp(state)) as app:
            await signals.interrupt(backends.start())
            gc.freeze()  # the app lives as long as the process: do not scan it
            async with (
                listening(CallMiddleware(app, state.keys, state.metrics), listener, state.keys),
                logging_stats(config, state.metrics, lambda: routed_stats(state)),
            ):
                if on_listening is not None:
                    on_listening(url_of(listener, state.keys), backends.view())
                await signals.wait()
                await drain(state.calls, config.drain_timeout_s, signals)
                app.end_calls()
    finally:
        await backends.close()

"""tokenmill front: one more API process for a running server, on this host or another."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tokenmill import __version__
from tokenmill.cli.serve import image_loader, model_name, set_log_level
from tokenmill.cli.worker_commands import call_server
from tokenmill.console import fetch
from tokenmill.core.config import ServerConfig
from tokenmill.settings import SETTINGS, Settings, SettingsError
from tokenmill.settings.options import command

if TYPE_CHECKING:
    from tokenmill.text.tokenizer import Tokenizer
    from tokenmill.vision.loader import ImageLoader
    from tokenmill.workers.fronts.control import FrontSetup

PANELS = {
    "Front": tuple(SETTINGS[key] for key in ("model", "host", "port", "log-level")),
    "Server": tuple(SETTINGS[key] for key in ("join", "control-token")),
}
STARTED = ("ipc://", "tcp://")  # how fronts that the server or Ray started are told where it is


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    command(app, "front", PANELS, positional="model")(front)


def front(settings: Settings) -> None:
    """Add an API process to a running server that was started with --fronts 2 or more.

    tokenmill front --join 127.0.0.1:8000 --port 8001
    tokenmill front --join 10.0.0.1:8000 --host 0.0.0.0 --control-token secret

    It has the server's settings, and sends requests to the server's workers
    itself. From another host it needs the server's --control-token, and the
    server must listen at an address that this host reaches (--host).
    """
    from tokenmill.api.front_server import own_host, run_front

    set_log_level(settings.get("log-level"))
    join = settings.get("join")
    if join is None:
        raise SettingsError("--join is missing: give HOST:PORT of the server, as 127.0.0.1:8000")
    if join.startswith(STARTED):
        run_front(join, load)
        return
    host, port = _address(join)
    asked = settings.get("model") if "model" in settings else None
    model = None if asked is None else model_name(asked)
    given = Settings(settings.values | {"url": f"http://{host}:{port}"})
    ticket = call_server(given, "/workers/fronts", {"version": __version__, "model": model})
    from tokenmill.workers.fronts.report import Ticket

    address = urllib.parse.urlsplit(ticket["address"])
    own = own_host(host.strip("[]"), port)
    reached = f"tcp://{host}:{address.port}"
    run_front(
        reached,
        load,
        Ticket(reached, ticket["key"], ticket["ticket"]),
        model,
        settings.build(ServerConfig),
        own,
    )


def load(setup: FrontSetup) -> tuple[Tokenizer, ImageLoader | None]:
    """Tokenizer and images of the server's model."""
    from tokenmill.text.tokenizer import load_tokenizer

    path = Path(setup.path)
    path = path if path.exists() else fetch(setup.source)
    return load_tokenizer(path, setup.server.chat_template), image_loader(path, setup.vision)


def _address(join: str) -> tuple[str, int]:
    plain = join.removeprefix("http://").rstrip("/")
    host, _, port = plain.rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(f"--join must be HOST:PORT, such as 127.0.0.1:8000, got {join!r}")
    return host, int(port)

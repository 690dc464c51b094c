"""tokenmill front: one of several API processes of `tokenmill serve --fronts`, which starts it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.serve import image_loader, set_log_level
from tokenmill.settings import Settings
from tokenmill.settings.options import command

if TYPE_CHECKING:
    from tokenmill.text.tokenizer import Tokenizer
    from tokenmill.vision.loader import ImageLoader
    from tokenmill.workers.fronts.control import FrontSetup


def register(app: typer.Typer) -> None:
    command(app, "front", {}, hidden=True)(front)


def front(
    settings: Settings,
    address: Annotated[str, typer.Option("--address", help="Socket of the server's process.")],
) -> None:
    """Be one of several API processes of tokenmill serve, which starts it."""
    from tokenmill.api.front_server import run_front
    from tokenmill.workers.socket_folder import end_with_listener

    end_with_listener(address)
    run_front(address, load)


def load(setup: FrontSetup) -> tuple[Tokenizer, ImageLoader | None]:
    from tokenmill.text.tokenizer import load_tokenizer

    set_log_level(setup.server.log_level)
    path = Path(setup.path)
    return load_tokenizer(path, setup.server.chat_template), image_loader(path, setup.vision)

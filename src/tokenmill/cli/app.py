"""The command line as a typer app: serve | route | status | chat | generate and more."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill import __version__
from tokenmill.cli import (
    bench,
    config,
    embedding_tables,
    front,
    generate,
    models,
    rank,
    receipts,
    recipes,
    route,
    serve,
    video,
    worker,
)
from tokenmill.cli import worker_commands as pool
from tokenmill.cli.chat import chat_command as chat
from tokenmill.cli.plan import plan_group as plan
from tokenmill.cli.process_app import empty_app

app = empty_app(completion=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenmill {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Run language models: an engine, an OpenAI-compatible server and benchmarks.

    [bold]First steps[/bold]

    tokenmill chat                          talk to a model in the terminal
    tokenmill generate "Once upon a time"   continue a text
    tokenmill serve                         OpenAI-compatible, 127.0.0.1:8000
    tokenmill bench throughput              tokens per second

    The first of them downloads SmolLM2-135M-Instruct (98 MB).
    Each command has its own --help.
    """


MODULES = (serve, worker, front, route, pool, receipts, chat, generate, rank, video)
for _module in (*MODULES, embedding_tables, models, recipes, config, bench, plan):
    _module.register(app)

"""tokenmill serve | chat | generate | pull | bench."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tokenmill import __version__
from tokenmill.cli import bench, chat, generate, pull, serve
from tokenmill.cli.console import fail
from tokenmill.core.types import TokenmillError
from tokenmill.settings import SettingsError

USAGE_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="tokenmill",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    """Run language models: an engine, an OpenAI-compatible server and the scales beside them.

    [bold]First steps[/bold]

    tokenmill chat                          talk to a model in the terminal
    tokenmill generate "Once upon a time"   continue a text
    tokenmill serve                         OpenAI-compatible, 127.0.0.1:8000
    tokenmill bench throughput              tokens per second

    The first of them downloads SmolLM2-135M-Instruct (93 MB).
    Each command has its own --help.
    """


for _module in (serve, chat, generate, pull, bench):
    _module.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error is one sentence on stderr and exit status 1 or 2."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit status of a command line."""
    try:
        return app(arguments, prog_name="tokenmill", standalone_mode=False) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("TOKENMILL_TRACEBACK") == "1":
            raise
        if message := describe(error):  # empty where typer has printed the help instead
            fail(message)
        usage = isinstance(error, SettingsError)
        return USAGE_ERROR if usage else getattr(error, "exit_code", 1)


def describe(error: Exception) -> str:
    """One sentence about what went wrong."""
    if hasattr(error, "format_message"):  # typer's own errors: unknown flag, missing argument
        return str(error.format_message())
    if isinstance(error, TokenmillError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error} (TOKENMILL_TRACEBACK=1 shows where)"


if __name__ == "__main__":
    main()

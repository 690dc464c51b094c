"""tokenmill serve | chat | generate | pull | bench | plan."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenmill.console import fail
from tokenmill.core.types import TokenmillError
from tokenmill.settings import SettingsError
from tokenmill.settings.vllm_names import as_flags

if TYPE_CHECKING:
    import typer

USAGE_ERROR = 2
DISTRIBUTIONS = {  # of modules with another name
    "zmq": "pyzmq",
    "prometheus_client": "prometheus-client",
    "mlperf_loadgen": "mlcommons-loadgen",
    "rouge_score": "rouge-score",
}
INTERRUPTED = 130
NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EROFS
CACHES = "; TOKENMILL_CACHE, XDG_CACHE_HOME, HF_HOME and TMPDIR choose other folders"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error is one sentence on stderr and exit status 1 or 2."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    try:
        return _dispatch(arguments)
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


def _dispatch(arguments: Sequence[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    from tokenmill.cli.process_app import process_app

    app = process_app(given) or _whole_app()
    if given[:1] == ["serve"]:
        given = ["serve", *as_flags(given[1:])]
    return app(given, prog_name="tokenmill", standalone_mode=False) or 0


def _whole_app() -> typer.Typer:
    from tokenmill.cli.app import app

    return app


def describe(error: Exception) -> str:
    if hasattr(error, "format_message"):  # typer's own errors: unknown flag, missing argument
        return str(error.format_message())
    if isinstance(error, TokenmillError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        package = DISTRIBUTIONS.get(module, module)
        return f"the package {package} is needed here and is not installed: pip install {package}"
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return text + (CACHES if error.errno in NO_ROOM else "")
    return f"{type(error).__name__}: {error} (TOKENMILL_TRACEBACK=1 shows where)"


if __name__ == "__main__":
    main()

"""Runs the checks of parity modules under Triton's interpreter, each in a fork of one process.

The interpreter is chosen when triton is imported, so this process must not be that of the tests.
No check sees what another one changed.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
FORK = get_context("fork")
LIMIT_S, CHECK_LIMIT_S = 1200, 300


def run_checks(modules: Iterable[str]) -> dict[str, dict[str, str]]:
    """By module and check: what went wrong, or nothing."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, *modules]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=env, check=True, timeout=LIMIT_S
    )
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _attempt(module: str, name: str, told: Connection) -> None:
    import torch

    torch.manual_seed(0)
    try:
        importlib.import_module(module).CHECKS[name]("cpu")
    except Exception:
        told.send(traceback.format_exc())


def _fault(module: str, name: str) -> str:
    """What went wrong in a check, in a process of its own; nothing if all went well."""
    reader, writer = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_attempt, args=(module, name, writer), daemon=True)
    process.start()
    writer.close()  # else a child that dies would not end what is read
    try:
        if not reader.poll(CHECK_LIMIT_S):
            return f"the check has not ended in {CHECK_LIMIT_S} s"
        return str(reader.recv())
    except EOFError:
        process.join()
        code = process.exitcode
        return f"the process of the check exited with code {code}" if code else ""
    finally:
        process.kill()


def _patch_once(patch: Any) -> Any:
    """The interpreter patches the language at every call of a device function: once is enough."""
    from triton import language

    patched = set()
    kept = SimpleNamespace(restore=lambda: None)

    def patch_new(function: Any) -> Any:
        modules = frozenset(
            id(value)
            for value in function.__globals__.values()
            if value is language or value is language.core
        )
        if modules not in patched:
            patch(function)
            patched.add(modules)
        return kept

    return patch_new


def _prepare() -> None:
    """What every check would do again in its fork."""
    import torch.distributed.tensor  # noqa: F401  (torch.testing imports it at its first use)
    from triton.runtime import interpreter

    interpreter._patch_lang = _patch_once(interpreter._patch_lang)


if __name__ == "__main__":
    sys.path += [str(HERE), str(HERE.parent)]
    _prepare()
    found = {
        each: {name: _fault(each, name) for name in importlib.import_module(each).CHECKS}
        for each in sys.argv[1:]
    }
    print(json.dumps(found))

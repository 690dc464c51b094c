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
from pathlib import Path

HERE = Path(__file__).parent


def run_checks(modules: Iterable[str]) -> dict[str, dict[str, str]]:
    """By module and check: what went wrong, or nothing."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, *modules]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=True)
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _attempt(module: str, name: str) -> str:
    import torch

    torch.manual_seed(0)
    try:
        importlib.import_module(module).CHECKS[name]("cpu")
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    sys.path.append(str(HERE))
    named = [(each, name) for each in sys.argv[1:] for name in importlib.import_module(each).CHECKS]
    with get_context("fork").Pool(1, maxtasksperchild=1) as forks:
        faults = forks.starmap(_attempt, named, chunksize=1)
    found: dict[str, dict[str, str]] = {each: {} for each in sys.argv[1:]}
    for (each, name), fault in zip(named, faults, strict=True):
        found[each][name] = fault
    print(json.dumps(found))

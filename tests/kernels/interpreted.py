"""Runs the checks of a parity module under Triton's interpreter, all in one process of their own.

The interpreter is chosen when triton is imported, so this process must not be that of the tests.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).parent


def run_checks(module: str) -> dict[str, str]:
    """By check: what went wrong, or nothing."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, module]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _attempt(name: str) -> str:
    import torch

    torch.manual_seed(0)
    try:
        CHECKS[name]("cpu")
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    sys.path.append(str(HERE))
    CHECKS = importlib.import_module(sys.argv[1]).CHECKS
    print(json.dumps({name: _attempt(name) for name in CHECKS}))

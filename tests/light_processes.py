"""Processes of tests that start at once: forks of one that has imported torch and done nothing."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from typing import Any

# What they have imported: all that takes long in any test, since one process has one such parent.
MODULES = (
    *("tokenmill.cli.app", "tokenmill.kernels.cpu.matmul", "tokenmill.video.video_rank_process"),
    *("tokenmill.text.video_prompts", "tokenmill.ranking.stores.device_cache"),
    *("tokenmill.ranking.stores.sharded", "tokenmill.bench.mlperf.video_url"),
    *("mlperf_loadgen", "av"),
)


def light_processes() -> ForkServerContext:
    """Where they start."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    return context


def run_program(module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """As `python -m` does it."""
    os.environ.update(environ)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def print_to(path: str, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """The same with stdout in a file."""
    os.dup2(os.open(path, os.O_WRONLY), 1)
    run_program(module, arguments, environ)


def run_benchmark(command: Sequence[str], environ: Mapping[str, str]) -> tuple[Any, str]:
    """What takes the place of the function of tokenmill.bench.child_process."""
    _, _, _, module, *arguments = command  # python -P -m
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as stdout:
        given = (stdout.name, module, arguments, environ)
        process = light_processes().Process(target=print_to, args=given)
        process.start()
        process.join()
        if process.exitcode:
            return {}, f"exit status {process.exitcode}"
        return json.loads(stdout.read().splitlines()[-1]), ""

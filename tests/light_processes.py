"""Processes of tests that start at once: forks of one that has imported torch and done nothing."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from tokenmill.engine.ranks.group import KEY_VARIABLE, RankGroup

# What a process that makes videos, or measures them, imports.
VIDEO = (
    *("tokenmill.cli.app", "tokenmill.kernels.cpu.matmul", "tokenmill.video.video_rank_process"),
    *("tokenmill.text.video_prompts", "mlperf_loadgen", "av"),
)


def light_processes(*modules: str) -> ForkServerContext:
    """Where they start; the first call in a process of tests says which modules they have."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(modules))
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


def light_benchmark(
    *modules: str,
) -> Callable[[Sequence[str], Mapping[str, str]], tuple[Any, str]]:
    """What takes the place of `run_benchmark` of tokenmill.bench.child_process."""
    context = light_processes(*modules)

    def run_benchmark(command: Sequence[str], environ: Mapping[str, str]) -> tuple[Any, str]:
        _, _, _, module, *arguments = command  # python -P -m
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as stdout:
            given = (stdout.name, module, arguments, environ)
            process = context.Process(target=print_to, args=given)
            process.start()
            process.join()
            if process.exitcode:
                return {}, f"exit status {process.exitcode}"
            return json.loads(stdout.read().splitlines()[-1]), ""

    return run_benchmark


class LightChild:
    """A process with what RankGroup asks of a Popen."""

    def __init__(self, process: BaseProcess) -> None:
        process.start()
        self._process, self.kill = process, process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self._process.exitcode


def start_light_ranks(patch: pytest.MonkeyPatch, *modules: str) -> None:
    """From now on the other ranks of a group are light processes."""
    context = light_processes(*modules)

    def start(group: RankGroup, address: str, key: bytes) -> None:
        given = (group._program, [address], {KEY_VARIABLE: key.hex()})
        for _ in range(group.size - 1):
            child: Any = LightChild(context.Process(target=run_program, args=given))
            group._children.append(child)

    patch.setattr(RankGroup, "_start_children", start)

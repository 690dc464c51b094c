"""Processes of tests that start at once: forks of one that has imported torch and done nothing."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

# What they have imported: all that takes long in any test, since one process has one such parent.
MODULES = (
    *("tokenmill.cli.app", "tokenmill.kernels.cpu.matmul", "tokenmill.video.video_rank_process"),
    *("tokenmill.engine.build", "tokenmill.workers.worker_process"),
    *("tokenmill.text.video_prompts", "tokenmill.ranking.stores.device_cache"),
    *("tokenmill.bench.mlperf.loadgen_tests", "mlperf_loadgen", "av"),
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


class LightProcess:
    """One of them, with what a pool asks of asyncio.subprocess.Process; start it in its loop."""

    def __init__(self, process: BaseProcess) -> None:
        process.start()
        assert process.pid is not None
        self.pid, self.kill = process.pid, process.kill
        self._process, self._over = process, asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._end)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._over.set()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        await self._over.wait()
        assert self._process.exitcode is not None
        return self._process.exitcode


def start_program(module: str, *arguments: str) -> LightProcess:
    """`python -m` of a module, as a light process."""
    given = (module, arguments, {})
    return LightProcess(light_processes().Process(target=run_program, args=given))


def print_to(
    paths: Sequence[str], module: str, arguments: Sequence[str], environ: Mapping[str, str]
) -> None:
    """The same with stdout and stderr in files."""
    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    run_program(module, arguments, environ)


def run_benchmark(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[Any, str]:
    """What takes the place of the function of tokenmill.bench.commands.ladder."""
    _, _, _, module, *arguments = command  # python -P -m
    with (
        tempfile.NamedTemporaryFile("r", encoding="utf-8") as stdout,
        tempfile.NamedTemporaryFile("r", encoding="utf-8") as stderr,
    ):
        given = ((stdout.name, stderr.name), module, arguments, environ or {})
        process = light_processes().Process(target=print_to, args=given)
        process.start()
        process.join()
        said = stderr.read()
        sys.stderr.write(said)
        if process.exitcode:
            last = (said.splitlines() or [""])[-1].removeprefix("error: ")
            return {}, last or f"exit status {process.exitcode}"
        return json.loads(stdout.read().splitlines()[-1]), ""

"""Ranks of a group that start at once, in the place of programs of their own."""

from __future__ import annotations

import subprocess
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from light_processes import light_processes, run_program
from tokenmill.engine.ranks.group import KEY_VARIABLE, RankGroup


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


def start_light_ranks(patch: pytest.MonkeyPatch, program: str | None = None) -> None:
    """From now on the other ranks of a group are light processes, of this program if given."""
    context = light_processes()

    def start(group: RankGroup, address: str, key: bytes) -> None:
        given = (program or group._program, [address], {KEY_VARIABLE: key.hex()})
        for _ in range(group.size - 1):
            child: Any = LightChild(context.Process(target=run_program, args=given))
            group._children.append(child)

    patch.setattr(RankGroup, "_start_children", start)

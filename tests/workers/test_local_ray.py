"""What is left of a Ray of ours when its owner has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_all_that_writes_logs_there_ends_with_the_owner(tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    (tmp_path / "other").mkdir()
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with (folder / "agent.log").open("w") as log, (tmp_path / "other" / "log").open("w") as other:
        agents = [subprocess.Popen(sleep, stdout=log) for _ in range(2)]
        stranger = subprocess.Popen(sleep, stdout=other)
    command = [sys.executable, "-P", "-m", "tokenmill.workers.local_ray", str(folder)]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE):
            assert all(agent.poll() is None for agent in agents)
        assert [agent.wait(180) for agent in agents] == [-9, -9]
        assert stranger.poll() is None and not folder.exists()
    finally:
        for process in (*agents, stranger):
            process.kill()
            process.wait()

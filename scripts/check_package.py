"""The wheel in an empty environment, away from the checkout, installed and run as in Docker.

    python scripts/check_package.py dist/tokenmill-0.1.0-py3-none-any.whl

A line a step: the Dockerfile's RUN line that installs (its pip is that of the new environment, its
context what .dockerignore leaves), the wheel over it, commands of README in an empty folder, and
the Dockerfile's server with its health check. It needs no Docker, and no root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHEAP = (
    ["--version"],
    ["recipes"],
    ["recipes", "serve-smollm2-cpu.toml"],
    ["recipes", "--copy", "copied"],
    ["plan", "replay", "--config", "recipes/plan-replay-sample.toml"],
    ["plan", "replay", "--trace", "recipes/sample-trace.jsonl", "--workers", "4", "--router", "kv"],
    ["bench", "price", "--tok-s", "250634", "--gpus", "72", "--price-per-gpu-hour", "3.76"],
)
HEALTHY_S = 180


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    dockerfile = (ROOT / "recipes" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        environment = new_environment(place / "venv")
        run_install(dockerfile, place / "context", environment)
        step("wheel", ["pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)],
             environment, place)  # fmt: skip
        empty = place / "empty"
        empty.mkdir()
        for words in CHEAP:
            step(" ".join(words), ["tokenmill", *words], environment, empty)
        check_types(environment, empty)
        serve(dockerfile, environment, empty)


def new_environment(folder: Path) -> dict[str, str]:
    """Variables by which commands run in a new virtual environment, and find no checkout."""
    venv.create(folder, with_pip=True)
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return kept | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(folder)}


def run_install(dockerfile: str, context: Path, environment: dict[str, str]) -> None:
    """The RUN line that calls pip, over the files that its COPY lines name."""
    for words in re.findall(r"^COPY (.+)$", dockerfile, re.M):
        *sources, target = words.split()
        for source in sources:
            copy(ROOT / source, context / target / ("" if target != "./" else source))
    (line,) = [
        line for line in re.findall(r"^RUN (.+)$", dockerfile, re.M) if "pip install" in line
    ]
    arguments = {"VARIANT": "cpu", "EXTRAS": "vision", "CPU_INDEX": ""}  # torch of the constraints
    quiet = {"PIP_QUIET": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    step("Dockerfile: RUN", ["sh", "-c", line], environment | arguments | quiet, context)


def copy(source: Path, target: Path) -> None:
    assert source.name in (ROOT / ".dockerignore").read_text(encoding="utf-8"), source
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def check_types(environment: dict[str, str], folder: Path) -> None:
    code = "import tokenmill, pathlib; p = pathlib.Path(tokenmill.__file__).parent; "
    code += "assert 'site-packages' in str(p), p; assert (p / 'py.typed').exists()"
    step("py.typed", ["python", "-c", code], environment, folder)


def serve(dockerfile: str, environment: dict[str, str], folder: Path) -> None:
    """ENTRYPOINT and CMD on a port of another number than the default, until HEALTHCHECK agrees."""
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", dockerfile, re.M)
    (health,) = re.findall(r"^HEALTHCHECK .*CMD (.+)$", dockerfile, re.M)
    environment = environment | {"XDG_RUNTIME_DIR": str(folder / "run")}
    (folder / "run").mkdir(mode=0o700)
    command = [*json.loads(entry), "serve", "--host", "127.0.0.1", "--port", "8417"]
    begin = time.monotonic()
    with subprocess.Popen(command, env=environment, cwd=folder) as server:
        try:
            while subprocess.run(
                json.loads(health), env=environment, capture_output=True
            ).returncode:
                if server.poll() is not None or time.monotonic() - begin > HEALTHY_S:
                    sys.exit("Dockerfile: HEALTHCHECK: the server did not become healthy")
                time.sleep(0.5)
            print(f"Dockerfile: HEALTHCHECK: healthy after {time.monotonic() - begin:.0f} s")
        finally:
            server.terminate()


def step(name: str, command: list[str], environment: dict[str, str], folder: Path) -> None:
    begin = time.monotonic()
    done = subprocess.run(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    print(
        f"{name}: exit status {done.returncode} after {time.monotonic() - begin:.1f} s", flush=True
    )
    if done.returncode:
        sys.exit(done.stdout)


if __name__ == "__main__":
    main()

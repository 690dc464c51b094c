"""The pages: their commands exist and run, their links lead somewhere, their tables are fresh.

scripts/page_outputs.py says by which comments a fenced block tells what is done with its commands.
"""

from __future__ import annotations

import functools
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from typing import Any

import module_table
import pytest
import typer
from page_outputs import (
    MEASURED,
    PAGES,
    ROOT,
    SAME_OUTPUT,
    START,
    Block,
    blocks_of,
    page_name,
    with_figures,
)

from api.sim import MODEL
from api.sim_server import SimServer, sim_server
from benchmarks.__main__ import names
from benchmarks.harness import Benchmark
from tokenmill.__main__ import run
from tokenmill.api import front_server
from tokenmill.api import server as api_server
from tokenmill.api.videos import video_server
from tokenmill.cli import route as cli_route
from tokenmill.cli import serve as cli_serve
from tokenmill.cli.app import app
from tokenmill.core.config import PoolConfig, SchedulerConfig
from tokenmill.core.kv_groups import kept_positions
from tokenmill.models import spec_of
from tokenmill.proxy import proxy_server

SERVED = "http://127.0.0.1:8000"
AIPERF = ROOT / "tests" / "bench" / "results" / "external" / "profile_export_aiperf.json"
OTHER_FLAGS = {
    "--chaos-s",
    "--schema-cases",
    "--soak-calls",
    "--check",
    "--help",
    "--here",
    "--config",
    "--build-arg",
    "--kv-events-config",
    "--page-size",
}  # of pytest, scripts and others


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.language in ("sh", "console")]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [
    pytest.param(words[1:], id=f"{block}: {' '.join(words[1:4])}")
    for block in SHELL
    for words in block.commands
    if words[0] == "tokenmill"
]
BENCHMARKS = [words for block in SHELL for words in block.commands if words[0] == "python"]


# What the command line knows.


def test_benchmarks_parse() -> None:
    for words in BENCHMARKS:
        benchmark_of(words).parser().parse_args(words[3:])


def benchmark_of(words: list[str]) -> Benchmark:
    found: Benchmark = import_module(words[2]).BENCHMARK
    return found


def execute(words: list[str]) -> int:
    if words[0] == "python":
        benchmark_of(words).call(words[3:])
        return 0
    return run(words[1:])


def subcommands(command: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(command, "commands", {})
    return found


def every_flag(command: Any) -> set[str]:
    own = {name for parameter in command.params for name in parameter.opts}
    own |= {name for parameter in command.params for name in parameter.secondary_opts}
    return own.union(*(every_flag(inner) for inner in subcommands(command).values()), set())


@functools.cache
def flags_of_benchmarks() -> set[str]:
    parsers = [benchmark_of(["", "", f"benchmarks.{name}"]).parser() for name in names()]
    return {flag for parser in parsers for flag in parser._option_string_actions}


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_parse(words: list[str]) -> None:
    command = typer.main.get_command(app)
    while words and (inner := subcommands(command).get(words[0])):
        command, words = inner, words[1:]
    assert not subcommands(command) or words == ["--version"], f"no command {words}"
    if not subcommands(command):
        command.make_context(command.name, list(words))  # raises where a flag is not known


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_flags_in_the_text_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    spans = re.findall(r"`([^`]+)`", text)
    flags = {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)}
    unknown = flags - every_flag(typer.main.get_command(app)) - flags_of_benchmarks() - OTHER_FLAGS
    assert not unknown, f"{page.name} names flags that no command has: {sorted(unknown)}"


# What runs.


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_blocks_say_whether_they_run(block: Block) -> None:
    if block.commands:
        assert block.marker, f"{block}: mark it as scripts/page_outputs.py says"
    for name in re.findall(r"tests/[\w/.]+\w", block.marker):
        assert (ROOT / name).exists(), f"{block} names {name}, which is not there"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the recipes and a result of AIPerf; no settings in the environment."""
    for name in [name for name in os.environ if name.startswith("TOKENMILL_")]:
        monkeypatch.delenv(name)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / AIPERF.name).symlink_to(AIPERF)
    with chdir(tmp_path):
        yield tmp_path


RUN = [block for block in SHELL if block.marker.startswith("run")]
DONE: set[tuple[str, ...]] = set()  # some commands stand on several pages


@pytest.mark.parametrize("block", RUN, ids=str)
def test_commands_run(block: Block, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exact = block.marker == SAME_OUTPUT
    for words in block.commands:
        assert (tuple(words) in DONE and not exact) or execute(words) == 0, capfd.readouterr().err
        DONE.add(tuple(words))
    if exact:
        found = capfd.readouterr().out
        stale = [line for line in block.shown if line not in found.splitlines()]
        assert not stale, "run python scripts/page_outputs.py"


def test_the_answer_in_the_readme_is_the_default_models(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [b for b in SHELL if b.page.name == "README.md" and "capital of France" in b.text]
    (block,) = shown
    body = json.loads(next(word for words in block.commands for word in words if word[0] == "{"))
    flags = ["--temperature", str(body["temperature"]), "--max-tokens", "16", "--json"]
    assert run(["generate", body["prompt"], *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(block.shown[-1]) == report["text"]


def test_measured_figures_stand_in_one_file() -> None:
    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    for path in [*PAGES, *recipes]:
        text = path.read_text(encoding="utf-8")
        assert with_figures(page_name(path), text) == text, "run python scripts/page_outputs.py"
    for page in (ROOT / "README.md", ROOT / "docs" / "benchmarking.md"):
        assert START in page.read_text(encoding="utf-8")
    assert {row["recipe"] for row in MEASURED if "recipe" in row} <= {r.name for r in recipes}


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    limits = SchedulerConfig(max_model_len=16384)  # a token of the trace is several bytes
    pool = PoolConfig(workers=2)
    with sim_server(None, limits, step_ms=1.0, pool=pool) as running:
        yield running


def curl(words: list[str], server: SimServer) -> None:
    url = next(word for word in words if word.startswith(SERVED)).replace(SERVED, server.url)
    body = words[words.index("-d") + 1].encode() if "-d" in words else None
    if body:
        body = json.dumps(json.loads(body) | {"model": MODEL}).encode()
    call = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(call, timeout=300) as answer:
        assert answer.status == 200 and answer.read()


SERVES = [
    pytest.param(words[1:], id=f"{block}: {' '.join(words[1:4])}")
    for block in SHELL
    for words in block.commands
    if block.marker.startswith("serves") and words[0] == "tokenmill"
]


@pytest.mark.parametrize("words", SERVES)
def test_servers_come_to_the_point_of_serving(
    words: list[str], folder: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a command does before it starts a server; every model is the default one here."""
    started: list[Any] = []
    for module in (cli_serve, cli_route):
        monkeypatch.setattr(module, "fetch", lambda model: smollm2_path)
    for module, name in (
        *((api_server, "serve"), (front_server, "serve_fronts"), (proxy_server, "route")),
        (video_server, "serve_videos"),
    ):
        monkeypatch.setattr(module, name, lambda *arguments: started.append(arguments))
    assert run(words) == 0 and len(started) == 1


SERVER_PAGES = sorted({block.page for block in BLOCKS if block.marker == "server"})


@pytest.mark.parametrize("page", SERVER_PAGES, ids=page_name)
def test_commands_run_against_a_server(
    page: Path, server: SimServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page run in their order: later ones read what earlier ones wrote."""
    monkeypatch.setenv("TOKENMILL_URL", f"{server.url}/v1")
    for block in (block for block in BLOCKS if block.page == page and block.marker == "server"):
        if block.language == "python":
            text = block.text.replace(SERVED, server.url).replace('"smollm2"', repr(MODEL))
            exec(compile(text, str(block), "exec"), {})
            continue
        for words in block.commands:
            if words[0] == "curl":
                curl(words, server)
                continue
            arguments = [word.replace(SERVED, server.url) for word in words]
            assert execute(arguments) == 0, f"{block}: {' '.join(words)}"


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}), ids=page_name)
def test_python_runs(page: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of a page share their names, as in one file."""
    names: dict[str, Any] = {}
    for block in (block for block in PYTHON if block.page == page):
        code = compile(block.text, str(block), "exec")
        if block.marker == "run":
            exec(code, names)
            assert capsys.readouterr().out


# What the pages say beside commands.


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.strip().replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_modules_in_the_text_exist(page: Path) -> None:
    """`engine/build.py` is a module of the package, or a file of the repository."""
    if page.name == "changes.md":
        return
    places = (ROOT, ROOT / "src" / "tokenmill")
    for name in re.findall(r"`([\w./]+/[\w*.]+\.\w+)`", page.read_text(encoding="utf-8")):
        if name[0] == "." or not any((place / name.split("/")[0]).is_dir() for place in places):
            continue
        assert any(list(place.glob(name)) for place in places), f"{page.name} names {name}"


def test_readme_is_short_and_narrow() -> None:
    lines = PAGES[0].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) < 100


def test_pictures_are_small() -> None:
    for path in (ROOT / "docs" / "images").glob("*"):
        assert path.suffix == ".png" and path.stat().st_size < 200_000


def test_the_list_of_modules_is_fresh() -> None:
    page = module_table.PAGE.read_text(encoding="utf-8")
    assert module_table.render(page) == page, "run python scripts/module_table.py"
    assert not re.findall(r"^(?:- `|\*\*`).*: ?$", page, re.M), "a module without a docstring"


def test_the_share_of_sliding_layers_agrees_with_the_spec() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    shape = ROOT / "src" / "tokenmill" / "bench" / "shapes" / "gpt-oss-120b.json"
    spec = spec_of(json.loads(shape.read_text(encoding="utf-8")))
    share = kept_positions(spec.layer_windows, 8192) / (spec.num_layers * 8192)
    kib = share * spec.kv_bytes_per_token(2) / 1024
    assert f"{share:.0%} of that in gpt-oss-120b, {kib:.1f} KiB" in text.replace(" %", "%")


def test_the_table_of_memory_agrees_with_the_specs() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$", text, re.M)
    assert rows
    for name, gigabytes, kib, tokens in rows:
        shape = ROOT / "src" / "tokenmill" / "bench" / "shapes" / f"{name}.json"
        spec = spec_of(json.loads(shape.read_text(encoding="utf-8")))
        token_bytes = spec.kv_bytes_per_token(2)
        assert f"{spec.weight_bytes(2) / 1e9:.1f}" == gigabytes
        assert float(kib) == pytest.approx(token_bytes / 1024, abs=0.05)
        assert tokens == f"{10 * 2**30 // token_bytes:,}"

"""The command line: help, errors in one sentence, and the commands that need no model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tokenmill import __version__
from tokenmill.__main__ import run
from tokenmill.api import server as api_server
from tokenmill.bench.options import EndpointConfig
from tokenmill.cli import serve
from tokenmill.cli.app import app
from tokenmill.cli.chat import local_chat as local
from tokenmill.cli.process_app import MODULES, process_app
from tokenmill.core.config import PoolConfig
from tokenmill.settings import CACHE, SAMPLING, SERVER, Settings, defaults_of, only
from tokenmill.settings.options import shown_default

ROLES = ("--prefill", "1", "--decode", "1")
ENGINE = defaults_of(serve.WORKER_SETTINGS)


@pytest.fixture(autouse=True)
def clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("TOKENMILL_")]:
        if name != "TOKENMILL_CACHE":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """All commands of the app by their words."""
    found: dict[tuple[str, ...], Any] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, (*path, name))
        else:
            found[(*path, name)] = command
    return found


COMMANDS = commands(typer.main.get_command(app))


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and the one line on stderr."""
    status = run(arguments)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert captured.err.startswith("error: ")
    return status, captured.err.removeprefix("error: ").strip()


@pytest.mark.parametrize("words", [(name,) for name in MODULES])
def test_a_process_takes_the_flags_of_the_whole_command_line(words: tuple[str, ...]) -> None:
    """And no other command is there with it than those of its module."""
    own = process_app([*words, "--flag"])
    assert own is not None and process_app(words[:-1]) is None
    (command,) = (c for w, c in commands(typer.main.get_command(own)).items() if w == words)
    flags, expected = ([(p.name, p.opts) for p in c.params] for c in (command, COMMANDS[words]))
    assert flags == expected
    assert len(commands(typer.main.get_command(own))) < 8 < len(COMMANDS)


@pytest.mark.parametrize("words", [(), ("bench",), *COMMANDS], ids=" ".join)
def test_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--help"]) == 0
    assert f"Usage: {' '.join(('tokenmill', *words))}" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 30])
def test_help_shows_every_flag_whole(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words, command in COMMANDS.items():
        whole = any("--help-all" in param.opts for param in command.params)
        assert run([*words, "--help-all" if whole else "--help"]) == 0
        text = capsys.readouterr().out
        shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*(?![\w…-])", text))
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
        flags = {flag for p in options for flag in (*p.opts, *p.secondary_opts)}
        assert not flags - shown, f"{words} at {columns} columns: {flags - shown}"
        assert columns < 40 or max(map(len, text.splitlines())) <= columns, words
    for group in ((), ("bench",), ("plan",)):
        assert run([*group, "--help"]) == 0
        text = capsys.readouterr().out
        names = {w[len(group)] for w, c in COMMANDS.items() if w[: len(group)] == group}
        hidden = {w[-1] for w, c in COMMANDS.items() if c.hidden}
        assert not [name for name in names - hidden if name not in text.split()], group


@pytest.mark.parametrize("name", ["serve", "chat", "generate"])
def test_help_shows_the_flags_that_people_use(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([name, "--help"]) == 0
    text = capsys.readouterr().out
    flags = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    assert 18 <= len(flags) <= 24 and {"--dtype", "--tp", "--help-all", "--help"} <= {*flags}
    assert len(text.splitlines()) < 105
    assert run([name, "--help-all"]) == 0
    every = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert f"{len(every) - len(flags)} more flags: tokenmill {name} --help-all" in text


def test_a_shell_completes_commands() -> None:
    env = {"_TOKENMILL_COMPLETE": "complete_bash", "COMP_WORDS": "tokenmill ser", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "tokenmill"]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert done.stdout.split() == ["serve"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenmill {__version__}\n"


def test_every_flag_is_a_setting() -> None:
    others = {
        "--config",
        "--help-all",
        "--help",
        "-h",
        "--address",
        "--part",
        "--feature-connector",
        "--copy",
    }
    for words, command in COMMANDS.items():
        flags = {f for p in command.params if p.param_type_name == "option" for f in p.opts}
        taken = getattr(command.callback, "taken", {})
        unknown = {flag for flag in flags - others if flag.removeprefix("--") not in taken}
        assert not unknown, f"{words}: {unknown} cannot be set by environment or file"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["serve", "--prot", "1"], 2, "No such option: --prot"),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["generate"], 2, "Missing argument 'PROMPT'"),
        (["serve", "--port", "x"], 2, "--port must be a whole number from 0 to 65535, got 'x'"),
        (
            ["serve", "--kv-cache-memory", "lots"],
            2,
            "--kv-cache-memory must be a size such as 2GiB",
        ),
        (["serve", "a", "--model", "b"], 2, "give MODEL or --model, not both"),
        (["serve", "--config", "gone.toml"], 2, "gone.toml: cannot read the settings"),
        (["generate", "", "--max-tokens", "4"], 2, "PROMPT is empty"),
        (["generate", "x", "--min-tokens", "9", "--max-tokens", "4"], 1, "min_tokens (9) must not"),
        (["pull", "no-such-model"], 1, "model 'no-such-model': tried it as a path"),
        (["serve", "./nowhere"], 1, "model './nowhere': tried it as a path"),
        (["serve", "--prefill", "1"], 2, "--prefill needs --decode: prefill workers only"),
        (["serve", "--prefill-set", "dtype=fp32"], 2, "--prefill-set needs --prefill and --decode"),
        (["serve", "--fronts", "0"], 2, "--fronts must be a whole number from 1 to 1024, got '0'"),
        (["serve", *ROLES, "--workers", "2"], 2, "give --workers or --prefill and --decode"),
        (
            ["serve", *ROLES, "--decode-set", "model=other"],
            2,
            "--decode-set model: prefill and decode workers have the same model",
        ),
        (
            ["serve", *ROLES, "--prefill-set", "block-size"],
            2,
            "--prefill-set must be SETTING=VALUE of an engine",
        ),
        (["chat", "--url", "http://127.0.0.1:9/v1"], 1, "cannot reach http://127.0.0.1:9/v1"),
        (["chat", "--url", "nonsense"], 1, "cannot reach nonsense"),
        (["route"], 2, "--backend is missing: give the URL of each server"),
        (["route", "--backend", "host:1"], 2, "--backend must be http://HOST:PORT"),
        (
            ["route", "--backend=http://h:1", "--backend=http://h:1/v1"],
            2,
            "--backend http://h:1/v1",
        ),
        (["route", "--backend=http://h", "--chat-template=t"], 2, "--chat-template needs --tok"),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    got_status, sentence = failed(capsys, *arguments)
    assert got_status == status
    assert sentence.startswith(message)


@pytest.mark.parametrize(
    ("asked", "pool", "gpus", "connector"),
    [
        (None, {}, 0, "shm"),
        ("auto", {}, 0, "shm"),
        ("nixl", {}, 0, "nixl"),
        (None, {"ray_address": "10.0.0.1:6379"}, 0, "auto"),
        (None, {}, 2, "auto"),
    ],
)
def test_one_machine_without_a_gpu_needs_no_nixl(
    asked: str | None,
    pool: dict[str, Any],
    gpus: int,
    connector: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "_num_gpus", lambda: gpus)
    settings = Settings({} if asked is None else {"kv-connector": asked}, ENGINE)
    config = PoolConfig(prefill=1, decode=1, **pool)
    assert serve._roles(settings, config).get("kv-connector") == connector


@pytest.mark.parametrize("gpus", [1, 2])
def test_two_workers_may_not_both_take_most_of_a_gpu(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_num_gpus", lambda: gpus)
    pool, asked = PoolConfig(prefill=1, decode=1), Settings({"gpu-memory-utilization": 0.9}, ENGINE)
    uneven = Settings({"gpu-memory-utilization": 0.1}, ENGINE)
    serve._check_gpu_shares([asked, uneven], pool)
    if gpus == 2:
        return serve._check_gpu_shares([asked, asked], pool)
    with pytest.raises(
        serve.SettingsError, match=r"0\.9: 2 workers .* would take 180% of one; give 0\.47"
    ):
        serve._check_gpu_shares([asked, asked], pool)


IMAGE_FLAGS = {
    "--image-host": "example.com",
    "--image-folder": ".",
}


@pytest.mark.parametrize("flag", IMAGE_FLAGS)
def test_a_model_of_text_takes_no_flags_of_images(
    flag: str,
    smollm2_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_server, "serve", lambda *arguments: None)
    status, sentence = failed(capsys, "serve", str(smollm2_path), flag, IMAGE_FLAGS[flag])
    assert (status, sentence) == (2, f"{flag}: the model takes no images; leave the flag out")


def test_every_flag_of_images_is_refused_by_a_model_of_text(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the environment, too; without one the model is served."""
    assert {f"--{key}" for key in serve.IMAGE_ONLY} == IMAGE_FLAGS.keys()
    started: list[Any] = []
    monkeypatch.setattr(api_server, "serve", lambda *arguments: started.append(arguments))
    assert run(["serve", str(smollm2_path)]) == 0 and len(started) == 1
    monkeypatch.setenv("TOKENMILL_IMAGE_FOLDER", ".")
    assert failed(capsys, "serve", str(smollm2_path))[1].startswith("--image-folder: the model")


def test_unexpected_errors_have_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(name: str) -> Path:
        raise RuntimeError("boom")

    monkeypatch.setattr(local, "fetch", break_down)
    assert failed(capsys, "generate", "x") == (
        1,
        "RuntimeError: boom (TOKENMILL_TRACEBACK=1 shows where)",
    )
    monkeypatch.setenv("TOKENMILL_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="boom"):
        run(["generate", "x"])


def test_file_and_environment_reach_a_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(local, "load_llm", lambda settings: seen.append(settings) or sys.exit(7))
    (tmp_path / "tokenmill.toml").write_text("max-tokens = 3\ntemperature = 0.1\n[serve]\nport = 1")
    monkeypatch.setenv("TOKENMILL_TEMPERATURE", "0.2")
    for extra, expected in (([], 3), (["--max-tokens", "5"], 5)):
        with pytest.raises(SystemExit):
            run(["generate", "x", *extra])
        assert seen[-1].get("max-tokens") == expected
        assert seen[-1].get("temperature") == 0.2
        assert "port" not in seen[-1]


def test_unknown_key_names_key_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenmill.toml").write_text("max-token = 3")
    status, sentence = failed(capsys, "generate", "x")
    assert status == 2
    assert sentence == "tokenmill.toml: unknown key 'max-token'; did you mean 'max-tokens'?"


def test_worker_gets_the_engine_settings_only() -> None:
    settings = Settings({"api-key": ("secret",), "port": 1, "dtype": "fp32", "prefix-cache": False})
    line = serve.worker_command(settings, Path("/models/m.gguf"))
    assert line[1:5] == ["-P", "-m", "tokenmill", "worker-process"]
    assert line[5:] == ["--model=/models/m.gguf", "--dtype=fp32", "--no-prefix-cache"]


def test_a_gpu_is_wanted_where_workers_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tokenmill.core.gpus.visible_gpus", list)
    monkeypatch.setattr(serve, "fetch", lambda model: sys.exit(7))
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("0" * 32)
    assert failed(capsys, "serve", "--device", "cuda")[1].startswith("--device cuda: this machine")
    joined = ["--workers", "0", "--join-listen", "127.0.0.1", "--token-file", "token"]
    for elsewhere in (["--ray-address", "10.0.0.1:6379"], joined):
        with pytest.raises(SystemExit, match="7"):
            run(["serve", "--device", "cuda", *elsewhere])


def test_model_names(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"")
    assert serve.model_name(str(tmp_path / "tiny.gguf")) == "tiny"
    assert serve.model_name(".") == tmp_path.name
    assert serve.model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_defaults_in_the_words_of_a_flag() -> None:
    (image_size,) = only(EndpointConfig, "image-size")
    (temperature,) = only(SAMPLING, "temperature")
    shown = [shown_default(s, {}) for s in only((*SERVER, *CACHE), "max-body-size", "prefix-cache")]
    assert shown == ["16MiB", "on"]
    assert shown_default(temperature, {"temperature": 0.7}) == "0.7"
    assert shown_default(image_size, {}) == "1024x1024"
    assert shown_default(only(SERVER, "api-key")[0], {}) == ""


def test_closed_stdout_and_module_entry(tmp_path: Path) -> None:
    """As in `tokenmill pull | head -0`: no traceback, whatever the status."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tokenmill", "pull"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert "Traceback" not in result.stderr

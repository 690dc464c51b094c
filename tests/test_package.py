"""What is installed beside the code: recipes that commands find anywhere, types, clean archives."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tokenmill.__main__ import run
from tokenmill.bench.results.mooncake import read_trace
from tokenmill.core import installation
from tokenmill.core.installation import recipes_folder, with_recipes

ROOT = Path(__file__).parents[1]
LISTED = "git", "ls-files", "--cached", "--others", "--exclude-standard"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """The names in the wheel and in the sdist that the build makes of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return set(zipfile.ZipFile(wheel).namelist()), names


def test_the_archives_are_whole_and_clean(archives: tuple[set[str], set[str]]) -> None:
    wheel, sdist = archives
    listed = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True)
    files = [name for name in listed.stdout.split() if (ROOT / name).is_file()]
    if not files:
        pytest.skip("not a git checkout")
    for name in files:
        if name.startswith("src/tokenmill/"):
            assert name.removeprefix("src/") in wheel
        elif name.startswith("recipes/"):
            assert f"tokenmill/{name}" in wheel
    assert "tokenmill/py.typed" in wheel
    assert all(name.startswith(("tokenmill/", "tokenmill-0")) for name in wheel)
    outside = {".gitignore", ".dockerignore", ".ci/run"}
    assert set(files) - sdist <= outside
    assert sdist - set(files) <= {"PKG-INFO"}


def test_a_recipe_is_found_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_recipes(Path("recipes/sample-trace.jsonl")).is_file()
    assert len(read_trace("recipes/sample-trace.jsonl", 512)) == 60
    assert with_recipes(Path("recipes/none.toml")) == Path("recipes/none.toml")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sample-trace.jsonl").write_text("mine")
    assert with_recipes(Path("recipes/sample-trace.jsonl")).read_text() == "mine"


def test_recipes_are_listed_printed_and_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted(file.name for file in recipes_folder().iterdir())
    assert run(["recipes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names
    assert run(["recipes", "serve-smollm2-cpu.toml"]) == 0
    assert capsys.readouterr().out == (recipes_folder() / "serve-smollm2-cpu.toml").read_text()
    assert run(["recipes", "--copy", str(tmp_path / "mine")]) == 0
    assert sorted(file.name for file in (tmp_path / "mine").iterdir()) == names
    assert run(["recipes", "--copy", str(tmp_path / "mine")]) == 1
    assert "is there already" in capsys.readouterr().err
    assert run(["recipes", "nothing"]) == 1
    assert "'tokenmill recipes' lists their names" in capsys.readouterr().err


def test_a_missing_package_is_named_as_pip_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["ray<3,>=2.50 ; extra == 'ray'", "av>=14 ; extra == 'video'", "numpy>=2"]
    monkeypatch.setattr(installation, "requires", lambda _: lines)
    assert installation.install_command("ray") == "pip install 'ray<3,>=2.50'"
    monkeypatch.setattr(installation, "requires", lambda _: None)
    assert installation.install_command("ray") == "pip install 'tokenmill[ray]'"

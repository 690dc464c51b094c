"""A twin has the name and the signature of its reference; read from the source, without a GPU."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenmill.kernels
from tokenmill.kernels import MODE, always, kernel

ROOT = Path(tokenmill.kernels.__file__).parent
MODULES = sorted(path.stem for path in ROOT.glob("*.py") if path.stem != "__init__")
FOLDERS = ("gpu", "cpu")


def declared(module: str) -> dict[str, Any]:
    """The kernels of a module."""
    found = vars(import_module(f"tokenmill.kernels.{module}"))
    own = f"tokenmill.kernels.{module}"
    return {n: k for n, k in found.items() if hasattr(k, "twins") and k.__module__ == own}


def functions(folder: str, module: str) -> dict[str, str]:
    """The signatures of a module's functions as they are written; none without such a module."""
    path = ROOT / folder / f"{module}.py"
    if not path.exists():
        return {}
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {
        node.name: f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns or node)}"
        for node in nodes
        if isinstance(node, ast.FunctionDef) and not node.decorator_list
    }


def written(function: Any) -> str:
    """The signature of a reference as it is written."""
    (node,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(node, ast.FunctionDef) and node.returns is not None
    return f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_twin_has_the_signature_of_its_reference(folder: str, module: str) -> None:
    twins, kernels = functions(folder, module), declared(module)
    for name, own in kernels.items():
        has_twin = getattr(own, f"has_{folder}")
        if has_twin:
            assert name in twins, f"{folder}/{module}.py has no {name}"
        if name in twins:
            assert has_twin, f"{folder}/{module}.py: nobody calls {name}"
            assert twins[name] == written(own.reference), f"{folder}/{module}.py: {name}"


def test_kernels_are_found() -> None:
    """The kernels that a step of every kind of model needs are among them."""
    for module, names in {
        "attention": {"attend_paged", "rope_and_cache"},
        "mla": {"attend_latent"},
        "rows": {"rms_norm"},
        "matmul": {"matmul"},
    }.items():
        own = declared(module)
        assert names <= own.keys()
        assert all(own[name].has_gpu and own[name].has_cpu for name in names)


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel whose twins say who they are."""

    @kernel(gpu=always, cpu=lambda wide: wide)
    def double(x: torch.Tensor, wide: bool = False) -> str:
        return "reference"

    monkeypatch.setitem(double.twins, "gpu", lambda x, wide=False: "gpu")
    monkeypatch.setitem(double.twins, "cpu", lambda x, wide=False: "cpu")
    return double


def test_a_call_goes_where_it_is_taken(doubled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    assert doubled(x) == "reference"
    assert doubled(x, True) == doubled(x, wide=True) == "cpu"
    monkeypatch.setattr(tokenmill.kernels, "on_gpu", lambda x: True)
    assert doubled(x) == doubled(x, wide=True) == "gpu"
    monkeypatch.setattr(MODE, "without", frozenset({"double"}))
    assert doubled(x, True) == "reference"
    monkeypatch.setattr(MODE, "without", frozenset())
    monkeypatch.setattr(MODE, "fused", False)
    assert doubled(x, True) == "reference"


def test_what_decides_is_asked_for_parameters_of_the_reference() -> None:
    with pytest.raises(AssertionError, match="twice: asked for \\['y'\\]"):

        @kernel(gpu=lambda y: y)
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x


def test_without_compiled_kernels_the_reference_runs(
    doubled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(doubled.twins, "cpu")
    monkeypatch.setattr(tokenmill.kernels, "_cpu_kernels_run", lambda: False)
    assert doubled(torch.zeros(1), True) == "reference"


def test_a_kernel_is_named_as_its_reference(doubled: Any) -> None:
    assert doubled.__name__ == "double" and doubled.reference(torch.zeros(1)) == "reference"

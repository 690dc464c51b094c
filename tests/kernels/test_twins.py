"""The twins of a kernel take what the dispatch gives them; read from the source, without a GPU.

A call through gpu_twin() or cpu_twin() is typed as a call of the torch reference, so the twin must
have the reference's signature. All other calls of compiled("m") and triton_kernels("m") must fit
the function of that module; where one call may go to either, both must have one signature.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tokenmill.kernels

ROOT = Path(tokenmill.kernels.__file__).parent
FOLDERS = {"compiled": "cpu", "triton_kernels": "gpu", "cpu_twin": "cpu", "gpu_twin": "gpu"}
DISPATCH = sorted(path for path in ROOT.glob("*.py") if path.name != "__init__.py")


@cache
def functions(path: Path) -> dict[str, inspect.Signature]:
    """The signatures of a module's functions and classes, without annotations."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = signature(node.args)
        elif isinstance(node, ast.ClassDef):
            inits = [
                d for d in node.body if isinstance(d, ast.FunctionDef) and d.name == "__init__"
            ]
            if inits:
                parameters = list(signature(inits[0].args).parameters.values())
                found[node.name] = inspect.Signature(parameters[1:])
    return found


def signature(arguments: ast.arguments) -> inspect.Signature:
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(positional)
    kinds += [inspect.Parameter.KEYWORD_ONLY] * len(arguments.kwonlyargs)
    every = zip(
        positional + arguments.kwonlyargs, defaults + arguments.kw_defaults, kinds, strict=True
    )
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.arg,
                kind,
                default=inspect.Parameter.empty if default is None else ast.unparse(default),
            )
            for argument, default, kind in every
        ]
    )


def twin_of(helper: str, module: str, name: str) -> inspect.Signature:
    """The twin that a dispatch names, or an error that says which one is missing."""
    folder = (ROOT / FOLDERS[helper]).joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    assert path.exists() and name in functions(path), f"{FOLDERS[helper]}/{module}.py has no {name}"
    return functions(path)[name]


def called(node: ast.AST, names: dict[str, list[ast.expr]]) -> Iterator[tuple[str, str, str]]:
    """(helper, module, function) that an expression may stand for, through local names."""
    if isinstance(node, ast.Name):
        for value in names.get(node.id, ()):
            yield from called(value, {})
    elif isinstance(node, ast.IfExp):
        yield from called(node.body, names)
        yield from called(node.orelse, names)
    elif isinstance(node, ast.Attribute):
        for helper, module in modules(node.value, names):
            yield helper, module, node.attr


def modules(node: ast.AST, names: dict[str, list[ast.expr]]) -> Iterator[tuple[str, str]]:
    """(helper, module) of `compiled("m")`, of a name for it, or of a name for either helper."""
    if isinstance(node, ast.Name):
        for value in names.get(node.id, ()):
            yield from modules(value, {})
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        chosen = [ast.unparse(value) for value in names.get(node.func.id, ())] or [node.func.id]
        for helper in ("compiled", "triton_kernels"):
            if any(helper in text.split() for text in chosen):
                assert isinstance(node.args[0], ast.Constant)
                yield helper, str(node.args[0].value)


def assigned(function: ast.AST) -> dict[str, list[ast.expr]]:
    names: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, []).append(node.value)
    return names


def dispatched(path: Path) -> Iterator[tuple[ast.Call, list[tuple[str, str, str]]]]:
    """The calls of a module that go to twins, each with all twins that it may go to."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            names = assigned(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and (found := list(called(node.func, names))):
                    yield node, found


@pytest.mark.parametrize("path", DISPATCH, ids=lambda path: path.stem)
def test_calls_fit_the_twins_that_they_go_to(path: Path) -> None:
    for call, found in dispatched(path):
        signatures = {str(twin_of(*twin)) for twin in found}
        assert len(signatures) == 1, f"{ast.unparse(call.func)}: twins differ: {signatures}"
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            continue
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        twin_of(*found[0]).bind(*call.args, **keywords)


@pytest.mark.parametrize("path", DISPATCH, ids=lambda path: path.stem)
def test_typed_twins_have_the_signature_of_the_reference(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id in ("cpu_twin", "gpu_twin"):
            reference = ast.unparse(node.args[0])
            twin = twin_of(node.func.id, path.stem, reference.removesuffix("_reference"))
            assert twin == functions(path)[reference], f"{node.func.id}({reference})"


def test_all_twins_are_looked_at() -> None:
    """The kernels that a step of every kind of model needs are among them."""
    found = {twin for path in DISPATCH for _, twins in dispatched(path) for twin in twins}
    for helper in ("compiled", "triton_kernels"):
        assert {(helper, "attention", "paged_attention"), (helper, "rows", "rms_norm")} <= found
        assert {
            (helper, "mla", "latent_attention"),
            (helper, "attention", "rope_and_cache"),
        } <= found

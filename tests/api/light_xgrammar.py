"""xgrammar without torch and transformers, which it imports and simulated workers do not need.

Imports are most of what the start of a simulated worker costs; masks are numpy arrays here.
"""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

from tokenmill.engine.sampling.grammar import GrammarBackend

_IMPORTING = threading.Lock()


class LightGrammar(GrammarBackend):
    """The real one, without what its imports cost."""

    def _make_compiler(self) -> Any:
        with _IMPORTING:
            if "xgrammar" not in sys.modules:
                import_xgrammar()
        return super()._make_compiler()


class _Empty(types.ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


def import_xgrammar() -> None:
    """Import it with empty modules in the place of what it does not need; they are gone then."""
    names = ("torch", "torch.cuda", "torch.utils", "torch.utils.cpp_extension", "transformers")
    modules = {name: _Empty(name) for name in names}
    torch = modules["torch"]
    torch.__version__, torch.__path__, torch.cuda = "0", [], modules["torch.cuda"]  # type: ignore[attr-defined]
    torch.tensor = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    torch.compile = lambda *args, **kwargs: lambda function: function  # type: ignore[attr-defined]
    torch.cuda.is_available = lambda: False
    sys.modules.update(modules)
    try:
        import xgrammar  # noqa: F401
    finally:
        for name in modules:
            del sys.modules[name]

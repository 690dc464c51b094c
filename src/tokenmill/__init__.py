"""tokenmill: an AI factory in one Python package."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.async_llm import AsyncLLM
    from tokenmill.core.types import SamplingParams
    from tokenmill.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncLLM": "tokenmill.async_llm",
    "LLM": "tokenmill.llm",
    "SamplingParams": "tokenmill.core.types",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import tokenmill` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

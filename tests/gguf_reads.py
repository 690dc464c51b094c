"""transformers parses a GGUF file again for each of its questions; here it does so once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

import gguf


@contextmanager
def one_read() -> Iterator[None]:
    """What is read within is parsed once, and one table of tensor names is made."""
    with (
        mock.patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield

"""How long the path of a chat is; these ceilings only go down."""

from __future__ import annotations

import asyncio
from pathlib import Path

from e2e.request_path import traced

MODULES, FUNCTIONS = 93, 600
TYPES_IN, TYPES_OUT = 23, 17


def test_a_chat_passes_no_more_modules_functions_and_types_than_it_did(tmp_path: Path) -> None:
    tracer = asyncio.run(traced(tmp_path))
    sides = tracer.front, tracer.worker
    modules = set().union(*(side.modules for side in sides))
    functions = set().union(*(side.functions for side in sides))
    held_in, held_out = (set().union(*(s.types[way] for s in sides)) for way in ("in", "out"))
    told = f"in: {sorted(held_in)}\nout: {sorted(held_out)}"
    assert len(modules) <= MODULES and len(functions) <= FUNCTIONS
    assert len(held_in) <= TYPES_IN and len(held_out) <= TYPES_OUT, told

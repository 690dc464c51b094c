"""Lists the benchmarks: `python -m benchmarks`."""

from __future__ import annotations

import ast
from pathlib import Path

from tokenmill import console


def names() -> dict[str, str]:
    """Each module that runs by itself, with the first line of its docstring."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if "\nBENCHMARK = " in text:
            about = ast.get_docstring(ast.parse(text)) or ""
            found[path.stem] = about.splitlines()[0]
    return found


if __name__ == "__main__":
    for name, about in names().items():
        console.out.print(f"python -m benchmarks.{name:14} {about}", markup=False)

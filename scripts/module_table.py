"""Write the generated parts of docs/architecture.md: one line a module, and who imports whom.

    python scripts/module_table.py            # after a docstring or an import rule has changed
python scripts/module_table.py --check    # exit status 1 where the page is stale
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tokenmill"
PAGE = ROOT / "docs" / "architecture.md"
RULES = ROOT / "tests" / "test_imports.py"


def summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return first.rstrip(".")


def module_list() -> str:
    """The modules of every package under its name, each with its first sentence."""
    lines: list[str] = []
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    for folder in folders:
        name = folder.relative_to(PACKAGE).as_posix()
        shown = "tokenmill" if name == "." else name
        lines += ["", f"**`{shown}`**: {summary(folder / '__init__.py')}", ""]
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        lines += [f"- `{path.name}`: {summary(path)}" for path in modules]
    return "\n".join(lines).strip()


def import_table(allowed: Mapping[str, set[str]], homes: Mapping[str, tuple[str, ...]]) -> str:
    lines = ["| unit | may import | libraries that have a home there |", "|---|---|---|"]
    for unit, others in allowed.items():
        libraries = [
            library
            for library, places in sorted(homes.items())
            if any(_row_of(place, allowed) == unit for place in places)
        ]
        ours = ", ".join(sorted(others)) or "nothing of ours"
        lines.append(f"| `{unit}` | {ours} | {', '.join(libraries) or 'none'} |")
    return "\n".join(lines)


def _row_of(place: str, allowed: Mapping[str, set[str]]) -> str:
    """The row that holds for a home: the one that names most of its path."""
    parts = place.rstrip("/").split("/")
    rows = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(row for row in rows if row in allowed)


def render(page: str) -> str:
    spec = importlib.util.spec_from_file_location("import_rules", RULES)
    assert spec is not None and spec.loader is not None
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    page = put(page, "modules", module_list())
    return put(page, "imports", import_table(rules.ALLOWED, rules.HOMES))


def put(page: str, name: str, text: str) -> str:
    """The page with another text between the comments of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    found = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", page, re.DOTALL)
    assert found is not None, f"the page has no {begin}"
    return page[: found.start()] + f"{begin}\n{text}\n{end}" + page[found.end() :]


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    new = render(page)
    if "--check" in sys.argv[1:]:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

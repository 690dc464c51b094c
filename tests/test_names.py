"""One name has one meaning: no public class name occurs twice in the package."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import tokenmill

ROOT = Path(tokenmill.__file__).parent
LEFT = {  # occur twice; a name that is freed leaves this list
    *("Answer", "Checkpoint", "Hello", "Membership", "Refused", "StepMeter"),
}


def public_classes(path: Path) -> list[str]:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    return [name for name in names if not name.startswith("_")]


def test_no_public_class_name_occurs_twice() -> None:
    counts = Counter(name for path in ROOT.rglob("*.py") for name in public_classes(path))
    twice = {name for name, count in counts.items() if count > 1}
    assert not twice - LEFT, f"named twice: {sorted(twice - LEFT)}"

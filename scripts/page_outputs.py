"""The fenced blocks of the pages, and fresh outputs for those that say `run, same output`.

    python scripts/page_outputs.py

A comment before a block says what tests/test_docs.py does with its commands: `<!-- run -->`,
`<!-- run, same output -->`, `<!-- server -->` (against a simulated server),
`<!-- serves: tests/... -->` (up to where the server would start, which the test named starts) or
`<!-- not run: why -->`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOG = ROOT / "docs" / "log.md"  # of the past: its commands may be gone
DOCS = sorted(path for path in ROOT.glob("docs/*.md") if path != LOG)
PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *DOCS]
MARKER = re.compile(r"<!-- (run|run, same output|server|serves: .+|not run: .+) -->")
SAME_OUTPUT = "run, same output"


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its fence
    language: str
    marker: str
    text: str

    def __str__(self) -> str:
        return f"{page_name(self.page)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each tokenmill or curl command; what follows a pipe is left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        words = [shlex.split(line, comments=True) for line in lines]
        cut = [line[: line.index("|")] if "|" in line else line for line in words]
        return [line for line in cut if line and line[0] in ("tokenmill", "curl")]

    @property
    def shown(self) -> list[str]:
        """The output that a console block shows."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line and not line.startswith("$ ")]


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    begin: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if begin is None:
            begin = number
            continue
        before = MARKER.fullmatch(lines[begin - 1]) if begin else None
        text = "\n".join(lines[begin + 1 : number])
        marker = before[1] if before else ""
        yield Block(page, begin + 1, lines[begin].removeprefix("```"), marker, text)
        begin = None


def refresh(block: Block) -> None:
    """Put the present output of the block's one command below it, but for the JSON line."""
    (command,) = block.commands
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=True, cwd=ROOT
    )
    output = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("{")]
    end = block.text.find("\n" + block.shown[0])
    page = block.page.read_text(encoding="utf-8")
    fresh = "\n".join([block.text[:end], *output])
    block.page.write_text(page.replace(block.text, fresh), encoding="utf-8")


def main() -> None:
    for page in PAGES:
        for block in list(blocks_of(page)):
            if block.marker == SAME_OUTPUT:
                refresh(block)


if __name__ == "__main__":
    main()

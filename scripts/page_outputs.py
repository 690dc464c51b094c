"""The fenced blocks of the pages, and fresh outputs for those that say `run, same output`.

The tables of measured speed, and the figures in recipes, are written from docs/measured.toml.

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
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOG = ROOT / "docs" / "log.md"  # of the past: its commands may be gone
DOCS = sorted(path for path in ROOT.glob("docs/*.md") if path != LOG)
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "recipes" / "README.md", *DOCS]
MARKER = re.compile(r"<!-- (run|run, same output|server|serves: .+|not run: .+) -->")
SAME_OUTPUT = "run, same output"
MEASURED = tomllib.loads((ROOT / "docs" / "measured.toml").read_text(encoding="utf-8"))["row"]
START, END = "<!-- by docs/measured.toml -->", "<!-- end -->"
FIGURE = re.compile(r"One H200, [\d-]+: [\d,.]+ tok/s, \d+ % of its roofline\.")


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
        """The words of each command of tokenmill, of a benchmark or of curl, without pipes."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        words = [shlex.split(line, comments=True) for line in lines]
        cut = [line[: line.index("|")] if "|" in line else line for line in words]
        return [line for line in cut if line and _is_command(line)]

    @property
    def shown(self) -> list[str]:
        """The output that a console block shows."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line and not line.startswith("$ ")]


def _is_command(words: list[str]) -> bool:
    if words[:2] == ["python", "-m"]:
        return words[2].startswith("benchmarks.")
    return words[0] in ("tokenmill", "curl")


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
    words = command[2:] if command[0] == "python" else command
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=True, cwd=ROOT
    )
    output = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("{")]
    end = block.text.find("\n" + block.shown[0])
    page = block.page.read_text(encoding="utf-8")
    fresh = "\n".join([block.text[:end], *output])
    block.page.write_text(page.replace(block.text, fresh), encoding="utf-8")


def speed_table(page: str) -> list[str]:
    """The rows of docs/measured.toml that a page shows, as Markdown."""
    versions = [row["version"] for row in MEASURED if "version" in row]
    newest = max(versions, key=lambda text: [int(part) for part in text.split(".")])
    lines = [f"| workload | tokenmill | of its roofline | vLLM {newest} | ratio |"]
    lines.append("|---|---|---|---|---|")
    for row in MEASURED:
        if row.get("only", page) != page:
            continue
        share = f"{row['roofline']} %" if "roofline" in row else "-"
        theirs = ratio = "-"
        if "vllm" in row:
            theirs, ratio = f"{row['vllm']:,}", f"{row['ours'] / row['vllm']:.2f}x"
            theirs += "" if row["version"] == newest else f" ({row['version']})"
        workload = " ".join([row["workload"], row.get("marks", "")]).strip()
        lines.append(f"| {workload} | {row['ours']:,} | {share} | {theirs} | {ratio} |")
    return lines


def with_figures(page: str, text: str) -> str:
    """The text of a page or a recipe with the figures of docs/measured.toml."""
    if START in text:
        before, _, rest = text.partition(START)
        after = rest.partition(END)[2]
        return "\n".join([before + START, *speed_table(page), END + after])
    lines = text.split("\n")
    for row in MEASURED:
        if (recipe := row.get("recipe")) is None:
            continue
        for index, line in enumerate(lines):
            if page.endswith(recipe) or f"({recipe})" in line:
                lines[index] = FIGURE.sub(_figure(row), line)
    return "\n".join(lines)


def _figure(row: dict[str, Any]) -> str:
    return f"One H200, {row['date']}: {row['ours']:,} tok/s, {row['roofline']} % of its roofline."


def show_figures() -> None:
    for path in [*PAGES, *(ROOT / "recipes").glob("*.toml")]:
        text = path.read_text(encoding="utf-8")
        path.write_text(with_figures(page_name(path), text), encoding="utf-8")


def main() -> None:
    show_figures()
    for page in PAGES:
        for block in list(blocks_of(page)):
            if block.marker == SAME_OUTPUT:
                refresh(block)


if __name__ == "__main__":
    main()

"""A report as one self-contained HTML page: no network, no fonts, one small script.

Each report fills a `Page`. Every text is escaped here; only `Html` is inserted unchanged.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from tokenmill import __version__
from tokenmill.bench.report.charts import Html
from tokenmill.bench.results.reports import Facts

Tone = Literal["good", "warn", "bad", "note"]

SHOWN_DIGITS = 12  # of a digest
WEB = Path(__file__).with_name("web")


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline figure."""

    label: str
    value: str
    unit: str = ""
    note: str = ""
    tone: Tone = "note"


@dataclass(frozen=True, slots=True)
class Notice:
    """What must not be overlooked."""

    tone: Tone
    title: str
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands below it."""

    title: str
    blocks: Sequence[Html]
    intro: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report."""

    title: str
    kind: str  # of report, above the title
    chips: Sequence[str]
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    notices: Sequence[Notice] = ()
    verdict: tuple[Tone, str] | None = None


def render(page: Page) -> str:
    """The page as a file; its script is the only one that its policy lets run."""
    style = (WEB / "report.css").read_text(encoding="utf-8")
    script = (WEB / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<title>{escape(page.title)}</title>\n<link rel="icon" href="data:,">',
            f"<style>\n{style}</style>\n</head>\n<body>",
            _header(page),
            "<main>",
            *(_notice(notice) for notice in page.notices),
            _tiles(page.tiles),
            *(_section(index, section) for index, section in enumerate(page.sections)),
            f"</main>\n<footer>tokenmill {escape(__version__)}</footer>",
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _header(page: Page) -> str:
    verdict = ""
    if page.verdict:
        tone, text = page.verdict
        verdict = f' <span class="verdict {tone}">{escape(text)}</span>'
    chips = "".join(f"<li>{escape(chip)}</li>" for chip in page.chips)
    links = "".join(
        f'<a href="#s{index}">{escape(section.title)}</a>'
        for index, section in enumerate(page.sections)
    )
    return (
        f'<header><p class="kind">{escape(page.kind)}</p>'
        f"<h1>{escape(page.title)}{verdict}</h1>"
        f'<ul class="chips">{chips}</ul></header>\n<nav aria-label="Sections">{links}</nav>'
    )


def _notice(notice: Notice) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in notice.lines)
    below = f"<ul>{lines}</ul>" if lines else ""
    return (
        f'<section class="notice {notice.tone}"><strong>{escape(notice.title)}</strong>'
        f"{below}</section>"
    )


def _tiles(tiles: Sequence[Tile]) -> str:
    parts = []
    for tile in tiles:
        unit = f" <small>{escape(tile.unit)}</small>" if tile.unit else ""
        note = f'<dd class="below">{escape(tile.note)}</dd>' if tile.note else ""
        parts.append(
            f'<div class="tile {tile.tone}"><dt>{escape(tile.label)}</dt>'
            f"<dd>{escape(tile.value)}{unit}</dd>{note}</div>"
        )
    return f'<dl class="tiles">{"".join(parts)}</dl>' if parts else ""


def _section(index: int, section: Section) -> str:
    intro = f'<p class="intro">{escape(section.intro)}</p>' if section.intro else ""
    return (
        f'<section class="card" id="s{index}"><h2>{escape(section.title)}</h2>{intro}\n'
        + "\n".join(section.blocks)
        + "</section>"
    )


def paragraph(text: str) -> Html:
    """One paragraph."""
    return Html(f"<p>{escape(text)}</p>")


def heading(text: str) -> Html:
    """A heading inside a section."""
    return Html(f"<h3>{escape(text)}</h3>")


def bullets(tone: Tone, lines: Sequence[str]) -> Html:
    """Sentences, marked by their tone."""
    return Html(f'<ul class="says {tone}">{"".join(f"<li>{escape(x)}</li>" for x in lines)}</ul>')


def grid(charts: Sequence[Html]) -> Html:
    """Charts side by side where there is room."""
    return Html(f'<div class="charts">{"".join(charts)}</div>')


def folded(summary: str, blocks: Sequence[Html], *, is_open: bool = False) -> Html:
    """What opens with a click."""
    opened = " open" if is_open else ""
    return Html(f"<details{opened}><summary>{escape(summary)}</summary>{''.join(blocks)}</details>")


def table(label: str, rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> Html:
    """The first row is the head; the first columns are text, the others figures."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=text' if index < text_columns else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(row)
        )

    head, *body = rows
    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in body)
    return Html(
        f'<div class="table" role="region" tabindex="0" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{cells('th', head)}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def pairs(values: Mapping[str, Any]) -> Html:
    """Names and values; what is not set is left out."""
    parts = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(plain(value))}</dd></div>"
        for name, value in values.items()
        if value not in (None, "", (), [], {})
    ]
    return Html(f'<dl class="pairs">{"".join(parts)}</dl>')


def plain(value: Any) -> str:
    """A value of a configuration as one reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def facts_sections(configuration: Mapping[str, Any], facts: Facts, machine: str) -> list[Section]:
    """The configuration, and hardware and software as a manifest has them."""
    hardware = dict(facts["hardware"])
    hardware["memory"] = f"{hardware.pop('memory_bytes') / 2**30:.0f} GiB"
    software = dict(facts["software"])
    software["tokenmill_source"] = software.pop("tokenmill_source_sha256", "")[:SHOWN_DIGITS]
    return [
        Section("Configuration", [pairs(configuration)]),
        Section("Environment", [pairs(hardware | software)], machine),
    ]


def started(facts: Facts) -> str:
    """When the run began, for a chip."""
    return facts["started_at"].replace("T", " ").removesuffix("+00:00") + " UTC"

"""A report as one self-contained HTML page: no network, no fonts; one script draws the page's data.

What a page shows is built here as structs, and web/report.js makes elements of them. All texts
become texts there, so nothing is to be escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenmill import __version__
from tokenmill.bench.report.charts import Chart
from tokenmill.bench.results.reports import Facts

Tone = Literal["good", "warn", "bad", "note"]

SHOWN_DIGITS = 12  # of a digest
WEB = Path(__file__).with_name("web")
SKELETON = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<noscript>This page is drawn by its own script: it needs JavaScript, and no network.</noscript>
<footer>{footer}</footer>
<template id="page">{data}</template>
<script>{script}</script>
</body>
</html>
"""


class PageTile(msgspec.Struct):
    label: str
    value: str
    unit: str = ""
    note: str = ""
    tone: Tone = "note"


class Notice(msgspec.Struct):
    """What must not be overlooked."""

    tone: Tone
    title: str
    lines: Sequence[str] = ()


class PagePart(msgspec.Struct, tag_field="kind", tag=str.lower):
    """A block of a section or a cell of a table; the script has a function for each kind."""


class Text(PagePart):
    text: str
    tone: str


class Bar(PagePart):
    """A cell with a bar of this share of the widest one, and its figure."""

    share: float
    text: str


class Whisker(PagePart):
    """A cell with a ratio and its bounds on a logarithmic scale around 1."""

    value: float
    bounds: Sequence[float]
    reach: float  # to both sides of 1, as a natural logarithm
    tone: str


class Table(PagePart):
    """The first row is the head; columns hold figures but for those of texts."""

    label: str
    rows: Sequence[Sequence[str | PagePart]]
    text_columns: Sequence[int] = (0,)
    heading: bool = False  # shows the label above it


class Lines(PagePart):
    """Paragraphs, or with a tone bullets."""

    lines: Sequence[str]
    tone: str = ""


class Grid(PagePart):
    """Charts side by side where there is room."""

    charts: Sequence[Chart]


class Folded(PagePart):
    summary: str
    blocks: Sequence[PagePart]


class Pairs(PagePart):
    values: dict[str, str]


class Section(msgspec.Struct):
    title: str
    blocks: Sequence[PagePart]
    intro: str = ""


class ReportPage(msgspec.Struct):
    title: str
    kind: str  # of report, above the title
    chips: Sequence[str]
    tiles: Sequence[PageTile]
    sections: Sequence[Section]
    notices: Sequence[Notice] = ()
    verdict: tuple[Tone, str] | None = None
    footer: str = ""


def render(page: ReportPage) -> str:
    """The page as a file; its script is the only one that its policy lets run."""
    script = (WEB / "report.js").read_text(encoding="utf-8")
    data = json.dumps(_rounded(msgspec.to_builtins(page)), separators=(",", ":"))
    for sign in "<&":  # the data lie in the page as text
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return SKELETON.format(
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=escape(page.title),
        style=(WEB / "report.css").read_text(encoding="utf-8"),
        footer=escape(" · ".join([f"tokenmill {__version__}", *filter(None, [page.footer])])),
        data=data,
        script=script,
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def pairs(values: Mapping[str, Any]) -> Pairs:
    """Names and values of a configuration; what is not set is left out."""
    known = {name: value for name, value in values.items() if value not in (None, "", (), [], {})}
    return Pairs({name: plain(value) for name, value in known.items()})


def plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def facts_sections(configuration: Mapping[str, Any], facts: Facts, machine: str) -> list[Section]:
    """The configuration, and hardware and software as a manifest has them."""
    hardware = dict(facts.hardware)
    hardware["memory"] = f"{hardware.pop('memory_bytes') / 2**30:.0f} GiB"
    software = dict(facts.software)
    software["tokenmill_source"] = software.pop("tokenmill_source_sha256", "")[:SHOWN_DIGITS]
    return [
        Section("Configuration", [pairs(configuration)]),
        Section("Environment", [pairs(hardware | software)], machine),
    ]


def started(facts: Facts) -> str:
    return facts.started_at.replace("T", " ").removesuffix("+00:00") + " UTC"

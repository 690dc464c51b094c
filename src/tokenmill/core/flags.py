"""Declares config fields as settings: their help, and how their values are read and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000), ("", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_URL_PATH = re.compile(r"(/[\w.~-]+)+/?", re.ASCII)
_TCP = re.compile(r"tcp://(\*|[\w.-]+|\[[0-9A-Fa-f:.]+\]):\d+", re.ASCII)
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)?\s*")
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is read: `read` raises ValueError, and `expected` says what would be right."""

    read: Callable[[Any], Any]
    expected: str
    metavar: str
    choices: tuple[str, ...] = ()


def _read_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(value)
    return value


def _read_events(value: Any) -> str:
    for address in _read_text(value).split(",replay="):
        if not _TCP.fullmatch(address) or int(address.split(":")[-1]) > 65535:
            raise ValueError(value)
    if value.count(",") > 1:
        raise ValueError(value)
    return str(value)


def split_list(value: Any) -> list[Any]:
    """The items of a value, of which each text may be several separated by commas."""
    items = value if isinstance(value, list | tuple) else [value]
    return [
        part.strip() if isinstance(part, str) else part
        for item in items
        for part in (item.split(",") if isinstance(item, str) else [item])
    ]


def _read_switch(value: Any) -> bool:
    return value if isinstance(value, bool) else _BOOLEANS[value.lower()]


def read_int(value: Any) -> int:
    if isinstance(value, bool | float):
        raise ValueError(value)
    return int(value)


def read_float(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError(value)
    return float(value)


def _within(read: Callable[[Any], Any], low: float, high: float) -> Callable[[Any], Any]:
    def bounded(value: Any) -> Any:
        number = read(value)
        if not low <= number <= high:
            raise ValueError(value)
        return number

    return bounded


def parse_size(value: Any) -> int:
    """Bytes of "2GiB", "512 MB" or 1073741824; K, M, G and T alone are powers of 1024."""
    if isinstance(value, bool | float):
        raise ValueError(value)
    match = _SIZE.fullmatch(str(value))
    if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise ValueError(value)
    return round(float(match[1]) * _UNITS[match[2].lower()])


def _read_duration(value: Any) -> float:
    match = _DURATION.fullmatch(str(value))
    if match is None or (match[2] is None and float(match[1]) != 0):
        raise ValueError(value)
    return float(match[1]) * (1e3 if match[2] == "s" else 1.0)


def one_of(*choices: str) -> Kind:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(value)
        return str(value)

    return Kind(read, "one of " + ", ".join(choices), "NAME", choices)


def some_of(*choices: str) -> Kind:
    """One name or several, each once."""

    def read(value: Any) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else list(value)
        if not parts or any(part not in choices for part in parts):
            raise ValueError(value)
        return tuple(dict.fromkeys(parts))

    return Kind(read, "one or more of " + ", ".join(choices) + ", separated by commas", "NAME[,..]")


def count(low: int, high: float = math.inf) -> Kind:
    limit = f"of at least {low}" if high == math.inf else f"from {low} to {int(high)}"
    return Kind(_within(read_int, low, high), f"a whole number {limit}", "N")


def number(low: float, high: float, metavar: str = "X") -> Kind:
    limit = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    return Kind(_within(read_float, low, high), f"a number {limit}", metavar)


def numbers(read: Callable[[Any], Any], low: float, metavar: str) -> Kind:
    """One number or several; a point of a sweep each."""
    bounded = _within(read, low, math.inf)

    def read_all(value: Any) -> tuple[Any, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        items = parts if isinstance(parts, list | tuple) else [parts]
        if not items:
            raise ValueError(value)
        return tuple(bounded(item) for item in items)

    return Kind(read_all, f"numbers of at least {low:g}, separated by commas", metavar)


def _read_image_size(value: Any) -> tuple[int, int]:
    width, height = (int(part) for part in str(value).lower().split("x"))
    if not min(width, height) >= 1 or max(width, height) > 16_384:
        raise ValueError(value)
    return width, height


def _read_polynomial(value: Any) -> tuple[float, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if len(parts) != 3:
        raise ValueError(value)
    return tuple(read_float(part) for part in parts)


def _read_url_path(value: Any) -> str:
    if not isinstance(value, str) or not _URL_PATH.fullmatch(value) or "/." in value:
        raise ValueError(value)
    return value


EVENTS = Kind(
    _read_events,
    "tcp://HOST:PORT, or tcp://*:PORT for all interfaces, and ,replay=tcp://HOST:PORT if wanted",
    "tcp://HOST:PORT[,replay=tcp://HOST:PORT]",
)
TEXT = Kind(_read_text, "a text that is not empty", "TEXT")
URL_PATH = Kind(_read_url_path, "a path such as /pooling or /v1/audio/", "PATH,...")
KEYS = Kind(_read_text, "keys separated by commas, none of them empty", "KEY,...")
POLYNOMIAL = Kind(_read_polynomial, "three numbers A,B,C for A x^2 + B x + C", "A,B,C")
IMAGE_SIZE = Kind(_read_image_size, "WIDTHxHEIGHT in pixels, such as 1024x1024", "WxH")
SWITCH = Kind(_read_switch, "true or false", "")
SIZE = Kind(parse_size, "a size such as 2GiB or 512MB", "SIZE")
DURATION_MS = Kind(_read_duration, "a time such as 100ms or 1.5s", "TIME")
SECONDS = number(0, math.inf, "SECONDS")
INTEGER = Kind(read_int, "a whole number", "N")


@dataclass(frozen=True, slots=True)
class Flag:
    """What makes a setting of a config's field: its words, and its name unless that is the field's.

    Without a kind the field's type says how a value is read.
    """

    help: str
    kind: Kind | None = None
    name: str = ""
    repeated: bool = False  # the flag may be given several times; the field is a tuple
    listed: bool = False  # repeated, and each value may be several, separated by commas


def setting(
    default: Any,
    help: str,
    kind: Kind | None = None,
    *,
    flag: str = "",
    repeated: bool = False,
    listed: bool = False,
) -> Any:
    """The field of a config that a flag, the environment and a TOML file can set."""
    return field(default=default, metadata={"flag": Flag(help, kind, flag, repeated, listed)})


def kind_of(annotation: Any) -> Kind:
    """How values of a field of this type are read, where its flag says nothing else."""
    members = [a for a in get_args(annotation) if a is not NoneType]
    if get_origin(annotation) is Literal:
        return one_of(*members)
    if get_origin(annotation) in (Union, UnionType) and len(members) == 1:
        return kind_of(members[0])
    return SWITCH if annotation is bool else TEXT

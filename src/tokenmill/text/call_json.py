"""Tool calls written as JSON objects: where one ends, and what it says."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

# Up to the arguments of a call whose name comes first, as models write it.
HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_KEYS = ("name", "type", "arguments", "parameters")
_CHARS = frozenset(' \t\r\n:,0123456789+-.eEtrufalsn"{}[]')  # outside strings


class JsonScanner:
    """Finds the end of one JSON object, fed in pieces; sees what can be no JSON."""

    __slots__ = ("_closers", "_escaped", "_in_string", "broken", "num_valid")

    def __init__(self, inside_object: bool = False) -> None:
        self._closers = ["}"] if inside_object else []
        self._in_string = self._escaped = False
        self.broken = False
        self.num_valid = 0  # index in the last text where it broke

    def scan(self, text: str, start: int = 0) -> int | None:
        """Read on from `start`; the index after the object's end, None when it has not ended."""
        for index in range(start, len(text)):
            char = text[index]
            valid = self._read_string(char) if self._in_string else self._read_structure(char)
            if not valid:
                self.broken, self.num_valid = True, index
                return None
            if char == "}" and not self._closers:
                return index + 1
        return None

    def _read_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
        return char >= " "

    def _read_structure(self, char: str) -> bool:
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._closers.append("}" if char == "{" else "]")
        elif char in "}]":
            return bool(self._closers) and self._closers.pop() == char
        return char in _CHARS


def may_be_call(text: str) -> bool:
    """False once the text cannot become a JSON object with a call's keys."""
    text = text.lstrip()
    if not text.startswith("{"):
        return not text
    body = text[1:].lstrip()
    if not body.startswith('"'):
        return not body
    key, quote, _ = body[1:].partition('"')
    return key in _KEYS if quote else any(name.startswith(key) for name in _KEYS)


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole call, the arguments as written when the name comes first."""
    call = json_or_none(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # JSON text inside JSON
        return (call["name"], arguments) if isinstance(json_or_none(arguments), dict) else None
    if arguments is None:
        return (call["name"], "{}") if call.keys() <= set(_KEYS) else None
    if not isinstance(arguments, dict):
        return None
    if header := HEADER.match(text):
        written = text[header.end() :]
        return call["name"], written[: JsonScanner().scan(written)]
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def json_or_none(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

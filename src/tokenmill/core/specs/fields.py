"""Reads fields of config.json; an error names the field and the value that was expected."""

from __future__ import annotations

from typing import Any

from tokenmill.core.types import ModelLoadError

Settings = dict[str, Any]


def positive_int(settings: Settings, key: str) -> int:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{key}: expected a positive integer, got {value!r}")
    return value


def count(settings: Settings, key: str) -> int:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelLoadError(f"{key}: expected an integer of zero or more, got {value!r}")
    return value


def number(settings: Settings, key: str) -> float:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelLoadError(f"{key}: expected a positive number, got {value!r}")
    return float(value)


def flag(settings: Settings, key: str) -> bool:
    value = settings[key]
    if not isinstance(value, bool):
        raise ModelLoadError(f"{key}: expected true or false, got {value!r}")
    return value


def fixed(settings: Settings, key: str, supported: Any) -> None:
    """Refuse any other value than the one that is supported; an absent field has it."""
    value = settings.get(key, supported)
    if value != supported:
        raise ModelLoadError(f"{key}: only {supported!r} is supported, got {value!r}")

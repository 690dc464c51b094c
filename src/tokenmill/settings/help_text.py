"""The texts of --help, for both parsers of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.core.flags import IMAGE_SIZE, SIZE
from tokenmill.settings.setting import Setting

EPILOG = (
    "Every flag can also be set in the environment (--max-num-seqs is TOKENMILL_MAX_NUM_SEQS) or "
    "in a TOML file (max-num-seqs = 64): --config FILE, TOKENMILL_CONFIG, or ./tokenmill.toml. "
    "A flag wins over the environment, and the environment over the file."
)


def help_of(setting: Setting, defaults: Mapping[str, Any]) -> str:
    """The setting's help with its choices and its default."""
    notes = []
    if setting.kind.choices:
        notes.append(" | ".join(setting.kind.choices))
    if default := shown_default(setting, defaults):
        notes.append(f"default: {default}")
    return setting.help + "".join(f" [dim]({note})[/dim]" for note in notes)


def shown_default(setting: Setting, defaults: Mapping[str, Any]) -> str:
    """The default in the words of a flag; empty where there is none to show."""
    value = defaults.get(setting.key, setting.default)
    if value is None or value == ():
        return ""
    if setting.is_switch:
        return "on" if value else "off"
    if setting.kind is SIZE:
        return f"{value // 2**20}MiB"
    if setting.kind is IMAGE_SIZE:
        return "x".join(map(str, value))
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)

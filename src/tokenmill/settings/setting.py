"""One setting, made from the field of a config or declared by a command."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

from tokenmill.core.flags import SWITCH, Flag, Kind, kind_of
from tokenmill.core.types import TokenmillError


class SettingsError(TokenmillError):
    """A flag, variable or file has an unknown setting or a wrong value."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set; `owner.field` is the config field that it fills, if any."""

    key: str
    help: str
    kind: Kind
    owner: type | None = None
    field: str = ""
    default: Any = None
    repeated: bool = False  # the flag may be given several times; its value is a tuple
    listed: bool = False  # repeated, and each value may be several, separated by commas

    @property
    def parameter(self) -> str:
        return self.key.replace("-", "_")

    @property
    def variable(self) -> str:
        return "TOKENMILL_" + self.parameter.upper()

    @property
    def is_switch(self) -> bool:
        return self.kind is SWITCH


def settings_of(owner: Any) -> tuple[Setting, ...]:
    """The settings of a config, one for each field that has a flag, in their order."""
    types = get_type_hints(owner)
    found = []
    for spec in fields(owner):
        if (flag := spec.metadata.get("flag")) is not None:
            assert isinstance(flag, Flag)
            key = flag.name or spec.name.replace("_", "-")
            kind = flag.kind or kind_of(types[spec.name])
            default = None if spec.default is MISSING else spec.default
            repeats = flag.repeated, flag.listed
            found.append(Setting(key, flag.help, kind, owner, spec.name, default, *repeats))
    return tuple(found)

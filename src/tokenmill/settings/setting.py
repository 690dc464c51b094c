"""One setting, made from a field of a config."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

from tokenmill.core.flags import SWITCH, Flag, Kind, kind_of
from tokenmill.core.types import TokenmillError


class SettingsError(TokenmillError):
    """A flag, variable or file has an unknown setting or a wrong value."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set; it fills `owner.field`."""

    key: str
    help: str
    kind: Kind
    owner: type
    field: str
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


Panel = Any  # what stands below one heading of --help: a config, or several and single settings


_KNOWN: dict[type, tuple[Setting, ...]] = {}  # by config, so that equal settings are the same


def settings_of(owner: type[Any]) -> tuple[Setting, ...]:
    """The settings of a config, one for each field that has a flag, in their order."""
    if owner in _KNOWN:
        return _KNOWN[owner]
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
    _KNOWN[owner] = tuple(found)
    return _KNOWN[owner]


def settings_in(panel: Panel) -> tuple[Setting, ...]:
    """The settings of configs, and single ones, one after the other."""
    if isinstance(panel, type):
        return settings_of(panel)
    if isinstance(panel, Setting):
        return (panel,)
    return tuple(setting for part in panel for setting in settings_in(part))


def only(panel: Panel, *keys: str) -> tuple[Setting, ...]:
    """Those with one of these keys; each must be there."""
    known = {setting.key: setting for setting in settings_in(panel)}
    return tuple(known[key] for key in keys)


def without(panel: Panel, *keys: str) -> tuple[Setting, ...]:
    """Those with none of these keys."""
    return tuple(setting for setting in settings_in(panel) if setting.key not in keys)

"""Writes dataclasses as JSON and reads them back by their annotations, without msgspec.

In a union of dataclasses the name of the class tells them apart; bytes are written in hexadecimal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

_TAG = "type"
_PLAIN = (int, float, str, bool, NoneType, Any)


def dumps(kind: Any, value: object) -> bytes:
    """The JSON of a value of this type."""
    return json.dumps(_codec(kind).encode(value)).encode()


def loads(kind: Any, data: bytes) -> Any:
    """The inverse of dumps()."""
    return _codec(kind).decode(json.loads(data))


def _same(value: Any) -> Any:
    return value


class _Codec(NamedTuple):
    encode: Callable[[Any], Any] = _same  # to what json writes
    decode: Callable[[Any], Any] = _same  # from what json reads


_SAME = _Codec()


@cache
def _codec(kind: Any) -> _Codec:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN or origin is Literal:
        return _SAME
    if kind is bytes:
        return _Codec(bytes.hex, bytes.fromhex)
    if is_dataclass(kind):
        return _dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Codec(lambda member: member.value, kind)
    if origin in (Union, UnionType):
        return _union([member for member in arguments if member is not NoneType])
    if origin is dict:
        return _mapping(*arguments)
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return _array(origin, _codec(arguments[0]))
    if origin is tuple:
        return _record([_codec(argument) for argument in arguments])
    raise TypeError(f"{kind} has no JSON form")


def _dataclass(kind: Any) -> _Codec:
    @cache  # not before the first use: a class may have fields of its own type
    def members() -> list[tuple[str, _Codec]]:
        hints = get_type_hints(kind)
        return [(field.name, _codec(hints[field.name])) for field in fields(kind)]

    def encode(value: Any) -> dict[str, Any]:
        return {name: codec.encode(getattr(value, name)) for name, codec in members()}

    def decode(data: dict[str, Any]) -> Any:
        return kind(**{name: codec.decode(data[name]) for name, codec in members()})

    return _Codec(encode, decode)


def _union(kinds: list[Any]) -> _Codec:
    """One type or None, types that JSON tells apart, or dataclasses with a tag."""
    codecs = {kind: _codec(kind) for kind in kinds}
    if all(codec is _SAME for codec in codecs.values()):
        return _SAME
    if len(kinds) == 1:
        (one,) = codecs.values()
        return _Codec(
            lambda value: None if value is None else one.encode(value),
            lambda data: None if data is None else one.decode(data),
        )
    if not all(map(is_dataclass, kinds)):
        raise TypeError(f"a union is of dataclasses or of plain types, not of {kinds}")
    by_name = {kind.__name__: codec for kind, codec in codecs.items()}

    def encode(value: Any) -> Any:
        if value is None:
            return None
        return {_TAG: type(value).__name__} | codecs[type(value)].encode(value)

    return _Codec(encode, lambda data: None if data is None else by_name[data[_TAG]].decode(data))


def _mapping(key: Any, value: Any) -> _Codec:
    """JSON's keys are strings."""
    inner = _codec(value)
    if key not in (int, str):
        raise TypeError(f"the keys of a JSON object are integers or strings, not {key}")
    return _Codec(
        lambda items: {name: inner.encode(item) for name, item in items.items()},
        lambda data: {key(name): inner.decode(item) for name, item in data.items()},
    )


def _array(kind: Callable[[Any], Any], inner: _Codec) -> _Codec:
    if inner is _SAME:
        return _SAME if kind is list else _Codec(_same, kind)
    return _Codec(
        lambda items: [inner.encode(item) for item in items],
        lambda data: kind(inner.decode(item) for item in data),
    )


def _record(members: list[_Codec]) -> _Codec:
    return _Codec(
        lambda items: [c.encode(item) for c, item in zip(members, items, strict=True)],
        lambda data: tuple(c.decode(item) for c, item in zip(members, data, strict=True)),
    )

"""A body to the call it stands for, or to an error that says what to send instead.

Bodies that fit are decoded once. The others are read again as plain JSON: fields that change
nothing are dropped, and of what is left the first fault is explained by the declared types.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.requests import INT32_MAX, ImageSchema

T = TypeVar("T")
Info = inspect.Type

_log = logging.getLogger(__name__)
_UNKNOWN_FIELD = re.compile(r"^Object contains unknown field `(.*?)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(.*?)`", re.DOTALL)
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")
MAX_SHOWN = 60  # characters of a value in a message
MAX_NOTED = 256  # names that the log tells about
# Where unknown fields have no effect, but for those of images: templates read only the known ones.
_FREE = ("messages[", "input[")

# What other servers call it -> what it is here.
_ELSEWHERE = {
    "enable_thinking": 'send chat_template_kwargs {"enable_thinking": ...}',
    "thinking": 'send chat_template_kwargs, such as {"enable_thinking": true}',
    "reasoning": "send reasoning_effort",
    "extra_body": "send its members at the top level",
    "input": "send messages to /v1/chat/completions, or a prompt to /v1/completions",
    "instructions": "send a message with role 'system'",
    "schema": "send type 'json_schema' with a json_schema that has it",
    "input_schema": "send 'function' with its name and parameters",
    "system": "send a message with role 'system'",
    "max_new_tokens": "send max_tokens",
    "max_output_tokens": "send max_tokens",
    "num_predict": "send max_tokens",
    "repeat_penalty": "send repetition_penalty",
    "stop_sequences": "send stop",
    "messages": "send a prompt, or ask /v1/chat/completions",
    "prompt": "send messages, or ask /v1/completions",
    "suffix": "this model only continues text; leave the field out",
}
_INSTEAD = {
    ("role", "function"): "send the result of a call as role 'tool' with its tool_call_id",
    ("tool_choice", "any"): "send 'required'",
    **dict.fromkeys(
        (("type", "image_url"), ("type", "input_image"), ("type", "image")),
        "images stand in messages of role 'user' and in results of tools, as 'image_url' in "
        "chats, 'input_image' in responses and 'image' in Anthropic's API",
    ),
    ("type", "input_file"): "files are not read here; send their text as 'input_text'",
    ("type", "file"): "files are not read here; send text as 'text', and an image as base64",
    ("type", "input_audio"): "audio is not heard here; send its text",
    ("type", "audio_url"): "audio is not heard here; send its text",
    ("type", "document"): "documents are not read here; send their text as blocks of type 'text'",
    **dict.fromkeys(
        (("type", "video"), ("type", "video_url"), ("type", "input_video")),
        "videos are not taken; send some of their frames as images",
    ),
}


class IgnoredFields:
    """Tells once, in the log, about each field that is accepted without effect."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    @property
    def names(self) -> list[str]:
        return list(self._noted)

    def is_noted(self, name: str) -> bool:
        return name in self._noted

    def note(self, names: Iterable[str]) -> None:
        new = sorted(set(names) - self._noted)[: MAX_NOTED - len(self._noted)]
        if new:
            self._noted.update(new)
            _log.info("calls have fields without effect here (told once): %s", ", ".join(new))


def decode_call(
    body: bytes, kind: type[T], ignored: IgnoredFields | None = None, msgpack: bool = False
) -> T:
    """The body as `kind`; ApiError 400 names the field, its value and what to send instead.

    A kind with `complete` has it fill in what clients may leave out of the plain JSON, and leave
    out, by the names that it returns, what has no effect.
    """
    complete: Callable[[Any], list[str]] | None = getattr(kind, "complete", None)
    decode = msgspec.msgpack.decode if msgpack else msgspec.json.decode
    try:
        if complete is None:
            return decode(body, type=kind)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_readable(error, body, msgpack) from None
    try:
        raw = decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_readable(error, body, msgpack) from None
    dropped = [] if complete is None else complete(raw)
    info = _info(cast(Hashable, kind))
    _prune(raw, info, "", dropped)
    try:
        call = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        elsewhere = getattr(kind, "ELSEWHERE", _ELSEWHERE)
        raise explain(str(error), raw, info, elsewhere) from None
    if ignored is not None:
        ignored.note(dropped)
    return call


def _not_readable(error: Exception, body: bytes, msgpack: bool = False) -> ApiError:
    form = "msgpack" if msgpack else "JSON"
    if not body.strip():
        message = f"the body is empty; send a {form} object with the call's fields"
        return ApiError(400, message, code="invalid_json")
    path = next(_not_finite(body), "") if b"NaN" in body or b"Infinity" in body else ""
    if path:
        message = f"{path}: NaN and Infinity are no numbers in JSON; send another value"
        return ApiError(400, message, path, "invalid_value")
    return ApiError(400, f"the body is not valid {form}: {error}", code="invalid_json")


def _not_finite(body: bytes) -> Iterator[str]:
    """Paths of values that Python writes as NaN or Infinity, and JSON does not know."""
    try:
        left = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return
    while left:
        path, value = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield path
        elif isinstance(value, dict):
            left += [(f"{path}.{name}".lstrip("."), each) for name, each in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[{index}]", each) for index, each in enumerate(value)]


def refuse_built_in(raw: dict[str, Any], kinds: tuple[str | None, ...], instead: str) -> None:
    """400 for a tool that the server would have to run, whatever other fields it has."""
    tools = raw.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            path = f"tools[{index}].type"
            message = f"{path}: {kind!r} is not supported: only functions that the client runs can "
            raise ApiError(400, f"{message}be called here; {instead}", path, "unsupported_value")


@cache
def _info(kind: Any) -> Info:
    return inspect.type_info(kind)


def _prune(value: Any, info: Info | None, path: str, dropped: list[str]) -> None:
    """Drop unknown fields that are null or stand in a message; note those that said something.

    Those of an image are kept: a misspelt limit would change what the model sees.
    """
    info = _branch(info, value)
    if isinstance(info, inspect.ListType):
        for item in value:
            _prune(item, info.item_type, f"{path}[]", dropped)
    if not isinstance(info, inspect.StructType):
        return
    known = {field.encode_name: field.type for field in info.fields}
    is_free = path.startswith(_FREE) and not _is_image(info)
    for name in list(value):
        if name in known:
            _prune(value[name], known[name], f"{path}.{name}" if path else name, dropped)
            value[name] = _whole(value[name], known[name])
        elif name != info.tag_field and (value[name] is None or is_free):
            if value[name] is not None:
                dropped.append(f"{path}.{name}")
            del value[name]


def _is_image(info: Info | None) -> bool:
    return isinstance(info, inspect.StructType) and issubclass(info.cls, ImageSchema)


def _whole(value: Any, info: Info) -> Any:
    """40.0 where a whole number is wanted is 40, as in JSON schemas."""
    kinds = {type(member) for member in _members(info)}
    wanted = inspect.IntType in kinds and inspect.FloatType not in kinds
    return int(value) if wanted and isinstance(value, float) and value.is_integer() else value


def _branch(info: Info | None, value: Any) -> Info | None:
    """The part of a type that a value of this JSON kind is checked against; None without one."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    if not isinstance(info, inspect.UnionType):
        return info if info is not None and _same_kind(info, value) else None
    fitting = [t for each in info.types if (t := _branch(each, value)) is not None]
    return fitting[0] if fitting else None


def _same_kind(info: Info, value: Any) -> bool:
    match info:
        case inspect.StructType(tag_field=str(field), tag=tag):
            return isinstance(value, dict) and value.get(field) == tag
        case inspect.StructType() | inspect.DictType():
            return isinstance(value, dict)
        case inspect.ListType():
            return isinstance(value, list)
        case _:
            return not isinstance(value, dict | list)


def explain(text: str, raw: Any, info: Info, elsewhere: Mapping[str, str] = _ELSEWHERE) -> ApiError:
    """The error of msgspec's message `text` about the plain JSON `raw`."""
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    if unknown := _UNKNOWN_FIELD.search(text):
        return _unknown(path, unknown.group(1), raw, info, elsewhere)
    if missing := _MISSING_FIELD.search(text):
        return _missing(path, missing.group(1), raw, info)
    value, declared = _look_up(path, raw, info)
    if not path:
        return ApiError(
            400, "body: send a JSON object with the call's fields", None, "invalid_value"
        )
    name = path.rpartition(".")[2].partition("[")[0]
    shown = _shown(value)
    way_out = _way_out(declared)
    if way_out is None and isinstance(value, str):
        way_out = _INSTEAD.get((name, value))
    if way_out is not None:
        return ApiError(
            400, f"{path}: {shown} is not supported: {way_out}", path, "unsupported_value"
        )
    return ApiError(
        400, f"{path}: {shown} is not valid; send {expected(declared)}", path, "invalid_value"
    )


def _unknown(path: str, name: str, raw: Any, info: Info, elsewhere: Mapping[str, str]) -> ApiError:
    full = f"{path}.{name}" if path else name
    owner = _branch(_look_up(path, raw, info)[1], _look_up(path, raw, info)[0])
    near = get_close_matches(name, _field_names(owner), 1)
    inside = _members_with(owner, name)
    if name in elsewhere and not _is_image(owner):
        advice = elsewhere[name]
    elif inside:
        advice = f"send it inside {inside[0]!r}"
    elif near:
        advice = f"did you mean {near[0]!r}? Otherwise leave it out"
    else:
        advice = "leave it out"
    if _is_image(owner):
        advice += f". Allowed here: {', '.join(_field_names(owner))}"
    return ApiError(400, f"{full}: unknown or unsupported field; {advice}", full, "unknown_field")


def _field_names(info: Info | None) -> list[str]:
    """The fields that an object may have, with the one that tells which object it is."""
    if not isinstance(info, inspect.StructType):
        return []
    tag = [] if info.tag_field is None else [info.tag_field]
    return tag + [field.encode_name for field in info.fields]


def _members_with(owner: Info | None, name: str) -> list[str]:
    """The fields of an object that are objects which know the name."""
    fields = owner.fields if isinstance(owner, inspect.StructType) else ()
    return [f.encode_name for f in fields if any(_member(m, name) for m in _members(f.type))]


def _missing(path: str, name: str, raw: Any, info: Info) -> ApiError:
    full = f"{path}.{name}" if path else name
    declared = _look_up(full, raw, info)[1]
    if declared is None:  # the field that tells which of several objects it is
        declared = _look_up(path, raw, info)[1]
    return ApiError(
        400, f"{full}: the field is missing; send {expected(declared)}", full, "missing_field"
    )


def _look_up(path: str, raw: Any, info: Info | None) -> tuple[Any, Info | None]:
    """The value at a path, and its declared type; None where there is none."""
    value = raw
    for name, index in _STEP.findall(path):
        owner = info
        branch = _branch(info, value)
        if name:
            value = value.get(name) if isinstance(value, dict) else None
            info = _member(branch, name) or (_tags(owner, name) if branch is None else None)
        elif index == "...":
            info = branch.value_type if isinstance(branch, inspect.DictType) else None
            value = next((v for v in value.values() if not _in_range(info, v)), None)
        else:
            value = value[int(index)]
            info = branch.item_type if isinstance(branch, inspect.ListType) else None
    return value, info


def _member(info: Info | None, name: str) -> Info | None:
    fields = info.fields if isinstance(info, inspect.StructType) else ()
    return next((field.type for field in fields if field.encode_name == name), None)


def _tags(info: Info | None, name: str) -> Info | None:
    """The values of the field that tells objects apart, as a type."""
    values = tuple(s.tag for s in _members(info) if isinstance(s, inspect.StructType) and s.tag)
    return inspect.LiteralType(values) if values else None


def _members(info: Info | None) -> list[Info]:
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType):
        return [member for each in info.types for member in _members(each)]
    return [] if info is None else [info]


def _in_range(info: Info | None, value: Any) -> bool:
    if not isinstance(info, inspect.FloatType | inspect.IntType):
        return False
    number = isinstance(value, int | float) and not isinstance(value, bool)
    low, high = info.ge, info.le
    return number and (low is None or value >= low) and (high is None or value <= high)


def _way_out(info: Info | None) -> str | None:
    """What the declaration says to do instead."""
    if isinstance(info, inspect.Metadata):
        return (info.extra_json_schema or {}).get("description") or _way_out(info.type)
    return None


def _shown(value: Any) -> str:
    is_plain = not isinstance(value, str | bytes)
    text = json.dumps(value, ensure_ascii=False, default=repr) if is_plain else repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def expected(info: Info | None) -> str:
    members = [m for m in _members(info) if not isinstance(m, inspect.NoneType)]
    tagged = [m.tag for m in members if isinstance(m, inspect.StructType) and m.tag is not None]
    if len(tagged) > 1:
        field = next(m.tag_field for m in members if isinstance(m, inspect.StructType))
        objects = f"an object whose {field!r} is {_any_of(tagged)}"
        members = [m for m in members if not isinstance(m, inspect.StructType)]
        return " or ".join([*map(_words, members), objects])
    return " or ".join(map(_words, members)) or "null"


def _words(info: Info) -> str:
    match info:
        case inspect.LiteralType(values=values):
            return _any_of(values)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _range(info)
        case inspect.FloatType():
            return "a number" + _range(info)
        case inspect.StrType(pattern=pattern):
            return f"a string that matches {pattern}" if pattern else "a string"
        case inspect.BytesType():
            return "bytes, in JSON as base64"
        case inspect.ListType(item_type=item, min_length=low):
            size = f" of at least {low}" if low else ""
            return f"a list{size}, each item {expected(item)}"
        case inspect.StructType(fields=fields):
            names = ", ".join(repr(f.encode_name) for f in fields if f.required)
            return f"an object with {names}" if names else "an object"
        case inspect.DictType():
            return "an object"
        case _:
            return "any JSON value"


def _any_of(values: Iterable[Any]) -> str:
    texts = [repr(v) if isinstance(v, str) else json.dumps(v) for v in values]
    return " or ".join(texts) if len(texts) < 3 else "one of " + ", ".join(texts)


def _range(info: inspect.IntType | inspect.FloatType) -> str:
    low, high = info.ge, info.le
    if high is not None and high >= INT32_MAX:
        high = None
    if info.gt is not None:
        return f" above {info.gt:g}" + (f" and at most {high:g}" if high is not None else "")
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    return f" of at least {low:g}" if low is not None and low > -INT32_MAX else ""

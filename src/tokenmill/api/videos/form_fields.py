"""Bodies of multipart/form-data, as OpenAI's clients send them, as the JSON that they stand for."""

from __future__ import annotations

import json
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any, TypeVar

from msgspec import inspect
from starlette.requests import Request

from tokenmill.api.access import read_bytes
from tokenmill.api.bodies.body_memory import BodyRoom
from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.decoding import decode_call
from tokenmill.api.sites import FORM, kind_of

MAX_FORM_BYTES = 256 * 1024  # several times what the texts of a call may have
MAX_JSON_BYTES = 2**20  # the same, each character as an escape
MAX_PARTS = 64
MAX_HEAD_BYTES = 4096  # of a part
T = TypeVar("T")


async def read_call(request: Request, kind: type[T], limit: int, room: BodyRoom) -> T:
    """The body of a call, JSON or a form; ApiError names what is wrong with it."""
    content_type = request.headers.get("content-type", "")
    if kind_of(content_type) != FORM:
        return decode_call(await _read(request, "body", min(limit, MAX_JSON_BYTES), room), kind)
    form = await _read(request, "form", min(limit, MAX_FORM_BYTES), room)
    fields = _typed(form_fields(content_type, form), kind)
    return decode_call(json.dumps(fields).encode(), kind)


async def _read(request: Request, what: str, limit: int, room: BodyRoom) -> bytes:
    declared = request.headers.get("content-length", "")
    try:
        return await read_bytes(request.receive, declared, limit, room)
    except ApiError as error:
        if error.status != 413:
            raise
        problem = (
            f"the {what} is larger than {limit} bytes; send the fields as texts, without files"
        )
        raise ApiError(413, problem, code=error.code) from None


def form_fields(content_type: str, body: bytes) -> dict[str, str]:
    """The fields of a form; a file is refused by its field's name."""
    fields: dict[str, str] = {}
    for part in _parts(content_type, body):
        head, _, data = part.partition(b"\r\n\r\n")
        headers = _headers(head)
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise _invalid("a part of the form has no name")
        if name in fields:
            raise _invalid(f"{name}: the form has it twice", name)
        fields[name] = _text(name, headers, data)
    return fields


def _parts(content_type: str, body: bytes) -> list[bytes]:
    """What stands between the boundaries; parts are not looked into, be they multipart or not."""
    boundary = _headers(f"content-type: {content_type}".encode("latin-1")).get_boundary() or ""
    delimiter = f"\r\n--{boundary}".encode("latin-1", "replace")
    _, *parts = (b"\r\n" + body).split(delimiter, MAX_PARTS + 2)
    if len(parts) > MAX_PARTS + 1:
        raise _invalid(f"the form has more than {MAX_PARTS} parts")
    if not boundary or len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise _invalid("the body is not valid multipart/form-data")
    return [part.lstrip(b" \t").removeprefix(b"\r\n") for part in parts[:-1]]


def _headers(head: bytes) -> Message:
    if len(head) > MAX_HEAD_BYTES:
        raise _invalid(f"a part of the form has headers of more than {MAX_HEAD_BYTES} bytes")
    return BytesHeaderParser().parsebytes(head)


def _text(name: str, headers: Message, data: bytes) -> str:
    if headers.get_filename() is not None:
        message = f"{name}: files are not taken: the model makes videos from text; leave it out"
        raise ApiError(400, message, name, "unsupported_value")
    if headers.get_content_maintype() == "multipart" or "content-transfer-encoding" in headers:
        raise _invalid(f"{name}: send its value as it is, not as a form or encoded", name)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ApiError(400, f"{name}: is not UTF-8", name, "invalid_value") from None


def _invalid(message: str, name: str | None = None) -> ApiError:
    return ApiError(400, message, name, "invalid_form")


def _typed(fields: dict[str, str], kind: Any) -> dict[str, Any]:
    """Numbers where the call has numbers; what cannot be one stays a text, and is refused."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    texts = {f.encode_name for f in info.fields if _takes_text(f.type)}
    return {name: value if name in texts else _number(value) for name, value in fields.items()}


def _takes_text(info: inspect.Type) -> bool:
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    return any(isinstance(member, inspect.StrType | inspect.LiteralType) for member in members)


def _number(value: str) -> Any:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, int | float) else value

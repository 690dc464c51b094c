"""Bodies of multipart/form-data, as OpenAI's clients send them, as the JSON that they stand for."""

from __future__ import annotations

import asyncio
import json
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any, TypeVar

from msgspec import inspect
from starlette.requests import Request

from tokenmill.api.access import read_bytes
from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.decoding import decode_call

FORM = "multipart/form-data"
T = TypeVar("T")


async def read_call(request: Request, kind: type[T], limit: int) -> T:
    """The body of a call, JSON or a form; ApiError names what is wrong with it."""
    declared = request.headers.get("content-length", "")
    body = await read_bytes(request.receive, declared, limit)
    content_type = request.headers.get("content-type", "")
    if content_type.lower().startswith(FORM):
        fields = await asyncio.to_thread(form_fields, content_type, body)
        body = json.dumps(_typed(fields, kind)).encode()
    return decode_call(body, kind)


def form_fields(content_type: str, body: bytes) -> dict[str, str]:
    """The fields of a form; a file is refused by its field's name."""
    head = f"content-type: {content_type}\r\n\r\n".encode("latin-1")
    form = BytesParser(policy=HTTP).parsebytes(head + body)
    if not form.is_multipart() or form.defects:
        raise ApiError(400, "the body is not valid multipart/form-data", code="invalid_form")
    fields: dict[str, str] = {}
    for part in form.iter_parts():
        assert isinstance(part, EmailMessage)
        name = part.get_param("name", header="content-disposition")
        if not isinstance(name, str) or part.is_multipart():
            raise ApiError(400, "a part of the form has no name", code="invalid_form")
        if name in fields:
            raise ApiError(400, f"{name}: the form has it twice", name, "invalid_form")
        fields[name] = _text(name, part)
    return fields


def _text(name: str, part: EmailMessage) -> str:
    if part.get_filename() is not None:
        message = f"{name}: files are not taken: the model makes videos from text; leave it out"
        raise ApiError(400, message, name, "unsupported_value")
    data = part.get_payload(decode=True)
    try:
        return data.decode() if isinstance(data, bytes) else ""
    except UnicodeDecodeError:
        raise ApiError(400, f"{name}: is not UTF-8", name, "invalid_value") from None


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
    except ValueError:
        return value
    return found if isinstance(found, int | float) else value

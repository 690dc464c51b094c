"""The OpenAPI document of a video server."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from tokenmill.api.protocol import answers
from tokenmill.api.videos import video_record
from tokenmill.api.videos.video_request import GenerationRequest, VideoRequest

Json = dict[str, Any]


class VideoPath(answers.Answer, kw_only=True):
    """Where the server has the file."""

    video_id: str
    video_path: str


class VideoBytes(answers.Answer, kw_only=True):
    video_id: str
    video_bytes: str  # base64


_STRUCTS = (
    *(VideoRequest, GenerationRequest, video_record.VideoObject, video_record.VideoList),
    *(video_record.DeletedVideo, VideoPath, VideoBytes, answers.ModelList, answers.ModelCard),
    *(answers.Health, answers.Version, answers.Service, answers.ErrorAnswer),
)
_CREATE_ERRORS = (400, 401, 404, 413, 429, 500, 503)
_MP4 = {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}
_PNG = {"image/png": {"schema": {"type": "string", "format": "binary"}}}


def video_document(version: str, model: str, needs_key: bool) -> Json:
    """The whole OpenAPI 3.1 document of a server of `model`."""
    _, schemas = msgspec.json.schema_components(
        _STRUCTS, ref_template="#/components/schemas/{name}"
    )
    for struct in (VideoRequest, GenerationRequest):
        name = schemas[struct.__name__]["properties"]["model"]
        name["anyOf"] = [{"type": "string", "enum": [model]}, {"type": "null"}]
        schemas[struct.__name__]["additionalProperties"] = {"type": "null"}
    paths, components = _paths(), {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in [path for path in paths if path.startswith("/v1/")]:
            for operation in paths[path].values():
                operation["security"] = [{"key": []}]
    info = {"title": "tokenmill", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _paths() -> dict[str, dict[str, Json]]:
    page = [
        _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100}),
        _parameter("order", "query", {"type": "string", "enum": ["asc", "desc"]}),
        _parameter("after", "query", {"type": "string"}),
    ]
    video_id = _parameter("video_id", "path", {"type": "string", "minLength": 1})
    model_id = _parameter("model_id", "path", {"type": "string", "minLength": 1})
    variant = _parameter("variant", "query", {"type": "string", "enum": ["video", "thumbnail"]})
    one = (401, 404)
    made = _json("VideoPath", "VideoBytes")
    return {
        "/v1/videos": {
            "post": _operation("Ask for a video", _json("VideoObject"), _CREATE_ERRORS)
            | _body("VideoRequest"),
            "get": _operation("Your videos", _json("VideoList"), (400, *one), page),
        },
        "/v1/videos/sync": {
            "post": _operation("Ask for a video and wait for it", _MP4, (*_CREATE_ERRORS, 408))
            | _body("VideoRequest")
        },
        "/v1/videos/generations": {
            "post": _operation("The same for MLPerf's client", made, (*_CREATE_ERRORS, 408))
            | _body("GenerationRequest")
        },
        "/v1/videos/{video_id}": {
            "get": _operation("A video's state", _json("VideoObject"), one, [video_id]),
            "delete": _operation("Forget it", _json("DeletedVideo"), one, [video_id]),
        },
        "/v1/videos/{video_id}/content": {
            "get": _operation(
                "Its file, or a small picture", _MP4 | _PNG, (400, *one), [video_id, variant]
            )
        },
        "/v1/models": {"get": _operation("The models served here", _json("ModelList"), (401,))},
        "/v1/models/{model_id}": {
            "get": _operation("One model", _json("ModelCard"), one, [model_id])
        },
        "/": {"get": _operation("Who this is", _json("Service"))},
        "/health": {"get": _operation("Whether a worker is there", _json("Health"), (503,))},
        "/version": {"get": _operation("The server's version", _json("Version"))},
        "/metrics": {"get": _operation("Prometheus metrics", {"text/plain": {"schema": {}}})},
        "/dashboard": {"get": _operation("The live page", {"text/html": {"schema": {}}})},
        "/docs": {"get": _operation("This page", {"text/html": {"schema": {}}})},
    }


def _operation(
    summary: str, content: Json, errors: tuple[int, ...] = (), parameters: list[Json] | None = None
) -> Json:
    by_status: Json = {"200": {"description": "OK", "content": content}}
    for status in errors:
        answer = {"description": HTTPStatus(status).phrase, "content": _json("ErrorAnswer")}
        by_status[str(status)] = answer
    operation: Json = {"summary": summary, "responses": by_status}
    return operation | ({"parameters": parameters} if parameters else {})


def _body(name: str) -> Json:
    schema = {"schema": _ref(name)}
    content = {"application/json": schema, "multipart/form-data": schema}
    return {"requestBody": {"required": True, "content": content}}


def _json(*names: str) -> Json:
    schema = _ref(names[0]) if len(names) == 1 else {"anyOf": [_ref(name) for name in names]}
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _parameter(name: str, where: str, schema: Json) -> Json:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}

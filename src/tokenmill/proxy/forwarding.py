"""Which calls a router passes on: the routes of inference servers, and those of --forward."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tokenmill.api.errors import RESPONSES_PATH, VIDEOS_PATH, ApiError
from tokenmill.proxy.backend_address import BackendError

VIDEO_POSTS = (VIDEOS_PATH, f"{VIDEOS_PATH}/sync", f"{VIDEOS_PATH}/generations")
POSTS = (
    *("/tokenize", "/detokenize", "/v1/moderations"),
    *(f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings")),
    *(f"/v1/{name}" for name in ("rank", "rerank", "score", "messages", "messages/count_tokens")),
    *(f"/v1/audio/{name}" for name in ("speech", "transcriptions", "translations")),
    *(f"/v1/images/{name}" for name in ("edits", "generations", "variations")),
    *(RESPONSES_PATH, f"{RESPONSES_PATH}/input_tokens", *VIDEO_POSTS),
)
# Calls about what a backend has stored, by their labels in the metrics.
STORED = {
    f"{RESPONSES_PATH}/{{response_id}}": ("GET", "DELETE"),
    f"{RESPONSES_PATH}/{{response_id}}/input_items": ("GET",),
    f"{RESPONSES_PATH}/{{response_id}}/cancel": ("POST",),
    f"{VIDEOS_PATH}/{{video_id}}": ("GET", "DELETE"),
    f"{VIDEOS_PATH}/{{video_id}}/content": ("GET",),
}
ANY_METHOD = ("GET", "POST", "PUT", "PATCH", "DELETE")  # of routes that are listed
_ID, _NAME = r"([\w.-]{1,128})", re.compile(r"{\w+}")
_STORED = {re.compile(_NAME.sub(lambda _: _ID, path), re.ASCII): path for path in STORED}
_HIDDEN = re.compile(rb"%2[ef]|%5c|\\", re.IGNORECASE)  # dots and slashes that some servers decode


def check_target(raw_path: bytes) -> None:
    """ApiError for a path that a backend could take for another one."""
    segments = [part.partition(b";")[0] for part in raw_path.split(b"/")]
    if _HIDDEN.search(raw_path) or b"." in segments or b".." in segments:
        message = "the path has dot segments, or encoded dots or slashes; send it without them"
        raise ApiError(400, message, code="invalid_path")


def stored_in(path: str) -> str:
    """The id of the stored response or video that a path names; "" for other paths."""
    found = _stored_route(path)
    return "" if found is None else found[1]


def _stored_route(path: str) -> tuple[str, str] | None:
    if path in POSTS:
        return None
    for pattern, route in _STORED.items():
        if found := pattern.fullmatch(path):
            return route, found[1]
    return None


def is_sent_once(method: str, path: str) -> bool:
    """A call that begins something at its backend, or may do so: it is never sent twice."""
    is_known = path in POSTS or _stored_route(path) is not None
    return path in VIDEO_POSTS or (method in ("POST", "PATCH") and not is_known)


class Forwarding:
    """The calls that are passed on; a listed path that ends in / has all below it."""

    def __init__(self, listed: tuple[str, ...]) -> None:
        self._listed = listed

    def find(self, method: str, path: str) -> str | None:
        """The route of a call, which is its label in the metrics; None: it is not passed on."""
        if path in POSTS and method == "POST":
            return path
        stored = _stored_route(path)
        if stored is not None and method in STORED[stored[0]]:
            return stored[0]
        return self._listed_route(path) if method in ANY_METHOD else None

    def _listed_route(self, path: str) -> str | None:
        return next((p for p in self._listed if path == p or _is_below(path, p)), None)

    def check(self, own: Iterable[str]) -> None:
        """BackendError where a path is listed that the router answers itself."""
        for path in own:
            for listed in self._listed:
                if path == listed or _is_below(path, listed):
                    raise BackendError(f"--forward {listed}: the router answers {path} itself")

    def routes(self) -> Iterator[tuple[str, Sequence[str]]]:
        """All that is passed on: paths as FastAPI has them, and their methods."""
        yield from ((path, ("POST",)) for path in POSTS)
        yield from STORED.items()
        for path in self._listed:
            yield path + "{rest:path}" * path.endswith("/"), ANY_METHOD


def _is_below(path: str, folder: str) -> bool:
    return folder.endswith("/") and path.startswith(folder)

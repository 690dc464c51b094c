"""Where an image comes from: a data: URL, a file of the operator's folder, or https."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from tokenmill.core.images import VisionConfig
from tokenmill.core.types import ImageError, TokenmillError
from tokenmill.vision.addresses import AllowedHosts
from tokenmill.vision.fetching import Boundless, FetchRoom, fetch, too_large


class ImageSources:
    def __init__(self, config: VisionConfig) -> None:
        self._allowed = AllowedHosts(config.hosts)
        self._folder = Path(config.folder).resolve() if config.folder is not None else None
        if self._folder is not None and not self._folder.is_dir():
            raise TokenmillError(f"--image-folder {config.folder}: there is no such folder")
        self._max_bytes = config.max_bytes
        self._timeout_s = config.timeout_s

    def is_remote(self, url: str) -> bool:
        """True for a URL that `fetch` reads; `read` reads the others."""
        return url[:5].lower() in ("http:", "https")

    def is_file(self, url: str) -> bool:
        return url[:5].lower() == "file:"

    async def fetch(self, url: str, room: FetchRoom | None = None) -> bytes:
        return await fetch(
            url, self._allowed, self._max_bytes, self._timeout_s, room or Boundless()
        )

    def read(self, url: str) -> bytes:
        """The file of a data: or file: URL; it may take a while."""
        if url[:5].lower() == "data:":
            return self._decode(url)
        if self.is_file(url):
            return self._read_path(self._path_of(url))
        raise ImageError(
            f"{url[:30]!r} is no URL of an image; send https://..., or "
            "data:image/png;base64,... with the file itself"
        )

    def _decode(self, url: str) -> bytes:
        head, comma, data = url.partition(",")
        if not comma:
            raise ImageError("its data: URL has no comma; send data:image/png;base64,...")
        if head[5:11].lower() == "video/":
            raise ImageError("it is a video; send some of its frames as images")
        if len(data) > self._max_bytes * 4 // 3 + 4096:
            raise too_large(self._max_bytes)
        if not head.lower().endswith(";base64"):
            return unquote_to_bytes(data)
        return decode_base64(data)

    def file_size(self, url: str) -> int:
        try:
            size = self._path_of(url).stat().st_size
        except OSError as error:
            raise _unreadable(error) from None
        if size > self._max_bytes:
            raise too_large(self._max_bytes)
        return size

    def _path_of(self, url: str) -> Path:
        if self._folder is None:
            raise ImageError(
                "this server reads no files; send a data: URL, or start it with --image-folder DIR"
            )
        parts = urlsplit(url)
        path = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not path.is_absolute() or "\0" in str(path):
            raise ImageError("its file: URL is not valid; send file:///folder/name.png")
        path = path.resolve()
        if not path.is_relative_to(self._folder):
            raise ImageError("its file is not in the folder that is allowed (--image-folder)")
        return path

    def _read_path(self, path: Path) -> bytes:
        try:
            # A pipe or a device would hold up the thread: it is opened without waiting, and left.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(error) from None
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise ImageError("its file: URL is not that of a file")
            if status.st_size > self._max_bytes:
                raise too_large(self._max_bytes)
            with open(handle, "rb", closefd=False) as file:
                return file.read(self._max_bytes)
        finally:
            os.close(handle)


def _unreadable(error: OSError) -> ImageError:
    return ImageError(f"its file cannot be read: {error.strerror}")


def decode_base64(text: str) -> bytes:
    """The bytes of a base64 text, which may have line breaks and lack its padding."""
    data = text.replace("\n", "").replace("\r", "").replace(" ", "").rstrip("=")
    if "%" in data:
        data = unquote(data).rstrip("=")
    try:
        return base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("it is not valid base64") from None

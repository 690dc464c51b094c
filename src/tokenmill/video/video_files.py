"""Videos as files: mp4 by PyAV where it is installed, or a folder of PNG frames."""

from __future__ import annotations

import importlib.util
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.core.installation import install_command
from tokenmill.core.tasks import VideoFrames
from tokenmill.core.types import TokenmillError

_BIT_RATE_PER_PIXEL = 0.25  # bits of a second's pixel, of which H.264 shows clear pictures

# x264's macroblock tree reads memory that it has not written where pictures are small, so that the
# same frames would be one file today and another one tomorrow.
_SAME_BYTES = {"x264-params": "mbtree=0"}


def can_write_mp4() -> bool:
    """True where PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def check_target(path: Path) -> None:
    """Refuse a target that could not be written, before anything is computed for it."""
    if path.suffix == ".mp4":
        if not can_write_mp4():
            name = path.with_suffix("")
            raise TokenmillError(
                f"{path}: mp4 files need PyAV: {install_command('video')}, or give a folder "
                f"for PNG frames, such as {name}/"
            )
        if not path.parent.is_dir():
            raise TokenmillError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise TokenmillError(f"{path}: is a folder; give the name of a file, or another folder")
    elif path.suffix:
        raise TokenmillError(f"{path}: give a name that ends in .mp4, or a folder for PNG frames")
    _check_writable(path)


def _check_writable(path: Path) -> None:
    """Whether the file or folder, or the nearest folder above it, can be written to."""
    found = next(place for place in (path, *path.absolute().parents) if place.exists())
    is_file = found == path and path.suffix == ".mp4"
    if not is_file and not found.is_dir():
        problem = f"{found} is a file; give a folder, or a name that ends in .mp4"
        raise TokenmillError(f"{path}: {problem}")
    if not os.access(found, os.W_OK if is_file else os.W_OK | os.X_OK):
        raise TokenmillError(f"{path}: no permission to write to {found}; give another --out")


def write_video(video: VideoFrames, path: Path) -> None:
    """Write an .mp4 file, or frame-0001.png and so on into a folder."""
    if path.suffix == ".mp4":
        path.write_bytes(mp4_bytes(video))
        return
    path.mkdir(parents=True, exist_ok=True)
    for index in range(video.num_frames):
        (path / f"frame-{index + 1:04d}.png").write_bytes(png_bytes(video, index))


def mp4_bytes(video: VideoFrames) -> bytes:
    """H.264 in an mp4 container."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=video.fps, options=_SAME_BYTES)
        stream.width, stream.height, stream.pix_fmt = video.width, video.height, "yuv420p"
        stream.bit_rate = int(video.width * video.height * video.fps * _BIT_RATE_PER_PIXEL)
        shape = (video.num_frames, video.height, video.width, 3)
        for pixels in np.frombuffer(video.data, np.uint8).reshape(shape):
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def png_bytes(video: VideoFrames, index: int) -> bytes:
    return png_file(video.width, video.height, video.frame(index))


def png_file(width: int, height: int, pixels: bytes) -> bytes:
    row_bytes = 3 * width
    rows = (pixels[i : i + row_bytes] for i in range(0, len(pixels), row_bytes))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows), 1)
    chunks = (_chunk(b"IHDR", head), _chunk(b"IDAT", body), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

"""Where images come from, and what is refused before it is fetched, read or decoded."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from socket import create_server, socket
from threading import Thread
from typing import Any

import pytest

from tokenmill.core.images import VisionConfig
from tokenmill.core.types import ImageError, TokenmillError
from tokenmill.vision import image_maker
from tokenmill.vision.addresses import AllowedHosts, is_public
from tokenmill.vision.image_files import decode, open_image
from tokenmill.vision.image_headers import checked_size
from tokenmill.vision.image_maker import ImageMaker
from tokenmill.vision.processor import ImageProcessor, PixelLimits
from tokenmill.vision.sources import ImageSources
from vision.pictures import empty_png, file_of, gif, photo

LIMITS = PixelLimits(1024, 65_536)


def webp(width: int, height: int) -> bytes:
    canvas = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + (10).to_bytes(4, "little") + canvas
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def maker() -> ImageMaker:
    halves = (0.5, 0.5, 0.5)
    return ImageMaker(ImageProcessor(LIMITS, 16, 2, 2, 1 / 255, halves, halves, 7), 64_000_000)


@contextmanager
def server(answer: Callable[[socket, bytes], None]) -> Iterator[str]:
    """A web server; `answer` gets each connection and the head of its request."""
    with create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        answer(connection, connection.recv(65_536))
                    except OSError:
                        continue

        Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(2)


def says(text: str, body: bytes = b"") -> Callable[[socket, bytes], None]:
    head = text.replace("\n", "\r\n").encode() + b"\r\n\r\n"
    return lambda connection, _: connection.sendall(head + body)


def fetch(url: str, *hosts: str, **limits: Any) -> bytes:
    sources = ImageSources(VisionConfig(hosts=hosts, **limits))
    return asyncio.run(sources.fetch(url))


def test_data_urls() -> None:
    sources = ImageSources(VisionConfig(max_bytes=100_000))
    data = bytes(range(256))
    text = base64.b64encode(data).decode()
    assert sources.read(f"data:image/png;base64,{text}") == data
    assert sources.read(f"DATA:;base64,{text[:80]}\n{text[80:].rstrip('=')}") == data
    assert sources.read("data:image/png,%89PNG") == b"\x89PNG"
    for url, problem in [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,!!!", "not valid base64"),
        ("data:image/png;base64," + "A" * 200_000, "larger than 100000 bytes"),
        ("ftp://example.com/a.png", "is no URL of an image"),
        ("iVBORw0KGgo", "is no URL of an image"),
        ("", "is no URL of an image"),
    ]:
        with pytest.raises(ImageError, match=problem):
            sources.read(url)


def test_files_only_of_the_folder(tmp_path: Path) -> None:
    folder, secret = tmp_path / "images", tmp_path / "secret.png"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"picture")
    (folder / "large.png").write_bytes(bytes(2000))
    secret.write_bytes(b"secret")
    (folder / "link.png").symlink_to(secret)
    os.mkfifo(folder / "pipe.png")
    sources = ImageSources(VisionConfig(folder=str(folder), max_bytes=1000))
    assert sources.read(f"file://{folder}/a%20b.png") == b"picture"
    for name, problem in [
        ("../secret.png", "not in the folder"),
        ("%2e%2e/secret.png", "not in the folder"),
        ("link.png", "not in the folder"),
        ("pipe.png", "not that of a file"),
        ("", "not that of a file"),
        ("none.png", "cannot be read"),
        ("large.png", "larger than 1000 bytes"),
    ]:
        with pytest.raises(ImageError, match=problem):
            sources.read(f"file://{folder}/{name}")
    with pytest.raises(ImageError, match="--image-folder"):
        ImageSources(VisionConfig()).read(f"file://{folder}/a.png")
    with pytest.raises(TokenmillError, match=r"--image-folder .*none: there is no such folder"):
        ImageSources(VisionConfig(folder=str(folder / "none")))


def test_only_allowed_hosts() -> None:
    allowed = AllowedHosts(("img.example.com", "*.cdn.example", "http://10.0.0.5:9000"))
    assert allowed.check("https://img.example.com/a.png?b=1").path == "/a.png?b=1"
    assert allowed.check("https://IMG.example.com.:8443/").authority == "img.example.com:8443"
    assert not allowed.check("https://x.y.cdn.example/").may_be_private
    assert allowed.check("http://10.0.0.5:9000/a").may_be_private
    for url, problem in [
        ("https://example.com/", "'example.com' is not one of those"),
        ("https://cdn.example/", "is not one of those"),
        ("https://img.example.com.evil.com/", "is not one of those"),
        ("https://img.example.com@evil.com/", "user name"),
        ("http://img.example.com/", "http: URLs are not fetched"),
        ("http://10.0.0.5/", "http: URLs are not fetched"),
        ("https://img.example.com:port/", "not valid"),
        ("https://img.example.com/a b", "spaces"),
        ("https://img.example.com/\r\nHost: x", "spaces"),
        ("https:///a", "is not one of those"),
    ]:
        with pytest.raises(ImageError, match=problem):
            allowed.check(url)
    with pytest.raises(ImageError, match=r"--image-host img\.example\.com"):
        AllowedHosts(()).check("https://img.example.com/")
    with pytest.raises(ImageError, match=r"--image-host http://img\.example\.com:80$"):
        AllowedHosts(()).check("http://img.example.com/")
    for host in ("a/b", "*x.com", "ftp://a", "https://a/b"):
        with pytest.raises(TokenmillError, match="--image-host"):
            AllowedHosts((host,))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1"),
        *("::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "ff02::1", "no address"),
    ],
)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    assert is_public("8.8.8.8") and is_public("2606:4700::1111")


def test_private_addresses_are_refused_before_a_connection() -> None:
    def answer(connection: socket, head: bytes) -> None:
        raise AssertionError("a connection was made")

    with server(answer) as origin:
        port = origin.rpartition(":")[2]
        for host in ("localhost", "127.0.0.1", "[::1]", "2130706433", "127.1"):
            with pytest.raises(ImageError, match=r"not public|is not known"):
                fetch(f"https://{host}:{port}/", "*")


def test_the_checked_address_is_the_one_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that is public at first and private a moment later is resolved once."""
    names: list[str] = []
    hosts: list[str] = []

    async def resolve(self: Any, host: str, port: int, **options: Any) -> Any:
        names.append(host)
        return [(2, 1, 6, "", ("8.8.8.8" if len(names) == 1 else "127.0.0.1", port))]

    async def connect(self: Any, protocol: Any, host: str, port: int, **options: Any) -> Any:
        hosts.append(host)
        assert options["server_hostname"] == "img.example.com"
        raise OSError("no network")

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", connect)
    with pytest.raises(ImageError, match="no network"):
        fetch("https://img.example.com/", "img.example.com")
    assert (names, hosts) == (["img.example.com"], ["8.8.8.8"])


def test_a_fetch() -> None:
    requests: list[bytes] = []

    def answer(connection: socket, head: bytes) -> None:
        requests.append(head)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"4\r\npict\r\n3\r\nure\r\n0\r\n\r\n")

    with server(answer) as origin:
        assert fetch(f"{origin}/a?b", origin) == b"picture"
    assert requests[0].startswith(b"GET /a?b HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ("HTTP/1.1 404 Not Found\nContent-Length: 0", "status 404"),
        ("HTTP/1.1 200 OK\nContent-Length: 209715200", "larger than 1000 bytes"),
        ("HTTP/1.1 200 OK\nContent-Length: 10", "too early"),
        ("HTTP/1.1 200 OK\nX: " + "x" * 70_000, "the head has more"),
        ("SSH-2.0-OpenSSH", "not HTTP"),
        ("HTTP/1.1 302 Found\nLocation: https://169.254.169.254/meta", "not one of those"),
        ("HTTP/1.1 302 Found\nLocation: file:///etc/passwd", "file: URLs are not fetched"),
        ("HTTP/1.1 302 Found\nLocation: /again", "more than 3 redirects"),
    ],
)
def test_what_a_server_may_not_answer(head: str, problem: str) -> None:
    with server(says(head)) as origin, pytest.raises(ImageError, match=problem):
        fetch(f"{origin}/", origin, max_bytes=1000)


def test_a_body_without_end_is_cut_at_the_limit() -> None:
    sent = 0

    def answer(connection: socket, head: bytes) -> None:
        nonlocal sent
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(10_000):
            connection.sendall(bytes(65_536))
            sent += 65_536

    with server(answer) as origin, pytest.raises(ImageError, match="larger than 100000 bytes"):
        fetch(f"{origin}/", origin, max_bytes=100_000)
    assert sent < 100_000_000


def test_a_slow_server_is_left() -> None:
    def drip(connection: socket, head: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        connection.recv(1)  # until the client leaves

    with server(drip) as origin, pytest.raises(ImageError, match=r"within 0\.2 s"):
        fetch(f"{origin}/", origin, timeout_s=0.2)


@pytest.mark.parametrize(
    "data",
    [
        *(empty_png(30_000, 30_000), empty_png(9000, 9000), webp(16_000, 16_000)),
        *(gif(65_535, 65_535), gif(1, 1, frame=(1, 1, 9000, 9000))),
    ],
    ids=["png", "png 9000", "webp", "gif", "gif frame"],
)
def test_bombs_are_refused_by_their_header(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ImageError, match=r"64000000"):
        checked_size(data, 64_000_000)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_broken_files_are_named() -> None:
    with pytest.raises(ImageError, match="cannot be decoded"):
        decode(open_image(empty_png(500, 500), 10**6))
    for data, problem in [(b"", "empty"), (b"%PDF-1.7", "no readable PNG")]:
        with pytest.raises(ImageError, match=problem):
            open_image(data, 10**6)


# What Pillow takes for the length of a block ends the extension: they find different frames.
HIDES = b"!\xf9\x00" + b"," + struct.pack("<HHHHB", 0, 0, 8, 8, 0) + bytes(36)


@pytest.mark.parametrize("side", [9000, 14_000])
def test_a_frame_that_only_the_decoder_finds_is_no_image(side: int) -> None:
    """It has the memory of the small one that the header states."""
    hidden = gif(8, 8, frame=(0, 0, side, side), before=HIDES)
    assert checked_size(hidden, 64) == (8, 8)
    with closing(maker()) as made, pytest.raises(ImageError, match=r"its decoder finds|cannot be"):
        made.make(hidden, LIMITS, 4096)


def test_an_image_ends_its_process_and_no_other_image(monkeypatch: pytest.MonkeyPatch) -> None:
    small = file_of(photo(64, 64), "PNG")
    with closing(maker()) as made:
        expected = made.make(small, LIMITS, 4096)
        (process,) = made._processes._idle
        monkeypatch.setattr(image_maker, "BASE_BYTES", 2**20)
        monkeypatch.setattr(image_maker, "PIXEL_BYTES", 0)
        with pytest.raises(ImageError, match="takes more memory than images of its size"):
            made.make(file_of(photo(1500, 1500), "PNG"), LIMITS, 4096)
        monkeypatch.undo()
        monkeypatch.setattr(image_maker, "DECODE_S", 0.0001)
        with pytest.raises(ImageError, match=r"took more than 0\.0001 s"):
            made.make(small, LIMITS, 4096)
        monkeypatch.undo()
        assert not process.is_alive
        assert made.make(small, LIMITS, 4096) == expected

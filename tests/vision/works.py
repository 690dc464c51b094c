"""Works that another process can import."""

from __future__ import annotations

import os
import signal
import sys
import time


def echo(data: bytes, *args: object) -> list[bytes]:
    print("what a library prints is no answer", file=sys.stdout)
    return [data, repr(args).encode(), b""]


def process_id(data: bytes) -> list[bytes]:
    return [str(os.getpid()).encode()]


def allocate(data: bytes, num_bytes: int) -> list[bytes]:
    return [str(len(bytearray(num_bytes))).encode()]


def fail(data: bytes, message: str) -> list[bytes]:
    raise ValueError(message)


def fail_oddly(data: bytes) -> list[bytes]:
    class LocalError(Exception):
        """Cannot be pickled."""

    raise LocalError("oddly")


def crash(data: bytes) -> list[bytes]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def hang(data: bytes) -> list[bytes]:
    while True:
        time.sleep(60)

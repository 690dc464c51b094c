"""The private folder of a unix socket; it does not outlive the process that listens there."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

SCHEME = "ipc://"
POLL_S = 0.5
MOST_BYTES = 60  # of the folder around ours: the path of a unix socket has 107 bytes at most


def new_address(name: str) -> str:
    """The address of a socket in a new folder, which is named after this process."""
    around = tempfile.gettempdir()
    around = around if len(os.fsencode(around)) <= MOST_BYTES else "/tmp"
    return f"{SCHEME}{tempfile.mkdtemp(prefix=f'tokenmill-{os.getpid()}-', dir=around)}/{name}"


def remove_folder(address: str) -> None:
    """Remove the folder of an address, if it has one; open connections go on."""
    if address.startswith(SCHEME):
        shutil.rmtree(_folder(address), ignore_errors=True)


def end_with_listener(address: str) -> None:
    """From now on, end within a second of the parent that listens at `address`.

    If it is killed, be it while a model is loaded, nobody else would remove the folder.
    """
    if address.startswith(SCHEME):
        parent = int(_folder(address).name.split("-")[1])
        atexit.register(_clear_after, parent, address)
        threading.Thread(target=_watch, args=(parent, address), daemon=True).start()


def _clear_after(parent: int, address: str) -> None:
    if os.getppid() != parent:
        remove_folder(address)


def _watch(parent: int, address: str) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    remove_folder(address)
    os._exit(1)


def _folder(address: str) -> Path:
    return Path(address.removeprefix(SCHEME)).parent

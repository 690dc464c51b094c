"""Run folders: what a live server keeps for the commands of its own user, and for nobody else.

A server at PORT has `$XDG_RUNTIME_DIR/tokenmill/PORT`, or else `~/.cache/tokenmill/run/PORT`
(PORT.1 and so on where several addresses of the machine have that port), and a lock in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

TOKEN, LOCK, SALT = "control-token", "lock", "key-salt"
_ANY_FAMILY = {"0.0.0.0": (socket.AF_INET,), "::": (socket.AF_INET, socket.AF_INET6)}


def _roots() -> list[Path]:
    """Where run folders are; servers use the first, commands may have another environment."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    is_ours = runtime.is_dir() and runtime.stat().st_uid == os.geteuid()
    return [runtime / "tokenmill"] * is_ours + [Path.home() / ".cache/tokenmill/run"]


def _private(folder: Path) -> Path:
    """A folder that only this user can read; OSError where it cannot be had."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    folder.chmod(0o700)
    return folder


def write_private(path: Path, data: str) -> None:
    """Write a file that only this user can read, whole."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(data)
    os.replace(new, path)


def key_salt(folder: Path | None = None) -> bytes:
    """The salt of all servers of this user, or of those with a folder of their own.

    It outlives them. OSError where none can be kept.
    """
    path = (folder or _private(_roots()[0])) / SALT
    if not path.exists():
        new = path.with_name(f"{SALT}.{secrets.token_hex(4)}")
        write_private(new, secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(new, path)  # the first of several servers makes it
        new.unlink()
    return bytes.fromhex(path.read_text())


@contextlib.contextmanager
def open_run_folder(host: str, port: int) -> Iterator[Path]:
    """The run folder of a server while the block runs; OSError where there can be none.

    Folders of servers that are dead are removed.
    """
    root = _private(_roots()[0])
    for folder in list(root.iterdir()):
        _is_dead(folder, remove=True)
    number = 0
    while (lock := _hold(folder := root / f"{port}{f'.{number}' if number else ''}")) is None:
        number += 1
    try:
        os.truncate(lock, 0)
        os.write(lock, f"{socket.gethostname()} {host}".encode())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _hold(folder: Path) -> int | None:
    """The lock of a folder, made where it is missing; None where a live server has it."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it meanwhile
            lock = os.open(_private(folder) / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
                    return lock
            except BlockingIOError:
                os.close(lock)
                return None
            os.close(lock)


def _is_dead(folder: Path, remove: bool = False) -> bool:
    """The server of a run folder has ended; of other machines that share it nothing is known."""
    with contextlib.suppress(OSError), open(folder / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_dead = lock.read().partition(" ")[0] in ("", socket.gethostname())
        if remove and is_dead:
            shutil.rmtree(folder, ignore_errors=True)
        return is_dead
    return False


def find_own_server(url: str) -> tuple[str, str] | None:
    """The URL of a live server of this user by its address, and its control token, if it is one.

    Another user may listen at another address of the machine, which gets no token.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(OSError, RuntimeError):
        for folder in (folder for root in _roots() for folder in sorted(root.glob(f"{port}*"))):
            if folder.stat().st_uid != os.geteuid() or _is_dead(folder):
                continue
            machine, _, host = (folder / LOCK).read_text().partition(" ")
            if machine != socket.gethostname() or not (folder / TOKEN).exists():
                continue
            if (address := _shared_address(parts.hostname or "", host, port)) is not None:
                plain = f"[{address}]" if ":" in address else address
                netloc = parts.netloc if parts.scheme == "https" else f"{plain}:{port}"
                return parts._replace(netloc=netloc).geturl(), (folder / TOKEN).read_text()
    return None


def _shared_address(asked: str, listening: str, port: int) -> str | None:
    """An address of this machine that a name leads to and a server listens at."""
    families = _ANY_FAMILY.get(listening)
    own = set() if families else {found[4][0] for found in socket.getaddrinfo(listening, port)}
    for family, _, _, _, (address, *_) in socket.getaddrinfo(asked, port, type=socket.SOCK_STREAM):
        if (family in families and _is_own(family, str(address))) if families else address in own:
            return str(address)
    return None


def _is_own(family: socket.AddressFamily, address: str) -> bool:
    if ipaddress.ip_address(address).is_loopback:
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True

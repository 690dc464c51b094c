"""Which ports processes listen at, as `ss -ltn` shows them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path

LISTENS = "0A"


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """(address, port) of the TCP sockets at which processes listen."""
    own = {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and rest[5] in own:
                address, _, port = local.partition(":")
                found.add((_address(bytes.fromhex(address)), int(port, 16)))
    return found


def elsewhere(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The same without those that only this host reaches."""
    return {found for found in listening(pids) if not ip_address(found[0]).is_loopback}


def _sockets(pid: int) -> list[str]:
    """The inodes of a process's sockets."""
    names = []
    for file in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            name = os.readlink(file)
        except OSError:  # closed meanwhile
            continue
        if name.startswith("socket:["):
            names.append(name[8:-1])
    return names


def _address(packed: bytes) -> str:
    """An address as the kernel prints it: words of four bytes, the last byte first."""
    words = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
    family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, words).removeprefix("::ffff:")

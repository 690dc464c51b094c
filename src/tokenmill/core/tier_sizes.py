"""What `--kv-offloading` asks for: memory and disk for KV blocks that leave the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.core.flags import Kind, parse_size

DEVICE, HOST, DISK = "device", "host", "disk"


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Bytes of host memory, and a folder with the bytes that it may take."""

    host_bytes: int = 0
    folder: str | None = None
    disk_bytes: int = 0


def parse_tiers(text: str) -> TierSizes:
    """Read "host=8GiB,disk=/var/kv:100GiB", or "8GiB" of host memory; raises ValueError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        name, value = (name, value) if equals else (HOST, name)
        if name not in (HOST, DISK) or name in found:
            raise ValueError(text)
        found[name] = value
    folder, _, size = found.get(DISK, "").rpartition(":")
    if DISK in found and not folder:
        raise ValueError(text)
    return TierSizes(
        parse_size(found[HOST]) if HOST in found else 0,
        folder or None,
        parse_size(size) if folder else 0,
    )


def _read(value: Any) -> str:
    text = str(value)
    parse_tiers(text)
    return text


OFFLOADING = Kind(
    _read,
    "host=SIZE, disk=FOLDER:SIZE or both with a comma, such as host=8GiB,disk=/var/kv:100GiB",
    "TIERS",
)

"""How fast blocks come back from each tier, measured once when an engine starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tokenmill.core.kv import DISK, HOST
from tokenmill.kv.tiers.disk_tier import DiskTier
from tokenmill.kv.tiers.page_copies import PageCopies

_COPIED_BYTES = 2**26  # of a copy that is timed
_READ_BYTES = 2**24  # of a file
_ROUNDS = 2  # the first one may wait for what it uses to be set up
_WAIT_S = 20e-6

_log = logging.getLogger(__name__)


def measure_token_ms(
    copies: PageCopies, disk: DiskTier | None, num_pages: int, token_bytes: float
) -> dict[str, float]:
    """Milliseconds by tier in which a token of so many bytes comes back to an idle device.

    The device must have `num_pages` that nobody uses; their contents stay.
    """
    rates = {HOST: max(_host_rate(copies, num_pages) for _ in range(_ROUNDS))}
    if disk is not None and (disk_rate := disk.measure_rate(_READ_BYTES)) is not None:
        rates[DISK] = disk_rate
    for tier, rate in rates.items():
        _log.info("KV comes back from %s at %.2f GB/s", tier, rate / 1e9)
    return token_ms(rates, token_bytes)


def token_ms(rates: dict[str, float], token_bytes: float) -> dict[str, float]:
    """Milliseconds of a token at rates in bytes per second; what is on disk goes by the host."""
    host_ms = 1e3 * token_bytes / rates[HOST]
    found = {HOST: host_ms}
    if DISK in rates:
        found[DISK] = host_ms + 1e3 * token_bytes / rates[DISK]
    return found


def _host_rate(copies: PageCopies, num_pages: int) -> float:
    """Bytes per second from host memory to the device."""
    size = int(copies.host.shape[1])
    pages = list(range(max(1, min(num_pages, len(copies.host), _COPIED_BYTES // size))))
    copies.save(pages, pages)
    copies.settle()
    return len(pages) * size / _seconds(lambda: _load(copies, pages))


def _load(copies: PageCopies, pages: list[int]) -> None:
    read = copies.load(pages, pages)
    while not read.done():
        time.sleep(_WAIT_S)


def _seconds(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return max(time.perf_counter() - begin, 1e-9)

"""An executor that runs what it is given when it is given: nothing is a matter of time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tokenmill.kv.tiers.offloading import KVTiers


class AtOnce:
    def submit(self, action: Callable[..., bool], *args: Any) -> Future[bool]:
        future: Future[bool] = Future()
        future.set_result(action(*args))
        return future

    def shutdown(self) -> None:
        pass


def without_threads(tiers: KVTiers) -> None:
    """Let the disk of tiers write and read at once."""
    tiers._writers = tiers._readers = AtOnce()  # type: ignore[assignment]

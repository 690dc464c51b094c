"""What a prompt token costs that comes back from a tier, as a share of one that is computed."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.core.kv import DISK, HOST
from tokenmill.routing.kv_index import KVIndex
from tokenmill.sched.cache.blocks import U64

UNKNOWN = {HOST: 0.1, DISK: 0.3}  # of a worker that has not told how long a token takes


def tier_price(tier: str, token_ms: dict[str, float], computed_ms: float) -> float:
    """A share of what computing a token takes; no more than all of it.

    `token_ms` is what a worker has measured by tier, `computed_ms` what its steps have shown.
    """
    if tier not in token_ms:
        return UNKNOWN[tier]
    return min(1.0, token_ms[tier] / computed_ms) if computed_ms > 0 else 1.0


def cached_tokens(
    index: KVIndex, chain: U64, num_tokens: int, size: int, price: Callable[[str, str], float]
) -> dict[str, int]:
    """Prompt tokens that each worker has cached, as far as is known; one is always computed.

    Tokens in a tier behind the device count as far as they are cheaper than computed ones: `price`
    is that of a worker and a tier.
    """
    most = (num_tokens - 1) // size * size
    cached = {name: min(depth * size, most) for name, depth in index.overlaps(chain).items()}
    reached = cached.copy()
    for tier, found in index.tier_overlaps(chain):
        for name, depth in found.items():
            more = min(depth * size, most) - reached.get(name, 0)
            if more > 0:
                cached[name] = cached.get(name, 0) + round(more * (1.0 - price(name, tier)))
                reached[name] = reached.get(name, 0) + more
    return cached

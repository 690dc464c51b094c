"""What a prompt token costs that comes back from a tier, as a share of one that is computed."""

from __future__ import annotations

from tokenmill.core.kv import DISK, HOST

UNKNOWN = {HOST: 0.1, DISK: 0.3}  # of a worker that has not told how long a token takes


def tier_price(tier: str, token_ms: dict[str, float], computed_ms: float) -> float:
    """A share of what computing a token takes; no more than all of it.

    `token_ms` is what a worker has measured by tier, `computed_ms` what its steps have shown.
    """
    if tier not in token_ms:
        return UNKNOWN[tier]
    return min(1.0, token_ms[tier] / computed_ms) if computed_ms > 0 else 1.0

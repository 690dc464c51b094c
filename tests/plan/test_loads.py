"""The KV policy beside all others over kinds of load, on costs of a GPU and of a CPU.

Everything is in virtual time and drawn from seeds: the figures are the same on every machine.
"""

from __future__ import annotations

import pytest

from tokenmill.plan.load_table import HIGH, POLICIES, Cell, compare
from tokenmill.plan.loads import KINDS

CASES = [("gpu", kind) for kind in KINDS]
CASES += [("cpu", kind) for kind in ("system-short", "system-long", "chats", "documents", "skewed")]
P99 = 1.15  # of 64 requests, where the p99 is the worst one


@pytest.mark.parametrize(("machine", "kind"), CASES)
def test_kv_is_not_much_worse_than_the_best_other_policy(machine: str, kind: str) -> None:
    (row,) = compare([Cell(machine, kind, 2, HIGH)], num_requests=64, num_seeds=2)
    assert row.figures.keys() == set(POLICIES)
    limits = {"ttft_ms": 1.05, "ttft_p99_ms": P99, "tpot_ms": 1.05, "duration_s": 1.05}
    assert all(row.ratios[name] <= limit for name, limit in limits.items()), row.ratios
    if kind in ("documents", "skewed"):
        assert row.ratios["ttft_ms"] < 0.8, "it wins where prefixes are many"

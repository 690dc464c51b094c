"""What sessions find of their prompts in the cache, over the real block pool and scheduler."""

from __future__ import annotations

import pytest

from benchmarks.windows import BRANCHING, LIVE_SHARES, MODELS, Load, found_shares, hit_share
from tokenmill.core.kv_groups import Sliding


@pytest.mark.parametrize("sliding", MODELS.values(), ids=MODELS)
def test_sessions_in_turn_find_their_prefixes_at_any_occupancy(sliding: Sliding) -> None:
    for live in LIVE_SHARES:
        assert hit_share(sliding, live) >= 0.98, live


@pytest.mark.parametrize("sliding", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("load", BRANCHING.values(), ids=BRANCHING)
def test_sessions_that_branch_find_what_they_share(load: Load, sliding: Sliding) -> None:
    """64 sessions that branch from a prompt and documents."""
    first, *later = found_shares(sliding, 0.9, load)
    assert set(later) == {1.0}
    # Two requests of 64 make a border known; each of eight documents takes two as well.
    assert first >= (0.75 if len(load.shared) > 1 else 62 / 64)

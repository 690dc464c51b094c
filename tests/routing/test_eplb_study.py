"""Placing experts by synthetic loads; ranks are in tests/engine/test_ranks.py."""

import numpy as np
import pytest

from tokenmill.routing.eplb_study import SKEWS, ExpertShape, popularity, study

SMALL = ExpertShape(num_ranks=8, num_redundant=8, num_experts=64, num_layers=3, ranks_per_node=4)


@pytest.mark.parametrize("skew", SKEWS)
def test_redundant_experts_even_out_what_placing_cannot(skew: str) -> None:
    report = study(skew, SMALL)  # type: ignore[arg-type]
    before, placed, balanced = (report[name] for name in ("before", "placed", "balanced"))
    assert isinstance(before, float) and isinstance(placed, float) and isinstance(balanced, float)
    assert 1.0 <= balanced < placed < before
    assert report["slots"] == 72 and isinstance(report["by_node"], float)
    assert report == study(skew, SMALL) | {"place_ms": report["place_ms"]}  # type: ignore[arg-type]


def test_popularity_is_what_it_is_called() -> None:
    zipf = popularity("zipf", SMALL, 0)
    assert zipf.shape == (3, 64) and np.allclose(zipf.sum(1), 1.0)
    ranked = np.sort(zipf, axis=1)[:, ::-1]
    assert np.allclose(ranked[:, 0] / ranked[:, 9], 10.0)

"""The figures of bench eplb: synthetic loads here, ranks in tests/engine/test_ranks.py."""

import json

import numpy as np
import pytest

from tokenmill.__main__ import run
from tokenmill.routing.eplb_study import SKEWS, Shape, popularity, study

SMALL = Shape(num_ranks=8, num_redundant=8, num_experts=64, num_layers=3, ranks_per_node=4)


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


def test_command_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "eplb", "--eplb-ranks", "8", "--live-ranks", "0", "--json-only"]
    assert run(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["live"] is None and [row["load"] for row in report["synthetic"]] == list(SKEWS)
    assert run(["bench", "eplb", "--eplb-ranks", "8", "--live-ranks", "1"]) != 0
    assert "--live-ranks must be 0 or at least 2, got 1" in capsys.readouterr().err
    assert all(1 < row["balanced"] < row["before"] for row in report["synthetic"])

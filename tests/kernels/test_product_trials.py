"""Which library computes a product: chosen by trials while graphs are captured, and kept."""

from collections.abc import Iterator

import pytest
import torch

from tokenmill import kernels
from tokenmill.kernels import matmul, product_trials
from tokenmill.kernels.matmul import PackedWeight, adds_in_place
from tokenmill.kernels.product_trials import MOST_ROWS, Way, by_lt, matmul_by_lt, trials


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """No choice is known; a trial finds cuBLASLt faster for an even number of rows."""
    tried: list[int] = []

    def times(ways: tuple[Way, Way], x: torch.Tensor, weight: torch.Tensor) -> list[float]:
        tried.append(x.shape[0])
        return [1.0, 0.5 + x.shape[0] % 2]

    monkeypatch.setattr(product_trials, "LEAST_BYTES", 6 * 5 * 4)
    monkeypatch.setattr(product_trials, "_second_is_faster", {})
    monkeypatch.setattr(product_trials, "_times", times)
    yield tried


def test_a_product_is_tried_once_and_only_while_trials_run(nothing_tried: list[int]) -> None:
    weight = torch.randn(6, 5)
    assert not by_lt(torch.randn(8, 5), weight) and not nothing_tried
    with trials():
        chosen = {rows: by_lt(torch.randn(rows, 5), weight) for rows in (8, 7, 8, MOST_ROWS + 2)}
        assert not by_lt(torch.randn(8, 4), torch.randn(6, 4)), "W is too small to count"
    assert chosen == {8: True, 7: False, MOST_ROWS + 2: False}
    assert nothing_tried == [8, 7]
    assert by_lt(torch.randn(8, 5), weight) and not by_lt(torch.randn(10, 5), weight)
    assert not by_lt(torch.randn(8, 5), torch.randn(7, 5)), "the shape of W counts as well"


def test_both_ways_are_the_same_product() -> None:
    x, weight = torch.randn(8, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    torch.testing.assert_close(matmul_by_lt(x, weight), x @ weight.T)


def test_what_adds_slowly_is_added_by_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a product alone is faster by cuBLAS, too."""
    monkeypatch.setattr(kernels, "on_gpu", lambda x: True)

    def times(ways: tuple[Way, Way], x: torch.Tensor, weight: torch.Tensor) -> list[float]:
        first, rows = ways[0], x.shape[0]
        return [1.0, 0.9 if first is product_trials._added and rows == 8 else 1.0]

    monkeypatch.setattr(product_trials, "_times", times)
    weight = PackedWeight(torch.randn(6, 5), None, 6, 5, tiled=False)
    with trials():
        assert not adds_in_place(torch.randn(8, 5), weight)
        assert adds_in_place(torch.randn(7, 5), weight)
    assert not by_lt(torch.randn(8, 5), weight.data)


def test_what_cublaslt_computes_is_added_by_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda x: True)
    weight = PackedWeight(torch.randn(6, 5), None, 6, 5, tiled=False)
    with trials():
        assert not adds_in_place(torch.randn(8, 5), weight)
        assert adds_in_place(torch.randn(7, 5), weight)
    x = torch.randn(8, 5)
    torch.testing.assert_close(matmul.matmul(x, weight), x @ weight.data.T)

"""The ranking model: golden scores, exact levers, what depends on the batch, what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from tiny_ranking import TINY, tiny_model, tiny_request, tiny_tensors
from tokenmill import kernels
from tokenmill.core.specs.hstu import HstuSpec, read_hstu
from tokenmill.core.types import InvalidRequestError, ModelLoadError
from tokenmill.kernels import hstu
from tokenmill.kernels.hstu import JaggedTile, query_tiles
from tokenmill.models.hstu import HstuModel, time_buckets
from tokenmill.ranking.model import RankingModel
from tokenmill.ranking.model_files import choose_device, choose_dtype, random_model
from tokenmill.ranking.requests import ids_of
from tokenmill.ranking.stores.table import DeviceTable

FIXED = replace(TINY, scaling_seqlen=96)
REQUESTS = [tiny_request(3, 2), tiny_request(70, 4, user=2), tiny_request(20, 24, user=5)]


def test_golden_scores() -> None:
    """Of our own formula; tests/ranking/test_reference.py has MLPerf's model beside it."""
    short, long = tiny_model().score(REQUESTS[:2])
    np.testing.assert_allclose(short[:, 0], [0.194191, 0.606748], atol=1e-5)
    np.testing.assert_allclose(long[:, 0], [0.194127, 0.604046, 0.169213, 0.252135], atol=1e-5)


def test_scores_depend_on_the_batch_only_where_the_config_says_so() -> None:
    together, alone = tiny_model().score(REQUESTS)[0], tiny_model().score(REQUESTS[:1])[0]
    assert abs(together - alone).max() > 1e-5
    together, alone = tiny_model(FIXED).score(REQUESTS)[0], tiny_model(FIXED).score(REQUESTS[:1])[0]
    np.testing.assert_allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("levers", [{"targets_only": False}, {"candidate_chunk": 7}])
def test_levers_are_exact(levers: dict[str, Any]) -> None:
    for plain, other in zip(
        tiny_model().score(REQUESTS), tiny_model(**levers).score(REQUESTS), strict=True
    ):
        np.testing.assert_allclose(plain, other, atol=1e-6)


@pytest.mark.parametrize("levers", [{"targets_only": False}, {"candidate_chunk": 7}])
def test_fp8_is_near_fp32_and_its_rows_are_rounded_alone(levers: dict[str, Any]) -> None:
    """A row's scale is its own, so the levers change no more than the order of sums."""
    expected, found, other = (
        np.concatenate(model.score(REQUESTS))
        for model in (tiny_model(), fp8_model(), fp8_model(**levers))
    )
    assert fp8_model().dense.type_name == "fp8"
    assert 1e-4 < abs(found - expected).max() < 0.05
    np.testing.assert_allclose(other, found, atol=2e-2)


def fp8_model(**levers: Any) -> RankingModel:
    plain = tiny_model()
    tensors = {name: tensor.bfloat16() for name, tensor in plain.dense.tensors.items()}
    return RankingModel(HstuModel(TINY, tensors, fp8=True, **levers), plain.stores)


def test_products_in_fp8_are_those_of_their_codes() -> None:
    """Rows by row and weights by channel, with torch's own rounding and plain products."""
    torch.manual_seed(0)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    norm = hstu.AffineNorm(1 + torch.randn(32) / 5, torch.randn(32) / 5)
    product = hstu.NormProduct(norm, torch.randn(32, 48), torch.randn(48))
    x = torch.randn(9, 32, dtype=torch.bfloat16) * 4 + 1
    normed = torch.nn.functional.layer_norm(x.float(), (32,), *norm, hstu.EPS)
    expected = rounded(normed) @ rounded(product.weight.T).T + product.bias
    found = hstu.norm_product_fp8(x, hstu.round_product(product))
    torch.testing.assert_close(found.float(), expected, atol=0.1, rtol=1e-2)
    u, o, weight = torch.randn(9, 32), torch.randn(9, 32), torch.randn(96, 32)
    gate = u * torch.sigmoid(u)
    normed = torch.nn.functional.layer_norm(o, (32,), *norm, hstu.EPS)
    rows = rounded(torch.cat([gate, o, gate * normed], dim=1))
    expected = x.float() + rows @ rounded(weight.T).T
    found = hstu.gate_output_fp8(x, u, o, norm, hstu.round_weight(weight))
    torch.testing.assert_close(found.float(), expected, atol=0.15, rtol=1e-2)


def test_candidates_do_not_see_each_other_and_positions_count_from_the_end() -> None:
    model, request = tiny_model(FIXED), tiny_request(30, 6)
    [all_scores] = model.score([request])
    some = replace(
        request,
        candidate_ids=request.candidate_ids[[5, 2]],
        candidate_category_ids=request.candidate_category_ids[[5, 2]],
    )
    np.testing.assert_allclose(model.score([some])[0], all_scores[[5, 2]], atol=1e-6)
    batch = model_batch(model, request)
    assert batch.positions.tolist()[:4] == [0, 31, 30, 29]
    assert batch.positions.tolist()[29:33] == [3, 2, 1, 1]


def test_rows_of_a_batch_are_each_users_own() -> None:
    """Order, positions and times of two users, one of whom has no times, by hand."""
    old = replace(tiny_request(2, 1), timestamps=np.array([100, 7100]), query_time=7200)
    new = replace(tiny_request(3, 2, user=2), query_time=3600)
    batch = model_batch(tiny_model(), old, new)
    assert batch.user_ids.tolist() == [1, 2] and batch.known.tolist() == [False, False]
    assert batch.order.tolist() == [0, 2, 3, 1, 4, 5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 3, 2, 0, 4, 3, 2, 1, 1, 1]
    assert batch.query_times.tolist() == [7200, 3600, 3600]
    ages = torch.tensor([7200, 7100, 100, 3600, 0, 0, 0, 0, 0, 0])
    assert batch.time_buckets.equal(time_buckets(ages, TINY.num_time_buckets))
    items = [*old.item_ids, *new.item_ids, *old.candidate_ids, *new.candidate_ids]
    assert batch.item_ids.tolist() == items


def model_batch(model: RankingModel, *requests: Any) -> Any:
    from tokenmill.ranking.batch import make_batch

    return make_batch(requests, model.spec)


def test_work_of_a_request_is_that_of_the_benchmark() -> None:
    """551 GFLOP with history 6,714 and 2,048 candidates, 487 with the last layer for targets."""
    assert HstuSpec().flops(6714, 2048, targets_only=False) == pytest.approx(551e9, rel=0.01)
    assert HstuSpec().flops(6714, 2048) == pytest.approx(487e9, rel=0.01)


def test_tiles_cover_every_row_once_longest_first() -> None:
    targets, before = query_tiles([0, 130, 131], [0, 5, 205], 128)
    assert [tuple(tile) for tile in before.tolist()] == [
        (128, 2, 0, 130, 0),
        (0, 128, 0, 128, 0),
        (130, 1, 130, 1, 0),
    ]
    tiles = [JaggedTile(*tile) for tile in targets.tolist()]
    assert sorted((t.first, t.rows, t.num_keys) for t in tiles) == [
        (0, 5, 130),
        (5, 128, 1),
        (133, 72, 1),
    ]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown item": ({"item_ids": np.array([1, 64, 3])}, r"history.item_ids\[1\]: 64 is unknown"),
    "unknown candidate": (
        {"candidate_ids": np.array([-1, 0])},
        r"candidates.item_ids\[0\]: -1 is unknown",
    ),
    "unknown user": ({"user_id": 8}, "user_id: 8 is unknown; values are 0 to 7"),
    "no such number": ({"user_id": 2**64}, "user_id: 18446744073709551616 is unknown"),
    "narrow ids": ({"item_ids": np.array([1, 64, 3], np.int32)}, r"item_ids\[1\]: 64 is unknown"),
    "unknown category": ({"category_ids": np.array([0, 0, 4])}, r"category_ids\[2\]: 4 is unknown"),
    "unknown action": ({"actions": np.array([0, 32, 0])}, r"actions\[1\]: 32 is unknown"),
    "empty history": ({"item_ids": np.zeros(0, int)}, "item_ids: the history is empty"),
    "no candidate": ({"candidate_ids": np.zeros(0, int)}, "no candidate"),
    "too many": ({"candidate_ids": np.zeros(25, int)}, "25 candidates; the most are 24"),
    "mixed lengths": ({"actions": np.array([1])}, "actions: expected 3 values"),
    "mixed candidates": (
        {"candidate_category_ids": np.array([1])},
        "candidates.category_ids: expected 2 values",
    ),
    "times": ({"timestamps": np.array([1, 2])}, "timestamps: expected 3 values"),
    "negative time": ({"timestamps": np.array([1, -2, 3])}, r"timestamps\[1\]: expected seconds"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_refused(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(InvalidRequestError, match=message):
        tiny_model().score([replace(REQUESTS[0], **changes)])


def test_a_history_that_does_not_fit_is_refused_with_what_fits() -> None:
    with pytest.raises(InvalidRequestError, match="beside 4 candidates at most 91 fit"):
        tiny_model().score([tiny_request(92, 4)])


@pytest.mark.parametrize("values", [[1.5], ["a"], [[1]], [[1], [1, 2]], [2**70], [True]])
def test_ids_are_integers(values: Any) -> None:
    with pytest.raises(InvalidRequestError, match="item_ids: "):
        ids_of("item_ids", values)


def test_tables_and_tensors_must_fit_the_config() -> None:
    model = tiny_model()
    narrow = {**model.stores, "item": DeviceTable(torch.zeros(64, 8))}
    with pytest.raises(ModelLoadError, match="item: the table has 8 columns, the config 16"):
        RankingModel(model.dense, narrow)
    short = {**model.stores, "user": DeviceTable(torch.zeros(7, 16))}
    with pytest.raises(ModelLoadError, match=r"user: the table has 7 rows, .* \(num_users\)"):
        RankingModel(model.dense, short)
    with pytest.raises(ModelLoadError, match=r"layers\.3\.norm.weight: the checkpoint has no such"):
        HstuModel(replace(TINY, num_layers=4), tiny_tensors(TINY))


def test_config_reads_back_and_wrong_fields_are_named() -> None:
    assert read_hstu(TINY.config()) == TINY
    for change, message in (
        ({"num_heads": 0}, "num_heads: expected a positive integer"),
        ({"heads": 4}, "heads: DlrmHSTU has no such field"),
        ({"scaling_seqlen": "own"}, "scaling_seqlen: expected a positive integer"),
        ({"max_candidates": 95}, "max_candidates: 95 candidates"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            read_hstu(TINY.config() | change)


WIDE = replace(TINY, hidden_size=64, qk_dim=32, v_dim=128)
TWINS = {"norm_uvqk", "silu_attention", "gate_output", "input_rows"}


@pytest.mark.parametrize(
    ("spec", "dtype", "taken"),
    [(WIDE, "bf16", TWINS), (WIDE, "fp32", set()), (replace(WIDE, hidden_size=32), "bf16", {
        "silu_attention"}), (TINY, "bf16", set())],
)  # fmt: skip
def test_a_gpus_kernels_get_only_what_their_tiles_take(
    spec: HstuSpec, dtype: str, taken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of any other width or type runs by the references."""
    called = set()

    def twin(reference: Any) -> Any:
        def run(*arguments: Any) -> Any:
            called.add(reference.__name__)
            return reference(*arguments)

        return run

    monkeypatch.setattr(kernels, "on_gpu", lambda x: True)
    for name in (*TWINS, "swish_norm"):
        own = getattr(hstu, name)
        monkeypatch.setitem(own.twins, "gpu", twin(own.reference))
    found = random_model(spec, dtype).score(REQUESTS)
    assert called == taken and all(np.isfinite(scores).all() for scores in found)


def test_types_and_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert choose_device("auto") == device and choose_device("cpu") == "cpu"
    assert choose_dtype("auto", "cuda") == "bf16" and choose_dtype("auto", "cpu") == "fp32"
    with pytest.raises(ModelLoadError, match="--dtype int8: ranking models have fp32, bf16"):
        choose_dtype("int8", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="--device cuda: torch sees no GPU here"):
        choose_device("cuda")

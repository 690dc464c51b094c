"""`tokenmill rank`, the example that trains a model for it, and what the metrics say of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import rank_train
from examples.rank_train import SyntheticSpec, small_spec, synthetic_requests, train
from tokenmill.__main__ import run
from tokenmill.bench.mlperf.ranking import read_samples
from tokenmill.core.types import InvalidRequestError, ModelLoadError
from tokenmill.models.hstu import HstuModel
from tokenmill.ranking.metrics import RankMetrics, auc, normalised_entropy, rank_metrics
from tokenmill.ranking.model import RankingModel
from tokenmill.ranking.model_files import choose_dtype, load_model
from tokenmill.ranking.request_json import read_request, write_request
from tokenmill.ranking.requests import request_of

DATA = SyntheticSpec(
    num_users=60, num_items=256, num_categories=8, events_per_timestamp=12, num_train_candidates=8
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of training, and the requests beside the model."""
    path = tmp_path_factory.mktemp("rank")
    flags = ["--users", "12", "--items", "256", "--candidates", "16", "--steps", "2"]
    rank_train.main([str(path), *flags])
    return path


def ranked(
    folder: Path, file: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, list[dict[str, Any]]]:
    status = run(["rank", str(file), "--model", str(folder / "model"), *flags])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_line_has_its_answer_in_order(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    status, answers = ranked(folder, folder / "requests.jsonl", capsys)
    assert status == 0
    names = [json.loads(line)["request_id"] for line in lines]
    assert [answer["request_id"] for answer in answers] == names
    _, chunked = ranked(folder, folder / "requests.jsonl", capsys, "--candidate-chunk", "5")
    for one, other in zip(answers, chunked, strict=True):
        np.testing.assert_allclose(one["scores"], other["scores"], atol=2e-6)
    _, best = ranked(folder, folder / "requests.jsonl", capsys, "--top-k", "2")
    scores = answers[0]["scores"]
    assert best[0]["scores"] == sorted(scores, reverse=True)[:2]


def test_other_devices_and_types_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["rank", str(folder / "requests.jsonl"), "--model", str(folder / "model")]
    assert run([*command, "--device", "gpu"]) == 2
    assert "one of auto, cpu, cuda" in " ".join(capsys.readouterr().err.split())
    assert run([*command, "--device", "auto", "--dtype", "int8"]) == 2
    assert "one of auto, fp32, bf16, fp8" in " ".join(capsys.readouterr().err.split())


def test_scores_in_fp8_are_compared_with_those_of_fp32(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed is the difference of two runs; wrong lines and those without labels aside."""
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    bare = json.loads(lines[0])
    del bare["candidates"]["labels"]
    file, good = tmp_path / "some.jsonl", tmp_path / "good.jsonl"
    file.write_text("\n".join(["{", *lines, json.dumps(bare)]), encoding="utf-8")
    good.write_text("\n".join(lines), encoding="utf-8")
    command = ["rank", str(file), "--model", str(folder / "model"), "--dtype", "fp8"]
    assert run([*command, "--compare-dtype", "fp32"]) == 1
    told = capsys.readouterr().err
    metrics, apart = {}, []
    samples = read_samples(good, load_model(folder / "model").spec)
    for dtype in ("fp8", "fp32"):
        model = load_model(folder / "model", dtype)
        requests = [request_of(sample.request) for sample in samples]
        found = [scores[:, 0] for scores in model.score(requests)]
        metrics[dtype] = rank_metrics(found, [sample.labels for sample in samples])
        apart.append(np.concatenate(found))
    pairs = zip(metrics["fp8"], metrics["fp32"], strict=True)
    ne, accuracy, gauc = (f"{one - two:+.3f} points" for one, two in pairs)
    assert f"fp32: normalised entropy {ne}, accuracy {accuracy}, GAUC {gauc}" in told
    assert 0 < np.abs(apart[0] - apart[1]).max() < 0.05
    assert f"{np.abs(apart[0] - apart[1]).max():.1e} at most" in told


def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    with pytest.raises(ModelLoadError, match=r"8\.9 or more, this one has 8\.0: use --dtype bf16"):
        choose_dtype("fp8", "cuda")
    assert choose_dtype("fp8", "cpu") == "fp8"
    with pytest.raises(ModelLoadError, match="int8: ranking models have fp32, bf16, fp8"):
        choose_dtype("int8", "cpu")


def test_wrong_lines_are_answered_by_their_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = json.loads((folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()[0])
    history = good["history"]
    wrong = {
        "user_id: 99 is unknown": good | {"user_id": 99},
        "request: history is missing": {"user_id": 1, "candidates": good["candidates"]},
        "request: histroy is unknown": good | {"histroy": {}},
        "item_ids: the history is empty": good
        | {"history": {"item_ids": [], "category_ids": [], "actions": []}},
        "history.actions: expected a flat list": good | {"history": history | {"actions": [1.5]}},
        "candidates.labels: expected 16 values": good
        | {"candidates": good["candidates"] | {"labels": [2] * 16}},
        "user_id: expected an integer, got True": good | {"user_id": True},
    }
    lines = [json.dumps(data) for data in (good, *wrong.values())]
    file = tmp_path / "wrong.jsonl"
    file.write_text("\n".join([*lines, "{", ""]), encoding="utf-8")
    status, answers = ranked(folder, file, capsys)
    assert status == 1 and "scores" in answers[0]
    for answer, message in zip(answers[1:], [*wrong, "not a JSON object"], strict=True):
        assert message in str(answer["error"]) and "scores" not in answer
    assert [answer["line"] for answer in answers[1:]] == list(range(2, 10))
    file.write_bytes(b'{"user_id": "\xff"}')
    assert ranked(folder, file, capsys) == (1, [])


def test_models_that_are_not_there_or_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"rank_train\.py writes a small model"):
        load_model(tmp_path)
    other = json.loads((folder / "model/config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(other | {"num_items": 512}), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes((folder / "model/model.safetensors").read_bytes())
    with pytest.raises(ModelLoadError, match="item: the table has 256 rows, the config 512"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be read"):
        load_model(tmp_path)


def test_synthetic_requests_follow_the_rules_and_the_seed() -> None:
    first, again = (synthetic_requests(DATA, training=False) for _ in range(2))
    assert [write_request(r) for r in first] == [write_request(r) for r in again]
    other = synthetic_requests(replace(DATA, seed=1), training=False)
    assert write_request(other[0]) != write_request(first[0])
    for labelled in first:
        request = labelled.request
        categories = np.union1d(request.category_ids, request.candidate_category_ids)
        assert len(categories) <= 4 and labelled.timestamp >= 8
        assert (request.category_ids == request.item_ids // 32).all()
        assert request.num_candidates == 64
    back = read_request(write_request(first[0]), "x")
    np.testing.assert_array_equal(back.item_ids, first[0].request.item_ids)
    with pytest.raises(InvalidRequestError, match="num_items: expected a multiple of 8"):
        SyntheticSpec(num_items=100, num_categories=8)


def test_training_teaches_what_users_like() -> None:
    """On timestamps that it has not seen: better than the labels' mean, and than chance."""
    model = train(small_spec(DATA), synthetic_requests(DATA, training=True), 60, 8)
    unseen = synthetic_requests(DATA, training=False)[:40]
    requests, labels = [each.request for each in unseen], [each.labels for each in unseen]
    found = rank_metrics([scores[:, 0] for scores in model.score(requests)], labels)
    assert found.ne < 99 and found.gauc > 60 and found.accuracy > 55
    tensors = {name: tensor.bfloat16() for name, tensor in model.dense.tensors.items()}
    rounded = RankingModel(HstuModel(model.spec, tensors, fp8=True), model.stores)
    narrow = rank_metrics([scores[:, 0] for scores in rounded.score(requests)], labels)
    np.testing.assert_allclose(narrow, found, atol=0.5)


def test_metrics_by_hand() -> None:
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])) == 0.75
    assert auc(np.array([0.5, 0.5, 0.2]), np.array([1, 0, 0])) == 0.75
    assert auc(np.array([0.5, 0.7]), np.array([1, 1])) is None
    labels = np.array([1.0, 0.0, 0.0, 0.0])
    assert normalised_entropy(np.full(4, 0.25), labels) == pytest.approx(1)
    alike = rank_metrics([np.array([0.9, 0.2])], [np.array([1, 1])])
    assert alike == RankMetrics(ne=None, accuracy=50, gauc=None)
    found = rank_metrics([np.array([0.9, 0.2])], [np.array([1, 0])])
    assert found.accuracy == 100 and found.gauc == 100
    assert found.ne == pytest.approx(100 * (-np.log2(0.9) - np.log2(0.8)) / 2)

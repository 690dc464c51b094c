"""Accuracy: the dataset's forms, whose tokens its prompts are, the scores, the submission files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tokenmill.bench import submission
from tokenmill.bench.accuracy import (
    Row,
    check_targets,
    exact_match,
    gates,
    longest_common,
    prompts,
    read_dataset,
    rouge,
    score,
)
from tokenmill.bench.loadgen import ACCURACY, DETAIL, SUMMARY
from tokenmill.bench.mlperf import PRESETS
from tokenmill.bench.workload import BenchError

RECORDS = [
    {"input": "A cat", "tok_input": [1, 2], "output": "a"},
    {"input": "A dog", "tok_input": [1, 3], "output": "b"},
]
WORDS = {1: "A", 2: " cat", 3: " dog"}
ROWS = [Row("A cat", [1, 2], "a"), Row("A dog", [1, 3], "b")]


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_forms_of_a_dataset(tmp_path: Path) -> None:
    columns = {name: [record[name] for record in RECORDS] for name in RECORDS[0]}
    by_index = {name: dict(enumerate(values)) for name, values in columns.items()}
    lines = "\n".join(json.dumps(record) for record in RECORDS) + "\n"
    for name, content in (
        ("a.json", RECORDS),
        ("b.json", columns),
        ("c.json", by_index),
        ("d.jsonl", lines),
    ):
        assert read_dataset(write(tmp_path / name, content)) == ROWS
    told = [{"instruction": "Sum up: {input}!", "input": "x"}, {"instruction": "Go", "input": "y"}]
    rows = read_dataset(write(tmp_path / "e.json", told))
    assert [row.text for row in rows] == ["Sum up: x!", "Go\n\ny"]
    with pytest.raises(BenchError, match="sample 0 of the dataset has none of output"):
        check_targets(rows)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pkl", "", "datasets are .json or .jsonl"),
        ("a.json", "{", "cannot read the dataset"),
        ("a.json", "[]", "expected a list of samples"),
        ("a.json", '[{"output": "x"}]', "sample 0: has none of tok_input"),
        ("a.jsonl", "3\n", "sample 0: expected an object"),
    ],
)
def test_bad_datasets(name: str, content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=message):
        read_dataset(write(tmp_path / name, content))


def test_tokens_of_another_tokenizer_are_not_used() -> None:
    def decode(token_ids: list[int]) -> str:
        return "".join(WORDS[token] for token in token_ids)

    def encode(text: str) -> list[int]:
        return [len(text)]

    assert prompts(ROWS, encode, decode) == [[1, 2], [1, 3]]
    assert prompts(ROWS, encode, lambda token_ids: "something else") == [[5], [5]]
    assert prompts([Row("A cat", [99], None)], encode, decode) == [[5]]
    assert prompts([Row(None, [99], None)], encode, decode) == [[99]]


def test_rouge_by_hand() -> None:
    # 6 and 5 words; 5 words and 3 pairs in common, and "the cat on the mat" in order.
    scores = rouge("The cat sat on the mat.", "the cat on the mat")
    assert scores["rouge1"] == pytest.approx(10 / 11)
    assert scores["rouge2"] == pytest.approx(6 / 9)
    assert scores["rougeL"] == pytest.approx(10 / 11)
    assert rouge("", "word") == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}
    assert rouge("b a", "a b")["rougeL"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [("abcbdab", "bdcaba", 4), ("aaa", "aa", 2), ("abc", "xyz", 0), ("", "a", 0)],
)
def test_longest_common(left: str, right: str, length: int) -> None:
    assert longest_common(left, right) == longest_common(right, left) == length


def test_exact_match() -> None:
    assert exact_match("So 6 * 7 = \\boxed{42}.", "42")
    assert exact_match("\\boxed{1} no, \\boxed{2}", "2") and not exact_match("\\boxed{1}", "2")
    assert exact_match("I think.\nANSWER: C", "c") and exact_match(" Paris\n", "paris")
    assert not exact_match("It is not Paris", "Paris")


def test_scores_and_gates() -> None:
    scores = score(["a b", "c"], ["a b", "d"], [300, 280])
    assert scores["rouge1"] == scores["exact_match"] == 50
    assert (scores["gen_len"], scores["gen_num"], scores["gen_tok_len"]) == (4, 2, 580)
    found = gates(PRESETS["llama2-70b"], scores)
    assert found["rouge1"]["passed"] and found["rouge1"]["min"] == pytest.approx(0.99 * 44.4312)
    assert not found["rougeL"]["passed"] or scores["rougeL"] >= 28.3
    assert found["tokens_per_sample"]["passed"]
    assert not gates(PRESETS["llama2-70b"], scores | {"tokens_per_sample": 200.0})[
        "tokens_per_sample"
    ]["passed"]


def test_submission_files(tmp_path: Path) -> None:
    layout = submission.Layout(tmp_path, "open", "me", "box", "llama2-70b", "Interactive")
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in (SUMMARY, DETAIL):
        (logs / name).write_text(name)
    answers = b"[" + b"x" * 30_000 + b"]"
    (logs / ACCURACY).write_bytes(answers)
    submission.copy_performance(layout, logs)
    submission.copy_accuracy(layout, logs, {"rouge1": 44.5})
    submission.write_system(layout, {"host_processor_core_count": "2"})
    results = tmp_path / "open/me/results/box/llama2-70b/Interactive"
    assert (results / "performance/run_1" / DETAIL).read_text() == DETAIL
    kept = (results / "accuracy" / ACCURACY).read_bytes()
    assert len(kept) <= 10 * 1024 and kept[:1] == b"[" and kept[-1:] == b"]"
    text = (results / "accuracy/accuracy.txt").read_text()
    assert "'rouge1': 44.5" in text and f"hash={hashlib.sha256(answers).hexdigest()}" in text
    system = json.loads((tmp_path / "open/me/systems/box.json").read_text())
    assert len(submission.SYSTEM_FIELDS) == len(set(submission.SYSTEM_FIELDS)) == 35
    assert system.keys() == set(submission.SYSTEM_FIELDS)
    assert system["host_processor_core_count"] == "2" and system["system_name"] == "box"

"""Accuracy: the dataset's forms, whose tokens its prompts are, the scores, the submission files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tokenmill.bench.mlperf import submission
from tokenmill.bench.mlperf.accuracy import (
    DatasetRow,
    check_targets,
    exact_match,
    gates,
    load_rouge,
    match,
    match_harmony,
    missed_gates,
    prompts,
    read_dataset,
    score,
)
from tokenmill.bench.mlperf.loadgen import ACCURACY, DETAIL, SUMMARY
from tokenmill.bench.mlperf.presets import PRESETS
from tokenmill.bench.workload import BenchError

RECORDS = [
    {"input": "A cat", "tok_input": [1, 2], "output": "a"},
    {"input": "A dog", "tok_input": [1, 3], "output": "b"},
]
WORDS = {1: "A", 2: " cat", 3: " dog"}
ROWS = [DatasetRow("A cat", [1, 2], "a"), DatasetRow("A dog", [1, 3], "b")]


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
        ("a.csv", "", "datasets are .json or .jsonl"),
        ("a.pkl", "", r"pickle, which can run code .* pandas.read_pickle\('a.pkl'\).to_json"),
        ("a.pkl.gz", "", r"pandas.read_pickle\('a.pkl.gz'\)"),
        ("a.parquet", "", r"is not JSON; .* pandas.read_parquet\('a.parquet'\)"),
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
    assert prompts([DatasetRow("A cat", [99], None)], encode, decode) == [[5]]
    assert prompts([DatasetRow(None, [99], None)], encode, decode) == [[99]]


def test_rouge_by_hand() -> None:
    # 6 and 5 words; 5 words and 3 pairs in common, and "the cat on the mat" in order.
    rouge = load_rouge(PRESETS["llama3.1-8b"])
    assert rouge is not None
    scores = rouge.score("The cat sat on the mat.", "the cat on the mat")
    assert scores["rouge1"] == pytest.approx(100 * 10 / 11)
    assert scores["rouge2"] == pytest.approx(100 * 6 / 9)
    assert scores["rougeL"] == pytest.approx(100 * 10 / 11)
    assert set(rouge.score("", "word").values()) == {0.0}
    assert rouge.score("b a", "a b")["rougeL"] == pytest.approx(50)
    assert rouge.score("It was sitting", "it was sits")["rouge1"] == pytest.approx(100)  # stems
    # Sentence by sentence both are found, as one text only the longer order is.
    swapped = [rouge.sentences(text) for text in ("Cats run. Dogs sleep.", "Dogs sleep. Cats run.")]
    assert swapped[0] == "Cats run.\nDogs sleep."
    scores = rouge.score(*swapped)
    assert scores["rougeLsum"] == pytest.approx(100) and scores["rougeL"] == pytest.approx(50)
    assert load_rouge(PRESETS["deepseek-r1"]) is None


def test_exact_match() -> None:
    assert exact_match("So 6 * 7 = \\boxed{42}.", "42")
    assert exact_match("\\boxed{1} no, \\boxed{2}", "2") and not exact_match("\\boxed{1}", "2")
    assert exact_match("I think.\nANSWER: C", "c") and exact_match(" Paris\n", "paris")
    assert not exact_match("It is not Paris", "Paris")


@pytest.mark.parametrize(
    ("kind", "answer", "target", "percent"),
    [
        ("gpqa", "So. **ANSWER: (C)**", "C", 100),
        ("gpqa", "ANSWER: A. No: ANSWER: B", "A", 0),
        ("mmlu_pro", "The answer is J.", "J", 100),
        ("gpqa", "\\boxed{D}", "D", 100),
        ("gpqa", "I do not know", "D", 0),
        ("math500", "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 100),
        ("aime", "It is 5.\nAnswer: 204", "204", 100),
        ("qa_em", "He asks. Answer: New York", "york|newyork", 100),
        ("qa_em", "Answer: Rome", "Paris", 0),
        ("niah_em", "", "12345678-1234-1234-1234-123456789012", 0),
        (
            "niah_em",
            "It is 12345678-1234-1234-1234-123456789012.",
            "12345678-1234-1234-1234-123456789012",
            100,
        ),
    ],
)
def test_kinds_of_questions(kind: str, answer: str, target: str, percent: float) -> None:
    assert match(kind, answer, target) == percent


FINAL = "<|channel|>analysis<|message|>ANSWER: A<|end|><|start|>assistant<|channel|>final"


@pytest.mark.parametrize(
    ("kind", "answer", "target", "percent"),
    [
        ("gpqa_diamond", FINAL + "<|message|>**C**<|return|>", "C", 100),
        ("gpqa_diamond", FINAL + " json<|message|>So. Answer: B<|return|>", "B", 100),
        ("gpqa_diamond", FINAL + "537<|message|>I cannot tell", "A", 100),  # named in the analysis
        ("gpqa_diamond", FINAL + "<|message|>D or A<|return|>", "A", 0),
        ("gpqa_diamond", "no channel, ANSWER: D", "D", 100),
        ("aime25", FINAL + "<|message|>\\boxed{ 42 }<|return|>", "42", 100),
        ("aime25", FINAL + "<|message|>Answer: 042", "42", 100),
        ("aime25", FINAL + "<|message|>about 42", "42", 0),
    ],
)
def test_answers_with_channels(kind: str, answer: str, target: str, percent: float) -> None:
    assert match_harmony(kind, answer, target) == percent


def test_repeats_of_a_question_count_as_one() -> None:
    # Of 8 repeats 4 are right, of 5 all, and 3 programs are not scored: (4/8 + 5/5) / 2.
    rows = [DatasetRow(None, None, "1", "aime25")] * 8 + [
        DatasetRow(None, None, "B", "gpqa_diamond")
    ] * 5
    rows += [DatasetRow(None, None, "id", "livecodebench_v6")] * 3
    answers = ["Answer: 1"] * 4 + ["Answer: 2"] * 4 + ["B"] * 5 + ["```python\n```"] * 3
    scores = scores_of("gpt-oss-120b", rows, answers, 10)
    assert (scores["exact_match"], scores["num_unscored"]) == (75, 3)


def scores_of(
    name: str, rows: list[DatasetRow], answers: list[str], num_tokens: int
) -> dict[str, float]:
    preset = PRESETS[name]
    return score(preset, rows, answers, [num_tokens] * len(rows), load_rouge(preset))


def test_scores_and_gates() -> None:
    rows = [DatasetRow(None, None, "a b"), DatasetRow(None, None, "d")]
    scores = scores_of("llama2-70b", rows, [" a b", "c"], 290)
    assert scores["rouge1"] == 50 and "exact_match" not in scores
    assert (scores["gen_len"], scores["gen_num"], scores["gen_tok_len"]) == (4, 2, 580)
    found = gates(PRESETS["llama2-70b"], scores)
    assert found["rouge1"].passed and found["rouge1"].min == pytest.approx(0.99 * 44.4312)
    assert found["tokens_per_sample"].passed and "gen_len" not in found
    shorter = gates(PRESETS["llama2-70b"], scores | {"tokens_per_sample": 200.0})
    assert missed_gates(shorter, 0) == ["tokens_per_sample misses the accuracy gate"]


def test_characters_of_a_quick_run_count_by_their_share() -> None:
    scores = scores_of("llama3.1-8b", [DatasetRow(None, None, "x")] * 2, ["x" * 611] * 2, 128)
    assert gates(PRESETS["llama3.1-8b"], scores)["gen_len"].passed


def test_every_row_is_scored_by_its_kind() -> None:
    rows = [
        DatasetRow(None, None, "a cat", "rouge"),
        DatasetRow(None, None, "Paris", "qa_em"),
        DatasetRow(None, None, "Rome", "qa_em"),
    ]
    scores = scores_of("llama3.1-405b", rows, ["a cat", "Answer: Paris", "no"], 10)
    assert scores["rougeL"] == 100 and scores["exact_match"] == 50
    code = [DatasetRow(None, None, "42", "aime"), DatasetRow(None, None, "[1]", "livecodebench")]
    scores = scores_of("deepseek-r1", code, ["\\boxed{42}", "def f(): ..."], 10)
    assert scores["exact_match"] == 100 and scores["num_unscored"] == 1
    (reason,) = missed_gates({}, 1)
    assert reason.startswith("1 answers are programs, which this command does not run: score the f")


def test_submission_files(tmp_path: Path) -> None:
    layout = submission.SubmissionLayout(tmp_path, "open", "me", "box", "llama2-70b", "Interactive")
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in (SUMMARY, DETAIL):
        (logs / name).write_text(name)
    answers = b"[" + b"x" * 30_000 + b"]"
    (logs / ACCURACY).write_bytes(answers)
    submission.copy_logs(logs, layout.performance)
    submission.copy_accuracy(layout, logs, {"rouge1": 44.5})
    empty, _ = submission.write_system(layout, {"host_processor_core_count": "2"})
    assert "cooling" in empty and "host_processor_core_count" not in empty
    written = json.loads(layout.system_file.read_text())
    layout.system_file.write_text(json.dumps(written | {"cooling": "air"}))
    empty, _ = submission.write_system(layout, {"host_processor_core_count": "2"})
    assert "cooling" not in empty
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

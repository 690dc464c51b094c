"""Accuracy runs: the dataset file of a reference implementation, and the score of the answers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.bench.mlperf import ACCURACY_SHARE, TOKENS_SHARE, Preset
from tokenmill.bench.workload import BenchError

TOKENS = ("tok_input", "input_ids", "prompt_token_ids")
TEXTS = ("input", "text_input", "prompt")
TARGETS = ("output", "ground_truth", "gt_output", "target", "answer")
HEAD = 40  # characters by which a prompt is recognised in its tokens
_WORD = re.compile(r"[a-z0-9]+")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_ANSWER = re.compile(r"answer(?: is)?\s*:?\s*([^\n]+)", re.IGNORECASE)

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of a dataset; `token_ids` are of the benchmark's own tokenizer."""

    text: str | None
    token_ids: list[int] | None
    target: str | None


def read_dataset(path: Path) -> list[Row]:
    """Rows of JSON lines or of a JSON file: a list of objects, or columns as pandas writes them."""
    if path.suffix not in (".json", ".jsonl"):
        raise BenchError(f"{path}: datasets are .json or .jsonl; convert others, such as pickles")
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else _lines(text)
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot read the dataset: {error}") from None
    records = _records(found) if isinstance(found, dict) else found
    if not isinstance(records, list) or not records:
        raise BenchError(f"{path}: expected a list of samples")
    return [_row(record, f"{path}, sample {number}") for number, record in enumerate(records)]


def check_targets(rows: Sequence[Row]) -> None:
    """Every row must have something to compare its answer with."""
    for number, row in enumerate(rows):
        if row.target is None:
            raise BenchError(f"sample {number} of the dataset has none of {', '.join(TARGETS)}")


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _records(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    lists = {
        name: list(values.values()) if isinstance(values, dict) else values
        for name, values in columns.items()
    }
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _row(record: Any, where: str) -> Row:
    if not isinstance(record, dict):
        raise BenchError(f"{where}: expected an object")
    tokens, text, target = (_first(record, names) for names in (TOKENS, TEXTS, TARGETS))
    if tokens is None and text is None:
        raise BenchError(f"{where}: has none of {', '.join(TOKENS + TEXTS)}")
    if text is not None and (instruction := record.get("instruction")):
        text = _instructed(str(instruction), str(text))
    return Row(text, tokens, None if target is None else str(target))


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _instructed(instruction: str, text: str) -> str:
    if "{input}" in instruction:
        return instruction.replace("{input}", text)
    return f"{instruction}\n\n{text}"


def prompts(rows: Sequence[Row], encode: Encode, decode: Decode) -> list[list[int]]:
    """Token ids of every row: the file's where they are this tokenizer's, else the text's."""
    first = rows[0]
    own = first.token_ids is not None
    if own and first.text is not None:
        own = first.text.strip()[:HEAD] in _decoded(first.token_ids or [], decode)
    found = []
    for row in rows:
        if (own or row.text is None) and row.token_ids is not None:
            found.append(row.token_ids)
        else:
            found.append(encode(row.text or ""))
    return found


def _decoded(token_ids: list[int], decode: Decode) -> str:
    try:
        return decode(token_ids)
    except (ValueError, IndexError, KeyError, OverflowError):  # ids beyond the vocabulary
        return ""


def score(
    answers: Sequence[str], targets: Sequence[str], num_tokens: Sequence[int]
) -> dict[str, float]:
    """ROUGE F-measures and exact matches in percent, and the lengths of the answers.

    ROUGE is without stemming, so a little below the reference's figures.
    """
    count = len(answers)
    sums: Counter[str] = Counter()
    for answer, target in zip(answers, targets, strict=True):
        sums.update(rouge(answer, target))
        sums["exact_match"] += exact_match(answer, target)
    names = ("rouge1", "rouge2", "rougeL", "exact_match")
    means = {name: round(100 * sums[name] / count, 4) for name in names}
    return means | {
        "gen_len": sum(map(len, answers)),
        "gen_num": count,
        "gen_tok_len": sum(num_tokens),
        "tokens_per_sample": round(sum(num_tokens) / count, 4),
    }


def rouge(answer: str, target: str) -> dict[str, float]:
    """F-measures of unigrams, bigrams and the longest common subsequence, in [0, 1]."""
    ours, theirs = _WORD.findall(answer.lower()), _WORD.findall(target.lower())
    scores = {}
    for size in (1, 2):
        left, right = _grams(ours, size), _grams(theirs, size)
        scores[f"rouge{size}"] = _f_measure((left & right).total(), left.total(), right.total())
    scores["rougeL"] = _f_measure(longest_common(ours, theirs), len(ours), len(theirs))
    return scores


def _grams(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(size)), strict=False))


def _f_measure(num_common: int, num_ours: int, num_theirs: int) -> float:
    return 2 * num_common / (num_ours + num_theirs) if num_common else 0.0


def longest_common(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common subsequence, a bit per word of `left` (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for index, word in enumerate(left):
        places[word] = places.get(word, 0) | 1 << index
    full = (1 << len(left)) - 1
    row = full
    for word in right:
        match = row & places.get(word, 0)
        row = (row + match | row - match) & full
    return len(left) - row.bit_count()


def exact_match(answer: str, target: str) -> bool:
    """The answer, or the last that it boxes or names, is the target but for case and blanks."""
    wanted = _normal(target)
    last = [found[-1] for found in (_BOXED.findall(answer), _ANSWER.findall(answer)) if found]
    return wanted in (_normal(text) for text in (answer, *last))


def _normal(text: str) -> str:
    return " ".join(text.lower().split()).strip(" .*$`")


def gates(preset: Preset, scores: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """What the round asks of the benchmark, beside what was reached."""
    found: dict[str, dict[str, Any]] = {}
    for name, reference in preset.accuracy.items():
        least = round(ACCURACY_SHARE * reference, 4)
        found[name] = {"value": scores[name], "min": least, "passed": scores[name] >= least}
    if preset.tokens_per_sample is not None:
        low, high = ((1 + sign * TOKENS_SHARE) * preset.tokens_per_sample for sign in (-1, 1))
        value = scores["tokens_per_sample"]
        found["tokens_per_sample"] = {
            "value": value,
            "min": round(low, 2),
            "max": round(high, 2),
            "passed": low <= value <= high,
        }
    return found

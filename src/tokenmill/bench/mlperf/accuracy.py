"""Accuracy runs: the dataset file of a reference implementation, and the score of the answers.

ROUGE is the rouge-score package with its stemmer, as in the references. A row says by its `metric`
or `dataset` column how it is scored; without one it gets every score of its benchmark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenmill.bench.mlperf.presets import TOKENS_SHARE, Preset
from tokenmill.bench.results.mlperf_reports import Fields, GateReport
from tokenmill.bench.workload import BenchError

TOKENS = ("tok_input", "input_ids", "prompt_token_ids", "input_tokens")
TEXTS = ("input", "text_input", "prompt")
TARGETS = ("output", "ground_truth", "gt_output", "target", "answer", "ground_truth_category")
IMAGES = ("image", "image_url", "product_image")
CATEGORY_SEPARATOR = " > "
KINDS = ("metric", "dataset")
CATEGORY_F1 = "category_f1"
HEAD = 40  # characters by which a prompt is recognised in its tokens
CODE = "livecodebench"
READERS = {".pkl": "read_pickle", ".pickle": "read_pickle", ".parquet": "read_parquet"}
_UUID = re.compile(r"\w{8}(?:-\w{4}){3}-\w{12}")
_BOXED = "\\boxed{"
# The header of a harmony answer's final message; what a model writes wrongly in it is passed over.
_FINAL = re.compile(r"<\|channel\|>final[^<]*<\|message\|>(.*?)(?:<\|return\|>|$)", re.DOTALL)
_BOXED_INTEGER = re.compile(r"\\boxed{\s*(\d+)\s*}")
_NAMED_INTEGER = re.compile(r"Answer:\s*(\d+)(?!\.)\b", re.IGNORECASE)
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_FIRST_LETTER = re.compile(r"[^a-zA-Z]*([A-D])(?![a-zA-Z])", re.IGNORECASE)
_FINAL_ANSWER = re.compile(r"\banswer\s*[:.]?\s*([A-D])\b", re.IGNORECASE)
_ANY_ANSWER = re.compile(r"\banswer\b\s*[:=]?\s*\(?\s*([A-D])(?![a-zA-Z])", re.IGNORECASE)
_ANSWER = re.compile(r"answer(?: is)?\s*[:=]?\s*([^\n]+)", re.IGNORECASE)
_LETTER = re.compile(r"\banswer\b(?: is)?[\s:=*]*\(?([A-J])\)?(?![A-Za-z])", re.IGNORECASE)

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One sample of a dataset; `token_ids` are of the benchmark's own tokenizer."""

    text: str | None
    token_ids: list[int] | None
    target: str | None
    kind: str = ""  # how the answer is scored, as the file names it
    image: str = ""  # a file, or a data: URL


def read_dataset(path: Path) -> list[DatasetRow]:
    """Rows of JSON lines or of a JSON file: a list of objects, or columns as pandas writes them."""
    if path.suffix not in (".json", ".jsonl"):
        raise BenchError(f"{path}: {_refusal(path)}")
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else _lines(text)
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot read the dataset: {error}") from None
    records = _records(found) if isinstance(found, dict) else found
    if not isinstance(records, list) or not records:
        raise BenchError(f"{path}: expected a list of samples")
    return [_row(record, f"{path}, sample {number}") for number, record in enumerate(records)]


def _refusal(path: Path) -> str:
    """A pickle can run any code, so it is for its owner to open; the way to JSON is one line."""
    suffix = path.suffix if path.suffix != ".gz" else path.with_suffix("").suffix
    if (reader := READERS.get(suffix)) is None:
        return "datasets are .json or .jsonl"
    why = "is a pickle, which can run code when it is read" * (reader == "read_pickle")
    call = f"pandas.{reader}({path.name!r}).to_json('dataset.json', orient='records')"
    return f"{why or 'is not JSON'}; where you trust it, convert it: import pandas; {call}"


def check_targets(rows: Sequence[DatasetRow]) -> None:
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


def _row(record: Any, where: str) -> DatasetRow:
    if not isinstance(record, dict):
        raise BenchError(f"{where}: expected an object")
    tokens, text, target = (_first(record, names) for names in (TOKENS, TEXTS, TARGETS))
    if tokens is None and text is None:
        raise BenchError(f"{where}: has none of {', '.join(TOKENS + TEXTS)}")
    if text is not None and (instruction := record.get("instruction")):
        text = _instructed(str(instruction), str(text))
    kind = str(_first(record, KINDS) or "").lower()
    image = str(_first(record, IMAGES) or "")
    return DatasetRow(text, tokens, None if target is None else str(target), kind, image)


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _instructed(instruction: str, text: str) -> str:
    if "{input}" in instruction:
        return instruction.replace("{input}", text)
    return f"{instruction}\n\n{text}"


def prompts(rows: Sequence[DatasetRow], encode: Encode, decode: Decode) -> list[list[int]]:
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


@dataclass(frozen=True, slots=True)
class Rouge:
    """The scorer of rouge-score and a splitter of sentences, which rougeLsum needs."""

    scorer: Any
    split: Callable[[str], list[str]]
    trained: bool  # punkt's English model was found

    def sentences(self, text: str) -> str:
        return "\n".join(self.split(text.strip()))

    def score(self, answer: str, target: str) -> dict[str, float]:
        found = self.scorer.score(target, answer)
        return {name: 100 * score.fmeasure for name, score in found.items()}


def load_rouge(preset: Preset) -> Rouge | None:
    names = [name for name in preset.accuracy if name.startswith("rouge")]
    if not names:
        return None
    try:
        import nltk
        from nltk.tokenize.punkt import PunktSentenceTokenizer
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        raise BenchError("ROUGE needs rouge-score: pip install rouge-score") from None
    scorer = RougeScorer(names, use_stemmer=True)
    try:
        nltk.sent_tokenize("Yes.")
    except LookupError:
        return Rouge(scorer, PunktSentenceTokenizer().tokenize, False)
    return Rouge(scorer, nltk.sent_tokenize, True)


def score(
    preset: Preset,
    rows: Sequence[DatasetRow],
    answers: Sequence[str],
    num_tokens: Sequence[int],
    rouge: Rouge | None,
) -> dict[str, float]:
    """The benchmark's scores in percent, each the mean of its rows, and the answers' lengths.

    Rows of a dataset that the accuracy set repeats count by the share of one repeat.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in preset.accuracy}
    num_unscored = gen_len = 0
    for row, answer in zip(rows, answers, strict=True):
        text, target = answer.strip(), (row.target or "").strip()
        if rouge is not None:
            text, target = rouge.sentences(text), rouge.sentences(target)
            if row.kind in ("", "rouge"):
                for name, value in rouge.score(text, target).items():
                    found[name].append((value, 1.0))
        gen_len += len(text)
        num_unscored += CODE in row.kind
        if "exact_match" in found and row.kind != "rouge" and CODE not in row.kind:
            rule = match_harmony if preset.harmony else match
            percent = rule(row.kind, text, target)
            found["exact_match"].append((percent, 1 / _repeats(preset, row.kind)))
    count = len(answers)
    means = {name: _weighted_mean(values) for name, values in found.items()}
    if CATEGORY_F1 in means:
        targets = [row.target or "" for row in rows]
        means[CATEGORY_F1] = category_f1(answers, targets)
    return means | {
        "gen_len": gen_len,
        "gen_num": count,
        "gen_tok_len": sum(num_tokens),
        "tokens_per_sample": round(sum(num_tokens) / count, 4),
        "num_unscored": num_unscored,
    }


def category_f1(answers: Sequence[str], targets: Sequence[str]) -> float:
    """Hierarchical F1 in percent of the categories that JSON answers name, over all samples.

    The levels of a category count as far as they are right from the first on. An answer that is not
    such JSON counts as a category of wrong levels, as many as the target has.
    """
    right = said = wanted = 0
    for answer, target in zip(answers, targets, strict=True):
        levels = _levels(target)
        named = _category(answer)
        found = [""] * len(levels) if named is None else _levels(named)
        same = (ours == theirs for ours, theirs in zip(found, levels, strict=False))
        right += sum(1 for _ in takewhile(bool, same))
        said += len(found)
        wanted += len(levels)
    return round(200 * right / (said + wanted), 4) if said + wanted else 0.0


def _levels(category: str) -> list[str]:
    return [level.strip() for level in category.split(CATEGORY_SEPARATOR)]


def _category(answer: str) -> str | None:
    """The category of an answer of the three fields that the benchmark asks for."""
    try:
        found = json.loads(answer)
    except ValueError:
        return None
    kinds = {"category": str, "brand": str, "is_secondhand": bool}
    if not isinstance(found, dict) or any(type(found.get(k)) is not t for k, t in kinds.items()):
        return None
    return str(found["category"])


def _repeats(preset: Preset, kind: str) -> int:
    return next((times for name, times in preset.repeats.items() if name in kind), 1)


def _weighted_mean(values: Sequence[tuple[float, float]]) -> float:
    total = sum(weight for _, weight in values)
    return round(sum(value * weight for value, weight in values) / total, 4) if total else 0.0


def match(kind: str, answer: str, target: str) -> float:
    """How far an answer is right, in percent, by the rule of its kind of question."""
    if kind == "niah_em":
        return _needles(answer, target)
    if kind == "qa_em":
        return 100.0 * _names_one(answer, target)
    if "gpqa" in kind or "mmlu" in kind:
        return 100.0 * (_letter(answer) == target.strip().upper())
    return 100.0 * exact_match(answer, target)


def match_harmony(kind: str, answer: str, target: str) -> float:
    """The same for an answer with channels, by the rules of gpt-oss-120b's reference."""
    if "gpqa" in kind or "mmlu" in kind:
        return 100.0 * (_final_letter(answer) == target.strip().upper())
    if "aime" in kind:
        return 100.0 * (_integer(answer) == target.strip())
    return match(kind, _final_message(answer), target)


def _final_message(answer: str) -> str:
    """The final channel's text; all of the answer where it has none."""
    found = _FINAL.search(answer)
    return found[1].strip() if found else answer


def _final_letter(answer: str) -> str | None:
    """The choice that the final message begins with or names first, else the one named last."""
    final = _BOLD.sub(r"\1", _final_message(answer)).strip()
    if found := _FIRST_LETTER.match(final) or _FINAL_ANSWER.search(final):
        return found[1].upper()
    named = _ANY_ANSWER.findall(answer)
    return str(named[-1]).upper() if named else None


def _integer(answer: str) -> str | None:
    """The whole number that is boxed last, else the one that "Answer:" names last."""
    found = _BOXED_INTEGER.findall(answer) or _NAMED_INTEGER.findall(answer)
    return str(int(found[-1])) if found else None


def _needles(answer: str, target: str) -> float:
    """RULER's needles: the identifiers in order, by the share of characters that occur."""
    ours, theirs = _UUID.findall(answer.lower()), _UUID.findall(target.lower())
    if not ours:
        return 0.0
    pairs = zip(ours, theirs, strict=False)
    shares = (sum(c in our for c in their) / len(their) for our, their in pairs)
    return round(100 * sum(shares) / len(ours), 2)


def _names_one(answer: str, target: str) -> bool:
    """Behind its last "Answer: " stands one of the targets, which | separates."""
    said = answer.rpartition("Answer: ")[2]
    packed = "".join(said.split()).lower()
    return said in target or any("".join(t.split()).lower() in packed for t in target.split("|"))


def _letter(answer: str) -> str | None:
    if named := _LETTER.findall(answer):
        return str(named[-1]).upper()
    boxed = _boxed(answer)
    return boxed.strip(" ().").upper() if boxed else None


def exact_match(answer: str, target: str) -> bool:
    """The answer, or the last that it boxes or names, is the target but for case and blanks."""
    named = _ANSWER.findall(answer)
    said = (answer, _boxed(answer), named[-1] if named else None)
    return _normal(target) in [_normal(text) for text in said if text is not None]


def _boxed(answer: str) -> str | None:
    """What stands in the last \\boxed{...}, braces inside it included."""
    _, found, rest = answer.rpartition(_BOXED)
    depth = 1
    for index, character in enumerate(rest if found else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:index]
    return None


def _normal(text: str) -> str:
    return " ".join(text.lower().split()).strip(" .*$`")


def score_fields(
    preset: Preset,
    rows: Sequence[DatasetRow],
    answers: Sequence[str],
    num_tokens: Sequence[int],
    rouge: Rouge | None,
) -> Fields:
    """Scores and gates as a report has them, and why the accuracy is not that of a valid run."""
    scores = score(preset, rows, answers, num_tokens, rouge)
    found = gates(preset, scores)
    fields: Fields = {"accuracy": scores, "accuracy_gates": found}
    if rouge is not None:
        fields["sentences_by"] = "punkt" if rouge.trained else "punkt without its English model"
    return fields | {"reasons": missed_gates(found, scores["num_unscored"])}


def gates(preset: Preset, scores: Mapping[str, float]) -> dict[str, GateReport]:
    """What the round asks of the benchmark, beside what was reached."""
    found: dict[str, GateReport] = {}
    for name, reference in preset.accuracy.items():
        least = round(preset.accuracy_share * reference, 4)
        found[name] = GateReport(scores[name], least, scores[name] >= least)
    share = scores["gen_num"] / preset.num_samples  # a quick run has fewer
    lengths = {
        "tokens_per_sample": preset.tokens_per_sample,
        "gen_len": preset.gen_len and preset.gen_len * share,
    }
    for name, wanted in lengths.items():
        if wanted is not None:
            low, high = ((1 + sign * TOKENS_SHARE) * wanted for sign in (-1, 1))
            passed = low <= scores[name] <= high
            found[name] = GateReport(scores[name], round(low, 2), passed, round(high, 2))
    return found


def missed_gates(found: Mapping[str, GateReport], num_unscored: float | None) -> list[str]:
    reasons = [f"{name} misses the accuracy gate" for name in found if not found[name].passed]
    if num_unscored:
        reasons.append(
            f"{num_unscored} answers are programs, which this command does not run: score the full "
            "log of answers with eval_mlperf_accuracy.py of mlcommons/inference"
        )
    return reasons

"""MLPerf's compliance tests: performance runs whose answers or speed are checked.

LoadGen reads an audit.config beside its settings and logs answers while it measures. TEST04: one
sample again and again is not faster, since no answer may be cached. TEST06: the
answers are consistent with what was reported of them. TEST07: they are right often enough.
TEST09: they are as long as the reference's. The files have the names and sentences that the
submission checker of mlcommons/inference looks for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.bench.mlperf.loadgen import ACCURACY, AUDIT_CONFIG, token_ids
from tokenmill.bench.mlperf.presets import TOKENS_SHARE
from tokenmill.bench.mlperf.submission import SubmissionLayout, copy_logs
from tokenmill.bench.workload import BenchError

TEST04_FASTER = {"Offline": 0.1, "SingleStream": 0.2}  # by so much a run may be, for noise
RESULT_FILES = {
    "TEST04": "verify_performance.txt",
    "TEST06": "verify_accuracy.txt",
    "TEST07": "verify_accuracy.txt",
    "TEST09": "verify_output_len.txt",
}


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    token_ids: list[int]
    first_token_ids: list[int]  # reported when they came; [] in Offline
    num_tokens: int  # reported at the end


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a test is passed, and the text of its file."""

    passed: bool
    text: str


def read_log(folder: Path) -> list[LoggedAnswer]:
    entries = json.loads((folder / ACCURACY).read_text(encoding="utf-8"))
    if not entries:
        raise BenchError(f"{folder / ACCURACY}: LoadGen logged no answer")
    return [
        LoggedAnswer(
            token_ids(bytes.fromhex(entry["data"])),
            token_ids(bytes.fromhex(entry.get("token_data", ""))),
            int(entry["token_count"]),
        )
        for entry in entries
    ]


def verify_consistency(
    answers: Sequence[LoggedAnswer], eos_token_ids: Sequence[int], offline: bool
) -> Verdict:
    """TEST06: first tokens as reported, one end token at most, counts that are the lengths."""
    first = all(a.token_ids[: len(a.first_token_ids)] == a.first_token_ids for a in answers)
    first &= offline or all(a.first_token_ids for a in answers)
    end = all(_num_end_tokens(a.token_ids, frozenset(eos_token_ids)) <= 1 for a in answers)
    length = all(len(a.token_ids) == a.num_tokens for a in answers)
    passed = (offline or first) and end and length
    lines = (
        f"First token check pass: {'Skipped' if offline else first}",
        f"EOS check pass: {end}",
        f"Sample length check pass: {length}",
        f"TEST06 verification {'complete' if passed else 'failed'}",
    )
    return Verdict(passed, "\n".join(lines) + "\n")


def _num_end_tokens(ids: Sequence[int], ends: frozenset[int]) -> int:
    """How many end tokens an answer closes with; the first token is not one of them."""
    count = 0
    while count < len(ids) - 1 and ids[-1 - count] in ends:
        count += 1
    return count


def verify_score(scores: Mapping[str, float], least: float) -> Verdict:
    """TEST07: the score of the answers that the performance run gave."""
    score = scores.get("exact_match")
    passed = score is not None and score >= least
    lines = (
        f"{dict(scores)}",
        f"Accuracy score: {score}",
        f"Accuracy threshold: {least}",
        f"Accuracy check pass: {passed}",
        "TEST PASS" if passed else "TEST FAIL",
    )
    return Verdict(passed, "\n".join(lines) + "\n")


def verify_output_length(answers: Sequence[LoggedAnswer], reference: float) -> Verdict:
    """TEST09: the mean number of output tokens is within a tenth of the reference's."""
    counts = [len(answer.token_ids) for answer in answers]
    mean = sum(counts) / len(counts)
    low, high = round(reference * (1 - TOKENS_SHARE), 2), round(reference * (1 + TOKENS_SHARE), 2)
    passed = low <= mean <= high
    lines = (
        f"Total samples: {len(counts)}",
        f"Mean output tokens: {mean:.2f}",
        f"Min output tokens: {min(counts)}",
        f"Max output tokens: {max(counts)}",
        f"Min threshold: {low}",
        f"Max threshold: {high}",
        f"Min check pass: {mean >= low}",
        f"Max check pass: {mean <= high}",
        "TEST PASS" if passed else "TEST FAIL",
    )
    return Verdict(passed, "\n".join(lines) + "\n")


def verify_same_sample(scenario: str, reference: float, score: float) -> Verdict:
    """TEST04: the rate of one sample alone is not above that of all, but for noise."""
    passed = score < reference * (1 + TEST04_FASTER[scenario])
    lines = (
        "Verifying performance.",
        f"reference score = {reference}",
        f"test score = {score}",
        "TEST PASS" if passed else "TEST FAIL: Test score invalid",
    )
    return Verdict(passed, "\n".join(lines) + "\n")


def write_result(layout: SubmissionLayout, name: str, logs: Path, text: str) -> Path:
    """The folder of a test in a submission: its verdict, LoadGen's logs and audit.config."""
    folder = layout.scenario_folder / name
    copy_logs(logs, folder / "performance" / "run_1")
    (folder / "accuracy").mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILES[name]).write_text(text, encoding="utf-8")
    for log in (AUDIT_CONFIG, f"accuracy/{ACCURACY}"):
        if (source := logs / Path(log).name).exists():
            shutil.copyfile(source, folder / log)
    return folder

"""Compliance tests: LoadGen logs answers during a performance run, and each rule can fail."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from tokenmill.bench.mlperf.compliance import (
    LoggedAnswer,
    read_log,
    verify_consistency,
    verify_output_length,
    verify_score,
)
from tokenmill.bench.mlperf.loadgen import ACCURACY, audit_config
from tokenmill.bench.mlperf.presets import PRESETS

EOS = (2,)
GOOD = LoggedAnswer([5, 6, 7, 2], [5], 4)


def test_every_benchmark_has_the_tests_of_the_round() -> None:
    found = {name: preset.compliance for name, preset in PRESETS.items()}
    expected = {name: ("TEST06",) for name in found} | {"gpt-oss-120b": ("TEST07", "TEST09")}
    assert found == expected


@pytest.mark.parametrize(
    ("answer", "failed"),
    [
        (GOOD, ""),
        (LoggedAnswer([5, 6, 2, 2], [5], 4), "EOS"),
        (LoggedAnswer([5, 6, 7], [6], 3), "First token"),
        (LoggedAnswer([5, 6, 7], [], 3), "First token"),
        (LoggedAnswer([5, 6, 7], [5], 4), "Sample length"),
        (LoggedAnswer([2, 2], [2], 2), ""),  # the first token is an answer
    ],
)
def test_consistency(answer: LoggedAnswer, failed: str) -> None:
    """One answer among good ones decides."""
    verdict = verify_consistency([GOOD, answer], EOS, offline=False)
    assert verdict.passed == (not failed)
    for rule in ("First token", "EOS", "Sample length"):
        assert f"{rule} check pass: {rule != failed}\n" in verdict.text
    end = "complete" if verdict.passed else "failed"
    assert verdict.text.endswith(f"TEST06 verification {end}\n")


def test_offline_reports_no_first_token() -> None:
    verdict = verify_consistency([LoggedAnswer([5, 6], [], 2)], EOS, offline=True)
    assert verdict.passed and "First token check pass: Skipped" in verdict.text


@pytest.mark.parametrize(("mean", "passed"), [(1150, False), (1151, True), (1406, True), (1407, 0)])
def test_output_length_bounds_are_the_official_ones(mean: int, passed: bool) -> None:
    answers = [LoggedAnswer([1] * (mean - 100), [], 0), LoggedAnswer([1] * (mean + 100), [], 0)]
    verdict = verify_output_length(answers, PRESETS["gpt-oss-120b"].compliance_tokens)
    assert verdict.passed == passed and ("TEST PASS" in verdict.text) == passed
    assert "Min threshold: 1150.38" in verdict.text and "Max threshold: 1406.02" in verdict.text


def test_score() -> None:
    least = PRESETS["gpt-oss-120b"].compliance_score
    assert verify_score({"exact_match": 60.7}, least).text.endswith("TEST PASS\n")
    assert verify_score({"exact_match": 60.6}, least).text.endswith("TEST FAIL\n")
    assert not verify_score({}, least).passed


def test_audit_config_logs_every_sample_where_all_count() -> None:
    text = audit_config("TEST09", 6396)
    assert "*.*.min_query_count = 6396\n" in text and "*.*.performance_issue_unique = 1\n" in text
    assert "*.*.accuracy_log_sampling_target = 100\n" in audit_config("TEST06", 6396)


def test_log_is_read_as_loadgen_writes_it(tmp_path: Path) -> None:
    data = array("i", [5, 6]).tobytes().hex()
    entry = {"qsl_idx": 0, "data": data, "token_data": data[:8], "token_count": 2}
    (tmp_path / ACCURACY).write_text(json.dumps([entry]))
    assert read_log(tmp_path) == [LoggedAnswer([5, 6], [5], 2)]

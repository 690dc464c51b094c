"""Runs one test of MLPerf's LoadGen over a system under test, and reads its logs.

LoadGen keeps its settings and loggers in globals, so a process runs one test. It issues queries
from its own threads; the caller's thread drives the system.
"""

from __future__ import annotations

import json
import sys
import threading
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from tokenmill.bench.mlperf.presets import COMPLIANCE_TESTS
from tokenmill.bench.mlperf.runs import MlperfRun
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import RequestTimes

SUMMARY, DETAIL = "mlperf_log_summary.txt", "mlperf_log_detail.txt"
ACCURACY = "mlperf_log_accuracy.json"
USER_CONF, AUDIT_CONFIG = "user.conf", "audit.config"
MARK = ":::MLLOG "
SWITCH_INTERVAL_S = 0.0005  # LoadGen's threads need the interpreter to issue a query
LOG_SEED = 720381539243781796  # that of the official files
TEST06_SAMPLES = 100
TEST04_SAMPLES, TEST04_INDEX = 20, 3
PERFORMANCE_MODE = 2


class SystemUnderTest(Protocol):
    """Answers what LoadGen issues from its threads, while the caller's thread is in `drive`."""

    times: list[RequestTimes]  # of answered queries, from their issue

    def issue(self, queries: Iterable[Any]) -> None:
        """LoadGen's callback: some samples to answer."""

    def end(self) -> None:
        """No query comes any more."""

    def drive(self) -> None:
        """Answer until the end."""


def load_library() -> Any:
    try:
        import mlperf_loadgen
    except ModuleNotFoundError:
        raise BenchError("LoadGen is not installed: pip install mlcommons-loadgen") from None
    return mlperf_loadgen


def respond(complete: Any, answers: Iterable[tuple[int, array[Any], int]]) -> None:
    """Call `complete` of LoadGen with (query, data, number of tokens) of each answer."""
    response = load_library().QuerySampleResponse
    responses, kept = [], []
    for query_id, data, num_tokens in answers:
        address, length = data.buffer_info()
        responses.append(response(query_id, address, length * data.itemsize, num_tokens))
        kept.append(data)  # LoadGen copies the bytes inside the call
    complete(responses)


def run_test(
    sut: SystemUnderTest, num_samples: int, run: MlperfRun, folder: Path, mode: str = "performance"
) -> None:
    """Run the test; `folder` then has its logs, its user.conf and maybe an audit.config.

    After an error LoadGen's threads still wait for answers: the process must end.
    """
    library = load_library()
    settings, logs = _settings(library, run, num_samples, folder, mode), _logs(library, folder)
    audit = folder / AUDIT_CONFIG
    if mode in COMPLIANCE_TESTS:
        audit.write_text(audit_config(mode, num_samples), encoding="utf-8")
    system = library.ConstructSUT(sut.issue, lambda: None)
    qsl = library.ConstructQSL(num_samples, num_samples, lambda indices: None, lambda indices: None)
    failures: list[BaseException] = []

    def start() -> None:
        try:
            library.StartTestWithLogSettings(system, qsl, settings, logs, str(audit))
        except BaseException as error:
            failures.append(error)
        finally:
            sut.end()

    previous = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    sut.drive()
    thread.join()
    sys.setswitchinterval(previous)
    library.DestroyQSL(qsl)
    library.DestroySUT(system)
    if failures:
        raise BenchError(f"LoadGen failed: {failures[0]}")


def _settings(library: Any, run: MlperfRun, num_samples: int, folder: Path, mode: str) -> Any:
    """LoadGen's settings: its built-in mlperf.conf, then user.conf, then the seeds of the round."""
    conf = folder / USER_CONF
    conf.write_text(run.user_conf(num_samples), encoding="utf-8")
    settings = library.TestSettings()
    key, scenario = run.preset.key_of(run.scenario), run.loadgen_scenario
    if settings.FromConfig(str(conf), key, scenario):
        raise BenchError(f"{conf}: LoadGen cannot read this file")
    settings.scenario = getattr(library.TestScenario, scenario)
    modes = library.TestMode
    settings.mode = modes.AccuracyOnly if mode == "accuracy" else modes.PerformanceOnly
    settings.accuracy_sample_count_override = num_samples
    for name, seed in run.seeds.items():
        setattr(settings, name, seed)
    return settings


def _logs(library: Any, folder: Path) -> Any:
    output = library.LogOutputSettings()
    output.outdir = str(folder)
    output.copy_summary_to_stdout = False
    settings = library.LogSettings()
    settings.log_output = output
    settings.enable_trace = False  # its default writes gigabytes while the clock runs
    return settings


def audit_config(name: str, num_samples: int) -> str:
    """What LoadGen takes over for a compliance test of so many samples; it overrides all else."""
    values = {"mode": PERFORMANCE_MODE}
    if name == "TEST04":
        values |= {
            "performance_issue_unique": 0,
            "performance_issue_same": 1,
            "performance_issue_same_index": min(TEST04_INDEX, num_samples - 1),
            "min_query_count": min(TEST04_SAMPLES, num_samples),
        }
    else:
        values |= {
            "accuracy_log_rng_seed": LOG_SEED,
            "accuracy_log_sampling_target": TEST06_SAMPLES,
            "min_query_count": TEST06_SAMPLES,
            "min_duration": 0,
            "sample_concatenate_permutation": 0,
        }
    if name in ("TEST07", "TEST09"):  # every sample once, all of them logged
        values |= {
            "accuracy_log_sampling_target": max(num_samples, 1),
            "min_query_count": num_samples,
            "performance_issue_unique": 1,
        }
    return "".join(f"*.*.{key} = {value}\n" for key, value in values.items())


def read_detail(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Values by key of the detail log, the last of each, and LoadGen's errors."""
    values: dict[str, Any] = {}
    errors: list[str] = []
    for line in (folder / DETAIL).read_text(encoding="utf-8").splitlines():
        if not line.startswith(MARK):
            continue
        entry = json.loads(line.removeprefix(MARK))
        values[entry["key"]] = entry["value"]
        if entry.get("metadata", {}).get("is_error"):
            errors.append(f"{entry['key']}: {entry['value']}")
    return values, errors


def read_answers(folder: Path) -> dict[int, tuple[bytes, int]]:
    """Data by sample index of an accuracy run, and the number of tokens where it is logged."""
    entries = json.loads((folder / ACCURACY).read_text(encoding="utf-8"))
    return {e["qsl_idx"]: (bytes.fromhex(e["data"]), e.get("token_count", 0)) for e in entries}


def token_ids(data: bytes) -> list[int]:
    tokens = array("i")
    tokens.frombytes(data)
    return tokens.tolist()

"""One LoadGen test of a ranking model in this process: DLRMv3, Offline and Server."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.bench.mlperf import loadgen
from tokenmill.bench.mlperf import runs as bench
from tokenmill.bench.results.mlperf_reports import GateReport, MlperfReport
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import RequestTimes
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.types import InvalidRequestError
from tokenmill.settings import CACHE, EXECUTION, MODEL, SCHEDULER, Settings, SettingsError
from tokenmill.settings.commands import RANK, RANK_TABLES

if TYPE_CHECKING:
    from tokenmill.ranking.engine import RankingEngine
    from tokenmill.ranking.model import RankingModel
    from tokenmill.ranking.requests import RankOutput, RankRequest

PANEL = (*RANK, *RANK_TABLES)
UNBOUNDED = 2**31
NO_HURRY_MS = 3.6e6  # Offline: batches are as large as their tokens allow
_NO_AUDIT = "its audit, TEST08, needs the queries of MLCommons' dataset in the order of their time"
_NO_FOLDER = "a submission needs TEST08, which is not there"
NOT_HERE = {  # settings, and why they are refused
    "compliance": _NO_AUDIT,
    "compliance-dataset": _NO_AUDIT,
    "submission-dir": _NO_FOLDER,
}
TAKEN = ("model", "dtype", "device", "random-weights")  # of an engine's settings
RANDOM_NOTICE = "Requests are random ids in the benchmark's lengths, not its dataset."
WEIGHTS_NOTICE = "Weights are random: the scores mean nothing."


@dataclass(frozen=True, slots=True, eq=False)
class RankSample:
    """One entry of the query sample library; labels only where the dataset has them."""

    request: RankRequest
    labels: Any = None  # float32[candidates]


def check_settings(settings: Settings) -> None:
    """What the ranking benchmark does not have is refused."""
    if settings.get("scenario") not in ("Offline", "Server"):
        raise SettingsError("--benchmark dlrm-v3 has --scenario Offline and Server only")
    if settings.get("test-mode") not in ("performance", "accuracy"):
        raise SettingsError(
            "--benchmark dlrm-v3 has --test-mode performance and accuracy only: " + _NO_FOLDER
        )
    for key, reason in NOT_HERE.items():
        # A test's own process has its folder of logs in --submission-dir.
        if settings.values.get(key) and not (key == "submission-dir" and settings.get("json-only")):
            raise SettingsError(f"--{key} does not go with --benchmark dlrm-v3: {reason}")
    if settings.get("url"):
        for key in (setting.key for setting in PANEL if setting.key in settings):
            raise SettingsError(f"--{key} is for an engine of this process, not for --url")
    for setting in (*MODEL, *CACHE, *SCHEDULER, *EXECUTION):
        if setting.key in settings and setting.key not in TAKEN:
            raise SettingsError(
                f"--{setting.key} is for language models and does not go with --benchmark dlrm-v3"
            )
    if not settings.values.get("model"):
        raise SettingsError(
            "--benchmark dlrm-v3 needs --model DIR: tokenmill rank-train DIR writes one, and with "
            "--random-weights a folder with config.json is enough"
        )


class RankingUnderTest(loadgen.SteppedSystem):
    """A ranking engine."""

    def __init__(self, engine: RankingEngine, samples: Sequence[RankSample]) -> None:
        super().__init__(engine)
        self._engine, self._samples = engine, samples
        self._open: dict[str, tuple[int, int, RequestTimes]] = {}

    def _submit(self, request_id: str, arrival: loadgen.Arrival) -> None:
        query_id, index, issued_ns = arrival
        self._open[request_id] = query_id, index, RequestTimes(issued_ns)
        self._engine.submit(replace(self._samples[index].request, request_id=request_id))

    def _report(self, outputs: Sequence[RankOutput]) -> None:
        answers, now_ns = [], time.monotonic_ns()
        check_done(outputs)
        for output in outputs:
            query_id, index, times = self._open.pop(output.request_id)
            times.record(now_ns, 1)
            self.times.append(times)
            scores = array("f", output.scores[:, 0].tobytes())
            answers.append((query_id, answer_data(self._samples, index, scores), 1))
        loadgen.respond(self._library, self._library.QuerySamplesComplete, answers)


def answer_data(samples: Sequence[RankSample], index: int, scores: array[float]) -> array[float]:
    """As the reference has it: timestamp, sample, scores, labels, weights, their number."""
    count, labels = len(scores), samples[index].labels
    truth = array("f", bytes(4 * count) if labels is None else labels.astype("f4").tobytes())
    ends = array("f", [0.0, index]), array("f", [count])
    return ends[0] + scores + truth + array("f", [1.0]) * count + ends[1]


def check_done(outputs: Sequence[RankOutput]) -> None:
    """BenchError where a request has no scores."""
    for output in outputs:
        if output.finish != "done":
            raise BenchError(f"{output.request_id} was not answered: {output.message}")


def child_report(settings: Settings, run: bench.Run) -> MlperfReport:
    """Run the test; its logs are in --submission-dir afterwards."""
    if settings.get("url"):
        return _server_report(settings, run)
    accuracy = settings.get("test-mode") == "accuracy"
    model, notices = _model(settings)
    samples = _samples(settings, run, model.spec, accuracy)
    folder = Path(settings.get("submission-dir"))
    sut = RankingUnderTest(_engine(settings, run, model, samples[0]), samples)
    bench.execute(sut, len(samples), run, folder, accuracy)
    facts = _facts(settings, run, samples, notices)
    facts["dtype"] = model.dense.type_name
    facts["device"] = model.dense.device.type
    return facts | _result(run, folder, accuracy, sut.times)


def _server_report(settings: Settings, run: bench.Run) -> MlperfReport:
    """The same of a server; the folder of --model tells which ids there are."""
    from tokenmill.bench.client.records import Target
    from tokenmill.bench.mlperf.loadgen_url import GivenUp
    from tokenmill.bench.mlperf.post_url import failures
    from tokenmill.bench.mlperf.ranking_url import RankingServerUnderTest, rank_url
    from tokenmill.ranking.spec_file import read_spec

    accuracy = settings.get("test-mode") == "accuracy"
    spec = read_spec(Path(settings.get("model")))
    samples = _samples(settings, run, spec, accuracy)
    target = Target(
        url=rank_url(settings.get("url")),
        model="",
        api_key=next(iter(settings.values.get("api-key", ())), None),
        timeout_s=settings.get("timeout"),
        insecure=settings.get("insecure"),
    )
    folder = Path(settings.get("submission-dir"))
    sut = RankingServerUnderTest(
        target,
        [sample.request for sample in samples],
        lambda index, scores: answer_data(samples, index, array("f", scores)),
        settings.get("max-in-flight"),
    )
    facts = _facts(settings, run, samples, smaller_table(spec)) | {
        "url": target.url,
        "dtype": "as served",
        "device": "remote",
        "accelerator": {},
    }
    try:
        bench.execute(sut, len(samples), run, folder, accuracy)
    except GivenUp as error:
        return facts | bench.given_up_report(run, str(error), sut.times)
    facts |= {"num_failed": sut.tally.num_failed, "errors": sut.tally.errors}
    facts["client_cpu_share"] = round(sut.cpu_share, 3)
    reasons = failures(target.url, sut.tally)
    if accuracy:
        report = {} if reasons else _accuracy(run, folder)
        return facts | report | {"reasons": reasons}
    return facts | bench.with_reasons(_result(run, folder, False, sut.times), reasons)


def _facts(
    settings: Settings, run: bench.Run, samples: Sequence[RankSample], notices: list[str]
) -> MlperfReport:
    synthetic = "dataset" not in settings
    told = [*notices, *([RANDOM_NOTICE] if synthetic else []), *bench.notices(run, False, 1.0)]
    return {
        "model": settings.get("model"),
        "num_samples": len(samples),
        "synthetic": synthetic,
        "quick": run.quick,
        "notices": told,
    }


def _result(
    run: bench.Run, folder: Path, accuracy: bool, times: list[RequestTimes]
) -> MlperfReport:
    """What LoadGen's logs say."""
    if accuracy:
        return _accuracy(run, folder)
    values, errors = loadgen.read_detail(folder)
    report = bench.performance_report(run, values, errors, times)
    if run.scenario == "Server":
        report["limits_ms"] = {"latency": run.preset.latency_ms or 0}
    return report | {"ttft_ms": {}, "tpot_ms": {}, "num_output_tokens": 0}


def _model(settings: Settings) -> tuple[RankingModel, list[str]]:
    from tokenmill.ranking import model_files
    from tokenmill.ranking.model import limit_threads
    from tokenmill.ranking.spec_file import read_spec

    device = model_files.choose_device(settings.get("device"))
    dtype = model_files.choose_dtype(settings.get("dtype"), device)
    path, chunk = Path(settings.get("model")), settings.get("candidate-chunk")
    rows = settings.get("cache-rows")
    tables = model_files.table_paths(settings.get("table"), rows)
    about: dict[str, Any] = {
        "elsewhere": tables, "cache_rows": rows, "candidate_chunk": chunk,
    }  # fmt: skip
    if settings.get("random-weights"):
        model = model_files.random_model(read_spec(path), dtype, device, **about)
    else:
        model = model_files.load_model(path, dtype, device, **about)
    limit_threads(model.spec)
    notices = [WEIGHTS_NOTICE] if settings.get("random-weights") else []
    return model, [*notices, *smaller_table(model.spec)]


def smaller_table(spec: HstuSpec) -> list[str]:
    """What is to be said of an item table that is not the benchmark's."""
    whole = HstuSpec()
    if (spec.num_items, spec.embedding_dim) == (whole.num_items, whole.embedding_dim):
        return []
    return [
        f"The item table has {spec.num_items:,} rows of {spec.embedding_dim} columns; the "
        f"benchmark's has {whole.num_items:,} of {whole.embedding_dim}."
    ]


def _samples(
    settings: Settings, run: bench.Run, spec: HstuSpec, accuracy: bool
) -> list[RankSample]:
    from tokenmill.ranking.synthetic import benchmark_requests

    if "dataset" in settings:
        found = read_samples(Path(settings.get("dataset")), spec)
        if accuracy and any(sample.labels is None for sample in found):
            raise BenchError(f"{settings.get('dataset')}: --test-mode accuracy needs labels")
        if run.quick_samples:
            return found[: run.quick_samples]
        if len(found) != run.preset.num_samples:
            raise BenchError(
                f"the dataset has {len(found)} samples, but {run.preset.name} has "
                f"{run.preset.num_samples}; --quick runs on the samples that there are"
            )
        return found
    count = run.quick_samples or run.preset.num_samples
    requests = benchmark_requests(spec, count, run.length_scale)
    return [RankSample(request) for request in requests]


def read_samples(path: Path, spec: HstuSpec) -> list[RankSample]:
    """The lines of a dataset, each checked against the model; an error names the line."""
    from tokenmill.ranking.request_json import read_labels, read_request
    from tokenmill.ranking.requests import check_request

    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            data = json.loads(line)
            request = read_request(data, f"line-{number}")
            check_request(request, spec)
            found.append(RankSample(request, read_labels(data, request.num_candidates)))
        except (json.JSONDecodeError, InvalidRequestError) as wrong:
            raise BenchError(f"{path}, line {number}: {wrong}") from None
    if not found:
        raise BenchError(f"{path}: there is no request in this file")
    return found


def _engine(
    settings: Settings, run: bench.Run, model: RankingModel, sample: RankSample
) -> RankingEngine:
    """An engine that has answered a sample: what cannot run fails before LoadGen begins."""
    from tokenmill.ranking.engine import RankingEngine
    from tokenmill.ranking.policy import BatchLimits

    limit = run.preset.latency_ms if run.scenario == "Server" else None
    limits = BatchLimits(
        max_batch_tokens=settings.get("max-batch-tokens"),
        max_queue_requests=UNBOUNDED,
        latency_ms=float(limit or NO_HURRY_MS),
    )
    engine = RankingEngine(model, limits)
    if engine.on_gpu:
        engine.warm_up()
    engine.submit(replace(sample.request, request_id="warm-up"))
    while engine.has_work():
        check_done(engine.step())
    return engine


def _accuracy(run: bench.Run, folder: Path) -> MlperfReport:
    """The three metrics of LoadGen's log, beside the reference's."""
    from tokenmill.ranking.metrics import rank_metrics

    scores, labels = [], []
    for data, _ in loadgen.read_answers(folder).values():
        values = array("f")
        values.frombytes(data)
        count = int(values[-1])
        scores.append(values[2 : 2 + count])
        labels.append(values[2 + count : 2 + 2 * count])
    found = rank_metrics(scores, labels)._asdict()
    report: MlperfReport = {"accuracy": {**found, "num_unscored": 0}, "accuracy_gates": {}}
    if run.quick:
        return report
    for name, value in found.items():
        if value is None:
            raise BenchError(f"{name} is not defined: labels or scores are all the same")
        report["accuracy_gates"][name] = gate_of(run, name, value)
    return report


def gate_of(run: bench.Run, name: str, value: float) -> GateReport:
    """Within the share of the reference's; entropy from above, the others from below."""
    reference, share = run.preset.accuracy[name], run.preset.accuracy_share
    if name == "ne":
        most = reference / share
        return {"value": value, "min": 0.0, "max": most, "passed": value <= most}
    least = reference * share
    return {"value": value, "min": least, "passed": value >= least}

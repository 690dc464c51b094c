"""The ranking benchmark, DLRMv3: its samples for an engine and for a server.

A server gets one POST /v1/rank of one user: ids travel as base64 of int64, scores come as JSON.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.bench.mlperf import loadgen
from tokenmill.bench.mlperf.accuracy import missed_gates
from tokenmill.bench.mlperf.runs import MlperfRun
from tokenmill.bench.mlperf.under_test import (
    BenchmarkTask,
    EngineUnderTest,
    Query,
    UrlUnderTest,
    target_of,
)
from tokenmill.bench.results.mlperf_reports import Fields, GateReport
from tokenmill.bench.workload import BenchError
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.tasks import Rank, Scores
from tokenmill.core.types import InvalidRequestError
from tokenmill.settings import Settings

if TYPE_CHECKING:
    from tokenmill.ranking.engine import RankingEngine
    from tokenmill.ranking.model import RankingModel

ROUTE = "/v1/rank"
UNBOUNDED = 2**31
NO_HURRY_MS = 3.6e6  # Offline: batches are as large as their tokens allow
RANDOM_NOTICE = "Requests are random ids in the benchmark's lengths, not its dataset."
WEIGHTS_NOTICE = "Weights are random: the scores mean nothing."


@dataclass(frozen=True, slots=True, eq=False)
class RankSample:
    """One entry of the query sample library; labels only where the dataset has them."""

    request: Request[Rank]
    labels: Any = None  # float32[candidates]


class RankingTask(BenchmarkTask):
    """What both systems have in common: the samples, and the scores of their answers."""

    def __init__(self, settings: Settings, run: MlperfRun, mode: str, spec: HstuSpec) -> None:
        self._settings, self._run = settings, run
        self._samples = load_samples(settings, run, spec, mode == "accuracy")
        self.num_samples = len(self._samples)
        self._own_notices = smaller_table(spec)
        if "dataset" not in settings:
            self._own_notices.append(RANDOM_NOTICE)

    def _sample_facts(self) -> Fields:
        return {
            "model": self._settings.get("model"),
            "num_samples": self.num_samples,
            "synthetic": "dataset" not in self._settings,
            "notices": self._run.notices(self._own_notices),
        }

    def score(self, folder: Path) -> Fields:
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
        gates: dict[str, GateReport] = {}
        for name, value in {} if self._run.quick else found.items():
            if value is None:
                raise BenchError(f"{name} is not defined: labels or scores are all the same")
            gates[name] = gate_of(self._run, name, value)
        accuracy = {**found, "num_unscored": 0}
        return {
            "accuracy": accuracy,
            "accuracy_gates": gates,
            "reasons": missed_gates(gates, None),
        }

    def logged(self, index: int, scores: array[float]) -> array[float]:
        """As the reference has it: timestamp, sample, scores, labels, weights, their number."""
        count, labels = len(scores), self._samples[index].labels
        truth = array("f", bytes(4 * count) if labels is None else labels.astype("f4").tobytes())
        ends = array("f", [0.0, index]), array("f", [count])
        return ends[0] + scores + truth + array("f", [1.0]) * count + ends[1]


class EngineRanking(RankingTask):
    def __init__(self, settings: Settings, run: MlperfRun, mode: str, folder: Path) -> None:
        model = load_model(settings)
        super().__init__(settings, run, mode, model.spec)
        if settings.get("random-weights"):
            self._own_notices.insert(0, WEIGHTS_NOTICE)
        self._type, self._device = model.dense.type_name, model.dense.device.type
        self.sut = EngineUnderTest(warm_engine(settings, run, model, self._samples[0]), self)

    def request(self, name: str, query: Query) -> Request[Rank]:
        return replace(self._samples[query.sample].request, request_id=name)

    def take(self, query: Query, output: RequestOutput) -> tuple[int, bool]:
        from tokenmill.ranking.requests import scores_of

        check_done([output])
        query.answer = array("f", scores_of(output)[:, 0].tobytes())
        return 1, True

    def data(self, query: Query) -> array[float]:
        return self.logged(query.sample, query.answer)

    def facts(self) -> Fields:
        return {**self._sample_facts(), "dtype": self._type, "device": self._device}


class UrlRanking(RankingTask):
    """A ranking server that answers the samples; the folder of --model tells which ids exist."""

    def __init__(self, settings: Settings, run: MlperfRun, mode: str, folder: Path) -> None:
        from tokenmill.ranking.spec_file import read_spec

        super().__init__(settings, run, mode, read_spec(Path(settings.get("model"))))
        self._url = rank_url(settings.get("url"))
        target = target_of(settings, self._url)
        self.sut = self._server = UrlUnderTest(
            target, self, settings.get("max-in-flight"), self.read
        )

    def body(self, sample: int) -> bytes:
        return body_of(self._samples[sample].request.task)

    def read(self, sample: int, body: bytes) -> array[float]:
        return self.logged(sample, array("f", json.loads(body)["results"][0]["scores"]))

    def facts(self) -> Fields:
        return {**self._sample_facts(), **self._server.facts(self._url)}

    def score(self, folder: Path) -> Fields:
        return {"reasons": []} if self._server.tally.num_failed else super().score(folder)


def rank_url(url: str) -> str:
    """The route of a server, however its address was given."""
    return url.rstrip("/").removesuffix(ROUTE).removesuffix("/v1") + ROUTE


def body_of(task: Rank) -> bytes:
    def ids(values: bytes) -> str:
        return base64.b64encode(values).decode()

    history = {
        "item_ids": ids(task.item_ids),
        "category_ids": ids(task.category_ids),
        "actions": ids(task.actions),
    }
    if task.timestamps is not None:
        history["timestamps"] = ids(task.timestamps)
    candidates = {
        "item_ids": ids(task.candidate_ids),
        "category_ids": ids(task.candidate_category_ids),
    }
    user = {"user_id": task.user_id, "query_time": task.query_time}
    return json.dumps({"users": [{**user, "history": history, "candidates": candidates}]}).encode()


def check_done(outputs: Sequence[RequestOutput]) -> None:
    """BenchError where a request has no scores."""
    for output in outputs:
        if not isinstance(output.delta, Scores):
            raise BenchError(f"{output.request_id} was not answered: {output.error}")


def load_model(settings: Settings) -> RankingModel:
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
    return model


def smaller_table(spec: HstuSpec) -> list[str]:
    """What is to be said of an item table that is not the benchmark's."""
    whole = HstuSpec()
    if (spec.num_items, spec.embedding_dim) == (whole.num_items, whole.embedding_dim):
        return []
    return [
        f"The item table has {spec.num_items:,} rows of {spec.embedding_dim} columns; the "
        f"benchmark's has {whole.num_items:,} of {whole.embedding_dim}."
    ]


def load_samples(
    settings: Settings, run: MlperfRun, spec: HstuSpec, accuracy: bool
) -> list[RankSample]:
    from tokenmill.ranking.synthetic import benchmark_requests

    if "dataset" in settings:
        found = read_samples(Path(settings.get("dataset")), spec)
        if accuracy and any(sample.labels is None for sample in found):
            raise BenchError(f"{settings.get('dataset')}: --test-mode accuracy needs labels")
        run.check_count("the dataset", len(found), "samples")
        return found[: run.quick_samples]
    count = run.quick_samples or run.preset.num_samples
    requests = benchmark_requests(spec, count, run.length_scale)
    return [RankSample(request.asked()) for request in requests]


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
            labels = read_labels(data, request.num_candidates)
            found.append(RankSample(request.asked(), labels))
        except (json.JSONDecodeError, InvalidRequestError) as wrong:
            raise BenchError(f"{path}, line {number}: {wrong}") from None
    if not found:
        raise BenchError(f"{path}: there is no request in this file")
    return found


def warm_engine(
    settings: Settings, run: MlperfRun, model: RankingModel, sample: RankSample
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


def gate_of(run: MlperfRun, name: str, value: float) -> GateReport:
    """Within the share of the reference's; entropy from above, the others from below."""
    reference, share = run.preset.accuracy[name], run.preset.accuracy_share
    if name == "ne":
        most = reference / share
        return GateReport(value, 0.0, value <= most, most)
    least = reference * share
    return GateReport(value, least, value >= least)

"""One LoadGen test against an engine of known latencies, in a process of its own.

`python mlperf_driver.py FOLDER JSON`: the JSON names scenario, rate, latencies in seconds and how
requests end, or the URL and the model of a server; the last line of stdout is the report.
"""

from __future__ import annotations

import heapq
import json
import os
import sys
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.bench.client.connections import route_url
from tokenmill.bench.client.records import Endpoint, request_body
from tokenmill.bench.mlperf import loadgen, loadgen_tests
from tokenmill.bench.mlperf import runs as mlperf
from tokenmill.bench.mlperf.language import EngineLanguage
from tokenmill.bench.mlperf.presets import PRESETS
from tokenmill.bench.mlperf.samples import LanguageSample
from tokenmill.bench.mlperf.under_test import EngineUnderTest, UrlUnderTest
from tokenmill.core.metrics import summarize
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.types import EngineStats, FinishReason, SamplingParams, TokenmillError

NUM_TOKENS, TOKEN = 5, 7
LONGEST_NAP_S = 0.001


class PacedEngine:
    """Every request gets its first token `ttft_s` after its submission, then one per `tpot_s`."""

    def __init__(self, ttft_s: float, tpot_s: float, end: FinishReason, nap_s: float) -> None:
        self.nap_s = nap_s
        self.ttft_s, self.tpot_s, self.end = ttft_s, tpot_s, end
        self.due: list[tuple[float, str, int]] = []  # when, who, tokens still to come
        self.prompts: list[list[int]] = []
        self.late_ms: list[float] = []
        self.submitted_s: list[float] = []

    def submit(self, request: Request) -> None:
        assert request.task.sampling.max_tokens is not None
        self.prompts.append(request.task.prompt_token_ids)
        self.submitted_s.append(time.monotonic())
        due_s = self.submitted_s[-1] + self.ttft_s
        heapq.heappush(self.due, (due_s, request.request_id, request.task.sampling.max_tokens))

    def step(self) -> list[RequestOutput]:
        time.sleep(min(max(0.0, self.due[0][0] - time.monotonic()), self.nap_s))
        outputs = []
        while self.due and self.due[0][0] <= time.monotonic():
            due_s, name, left = heapq.heappop(self.due)
            self.late_ms.append(1e3 * (time.monotonic() - due_s))
            reason = self.end if left == 1 else None
            outputs.append(RequestOutput(name, [TOKEN], finish_reason=reason, error="as told"))
            if left > 1:
                heapq.heappush(self.due, (due_s + self.tpot_s, name, left - 1))
        return outputs

    def abort(self, request_id: str) -> None:
        raise AssertionError("LoadGen gives up no query")

    def has_work(self) -> bool:
        return bool(self.due)

    def stats(self) -> EngineStats:
        return EngineStats()


class EngineSamples(EngineLanguage):
    """The samples of a test without a model."""

    def __init__(self, run: mlperf.MlperfRun, samples: list[LanguageSample]) -> None:
        self._run, self._samples, self._mode, self._has_images = run, samples, "", False


class UrlSamples:
    """The same as texts for a server."""

    def __init__(self, target: Endpoint, samples: list[LanguageSample]) -> None:
        self.target, self.samples = target, samples

    def body(self, sample: int) -> bytes:
        asked = self.samples[sample]
        return request_body(self.target, asked.text, asked.sampling.max_tokens)

    def max_tokens(self, sample: int) -> int | None:
        return self.samples[sample].sampling.max_tokens


def system_of(options: dict[str, Any], run: mlperf.MlperfRun, samples: list[LanguageSample]) -> Any:
    if "url" in options:
        url = route_url(options["url"], "chat")
        target = Endpoint(url, options["model"], keep_text=options.get("accuracy", False))
        served = UrlSamples(target, samples)
        return UrlUnderTest(target, served, options.get("max_in_flight", 64)), None
    nap_s = options.get("nap_s", LONGEST_NAP_S)
    end = FinishReason(options["end"])
    engine = PacedEngine(options["ttft_s"], options["tpot_s"], end, nap_s)
    return EngineUnderTest(engine, EngineSamples(run, samples), first_tokens=True), engine


def run(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    mlperf.QUICK_DURATION_MS = options.get("duration_ms", 1000)
    preset = PRESETS[options.get("benchmark", "llama3.1-8b")]
    count = options.get("num_samples", 64)
    num_tokens = options.get("num_tokens", NUM_TOKENS)
    this = mlperf.MlperfRun(preset, options["scenario"], options["qps"], count)
    this = replace(this, round=options.get("round", this.round))
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    samples = [LanguageSample(array("i", [i]), sampling, f"{i}") for i in range(count)]
    sut, engine = system_of(options, this, samples)
    is_accuracy = options.get("accuracy", False)
    loadgen.run_test(sut, count, this, folder, "accuracy" if is_accuracy else "performance")
    if is_accuracy:
        answers = loadgen.read_answers(folder)
        return {"answers": {i: (d.hex(), n) for i, (d, n) in answers.items()}}
    values, errors = loadgen.read_detail(folder)
    report = loadgen_tests.performance_fields(this, values, errors, sut.times) | {"log": values}
    report["result"] = "INVALID" if report["reasons"] else "VALID"
    report["metric"] = msgspec.to_builtins(report["metric"])
    if "url" in options:
        tally = sut.tally
        told = {"errors": tally.errors, "doubts": tally.doubts, "failed": tally.num_failed}
        return report | msgspec.to_builtins(told)
    return report | {
        "issued": sorted({prompt[0] for prompt in engine.prompts}),
        "engine_late_ms": summarize(engine.late_ms),
        "span_s": engine.submitted_s[-1] - engine.submitted_s[0],
    }


if __name__ == "__main__":
    try:
        print(json.dumps(run(Path(sys.argv[1]), json.loads(sys.argv[2]))))
    except TokenmillError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)

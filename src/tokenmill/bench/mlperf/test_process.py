"""One LoadGen test in this process: the engine or the server under test, and its report."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from tokenmill import console
from tokenmill.bench.commands import throughput
from tokenmill.bench.endpoint_load import make_target
from tokenmill.bench.mlperf import accuracy as scoring
from tokenmill.bench.mlperf import compliance, loadgen
from tokenmill.bench.mlperf import runs as bench
from tokenmill.bench.offline import OurEngine
from tokenmill.bench.report.mlperf_report import EVENTS, write_times
from tokenmill.bench.results.mlperf_reports import MlperfReport
from tokenmill.bench.workload import BenchError, Cell, make_prompts
from tokenmill.core.bench_config import BenchConfig, EndpointConfig
from tokenmill.core.config import ModelConfig
from tokenmill.settings import Settings

if TYPE_CHECKING:
    from tokenmill.bench.client.records import Target
    from tokenmill.bench.mlperf.loadgen_url import UrlUnderTest
    from tokenmill.core.specs.spec import ModelSpec
    from tokenmill.engine.build import BuiltEngine
    from tokenmill.text.tokenizer import Tokenizer

PARENT_POLL_S = 1.0
MODELS_TIMEOUT_S = 10.0
UNBOUNDED = 2**31
COMMON_VOCABULARY = 32_000  # ids that every model of the round has
CLIENT_BUSY = 0.8
FORBIDDEN_CACHE = (
    "the server's prefix cache, which the rules forbid: start it with --no-prefix-cache (vLLM: "
    "--no-enable-prefix-caching, SGLang: --disable-radix-cache)"
)


def child_report(settings: Settings, run: bench.Run) -> MlperfReport:
    """Run the test; its logs are in --submission-dir afterwards."""
    test = UrlTest(settings, run) if settings.get("url") else EngineTest(settings, run)
    folder = Path(settings.get("submission-dir"))
    accuracy = settings.get("test-mode") == "accuracy"
    rouge = scoring.load_rouge(run.preset) if accuracy else None
    report = test.execute(folder, accuracy)
    if isinstance(test, EngineTest) and test.compliance:
        return report | _compliance_report(run, test, folder)
    if accuracy and "result" not in report:
        return report | _accuracy_report(run, test, folder, rouge)
    return report


def end_with(parent: int) -> None:
    """End when the parent has: nobody would read the report of a test of ten minutes."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def watch_parent() -> None:
    """Do so from now on."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()


class EngineTest:
    """An engine of this process under test."""

    def __init__(self, settings: Settings, run: bench.Run) -> None:
        self._settings, self._run = settings, run
        model = settings.build(ModelConfig)
        path = throughput.model_path(model)
        spec = _spec(path, model)
        context = min(model.max_model_len or spec.max_position, spec.max_position)
        mode = settings.get("test-mode")
        self.compliance: str = mode if mode in compliance.NAMES else ""
        self.eos_token_ids = spec.eos_token_ids
        self.rows: list[scoring.Row] = []
        self._scale = 1.0
        if "dataset" in settings:
            self._tokenizer = _tokenizer(path)
            self.rows, self._samples = self._dataset(context, path)
        else:
            self._samples, self._scale = _synthetic(run, spec, context)

    def execute(self, folder: Path, accuracy: bool) -> MlperfReport:
        built = self._build()
        text = self._decode if accuracy and self._run.preset.images else None
        sut = loadgen.EngineUnderTest(built.engine, self._samples, text)
        num_samples = len(self._samples)
        bench.execute(sut, num_samples, self._run, folder, accuracy, self.compliance)
        write_times(folder / EVENTS, sut.times)
        facts = self._facts(built)
        if accuracy or self.compliance:
            return facts
        values, errors = loadgen.read_detail(folder)
        return facts | bench.performance_report(self._run, values, errors, sut.times)

    def answer(self, data: bytes) -> str:
        """The text of LoadGen's data."""
        if self._run.preset.images:  # its evaluation reads texts
            return data.decode()
        return self._decode(loadgen.token_ids(data))

    def _decode(self, token_ids: list[int]) -> str:
        """The text of an answer; special tokens tell harmony's channels apart."""
        skip = not self._run.preset.harmony
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip)

    def num_tokens(self, answer: str) -> int:
        """Of a text whose number LoadGen has not logged."""
        return len(self._tokenizer.encode(answer, add_special_tokens=False))

    def _dataset(self, context: int, path: Path) -> tuple[list[scoring.Row], list[loadgen.Sample]]:
        """The rows that are run, and their samples."""
        rows, accuracy = read_rows(self._settings)
        makers: list[Any] = [None] * len(rows)
        if self._run.preset.images:
            from tokenmill.bench.mlperf import image_samples

            rows = rows[: self._run.quick_samples]
            folder = Path(self._settings.get("dataset")).expanduser().parent
            images = image_samples.DatasetImages(path, self._tokenizer, folder, context)
            made = [images.prompt(row, number) for number, row in enumerate(rows)]
            prompts, makers = [ids for ids, _ in made], [make for _, make in made]
        else:
            prompts = scoring.prompts(rows, self._tokenizer.encode, self._tokenizer.decode)
        mode = self._settings.get("test-mode")
        chosen = bench.choose_samples(self._run, [len(p) for p in prompts], context, mode)
        chosen_prompts = [prompts[i] for i in chosen]
        samples = bench.dataset_samples(self._run, chosen_prompts, context, accuracy)
        samples = [
            replace(sample, images=makers[i]) for sample, i in zip(samples, chosen, strict=True)
        ]
        return [rows[i] for i in chosen], samples

    def _build(self) -> BuiltEngine:
        """An engine with room for all samples at once, warmed up."""
        samples = self._samples
        lengths = tuple((len(s.prompt_token_ids), s.sampling.max_tokens or 1) for s in samples)
        cell = Cell("mlperf", lengths)
        values = {"max-queue": UNBOUNDED} | self._settings.values  # a sample may come often
        built, _ = throughput.build(Settings(values), BenchConfig(lengths="mlperf"), [cell])
        warmup = cell.warmup()
        prompts = make_prompts(warmup, -1, 0, built.spec.vocab_size)
        OurEngine(built.engine).run(warmup, prompts)
        return built

    def _facts(self, built: BuiltEngine) -> MlperfReport:
        from tokenmill.bench.ceiling import accelerator

        facts: MlperfReport = {
            "model": built.description,
            "dtype": built.dtype,
            "kv_dtype": built.kv_dtype,
            "device": built.device,
            "accelerator": accelerator(built.device),
            "num_input_tokens": sum(len(s.prompt_token_ids) for s in self._samples),
        }
        return facts | _sample_facts(self._run, self._samples, not self.rows, self._scale)


class UrlTest:
    """An OpenAI-compatible server under test."""

    def __init__(self, settings: Settings, run: bench.Run) -> None:
        self._settings, self._run = settings, run
        self._config = settings.build(EndpointConfig, api="completions")
        self.rows: list[scoring.Row] = []
        self._scale = 1.0
        self._server_hits: float | None = None  # share of the prompt tokens, by its /metrics
        name = self._config.tokenizer
        self._tokenizer = (
            _tokenizer(throughput.model_path(ModelConfig(model=name))) if name else None
        )
        self._target = self._make_target()
        given = settings.values.get("max-model-len")
        self._context = given or _context(self._target) or UNBOUNDED
        if "dataset" in settings:
            self._dataset()
        else:
            self._synthetic()
        fields = self._sampling_fields() | self._target.fields  # --extra-body wins
        self._target = replace(self._target, fields=fields)
        self._send_ids = self._probe()

    def execute(self, folder: Path, accuracy: bool) -> MlperfReport:
        from tokenmill.bench.client.scrape import Scraper, metrics_url, server_report
        from tokenmill.bench.mlperf.loadgen_url import GivenUp, UrlUnderTest

        in_flight = self._settings.get("max-in-flight")
        target = replace(self._target, keep_text=accuracy)
        sut = UrlUnderTest(target, self._samples, self._send_ids, in_flight)
        scraper = Scraper(metrics_url(target.url), target)
        scraper.begin()
        try:
            bench.execute(sut, len(self._samples), self._run, folder, accuracy)
            write_times(folder / EVENTS, sut.times)
        except GivenUp as error:
            report = bench.given_up_report(self._run, str(error), sut.times)
            return self._facts(sut) | report
        if readings := scraper.end():
            self._server_hits = server_report(readings)["prefix_hit_rate"]
        facts = self._facts(sut)
        failures = self._failures(sut)
        if accuracy:
            return facts | {"reasons": failures}
        values, errors = loadgen.read_detail(folder)
        report = bench.performance_report(self._run, values, errors, sut.times)
        return facts | bench.with_reasons(report, failures)

    def answer(self, data: bytes) -> str:
        """The text of LoadGen's data."""
        return data.decode()

    def _make_target(self) -> Target:
        values = self._settings.values | {"ignore-eos": False}  # the samples say
        return make_target(Settings(values), self._config)

    def _sampling_fields(self) -> dict[str, float]:
        """What every sample has in common; the extensions only where they may be sent."""
        sampling = self._samples[0].sampling
        fields: dict[str, float] = {"temperature": sampling.temperature}
        if self._settings.values.get("ignore-eos", True):
            if sampling.ignore_eos:  # the end token must be seen to be counted
                fields |= {"ignore_eos": True, "skip_special_tokens": False}
            elif sampling.min_tokens > 1:
                fields |= {"min_tokens": sampling.min_tokens}
        return fields

    def _synthetic(self) -> None:
        from tokenmill.bench.client.datasets import words

        run = self._run
        lengths, self._scale = bench.synthetic_lengths(run, self._context)
        vocab_size = self._tokenizer.vocab_size if self._tokenizer else COMMON_VOCABULARY
        samples = bench.synthetic_samples(run, lengths, vocab_size)
        self._samples = [
            replace(sample, text=words("mlperf", number, len(sample.prompt_token_ids)))
            for number, sample in enumerate(samples)
        ]

    def _dataset(self) -> None:
        """Token ids are only known to be the server's where a tokenizer is given."""
        rows, accuracy = read_rows(self._settings)
        tokenizer = self._tokenizer
        if tokenizer is not None:
            prompts = scoring.prompts(rows, tokenizer.encode, tokenizer.decode)
        else:
            prompts = [[] if row.text is not None else row.token_ids or [] for row in rows]
        mode = self._settings.get("test-mode")
        chosen = bench.choose_samples(self._run, [len(p) for p in prompts], self._context, mode)
        self.rows = [rows[i] for i in chosen]
        used = [prompts[i] for i in chosen]
        samples = bench.dataset_samples(self._run, used, self._context, accuracy)
        self._samples = [
            replace(
                sample,
                text=row.text or (tokenizer.decode(row.token_ids or []) if tokenizer else ""),
            )
            for sample, row in zip(samples, self.rows, strict=True)
        ]

    def _probe(self) -> bool:
        """Whether prompts go as token ids; also the first request, which warms the server up."""
        from tokenmill.bench.mlperf.loadgen_url import probe_text, takes_token_ids

        all_ids = all(sample.prompt_token_ids for sample in self._samples)
        if self._config.api == "completions" and all_ids:
            if takes_token_ids(self._target, COMMON_VOCABULARY):
                return True
            console.note("The server does not accept token ids: prompts are sent as text")
        if not all(sample.text for sample in self._samples):
            raise BenchError("the dataset has only token ids, which the server does not accept")
        probe_text(self._target)
        return False

    def _failures(self, sut: UrlUnderTest) -> list[str]:
        """What makes the run INVALID whatever LoadGen says."""
        found = [
            f"{entry['count']} queries failed, {name}: {entry['first']}"
            for name, entry in sut.tally.errors.items()
        ]
        if sut.tally.num_cached:
            found.append(f"{sut.tally.num_cached} answers used {FORBIDDEN_CACHE}")
        elif self._server_hits:
            share = f"{self._server_hits:.1%} of the prompt tokens"
            found.append(f"by the server's /metrics {share} used {FORBIDDEN_CACHE}")
        return found

    def _facts(self, sut: UrlUnderTest) -> MlperfReport:
        tally, target = sut.tally, self._target
        facts: MlperfReport = {
            "model": target.model,
            "url": target.url,
            "api": target.api,
            "prompts": "token ids" if self._send_ids else "text",
            "dtype": "as served",
            "kv_dtype": "as served",
            "device": "remote",
            "accelerator": {},
            "num_input_tokens": sut.num_prompt_tokens,
            "num_failed": tally.num_failed,
            "errors": tally.errors,
            "doubts": tally.doubts,
            "num_cached": tally.num_cached,
            "server_prefix_hit_rate": self._server_hits,
            "client_cpu_share": round(sut.cpu_share, 3),
        }
        facts |= _sample_facts(self._run, self._samples, not self.rows, self._scale)
        facts["notices"] += self._notices(sut)
        return facts

    def _notices(self, sut: UrlUnderTest) -> list[str]:
        found = [
            f"The server's usage is in doubt in {entry['count']} answers ({entry['first']}): they "
            "count with the outputs that came."
            for entry in sut.tally.doubts.values()
        ]
        if sut.cpu_share > CLIENT_BUSY:
            share = f"{sut.cpu_share:.0%} of a core"
            found.append(f"The client took {share}: it, not the server, may be the limit.")
        return found


def _synthetic(run: bench.Run, spec: ModelSpec, context: int) -> tuple[list[loadgen.Sample], float]:
    """Samples in the benchmark's lengths, and their scale."""
    if run.preset.images:
        from tokenmill.bench.mlperf import image_samples

        shapes, scale = image_samples.draw_shapes(run, context)
        return image_samples.synthetic_samples(run, shapes, spec), scale
    lengths, scale = bench.synthetic_lengths(run, context)
    return bench.synthetic_samples(run, lengths, spec.vocab_size), scale


def read_rows(settings: Settings) -> tuple[list[scoring.Row], bool]:
    """Rows of --dataset, and whether they are to be scored."""
    accuracy = settings.get("test-mode") == "accuracy"
    rows = scoring.read_dataset(Path(settings.get("dataset")).expanduser())
    if accuracy or settings.get("test-mode") == "TEST07":
        scoring.check_targets(rows)
    return rows, accuracy


def _sample_facts(
    run: bench.Run, samples: list[loadgen.Sample], synthetic: bool, scale: float
) -> MlperfReport:
    return {
        "num_samples": len(samples),
        "synthetic": synthetic,
        "quick": run.quick,
        "length_scale": round(scale, 6),
        "notices": bench.notices(run, synthetic, scale),
    }


def _accuracy_report(
    run: bench.Run, test: EngineTest | UrlTest, folder: Path, rouge: scoring.Rouge | None
) -> MlperfReport:
    by_index = loadgen.read_answers(folder)
    found = [by_index[index] for index in range(len(test.rows))]
    answers = [test.answer(data) for data, _ in found]
    counts = [count for _, count in found]
    if run.preset.images and isinstance(test, EngineTest):
        counts = [test.num_tokens(answer) for answer in answers]
    scores = scoring.score(run.preset, test.rows, answers, counts, rouge)
    report: MlperfReport = {
        "accuracy": scores,
        "accuracy_gates": scoring.gates(run.preset, scores),
    }
    if rouge is not None:
        report["sentences_by"] = "punkt" if rouge.trained else "punkt without its English model"
    return report


def _compliance_report(run: bench.Run, test: EngineTest, folder: Path) -> MlperfReport:
    """Whether the answers of a compliance run pass its test."""
    name, preset = test.compliance, run.preset
    answers = compliance.read_log(folder)
    if name == "TEST06":
        offline = run.scenario == "Offline"
        verdict = compliance.verify_consistency(answers, test.eos_token_ids, offline)
    elif name == "TEST07":
        by_index = loadgen.read_answers(folder)
        rows = [test.rows[index] for index in by_index]
        texts = [test.answer(data) for data, _ in by_index.values()]
        counts = [count for _, count in by_index.values()]
        scores = scoring.score(preset, rows, texts, counts, None)
        verdict = compliance.verify_score(scores, preset.compliance_score)
    else:
        verdict = compliance.verify_output_length(answers, preset.compliance_tokens)
    reasons = [] if verdict.passed else [f"{name} failed: {'; '.join(verdict.text.splitlines())}"]
    return {"reasons": reasons, "passed": verdict.passed, "verified": verdict.text}


def _context(target: Target) -> int | None:
    """The longest context that the server names for the model, as vLLM's /models and ours do."""
    base = target.url.removesuffix("/completions").removesuffix("/chat")
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    try:
        with urlopen(Request(base + "/models", headers=headers), timeout=MODELS_TIMEOUT_S) as got:
            cards = json.load(got)["data"]
        found = [c.get("max_model_len") for c in cards if c["id"] == target.model]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found[0] if found and isinstance(found[0], int) else None


def _spec(path: Path, model: ModelConfig) -> ModelSpec:
    from tokenmill.models.checkpoints.weights import open_checkpoint

    return open_checkpoint(path, random_weights=model.random_weights).spec


def _tokenizer(path: Path) -> Tokenizer:
    from tokenmill.text.tokenizer import load_tokenizer

    return load_tokenizer(path)


def leave(report: MlperfReport) -> None:
    """Print the report of a test that LoadGen still waits in, and end without it."""
    console.print_json(report)
    sys.stdout.flush()
    os._exit(0)

"""Language benchmarks, with images or without: their samples for an engine and for a server."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill import console
from tokenmill.bench.client.connections import Client
from tokenmill.bench.client.datasets import words
from tokenmill.bench.client.records import Endpoint, LoadRecord, request_body
from tokenmill.bench.client.scrape import Scraper, metrics_url, server_report
from tokenmill.bench.commands import throughput
from tokenmill.bench.endpoint_load import make_target, served_models
from tokenmill.bench.mlperf import accuracy as scoring
from tokenmill.bench.mlperf import compliance, loadgen
from tokenmill.bench.mlperf.runs import MlperfRun
from tokenmill.bench.mlperf.samples import (
    DatasetImages,
    LanguageSample,
    choose_samples,
    dataset_samples,
    draw_sizes,
    image_samples,
    notices_of,
    synthetic_lengths,
    synthetic_samples,
)
from tokenmill.bench.mlperf.under_test import (
    BenchmarkTask,
    EngineUnderTest,
    Query,
    UrlUnderTest,
)
from tokenmill.bench.offline import OurEngine
from tokenmill.bench.options import BenchConfig, EndpointConfig
from tokenmill.bench.results.mlperf_reports import Fields
from tokenmill.bench.workload import BenchError, Cell, make_prompts
from tokenmill.core.config import ModelConfig
from tokenmill.core.images import ImageSpan
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason
from tokenmill.settings import Settings

if TYPE_CHECKING:
    from tokenmill.core.specs.spec import ModelSpec
    from tokenmill.engine.build import BuiltEngine
    from tokenmill.text.tokenizer import Tokenizer

UNBOUNDED = 2**31
COMMON_VOCABULARY = 32_000  # ids that every model of the round has
ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)
PROBE_TOKENS, PROBE_OUTPUT = 24, 2
SPECIAL_TOKENS = 2  # that a server may put around a prompt
CLIENT_BUSY = 0.8
FORBIDDEN_CACHE = (
    "the server's prefix cache, which the rules forbid: start it with --no-prefix-cache (vLLM: "
    "--no-enable-prefix-caching, SGLang: --disable-radix-cache)"
)


class LanguageTask(BenchmarkTask):
    """What both systems have in common: rows of a dataset where there is one, samples, scores."""

    def __init__(self, settings: Settings, run: MlperfRun, mode: str) -> None:
        self._settings, self._run, self._mode = settings, run, mode
        self._rouge = scoring.load_rouge(run.preset) if mode == "accuracy" else None
        self._rows: list[scoring.DatasetRow] = []
        self._samples: list[LanguageSample] = []
        self._scale = 1.0

    def _read_rows(self) -> list[scoring.DatasetRow]:
        rows = scoring.read_dataset(Path(self._settings.get("dataset")).expanduser())
        if self._mode in ("accuracy", "TEST07"):
            scoring.check_targets(rows)
        return rows

    def _choose(
        self, rows: Sequence[scoring.DatasetRow], prompts: Sequence[list[int]], context: int
    ) -> list[int]:
        """Keep the rows that are run as samples; their indices."""
        run, accuracy = self._run, self._mode == "accuracy"
        chosen = choose_samples(run, [len(p) for p in prompts], context, self._mode)
        self._rows = [rows[i] for i in chosen]
        self._samples = dataset_samples(run, [prompts[i] for i in chosen], context, accuracy)
        return chosen

    def _sample_facts(self) -> Fields:
        return {
            "num_samples": len(self._samples),
            "synthetic": not self._rows,
            "length_scale": round(self._scale, 6),
            "notices": notices_of(self._run, not self._rows, self._scale),
        }

    def score(self, folder: Path) -> Fields:
        by_index = loadgen.read_answers(folder)
        found = [by_index[index] for index in range(len(self._rows))]
        answers = [self.text_of(data) for data, _ in found]
        counts = [self.count_of(text, n) for text, (_, n) in zip(answers, found, strict=True)]
        return scoring.score_fields(self._run.preset, self._rows, answers, counts, self._rouge)

    def text_of(self, data: bytes) -> str:
        return data.decode()

    def count_of(self, text: str, logged: int) -> int:
        return logged


def _load_tokenizer(path: Path) -> Tokenizer:
    from tokenmill.text.tokenizer import load_tokenizer

    return load_tokenizer(path)


class EngineLanguage(LanguageTask):
    def __init__(self, settings: Settings, run: MlperfRun, mode: str, folder: Path) -> None:
        from tokenmill.models.checkpoints.weights import open_checkpoint

        super().__init__(settings, run, mode)
        model = settings.build(ModelConfig)
        path = throughput.model_path(model)
        spec = open_checkpoint(path, random_weights=model.random_weights).spec
        context = min(model.max_model_len or spec.max_position, spec.max_position)
        self._eos_token_ids = spec.eos_token_ids
        self._has_images = run.preset.task == "images"
        if "dataset" in settings:
            self._tokenizer = _load_tokenizer(path)
            self._dataset(context, path)
        else:
            self._synthetic(spec, context)
        self._built = self._build()
        self.num_samples = len(self._samples)
        self.sut = EngineUnderTest(self._built.engine, self, first_tokens=True)

    def request(self, name: str, query: Query) -> Request:
        sample, now_ns = self._samples[query.sample], query.times.arrival_ns
        images = renamed(sample.images(), name) if sample.images is not None else ()
        prompt = sample.prompt_token_ids.tolist()
        return Request(name, Generate(prompt, sample.sampling, images=images), arrival_ns=now_ns)

    def take(self, query: Query, output: RequestOutput) -> tuple[int, bool]:
        query.token_ids += output.token_ids
        if output.finish_reason is not None:
            _check(output)
        return len(output.token_ids), output.finish_reason is not None

    def data(self, query: Query) -> array[int]:
        """Token ids; of an accuracy run with images texts, which its evaluation reads."""
        if self._mode == "accuracy" and self._has_images:
            return array("B", self._decode(query.token_ids).encode())
        return array("i", query.token_ids)

    def facts(self) -> Fields:
        from tokenmill.bench.ceiling import accelerator

        built = self._built
        return {
            "model": built.description,
            "dtype": built.dtype,
            "kv_dtype": built.kv_dtype,
            "device": built.device,
            "accelerator": accelerator(built.device),
            "num_input_tokens": sum(len(s.prompt_token_ids) for s in self._samples),
            **self._sample_facts(),
        }

    def text_of(self, data: bytes) -> str:
        return data.decode() if self._has_images else self._decode(loadgen.token_ids(data))

    def count_of(self, text: str, logged: int) -> int:
        if not self._has_images:
            return logged
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def verify(self, folder: Path) -> compliance.Verdict:
        preset, answers = self._run.preset, compliance.read_log(folder)
        if self._mode == "TEST06":
            offline = self._run.scenario == "Offline"
            return compliance.verify_consistency(answers, self._eos_token_ids, offline)
        if self._mode == "TEST09":
            return compliance.verify_output_length(answers, preset.compliance_tokens)
        by_index = loadgen.read_answers(folder)
        rows = [self._rows[index] for index in by_index]
        texts = [self.text_of(data) for data, _ in by_index.values()]
        counts = [count for _, count in by_index.values()]
        scores = scoring.score(preset, rows, texts, counts, None)
        return compliance.verify_score(scores, preset.compliance_score)

    def _decode(self, token_ids: list[int]) -> str:
        """The text of an answer; special tokens tell harmony's channels apart."""
        skip = not self._run.preset.harmony
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip)

    def _synthetic(self, spec: ModelSpec, context: int) -> None:
        run = self._run
        if self._has_images:
            sizes, self._scale = draw_sizes(run, context)
            self._samples = image_samples(run, sizes, spec)
            return
        lengths, self._scale = synthetic_lengths(run, context)
        self._samples = synthetic_samples(run, lengths, spec.vocab_size)

    def _dataset(self, context: int, path: Path) -> None:
        rows, tokenizer = self._read_rows(), self._tokenizer
        if not self._has_images:
            prompts = scoring.prompts(rows, tokenizer.encode, tokenizer.decode)
            self._choose(rows, prompts, context)
            return
        rows = rows[: self._run.quick_samples]
        folder = Path(self._settings.get("dataset")).expanduser().parent
        images = DatasetImages(path, tokenizer, folder, context)
        made = [images.prompt(row, number) for number, row in enumerate(rows)]
        chosen = self._choose(rows, [ids for ids, _ in made], context)
        both = zip(self._samples, chosen, strict=True)
        self._samples = [replace(sample, images=made[i][1]) for sample, i in both]

    def _build(self) -> BuiltEngine:
        samples = self._samples
        lengths = tuple((len(s.prompt_token_ids), s.sampling.max_tokens or 1) for s in samples)
        cell = Cell("mlperf", lengths)
        values = {"max-queue": UNBOUNDED} | self._settings.values  # a sample may come often
        built, _ = throughput.build(Settings(values), BenchConfig(lengths="mlperf"), [cell])
        warmup = cell.warmup()
        prompts = make_prompts(warmup, -1, 0, built.spec.vocab_size)
        OurEngine(built.engine).run(warmup, prompts)
        return built


def renamed(images: tuple[ImageSpan, ...], query: str) -> tuple[ImageSpan, ...]:
    """The same images under names of their own: the rules want every query computed in full."""
    names = (blake2b(f"{query}/{i}".encode(), digest_size=32).digest() for i in range(len(images)))
    return tuple(
        replace(span, image=replace(span.image, content_hash=name))
        for span, name in zip(images, names, strict=True)
    )


def _check(output: RequestOutput) -> None:
    if output.finish_reason not in ENDED_WELL:
        reason = output.error or output.finish_reason
        raise BenchError(f"{output.request_id} was not answered: {reason}")
    if output.num_cached_tokens:
        raise BenchError(
            f"{output.request_id} was answered from the prefix cache, which the rules forbid"
        )


class UrlLanguage(LanguageTask):
    """An OpenAI-compatible server that answers the samples as streams."""

    def __init__(self, settings: Settings, run: MlperfRun, mode: str, folder: Path) -> None:
        super().__init__(settings, run, mode)
        config = settings.build(EndpointConfig, api="completions")
        self._server_hits: float | None = None  # share of the prompt tokens, by its /metrics
        name = config.tokenizer
        path = throughput.model_path(ModelConfig(model=name)) if name else None
        self._tokenizer = _load_tokenizer(path) if path else None
        # The samples say whether an end token ends an answer.
        target = make_target(settings | {"ignore-eos": False}, config)
        context = settings.values.get("max-model-len") or _context(target) or UNBOUNDED
        if "dataset" in settings:
            self._dataset(context)
        else:
            self._synthetic(context)
        fields = self._sampling_fields() | target.fields  # --extra-body wins
        self._target = replace(target, fields=fields, keep_text=mode == "accuracy")
        self._send_ids = self._probe()
        self._scraper = Scraper(metrics_url(target.url), target)
        self._scraper.begin()
        self.num_samples = len(self._samples)
        self.sut = self._server = UrlUnderTest(self._target, self, settings.get("max-in-flight"))

    def body(self, sample: int) -> bytes:
        asked = self._samples[sample]
        content = asked.prompt_token_ids.tolist() if self._send_ids else asked.text
        return request_body(self._target, content, asked.sampling.max_tokens)

    def max_tokens(self, sample: int) -> int | None:
        return self._samples[sample].sampling.max_tokens

    def facts(self) -> Fields:
        tally, facts = self._server.tally, self._sample_facts()
        facts["notices"] += self._notices()
        return {
            "model": self._target.model,
            "api": self._target.api,
            "prompts": "token ids" if self._send_ids else "text",
            "kv_dtype": "as served",
            "num_input_tokens": self._server.num_prompt_tokens,
            "doubts": tally.doubts,
            "num_cached": tally.num_cached,
            "server_prefix_hit_rate": self._server_hits,
            **self._server.facts(self._target.url),
            **facts,
        }

    def failures(self) -> list[str]:
        if readings := self._scraper.end():
            self._server_hits = server_report(readings).prefix_hit_rate
        found = super().failures()
        if self._server.tally.num_cached:
            found.append(f"{self._server.tally.num_cached} answers used {FORBIDDEN_CACHE}")
        elif self._server_hits:
            share = f"{self._server_hits:.1%} of the prompt tokens"
            found.append(f"by the server's /metrics {share} used {FORBIDDEN_CACHE}")
        return found

    def _sampling_fields(self) -> dict[str, float]:
        """What every sample has in common; the extensions only where they may be sent."""
        sampling = self._samples[0].sampling
        fields: dict[str, float] = {"temperature": sampling.temperature}
        if self._settings.values.get("ignore-eos", True):
            # Else those of the model's generation_config.json would hold.
            fields |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "repetition_penalty": 1.0}
            if sampling.ignore_eos:  # the end token must be seen to be counted
                fields |= {"ignore_eos": True, "skip_special_tokens": False}
            elif sampling.min_tokens > 1:
                fields |= {"min_tokens": sampling.min_tokens}
        return fields

    def _synthetic(self, context: int) -> None:
        lengths, self._scale = synthetic_lengths(self._run, context)
        vocab_size = self._tokenizer.vocab_size if self._tokenizer else COMMON_VOCABULARY
        samples = synthetic_samples(self._run, lengths, vocab_size)
        self._samples = [
            replace(sample, text=words("mlperf", number, len(sample.prompt_token_ids)))
            for number, sample in enumerate(samples)
        ]

    def _dataset(self, context: int) -> None:
        """Token ids are only known to be the server's where a tokenizer is given."""
        rows, tokenizer = self._read_rows(), self._tokenizer
        if tokenizer is not None:
            prompts = scoring.prompts(rows, tokenizer.encode, tokenizer.decode)
        else:
            prompts = [[] if row.text is not None else row.token_ids or [] for row in rows]
        self._choose(rows, prompts, context)

        def text_of(row: scoring.DatasetRow) -> str:
            return row.text or (tokenizer.decode(row.token_ids or []) if tokenizer else "")

        both = zip(self._samples, self._rows, strict=True)
        self._samples = [replace(sample, text=text_of(row)) for sample, row in both]

    def _probe(self) -> bool:
        """Whether prompts go as token ids; also the first request, which warms the server up."""
        all_ids = all(sample.prompt_token_ids for sample in self._samples)
        if self._target.api == "completions" and all_ids:
            first = COMMON_VOCABULARY // 2
            record = self._ask_once(list(range(first, first + PROBE_TOKENS)))
            if record.error is None and record.prompt_tokens is not None:
                if 0 <= record.prompt_tokens - PROBE_TOKENS <= SPECIAL_TOKENS:
                    return True
            elif record.error is not None and not record.error.startswith("http_4"):
                self._fail(record)
            console.note("The server does not accept token ids: prompts are sent as text")
        if not all(sample.text for sample in self._samples):
            raise BenchError("the dataset has only token ids, which the server does not accept")
        record = self._ask_once("How do you do?")
        if record.error is not None:
            self._fail(record)
        return False

    def _fail(self, record: LoadRecord) -> None:
        url = self._target.url
        raise BenchError(f"{url} does not answer: {record.error}: {record.detail}")

    def _ask_once(self, content: str | list[int]) -> LoadRecord:
        async def ask() -> LoadRecord:
            client = Client(self._target)
            body = request_body(self._target, content, PROBE_OUTPUT)
            record = await client.call(LoadRecord(0, 0, time.monotonic_ns()), body)
            client.close()
            return record

        return asyncio.run(ask())

    def _notices(self) -> list[str]:
        found = [
            f"The server's usage is in doubt in {entry.count} answers ({entry.first}): they "
            "count with the outputs that came."
            for entry in self._server.tally.doubts.values()
        ]
        if self._server.cpu_share > CLIENT_BUSY:
            share = f"{self._server.cpu_share:.0%} of a core"
            found.append(f"The client took {share}: it, not the server, may be the limit.")
        return found


def _context(target: Endpoint) -> int | None:
    """The longest context that the server names for the model, as vLLM's /models and ours do."""
    try:
        cards = served_models(target)
        found = [c.get("max_model_len") for c in cards if c["id"] == target.model]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found[0] if found and isinstance(found[0], int) else None

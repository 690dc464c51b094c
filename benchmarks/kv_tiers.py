"""TTFT of conversations whose KV the device cannot hold: with KV tiers, and without."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.harness import Benchmark, Report
from benchmarks.kv_loads import Asked, Conversations, Load, trace_load
from tokenmill import console
from tokenmill.bench.commands.throughput import model_path
from tokenmill.bench.results.mooncake import TRACE_BLOCK_TOKENS
from tokenmill.core.config import Setup
from tokenmill.core.flags import count, number, setting
from tokenmill.core.metrics import RequestTimes, summarize
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import SamplingParams, TokenmillError
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import choose_device, resolve_setup
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.memory import KV_BYTES
from tokenmill.kv.tiers.page_copies import PageCopies
from tokenmill.models.checkpoints.weights import read_spec
from tokenmill.settings import CACHE, EXECUTION, MODEL, SCHEDULER, Settings, SettingsError

# Tokens of a turn, of an answer, and users: turns of a GPU are so long that computing them takes
# longer than decoding.
BY_DEVICE = {"cpu": (112, 16, 2), "cuda": (992, 32, 4)}
_COPIED_BYTES = 2**28  # of a copy that is timed
_ROUNDS = 5


def host_bytes(setup: Setup, load: Load) -> int:
    """Host memory that holds all that is asked, and an eighth more for blocks that are not full."""
    spec = read_spec(Path(setup.model.model))
    return load.num_kept_tokens * spec.kv_bytes_per_token(KV_BYTES[setup.cache.dtype]) * 9 // 8


@dataclass(frozen=True)
class Options:
    conversations: int = setting(
        32, "Conversations; of a trace, those that have several turns.", count(1)
    )
    turns: int = setting(4, "Turns of each conversation.", count(1))
    turn_tokens: int | None = setting(
        None, "Tokens that a user adds in a turn (112; on a GPU 992).", count(1)
    )
    answer_tokens: int | None = setting(
        None, "Tokens of each answer, or of a trace's longest (16; on a GPU 32).", count(1)
    )
    users: int | None = setting(None, "Requests in flight at a time (2; on a GPU 4).", count(1))
    working_set: float = setting(
        4.0, "KV of all conversations, as a multiple of the device's.", number(0.1, 1000)
    )
    trace: str | None = setting(
        None, "Mooncake trace whose conversations are replayed: its order, lengths and prefixes."
    )
    trace_scale: float = setting(1.0, "Share of a trace's tokens to replay.", number(1e-3, 1))
    trace_block_tokens: int = setting(TRACE_BLOCK_TOKENS, "Tokens per hash id.", count(1))

    def load(self, device: str) -> Load:
        """The requests: of a trace, or synthetic ones."""
        turn_tokens, answer_tokens, users = BY_DEVICE[device]
        answer_tokens, users = self.answer_tokens or answer_tokens, self.users or users
        if self.trace is None:
            turn_tokens = self.turn_tokens or turn_tokens
            return Conversations(self.conversations, self.turns, turn_tokens, answer_tokens, users)
        if self.turn_tokens:
            raise SettingsError("--turn-tokens: leave it out, the trace has its own")
        sizes = self.trace_block_tokens, self.trace_scale
        return trace_load(self.trace, *sizes, self.conversations, answer_tokens, users)


def run(options: Options, settings: Settings) -> Report:
    """TTFT of conversations that the device cannot hold, with KV tiers and without.

    The KV of all conversations is 4 times the device's (--working-set), and each comes back after
    others have spoken: without tiers its prompt is computed anew. The same requests run three
    times: with --kv-offloading; without it (off); and so that nothing at all is cached (recompute).
    Unless it is given, host memory has room for all. Copies of blocks are measured beside a plain
    copy of as many bytes.

    With --trace the requests are those of the first --conversations of a Mooncake trace that have
    several turns, in the trace's order, and --users of them are in flight at a time.

    python -m benchmarks.kv_tiers --kv-offloading host=64MiB,disk=/var/kv:10GiB
    python -m benchmarks.kv_tiers --trace recipes/conversation-trace.jsonl --trace-scale 0.05
    python -m benchmarks.kv_tiers --model llama3.1-8b --random-weights --device cuda
    """
    asked = settings.setup()
    model = replace(asked.model, model=str(model_path(asked.model)))
    load = options.load(choose_device(model))
    # Graphs are captured for as many requests as there are.
    scheduler = replace(asked.scheduler, max_num_seqs=asked.scheduler.max_num_seqs or load.at_once)
    setup = resolve_setup(replace(asked, model=model, scheduler=scheduler))
    if setup.cache.offloading is None:
        tiers = f"host={host_bytes(setup, load)}"
        setup = resolve_setup(replace(setup, cache=replace(setup.cache, offloading=tiers)))
    return measure(setup, load, options)


def show(report: Report) -> None:
    rows = [["tiers", "TTFT mean", "p99", "prompt tokens", "computed", "seconds"]]
    for name, run in report["runs"].items():
        ttft = f"{run['ttft_ms']['mean']:.0f} ms", f"{run['ttft_ms']['p99']:.0f} ms"
        tokens = f"{run['prompt_tokens']:,}", f"{run['computed_tokens']:,}"
        rows.append([name, *ttft, *tokens, f"{run['seconds']:.1f}"])
    console.print_table(rows)
    console.out.print(
        f"the same answers: {report['same_answers']} of {report['num_requests']}", markup=False
    )


def measure(setup: Setup, load: Load, options: Options) -> Report:
    """One engine after the other on the same requests."""
    assert setup.cache.block_size is not None
    size, num_tokens = setup.cache.block_size, load.num_tokens
    num_blocks = max(1, int(num_tokens / options.working_set) // size)
    if num_blocks * size < load.longest + 1:
        raise TokenmillError(
            f"--working-set {options.working_set:g}: the device would hold {num_blocks * size:,} "
            f"tokens, but the longest request has {load.longest:,}; give more --conversations, or "
            "a smaller --working-set"
        )
    cache = replace(setup.cache, num_blocks=num_blocks)
    console.note(f"{load.words}; the device holds {num_blocks * size:,}")
    without = replace(setup, cache=replace(cache, offloading=None))
    runs, _ = _measure(without, load, ("recompute", "off"))
    tiers, copies = _measure(replace(setup, cache=cache), load, ("on",))
    runs |= tiers
    figures = {name: run.figures() for name, run in runs.items()}
    ttft = {name: found["ttft_ms"]["mean"] for name, found in figures.items()}
    answers = runs["off"].answers
    return {
        "offloading": cache.offloading,
        "device": setup.model.device,
        "device_tokens": num_blocks * size,
        "working_set_tokens": num_tokens,
        "num_requests": load.num_requests,
        "runs": figures,
        "copies": copies,
        "same_answers": sum(answers[name] == said for name, said in runs["on"].answers.items()),
        "ttft_ratio": ttft["on"] / ttft["off"],
        "ttft_to_recompute": ttft["on"] / ttft["recompute"],
        "computed_ratio": figures["on"]["computed_tokens"] / figures["off"]["computed_tokens"],
    }


def _measure(
    setup: Setup, load: Load, names: tuple[str, ...]
) -> tuple[dict[str, _Run], dict[str, float]]:
    """Build an engine and ask it; its memory is free for the next one."""
    begin = time.monotonic()
    built = build_engine(setup)
    console.note(f"tiers {names[-1]}: the engine started in {time.monotonic() - begin:.1f} s")
    runs = {name: _Run(_engine(built), name == "recompute") for name in names}
    for run in runs.values():
        run.ask_all(load, built.spec.vocab_size)
    copies = {} if setup.cache.offloading is None else _copy_rates(built)
    built.close()
    del built
    gc.collect()
    if setup.model.device == "cuda":
        torch.cuda.empty_cache()
    return runs, copies


def _engine(built: BuiltEngine) -> LanguageEngine:
    assert isinstance(built.engine, LanguageEngine), "tiers need an engine of one rank"
    return built.engine


class _Run:
    """All requests of a load, asked so many at a time; `apart`: none finds another's KV."""

    def __init__(self, engine: LanguageEngine, apart: bool) -> None:
        self._engine, self._apart = engine, apart
        self._live: dict[str, RequestTimes] = {}
        self._times: list[RequestTimes] = []
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._seconds = 0.0
        self._tiers: dict[str, float] = {}
        self.answers: dict[str, list[int]] = {}  # by request

    def ask_all(self, load: Load, vocab_size: int) -> None:
        play, begin = load.play(vocab_size), time.monotonic()
        while play.num_left or self._live:
            while len(self._live) < load.at_once and (asked := play.take()) is not None:
                self._ask(asked)
            for output in self._engine.step():
                if self._take(output):
                    play.answered(output.request_id, self.answers[output.request_id])
        self._seconds = time.monotonic() - begin
        self._tiers = self._engine.stats().tiers
        console.note(str(self.figures()))

    def _ask(self, asked: Asked) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=asked.answer_tokens, ignore_eos=True)
        now_ns, salt = time.monotonic_ns(), asked.name if self._apart else ""
        self._live[asked.name] = RequestTimes(now_ns)
        self.answers[asked.name] = []
        self._num_prompt_tokens += len(asked.prompt)
        self._engine.submit(
            Request(
                asked.name, Generate(asked.prompt, sampling, cache_salt=salt), arrival_ns=now_ns
            )
        )

    def _take(self, output: RequestOutput) -> bool:
        """Note what a request produced; True if it has ended."""
        if output.error:
            raise TokenmillError(output.error)
        if output.token_ids:
            self._live[output.request_id].record(time.monotonic_ns(), len(output.token_ids))
            self.answers[output.request_id] += output.token_ids
        if output.finish_reason is None:
            return False
        self._num_cached_tokens += output.num_cached_tokens
        self._times.append(self._live.pop(output.request_id))
        return True

    def figures(self) -> Report:
        return {
            "ttft_ms": summarize([times.ttft_ms for times in self._times], 2),
            "prompt_tokens": self._num_prompt_tokens,
            "computed_tokens": self._num_prompt_tokens - self._num_cached_tokens,
            "seconds": round(self._seconds, 2),
            "tiers": {name: round(value, 4) for name, value in self._tiers.items()},
        }


def _copy_rates(built: BuiltEngine) -> dict[str, float]:
    """GB/s of blocks to host memory and back, beside a plain copy of as many bytes."""
    tiers = _engine(built).tiers
    assert tiers is not None
    tiers.flush()  # what is measured overwrites slots
    copies = tiers.copies
    count = max(1, min(built.num_blocks, len(copies.host), _COPIED_BYTES // copies.host.shape[1]))
    ids, rates = list(range(count)), {"save_gb_s": 0.0, "load_gb_s": 0.0, "plain_gb_s": 0.0}
    num_bytes, on_gpu = count * copies.host.shape[1], built.device == "cuda"
    for _ in range(_ROUNDS):
        for name, seconds in zip(rates, _timed(copies, ids, num_bytes, on_gpu), strict=True):
            rates[name] = max(rates[name], num_bytes / seconds / 1e9)
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()} | {"bytes": num_bytes}


def _timed(copies: PageCopies, ids: list[int], num_bytes: int, on_gpu: bool) -> list[float]:
    """Seconds of a save, a load and a plain copy."""
    plain = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    target = torch.empty_like(plain, device="cuda" if on_gpu else "cpu", pin_memory=False)
    marks = [time.perf_counter()]
    copies.save(ids, ids)
    copies.settle()
    marks.append(time.perf_counter())
    read = copies.load(ids, ids)
    while not read.done():
        time.sleep(0)
    marks.append(time.perf_counter())
    target.copy_(plain, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    marks.append(time.perf_counter())
    return [after - before for before, after in pairwise(marks)]


ENGINE = (*MODEL, *CACHE, *SCHEDULER, *EXECUTION)
BENCHMARK = Benchmark("kv_tiers", Options, run, show, ENGINE)

if __name__ == "__main__":
    BENCHMARK.main()

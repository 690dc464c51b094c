"""Structured output beside free text on a GPU: tokens per second by how many rows are constrained.

    python scripts/masked_steps.py

A batch of --rows decodes with random weights of --shape, cut to --layers, while none, one, some and
all of its rows follow a grammar, each time twice: with masks applied on the device and steps that
overlap, and as it was before: logits of a constrained batch go to the host in fp32, steps run one
after the other. The grammar is a table of masks, so that its own cost is left out. Beside each rate
stand its share of the rate without constrained rows, the bytes that a step sends to the host, and
the ceiling: what memory and tensor cores need for a step at --bandwidth and --flops. The last line
is one JSON object. Less than a minute on an H200.

`--tiny` runs all of it on a CPU with a tiny model; there both ways sample by numpy.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tokenmill.bench
from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.types import Request, SamplingParams, StructuredOutput
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.sampling.device_sampler import Sampled
from tokenmill.engine.sampling.grammar_pool import GrammarPool
from tokenmill.engine.sampling.sampler import Bitmask, SampledRow, grammar_masks
from tokenmill.engine.sampling.structured import StructuredOutputs
from tokenmill.sched.sequence import Sequence

SHAPES = Path(tokenmill.bench.__path__[0]) / "shapes"
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 2000,
}  # fmt: skip
PERIOD = 7
ANY = StructuredOutput("json_object")  # what constrains is the table


class Cycle:
    """In the place of a GrammarPool: a token's id modulo PERIOD follows that of the last one."""

    def __init__(self, vocab_size: int) -> None:
        ids, size = np.arange(vocab_size + -vocab_size % 32), vocab_size
        self.masks: list[Bitmask] = [
            np.packbits((ids % PERIOD == k) & (ids < size), bitorder="little").view(np.int32)
            for k in range(PERIOD)
        ]

    def open(self, structured: StructuredOutput, account: str) -> CycleRow:
        return CycleRow(self.masks)

    def close(self, row: CycleRow) -> None:
        """Nothing is kept of it."""

    def poll(self, timeout_s: float = 0.0) -> None:
        """All is known."""

    def wait(self, rows: list[CycleRow], runs: object = None) -> None:
        """All is known."""


class CycleRow:
    """In the place of a GrammarRow, without a process."""

    pending, error = False, None
    process = SimpleNamespace(is_ready=True, end=None)

    def __init__(self, masks: list[Bitmask]) -> None:
        self._masks = masks

    def ask(self, seq: Sequence, drafts: list[int]) -> bool:
        return False

    def masks(self, seq: Sequence, drafts: list[int]) -> list[Bitmask | None]:
        """The masks after its tokens and drafts, up to the first forbidden one."""
        last = seq.token_ids[-1]
        assert last >= 0, "a mask is asked for after a token that is not known"
        found: list[Bitmask | None] = [self._masks[(last + 1) % PERIOD]]
        for draft in drafts:
            if draft % PERIOD != (last + 1) % PERIOD:
                break
            last = draft
            found.append(self._masks[(last + 1) % PERIOD])
        return found


def follows(prompt: list[int], token_ids: list[int]) -> bool:
    """Whether an answer is one that the grammar allows."""
    known = [prompt[-1], *token_ids]
    return all((b - a) % PERIOD == 1 for a, b in zip(known, token_ids, strict=False))


def add_cycle(engine: LanguageEngine, vocab_size: int) -> None:
    """Let structured requests follow the table from now on."""
    engine._structured = StructuredOutputs(cast("GrammarPool", Cycle(vocab_size)))


class HostBytes(TorchDispatchMode):
    """Counts what operations of torch copy from the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy") and isinstance(out, torch.Tensor):
            source = args[1] if name == "copy_" else args[0]
            if source.is_cuda and not out.is_cuda:
                self.num_bytes += out.nbytes
        return out


@contextmanager
def host_way(built: BuiltEngine) -> Iterator[None]:
    """As it was: one step after the other, and a batch with masks is sampled from host logits."""
    engine, sampler = built.engine, built.runner.sampler
    assert isinstance(engine, LanguageEngine)
    launcher, engine._launcher, sample = engine._launcher, None, sampler._sample

    def by_host(device: Any, rows: list[SampledRow], logits: torch.Tensor, newest: Any) -> Sampled:
        masks = grammar_masks(rows)
        if all(mask is None for mask in masks):
            return sample(device, rows, logits, newest)
        tokens, known = sampler.host(logits.float(), rows, masks)
        ids = torch.tensor(tokens, dtype=torch.int32).to(logits.device)
        return Sampled(ids, known=known)

    sampler._sample = by_host  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine._launcher = launcher
        del sampler._sample


def requests(num: int, constrained: int, max_tokens: int, vocab_size: int) -> list[Request]:
    """Prompts of 16 tokens; those that are constrained are spread over the batch."""
    source, found = random.Random(0), []
    for index in range(num):
        bound = index * constrained // num != (index + 1) * constrained // num
        prompt = [source.randrange(vocab_size) for _ in range(16)]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=not bound,
            structured=ANY if bound else None,
        )  # fmt: skip
        found.append(Request(str(index), prompt, sampling, arrival_ns=index))
    return found


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a batch did once all of its rows had begun."""

    num_steps: int
    num_tokens: int
    seconds: float
    answers: dict[str, list[int]]  # by request, whole


def decode(engine: LanguageEngine, asked: list[Request]) -> Decoded:
    answers: dict[str, list[int]] = {request.request_id: [] for request in asked}
    for request in asked:
        engine.submit(request)
    began = seconds = 0.0
    num_steps = num_tokens = 0
    while engine.has_work():
        outputs = engine.step()
        for output in outputs:
            assert output.error is None, output.error
            answers[output.request_id] += output.token_ids
        if began:
            num_steps += 1
            num_tokens += sum(len(output.token_ids) for output in outputs)
            seconds = time.perf_counter() - began
        elif all(answers.values()):
            began = time.perf_counter()
    for request in asked:
        if request.sampling.structured is not None:
            assert follows(request.prompt_token_ids, answers[request.request_id])
    return Decoded(num_steps, num_tokens, seconds, answers)


def build(options: argparse.Namespace, folder: str) -> BuiltEngine:
    config = json.loads((SHAPES / f"{options.shape}.json").read_text())
    config |= {"num_hidden_layers": options.layers} | (TINY if options.tiny else {})
    (Path(folder) / "config.json").write_text(json.dumps(config))
    device: Any = "cpu" if options.tiny else "cuda"
    model = ModelConfig(
        folder, "fp32" if options.tiny else "bf16", device, random_weights=True, max_model_len=1024
    )
    cache = CacheConfig(memory_bytes=(64 if options.tiny else 8192) << 20, prefix_cache=False)
    limits = SchedulerConfig(max_num_seqs=options.rows, max_num_batched_tokens=8192)
    setup = Setup(model, cache, limits, ExecutionConfig(overlap=True))
    built = build_engine(resolve_setup(setup))
    assert isinstance(built.engine, LanguageEngine)
    add_cycle(built.engine, built.runner.model.spec.vocab_size)
    return built


def measure(built: BuiltEngine, rows: int, constrained: int, num_tokens: int) -> dict[str, Any]:
    """The rate of decoding, and what a step sends to the host."""
    engine, vocab_size = built.engine, built.runner.model.spec.vocab_size
    assert isinstance(engine, LanguageEngine)
    few, many = (requests(rows, constrained, n, vocab_size) for n in (6, num_tokens))
    decode(engine, few)  # kernels are loaded, and the allocator has what it needs
    timed = decode(engine, many)
    before = engine.stats().num_steps
    with HostBytes() as counted:
        decode(engine, few)
    return {
        "constrained": constrained,
        "tok_s": round(timed.num_tokens / timed.seconds),
        "step_ms": round(1e3 * timed.seconds / timed.num_steps, 2),
        "host_bytes_per_step": round(counted.num_bytes / (engine.stats().num_steps - before)),
    }


def ceiling_s(built: BuiltEngine, options: argparse.Namespace) -> float:
    """The least time of a step: weights and KV are read once, all rows are multiplied."""
    spec, context = built.runner.model.spec, 16 + options.tokens // 2
    read = spec.weight_bytes() - 2 * spec.vocab_size * spec.hidden_size  # few rows are embedded
    read += options.rows * context * spec.kv_bytes_per_token()
    flops = options.rows * spec.flops_per_token(context)
    return float(max(read / options.bandwidth, flops / options.flops))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="llama3.1-8b", help="of bench/shapes")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer; by the host 12")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes/s of the memory")
    parser.add_argument("--flops", type=float, default=9.89e14, help="bf16 products, twice each")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    options = parser.parse_args()
    if options.tiny:
        options.rows, options.layers, options.tokens = min(options.rows, 16), 2, 16
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        built = build(options, folder)
    started_s = round(time.perf_counter() - began, 1)
    print(json.dumps({"started_s": started_s}), flush=True)
    ceiling = options.rows / ceiling_s(built, options)
    found: list[dict[str, Any]] = []
    for way in ("device", "host"):
        for constrained in sorted({0, 1, options.rows // 16, options.rows}):
            tokens = options.tokens if way == "device" else min(options.tokens, 12)
            with host_way(built) if way == "host" else nullcontext():
                row = {"way": way} | measure(built, options.rows, constrained, tokens)
            free = found[0]["tok_s"] if found else row["tok_s"]
            row |= {"of_free": round(row["tok_s"] / free, 3)}
            row |= {"ceiling_tok_s": round(ceiling), "of_ceiling": round(row["tok_s"] / ceiling, 3)}
            print(json.dumps(row), flush=True)
            found.append(row)
    device = "cpu" if options.tiny else torch.cuda.get_device_name()
    shape = f"{options.shape}, {options.layers} layers"
    print(
        json.dumps(
            {"device": device, "shape": shape, "rows": options.rows, "started_s": started_s}
            | {"seconds": round(time.perf_counter() - began, 1), "steps": found}
        )
    )


if __name__ == "__main__":
    main()

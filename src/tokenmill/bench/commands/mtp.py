"""tokenmill bench mtp: the share of accepted drafts, and the speed-up that they bring.

One engine answers the same chat prompts without drafts and with each number of drafts, in turns, so
that drift of the machine affects all of them alike. The greedy answers must be the same.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.commands.throughput import model_path
from tokenmill.bench.options import BenchConfig, MtpOptions
from tokenmill.bench.workload import BenchError
from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.metrics import Acceptance, acceptance
from tokenmill.core.types import SamplingParams
from tokenmill.settings import CACHE, EXECUTION, MODEL, Settings, only, without
from tokenmill.settings.shared import JsonOption

if TYPE_CHECKING:
    from tokenmill.core.requests import Engine

DEPTHS = (1, 2, 3)
DEFAULT_TOKENS = 128
OURS = ("mtp", "prefix-cache")  # what the benchmark itself decides
PANELS = {
    "Benchmark": (
        MtpOptions,
        *only(BenchConfig, "num-prompts", "output-len", "rounds"),
        JsonOption,
    ),
    "Model": MODEL,
    "KV cache": without(CACHE, *OURS),
    "Execution": without(EXECUTION, *OURS),
}
PROMPTS = Path(__file__).parent.parent / "prompts"
Prompts = Sequence[list[int]]
SetDepth = Callable[[int], None]
Update = Callable[[int, int], None]


def mtp(settings: Settings) -> None:
    """Share of accepted drafts, and the speed-up over no drafts.

    Prompts of this package, greedy answers of at most 128 tokens, without drafts and
    with 1, 2 and 3 of them, turn by turn. The ceiling is the speed-up if every
    draft were right, at the measured cost of a step. With several sets of prompts
    the shares are also those of each set.

    tokenmill bench mtp
    tokenmill bench mtp --depths 2 --batch 8 --rounds 5
    tokenmill bench mtp --draft head.safetensors --num-prompts 8
    tokenmill bench mtp --prompt-kind chat,everyday --depths 2
    tokenmill bench mtp --draft ngram --prompt-kind documents --depths 4,8
    """
    from tokenmill.engine.drafts.drafting import FixedDrafting

    config = settings.build(BenchConfig)
    depths, batch = sorted(set(settings.get("depths") or DEPTHS)), settings.get("batch")
    max_tokens = config.output_len or DEFAULT_TOKENS
    model = settings.build(ModelConfig)
    path = model_path(model)
    kinds = settings.get("prompt-kind")
    prompts = {kind: _prompts(path, kind, config.num_prompts) for kind in kinds}
    model = replace(model, model=str(path))
    built = _build(settings, model, depths[-1], batch)
    longest = max(len(prompt) for own in prompts.values() for prompt in own) + max_tokens
    if longest > built.max_model_len:
        raise BenchError(
            f"--output-len {max_tokens} needs {longest} tokens, "
            f"but the model's context is {built.max_model_len}"
        )

    def set_depth(depth: int) -> None:
        built.engine.drafting = FixedDrafting(depth)

    sets: dict[str, Runs] = {}
    for kind, own in prompts.items():
        with console.progress(f"Benchmark runs, {kind} prompts") as update:
            sets[kind] = measure(
                built.engine, set_depth, own, depths, config.num_rounds, batch, max_tokens, update
            )
    by_depth = depth_report(together(list(sets.values())))
    shares = {kind: set_shares(runs) for kind, runs in sets.items()}
    drafting = {depth: by_depth[depth] for depth in map(str, depths)}
    best = max(drafting, key=lambda depth: drafting[depth]["speedup"])
    if not settings.get("json"):
        _print(by_depth, batch, built.device)
        if len(kinds) > 1:
            _print_shares(shares)
    console.print_json(
        {
            "benchmark": "mtp",
            "model": model.model if settings.get("model") is None else settings.get("model"),
            "device": built.device,
            "dtype": built.dtype,
            "draft": model.draft,
            "batch": batch,
            "prompts": ",".join(kinds),
            "num_prompts": sum(map(len, prompts.values())),
            "max_tokens": max_tokens,
            "rounds": config.num_rounds,
            "depths": by_depth,
            "best_depth": int(best),
            "acceptance": drafting[best]["acceptance"],
            "speedup": drafting[best]["speedup"],
            "sets": shares,
            "identical": all(not figures["num_different"] for figures in drafting.values()),
        }
    )


def _prompts(path: Path, kind: str, count: int | None) -> list[list[int]]:
    """Token ids of the first prompts; those of the default model need no tokenizer."""
    from tokenmill.models.checkpoints.store import CATALOG

    known = read_prompts(kind)
    if count is not None and count > len(known):
        raise BenchError(
            f"--num-prompts {count}: there are {len(known)} {kind} prompts; "
            f"give {len(known)} or fewer"
        )
    known = known[:count]
    if path.name == CATALOG["smollm2"].file_name:
        return [prompt.token_ids for prompt in known]
    from tokenmill.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    return [tokenizer.encode_chat(prompt.messages) for prompt in known]


def _build(settings: Settings, model: ModelConfig, depth: int, batch: int) -> Any:
    """An engine that can draft, with room for the batch."""
    with (
        console.progress("Loading weights", size_in_bytes=True) as loaded,
        console.progress("Capturing CUDA graphs") as captured,
    ):
        from tokenmill.engine.build import build_engine
        from tokenmill.engine.choices import resolve_setup

        setup = Setup(
            model,
            settings.build(CacheConfig, prefix_cache=False),
            SchedulerConfig(max_num_seqs=batch),
            settings.build(ExecutionConfig, mtp=depth, mtp_adaptive=False),
        )
        return build_engine(resolve_setup(setup), progress=loaded, capture_progress=captured)


def _print(by_depth: dict[str, Any], batch: int, device: str) -> None:
    console.out.print(f"[bold]Multi-token prediction on {device}, batch {batch}[/bold]")
    head = ["drafts", "tok/s", "speed-up", "ceiling", "step ms", "first right", "tokens/step"]
    rows = [head]
    for depth, figures in by_depth.items():
        share = figures.get("acceptance", {})
        cells = [
            _shown(figures.get("speedup"), "{:.2f}x"),
            _shown(figures.get("ceiling_speedup"), "{:.2f}x"),
            _shown(figures["step_ms"], "{:.2f}"),
            _shown(share.get("first"), "{:.1%}"),
            _shown(share.get("length"), "{:.2f}"),
        ]
        rows.append([depth, _shown(figures["tok_s"], "{:,.1f}"), *cells])
    console.print_table(rows)
    for depth, figures in by_depth.items():
        if figures.get("num_different"):
            console.out.print(
                f"{figures['num_different']} answers with {depth} drafts differ from those without"
            )


def _print_shares(sets: dict[str, dict[str, Acceptance]]) -> None:
    rows = [["prompts", "drafts", "first right", "tokens/step"]]
    for kind, by_depth in sets.items():
        for depth, share in by_depth.items():
            cells = _shown(share["first"], "{:.1%}"), _shown(share["length"], "{:.2f}")
            rows.append([kind, depth, *cells])
    console.print_table(rows)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a user asks, perhaps after an earlier question and its answer.

    The tokens are those of the default model, chat template and all.
    """

    text: str
    token_ids: list[int]
    earlier: tuple[str, ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        texts = *self.earlier, self.text
        roles = itertools.cycle(("user", "assistant"))
        return [{"role": role, "content": text} for text, role in zip(texts, roles, strict=False)]


@dataclass(slots=True)
class DepthRun:
    """All prompts once, with one number of drafts."""

    seconds: float
    num_steps: int
    answers: list[list[int]]
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer) for answer in self.answers)

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds


Runs = dict[int, list[DepthRun]]  # by number of drafts


def read_prompts(kind: str = "chat") -> list[ChatPrompt]:
    """The prompts of this package; nothing was trained on them."""
    entries = json.loads((PROMPTS / f"{kind}.json").read_text(encoding="utf-8"))
    return [
        ChatPrompt(entry["text"], entry["token_ids"], tuple(entry.get("earlier", ())))
        for entry in entries
    ]


def measure(
    engine: Engine,
    set_depth: SetDepth,
    prompts: Prompts,
    depths: Sequence[int],
    rounds: int,
    batch: int,
    max_tokens: int,
    progress: Update = lambda done, total: None,
) -> Runs:
    """Runs by number of drafts, 0 among them, after a warm-up of each."""
    order = [0, *depths]
    runs: dict[int, list[DepthRun]] = {depth: [] for depth in order}
    total, done = len(order) * (rounds + 1), 0
    for turn in range(-1, rounds):
        for depth in order:
            set_depth(depth)
            asked = prompts[:batch] if turn < 0 else prompts
            run = _run(engine, asked, batch, 16 if turn < 0 else max_tokens)
            if turn >= 0:
                runs[depth].append(run)
            done += 1
            progress(done, total)
    return runs


def _run(engine: Engine, prompts: Prompts, batch: int, max_tokens: int) -> DepthRun:
    before = engine.stats()
    answers: list[list[int]] = [[] for _ in prompts]
    begin = time.perf_counter()
    for first in range(0, len(prompts), batch):
        _answer(engine, prompts[first : first + batch], answers[first : first + batch], max_tokens)
    seconds = time.perf_counter() - begin
    after = engine.stats()
    return DepthRun(
        seconds,
        after.num_steps - before.num_steps,
        answers,
        _difference(after.num_drafted, before.num_drafted),
        _difference(after.num_accepted, before.num_accepted),
    )


def _answer(engine: Engine, prompts: Prompts, answers: list[list[int]], max_tokens: int) -> None:
    """Run a batch to its end; each answer's list gets its tokens."""
    from tokenmill.core.requests import Generate, Request

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for index, prompt in enumerate(prompts):
        engine.submit(
            Request(str(index), Generate(prompt, sampling), arrival_ns=time.monotonic_ns())
        )
    while engine.has_work():
        for output in engine.step():
            answers[int(output.request_id)].extend(output.token_ids)
            if output.error is not None:
                raise BenchError(f"prompt {output.request_id} did not run: {output.error}")


def _difference(after: Sequence[int], before: Sequence[int]) -> list[int]:
    known = [*before, *[0] * (len(after) - len(before))]
    counts = [a - b for a, b in zip(after, known, strict=True)]
    while counts and not counts[-1]:
        counts.pop()
    return counts


def together(sets: Sequence[Runs]) -> Runs:
    """The runs of several sets of prompts as if they were one set."""
    return {
        depth: [_joined(turns) for turns in zip(*(runs[depth] for runs in sets), strict=True)]
        for depth in sets[0]
    }


def _joined(runs: Sequence[DepthRun]) -> DepthRun:
    return DepthRun(
        sum(run.seconds for run in runs),
        sum(run.num_steps for run in runs),
        [answer for run in runs for answer in run.answers],
        _total(run.drafted for run in runs),
        _total(run.accepted for run in runs),
    )


def set_shares(runs: Runs) -> dict[str, Acceptance]:
    """The share of accepted drafts by number of drafts."""
    return {str(depth): _share(own) for depth, own in runs.items() if depth}


def _share(runs: Sequence[DepthRun]) -> Acceptance:
    counts, right = _total(run.drafted for run in runs), _total(run.accepted for run in runs)
    return acceptance(counts, right + [0] * (len(counts) - len(right)))


def depth_report(runs: Runs) -> dict[str, Any]:
    """Figures of each number of drafts; speed-ups are the median over the rounds."""
    plain = runs[0]
    report: dict[str, Any] = {"0": _figures(plain)}
    for depth in (depth for depth in runs if depth):
        own = runs[depth]
        ratios = [b.tok_s / a.tok_s for a, b in zip(plain, own, strict=True)]
        cost = _step_seconds(own) / _step_seconds(plain)
        report[str(depth)] = _figures(own) | {
            "acceptance": _share(own),
            "speedup": round(statistics.median(ratios), 4),
            "speedup_runs": [round(ratio, 4) for ratio in ratios],
            "step_cost": round(cost, 4),
            "ceiling_speedup": round((1 + depth) / cost, 4),
            "num_different": sum(
                any(answer != plain[0].answers[index] for answer in answers)
                for index, answers in enumerate(zip(*(run.answers for run in own), strict=True))
            ),
        }
    return report


def _total(counts: Iterable[list[int]]) -> list[int]:
    """Sums by position; a round may know fewer of them."""
    return [sum(column) for column in itertools.zip_longest(*counts, fillvalue=0)]


def _figures(runs: Sequence[DepthRun]) -> dict[str, Any]:
    seconds = statistics.median(run.seconds for run in runs)
    return {
        "tok_s": round(runs[0].num_tokens / seconds, 2),
        "seconds": round(seconds, 4),
        "num_tokens": runs[0].num_tokens,
        "num_steps": runs[0].num_steps,
        "step_ms": round(1e3 * _step_seconds(runs), 4),
    }


def _step_seconds(runs: Sequence[DepthRun]) -> float:
    return statistics.median(run.seconds / run.num_steps for run in runs)


COMMANDS = (BenchCommand("mtp", mtp, PANELS),)

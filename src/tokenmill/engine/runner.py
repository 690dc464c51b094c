"""Runs the batches of one model: each goes to the first executor that takes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from tokenmill.core.kv_groups import NONE_SLIDE, Sliding
from tokenmill.core.types import OutOfMemory, StepResult
from tokenmill.engine.drafts.proposer import Drafter, Proposer
from tokenmill.engine.executors import (
    DecodeExecutor,
    DraftExecutor,
    Executor,
    PlainExecutor,
    PromptExecutor,
    SplitExecutor,
)
from tokenmill.engine.graphs.capture import (
    CaptureJob,
    CaptureLimits,
    CaptureReport,
    Progress,
    capture_all,
)
from tokenmill.engine.graphs.decode_graphs import DecodeGraphs
from tokenmill.engine.graphs.draft_graphs import DraftGraphs
from tokenmill.engine.graphs.piecewise_graphs import (
    LEAST_TOKENS,
    PiecewiseGraphs,
    most_tokens,
    piecewise_sizes,
)
from tokenmill.engine.graphs.prompt_graphs import PromptGraphs
from tokenmill.engine.images import ImageSource, SharedImages, StepImages
from tokenmill.engine.inputs import InputBuilder
from tokenmill.engine.launched import LaunchedStep
from tokenmill.engine.model import KVCache, Model
from tokenmill.engine.ranks.step_leader import StepLeader
from tokenmill.engine.sampling.step_sampler import StepSampler
from tokenmill.engine.warm_up import FEW, Step, blank_image, image_batches, warm_up_batch
from tokenmill.kernels.attention import takes_full_tiles
from tokenmill.kernels.pages import most_pages
from tokenmill.kernels.product_trials import trials
from tokenmill.parallel import all_or_none
from tokenmill.sched.sequence import Batch

# Steps that decode beside a prompt, timed after the capture: sequences, tokens, and how often.
TIMED_DECODING, TIMED_PROMPT, TIMED_RUNS = (8, 32, 128, 512), 128, 4
SPLIT_SHARE = 0.9  # of the time of one step that its parts may take


class ModelRunner:
    """Runs batches of one model over its paged KV cache, in the order they are launched."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        block_size: int,
        num_slots: int = 512,
        max_model_len: int | None = None,
        mtp: Drafter | None = None,
        sliding: Sliding = NONE_SLIDE,
    ) -> None:
        """With an MTP module the cache's last layer is the module's, its last block nobody's."""
        spec = model.spec
        self.model, self.kv_cache, self.block_size = model, kv_cache, block_size
        self.layers = kv_cache[: spec.num_layers]  # without those that draft
        self.builder = InputBuilder(
            block_size,
            (spec.num_heads, spec.num_kv_heads),
            num_slots,
            max_model_len or spec.max_position,
            kv_cache[0][0].shape[0] - 1,
            kv_cache[0][0].device,
            sliding.num_groups,
            spec.vision,
            takes_full_tiles(kv_cache[0][1]),
            most_pages(kv_cache[0][1]),
        )
        self.images, self.sliding = None, sliding
        if spec.vision is not None and model.layout.samples:
            assert model.visual is not None
            self.images = StepImages(model.visual, spec.vision, self.builder.staging)
        source: ImageSource | None = self.images
        self._ranks = ranks = model.layout.token_ranks
        if spec.vision is not None and ranks.size > 1:
            source = SharedImages(self.images, model)
        self.leader: StepLeader | None = None  # tells other ranks what this one does
        drafted = None if mtp is None else Proposer(mtp, kv_cache[-1], self.builder, ranks)
        self.proposer, self.sampler = drafted, (sampler := StepSampler(self.builder, ranks))
        self.drafts = DraftExecutor(self.proposer, sampler)
        self.decode = DecodeExecutor(self.builder, self.proposer, sampler)
        self.prompts = PromptExecutor(self.builder, self.proposer, sampler)
        self.plain = PlainExecutor(model, self.layers, self.builder, self.proposer, sampler, source)
        self.split = SplitExecutor(self.drafts, self.decode, self.prompts)
        # The first that takes a batch executes it.
        self._by_graph: tuple[Executor, ...] = (
            self.split, self.drafts, self.decode, self.prompts
        )  # fmt: skip

    def warm_up(self, steps: list[Step] = FEW, sampling: bool = False) -> None:
        """Compile and load every kernel before the first request waits for them.

        With `sampling` whatever else than the best token may be asked for, too.
        """
        if sampling and self.sampler.on_gpu:
            shape = (1, self.model.spec.vocab_size)
            self.sampler.device.warm_up(torch.zeros(shape, dtype=torch.bfloat16, device="cuda"))
        if self.builder.device.type == "cuda":
            self.warm_up_images()
        to_draft = 2 if self.proposer is not None else 0
        for step in steps:
            self.run(warm_up_batch(step, self.block_size, to_draft))

    @torch.inference_mode()
    def warm_up_images(self) -> None:
        """Do the same for images, where the model takes them: encode some, and a prompt of one."""
        if self.images is None:
            return
        vision, merge = self.images.vision, self.images.vision.merge_size
        image = blank_image((1, 4 * merge, 4 * merge), vision)
        self.images.encode.warm_up()
        for batch in image_batches(image, self.block_size, merge):
            self.run(batch)
        self.images.forget([image.content_hash])

    @torch.inference_mode()
    def capture(
        self,
        max_size: int,
        limits: CaptureLimits,
        progress: Progress | None = None,
        depth: int = 0,
        budget: int = 0,
        with_trials: bool = True,
    ) -> CaptureReport:
        """Capture decode graphs up to max_size sequences, short prompts, and up to `depth` drafts.

        The pieces of other steps of up to `budget` tokens, too, unless a head reads what is between
        layers, and small groups of images. The cache's last block is padding. All graphs share one
        pool of memory. Ranks whose tokens differ meet once in each step, which runs in pieces
        alone; those with the same tokens capture the same graphs, as many as fit on all.
        `with_trials`: products that can be computed in two ways are tried both ways.
        """
        pool, own_tokens = torch.cuda.graph_pool_handle(), self.model.layout.own_tokens
        decode = DecodeGraphs(self.model, self.layers, self.builder, max_size)
        jobs: list[CaptureJob] = []
        if not own_tokens:
            jobs = decode.jobs(pool)
            self.add_prompt_graphs(depth)
            self.add_draft_graphs(max_size, depth)
            for graphs in (self.prompts.graphs, *self.drafts.graphs.values()):
                jobs += [] if graphs is None else graphs.jobs(pool)
        if budget and not self.model.read_layers:
            least = 1 if own_tokens else LEAST_TOKENS
            most = most_tokens(self.model.spec, budget)
            self.add_piecewise_graphs(piecewise_sizes(most, least))
        pieces = self.plain.graphs
        jobs += [] if pieces is None else pieces.jobs(pool)
        encoder = None
        if self.images is not None and self.model.layout.ranks.size == 1:
            encoder = self.images.encode.add_graphs()
            jobs += encoder.jobs(pool)
        with trials(with_trials):  # each size runs once before its capture
            report = capture_all(jobs, limits, progress, on_any_rank=self._on_any_rank)
        torch.cuda.empty_cache()  # what the warm-up left, and runs before captures have used
        if not own_tokens:
            decode.start(report)
            self.decode.graphs = decode
        if pieces is not None:
            report.piecewise_tokens = pieces.start()
        if encoder is not None:
            encoder.start()
        return report

    def _on_any_rank(self, flag: bool) -> bool:
        return self._ranks.any(flag, self.builder.device)

    def split_short_prompts(self, max_size: int, budget: int) -> None:
        """Run short prompts beside decoding by graphs of their own, where that is quicker."""
        self.split.most_prompts = found = self._time_short_prompts(max_size, budget)
        if self.leader is not None:
            self.leader.tell_short_prompts(found)

    def _time_short_prompts(self, max_size: int, budget: int) -> dict[int, int]:
        """How many prompts are quicker by graphs of their own, by sequences that decode."""
        found: dict[int, int] = {}
        prompt = min(TIMED_PROMPT, self.builder.max_len)
        sizes = [size for size in TIMED_DECODING if size <= min(max_size, budget - prompt)]
        prompt_s = self._seconds([prompt]) if sizes else 0.0
        for size in sizes:
            decode_s, mixed_s = (self._seconds([1] * size + more) for more in ([], [prompt]))
            most = int((SPLIT_SHARE * mixed_s - decode_s) / prompt_s)
            if most <= 0:
                break
            found[size] = most
        return found

    def _seconds(self, step: Step) -> float:
        """The least that a step takes by itself, of a few; what it writes belongs to nobody."""
        found = []
        for _ in range(TIMED_RUNS):
            begin = time.perf_counter()
            self.run(warm_up_batch(step, self.block_size))
            found.append(time.perf_counter() - begin)
        return min(found)

    def add_prompt_graphs(self, depth: int) -> None:
        """Run the last tokens of a prompt that is alone in its step in shapes of their own."""
        self.prompts.graphs = PromptGraphs(
            self.model, self.layers, self.builder, self.proposer, depth
        )

    def add_piecewise_graphs(self, sizes: list[int]) -> None:
        """Pad steps that nothing else takes to these numbers of tokens."""
        groups, max_len = self.sliding.num_groups, self.builder.max_len
        self.plain.graphs = PiecewiseGraphs(self.model, self.layers, sizes, groups, max_len)

    def add_draft_graphs(self, max_size: int, depth: int) -> None:
        """Run steps of 1 to `depth` drafts for each sequence in shapes of their own."""
        for count in range(1, depth + 1):
            self.drafts.graphs[count] = DraftGraphs(
                self.model, self.layers, self.builder, self.proposer, count, max_size
            )

    def run(self, batch: Batch) -> StepResult:
        """Compute every item's new tokens; sample those whose last known token was computed."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Start a step; on a GPU this returns while it runs."""
        with self._errors():
            if self.leader is not None:
                self.leader.tell_batch(batch, self.sampler)
            self.builder.grow(batch.grown)
            if self.images is not None:
                self.images.forget(batch.dropped_images)
                self.images.go_on(batch.begun_images)
            launched = self._launch(batch)
            if self.images is not None:
                self.images.keep(batch.begun_images)
        with _memory_errors():
            for part in (launched, *launched.others):
                if part.failure is not None:
                    raise part.failure
        return launched

    @torch.inference_mode()
    def sample_late(self, launched: LaunchedStep) -> None:
        """Sample the constrained items of a step whose masks were to follow."""
        with self._errors():
            for part in (launched, *launched.others):
                self.sampler.sample_late(part)
                if self.leader is not None and part.late is not None:
                    assert part.late.sampled is not None
                    self.leader.tell_late(part.late.slots, part.late.sampled.token_ids)

    def _errors(self) -> AbstractContextManager[None]:
        """What an error is to the engine: that of several ranks ends all."""
        return all_or_none() if self._ranks.size > 1 else _memory_errors()

    def _launch(self, batch: Batch) -> LaunchedStep:
        for executor in self._by_graph:
            if (launched := executor.launch(batch)) is not None:
                return launched
        return self.plain.launch(batch)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise OutOfMemory(str(error).split(". ")[0]) from error

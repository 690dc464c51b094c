"""Batch to tensors, one forward pass, and the rows that sample."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.core.types import StepResult, TokenLogprobs
from tokenmill.engine.engine import OutOfMemory
from tokenmill.engine.graphs.capture import CaptureLimits, CaptureReport, Progress, capture_all
from tokenmill.engine.graphs.decode_graphs import DecodeGraphs
from tokenmill.engine.graphs.draft_graphs import DraftGraphs, Verified
from tokenmill.engine.graphs.prompt_graphs import PromptGraphs
from tokenmill.engine.inputs import InputBuilder, Inputs
from tokenmill.engine.launched import Ahead, Launched
from tokenmill.engine.model import KVCache, Model
from tokenmill.engine.mtp import Drafter, Proposer
from tokenmill.engine.sampling.device_sampler import DeviceSampler
from tokenmill.engine.sampling.relaxed import Relaxed
from tokenmill.engine.sampling.sampler import (
    SampledRow,
    Sampler,
    grammar_masks,
    is_penalised,
    sampled_rows,
)
from tokenmill.engine.warm_up import FEW, Step, warm_up_batch
from tokenmill.kernels.drafts import count_accepted
from tokenmill.sched.sequence import PENDING, Batch, Sequence

_LOGIT_ROWS = 64  # prompt-logprob rows of the vocabulary held at once


def _counts_pending(seq: SampledRow) -> bool:
    """True where a penalty asks for a token that the host does not know yet."""
    return is_penalised(seq.request.sampling) and seq.token_ids[-1] == PENDING


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
        relaxed: Relaxed | None = None,
    ) -> None:
        """With an MTP module the cache's last layer is the module's, its last block nobody's."""
        spec = model.spec
        self.model, self.kv_cache, self.block_size = model, kv_cache, block_size
        self.layers = kv_cache[: spec.num_layers]  # without those that draft
        self.device = kv_cache[0][0].device
        self.on_gpu = self.device.type == "cuda"
        self.sampler, self.device_sampler = Sampler(), DeviceSampler()
        self.builder = InputBuilder(
            block_size,
            (spec.num_heads, spec.num_kv_heads),
            num_slots,
            max_model_len or spec.max_position,
            kv_cache[0][0].shape[0] - 1,
            self.device,
        )
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.draft_graphs: dict[int, DraftGraphs] = {}  # by the number of drafts
        self.runs_ahead = False  # steps of drafts: the next one is launched before it is asked for
        self._ahead: Ahead | None = None
        self.relaxed = relaxed
        self.proposer = None if mtp is None else Proposer(mtp, kv_cache[-1], self.builder)

    def warm_up(self, steps: list[Step] = FEW, sampling: bool = False) -> None:
        """Compile and load every kernel before the first request waits for them.

        With `sampling` whatever else than the best token may be asked for, too.
        """
        if sampling and self.on_gpu:
            shape = (1, self.model.spec.vocab_size)
            self.device_sampler.warm_up(torch.zeros(shape, dtype=torch.bfloat16, device="cuda"))
        to_draft = 2 if self.proposer is not None else 0
        for step in steps:
            self.run(warm_up_batch(step, self.block_size, to_draft))

    @torch.inference_mode()
    def capture(
        self, max_size: int, limits: CaptureLimits, progress: Progress | None = None, depth: int = 0
    ) -> CaptureReport:
        """Capture decode graphs up to max_size sequences, short prompts, and up to `depth` drafts.

        The cache's last block is padding. All graphs share one pool of memory.
        """
        pool = torch.cuda.graph_pool_handle()
        self.graphs = DecodeGraphs(self.model, self.layers, self.builder, max_size)
        self.add_prompt_graphs(depth)
        self.add_draft_graphs(max_size, depth)
        assert self.prompt_graphs is not None
        jobs = self.graphs.jobs(pool) + self.prompt_graphs.jobs(pool)
        for graphs in self.draft_graphs.values():
            jobs += graphs.jobs(pool)
        torch.cuda.empty_cache()  # else what the warm-up left would hide what graphs take
        report = capture_all(jobs, limits, progress)
        self.graphs.start(report)
        return report

    def add_prompt_graphs(self, depth: int) -> None:
        """Run the last tokens of a prompt that is alone in its step in shapes of their own."""
        self.prompt_graphs = PromptGraphs(
            self.model, self.layers, self.builder, self.proposer, depth
        )

    def add_draft_graphs(self, max_size: int, depth: int) -> None:
        """Run steps of 1 to `depth` drafts for each sequence in shapes of their own."""
        for count in range(1, depth + 1):
            assert self.proposer is not None
            graphs = DraftGraphs(self.model, self.layers, self.proposer, count, max_size)
            self.draft_graphs[count] = graphs

    def run(self, batch: Batch) -> StepResult:
        """Compute every item's new tokens; sample those whose last known token was computed."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Start a step; on a GPU this returns while it runs."""
        try:
            ahead, self._ahead = self._ahead, None  # for this batch or for none
            self.builder.tables.update(batch.grown, self.builder.staging)
            drafted = self._replay_drafts(batch, ahead)
            replayed = drafted or self._replay(batch) or self._replay_prompt(batch)
            return replayed or self._compute(batch)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise OutOfMemory(str(error).split(". ")[0]) from error

    def _replay(self, batch: Batch) -> Launched | None:
        """A step of single tokens through a captured graph, or None."""
        if self.graphs is None or batch.num_tokens != len(batch.items) or batch.num_to_draft:
            return None
        seqs = [seq for seq, _ in batch.items]
        if any(s.num_computed_tokens + 1 != s.num_tokens or s.prompt_logprobs for s in seqs):
            return None
        decoded = self.graphs.run(seqs)
        if decoded is None:
            return None
        launched = Launched(
            StepResult([[] for _ in seqs]), list(range(len(seqs))), [[] for _ in seqs]
        )
        rows: list[SampledRow] = [*seqs]
        if self.device_sampler.wants_best(rows):
            return self._collect(launched, decoded.best)
        tokens = self._choose(launched, rows, decoded.logits, decoded.token_ids)
        self.builder.last_tokens.index_copy_(0, decoded.slots.long(), tokens)
        return self._collect(launched, tokens)

    def _replay_prompt(self, batch: Batch) -> Launched | None:
        """The rest of one short prompt through a captured graph, or None."""
        if self.prompt_graphs is None or not self.prompt_graphs.takes(batch.items):
            return None
        rows: list[SampledRow] = [batch.items[0][0]]
        best = self.device_sampler.wants_best(rows)
        if self.proposer is not None and not best:
            return None  # drafts would follow a token that is not taken
        prompted = self.prompt_graphs.run(batch.items[0])
        launched = Launched(StepResult([[]]), [0], [[]])
        tokens = prompted.best
        if not best:
            tokens = self._choose(launched, rows, prompted.logits, prompted.newest)
            self.builder.last_tokens.index_copy_(0, prompted.slot.long(), tokens)
        drafts = prompted.drafts if batch.num_to_draft else None
        proposed = None if drafts is None else drafts[:, : batch.num_to_draft]
        return self._collect(launched, tokens, proposed)

    def _replay_drafts(self, batch: Batch, ahead: Ahead | None) -> Launched | None:
        """A step that verifies drafts and makes new ones through captured graphs, or None."""
        graphs = self.draft_graphs.get(batch.num_to_draft)
        if graphs is None or not graphs.takes(batch.items):
            return None
        count, width = len(batch.items), graphs.depth + 1
        seqs = [seq for seq, _ in batch.items]
        launched = Launched(
            StepResult([[] for _ in seqs]),
            list(range(count)),
            [seq.draft_ids[: num_new - 1] for seq, num_new in batch.items],
            width,
        )
        best = self.device_sampler.wants_best([*seqs]) and self.relaxed is None
        if ahead is not None and best and ahead.matches(graphs, batch):
            host, launched.done = ahead.host, ahead.done
        else:
            verified = graphs.verify(batch.items)
            if not best:
                self._sample_drafts(launched, batch, graphs, verified)
            host = self._to_host(graphs.draft(count, verified))
            launched.done = self._mark()
        launched.tokens, launched.proposed = host[:, :width], host[:, width:]
        if self.runs_ahead and best and graphs.may_go_on(seqs):
            if batch.grown:
                graphs.note_capacities(seqs)
            verified = graphs.verify_next(count)
            host = self._to_host(graphs.draft(count, verified))
            blocks = [list(seq.block_ids) for seq in seqs]
            self._ahead = Ahead(graphs, seqs, blocks, host, self._mark())
        return launched

    def _sample_drafts(
        self, launched: Launched, batch: Batch, graphs: DraftGraphs, verified: Verified
    ) -> None:
        """Put what the requests ask for in the place of the likeliest tokens."""
        seqs = [seq for seq, _ in batch.items]
        if not self.device_sampler.wants_best([*seqs]):
            rows = [row for seq in seqs for row in sampled_rows(seq, graphs.depth)]
            logits, newest = verified.logits[: len(rows)], verified.token_ids[: len(rows)]
            tokens = self._choose(launched, rows, logits, newest)
            graphs.tokens[: len(seqs)].copy_(tokens.view(len(seqs), -1))
        self._relax(launched, batch, verified.logits, graphs.tokens.view(-1))

    def _compute(self, batch: Batch) -> Launched:
        """A step of any shape."""
        inputs = self.builder.build(batch)
        hidden = self.model.forward(inputs.token_ids, self.layers, inputs.attention)
        launched = Launched(StepResult([[] for _ in batch.items]), inputs.ready)
        self._score_prompts(batch, hidden, launched.result)
        tokens = inputs.slots
        if inputs.ready:
            seqs = [batch.items[i][0] for i in inputs.ready]
            counts = list(zip(seqs, inputs.num_drafts, strict=True))
            launched.drafts = [seq.draft_ids[:count] for seq, count in counts]
            rows = [row for seq, count in counts for row in sampled_rows(seq, count)]
            logits = self.model.logits(hidden.index_select(0, inputs.ends))
            newest = inputs.token_ids.index_select(0, inputs.ends)
            tokens = self._choose(launched, rows, logits, newest)
            self._relax(launched, batch, logits, tokens)
            if len(rows) == len(seqs):  # else the host knows all tokens before the next step
                self.builder.last_tokens.index_copy_(0, inputs.slots.long(), tokens)
        proposed = self._propose(batch, inputs, hidden, tokens)
        return self._collect(launched, tokens if inputs.ready else None, proposed)

    def _propose(
        self, batch: Batch, inputs: Inputs, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Show the step to the MTP module; drafts for the next one where they are asked for.

        A step that only decodes and asks for none is not shown: the module's cache keeps a gap,
        which makes its guesses worse and nothing else.
        """
        if self.proposer is None:
            return None
        if not batch.num_to_draft and batch.num_tokens == len(batch.items):
            return None
        more = self.builder.build_drafts(batch, inputs)
        next_ids = more.next_ids.index_copy(0, inputs.ends.long(), tokens)
        next_ids = next_ids if self.on_gpu else next_ids.long()
        out = self.proposer.fill(next_ids, self.model.normed(hidden), inputs.attention)
        if not batch.num_to_draft or not inputs.ready:
            return None
        accepted = count_accepted(tokens[more.places], more.drafts, more.num_drafts)
        rows = more.firsts + accepted
        positions = inputs.attention.positions.index_select(0, rows).int()
        return self.proposer.propose(
            out.index_select(0, rows), positions, inputs.slots, more.capacities, batch.num_to_draft
        )

    def _choose(
        self,
        launched: Launched,
        rows: list[SampledRow],
        logits: torch.Tensor,
        newest: torch.Tensor,
    ) -> torch.Tensor:
        """Sample all rows, int32 [rows]: on a GPU there, unless a grammar has to be asked.

        On CPU all rows of all steps are sampled alike: a neighbour must not change a row's bits.
        """
        masks = grammar_masks(rows)
        constrained = any(mask is not None for mask in masks)
        if self.on_gpu and (not constrained or any(map(_counts_pending, rows))):
            launched.sampled = self.device_sampler.launch(logits, rows, newest)
            return launched.sampled.token_ids
        fed = None if self.on_gpu else newest.tolist()
        tokens, launched.logprobs = self.sampler(logits.float(), rows, masks, fed)
        return torch.tensor(tokens, dtype=torch.int32).to(self.device)

    def _relax(
        self, launched: Launched, batch: Batch, logits: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Put likely drafts in the place of what was drawn, where that is asked for."""
        if self.relaxed is None:
            return
        rows: list[int] = []
        drafts: list[int] = []
        first = 0
        for index, own in zip(launched.ready, launched.drafts, strict=True):
            if self.relaxed.covers(batch.items[index][0]):
                rows += range(first, first + len(own))
                drafts += own
            first += launched.stride or len(own) + 1
        if not rows:
            return
        places, ids = self.builder.staging.send([np.array(rows), np.array(drafts)])
        places, drawn = places.long(), tokens[places.long()]
        taken = torch.where(self.relaxed.right(logits[places], ids), ids, drawn)
        tokens.index_copy_(0, places, taken)
        launched.relaxed = {row: i for i, row in enumerate(rows)}
        launched.changed = self._to_host((taken != drawn).int())

    def _collect(
        self,
        launched: Launched,
        tokens: torch.Tensor | None,
        proposed: torch.Tensor | None = None,
    ) -> Launched:
        """Send tokens and drafts to the host without waiting for them."""
        launched.tokens = None if tokens is None else self._to_host(tokens)
        launched.proposed = None if proposed is None else self._to_host(proposed)
        launched.done = self._mark()
        return launched

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self.builder.staging.buffer(tensor.numel()).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        return host

    def _mark(self) -> torch.cuda.Event | None:
        """An event after all that was launched, on a GPU."""
        if not self.on_gpu:
            return None
        done = torch.cuda.Event()
        done.record()
        return done

    def _score_prompts(self, batch: Batch, hidden: torch.Tensor, result: StepResult) -> None:
        end = 0
        for i, (seq, num_new) in enumerate(batch.items):
            end += num_new
            if seq.prompt_logprobs is not None and seq.num_computed_tokens < seq.num_prompt_tokens:
                result.prompt_logprobs[i] = self._prompt_logprobs(seq, num_new, hidden, end)

    def _prompt_logprobs(
        self, seq: Sequence, num_new: int, hidden: torch.Tensor, end: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt tokens after each of this chunk's, as far as they go."""
        first = seq.num_computed_tokens
        targets = seq.token_ids[first + 1 : min(first + num_new + 1, seq.num_prompt_tokens)]
        rows = hidden[end - num_new : end - num_new + len(targets)]
        k = seq.request.sampling.prompt_logprobs or 0
        entries: list[TokenLogprobs] = []
        for start in range(0, len(targets), _LOGIT_ROWS):
            logits = self.model.logits(rows[start : start + _LOGIT_ROWS].contiguous()).float()
            entries += self.sampler.prompt_logprobs(logits, targets[start : start + _LOGIT_ROWS], k)
        return entries

"""The ways to execute a step: any batch by operations or in pieces, three kinds by CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from tokenmill.core.types import StepResult, TokenLogprobs
from tokenmill.engine.drafts.proposer import Proposer
from tokenmill.engine.graphs.decode_graphs import DecodeGraphs
from tokenmill.engine.graphs.draft_graphs import DraftGraphs, Verified
from tokenmill.engine.graphs.piecewise_graphs import PiecewiseGraphs
from tokenmill.engine.graphs.prompt_graphs import PromptGraphs
from tokenmill.engine.images import ImageSource
from tokenmill.engine.inputs import InputBuilder, Inputs
from tokenmill.engine.launched import LaunchedStep
from tokenmill.engine.model import KVCache, Model
from tokenmill.engine.sampling.sampler import SampledRow, sampled_rows
from tokenmill.engine.sampling.step_sampler import StepSampler
from tokenmill.kernels.drafts import count_accepted
from tokenmill.parallel import all_or_none
from tokenmill.sched.sequence import Batch, Item, Sequence

_LOGIT_ROWS = 64  # prompt-logprob rows of the vocabulary held at once


class Executor(Protocol):
    def launch(self, batch: Batch) -> LaunchedStep | None:
        """Start a step of its kind; None for any other."""


class PlainExecutor:
    """Steps of any shape: by the graphs of their pieces if there are any, or by operations."""

    def __init__(
        self,
        model: Model,
        layers: KVCache,
        builder: InputBuilder,
        proposer: Proposer | None,
        sampler: StepSampler,
        images: ImageSource | None = None,
    ) -> None:
        self._model, self._layers, self._builder = model, layers, builder
        self._proposer, self._sampler, self._images = proposer, sampler, images
        self.graphs: PiecewiseGraphs | None = None
        self.has_met = False  # ranks with other tokens: this one has begun a forward pass

    def launch(self, batch: Batch) -> LaunchedStep:
        inputs, hidden = self._forward(batch)
        launched = LaunchedStep(StepResult([[] for _ in batch.items]), inputs.ready)
        self._score_prompts(batch, hidden, launched.result)
        tokens = inputs.slots
        if inputs.ready:
            seqs = [batch.items[i][0] for i in inputs.ready]
            counts = list(zip(seqs, inputs.num_drafts, strict=True))
            launched.drafts = [seq.draft_ids[:count] for seq, count in counts]
            rows = [row for seq, count in counts for row in sampled_rows(seq, count)]
            logits = self._model.logits(hidden.index_select(0, inputs.ends))
            newest = inputs.token_ids.index_select(0, inputs.ends)
            # With drafts the host knows all tokens before the next step.
            slots = inputs.slots if len(rows) == len(seqs) else None
            tokens = self._sampler.choose(launched, batch, rows, logits, newest, slots)
        proposed = self._propose(batch, inputs, hidden, tokens)
        return self._sampler.send(launched, tokens if inputs.ready else None, proposed)

    def _forward(self, batch: Batch) -> tuple[Inputs, torch.Tensor]:
        """The step's tensors, and the hidden states of its tokens."""
        seen = None if self._images is None else self._images.rows(batch)
        size = None if self.graphs is None else self.graphs.size_for(batch.num_tokens)
        inputs = self._builder.build(batch, size)
        self.has_met = True
        with all_or_none() if self._model.layout.own_tokens else nullcontext():
            if self.graphs is not None and size is not None:
                return inputs, self.graphs.run(inputs.token_ids, inputs.attention, seen)
            ids, attention = inputs.token_ids, inputs.attention
            return inputs, self._model.forward(ids, self._layers, attention, seen)

    @torch.inference_mode()
    def assist(self) -> None:
        """Compute the experts' part of the other ranks' step."""
        with all_or_none():
            self._model.assist()

    def _propose(
        self, batch: Batch, inputs: Inputs, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Show the step to the MTP module; drafts for the next one where they are asked for.

        A step that only decodes and asks for none is not shown: the module's cache keeps a gap,
        which makes its guesses worse and nothing else. So does a row whose mask follows: the module
        is shown what it would be without.
        """
        if self._proposer is None:
            return None
        if not batch.num_to_draft and batch.num_tokens == len(batch.items):
            return None
        more = self._builder.build_drafts(batch, inputs)
        next_ids = self._builder.ids(more.next_ids.index_copy(0, inputs.ends.long(), tokens))
        out = self._proposer.fill(next_ids, self._model.draft_states(hidden), inputs.attention)
        if not batch.num_to_draft or not inputs.ready:
            return None
        accepted = count_accepted(tokens[more.places], more.drafts, more.num_drafts)
        rows = more.firsts + accepted
        positions = inputs.attention.positions.index_select(0, rows).int()
        return self._proposer.propose(
            out.index_select(0, rows), positions, inputs.slots, more.capacities, batch.num_to_draft
        )

    def _score_prompts(self, batch: Batch, hidden: torch.Tensor, result: StepResult) -> None:
        end = 0
        for i, (seq, num_new) in enumerate(batch.items):
            end += num_new
            if seq.prompt_logprobs is not None and seq.num_computed_tokens < seq.num_prompt_tokens:
                entries: list[TokenLogprobs] = []
                for logits, targets in self._prompt_logits(seq, hidden[end - num_new : end]):
                    if self._sampler.ranks.rank or i in result.errors:
                        continue  # the others compute their part all the same
                    k = seq.request.task.sampling.prompt_logprobs or 0
                    try:
                        entries += self._sampler.host.prompt_logprobs(logits.float(), targets, k)
                    except FloatingPointError as error:
                        result.errors[i] = str(error)
                if i not in result.errors:
                    result.prompt_logprobs[i] = entries

    def _prompt_logits(
        self, seq: Sequence, hidden: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Logits and the prompt tokens after each of this chunk's, as far as they go."""
        first = seq.num_computed_tokens + 1
        targets = seq.token_ids[first : min(first + hidden.shape[0], seq.num_prompt_tokens)]
        for start in range(0, len(targets), _LOGIT_ROWS):
            end = min(start + _LOGIT_ROWS, len(targets))
            yield self._model.logits(hidden[start:end].contiguous()), targets[start:end]


class DecodeExecutor:
    """Steps of single tokens, by the decode graphs if there are any."""

    def __init__(
        self, builder: InputBuilder, proposer: Proposer | None, sampler: StepSampler
    ) -> None:
        self.graphs: DecodeGraphs | None = None
        self._builder, self._proposer, self._sampler = builder, proposer, sampler

    def launch(self, batch: Batch) -> LaunchedStep | None:
        if self.graphs is None or batch.num_tokens != len(batch.items):
            return None
        if batch.num_to_draft and self._proposer is not None:
            return None
        seqs = [seq for seq, _ in batch.items]
        if any(s.num_computed_tokens + 1 != s.num_tokens or s.prompt_logprobs for s in seqs):
            return None
        if any(s.num_computed_tokens < s.image_end for s in seqs):
            return None  # a prompt that ends with an image
        decoded = self.graphs.run(seqs)
        if decoded is None:
            return None
        launched = _launched([[] for _ in seqs])
        rows: list[SampledRow] = [*seqs]
        if self._sampler.wants_best(rows):
            return self._sampler.send(launched, decoded.best)
        tokens = self._sampler.choose(
            launched, batch, rows, decoded.logits, decoded.token_ids, decoded.slots
        )
        return self._sampler.send(launched, tokens)


class PromptExecutor:
    """Steps of the last tokens of one short prompt, by the prompt graphs if there are any."""

    def __init__(
        self, builder: InputBuilder, proposer: Proposer | None, sampler: StepSampler
    ) -> None:
        self.graphs: PromptGraphs | None = None
        self._builder, self._proposer, self._sampler = builder, proposer, sampler

    def takes(self, items: list[Item]) -> bool:
        """Whether a step of these items is one of its kind."""
        if self.graphs is None or not self.graphs.takes(items):
            return False
        # Drafts would follow a token that is not taken.
        return self._proposer is None or self._sampler.wants_best([items[0][0]])

    def launch(self, batch: Batch) -> LaunchedStep | None:
        if self.graphs is None or not self.takes(batch.items):
            return None
        rows: list[SampledRow] = [batch.items[0][0]]
        best = self._sampler.wants_best(rows)
        prompted = self.graphs.run(batch.items[0])
        launched, tokens = _launched([[]]), prompted.best
        if not best:
            tokens = self._sampler.choose(
                launched, batch, rows, prompted.logits, prompted.newest, prompted.slot
            )
        drafts = prompted.drafts if batch.num_to_draft else None
        proposed = None if drafts is None else drafts[:, : batch.num_to_draft]
        return self._sampler.send(launched, tokens, proposed)


class DraftExecutor:
    """Steps that verify drafts and make new ones, by the draft graphs if there are any."""

    def __init__(self, proposer: Proposer | None, sampler: StepSampler) -> None:
        self.graphs: dict[int, DraftGraphs] = {}  # by the number of drafts
        self._proposer = proposer
        self.runs_ahead = False  # the next step is launched before it is asked for
        self._sampler = sampler
        self._ahead: Ahead | None = None

    def launch(self, batch: Batch, others_follow: bool = False) -> LaunchedStep | None:
        ahead, self._ahead = self._ahead, None  # for this batch or for none
        graphs = self.graphs.get(self._depth(batch))
        if graphs is None or not graphs.takes(batch.items):
            return None
        count, width = len(batch.items), graphs.depth + 1
        seqs = [seq for seq, _ in batch.items]
        launched = _launched([s.draft_ids[: num_new - 1] for s, num_new in batch.items], width)
        best = self._sampler.wants_best([*seqs])
        if ahead is not None and best and ahead.matches(graphs, batch):
            host, launched.done = ahead.host, ahead.done
        else:
            verified = graphs.verify(batch.items)
            if not best:
                self._sample(launched, batch, graphs, verified)
            host = self._sampler.to_host(graphs.draft(count, verified))
            launched.done = self._sampler.mark()
        launched.tokens, launched.proposed = host[:, :width], host[:, width:]
        if self.runs_ahead and best and not others_follow and graphs.may_go_on(seqs):
            if batch.grown:
                graphs.note_capacities(seqs)
            verified = graphs.verify_next(count)
            host = self._sampler.to_host(graphs.draft(count, verified))
            blocks = [HeldBlocks.of(seq) for seq in seqs]
            self._ahead = Ahead(graphs, seqs, blocks, host, self._sampler.mark())
        return launched

    def _depth(self, batch: Batch) -> int:
        """Drafts to make, or without a module the most that a sequence has."""
        if self._proposer is not None:
            return batch.num_to_draft
        return max(num_new for _, num_new in batch.items) - 1

    def _sample(
        self, launched: LaunchedStep, batch: Batch, graphs: DraftGraphs, verified: Verified
    ) -> None:
        """Put what the requests ask for in the place of the likeliest tokens."""
        seqs = [seq for seq, _ in batch.items]
        if not self._sampler.wants_best([*seqs]):
            rows = [row for seq in seqs for row in sampled_rows(seq, graphs.depth)]
            logits, newest = verified.logits[: len(rows)], verified.token_ids[: len(rows)]
            tokens = self._sampler.choose(launched, batch, rows, logits, newest, None)
            graphs.tokens[: len(seqs)].copy_(tokens.view(len(seqs), -1))


class SplitExecutor:
    """Steps that decode beside a few short prompts, by the graphs of each, one after the other.

    Where the host takes longer to launch the pieces of a step than the device to run them, several
    whole graphs are over sooner, though each reads all weights.
    """

    def __init__(
        self, drafts: DraftExecutor, decode: DecodeExecutor, prompts: PromptExecutor
    ) -> None:
        self._drafts, self._decode, self._prompts = drafts, decode, prompts
        # By sequences that decode, ascending: beside up to so many the most prompts.
        self.most_prompts: dict[int, int] = {}

    def launch(self, batch: Batch) -> LaunchedStep | None:
        prompts = self._short_prompts(batch.items)
        others = batch.items[: len(batch.items) - len(prompts)]
        if not prompts or not others or len(prompts) > self._most(len(others)):
            return None
        launched = self._launch_others(batch.part(others))
        if launched is None:
            return None
        for item in prompts:
            prompt = self._prompts.launch(batch.part([item]))
            assert prompt is not None
            launched.others.append(prompt)
        return launched

    def _most(self, num_decoding: int) -> int:
        """Prompts that are quicker by themselves beside so many sequences."""
        sizes = (most for size, most in self.most_prompts.items() if num_decoding <= size)
        return next(sizes, 0)

    def _short_prompts(self, items: list[Item]) -> list[Item]:
        count = len(items)
        while count and items[count - 1][1] > 1 and self._prompts.takes([items[count - 1]]):
            count -= 1
        return items[count:]

    def _launch_others(self, batch: Batch) -> LaunchedStep | None:
        return self._drafts.launch(batch, others_follow=True) or self._decode.launch(batch)


def _launched(drafts: list[list[int]], stride: int | None = None) -> LaunchedStep:
    """A step whose items all sample, after these drafts of each."""
    return LaunchedStep(StepResult([[] for _ in drafts]), list(range(len(drafts))), drafts, stride)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was launched before anybody asked for it, from what the device alone knows."""

    graphs: DraftGraphs
    seqs: list[Sequence]
    blocks: list[HeldBlocks]  # of each, when it was launched
    host: torch.Tensor
    done: torch.cuda.Event | None

    def matches(self, graphs: DraftGraphs, batch: Batch) -> bool:
        """True if the batch is that step: nobody came or went, lost drafts or changed blocks."""
        return (
            self.graphs is graphs
            and len(self.seqs) == len(batch.items)
            and all(num_new == graphs.depth + 1 for _, num_new in batch.items)
            and all(
                known is item[0] and _same_blocks(blocks, item, graphs.builder)
                for known, blocks, item in zip(self.seqs, self.blocks, batch.items, strict=True)
            )
        )


class HeldBlocks(NamedTuple):
    block_ids: list[int]
    window_ids: list[int]
    window_first: int

    @classmethod
    def of(cls, seq: Sequence) -> HeldBlocks:
        return cls(list(seq.block_ids), list(seq.window_ids), seq.window_first)

    def between(self, first: int, end: int, num_groups: int) -> tuple[list[int], list[int]]:
        """Those from one index to another, of full layers and of sliding ones."""
        start, stop = (max(0, i - self.window_first) * num_groups for i in (first, end))
        return self.block_ids[first:end], self.window_ids[start:stop]


def _same_blocks(known: HeldBlocks, item: Item, builder: InputBuilder) -> bool:
    """True if the new tokens of an item lie in the blocks that were known."""
    seq, num_new = item
    first = seq.num_computed_tokens // builder.block_size
    end = -(-(seq.num_computed_tokens + num_new) // builder.block_size)
    span = first, end, len(builder.tables.sliding)
    return len(known.block_ids) >= end and known.between(*span) == HeldBlocks.of(seq).between(*span)

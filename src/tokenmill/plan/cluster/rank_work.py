"""What a rank computes in a step, counted over its batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.plan.predict.step_cost import Work
from tokenmill.sched.decode_only import DecodeOnlyRun
from tokenmill.sched.sequence import Batch

OUTPUT_TOKEN = 1 << 62  # plus the request's number: no answer is another's prefix


class TokenCount(list[int]):
    """The tokens of a simulated sequence: nothing depends on them, so they are only counted."""

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return repeat(0, self._count)

    def __getitem__(self, index: object) -> int:  # type: ignore[override]
        return 0

    def append(self, token: int) -> None:
        self._count += 1

    def extend(self, tokens: list[int]) -> None:  # type: ignore[override]
        self._count += len(tokens)


class Positions:
    """How many positions tokens attend to, over all layers of a model."""

    def __init__(self, spec: ModelSpec) -> None:
        windows = [window for window in spec.layer_windows if window]
        self._spec, self._num_full = spec, spec.num_layers - len(windows)
        self._num_sliding, self._window = len(windows), max(windows, default=0)

    def of_token(self, context: int) -> int:
        """Of one token that sees `context` positions, itself included."""
        return self._num_full * context + self._num_sliding * min(context, self._window)

    def of_tokens(self, contexts: int) -> int:
        """Of many, by the sum of what they see; where no layer slides."""
        return self._num_full * contexts

    def of_chunk(self, computed: int, num_new: int) -> int:
        """Of a piece of a prompt after so many tokens."""
        spec = self._spec
        return spec.attended_positions(computed + num_new) - spec.attended_positions(computed)


@dataclass(slots=True)
class RankWork:
    sequences: int = 0  # that decode
    rows: int = 0  # tokens that they compute, drafts included
    decode_seen: int = 0
    prefill_tokens: int = 0
    prefill_seen: int = 0
    sampled: int = 0
    kv_tokens: int = 0  # in use

    @property
    def num_tokens(self) -> int:
        return self.rows + self.prefill_tokens

    @classmethod
    def of(cls, batch: Batch, positions: Positions) -> RankWork:
        work, seen = cls(), positions.of_token
        for seq, num_new in batch.items:
            computed, known = seq.num_computed_tokens, len(seq.token_ids)
            if computed == known - 1:
                work.sequences += 1
                work.rows += num_new
                work.decode_seen += seen(known)
            else:
                work.prefill_tokens += num_new
                work.prefill_seen += positions.of_chunk(computed, num_new)
                work.sampled += computed + num_new == known
        work.sampled += work.rows
        return work

    @classmethod
    def of_decode_only(cls, run: DecodeOnlyRun, lag: int, positions: Positions) -> RankWork:
        """The step after the first `lag` of a run."""
        count = run.num_running
        seen = positions.of_tokens(run.num_tokens + count * lag)
        return cls(count, count, seen, sampled=count)

    def times(self, factor: float) -> Work:
        """So many ranks like this one, as the cost of a step sees them."""
        return Work(
            self.sequences * factor,
            self.rows * factor,
            self.decode_seen * factor,
            self.prefill_tokens * factor,
            self.prefill_seen * factor,
            self.sampled * factor,
        )


def total_work(ranks: list[RankWork]) -> RankWork:
    return RankWork(
        sum(work.sequences for work in ranks),
        sum(work.rows for work in ranks),
        sum(work.decode_seen for work in ranks),
        sum(work.prefill_tokens for work in ranks),
        sum(work.prefill_seen for work in ranks),
        sum(work.sampled for work in ranks),
        sum(work.kv_tokens for work in ranks),
    )

"""Shares the time of each step among its requests, by the work that each of them is.

A token is 1, and a position that it attends to a part of that (WorkWeights). A request that
decodes adds the same 1 to every step, and its context grows by one: so its share over many steps
follows from two running sums, and a step costs the same however many requests decode in it.
Only those that begin or end to decode, and chunks of several tokens, are looked at.

Time is never lost: what passes between two calls of charge() and idle() is shared or idle.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenmill.core.cost import Cost
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.sched.sequence import Batch, Sequence

NS = 1e-9
# Operations that a machine does in the time in which it reads a byte, of the order of magnitude:
# an H200 does 989 TFLOP/s in bf16 and reads 4.8 TB/s, a server core about a twentieth of that.
OPERATIONS_PER_BYTE = {"cuda": 200, "cpu": 20}
KV_BYTES = 2  # of a value in the cache


class WorkWeights(NamedTuple):
    """The work of a position that a token attends to; the rest of a token's work is 1."""

    prefill: float = 0.0  # a matter of arithmetic: a chunk reads the cache once for all its tokens
    decode: float = 0.0  # of arithmetic or of reading the cache, whichever is more

    @classmethod
    def of(cls, spec: ModelSpec, device: str) -> WorkWeights:
        """The weights of a model on "cuda" or "cpu".

        Layers with a window count as if each token saw all of it: that is the same for everybody.
        """
        num_full = sum(window is None for window in spec.layer_windows)
        windows = sum(window or 0 for window in spec.layer_windows)
        token = spec.flops_per_token(0) + spec.seen_flops(decode=True) * windows
        read = spec.kv_bytes_per_token(KV_BYTES) / spec.num_layers * OPERATIONS_PER_BYTE[device]
        decode = max(spec.seen_flops(decode=True), read)
        return cls(num_full * spec.seen_flops(decode=False) / token, num_full * decode / token)


class StepMeter:
    """GPU-seconds of an engine: those of its requests, and those in which it had none."""

    def __init__(self, weights: WorkWeights | None = None, num_gpus: int = 1) -> None:
        self._weights = weights or WorkWeights()
        self.num_gpus = num_gpus
        self.gpu_s = 0.0  # all that has passed
        self.idle_s = 0.0  # of it
        self._mark_ns: int | None = None  # up to here time is accounted for
        self._prefill_s, self._prefill_work = 0.0, 0.0
        self._num_decoding = 0
        self._start()

    def _start(self) -> None:
        """Begin the sums anew; nobody decodes."""
        self._step = 0
        self._seen = 0  # positions that those who decode see, less their number times the step
        self._price = 0.0  # seconds of a unit of work, summed over the steps
        self._growth = 0.0  # the same times the number of each step

    def start(self, now_ns: int) -> None:
        """Count time from now on, unless it is counted already."""
        if self._mark_ns is None:
            self._mark_ns = now_ns

    def idle(self, now_ns: int) -> None:
        """Nothing has run since the last call."""
        self.idle_s += self._pass(now_ns)

    def charge(self, batch: Batch, now_ns: int) -> None:
        """Share the time since the last call among the requests of a batch, before its update().

        Of a batch that was launched ahead, requests that have ended meanwhile pay nothing.
        """
        gpu_s = self._pass(now_ns)
        launched = batch.samples is not None
        chunks = [item for item in batch.items[batch.num_singles() :] if not item[0].finished]
        for seq, _ in chunks:
            self.settle(seq)
        works = [self._work(seq, num_new, launched) for seq, num_new in chunks]
        seen = self._seen + self._num_decoding * self._step
        work = self._num_decoding + self._weights.decode * seen + sum(map(sum, works))
        if work == 0.0:
            self.idle_s += gpu_s
            return
        price = gpu_s / work
        self._price += price
        self._growth += price * self._step
        self._step += 1
        for (seq, num_new), parts in zip(chunks, works, strict=True):
            self._charge_chunk(seq, price, *parts)
            num_computed = seq.num_computed_tokens + (0 if launched else num_new)
            if len(seq.token_ids) - num_computed <= 1:
                self.decodes(seq, min(num_computed, len(seq.token_ids)))

    def _pass(self, now_ns: int) -> float:
        """Return the GPU-seconds since the last call."""
        gpu_s = 0.0 if self._mark_ns is None else (now_ns - self._mark_ns) * NS * self.num_gpus
        self._mark_ns = now_ns
        self.gpu_s += gpu_s
        return gpu_s

    def _work(self, seq: Sequence, num_new: int, launched: bool) -> tuple[float, float, float]:
        """Return what an item of several tokens is: (prefill, decode, drafts)."""
        first = max(0, seq.num_computed_tokens - (num_new if launched else 0))
        num_drafts = 0 if launched else max(0, first + num_new - len(seq.token_ids))
        if num_drafts and num_new - num_drafts == 1:
            return 0.0, 1 + self._weights.decode * first, float(num_drafts)
        return self._prefill(first, num_new), 0.0, 0.0

    def _prefill(self, first: int, num_new: int) -> float:
        seen = num_new * first + num_new * (num_new + 1) / 2
        return num_new + self._weights.prefill * seen

    def _charge_chunk(
        self, seq: Sequence, price: float, prefill: float, decode: float, drafts: float
    ) -> None:
        cost = seq.cost
        cost.prefill_s += price * prefill
        cost.decode_s += price * decode
        cost.drafts_s += price * drafts
        self._prefill_s += price * prefill
        self._prefill_work += prefill

    # Requests that decode one token a step.

    def takes(self, seq: Sequence, num_new: int) -> None:
        """A request gets its next tokens; who gets one pays for it like those who decode."""
        if num_new == 1:
            self.decodes(seq, seq.num_computed_tokens)

    def decodes(self, seq: Sequence, num_seen: int) -> None:
        """From the next step on, in which it sees so many, a request pays for a token a step."""
        if seq.decoding is None:
            base = num_seen - self._step
            seq.decoding = base, self._price, self._growth
            self._num_decoding += 1
            self._seen += base

    def settle(self, seq: Sequence) -> None:
        """A request that decodes pays for its steps so far, and no more for those to come."""
        if seq.decoding is None:
            return
        base, price, growth = seq.decoding
        weight, seq.decoding = self._weights.decode, None
        tokens = (self._price - price) * (1 + weight * base)
        seq.cost.decode_s += max(0.0, tokens + (self._growth - growth) * weight)
        self._num_decoding -= 1
        self._seen -= base
        if not self._num_decoding:
            self._start()

    def cost(self, seq: Sequence) -> Cost:
        """Return what a request has taken so far."""
        if seq.decoding is not None:
            num_seen = seq.decoding[0] + self._step
            self.settle(seq)
            self.decodes(seq, num_seen)
        return seq.cost

    def saved_s(self, num_cached: int) -> float:
        """Return what so many cached tokens take where prompts take what they took here so far."""
        if not self._prefill_work:
            return 0.0
        return self._prefill_s / self._prefill_work * self._prefill(0, num_cached)

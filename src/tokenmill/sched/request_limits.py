"""What bounds a request: whether it is taken, and at which token its answer ends."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from tokenmill.core.config import SchedulerConfig
from tokenmill.core.kv import PREFILLED
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.types import FinishReason, no_room
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.sequence import Sequence
from tokenmill.sched.trackers import LOOP, LoopFinder, Thinking


class RequestLimits(NamedTuple):
    """The configuration, and the tokens of one sequence that the KV cache holds."""

    config: SchedulerConfig
    capacity: int

    @classmethod
    def of(cls, config: SchedulerConfig, pool: BlockPool) -> RequestLimits:
        most_new, size = config.most_new_tokens, pool.block_size
        return cls(config, pool.sliding.num_blocks(pool.num_blocks, most_new, size) * size)

    def refusal(self, request: Request, num_waiting: int) -> tuple[str, str] | None:
        """Why a request is not taken: (stop_reason, a sentence), or None."""
        num_prompt = len(request.task.prompt_token_ids) + len(request.task.output_token_ids)
        max_len = self.config.max_model_len
        if not request.task.prompt_token_ids:
            return "empty_prompt", "the prompt has no tokens, at least 1 is needed"
        if num_prompt > max_len - 1:
            return "too_long", no_room(num_prompt, max_len)
        if num_prompt + 1 > self.capacity:
            return (
                "no_capacity",
                f"the prompt has {num_prompt} tokens; the KV cache holds {self.capacity} "
                "and must have room for one more",
            )
        return self.queue_full(request, num_waiting)

    def queue_full(self, request: Request, num_waiting: int) -> tuple[str, str] | None:
        """Why a request cannot wait; one that began elsewhere is taken in any case."""
        most = self.config.max_waiting
        if num_waiting < most or request.task.output_token_ids:
            return None
        return "queue_full", f"{num_waiting} requests wait; the limit is {most} (--max-queue)"

    def sequence(
        self, request: Request, order: int, eos: frozenset[int], texts: Items[str] = ()
    ) -> Sequence:
        """The sequence of a request that came as number `order`; `texts` of the vocabulary."""
        sampling = request.task.sampling
        priority = request.priority if self.config.policy == "priority" else 0
        # One token past the pool needs no block of its own as long as nothing follows it.
        max_len = min(self.config.max_model_len, self.capacity + 1)
        if sampling.max_tokens is not None:
            max_len = min(max_len, len(request.task.prompt_token_ids) + sampling.max_tokens)
        if request.task.hold_kv_s is not None:
            max_len = min(max_len, len(request.task.prompt_token_ids) + 1)
        stop_ids = frozenset() if sampling.ignore_eos else eos
        if sampling.stop_token_ids:
            stop_ids = stop_ids.union(sampling.stop_token_ids)
        seq = Sequence(request, (priority, request.arrival_ns, order), max_len, stop_ids)
        budget, marks = sampling.thinking_token_budget, sampling.reasoning
        if budget is not None and marks is not None:
            seq.thinking = Thinking(budget, marks, request.task.prompt_token_ids, texts)
        detection = sampling.repetition_detection
        if detection is not None and detection.max_pattern_size:
            seq.loops = LoopFinder(detection)
        take_in(seq)
        return seq


def take_in(seq: Sequence) -> None:
    """Take in tokens that have become known, and say when to look at the sequence again."""
    if seq.thinking is not None:
        seq.limit = min(seq.thinking.read(seq.token_ids), seq.max_len)
        seq.look_at = seq.limit - 1
    if seq.loops is not None:
        seq.look_at = 0
        for token in seq.token_ids[seq.num_prompt_tokens + seq.loops.num_read :]:
            seq.loops.read(token)


def append(seq: Sequence, output: RequestOutput, eos: frozenset[int], max_model_len: int) -> None:
    """Append the output's tokens; cut both at the first that ends the request, and say why."""
    for count, token in enumerate(output.token_ids, 1):
        seq.token_ids.append(token)
        in_loop = seq.loops is not None and seq.loops.read(token)
        _note_end(seq, output, token, in_loop, eos, max_model_len)
        if output.finish_reason is not None:
            output.token_ids = output.token_ids[:count]
            if output.logprobs is not None:
                output.logprobs = output.logprobs[:count]
            return
    take_in(seq)


def _note_end(
    seq: Sequence,
    output: RequestOutput,
    token: int,
    in_loop: bool,
    eos: frozenset[int],
    max_model_len: int,
) -> None:
    sampling = seq.request.task.sampling
    enough = seq.num_output_tokens >= sampling.min_tokens
    if token in seq.stop_ids and enough:
        output.finish_reason = FinishReason.STOP
        output.stop_reason = None if token in eos and not sampling.ignore_eos else token
    elif seq.num_tokens >= seq.max_len:
        output.finish_reason = FinishReason.LENGTH
        output.stop_reason = length_reason(seq, max_model_len)
    elif in_loop and enough:
        output.finish_reason, output.stop_reason = FinishReason.STOP, LOOP


def length_reason(seq: Sequence, max_model_len: int) -> str | None:
    """Return why a sequence ended early, if neither its request nor the context did that."""
    max_tokens = seq.request.task.sampling.max_tokens
    asked = max_tokens is not None and seq.num_output_tokens >= max_tokens
    if asked or seq.num_tokens >= max_model_len:
        return None
    return "kv_capacity" if seq.request.task.hold_kv_s is None else PREFILLED

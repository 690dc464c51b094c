"""Where a sequence ends by itself: at a stop id, or at a length."""

from __future__ import annotations

from tokenmill.core.kv import PREFILLED
from tokenmill.core.types import FinishReason, RequestOutput
from tokenmill.sched.sequence import Sequence


def append(seq: Sequence, output: RequestOutput, eos: frozenset[int], max_model_len: int) -> None:
    """Append the output's tokens; cut both at the first that ends the request, and say why."""
    sampling = seq.request.sampling
    for count, token in enumerate(output.token_ids, 1):
        seq.token_ids.append(token)
        if token in seq.stop_ids and seq.num_output_tokens >= sampling.min_tokens:
            output.finish_reason = FinishReason.STOP
            output.stop_reason = None if token in eos and not sampling.ignore_eos else token
        elif seq.num_tokens >= seq.max_len:
            output.finish_reason = FinishReason.LENGTH
            output.stop_reason = length_reason(seq, max_model_len)
        if output.finish_reason is not None:
            output.token_ids = output.token_ids[:count]
            if output.logprobs is not None:
                output.logprobs = output.logprobs[:count]
            return


def length_reason(seq: Sequence, max_model_len: int) -> str | None:
    """Return why a sequence ended early, if neither its request nor the context did that."""
    max_tokens = seq.request.sampling.max_tokens
    asked = max_tokens is not None and seq.num_output_tokens >= max_tokens
    if asked or seq.num_tokens >= max_model_len:
        return None
    return "kv_capacity" if seq.request.hold_kv_s is None else PREFILLED

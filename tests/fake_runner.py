"""A model small enough to check: its KV entries are digests of all that they depend on."""

from __future__ import annotations

from tokenmill.core.types import FinishReason, Request, StepResult, TokenLogprobs
from tokenmill.sched.scheduler import Batch, Sequence

VOCAB = 11
EOS = frozenset({0})


def digests(token_ids: list[int], salt: str) -> list[int]:
    """What the KV cache must hold at each position: it depends on the whole prefix."""
    state = sum(salt.encode())
    out = []
    for token in token_ids:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
        out.append(state)
    return out


def next_token(digest: int) -> int:
    return digest * 7919 % 104_729 % VOCAB


def expected(request: Request, max_model_len: int, pool_tokens: int) -> tuple[list[int], object]:
    """Tokens and (finish, stop) reason of a request that runs undisturbed."""
    ids, p = list(request.prompt_token_ids), request.sampling
    num_output = 0
    while True:
        token = next_token(digests(ids, request.cache_salt)[-1])
        ids.append(token)
        num_output += 1
        out = ids[-num_output:]
        if num_output >= p.min_tokens:
            if token in EOS and not p.ignore_eos:
                return out, (FinishReason.STOP, None)
            if token in p.stop_token_ids:
                return out, (FinishReason.STOP, token)
        if num_output == p.max_tokens or len(ids) == max_model_len:
            return out, (FinishReason.LENGTH, None)
        if len(ids) > pool_tokens:
            return out, (FinishReason.LENGTH, "kv_capacity")


class FakeRunner:
    """Writes the KV of the whole batch, then reads it back as attention would, then samples."""

    def __init__(self, num_blocks: int, block_size: int, tokens_per_step: int = 1) -> None:
        self.block_size = block_size
        self.kv: list[int | None] = [None] * (num_blocks * block_size)
        self.tokens_per_step = tokens_per_step

    def slot(self, seq: Sequence, position: int) -> int:
        block = seq.block_ids[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def run(self, batch: Batch) -> StepResult:
        assert batch.num_tokens == sum(num_new for _, num_new in batch.items)
        singles = [num_new == 1 for _, num_new in batch.items]
        assert singles == sorted(singles, reverse=True), "items with one new token come first"
        assert len({id(seq) for seq, _ in batch.items}) == len(batch.items)
        self._write(batch)
        result = StepResult([self._sample(seq, num_new) for seq, num_new in batch.items])
        for index, (seq, num_new) in enumerate(batch.items):
            if seq.request.sampling.prompt_logprobs is not None:
                result.prompt_logprobs[index] = self._prompt_logprobs(seq, num_new)
        if any(seq.request.sampling.logprobs is not None for seq, _ in batch.items):
            result.logprobs = [
                [TokenLogprobs([t], [-float(t)], 1) for t in tokens] for tokens in result.token_ids
            ]
        return result

    def _write(self, batch: Batch) -> None:
        written: set[int] = set()
        for seq, num_new in batch.items:
            begin, end = seq.num_computed_tokens, seq.num_computed_tokens + num_new
            assert num_new >= 1 and end <= seq.num_tokens
            values = digests(seq.token_ids[:end], seq.request.cache_salt)
            for position in range(begin, end):
                slot = self.slot(seq, position)
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                self.kv[slot] = values[position]

    def _sample(self, seq: Sequence, num_new: int) -> list[int]:
        end = seq.num_computed_tokens + num_new
        values = digests(seq.token_ids[:end], seq.request.cache_salt)
        assert [self.kv[self.slot(seq, p)] for p in range(end)] == values, "wrong blocks are read"
        if end < seq.num_tokens:
            return []
        ids = list(seq.token_ids)
        for _ in range(self.tokens_per_step):
            ids.append(next_token(digests(ids, seq.request.cache_salt)[-1]))
        return ids[seq.num_tokens :]

    def _prompt_logprobs(self, seq: Sequence, num_new: int) -> list[TokenLogprobs]:
        first = seq.num_computed_tokens + 1
        last = min(first + num_new, seq.num_prompt_tokens)
        return [TokenLogprobs([seq.token_ids[p]], [-float(p)], 1) for p in range(first, last)]

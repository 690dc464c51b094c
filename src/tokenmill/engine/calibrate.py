"""fp8 for narrow models: the channels that matter most are rounded twice.

A product in e4m3 is off by some 3.6 % of each term. Wide models average that away; in narrow ones a
few channels carry most of a product, and so most of its error. Which ones, the model itself
tells: random tokens run through it once in bf16, and each product keeps its largest terms.
"""

from __future__ import annotations

import random
from functools import partial

import torch

from tokenmill.core.types import Request
from tokenmill.engine.runner import ModelRunner
from tokenmill.kernels.matmul import QuantizedRows, Rounding
from tokenmill.kernels.norm import Activation, act_and_mul, rms_norm
from tokenmill.layers.linear import Linear
from tokenmill.layers.residual import Residual
from tokenmill.parallel import ONE, Ranks
from tokenmill.sched.sequence import Batch, Sequence

NARROW = 2048  # hidden sizes below it
NUM_CHANNELS = 128
NUM_TOKENS = 512
NUM_SINKS = 8  # first tokens, whose activations are unlike all others

Shares = dict[int, torch.Tensor]  # by id of a Linear: of its products' power by channel, fp32 [k]


class ObservedResidual(Residual):
    """A stream that notes the terms of every product, norms and gates computed apart."""

    __slots__ = ("shares",)

    def __init__(self, shares: Shares, x: torch.Tensor, eps: float) -> None:
        super().__init__(x, eps)
        self.shares = shares

    def project(self, norm: torch.Tensor | None, linear: Linear) -> torch.Tensor:
        rows = self.x if norm is None else rms_norm(self.x, norm, self.eps)
        return linear(self._see(linear, rows))

    def gate(
        self,
        norm: torch.Tensor,
        gate_up: Linear,
        rounding: Rounding | None,
        activation: Activation = "silu",
    ) -> torch.Tensor | QuantizedRows:
        rows = gate_up(self._see(gate_up, rms_norm(self.x, norm, self.eps)))
        return act_and_mul(rows, rounding, activation)

    def add(
        self,
        linear: Linear,
        rows: torch.Tensor | QuantizedRows,
        ranks: Ranks = ONE,
        norm: torch.Tensor | None = None,
    ) -> None:
        seen = self._see(linear, rows)
        if norm is None:
            linear(seen, add_to=self.x)
        else:
            self.x.add_(Residual(linear(seen), self.eps).normed(norm))

    def _see(self, linear: Linear, rows: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """Note each channel's share of every token's product; all tokens count alike."""
        assert isinstance(rows, torch.Tensor)
        columns = linear.weight.data.float().pow(2).sum(0)
        terms = rows[min(NUM_SINKS, len(rows) - 1) :].float().pow(2) * columns
        total = terms.sum(1, keepdim=True).clamp(min=1e-30)
        self.shares[id(linear)] = (terms / total).mean(0)
        return rows.to(self.x.dtype)


@torch.inference_mode()
def quantize(runner: ModelRunner) -> None:
    """Turn the bf16 linears of the runner's model into fp8; its cache must be nobody's yet."""
    model, shares = runner.model, Shares()
    model.stream = partial(ObservedResidual, shares)
    try:
        runner.run(_random_batch(runner))
    finally:
        model.stream = Residual
    for linear in model.linears:
        most = min(NUM_CHANNELS, linear.weight.k // 4)
        count = 1 << (most.bit_length() - 1)  # the kernels take a power of two
        linear.to_fp8(shares[id(linear)].topk(count).indices.int())


def _random_batch(runner: ModelRunner) -> Batch:
    """One prompt of random tokens in the first blocks of the cache."""
    size = runner.block_size
    room = (runner.kv_cache[0][0].shape[0] - 1) // runner.sliding.pages_per_block
    num_blocks = min(NUM_TOKENS // size + 1, room)
    count = min(NUM_TOKENS, num_blocks * size, runner.builder.max_len)
    source = random.Random(0)
    token_ids = [source.randrange(runner.model.spec.vocab_size) for _ in range(count)]
    seq = Sequence(Request("calibration", token_ids), (0, 0, 0), count, frozenset())
    seq.block_ids, seq.slot = list(range(num_blocks)), 0
    seq.window_ids = list(range(num_blocks, num_blocks * runner.sliding.pages_per_block))
    return Batch([(seq, count)], count, [(seq, 0)])

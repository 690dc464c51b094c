"""A video divided over ranks: its tokens and heads while it is denoised, its columns in decoding.

Ranks of one guidance branch are neighbours. Each has a share of the tokens; inside attention it has
all tokens of a share of the heads (Ulysses). The decoder's ranks have columns of the picture, and
what a convolution sees of the next column comes from the neighbour, so that no seam is there.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from tokenmill.parallel import ONE, Ranks


class TokenSplit:
    """This rank's guidance branch and tokens; of one rank it is the identity."""

    def __init__(self, ranks: Ranks = ONE, cfg: int = 1) -> None:
        self.ranks, self.cfg, self.size = ranks, cfg, ranks.size // cfg
        self.branch, self.index = divmod(ranks.rank, self.size)

    def own(self, num_tokens: int) -> slice:
        """The tokens of this rank; their number is a multiple of the ranks of a branch."""
        return Ranks(self.index, self.size).own(num_tokens)

    def to_heads(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[branches, own tokens, heads, dim] each -> [branches, tokens, own heads, dim]."""
        if self.size == 1:
            return parts
        x = torch.stack(parts).unflatten(-2, (self.size, -1))
        received = self._exchange(x.movedim(-3, 0))  # [ranks, parts, branches, n, heads, dim]
        return tuple(received.movedim(0, 2).flatten(2, 3).unbind())

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[branches, tokens, own heads, dim] -> [branches, own tokens, heads, dim]."""
        if self.size == 1:
            return x
        received = self._exchange(x.unflatten(1, (self.size, -1)).movedim(1, 0))
        return received.movedim(0, 2).flatten(2, 3)

    def gather(self, rows: torch.Tensor, branches: int) -> torch.Tensor:
        """[branches * own tokens, k] -> [all branches, tokens, k] on every rank."""
        if self.ranks.size == 1:
            return rows.view(branches, -1, rows.shape[1])
        found = self.ranks.gather(rows).view(self.cfg, self.size, branches, -1, rows.shape[1])
        return found.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Row i goes to rank i of this branch; ranks of the other branch have none of it."""
        first = self.branch * self.size
        counts = [int(first <= rank < first + self.size) for rank in range(self.ranks.size)]
        return self.ranks.exchange(x, counts, counts).wait()


class ColumnSplit:
    """This rank's columns of latents; of one rank it is the identity."""

    def __init__(self, ranks: Ranks = ONE) -> None:
        self.ranks = ranks

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of this rank, of x[..., width]."""
        return x[..., self.ranks.own(x.shape[-1])]

    def with_neighbours(self, x: torch.Tensor) -> torch.Tensor:
        """One more column on either side: the neighbour's, or zeros at the edge of the picture."""
        if self.ranks.size == 1:
            return pad(x, (1, 1))
        rank, last = self.ranks.rank, self.ranks.size - 1
        counts = [int(abs(other - rank) == 1) for other in range(last + 1)]
        ends = [x[..., :1]] * (rank > 0) + [x[..., -1:]] * (rank < last)
        sent = torch.cat([end.movedim(-1, 0) for end in ends])
        received = self.ranks.exchange(sent, counts, counts).wait().movedim(0, -1)
        left = received[..., :1] if rank else torch.zeros_like(x[..., :1])
        right = received[..., -1:] if rank < last else torch.zeros_like(x[..., :1])
        return torch.cat([left, x, right], dim=-1)

    def all_columns(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Every rank's columns, of x[..., own width], on every rank."""
        if self.ranks.size == 1:
            return x
        whole = x.new_empty(width, *x.shape[:-1])
        whole[self.ranks.own(width)] = x.movedim(-1, 0)
        self.ranks.join(whole)
        return whole.movedim(0, -1)

    def join(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """On rank 0 x[..., width] from the columns of all; elsewhere its own ones."""
        if self.ranks.size == 1:
            return x
        own = self.ranks.own(width)
        scale = x.shape[-1] // (own.stop - own.start)  # pixels of a latent
        columns = x.unflatten(-1, (-1, scale)).transpose(-1, -2)
        joined = self.ranks.side_by_side(columns.flatten(0, -2), width)
        return joined.view(*columns.shape[:-1], -1).transpose(-1, -2).flatten(-2)

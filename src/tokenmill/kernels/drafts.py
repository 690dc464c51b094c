"""The bookkeeping of drafts on the device: where they lie, which were right, what comes next."""

from __future__ import annotations

import torch

from tokenmill.kernels import always, kernel

Pair = tuple[torch.Tensor, torch.Tensor]


@kernel(gpu=always)
def place_drafts(
    base: torch.Tensor,
    rows: torch.Tensor,
    capacities: torch.Tensor,
    tables: torch.Tensor,
    offset: int,
    width: int,
    block_size: int,
    max_len: int,
    pad_block: int,
) -> Pair:
    """Positions and cache slots of `width` tokens from base + offset on, int32 [seqs * width] each.

    A sequence's blocks are tables[row] and hold `capacity` tokens; what lies beyond goes to the
    pad block. Positions end at max_len - 1.
    """
    steps = torch.arange(offset, offset + width, dtype=torch.int32, device=base.device)
    positions = (base[:, None] + steps).clamp(max=max_len - 1)
    blocks = tables[rows.long()[:, None], (positions // block_size).long()]
    slots = blocks * block_size + positions % block_size
    slots = torch.where(positions < capacities[:, None], slots, pad_block * block_size)
    return positions.reshape(-1), slots.reshape(-1)


@kernel(gpu=always)
def accept_drafts(
    tokens: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, contexts: torch.Tensor
) -> Pair:
    """The row of each sequence's last sampled token that counts, int64, and its position, int32.

    tokens [seqs, k + 1] was sampled after ids [seqs, k + 1], the newest token and k drafts, of
    which the first counts [seqs] are compared; the first row stands at contexts [seqs].
    """
    count, width = ids.shape
    num_right = count_accepted(tokens, ids[:, 1:], counts)
    firsts = torch.arange(count, device=ids.device) * width
    return firsts + num_right, (contexts + num_right).int()


def count_accepted(
    tokens: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """How many drafts of each sequence are what was sampled in their place, int64 [seqs].

    tokens is [seqs, k + 1], drafts [seqs, k], of which the first counts [seqs] are compared.
    """
    places = torch.arange(drafts.shape[1], device=drafts.device)
    right = (tokens[:, :-1] == drafts) & (places < counts[:, None])
    return right.long().cumprod(dim=1).sum(dim=1)


@kernel(gpu=always)
def advance_drafts(
    tokens: torch.Tensor,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
    contexts: torch.Tensor,
    counts: torch.Tensor,
    capacities: torch.Tensor,
    max_len: int,
) -> torch.Tensor:
    """tokens and drafts side by side, int32 [seqs, 2 k + 1]; ids, contexts, counts become the next.

    `positions` are accept_drafts'. Rows without capacity are padding and stay at their beginning.
    """
    depth, real = drafts.shape[1], capacities > 0
    ids[:, :1] = tokens.gather(1, (positions - contexts).long()[:, None])
    ids[:, 1:] = drafts
    contexts.copy_(torch.where(real, (positions + 1).clamp(max=max_len - 1 - depth), 0))
    counts.copy_(torch.where(real, depth, 0))
    return torch.cat([tokens, drafts], dim=1)

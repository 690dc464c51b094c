"""The routed experts of a layer: those that this rank holds, and the way to those of others.

Experts lie in slots, equally many on each rank. An expert may lie in several slots; the tokens of a
rank then use its copies, which are the same to the last bit, in turns, on from step to step. A row
is sent to its expert's rank and its result comes back; its sum runs at home, in the order of the
router's choice, so the answer does not depend on where experts lie.

Where all ranks know how many rows a step has and these are few, each rank sends every other one as
many as it could: the host then need not wait to hear how many they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch

from tokenmill.kernels.matmul import pack
from tokenmill.kernels.moe import PackedExperts, apply_experts, dequantize_mxfp4
from tokenmill.kernels.rows import Activation
from tokenmill.layers.linear import ComputeType, Device, Tensors, activation_dtype
from tokenmill.parallel import ALONE, Exchange, Layout

# Rows of a step, each token's choices, up to which padding them costs less than a wait of the host
# in each layer; not measured on GPUs.
MOST_PADDED = 1024


def first_placement(num_experts: int, layout: Layout) -> list[int]:
    """The expert of each slot before any load is known: in order, and from the first again."""
    return [slot % num_experts for slot in range(layout.num_slots or num_experts)]


def own_slots(placement: list[int], layout: Layout) -> list[int]:
    return placement[layout.ranks.own(len(placement))]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows on their way to their experts' ranks."""

    order: torch.Tensor  # the choices (token * top_k + choice) in the order they were sent
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    slots: torch.Tensor  # int32 [rows]: the own slot that each received row is for
    rows: Exchange
    places: torch.Tensor | None = None  # of sent rows among others that pad them


class RoutedExperts:
    """The experts' matrices, packed as they come out of a checkpoint."""

    def __init__(
        self, num_experts: int, dtype: ComputeType, device: Device, layout: Layout = ALONE
    ) -> None:
        self.layout, self.num_experts = layout, num_experts
        self._dtype, self._device = dtype, device
        self._halves: dict[int, Tensors] = {}
        self._codes: dict[str, Tensors] = {}
        self.place(first_placement(num_experts, layout))
        num_own = len(self.own)
        self.gate_up, self.down = PackedExperts(num_own), PackedExperts(num_own)
        self._turn = layout.ranks.rank  # of the next token; ranks begin at different copies
        self.num_rows = torch.zeros(num_own, dtype=torch.int64, device=device)  # by slot, counted

    def place(self, placement: list[int]) -> None:
        """Say which expert each slot of all ranks holds from now on."""
        self.placement, self.own = placement, own_slots(placement, self.layout)
        copies: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(placement):
            copies[expert].append(slot)
        most = max(map(len, copies))
        table = [slots + slots[:1] * (most - len(slots)) for slots in copies]
        self._slots = torch.tensor(table, device=self._device)
        self._num_copies = torch.tensor([len(slots) for slots in copies], device=self._device)

    def put(self, expert: int, kind: str, weight: torch.Tensor) -> None:
        """Take one matrix: "gate", "up" or "down"; gate and up are packed once both are there."""
        target = self.down
        if kind != "down":
            halves = self._halves.setdefault(expert, {})
            halves[kind] = weight.to(self._device)
            if len(halves) < 2:
                return
            del self._halves[expert]
            target, weight = self.gate_up, torch.cat([halves["gate"], halves["up"]])
        packed = pack(weight, self._dtype, self._device)
        for slot in (slot for slot, held in enumerate(self.own) if held == expert):
            target.put(slot, packed)

    def put_stacked(self, kind: str, part: str, stacked: torch.Tensor) -> None:
        """Take a part of all experts' matrices of a kind, "gate_up" or "down".

        Parts are "weight" [experts, k, n] and "bias" [experts, n], or in the place of weights the
        "blocks" and "scales" of MXFP4: see PackedExperts.
        """
        target = self.down if kind == "down" else self.gate_up
        if part in ("blocks", "scales"):
            codes = self._codes.setdefault(kind, {})
            codes[part] = stacked
            if len(codes) == 2:
                self._put_mxfp4(target, **self._codes.pop(kind))
            return
        for slot, expert in enumerate(self.own):
            if part == "bias":
                bias = stacked[expert].to(self._device, activation_dtype(self._dtype))
                target.put_bias(slot, bias)
            else:
                target.put(slot, pack(stacked[expert].mT, self._dtype, self._device))

    def _put_mxfp4(self, target: PackedExperts, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """A GPU's kernels read codes; on CPU they become weights of the compute type."""
        for slot, expert in enumerate(self.own):
            own = blocks[expert].to(self._device), scales[expert].to(self._device)
            if activation_dtype(self._dtype) == torch.bfloat16:
                target.put_mxfp4(slot, *own)
            else:
                weight = dequantize_mxfp4(*own, torch.float32)
                target.put(slot, pack(weight, self._dtype, self._device))

    def room(self, num_tokens: int, top_k: int) -> int | None:
        """Rows that one rank sends another at most in a step of so many tokens; None: many."""
        few = num_tokens * top_k <= MOST_PADDED
        return -(-num_tokens // self.layout.ranks.size) * top_k if few else None

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, room: int | None = None) -> Dispatched:
        """Start to send x[t, k] to the ranks of its experts ids[t, top_k].

        With `room` each rank sends every other one so many rows, most of which stand for nothing.
        """
        chosen = ids.long()
        turns = torch.arange(self._turn, self._turn + ids.shape[0], device=ids.device)
        self._turn += ids.shape[0]
        slots = self._slots[chosen, turns[:, None] % self._num_copies[chosen]].flatten()
        order = slots.argsort(stable=True)
        if room is not None:
            return self._send_padded(x[order // ids.shape[1]], slots[order], order, room)
        return self._send_counted(x, slots, order, ids.shape[1])

    def _send_padded(
        self, x: torch.Tensor, slots: torch.Tensor, order: torch.Tensor, room: int
    ) -> Dispatched:
        """Send rows, sorted by their slots, in as much room to every rank."""
        ranks, num_own, device = self.layout.ranks, len(self.own), x.device
        equal, to = [room] * ranks.size, slots // num_own
        counts = torch.zeros(ranks.size, dtype=torch.int64, device=device)
        counts.index_add_(0, to, torch.ones_like(to))
        begins = counts.cumsum(0) - counts
        places = torch.arange(len(slots), device=device) - begins[to] + to * room
        rows = x.new_ones(ranks.size * room, x.shape[1])
        named = torch.full((len(rows),), -1, dtype=torch.int64, device=device)
        rows[places], named[places] = x, slots % num_own
        sent = ranks.exchange(rows, equal, equal)
        named = ranks.exchange(named, equal, equal).wait()
        own = named.clamp(min=0)
        self.num_rows.index_add_(0, own, (named >= 0).long())
        return Dispatched(order, equal, equal, own.int(), sent, places)

    def _send_counted(
        self, x: torch.Tensor, slots: torch.Tensor, order: torch.Tensor, top_k: int
    ) -> Dispatched:
        """Send as many rows as there are to each rank; it hears how many before."""
        ranks, device = self.layout.ranks, x.device
        counts = torch.bincount(slots, minlength=len(self.placement))
        equal = [len(self.own)] * ranks.size
        incoming = ranks.exchange(counts, equal, equal).wait()  # [rank, own slot]
        self.num_rows += incoming.unflatten(0, (ranks.size, -1)).sum(0)
        sizes = torch.stack([counts, incoming]).unflatten(1, (ranks.size, -1)).sum(2)
        sent, received = sizes.tolist()  # the host has to know how much memory to give
        rows = ranks.exchange(x[order // top_k], sent, received)
        own = torch.arange(len(self.own), dtype=torch.int32, device=device).repeat(ranks.size)
        of_row = own.repeat_interleave(incoming, output_size=sum(received))
        return Dispatched(order, sent, received, of_row, rows)

    def combine(self, sent: Dispatched, activation: Activation = "silu") -> torch.Tensor:
        """Compute what has arrived and take back the own rows: [t * top_k, n] by choice."""
        x, slots = sent.rows.wait(), sent.slots[:, None]
        rows = apply_experts(x, slots, self.gate_up, self.down, activation)
        if rows.dim() == 3:  # in parts, which ranks with more rows do not have
            rows = reduce(torch.add, rows).to(x.dtype)
        back = self.layout.ranks.exchange(rows, sent.received, sent.sent).wait()
        if sent.places is not None:
            back = back[sent.places]
        results = torch.empty_like(back)
        results[sent.order] = back
        return results

    def parts(self, slot: int) -> list[torch.Tensor]:
        """What an own slot holds: views of its matrices, their scales and biases."""
        return [*self.gate_up.parts(slot), *self.down.parts(slot)]

    @property
    def elsewhere(self) -> set[int]:
        return set(range(self.num_experts)) - set(self.own)

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes

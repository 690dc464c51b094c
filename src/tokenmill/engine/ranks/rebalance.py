"""Experts moved between ranks while an engine runs: load counted, placement chosen, weights sent.

Every rank counts the same turns, gathers the same counts and chooses the same placement, so nobody
has to be told. Between two steps the experts of a few layers move at most; copies are the same to
the last bit, so no output changes.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from tokenmill.core.config import ParallelConfig
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.layers.experts import RoutedExperts
from tokenmill.parallel import Ranks
from tokenmill.routing import eplb

_log = logging.getLogger(__name__)
MIN_GAIN = 1.03  # a layer's experts move when its busiest rank gets so many times less to do


class Rebalancer:
    """Looks at the load of all layers' experts every so many turns, and moves those that gain."""

    def __init__(
        self, experts: list[RoutedExperts], spec: ModelSpec, config: ParallelConfig, ranks: Ranks
    ) -> None:
        self._experts, self._config, self._ranks = experts, config, ranks
        self._num_groups, self._num_nodes = spec.moe.num_groups if spec.moe else 1, config.nodes
        if self._num_groups % config.nodes:
            self._num_nodes = 1
            if not ranks.rank:
                _log.warning(
                    "%d nodes: that number does not divide the %d routing groups of the model: "
                    "experts are placed on all ranks alike", config.nodes, self._num_groups,
                )  # fmt: skip
        self._turns = 0
        self._queue: list[tuple[int, eplb.Placement]] = []  # layers to move, and what to
        self.num_rebalances = 0
        self.num_bytes_moved = 0
        self.seconds = 0.0
        self.imbalance = 0.0  # mean over layers of the busiest rank's rows over a rank's mean
        self.imbalance_before = 0.0

    def turn(self) -> None:
        """What belongs between two steps; all ranks call this in the same order."""
        self._turns += 1
        if self._queue:
            self._timed_move()
        elif self._turns >= self._config.rebalance_steps:
            self._look()

    def _look(self) -> None:
        """Choose a placement for the load since the last look."""
        start = time.perf_counter()
        rows = self._rows()
        size = self._ranks.size
        by_rank = rows.reshape(len(rows), size, -1).sum(2)
        self.imbalance = float(np.mean([eplb.imbalance(loads) for loads in by_rank]))
        for layer, experts in enumerate(self._experts):
            old = experts.placement
            load = np.bincount(old, rows[layer], minlength=experts.num_experts)
            new = eplb.place(load, len(old), size, self._num_groups, self._num_nodes)
            now, then = (eplb.rank_loads(load, p, size).max() for p in (old, new))
            if now > MIN_GAIN * then:
                kept = eplb.keep_slots(new, old, size, self._num_nodes)
                self._queue.append((layer, kept))
        if self._queue:
            self.num_rebalances += 1
            self.imbalance_before = self.imbalance
        self.seconds += time.perf_counter() - start

    def _rows(self) -> np.ndarray:
        """Rows that each slot has computed since the last look, [layers, slots of all ranks]."""
        counts = torch.stack([experts.num_rows for experts in self._experts])
        self._forget()
        rows: np.ndarray = self._ranks.gather(counts).transpose(0, 1).flatten(1).cpu().numpy()
        return rows

    def _forget(self) -> None:
        self._turns = 0
        for experts in self._experts:
            experts.num_rows.zero_()

    def _timed_move(self) -> None:
        start = time.perf_counter()
        for _ in range(min(self._config.rebalance_layers, len(self._queue))):
            layer, placement = self._queue.pop(0)
            self.num_bytes_moved += move_experts(self._experts[layer], placement)
        if not self._queue:  # from here on all that is counted is counted where it lies now
            self._forget()
        self.seconds += time.perf_counter() - start


def move_experts(experts: RoutedExperts, placement: eplb.Placement) -> int:
    """Bring a layer's experts to where a placement wants them; bytes sent between all ranks."""
    ranks, per_rank = experts.layout.ranks, len(experts.own)
    sends: list[tuple[int, torch.Tensor]] = []
    receives: list[tuple[int, torch.Tensor]] = []
    arrived: list[tuple[torch.Tensor, torch.Tensor]] = []  # (slot's tensor, its new content)
    num_bytes = 0
    for slot, source in eplb.moves(experts.placement, placement, ranks.size):
        (to, own_slot), (origin, origin_slot) = divmod(slot, per_rank), divmod(source, per_rank)
        crosses = to != origin
        num_bytes += crosses * sum(part.nbytes for part in experts.parts(0))
        if crosses and origin == ranks.rank:
            sends += [(to, part) for part in experts.parts(origin_slot)]
        if to == ranks.rank:
            targets = experts.parts(own_slot)
            if crosses:
                new = [torch.empty_like(part) for part in targets]
                receives += [(origin, part) for part in new]
            else:
                new = [part.clone() for part in experts.parts(origin_slot)]
            arrived += zip(targets, new, strict=True)
    ranks.move(sends, receives)  # every slot is read before one is written
    for target, content in arrived:
        target.copy_(content)
    experts.place(placement)
    return num_bytes

"""The one place where a request ends, and the terminal outputs that no batch produces."""

from __future__ import annotations

from tokenmill.core.types import End, EngineStats, FinishReason, RequestOutput
from tokenmill.sched.cache.block_ledger import BlockLedger
from tokenmill.sched.cache.leases import Leases
from tokenmill.sched.meter import StepMeter
from tokenmill.sched.request_queues import RequestQueues
from tokenmill.sched.sequence import Sequence


class Endings:
    """Takes ended requests out of the queues, frees what they hold, and counts how they ended."""

    def __init__(
        self,
        queues: RequestQueues,
        ledger: BlockLedger,
        leases: Leases,
        counters: EngineStats,
        meter: StepMeter,
    ) -> None:
        self._queues, self._ledger, self._leases = queues, ledger, leases
        self.meter = meter
        self._num_finished = counters.num_finished
        self._outputs: list[RequestOutput] = []

    def __bool__(self) -> bool:
        """True while an output waits to be taken."""
        return bool(self._outputs)

    def take(self) -> list[RequestOutput]:
        """The terminal outputs that no batch produces, each once."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def reject(self, request_id: str, stop_reason: str, error: str) -> None:
        """Refuse a request; take() has its terminal output."""
        self._count(FinishReason.REJECT)
        self._outputs.append(End(FinishReason.REJECT, stop_reason, error).output(request_id))

    def end_between_steps(self, seq: Sequence, end: End) -> None:
        """End a request outside a batch; take() has its terminal output."""
        self._outputs.append(self.end(seq, end))

    def end(self, seq: Sequence, end: End) -> RequestOutput:
        """End a request that has no new token; returns its terminal output."""
        self.finish(seq, end.reason)
        return end.output(seq.request_id, seq.num_cached_tokens, seq.scheduled_ns, seq.cost)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Mark a request as ended, and free what it holds."""
        seq.finished = True
        self.meter.settle(seq)
        self._count(reason)
        self._leases.abandon(seq.request_id)
        if self._queues.leave(seq):
            self._ledger.abandon(seq)
        else:
            self._ledger.retire(seq)

    def _count(self, reason: FinishReason) -> None:
        self._num_finished[reason.value] = self._num_finished.get(reason.value, 0) + 1

"""All messages between a front and a worker: msgpack of tagged structs over one socket.

A prefill worker and a decode worker share a request by these messages, in order:

1. Once per pair: the front sends ConnectKV with the prefill worker's address (ModelFacts.kv) to the
   decode worker, which answers KVConnected; its `error` says why the two do not go together.
2. Submit to the prefill worker with Generate.hold_kv_s. It answers with KVNotices, chunk by chunk,
   and with one Outputs: the first token. Only if its stop_reason is "prefilled" is there more to
   come; the lease then runs for hold_kv_s.
3. On the first notice of a request: Submit to the decode worker with Generate.kv_from, then
   KVNotices with each notice as it came. The decode worker reads the blocks, says KVReceived and
   sends the outputs from the second token on.
4. On KVReceived, or when the decode worker ends the request: ReleaseKV to the prefill worker.
   LeasesExpired tells of leases that nobody released in time.

Whatever ends a request early is Abort to both. A dead prefill worker is DisconnectKV to its decode
workers: requests that wait for its KV end in ERROR with stop_reason "kv_transfer", as they do when
no notice comes for half a lease. A dead decode worker is Abort or ReleaseKV to the prefill worker.

What the API has to know of an engine of another task than text is in ModelFacts.about.

With several fronts (fronts/), the process that started a worker is its owner, and each front has a
link of its own: AddFront makes the worker connect to it, and the same messages go over it. Each
front gets the outputs of its own requests; cache events go to all fronts that asked for them, and
LoadReported to all, between two steps.
FrontLost tells the owner that a link broke. DropFront ends the requests that came over a link; the
answer, FrontDropped, is sent once the engine has ended them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.core.cost import Cost
from tokenmill.core.kv import KVAddress, KVNotice
from tokenmill.core.kv_events import Dump, EventBatch, PackedEvent, pack_events, unpack_events
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.types import EngineStats
from tokenmill.routing.load_report import LoadReport


class ModelFacts(msgspec.Struct, frozen=True):
    """What the worker tells the frontend about the engine it owns."""

    max_model_len: int = 0
    vocab_size: int = 0
    num_kv_blocks: int = 0
    block_size: int = 1
    dtype: str = "none"
    kv_tokens: int | None = None  # of one request that the blocks hold
    device: str = "cpu"
    kv: KVAddress | None = None  # how other engines reach its KV
    max_waiting: int | None = None  # requests that may wait; None: any number
    warnings: list[str] = []  # sentences about what did not go as asked
    about: dict[str, Any] = {}  # of an engine of another task than text
    gpus: list[str] = []  # what names its GPUs on whatever machine


class Submit(msgspec.Struct, tag=True):
    requests: list[Request]
    num_uncached: list[int] = []  # tokens to be computed, as the front sees it; []: whole prompts
    hashes: list[list[int]] = []  # with several fronts: marks of the blocks that each computes


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class GetStats(msgspec.Struct, tag=True):
    """Answered by one Stats: the heartbeat."""


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Forget all cached blocks; running requests keep theirs."""


class GetKV(msgspec.Struct, tag=True):
    """Answered by a KVDump and, from then on, by BlockEvents; by an engine that knows of these."""

    with_tokens: bool = False  # events have the tokens of blocks, too


class Shutdown(msgspec.Struct, tag=True):
    """Leave the loop and exit; only the owner is obeyed."""

    reason: str = ""  # why a worker that came by itself is not taken


class AddFront(msgspec.Struct, tag=True):
    """Connect to a front, say Ready there, and take requests from it."""

    front: str
    address: str  # as WorkerLink.address


class DropFront(msgspec.Struct, tag=True):
    """End all requests of a front and forget it; answered by one FrontDropped."""

    front: str


class FrontLost(msgspec.Struct, tag=True):
    """The link to a front broke, or could not be made."""

    front: str


class FrontDropped(msgspec.Struct, tag=True):
    """The engine has ended all requests of a front."""

    front: str


class Ready(msgspec.Struct, tag=True):
    facts: ModelFacts
    clock_ns: int = 0  # the worker's time.monotonic_ns(): another host's clock is another one
    pid: int = 0


class WorkerFailed(msgspec.Struct, tag=True):
    """The worker is about to exit; the message is one sentence for the user."""

    message: str


class Outputs(msgspec.Struct, tag=True):
    """What a step produced. Most of it is `tokens`: of requests that have begun and go on."""

    outputs: list[RequestOutput]
    tokens: dict[str, list[int]] = {}  # before `outputs`

    def all(self) -> list[RequestOutput]:
        plain = [RequestOutput(request_id, ids) for request_id, ids in self.tokens.items()]
        return plain + self.outputs


class OutputPacker:
    """Packs the outputs of steps: all that a first one says is not said again."""

    def __init__(self) -> None:
        self._begun: set[str] = set()  # requests whose first output has been packed

    def pack(self, outputs: list[RequestOutput]) -> Outputs:
        begun, others = self._begun, []
        tokens: dict[str, list[int]] = {}
        for output in outputs:
            request_id = output.request_id
            if (
                output.finish_reason is None
                and output.logprobs is None
                and output.prompt_logprobs is None
                and output.delta is None
                and request_id in begun
                and request_id not in tokens
            ):
                tokens[request_id] = output.token_ids
            else:
                others.append(output)
        for output in others:
            if output.finish_reason is None:
                begun.add(output.request_id)
            else:
                begun.discard(output.request_id)
        return Outputs(others, tokens)


class Stats(msgspec.Struct, tag=True):
    stats: EngineStats
    costs: dict[str, Cost] = {}  # of the requests that have not ended, so far


class BlockEvents(msgspec.Struct, tag=True):
    """What the prefix cache took in and dropped since the last batch."""

    sequence: int
    events: list[PackedEvent]

    @classmethod
    def of(cls, batch: EventBatch) -> BlockEvents:
        return cls(batch.sequence, pack_events(batch.events))

    def batch(self) -> EventBatch:
        return EventBatch(self.sequence, unpack_events(self.events))


class KVDump(msgspec.Struct, tag=True):
    dump: Dump


class LoadReported(msgspec.Struct, tag=True):
    """What all fronts have at a worker; sent to them where there are several."""

    report: LoadReport
    made_ns: int  # the worker's time.monotonic_ns()


class ConnectKV(msgspec.Struct, tag=True):
    """Be ready to read from a peer; answered by one KVConnected."""

    peer: KVAddress


class KVConnected(msgspec.Struct, tag=True):
    engine_id: str
    error: str | None = None


class DisconnectKV(msgspec.Struct, tag=True):
    """A peer is gone; requests that wait for its KV end in ERROR."""

    engine_id: str


class KVNotices(msgspec.Struct, tag=True):
    """From the worker that computes a prompt, to be passed on to the one that decodes."""

    notices: list[KVNotice]


class KVReceived(msgspec.Struct, tag=True):
    """The KV of these requests is here; their leases can be released."""

    request_ids: list[str]


class ReleaseKV(msgspec.Struct, tag=True):
    """End leases; unknown ids are ignored."""

    request_ids: list[str]


class LeasesExpired(msgspec.Struct, tag=True):
    """Nobody released these leases in time; their blocks are free."""

    request_ids: list[str]


KVToWorker = ConnectKV | DisconnectKV | KVNotices | ReleaseKV
KVFromWorker = KVConnected | KVNotices | KVReceived | LeasesExpired
FrontToWorker = AddFront | DropFront
FrontFromWorker = FrontLost | FrontDropped | LoadReported
ToWorker = (
    Submit | Abort | GetStats | GetKV | ResetPrefixCache | Shutdown | KVToWorker | FrontToWorker
)
FromWorker = (
    Ready | WorkerFailed | Outputs | Stats | BlockEvents | KVDump | KVFromWorker | FrontFromWorker
)

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode

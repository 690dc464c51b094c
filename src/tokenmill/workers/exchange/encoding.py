"""Images that workers of their own encode: who encodes each one, and who still needs it.

A request waits here until all its images are encoded, and then goes to a worker with the places of
their features. An image is encoded once, whoever wants it, and always by the same worker while the
workers are the same. Its features are held until all requests that know of them have ended at every
worker. Room is given to a request for all its images or for none, in the order in which they come,
so that no two requests wait for each other's.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from tokenmill.core.cost import Cost
from tokenmill.core.images import FeatureBlocks, ImageInput, ImageSpan
from tokenmill.core.kv import KVNotice
from tokenmill.core.types import FinishReason, Request, RequestOutput
from tokenmill.workers.messages import Abort, FromWorker, KVNotices, Outputs, Submit
from tokenmill.workers.open_request import OpenRequest
from tokenmill.workers.slot import WorkerSlot

_log = logging.getLogger(__name__)

OnReady = Callable[[OpenRequest], None]
OnFailed = Callable[[OpenRequest, FinishReason, str, str], None]


@dataclass(slots=True, eq=False)
class _Job:
    """An image at an encoder, and the open requests that need it."""

    sent_as: str
    slot: WorkerSlot
    num_blocks: int
    payer: OpenRequest  # who asked first
    users: set[OpenRequest] = field(default_factory=set)
    features: FeatureBlocks | None = None  # once they are there


class Encodings:
    """Owns what is at the encoders; `on_ready` and `on_failed` take requests further."""

    def __init__(
        self, slots: Mapping[str, WorkerSlot], enabled: bool, on_ready: OnReady, on_failed: OnFailed
    ) -> None:
        self._slots, self._enabled = slots, enabled
        self._on_ready, self._on_failed = on_ready, on_failed
        self._waiting: deque[OpenRequest] = deque()  # have no room yet
        self._encoding: set[OpenRequest] = set()
        self._jobs: dict[bytes, _Job] = {}  # by content
        self._by_id: dict[str, bytes] = {}
        self._used: Counter[WorkerSlot] = Counter()  # blocks of jobs
        self._num_sent = 0
        self.on_spent: Callable[[WorkerSlot, OpenRequest, Cost], None] | None = None
        self._gave_up = ""  # why there is no encoder any more

    # Requests.

    def needs(self, entry: OpenRequest) -> bool:
        """True for a request whose images have to be encoded before a worker can have it."""
        return self._enabled and bool(entry.request.images) and entry.located is None

    def add(self, entry: OpenRequest) -> None:
        """Take a request whose images are to be encoded."""
        if self._gave_up:
            self._on_failed(entry, FinishReason.ERROR, self._gave_up, "worker_died")
            return
        self._waiting.append(entry)
        self._start_waiting()

    def is_at(self, entry: OpenRequest, slot: WorkerSlot) -> bool:
        """True while a request waits for images of which an encoder has one."""
        return entry in self._encoding and any(job.slot is slot for job in self._jobs_of(entry))

    def release(self, entry: OpenRequest) -> None:
        """No worker needs the images of a request any more, and it does not wait for them."""
        if not entry.request.images or not self._enabled:
            return
        self._encoding.discard(entry)
        if entry.located is None and entry in self._waiting:
            self._waiting.remove(entry)
        entry.located = None
        for content in {span.image.content_hash for span in entry.request.images}:
            job = self._jobs.get(content)
            if job is not None and entry in job.users:
                job.users.remove(entry)
                if not job.users:
                    self._end(content)
        self._start_waiting()

    # Encoders.

    def worker_ready(self, slot: WorkerSlot) -> None:
        """An encoder takes images from now on."""
        if slot.role == "encoder":
            self._gave_up = ""
            self._start_waiting()

    def worker_down(self, slot: WorkerSlot) -> None:
        """An encoder is gone, and with it what it held."""
        lost = {content: job for content, job in self._jobs.items() if job.slot is slot}
        del self._used[slot]
        for content, job in lost.items():
            del self._jobs[content], self._by_id[job.sent_as]
            for entry in job.users:
                entry.located = None
                self._encoding.discard(entry)

    def give_up(self, message: str) -> None:
        """There is no encoder any more, and none will come."""
        self._gave_up = message
        waiting, self._waiting = list(self._waiting), deque()
        for entry in waiting:
            self._on_failed(entry, FinishReason.ERROR, message, "worker_died")

    def on_message(self, slot: WorkerSlot, message: FromWorker) -> None:
        """Take what an encoder says of its images."""
        match message:
            case KVNotices(notices=notices):
                for notice in notices:
                    self._on_notice(slot, notice)
            case Outputs(outputs=outputs):
                for output in outputs:
                    self._on_output(output)

    def _on_notice(self, slot: WorkerSlot, notice: KVNotice) -> None:
        """Take an encoder's word where the features of an image are."""
        job = self._jobs.get(self._by_id.get(notice.request_id, b""))
        if job is not None:
            address = None if slot.facts is None else slot.facts.kv
            assert address is not None
            job.features = FeatureBlocks(address.engine_id, tuple(notice.block_ids))
            if self.on_spent is not None:
                self.on_spent(slot, job.payer, Cost(prefill_s=notice.spent_s))
            for entry in [user for user in job.users if user in self._encoding]:
                self._check(entry)

    def _on_output(self, output: RequestOutput) -> None:
        """Take an encoder's word that it does not encode an image."""
        content = self._by_id.get(output.request_id)
        if content is not None and output.finish_reason is not None:
            for entry in list(self._jobs[content].users):
                reason, why = output.finish_reason, str(output.stop_reason)
                self._on_failed(entry, reason, output.error or "", why)

    # One request.

    def _start_waiting(self) -> None:
        """Send what has room, in turn."""
        while self._waiting and self._encoders():
            entry = self._waiting[0]
            new = self._new_jobs(entry)
            needed: Counter[WorkerSlot] = Counter()
            for job in new.values():
                needed[job.slot] += job.num_blocks
            most = [(slot, num, _capacity(slot)) for slot, num in needed.items()]
            if any(num > capacity for _, num, capacity in most):
                self._waiting.popleft()
                self._refuse(entry, max(num for _, num, _ in most))
                continue
            if any(self._used[slot] + num > capacity for slot, num, capacity in most):
                return
            self._waiting.popleft()
            self._start(entry, new)

    def _start(self, entry: OpenRequest, new: dict[bytes, _Job]) -> None:
        images = {span.image.content_hash: span for span in entry.request.images}
        for content, job in new.items():
            self._jobs[content], self._by_id[job.sent_as] = job, content
            self._used[job.slot] += job.num_blocks
            span = replace(images[content], offset=0)
            job.slot.send(Submit([Request(job.sent_as, [], images=(span,))]))
        for content in images:
            self._jobs[content].users.add(entry)
        self._encoding.add(entry)
        self._check(entry)

    def _check(self, entry: OpenRequest) -> None:
        """Send a request on whose images are all encoded."""
        if all(job.features is not None for job in self._jobs_of(entry)):
            self._encoding.remove(entry)
            entry.located = tuple(map(self._locate, entry.request.images))
            self._on_ready(entry)

    def _locate(self, span: ImageSpan) -> ImageSpan:
        image = span.image
        features = self._jobs[image.content_hash].features
        return replace(span, image=replace(image, data=b"", levels=b"", features=features))

    def _refuse(self, entry: OpenRequest, num_blocks: int) -> None:
        message = (
            f"the images have {num_blocks} blocks of features, more than an encoder holds: send "
            "smaller ones, or start the server with a larger --kv-cache-memory"
        )
        self._on_failed(entry, FinishReason.REJECT, message, "no_capacity")

    # Jobs.

    def _new_jobs(self, entry: OpenRequest) -> dict[bytes, _Job]:
        """The images of a request that nobody has asked for, each at the encoder that gets it."""
        new: dict[bytes, _Job] = {}
        for span in entry.request.images:
            content = span.image.content_hash
            if content not in self._jobs and content not in new:
                slot = choose_encoder(self._encoders(), span.image)
                self._num_sent += 1
                num_blocks = -(-span.num_tokens // _block_size(slot))
                new[content] = _Job(f"image-{self._num_sent}", slot, num_blocks, entry)
        return new

    def _jobs_of(self, entry: OpenRequest) -> list[_Job]:
        contents = {span.image.content_hash for span in entry.request.images}
        return [self._jobs[content] for content in contents if content in self._jobs]

    def _end(self, content: bytes) -> None:
        """Let an encoder forget an image that nobody needs."""
        job = self._jobs.pop(content)
        del self._by_id[job.sent_as]
        self._used[job.slot] -= job.num_blocks
        job.slot.send(Abort([job.sent_as]))

    def _encoders(self) -> list[WorkerSlot]:
        slots = self._slots.values()
        return [s for s in slots if s.role == "encoder" and s.state == "ready" and s.ready]


def choose_encoder(slots: list[WorkerSlot], image: ImageInput) -> WorkerSlot:
    """The worker that encodes an image: the same one as long as it is there."""

    def rank(slot: WorkerSlot) -> bytes:
        return blake2b(slot.name.encode(), key=image.content_hash, digest_size=8).digest()

    return max(slots, key=rank)


def _capacity(slot: WorkerSlot) -> int:
    return 0 if slot.facts is None else slot.facts.num_kv_blocks


def _block_size(slot: WorkerSlot) -> int:
    return 1 if slot.facts is None else slot.facts.block_size

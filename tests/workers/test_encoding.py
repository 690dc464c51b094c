"""Who encodes an image, how long its features are held, and what becomes of those who wait."""

from __future__ import annotations

from typing import Any, cast

from tiny_images import Prompt, image, prompt
from tokenmill.core.cost import Cost
from tokenmill.core.images import FeatureBlocks
from tokenmill.core.kv import KVNotice
from tokenmill.core.types import FinishReason, Request, RequestOutput
from tokenmill.workers.exchange.encoding import Encodings
from tokenmill.workers.messages import Abort, KVNotices, Outputs, Submit
from tokenmill.workers.open_request import OpenRequest
from tokenmill.workers.output_stream import OutputStream

A, B, C = (image(seed, (1, 8, 8)) for seed in range(3))  # 16 tokens: one block each


class Facts:
    block_size = 16

    def __init__(self, name: str, num_blocks: int) -> None:
        self.num_kv_blocks = num_blocks
        self.kv = type("Address", (), {"engine_id": f"engine of {name}"})()


class Slot:
    """An encoder that keeps what it is sent."""

    role, state, ready = "encoder", "ready", True

    def __init__(self, name: str, num_blocks: int = 8) -> None:
        self.name, self.facts = name, Facts(name, num_blocks)
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def submitted(self) -> list[str]:
        return [r.request_id for m in self.sent if isinstance(m, Submit) for r in m.requests]

    def aborted(self) -> list[str]:
        return [i for m in self.sent if isinstance(m, Abort) for i in m.request_ids]


class Front:
    """Encodings, and what they send on."""

    def __init__(self, *slots: Slot) -> None:
        self.ready: list[OpenRequest] = []
        self.failed: list[tuple[OpenRequest, FinishReason, str, str]] = []
        self.slots: dict[str, Any] = {slot.name: slot for slot in slots}
        self.encodings = Encodings(self.slots, True, self.ready.append, self._fail)

    def _fail(self, entry: OpenRequest, *how: Any) -> None:
        self.failed.append((entry, *how))
        self.encodings.release(entry)

    def add(self, asked: Prompt) -> OpenRequest:
        request = Request("r", asked.token_ids, images=asked.images)
        entry = OpenRequest(request, OutputStream(["r"]), 0)
        assert self.encodings.needs(entry)
        self.encodings.add(entry)
        return entry

    def encode(self, slot: Slot, number: int = -1) -> None:
        notice = KVNotice(slot.submitted()[number], 0, [5], spent_s=0.5)
        self.encodings.on_message(cast(Any, slot), KVNotices([notice]))

    def down(self, slot: Slot) -> None:
        del self.slots[slot.name]
        self.encodings.worker_down(cast(Any, slot))


def test_an_image_is_encoded_once_and_held_until_its_last_request_is_released() -> None:
    slot = Slot("e0")
    front = Front(slot)
    one, two = front.add(prompt(1, 3, A, 2)), front.add(prompt(2, A, 4, A))
    assert len(slot.submitted()) == 1 and front.ready == []
    spent: list[Any] = []
    front.encodings.on_spent = lambda *what: spent.append(what)
    front.encode(slot)
    assert spent == [(slot, one, Cost(prefill_s=0.5))]  # who asked first pays
    assert set(front.ready) == {one, two}
    sent = one.resumed().images[0]
    assert (sent.offset, sent.image.data) == (4, b"")
    assert sent.image.features == FeatureBlocks("engine of e0", (5,))
    late = front.add(prompt(3, A))
    assert late in front.ready and len(slot.submitted()) == 1
    for entry in (one, late):
        front.encodings.release(entry)
    assert slot.aborted() == []
    front.encodings.release(two)
    assert slot.aborted() == slot.submitted()


def test_the_same_image_goes_to_the_same_encoder_and_images_are_spread() -> None:
    slots = [Slot(f"e{i}", 1000) for i in range(3)]
    front = Front(*slots)
    images = [image(seed, (1, 4, 4)) for seed in range(60)]
    for each in images:
        front.encodings.release(front.add(prompt(1, each)))
    first = [len(slot.submitted()) for slot in slots]
    assert min(first) > 8
    for each in images:
        front.add(prompt(1, each))
    assert [len(slot.submitted()) for slot in slots] == [2 * count for count in first]


def test_a_request_has_room_for_all_its_images_or_waits_in_turn() -> None:
    slot = Slot("e0", num_blocks=2)
    front = Front(slot)
    first, second, third = (front.add(prompt(1, *parts)) for parts in ((A,), (B, C), (A,)))
    assert len(slot.submitted()) == 1  # two more would need three blocks, and none overtakes
    front.encodings.release(first)
    assert len(slot.submitted()) == 3 and third not in front.ready
    front.encode(slot, 1)
    assert front.ready == []
    front.encode(slot, 2)
    assert front.ready == [second]
    front.encodings.release(second)
    assert len(slot.submitted()) == 4
    too_many = front.add(prompt(1, A, B, C))
    front.encodings.release(third)
    ((entry, reason, message, why),) = front.failed
    assert (entry, reason, why) == (too_many, FinishReason.REJECT, "no_capacity")
    assert "3 blocks" in message


def test_what_a_dead_encoder_had_is_encoded_by_another() -> None:
    slots = [Slot("e0"), Slot("e1")]
    front = Front(*slots)
    images = [image(seed, (1, 4, 4)) for seed in range(8)]
    waits, runs = front.add(prompt(1, *images)), front.add(prompt(2, images[0]))
    (owner,) = (s for s in slots if any(r.images[0].image is images[0] for r in _requests(s)))
    (other,) = (s for s in slots if s is not owner)
    front.encode(owner, 0)
    assert front.ready == [runs] and front.encodings.is_at(waits, cast(Any, owner))
    num_moved, num_kept = len(owner.submitted()), len(other.submitted())
    front.down(owner)
    # Who waits is sent on by the pool; who runs has its features, or is sent on later.
    assert not front.encodings.is_at(waits, cast(Any, owner))
    assert front.encodings.needs(waits) and front.encodings.needs(runs)
    front.encodings.add(waits)
    assert len(other.submitted()) == num_kept + num_moved
    for number in range(num_kept + num_moved):
        front.encode(other, number)
    assert front.ready == [runs, waits]


def _requests(slot: Slot) -> list[Request]:
    return [r for m in slot.sent for r in m.requests]


def test_requests_wait_for_an_encoder_and_end_when_none_will_come() -> None:
    slot = Slot("e0")
    front = Front(slot)
    front.down(slot)
    entry = front.add(prompt(1, A))
    assert front.ready == front.failed == []
    front.slots["e0"] = slot
    front.encodings.worker_ready(cast(Any, slot))
    assert len(slot.submitted()) == 1
    front.down(slot)
    front.encodings.add(entry)
    front.encodings.give_up("no encoder")
    front.add(prompt(1, B))
    assert [(reason, why) for _, reason, _, why in front.failed] == [
        (FinishReason.ERROR, "worker_died")
    ] * 2


def test_an_image_that_is_not_encoded_ends_all_its_requests() -> None:
    slot = Slot("e0")
    front = Front(slot)
    entries = [front.add(prompt(1, A)), front.add(prompt(2, A, B))]
    name = slot.submitted()[0]
    output = RequestOutput(name, [], finish_reason=FinishReason.ERROR, stop_reason="encoder")
    front.encodings.on_message(cast(Any, slot), Outputs([output, output]))
    assert {failed[0] for failed in front.failed} == set(entries)
    assert sorted(slot.aborted()) == sorted(slot.submitted())
